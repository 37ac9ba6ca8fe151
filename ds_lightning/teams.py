"""Which ranks talk among themselves: shard groups, replicas, nodes. Arithmetic; no process groups are made here.

[Note: two levels] Links inside a node are many times faster than those between nodes. What is sent in two steps, across
nodes between ranks with the same place in theirs and inside nodes among neighbours, crosses nodes once where sending to
everybody crosses them once for each rank of a node. That needs nodes with the same number of ranks, and consecutive
ranks in each, as launchers give them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ds_lightning.errors import ConfigError

Partition = tuple[tuple[int, ...], ...]
"""All ranks, each in one of several teams."""


@dataclass(frozen=True, slots=True)
class Team:
    """Some ranks that communicate among themselves, seen from one of them.

    Attributes:
        ranks: global ranks, in order.
        place: where this rank stands among them.
        group: their process group, where the backend needs one; None where pairs talk.
    """

    ranks: tuple[int, ...] = (0,)
    place: int = 0
    group: Any = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Grouping:
    """How the configuration divides the ranks.

    Attributes:
        node_size: consecutive ranks that share a node; None asks the machines.
        shard_size: ranks over which one copy of the model is cut (MiCS); None is all.
        secondary_size: consecutive ranks that hold a second copy of gathered weights (hpZ); 1 is none.
        levels: whether something is sent in two steps, see [Note: two levels].
    """

    node_size: int | None = None
    shard_size: int | None = None
    secondary_size: int = 1
    levels: bool = False

    def partitions(self, nodes: Sequence[int]) -> dict[str, Partition]:
        """The teams of each kind; kinds that are not wanted, or not possible, are missing.

        Args:
            nodes: number of the node of each rank, where `node_size` does not say it.

        Raises:
            ConfigError: when the ranks cannot be divided so.
        """
        world = len(nodes)
        nodes = self.nodes(nodes)
        size = min(self.shard_size or world, world)
        _check_divides("mics_shard_size", size, world)
        shards = tuple(tuple(range(first, first + size)) for first in range(0, world, size))
        found: dict[str, Partition] = {
            "everyone": (tuple(range(world)),),
            "shards": shards,
            "replicas": tuple(zip(*shards, strict=True)),
        }
        secondary = min(self.secondary_size, world)
        _check_divides("zero_hpz_partition_size", secondary, world)
        if 1 < secondary < world:  # all ranks together have no more than the shards themselves
            found["secondary"] = tuple(tuple(range(at, at + secondary)) for at in range(0, world, secondary))
        if self.levels:
            inside = [_by_node(team, nodes) for team in shards]
            if all(team is not None for team in inside):
                rows = [team for team in inside if team is not None]
                found["inside"] = tuple(row for team in rows for row in team)
                found["across"] = tuple(column for team in rows for column in zip(*team, strict=True))
        return found

    def nodes(self, found: Sequence[int]) -> tuple[int, ...]:
        """The node of each rank.

        Args:
            found: what the machines said.
        """
        if self.node_size is None:
            return tuple(found)
        size = min(self.node_size, len(found))
        _check_divides("node_size", size, len(found))
        return tuple(rank // size for rank in range(len(found)))


@dataclass(frozen=True, slots=True)
class Teams:
    """The teams of one rank.

    Attributes:
        nodes: number of the node of each rank.
        everyone: all ranks.
        shards: the ranks over which one copy of the model is cut.
        replicas: the ranks that own the same shard of other copies (MiCS); this rank alone elsewhere.
        secondary: the ranks that share a second copy of gathered weights (hpZ); None without.
        inside: the ranks of `shards` on this node; None unless something is sent in two steps.
        across: the ranks of `shards` with the same place in their nodes; None as `inside`.
    """

    nodes: tuple[int, ...] = (0,)
    everyone: Team = field(default_factory=Team)
    shards: Team = field(default_factory=Team)
    replicas: Team = field(default_factory=Team)
    secondary: Team | None = None
    inside: Team | None = None
    across: Team | None = None

    @classmethod
    def of(
        cls, rank: int, nodes: Sequence[int], partitions: Mapping[str, Partition], groups: Mapping[str, Any]
    ) -> Teams:
        """The teams of `rank`.

        Args:
            rank: this one.
            nodes: number of the node of each rank.
            partitions: by kind.
            groups: process groups of this rank's teams by kind, where there are any.
        """
        found = {}
        for kind, partition in partitions.items():
            ranks = next(team for team in partition if rank in team)
            found[kind] = Team(ranks, ranks.index(rank), groups.get(kind))
        return cls(tuple(nodes), **found)

    def beyond(self, team: Team) -> int:
        """Ranks of a team, seen from this one, that are on other nodes."""
        node = self.nodes[team.ranks[team.place]]
        return sum(self.nodes[rank] != node for rank in team.ranks)

    def without_groups(self) -> Teams:
        """The same for a backend in which pairs talk."""
        kinds = ("everyone", "shards", "replicas", "secondary", "inside", "across")
        own: dict[str, Any] = {kind: getattr(self, kind) for kind in kinds}
        return replace(self, **{kind: team and replace(team, group=None) for kind, team in own.items()})


def _by_node(team: Sequence[int], nodes: Sequence[int]) -> Partition | None:
    """A team cut at the borders of nodes; None if that is not what [Note: two levels] needs, or of no use."""
    rows: list[list[int]] = []
    for rank in team:
        if rows and nodes[rows[-1][0]] == nodes[rank]:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    sizes = {len(row) for row in rows}
    distinct = len({nodes[row[0]] for row in rows}) == len(rows)
    if len(rows) == 1 or sizes == {1} or len(sizes) > 1 or not distinct:
        return None
    return tuple(tuple(row) for row in rows)


def _check_divides(name: str, size: int, world: int) -> None:
    if world % size:
        fits = ", ".join(str(divisor) for divisor in range(1, world + 1) if world % divisor == 0)
        raise ConfigError(
            f"zero_optimization.{name}={size} does not divide the number of ranks, {world}: groups would differ in "
            f"size. Set it to one of {fits}, or start another number of ranks."
        )
