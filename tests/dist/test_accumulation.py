"""`data_types.grad_accum_dtype`: the dtype in which gradients add up and wait for the step."""

import pytest
import torch

import ds_lightning as dsl
from ds_lightning.zero.reduce import ReduceOptions
from tests.dist.harness import STAGES, Recipe, difference, make_engine, same_bits, train
from tests.dist.models import Everything, Toy
from tests.dist.test_offload import policy
from tests.pool import run_ranks

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class Rounded(torch.optim.SGD):
    """Plain torch, after gradients were rounded once."""

    dtype = torch.bfloat16

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(self.dtype).to(parameter.dtype)
        return super().step(closure)


class RoundedHalf(Rounded):
    dtype = torch.float16


REFERENCES = {"bf16": Rounded, "fp16": RoundedHalf, "fp32": torch.optim.SGD}


def combinations(name, precision):
    reference = Recipe(precision=precision, optimizer=lambda groups: REFERENCES[name](groups, lr=0.05, momentum=0.9))
    wanted = train(Everything, "alone", reference)
    options = ReduceOptions(accumulate=DTYPES[name])
    found = [train(Everything, stage, Recipe(precision=precision, optimizer=sgd), reduce=options) for stage in STAGES]
    for stage, trained in enumerate(found):
        assert same_bits(trained, found[0]), stage
        assert difference(trained, wanted) < 1e-6, stage


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_rounded_where_they_are_kept_and_nowhere_else(name, precision):
    run_ranks(combinations, 2, name, precision)


def windows(name):
    options = ReduceOptions(accumulate=DTYPES[name])
    recipe = Recipe(accumulate=3, precision="bf16", optimizer=sgd, clip="norm")
    found = [train(Everything, stage, recipe, reduce=options) for stage in STAGES]
    assert same_bits(found[0], found[1])
    assert same_bits(found[2], found[3])
    plain = train(Everything, "alone", recipe)
    bound = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 2e-3}[name]  # the rounding of three additions
    assert difference(found[0], plain) < bound
    assert difference(found[2], plain) < bound


@pytest.mark.parametrize("name", DTYPES)
def test_windows_add_up_in_the_dtype(name):
    run_ranks(windows, 2, name)


def kept(stage):
    module = Toy()
    optimizer = dsl.optim.AdamW(module.parameters())
    engine = make_engine(module, [optimizer], stage, reduce=ReduceOptions(accumulate=torch.bfloat16))
    with engine.passes.step_scope():
        loss = module(module.inputs(torch.Generator().manual_seed(0)))
    with engine.passes.backward_scope():
        loss.backward()
    gradients = engine.reducer.units.values()
    assert {g.grad.dtype for g in gradients if g.grad is not None} == {torch.bfloat16}
    found = [dsl.full_grad(p) for p in module.parameters()]
    assert all(value is None or value.dtype == torch.float32 for value in found)
    held = engine.reducer.state_nbytes
    assert held == sum(2 * g.grad.numel() for g in gradients if g.grad is not None)


@pytest.mark.parametrize("stage", STAGES)
def test_they_take_the_memory_of_the_dtype(stage):
    run_ranks(kept, 2, stage)


def native():
    options = ReduceOptions(accumulate=torch.bfloat16)
    for stage in STAGES:
        recipes = [
            Recipe(clip="norm", optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01)),
            Recipe(clip="norm", optimizer=lambda groups: dsl.optim.AdamW(groups, lr=0.01)),
        ]
        theirs, ours = (train(Everything, stage, recipe, reduce=options) for recipe in recipes)
        assert difference(ours, theirs) < 1e-6, stage
        if stage:
            host = train(Everything, stage, recipes[1], reduce=options, offload=policy(".", "cpu"))
            assert same_bits(host, ours), stage


def test_native_steps_take_them_as_they_are():
    run_ranks(native, 2)
