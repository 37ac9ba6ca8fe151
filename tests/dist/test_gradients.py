"""Gradients: what is reduced, when, in which dtype, and what their norm is."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_lightning.optim import clip as clipping
from ds_lightning.optim.gradients import ReducedGradients
from ds_lightning.zero.reduce import ReduceOptions
from tests.dist import models
from tests.dist.harness import (
    STAGES,
    Recipe,
    check_against,
    difference,
    forward_backward,
    full_values,
    late,
    make_engine,
    same_bits,
    train,
)
from tests.pool import run_ranks


def check_late(name, stage, rank):
    """Buffers are used again while slow ranks still read or fill them, unless somebody waits."""
    make = getattr(models, name)
    recipe = Recipe(steps=2, optimizer="adamw", clip="norm")
    wanted = train(make, "alone", recipe)
    prompt = train(make, stage, recipe)
    assert difference(prompt, wanted) <= 1e-6
    for overlap in (True, False):
        found = train(
            make, stage, recipe, prepare=partial(late, rank=rank), reduce=ReduceOptions(overlap=overlap, piece=256)
        )
        assert same_bits(found, prompt), f"overlap_comm={overlap}"


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_that_complete_late_change_nothing(stage):
    run_ranks(check_late, 2, "Checkpointed", stage, stage % 2)


def test_a_slow_rank_among_three_changes_nothing():
    run_ranks(check_late, 3, "CalledTwice", 3, 1)


def check_buckets(pieces):
    recipe = Recipe(steps=2, accumulate=2)
    wanted = train(models.Blocks, "alone", recipe)
    usual = check_against(wanted, models.Blocks, recipe)
    for piece in pieces:
        for stage in STAGES:
            reduce = ReduceOptions(piece=piece)
            found = train(models.Blocks, stage, recipe, reduce=reduce, allgather_piece=piece)
            assert same_bits(found, usual[stage]), f"bucket size {piece}, stage {stage}"


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_bucket_sizes_around_the_sizes_of_parameters_change_nothing(world):
    run_ranks(check_buckets, world, (63, 64, 65, 7))


def test_a_bucket_of_one_element_changes_nothing():
    run_ranks(check_buckets, 2, (1,))


def check_communication_dtype(stage):
    """Every unit, larger or smaller than a bucket, travels in the dtype asked for and arrives in its own."""
    recipe = Recipe(steps=1)
    reduce = ReduceOptions(dtype=torch.bfloat16, piece=64)
    wanted = train(models.Blocks, "alone", recipe)
    start = train(models.Blocks, "alone", Recipe(steps=0))
    found = train(models.Blocks, stage, recipe, reduce=reduce)
    for name, value in wanted.values.items():
        moved, expected = found.values[name] - start.values[name], value - start.values[name]
        assert moved.dtype is torch.float32
        torch.testing.assert_close(
            moved, expected, rtol=2**-7, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert not torch.equal(moved, expected) or moved.norm() == 0, f"{name} was not sent in bf16"


@pytest.mark.parametrize("stage", STAGES)
def test_communication_data_type_holds_for_large_and_small_parameters(stage):
    run_ranks(check_communication_dtype, 2, stage)


# Norms and clipping --------------------------------------------------------------------------------------------------


class Slope(models.Model):
    """A loss of which the gradient is given."""

    def __init__(self, gradient):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, part.numel(), bias=False) for part in gradient.split(3))
        self.gradient = gradient

    def forward(self, x):
        weights = torch.cat([block(torch.ones(1)) for block in self.blocks])
        return (weights * self.gradient).sum()


def check_clip(stage):
    direction = torch.arange(1.0, 8.0)
    direction /= direction.norm()
    for norm, wanted in ((0.1, 0.1), (10.0, 10 / (10 + 1e-6)), (math.inf, math.nan), (math.nan, math.nan)):
        gradient = direction * norm
        if not math.isfinite(norm):
            gradient = torch.full((7,), 2.0)
            gradient[5] = norm
        module = Slope(gradient)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        engine = make_engine(module, [optimizer], stage)
        before = torch.cat([value.flatten() for value in full_values(engine).values()])
        forward_backward(engine, Recipe(), 0, 0)
        sharded = engine.optimizers[0]
        found = clipping.total_norm(sharded.reduced_gradients(owned=True), 2.0, engine.agreement)
        assert found == pytest.approx(norm, rel=1e-6, nan_ok=True)
        clipping.clip_by_norm(sharded.reduced_gradients(), 1.0, found)
        optimizer.step()
        moved = before - torch.cat([value.flatten() for value in full_values(engine).values()])
        assert float(moved.norm()) == pytest.approx(wanted, rel=1e-5, nan_ok=True)
        two = ReducedGradients([torch.tensor([1.0, float(norm)])])
        infinite = clipping.total_norm(two, math.inf, engine.agreement)
        assert infinite == pytest.approx(max(1.0, norm) if not math.isnan(norm) else norm, nan_ok=True)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_scales_down_only_and_a_norm_that_is_not_finite_stays_so(stage):
    run_ranks(check_clip, 2, stage)


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))


def global_batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(6, 7, generator=generator), torch.randn(6, 7, generator=generator)


def norms_at(stage):
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    engine = make_engine(module, [optimizer], stage)
    x, y = global_batch()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    norms = []
    for _ in range(3):
        with engine.passes.step_scope():
            loss = F.mse_loss(module(x[mine]), y[mine])
        optimizer.zero_grad()
        with engine.passes.backward_scope():
            loss.backward()
        sharded = engine.optimizers[0]
        norm = clipping.total_norm(sharded.reduced_gradients(owned=True), 2.0, engine.agreement)
        clipping.clip_by_norm(sharded.reduced_gradients(), 0.1, norm)
        optimizer.step()
        norms.append(norm)
    return norms, torch.cat([value.flatten() for value in full_values(engine).values()])


def all_norms():
    return [norms_at(stage) for stage in STAGES]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_norm_is_that_of_the_averaged_gradient_at_any_world_size(world):
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    x, y = global_batch()
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        wanted.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1).item())
        optimizer.step()
    weights = nn.utils.parameters_to_vector(module.parameters()).detach()
    assert min(wanted) > 0.1, "clipping must bind"
    for found in run_ranks(all_norms, world):
        for norms, values in found:
            assert norms == pytest.approx(wanted, rel=1e-6)
            assert float((values - weights).norm() / weights.norm()) <= 1e-6


def check_reported_norm(stage, precision):
    """The reported norm: before clipping, averaged, of this step, again and again."""
    wanted = train(models.Toy, "alone", Recipe(steps=1)).norms[0]
    torch.manual_seed(0)
    module = models.Toy()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine = make_engine(module, [optimizer], stage, precision=precision)
    assert engine.norms.last() is None
    recipe = Recipe(precision=precision)
    for _ in range(4):
        optimizer.zero_grad()
        forward_backward(engine, recipe, 0, 0)
        optimizer.step()
        norm = engine.norms.last()
        assert isinstance(norm, float)
        assert norm == pytest.approx(wanted, rel=1e-6 if precision == "fp32" else 2**-7)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_reported_at_every_stage_and_does_not_grow(stage, precision):
    run_ranks(check_reported_norm, 2, stage, precision)


# Accumulation --------------------------------------------------------------------------------------------------------


def check_bf16_accumulation():
    """Many small gradients: in bf16 their sum would stand still."""
    recipe = Recipe(precision="bf16", accumulate=8, steps=1)
    reduce = ReduceOptions(dtype=torch.float32)
    check_against(train(models.Feed, "alone", recipe), models.Feed, recipe, reduce=reduce)
    rounded = Recipe(precision="bf16", accumulate=8, steps=1)
    start = train(models.Feed, "alone", Recipe(steps=0)).flat()
    moved = train(models.Feed, "alone", rounded).flat() - start
    for stage in STAGES:  # without it sums or micro-batches travel in bf16: one rounding each
        found = train(models.Feed, stage, rounded).flat() - start
        assert float((found - moved).norm() / moved.norm()) < 2**-8


def test_bf16_gradients_accumulate_in_fp32_at_every_stage():
    run_ranks(check_bf16_accumulation, 2)


def check_windows(stage, optimizer):
    """Windows of many lengths, each of one engine, one after the other: the last may be short."""
    torch.manual_seed(0)
    module = models.Toy()
    plain = models.Toy()
    plain.load_state_dict(module.state_dict())
    build = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    ours, theirs = build[optimizer](module.parameters()), build[optimizer](plain.parameters())
    engine = make_engine(module, [ours], stage)
    net = nn.parallel.DistributedDataParallel(plain)
    for step, window in enumerate((1, 4, 2, 3)):
        ours.zero_grad()
        theirs.zero_grad()
        for micro in range(window):
            last = micro == window - 1
            x = module.inputs(torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank()))
            with engine.passes.no_sync() if not last else engine.passes.step_scope():
                with engine.passes.step_scope():
                    loss = module(x) / window
                with engine.passes.backward_scope():
                    loss.backward()
            if last:
                (net(x) / window).backward()
            else:
                with net.no_sync():
                    (net(x) / window).backward()
        ours.step()
        theirs.step()
    left = torch.cat([value.flatten() for value in full_values(engine).values()])
    right = nn.utils.parameters_to_vector(plain.parameters()).detach()
    assert float((left - right).norm() / right.norm()) <= 1e-6


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", STAGES)
def test_windows_of_any_length_train_as_ddp(stage, optimizer):
    run_ranks(check_windows, 2, stage, optimizer)


def check_step_alone(stage):
    module = models.Toy()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine = make_engine(module, [optimizer], stage)
    before = full_values(engine)
    optimizer.step()  # before any backward: nothing to do, as in torch
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in full_values(engine).items())
    assert not optimizer.state
    forward_backward(engine, Recipe(), 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    after = full_values(engine)
    optimizer.step()  # gradients are gone
    assert all(torch.equal(value, after[name]) for name, value in full_values(engine).items())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_gradients_does_nothing(stage):
    run_ranks(check_step_alone, 2, stage)


def check_step_twice(stage):
    """A second step without `zero_grad` uses the same gradients again, as in torch."""
    torch.manual_seed(0)
    module, recipe = models.Toy(), Recipe()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = make_engine(module, [optimizer], stage)
    start = full_values(engine)
    forward_backward(engine, recipe, 0, 0)
    optimizer.step()
    once = full_values(engine)
    optimizer.step()
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value - once[name], once[name] - start[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_two_steps_on_one_gradient_move_twice(stage):
    run_ranks(check_step_twice, 2, stage)


# Cost ----------------------------------------------------------------------------------------------------------------


class Deep(models.Toy):
    depth = 24


def check_calls(stage):
    torch.manual_seed(0)
    module = Deep()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine = make_engine(module, [optimizer], stage)
    for step in range(2):
        engine.ledger.clear()
        optimizer.zero_grad()
        forward_backward(engine, Recipe(), step, 0)
        optimizer.step()
    units = len(engine.units)
    numel = sum(buffers.unit.numel for buffers in engine.units.values())
    assert units <= Deep.depth + 1
    calls = {name: entry.calls for name, entry in engine.ledger.entries.items()}
    assert calls["reduce_scatter"] == units
    # Gather for the step (1, 2), twice for forward and backward (3), or of gradients (0); the root's unit serves both.
    assert calls["all_gather"] <= (units, units, units, 2 * units)[stage]
    world = dist.get_world_size()
    theory = numel * 4 * (world - 1) / world * (2, 2, 2, 3)[stage]
    assert engine.ledger.bytes_sent <= 1.02 * theory
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert numel <= 1.15 * parameters, "padding of tiny parameters"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_costs_one_collective_per_unit_and_the_bytes_of_the_theory(stage, world):
    run_ranks(check_calls, world, stage)
