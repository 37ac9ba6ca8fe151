"""Ranks and process groups: built once per process set, passed on as a value."""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_lightning.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks that share one model, and the groups in which they talk.

    Attributes:
        rank: global rank; also the index of the shard that this rank owns.
        world_size: number of ranks, and of shards.
        device: where parameters live.
        data_group: carries parameters and gradients. None when there is a single rank.
        control_group: gloo, carries small agreements; its order never depends on that of `data_group`.
        timeout: after it a collective that does not complete is an error.
    """

    rank: int
    world_size: int
    device: torch.device
    data_group: dist.ProcessGroup | None
    control_group: dist.ProcessGroup | None
    timeout: timedelta

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Topology:
        """One rank, no process groups."""
        return cls(0, 1, torch.device(device), None, None, timedelta(minutes=30))

    @classmethod
    def create(cls, device: torch.device, timeout: timedelta, expected_world_size: int | None = None) -> Topology:
        """The groups for these ranks, built at the first call. Collective over the default group, which must exist.

        Args:
            device: where parameters live.
            timeout: bound of every collective in the new groups.
            expected_world_size: what the launcher promised.

        Raises:
            TopologyError: when the existing default group has another size than promised.
        """
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
        key = (device, timeout)
        if key not in known:
            # Own groups: traffic of the default group (logging, Lightning's per-batch flags) never queues behind ours,
            # and `new_group` ignores the default group's timeout unless it is given.
            data = dist.new_group(timeout=timeout)
            control = dist.new_group(timeout=timeout, backend="gloo")
            known[key] = cls(dist.get_rank(), world_size, device, data, control, timeout)
            leave_at_exit()
        return known[key]

    def for_checkpoints(self) -> Topology:
        """The same ranks over CPU memory, in a group of their own: writing goes on beside training.

        The group is made when it is first asked for, which is collective; a job that saves nothing does without.
        """
        if self.control_group is None:
            return replace(self, device=torch.device("cpu"))
        default = dist.group.WORLD
        assert default is not None
        known = _CHECKPOINTS.setdefault(default, {})
        if self.timeout not in known:
            known[self.timeout] = dist.new_group(timeout=self.timeout, backend="gloo")
        group = known[self.timeout]
        return replace(self, device=torch.device("cpu"), data_group=group, control_group=group)


_CHECKPOINTS: WeakKeyDictionary[dist.ProcessGroup, dict[timedelta, dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups for checkpoints, as `_KNOWN`."""

_KNOWN: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[torch.device, timedelta], Topology]] = WeakKeyDictionary()
"""Groups by the default group they were made in: they belong to the process, so a second Trainer uses them again."""


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
