"""Ranks and process groups: built once per process set, passed on as a value."""

from __future__ import annotations

import atexit
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_lightning.errors import TopologyError
from ds_lightning.teams import Grouping, Partition, Teams


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks that share one model, and the groups in which they talk.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        device: where parameters live.
        data_group: carries parameters and gradients. None when there is a single rank.
        control_group: gloo, carries small agreements; its order never depends on that of `data_group`.
        timeout: after it a collective that does not complete is an error.
        teams: which ranks talk among themselves. Where `data_group` is gloo they do so in it, by pairs; elsewhere each
            team has a group of its own.
    """

    rank: int
    world_size: int
    device: torch.device
    data_group: dist.ProcessGroup | None
    control_group: dist.ProcessGroup | None
    timeout: timedelta
    teams: Teams = field(default_factory=Teams)

    @property
    def shard_rank(self) -> int:
        """Which of the shards of the model this rank owns: its rank, except under MiCS."""
        return self.teams.shards.place

    @property
    def shard_count(self) -> int:
        """Into how many shards the model is cut: the number of ranks, except under MiCS."""
        return self.teams.shards.size

    @property
    def first_replica(self) -> bool:
        """Whether this rank speaks for its shard, of which other ranks may have copies (MiCS)."""
        return self.teams.replicas.place == 0

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Topology:
        """One rank, no process groups."""
        return cls(0, 1, torch.device(device), None, None, timedelta(minutes=30))

    @classmethod
    def create(
        cls,
        device: torch.device,
        timeout: timedelta,
        expected_world_size: int | None = None,
        grouping: Grouping | None = None,
    ) -> Topology:
        """The groups for these ranks, built at the first call. Collective over the default group, which must exist.

        Args:
            device: where parameters live.
            timeout: bound of every collective in the new groups.
            expected_world_size: what the launcher promised.
            grouping: how the configuration divides the ranks.

        Raises:
            TopologyError: when the existing default group has another size than promised.
            ConfigError: when the ranks cannot be divided so.
        """
        grouping = grouping or Grouping()
        world_size = dist.get_world_size()
        if expected_world_size is not None and expected_world_size != world_size:
            raise TopologyError(
                f"The process group that exists already has {world_size} ranks, but {expected_world_size} were asked "
                "for (devices * num_nodes). It was created before this Trainer; ask for the same number of ranks, or "
                "start a new process."
            )
        default = dist.group.WORLD
        assert default is not None
        known = _KNOWN.setdefault(default, {})
        plain = (device, timeout, Grouping())
        if plain not in known:
            # Own groups: traffic of the default group (logging, Lightning's per-batch flags) never queues behind ours,
            # and `new_group` ignores the default group's timeout unless it is given.
            data = dist.new_group(timeout=timeout)
            control = dist.new_group(timeout=timeout, backend="gloo")
            nodes = _ask_nodes(control, world_size)
            teams = Teams.of(dist.get_rank(), nodes, Grouping().partitions(nodes), {"everyone": data, "shards": data})
            known[plain] = cls(dist.get_rank(), world_size, device, data, control, timeout, teams)
            leave_at_exit()
        key = (device, timeout, grouping)
        if key not in known:
            known[key] = known[plain]._divided(grouping)
        return known[key]

    def _divided(self, grouping: Grouping) -> Topology:
        """The same ranks in the teams of a configuration. Collective."""
        found = self.teams.nodes
        partitions = grouping.partitions(found)
        groups = {} if self.device.type == "cpu" else _make_groups(partitions, self.data_group, self.timeout)
        return replace(self, teams=Teams.of(self.rank, grouping.nodes(found), partitions, groups))

    def host(self, group: dist.ProcessGroup | None) -> Topology:
        """The same ranks over CPU memory, in a gloo group."""
        device = torch.device("cpu")
        return replace(self, device=device, data_group=group, control_group=group, teams=self.teams.without_groups())

    def for_checkpoints(self) -> Topology:
        """The same ranks over CPU memory, in a group of their own: writing goes on beside training.

        The group is made when it is first asked for, which is collective; a job that saves nothing does without.
        """
        if self.control_group is None:
            return self.host(None)
        default = dist.group.WORLD
        assert default is not None
        known = _CHECKPOINTS.setdefault(default, {})
        if self.timeout not in known:
            known[self.timeout] = dist.new_group(timeout=self.timeout, backend="gloo")
        return self.host(known[self.timeout])


_CHECKPOINTS: WeakKeyDictionary[dist.ProcessGroup, dict[timedelta, dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups for checkpoints, as `_KNOWN`."""

_Key = tuple[torch.device, timedelta, Grouping]
_KNOWN: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, Topology]] = WeakKeyDictionary()
"""Groups by the default group they were made in: they belong to the process, so a second Trainer uses them again."""


def _ask_nodes(group: dist.ProcessGroup | None, world_size: int) -> list[int]:
    """The node of each rank, counted in order of appearance. Collective."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    mine = (socket.gethostname(), boot.read_text() if boot.exists() else "")  # two machines may have one name
    names: list[Any] = [None] * world_size
    dist.all_gather_object(names, mine, group=group)
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]


def _make_groups(
    partitions: Mapping[str, Partition], everyone: dist.ProcessGroup | None, timeout: timedelta
) -> dict[str, dist.ProcessGroup | None]:
    """This rank's process group of each kind; every rank makes all of them, in the same order. Collective."""
    made: dict[Partition, dist.ProcessGroup | None] = {partitions["everyone"]: everyone}
    for partition in partitions.values():
        if len(partition[0]) > 1 and partition not in made:
            made[partition] = dist.new_subgroups_by_enumeration([list(team) for team in partition], timeout=timeout)[0]
    return {kind: made.get(partition) for kind, partition in partitions.items()}


def leave_at_exit() -> None:
    """End all process groups in order when the process ends.

    Left to the interpreter's end, gloo's threads now and then outlive what they use, and the process aborts.
    """
    stay_at_exit()
    atexit.register(_leave)


def stay_at_exit() -> None:
    """Do not: after a failure, ending a group would wait for operations that other ranks never join."""
    atexit.unregister(_leave)


def _leave() -> None:
    died = getattr(sys, "last_value", None) is not None
    if dist.is_initialized() and not died:
        dist.destroy_process_group()
