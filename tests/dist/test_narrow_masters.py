"""`bf16_master_weights_and_grads` and `bf16_optimizer_states`: stochastic rounding in the place of fp32 copies."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from ds_lightning.offload.host import HostMemory
from tests.dist.harness import Recipe, difference, full_values, make_engine, same_bits, train
from tests.dist.models import Everything
from tests.dist.test_offload import policy
from tests.pool import run_ranks

NARROW_STAGES = (1, 2, 3)
OPTIMIZERS = {
    "native": lambda groups: dsl.optim.AdamW(groups, lr=0.01),
    "torch": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
}


def stages_agree(name):
    recipe = Recipe(precision="bf16", optimizer=OPTIMIZERS[name], clip="norm")
    wide = train(Everything, 2, recipe)
    for states in (False, True):
        found = [train(Everything, s, recipe, narrow_masters=True, narrow_states=states) for s in NARROW_STAGES]
        assert all(same_bits(other, found[0]) for other in found[1:])
        assert difference(found[0], wide) < 4 * 2**-8  # at most one last digit of bf16 a step, and the first rounding


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_agree_bit_by_bit_and_stay_with_fp32_masters(name):
    run_ranks(stages_agree, 2, name)


def walk(stage, narrow, steps, resume=None):
    """Steps of 1e-4 from 1.0, where numbers of bf16 are 2**-7 (2**-8 below) apart."""
    module = nn.Linear(64, 64, bias=False)
    module.weight.data.fill_(1.0)
    optimizer = dsl.optim.SGD(module.parameters(), lr=1e-4)
    engine = make_engine(module, [optimizer], stage, precision="bf16", narrow_masters=narrow)
    if resume is not None:
        optimizer.load_state_dict(resume[0])
        for buffers in engine.units.values():
            buffers.write_master(buffers.start, resume[1]["weight"].flatten()[buffers.start : buffers.stop])
        for index in list(engine.units):
            for work in engine.residency.publish(index):
                work.wait()
    for step in range(steps):
        optimizer.zero_grad()
        with engine.passes.step_scope():
            generator = torch.Generator().manual_seed(step if resume is None else step + 20)
            noise = 0.75 + torch.rand(64, 64, generator=generator) / 2  # equal numbers would throw equal dice
            with torch.autocast("cpu", torch.bfloat16):
                loss = (module(torch.eye(64)) * noise).sum()
        with engine.passes.backward_scope():
            loss.backward()
        optimizer.step()
    state, values = optimizer.state_dict(), full_values(engine)
    held = engine.model_state_bytes()
    engine.dissolve()
    return state, values, held


def learns():
    wide = walk(2, False, 40)
    narrow = walk(2, True, 40)
    nearest = torch.ones(64, 64, dtype=torch.bfloat16)
    for _ in range(40):
        nearest -= 1e-4
    assert bool((nearest == 1).all())  # rounding to nearest stalls
    moved = 1 - narrow[1]["weight"].float().mean()
    assert narrow[1]["weight"].dtype == torch.bfloat16
    # A weight's standard deviation is 2**-8 * sqrt(40 * 1e-4 * 2**8) = 4e-3; gradients of bf16 have about 100 values
    # here, so that there are 100 different fates at least: five standard deviations of their mean.
    assert float(moved) == pytest.approx(1 - float(wide[1]["weight"].mean()), abs=2e-3)
    assert float(moved) > 1e-3
    # gathered parameters (2 bytes), masters and gradients: 4 / 2 and 4 / 2 with fp32, 0 and 2 / 2 without
    assert wide[2] == 4096 * (2 + 2 + 2)
    assert narrow[2] == 4096 * (2 + 1)


def test_small_steps_count_and_memory_is_what_it_says():
    run_ranks(learns, 2)


def resumes(stage):
    whole = walk(stage, True, 40)
    half = walk(stage, True, 20)
    state, values, _ = walk(stage, True, 20, resume=half)
    assert torch.equal(values["weight"], whole[1]["weight"])
    assert state["param_groups"][0]["rounded_steps"] == 40


@pytest.mark.parametrize("stage", NARROW_STAGES)
def test_a_run_that_resumes_throws_the_same_dice(stage):
    run_ranks(resumes, 2, stage)


def offloaded(folder):
    original = HostMemory.__init__

    def separate(self, device, pin):  # as for a GPU: values are copied to and fro
        original(self, device, pin)
        self.separate = True

    for name in ("native", "sgd"):
        recipe = Recipe(precision="bf16", optimizer=OPTIMIZERS[name], clip="norm", accumulate=2)
        for states, stage in ((False, 2), (True, 3)):
            wanted = train(Everything, stage, recipe, narrow_masters=True, narrow_states=states)
            kept = []
            for ratio, make in ((1.0, original), (0.5, original), (1.0, separate)):
                with mock.patch.object(HostMemory, "__init__", make):
                    found = train(
                        Everything,
                        stage,
                        recipe,
                        narrow_masters=True,
                        narrow_states=states,
                        offload=policy(folder, "cpu", "cpu" if stage == 3 else "none", ratio=ratio),
                        prepare=lambda engine: kept.extend(engine.units.values()),
                    )
                assert same_bits(found, wanted), (name, stage, ratio)
                assert found.norms == wanted.norms
            assert any(b.home is not None and b.home.steps_apart and b.narrow for b in kept)


def test_masters_in_host_memory_are_stepped_on_there_with_the_same_bits(tmp_path):
    run_ranks(offloaded, 2, str(tmp_path))


def host_bytes(folder):
    """Of a matrix of 4096 elements, half of which this rank has, with its parameters on the device."""
    found = []
    for narrow, states in ((False, False), (True, False), (True, True)):
        module = nn.Linear(64, 64, bias=False)
        optimizer = dsl.optim.AdamW(module.parameters(), lr=1e-3)
        rest = {"narrow_masters": narrow, "narrow_states": states, "offload": policy(folder, "cpu")}
        engine = make_engine(module, [optimizer], 2, precision="bf16", **rest)
        with engine.passes.step_scope(), torch.autocast("cpu", torch.bfloat16):
            loss = module(torch.eye(64)).sum()
        with engine.passes.backward_scope():
            loss.backward()
        optimizer.step()
        (sharded,) = engine.optimizers
        (buffers,) = engine.units.values()
        (gradients,) = engine.reducer.units.values()
        found.append((buffers.master.itemsize, gradients.grad.itemsize, sharded.state_nbytes - 4))
        engine.dissolve()
    assert found == [(4, 4, 2048 * 8), (2, 2, 2048 * 8), (2, 2, 2048 * 4)]


def test_what_is_offloaded_has_16_bits(tmp_path):
    run_ranks(host_bytes, 2, str(tmp_path))


def refused(folder):
    module = nn.Linear(4, 4, bias=False)
    for optimizer in (dsl.optim.Lamb(module.parameters()), dsl.optim.Muon([{"params": [module.weight], "use_muon": True}])):
        with pytest.raises(ConfigError, match=f"{type(optimizer).__name__} looks at whole tensors.*master_weights"):
            make_engine(module, [optimizer], 2, precision="bf16", narrow_masters=True)
    optimizer = dsl.optim.AdamW(module.parameters())
    with pytest.raises(ConfigError, match="does not go with offload_optimizer.device: nvme"):
        make_engine(module, [optimizer], 2, precision="bf16", narrow_masters=True, offload=policy(folder, "nvme"))
    assert not list(Path(folder).iterdir())


def test_what_does_not_go_with_masters_of_16_bits_is_refused_in_words(tmp_path):
    run_ranks(refused, 2, str(tmp_path))
