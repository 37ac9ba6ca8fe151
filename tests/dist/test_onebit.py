"""The 1-bit optimizers under the engine against their published equations, in float64, all ranks in one process."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import ds_lightning as dsl
from ds_lightning.zero.reduce import ReduceOptions
from tests.dist import onebit_reference as reference
from tests.dist.harness import full_values, make_engine
from tests.pool import run_ranks

STEPS = 50
PHASES = {
    "OneBitAdam": {"freeze_step": 12, "lr": 3e-3},
    "ZeroOneAdam": {
        "var_freeze_step": 20,
        "var_update_scaler": 3,
        "local_step_scaler": 5,
        "local_step_clipper": 4,
        "lr": 3e-3,
    },
    "OneBitLamb": {"freeze_step": 12, "lr": 0.02},
}
KINDS = {"OneBitAdam": reference.Adam1, "ZeroOneAdam": reference.Adam01, "OneBitLamb": reference.Lamb1}


def cells_of(engine):
    """Which elements of each parameter the ranks serve."""
    found = {}
    for unit, slot in ((b.unit, s) for b in engine.units.values() for s in b.unit.slots):
        borders = [(r * unit.chunk, (r + 1) * unit.chunk) for r in range(unit.world_size)]
        cut = [(max(a, slot.start) - slot.start, min(b, slot.stop) - slot.start) for a, b in borders]
        found[slot.name] = [(a, b) for a, b in cut if b > a]
    return found


def make(kind, dtype, stage=0, threshold=0, precision="fp32", **options):
    module = reference.Vectors(dtype)
    optimizer = getattr(dsl.optim, kind)(module.groups(), **{**PHASES[kind], **options})
    return module, optimizer, make_engine(
        module,
        [optimizer],
        stage,
        threshold=threshold,
        precision=precision,
        # Sums of windows would be rounded to travel in 16 bits.
        reduce=ReduceOptions(dtype=torch.float32 if precision == "bf16" else None),
    )


def one_step(engine, optimizer, step, accumulate=1):
    module, rank = engine.module, dist.get_rank()
    optimizer.zero_grad()
    for micro in range(accumulate):
        with nullcontext() if micro == accumulate - 1 else engine.passes.no_sync():
            with engine.passes.step_scope():
                loss = module(rank, step, micro)
            with engine.passes.backward_scope():
                loss.backward()
    optimizer.step()


def gradients_of(module, step, accumulate=1):
    """What each rank has after a window."""
    found = []
    for rank in range(dist.get_world_size()):
        total = {}
        for micro in range(accumulate):
            for name, g in module.gradients(rank, step, micro).items():
                total[name] = total.get(name, 0) + g.double()
        found.append(total)
    return found


def compare(engine, wanted, bound):
    """Each parameter in fp64; in fp32, where one may pass through zero, all of them together."""
    values = full_values(engine)
    rank = dist.get_rank()
    everything = torch.cat([value.flatten() for value in values.values()])
    pairs = {name: (value, wanted.p[name][rank]) for name, value in values.items() if value.numel()}
    if everything.dtype == torch.float32:
        pairs = {"all": (everything, torch.cat([wanted.p[name][rank] for name in values]))}
    for name, (value, right) in pairs.items():
        error = (value.double().flatten() - right).norm() / right.norm()
        assert error <= bound, f"step {wanted.step}, {name}: {error}"
    for buffers in engine.units.values():
        for start, stop in buffers.unit.holes():
            assert not buffers.full[start:stop].any(), "a hole is not zero"


def check_equations(kind, dtype, stage=0, threshold=0, accumulate=1, steps=STEPS, precision="fp32", **options):
    module, optimizer, engine = make(kind, dtype, stage, threshold, precision, **options)
    twin = reference.Vectors(dtype)
    wanted = KINDS[kind](twin, dist.get_world_size(), cells_of(engine), {**PHASES[kind], **options})
    bound = 1e-12 if dtype == torch.float64 else 5e-7
    for step in range(steps):
        one_step(engine, optimizer, step, accumulate)
        wanted.run(gradients_of(twin, step, accumulate))
        compare(engine, wanted, bound)
        if kind == "OneBitLamb":
            order = [n for g in module.groups() for p in g["params"] for n, q in module.named_parameters() if p is q]
            mine = torch.tensor(optimizer.get_lamb_coeffs())
            torch.testing.assert_close(mine, torch.tensor([wanted.used[n] for n in order if n in wanted.used]))
    engine.settle()
    mine = torch.cat([v.double().flatten() for v in full_values(engine).values()])
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    assert all(torch.equal(ranks[0], other) for other in ranks), "ranks differ"
    assert optimizer.steps == steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_step_is_the_published_one(kind, world):
    run_ranks(check_equations, world, kind, torch.float64)


@pytest.mark.parametrize("world", [2, 3])
def test_onebit_adam_at_stage_1(world):
    run_ranks(check_equations, world, "OneBitAdam", torch.float64, stage=1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_in_fp32_with_windows_and_merged_units(kind):
    run_ranks(check_equations, 2, kind, torch.float32, threshold=100_000, accumulate=2)


@pytest.mark.parametrize("kind", KINDS)
def test_bias_correction_and_eps_inside_the_root_act(kind):
    run_ranks(check_equations, 2, kind, torch.float64, bias_correction=True, eps_inside_sqrt=True, steps=30)


@pytest.mark.parametrize(("kind", "stage"), [("OneBitAdam", 1), ("ZeroOneAdam", 0), ("OneBitLamb", 0)])
def test_every_step_with_parameters_that_compute_in_bf16(kind, stage):
    run_ranks(check_equations, 2, kind, torch.float32, stage=stage, precision="bf16", accumulate=2)
