"""The parity matrix: every stage against DistributedDataParallel on the same batches (design.md, 7 and 8)."""

from itertools import combinations, product

import pytest
import torch

from ds_lightning.zero.reduce import ReduceOptions
from tests.dist import models
from tests.dist.harness import Recipe, check_against, difference, same_bits, train
from tests.pool import run_ranks

AXES = {
    "world": (1, 2, 3),
    "precision": ("fp32", "bf16", "fp64"),
    "accumulate": (1, 3),
    "clip": (None, "norm", "value"),
    "optimizer": ("sgd", "adamw", "fused"),
}
MATRIX = list(product(*AXES.values()))

BOUNDS = {"fp32": 1e-6, "bf16": 1e-6, "fp64": 1e-13}


def pairwise(rows):
    """The fewest rows, greedily, in which every value of every axis meets every value of every other."""
    pairs = list(combinations(range(len(rows[0])), 2))
    missing = {(i, j, row[i], row[j]) for row in rows for i, j in pairs}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: sum((i, j, row[i], row[j]) in missing for i, j in pairs))
        missing -= {(i, j, best[i], best[j]) for i, j in pairs}
        chosen.append(best)
    return chosen


def name_of(row):
    return "-".join(str(value) for value in row)


THIN = pairwise(MATRIX)
REST = [row for row in MATRIX if row not in THIN]


def check_row(precision, accumulate, clip, optimizer, threshold=0):
    recipe = Recipe(accumulate=accumulate, clip=clip, precision=precision, optimizer=optimizer)
    rest = {"threshold": threshold, "bound": BOUNDS[precision]}
    if precision == "bf16" and accumulate > 1:  # the sum of a window is fp32, and travels so on request
        rest["reduce"] = ReduceOptions(dtype=torch.float32)
    # DDP under autocast rounds elsewhere (a tied embedding is looked up in fp32): there the reference is by hand.
    reference = train(models.Everything, "alone" if precision == "bf16" else "ddp", recipe)
    found = check_against(reference, models.Everything, recipe, **rest)
    for stage, result in found.items():
        # Sharded gradients are reduced in each micro-batch, so there the sums are taken in another order.
        twin = found[0 if accumulate == 1 else stage // 2 * 2]
        assert same_bits(result, twin), f"stage {stage} is not bitwise equal to its twin"
        for name, buffer in reference.buffers.items() if precision != "bf16" else ():
            torch.testing.assert_close(result.buffers[name], buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", THIN, ids=name_of)
def test_every_stage_trains_as_ddp_does(row):
    world, *rest = row
    run_ranks(check_row, world, *rest)


@pytest.mark.full
@pytest.mark.parametrize("row", REST, ids=name_of)
def test_every_stage_trains_as_ddp_does_in_the_rest_of_the_matrix(row):
    world, *rest = row
    run_ranks(check_row, world, *rest)


def test_pairwise_rows_cover_all_pairs():
    covered = {(i, j, row[i], row[j]) for row in THIN for i, j in combinations(range(len(AXES)), 2)}
    assert covered == {(i, j, row[i], row[j]) for row in MATRIX for i, j in combinations(range(len(AXES)), 2)}
    assert len(THIN) < 15


@pytest.mark.parametrize("threshold", [40, 100_000])  # some parameters, and all: the default
def test_resident_parameters_do_not_change_a_result(threshold):
    run_ranks(check_row, 2, "fp32", 1, "norm", "adamw", threshold=threshold)


def check_bf16_linear(accumulate):
    recipe = Recipe(precision="bf16", accumulate=accumulate, optimizer="adamw", clip="norm")
    reference = train(models.Feed, "ddp", recipe)
    exact = ReduceOptions(dtype=torch.float32)
    check_against(reference, models.Feed, recipe, reduce=exact)
    if accumulate == 1:  # each gradient is a bf16 number already: sending it so loses nothing
        check_against(reference, models.Feed, recipe)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_bf16_mixed_with_fp32_communication_equals_ddp_under_autocast(accumulate):
    run_ranks(check_bf16_linear, 2, accumulate)


def check_alone(optimizer):
    """DDP itself against the reference that has no communication: the references are independent of each other."""
    recipe = Recipe(optimizer=optimizer, accumulate=2, clip="norm")
    wanted = train(models.Toy, "alone", recipe)
    assert difference(train(models.Toy, "ddp", recipe), wanted) <= 1e-6
    check_against(wanted, models.Toy, recipe)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ddp_and_one_process_with_all_batches_agree_with_every_stage(optimizer):
    run_ranks(check_alone, 3, optimizer)
