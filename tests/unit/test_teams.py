"""Which ranks talk among themselves, as arithmetic."""

import pytest

from ds_lightning.errors import ConfigError
from ds_lightning.teams import Grouping, Teams


def teams(rank, nodes, **grouping):
    found = Grouping(**grouping)
    return Teams.of(rank, found.nodes(nodes), found.partitions(nodes), {})


def kinds(nodes, **grouping):
    return Grouping(**grouping).partitions(nodes)


def test_without_a_configuration_all_ranks_are_one_team():
    found = teams(2, [0, 0, 1, 1])
    assert found.everyone == found.shards
    assert (found.shards.ranks, found.shards.place) == ((0, 1, 2, 3), 2)
    assert (found.replicas.ranks, found.replicas.place) == ((2,), 0)
    assert found.secondary is found.inside is found.across is None
    assert found.beyond(found.shards) == 2


def test_teams_of_every_kind():
    found = kinds([0] * 4 + [1] * 4, shard_size=4, levels=True, node_size=2)
    assert found["shards"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found["replicas"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["inside"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found["across"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert kinds([0] * 8, secondary_size=4)["secondary"] == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_is_in_one_team_of_each_kind_at_its_place(rank):
    found = teams(rank, [0, 0, 1, 1, 2, 2, 3, 3], shard_size=4, levels=True)
    for team in (found.everyone, found.shards, found.replicas, found.inside, found.across):
        assert team.ranks[team.place] == rank
    assert found.beyond(found.inside) == 0
    assert found.beyond(found.across) == found.across.size - 1
    assert found.replicas.place == rank // 4


@pytest.mark.parametrize(
    "nodes",
    [
        [0, 0, 0, 0],  # one node
        [0, 1, 2, 3],  # nothing to do inside
        [0, 0, 0, 1],  # of different sizes
        [0, 1, 0, 1],  # not consecutive
        [0, 0, 1, 1, 0, 0],
    ],
)
def test_two_steps_need_equal_nodes_of_consecutive_ranks(nodes):
    assert "inside" not in kinds(nodes, levels=True)


def test_sizes_beyond_the_number_of_ranks_take_in_all_of_them():
    found = kinds([0, 0, 1, 1], shard_size=8, secondary_size=8, node_size=8)
    assert found["shards"] == found["everyone"]
    assert "secondary" not in found


@pytest.mark.parametrize(
    ("key", "grouping"),
    [
        ("mics_shard_size=4", {"shard_size": 4}),
        ("zero_hpz_partition_size=4", {"secondary_size": 4}),
        ("node_size=4", {"node_size": 4}),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_an_error_in_words(key, grouping):
    with pytest.raises(ConfigError, match=rf"{key} does not divide the number of ranks, 6: .* one of 1, 2, 3, 6"):
        kinds([0] * 6, **grouping)
