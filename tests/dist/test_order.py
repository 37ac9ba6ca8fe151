"""Ranks that use different parameters start the same collectives in the same order, and so never wait for each other."""

import pytest
import torch.distributed as dist

from ds_lightning.teams import Grouping
from ds_lightning.zero.closings import Closings
from tests.dist import models
from tests.dist.harness import Recipe, difference, train
from tests.pool import run_ranks

NAMES = [
    "UnusedOnOneRank",
    "LastBlockUnusedOnOneRank",
    "UnusedInChangedOrder",
    "UnusedAndRecomputedTwice",
    "UsedInOneMicroBatch",
    "SometimesNothing",
    "LayerDrop",
    "Experts",
]
WAYS = ["scoped", "plain", "retain", "several", "manual"]


def check_order(name, recipe, stage=3, **rest):
    make, started, restore = getattr(models, name), {}, []

    def prepare(engine):
        cls = type(engine.collectives)
        for operation in ("all_gather", "reduce_scatter"):
            original = getattr(cls, operation)
            restore.append((cls, operation, original))

            def noted(self, full, what, *others, operation=operation, original=original):
                started.setdefault(tuple(self.team.ranks), []).append((operation, what))
                return original(self, full, what, *others)

            setattr(cls, operation, noted)

    wanted = train(make, "alone", recipe)
    try:
        got = train(make, stage, recipe, prepare=prepare, **rest)
    finally:
        for cls, operation, original in restore:
            setattr(cls, operation, original)
    assert difference(got, wanted) <= 1e-6
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, started)
    assert started
    for team, mine in started.items():
        assert len(team) == 1 or mine == everywhere[team[0]][team], f"not what rank {team[0]} started, or when"


QUICK = [
    (3, "UnusedOnOneRank", "retain"),
    (3, "UnusedOnOneRank", "manual"),
    (3, "UnusedInChangedOrder", "retain"),
    (3, "UnusedAndRecomputedTwice", "plain"),
    (3, "Experts", "retain"),
]
REST = [
    pytest.param(world, name, way, marks=pytest.mark.full)
    for world in (3, 4)
    for name in NAMES
    for way in WAYS
    if (world, name, way) not in QUICK
]


@pytest.mark.parametrize(("world", "name", "way"), [*QUICK, *REST])
def test_ranks_that_use_other_parameters_start_the_same_at_stage_3(world, name, way):
    run_ranks(check_order, world, name, Recipe(backward=way, steps=4), timeout=40)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_use_other_parameters_start_the_same_at_stage_2(name, way):
    run_ranks(check_order, 3, name, Recipe(backward=way, steps=4), 2, timeout=40)


GROUPINGS = {
    "hpZ": {"grouping": Grouping(secondary_size=2, node_size=2)},
    "MiCS": {"grouping": Grouping(shard_size=2, node_size=2)},
    "resident": {"threshold": 40},
}


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["scoped", "retain", "manual"])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_so_do_groups_of_ranks_and_resident_parameters(name, way, grouping):
    recipe = Recipe(backward=way, accumulate=2)
    run_ranks(check_order, 4, name, recipe, timeout=60, **GROUPINGS[grouping])


def test_what_was_closed_too_early_waits_for_the_next_closing():
    closings = Closings()
    assert closings.close([3], learnt=True) == [3]
    closings.again([3])
    closings.reset()
    assert closings.close([3], learnt=True) == ()
    assert closings.left == {3}
    assert closings.close([4], learnt=True) == [3, 4]
    closings.reset()
    assert not closings.left
    assert closings.close([4], learnt=True) == [4]


def test_units_in_no_scope_start_with_the_closing_that_came_after_them():
    closings = Closings()
    closings.found(9)
    closings.close([2, 3], learnt=False)
    closings.found(8)
    assert closings.anchors == {9: 3}
    closings.reset()
    assert closings.close([2, 3], learnt=True) == [2, 3, 9]
    closings.remove(3)
    assert closings.close([2], learnt=True) == [2]
