"""Small agreements between ranks, on the control group: decisions that all must take alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ds_lightning.comm.collectives import Pending
from ds_lightning.errors import ConfigError, TopologyError
from ds_lightning.topology import Topology

_T = TypeVar("_T")

RENDEZVOUS_SECONDS = 15.0
"""How long a call that every rank must make waits for the others before it is an error."""


class Agreement:
    """Collective decisions over all ranks of a topology. Every method must be called by all of them.

    Attributes:
        before: called before each decision but `exchange`; for ranks that must wait for others to come to it.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.before: Callable[[], None] | None = None

    def maximum(self, values: torch.Tensor, what: str) -> Pending:
        """Replace `values` (CPU) by the element-wise maximum over ranks; asynchronous."""
        self._prepare()
        return self._all_reduce(values, dist.ReduceOp.MAX, what)

    def total(self, values: torch.Tensor, what: str) -> Pending:
        """Replace `values` (CPU) by the sum over ranks; asynchronous, the same bits on every rank."""
        self._prepare()
        return self._all_reduce(values, dist.ReduceOp.SUM, what)

    def exchange(self, values: torch.Tensor, what: str) -> Pending:
        """As `maximum`, at once: for what `before` itself does."""
        return self._all_reduce(values, dist.ReduceOp.MAX, what)

    def _prepare(self) -> None:
        if self.before is not None:
            self.before()

    def _all_reduce(self, values: torch.Tensor, op: Any, what: str) -> Pending:
        topology = self.topology

        def describe(error: str) -> str:
            return (
                f"rank {topology.rank}: the ranks could not agree on {what}; a missing rank is waited for up to "
                f"{topology.timeout.total_seconds():g} s. Another rank has failed or does something else. {error}"
            )

        if topology.world_size == 1:
            return Pending([], (), describe)
        try:
            work = dist.all_reduce(values, op=op, group=topology.control_group, async_op=True)
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        return Pending([work], (values,), describe)

    def from_rank(self, value: Any, source: int = 0) -> Any:
        """What `source` holds, on every rank."""
        if self.topology.world_size == 1:
            return value
        self._prepare()
        box = [value]
        try:
            dist.broadcast_object_list(box, src=source, group=self.topology.control_group)
        except RuntimeError as error:
            raise TopologyError(f"rank {self.topology.rank}: nothing arrived from rank {source}. {error}") from error
        return box[0]

    def everyone(self, value: Any) -> Sequence[Any]:
        """What each rank holds, in rank order, on every rank."""
        if self.topology.world_size == 1:
            return [value]
        self._prepare()
        box: list[Any] = [None] * self.topology.world_size
        try:
            dist.all_gather_object(box, value, group=self.topology.control_group)
        except RuntimeError as error:
            raise TopologyError(f"rank {self.topology.rank}: a rank did not answer. {error}") from error
        return box

    def rendezvous(self, what: str, advice: str) -> None:
        """Make sure that every rank is here, within `RENDEZVOUS_SECONDS`.

        Args:
            what: the call that all ranks must make.
            advice: what to do when they do not.

        Raises:
            TopologyError: when some rank does not come.
        """
        topology = self.topology
        if topology.world_size == 1:
            return
        self._prepare()
        bound = timedelta(seconds=min(RENDEZVOUS_SECONDS, topology.timeout.total_seconds()))
        try:
            dist.monitored_barrier(topology.control_group, timeout=bound)
        except RuntimeError as error:
            raise TopologyError(
                f"rank {topology.rank}: {what} needs every rank, but not all of them arrived within "
                f"{bound.total_seconds():g} s. {advice} ({error})"
            ) from error


def agreed(make: Callable[[], _T], topology: Topology) -> _T:
    """What `make` gives on this rank, if it gives something on all of them. Collective.

    Args:
        make: may raise a `ConfigError` on one rank alone: a disk that is full, a folder that is missing.
        topology: ranks and groups.

    Raises:
        ConfigError: on every rank, where it was raised on any.
    """
    made, problem = None, None
    try:
        made = make()
    except ConfigError as error:
        problem = str(error)
    for rank, other in enumerate(Agreement(topology).everyone(problem)):
        if other is not None:
            raise ConfigError(f"rank {rank}: {other}" if topology.world_size > 1 else other)
    return cast("_T", made)
