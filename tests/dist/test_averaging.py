"""`prescale_gradients`, `gradient_predivide_factor` and `gradient_allreduce_op` against closed formulas."""

import pytest
import torch
from torch import nn

import ds_lightning as dsl
from ds_lightning.comm.averaging import Averaging
from ds_lightning.zero.reduce import ReduceOptions
from tests.dist.harness import STAGES, Recipe, difference, make_engine, same_bits, train
from tests.dist.models import Everything
from tests.pool import run_ranks

RECIPE = Recipe(accumulate=2, backward="several", optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01))


def test_the_factors_are_those_of_the_formulas():
    for world in (1, 2, 3):
        for averaging in (Averaging(), Averaging(predivide=3.0), Averaging(prescale=True, predivide=3.0)):
            assert averaging.before(world) * averaging.behind(world) == pytest.approx(1 / world)
        assert Averaging("sum", prescale=True, predivide=3.0).before(world) == 1
        assert Averaging("sum", prescale=True, predivide=3.0).behind(world) == 1
    assert Averaging(predivide=4.0).before(2) == 0.25
    assert Averaging(prescale=True).behind(7) == 1


def means(world):
    for stage in STAGES:
        plain = train(Everything, stage, RECIPE)
        for averaging in (Averaging(predivide=4.0), Averaging(prescale=True), Averaging(predivide=3.0)):
            found = train(Everything, stage, RECIPE, reduce=ReduceOptions(averaging=averaging))
            exact = averaging.predivide == 4.0 or (averaging.prescale and world != 3)  # powers of two
            assert same_bits(found, plain) if exact else difference(found, plain) < 2e-7, (stage, averaging)


@pytest.mark.parametrize("world", [2, 3])
def test_the_mean_does_not_depend_on_when_it_is_divided(world):
    run_ranks(means, world, world)


def faster(groups):
    """SGD with rates that are `world` times as high."""
    world = torch.distributed.get_world_size()
    optimizer = torch.optim.SGD(groups, lr=0.01)
    for group in optimizer.param_groups:
        group["lr"] *= world
        group["weight_decay"] = 0.0
    return optimizer


def slow(groups):
    optimizer = torch.optim.SGD(groups, lr=0.01)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    return optimizer


def sums():
    recipe = Recipe(accumulate=2, backward="several", optimizer=slow)
    wanted = train(Everything, "alone", Recipe(accumulate=2, backward="several", optimizer=faster))
    for stage in STAGES:
        found = train(Everything, stage, recipe, reduce=ReduceOptions(averaging=Averaging("sum")))
        assert difference(found, wanted) < 1e-6, stage


@pytest.mark.parametrize("world", [2, 3])
def test_a_sum_is_as_many_means_as_there_are_ranks(world):
    run_ranks(sums, world)


def large_and_small(stage):
    """In fp16, 1e5 is infinite and 1e-8 is zero."""
    found = {}
    for predivide, size in ((1.0, 1e5), (4.0, 1e5), (1.0, 1e-8), (1 / 4096, 1e-8)):
        module = nn.Linear(8, 8, bias=False)
        module.weight.data.zero_()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        reduce = ReduceOptions(dtype=torch.float16, averaging=Averaging(predivide=predivide))
        engine = make_engine(module, [optimizer], stage, reduce=reduce)
        with engine.passes.step_scope():
            loss = (module(torch.ones(1, 8)) * size).sum()
        with engine.passes.backward_scope():
            loss.backward()
        found[predivide, size] = float(dsl.full_grad(module.weight)[0, 0])
        engine.dissolve()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_the_factor_keeps_fp16_gradients_within_range(stage):
    for found in run_ranks(large_and_small, 2, stage):
        assert found[1.0, 1e5] == float("inf")
        assert found[4.0, 1e5] == pytest.approx(1e5, rel=1e-3)
        assert found[1.0, 1e-8] == 0
        assert found[1 / 4096, 1e-8] == pytest.approx(1e-8, rel=1e-3)
