"""AdamW with moments of 8 bits under a Trainer: memory, stages, precisions, checkpoints."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import ds_lightning as dsl
from tests.lightning import common
from tests.lightning.common import Net, fit, make_trainer, weights, zero
from tests.lightning.test_configuration import WithoutOptimizer, message_of
from tests.lightning.test_schedulers import LateGroup
from tests.pool import run_ranks

ADAM = {"type": "AdamW8bit", "params": {"lr": 0.01, "weight_decay": 0.1, "block_size": 8}}


def check_stages(precision: str) -> None:
    found = []
    for stage in common.STAGES:
        module = WithoutOptimizer()
        trainer = fit(module, zero(stage, {"optimizer": ADAM}), precision=precision, gradient_clip_val=0.5)
        assert type(trainer.optimizers[0]) is dsl.optim.AdamW8bit
        found.append(weights(module))
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in other)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_all_stages_train_to_the_same_bits(precision):
    run_ranks(check_stages, 2, precision)


def bytes_per_element(kind: str) -> float:
    module = WithoutOptimizer(width=128)
    trainer = fit(module, zero(1, {"optimizer": {"type": kind, "params": {"lr": 0.01}}}), max_steps=1)
    used: int = trainer.strategy.model_state_bytes()
    without: int = used - trainer.strategy.engine.optimizers[0].state_nbytes
    elements = sum(run.stop - run.start for run in trainer.strategy.engine.optimizers[0].runs)
    return (used - without) / elements


def test_states_take_a_quarter_of_those_of_32_bits():
    (ours,) = run_ranks(bytes_per_element, 1, "AdamW8bit")
    (theirs,) = run_ranks(bytes_per_element, 1, "AdamW")
    assert 2.03 < ours < 2.06
    assert theirs == pytest.approx(8.0, rel=1e-3)


def resume(path: str, kind: Any, **options: Any) -> Any:
    module = WithoutOptimizer()
    trainer = make_trainer(zero(kind, {"optimizer": ADAM}, **options), max_epochs=2)
    trainer.fit(module, common.data(), ckpt_path=path)
    return weights(module)


def check_resuming(folder: str, checkpoint: str) -> None:
    whole = WithoutOptimizer()
    fit(whole, zero(2, {"optimizer": ADAM}), max_epochs=2)
    path = f"{folder}/{checkpoint}.ckpt"
    fit(WithoutOptimizer(), zero(3, {"optimizer": ADAM}, checkpoint=checkpoint)).save_checkpoint(path)
    expected = weights(whole)
    for stage in (3, 0):
        found = resume(path, stage, checkpoint=checkpoint)
        assert all(torch.equal(found[name], expected[name]) for name in expected), stage


@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_a_run_that_resumes_at_any_stage_goes_on_with_the_same_bits(checkpoint, tmp_path):
    run_ranks(check_resuming, 2, str(tmp_path), checkpoint)


def check_other_world(path: str) -> None:
    before = weights(WithoutOptimizer())
    assert common.distance(resume(path, 1), before) > 1e-3


def test_a_checkpoint_is_that_of_torch_and_loads_on_other_numbers_of_ranks(tmp_path):
    run_ranks(check_resuming, 2, str(tmp_path), "full")
    path = f"{tmp_path}/full.ckpt"
    run_ranks(check_other_world, 3, path)
    (state,) = torch.load(path, weights_only=True)["optimizer_states"]
    module = Net()
    for cls in (torch.optim.AdamW, dsl.optim.AdamW):
        plain = cls(module.parameters())
        plain.load_state_dict(copy.deepcopy(state))
        for parameter in module.parameters():
            entry = plain.state[parameter]
            assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == parameter.shape
            assert entry["exp_avg"].dtype == torch.float32
            assert entry["step"] == 5
            parameter.grad = torch.ones_like(parameter)
        plain.step()


def check_late_group() -> None:
    """Units are laid out anew while there are states."""

    def all_but_gain(module: Any) -> Any:
        parameters = [p for name, p in module.named_parameters() if name != "gain"]
        return dsl.optim.AdamW8bit(parameters, lr=0.01, block_size=8)

    found = []
    for stage in common.STAGES:
        module = Net(all_but_gain)
        fit(module, zero(stage), callbacks=[LateGroup()], max_epochs=3)
        found.append(weights(module))
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in other)
    assert found[0]["gain"] != 1.5


def test_a_group_that_is_added_during_training_trains_to_the_same_bits_at_all_stages():
    run_ranks(check_late_group, 2)


def check_from_torch(folder: str) -> None:
    path = f"{folder}/fp32.ckpt"
    fit(Net(common.adamw), "ddp").save_checkpoint(path)
    own = functools.partial(dsl.optim.AdamW8bit, lr=0.01, weight_decay=0.1)
    module = Net(lambda net: own(net.parameters()))
    trainer = make_trainer(zero(2), max_epochs=2)
    trainer.fit(module, common.data(), ckpt_path=path)
    expected = Net(common.adamw)
    fit(expected, "ddp", max_epochs=2)
    assert common.distance(weights(module), weights(expected)) < 0.01


def test_a_run_of_torch_goes_on_with_8_bits(tmp_path):
    run_ranks(check_from_torch, 2, str(tmp_path))


def test_nvme_is_refused_before_anything_is_made(tmp_path):
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    config = {"optimizer": ADAM, "zero_optimization": {"stage": 2, **offload}}
    (found,) = run_ranks(message_of, 1, config, None, WithoutOptimizer)
    assert "offload_optimizer.device: nvme does not hold the encoded states of AdamW8bit; use cpu" in found
