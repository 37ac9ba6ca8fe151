"""All-gather and reduce-scatter of flat buffers, per backend.

[Note: point to point on gloo] Gloo's own all-gather and reduce-scatter are slow, the latter moves as many bytes as an
all-reduce, and neither fixes the order of the sum. Here both are pairwise `isend`/`irecv` of the chunks, straight from
and into place: half an all-reduce's bytes each, and every rank sums its chunk in rank order, so results do not depend
on timing, bucket sizes or the stage. A rank sends first: to receive invites what the peer has ready, and gloo's thread
keeps the pair locked while it reads that, so that a send behind it would block.

NCCL has good native collectives on a stream of its own: issued asynchronously they overlap with compute, and waiting
only makes the compute stream wait.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_lightning.comm.ledger import Ledger
from ds_lightning.errors import TopologyError
from ds_lightning.ops.reduce import reduce_sum
from ds_lightning.topology import Topology


class Pending:
    """A collective in flight. `wait` returns when its buffers may be used, or raises who waited for what."""

    __slots__ = ("_buffers", "_describe", "_works")

    def __init__(self, works: list[Any], buffers: Sequence[torch.Tensor], describe: Callable[[str], str]) -> None:
        self._works = works
        self._buffers = buffers  # kept alive until the operation is over
        self._describe = describe

    def wait(self) -> None:
        """Block (gloo) or make the current stream wait (NCCL). Waiting twice is harmless.

        Raises:
            TopologyError: when another rank did not take part in time, or is gone.
        """
        works, self._works = self._works, []
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise TopologyError(self._describe(str(error))) from error
        self._buffers = ()


class PendingReduce:
    """A reduce-scatter in flight: `finish` waits and adds this rank's chunk of the sum to its destination."""

    __slots__ = ("_divided", "_pending", "_sources")

    def __init__(self, pending: Pending, sources: list[torch.Tensor], divided: int = 1) -> None:
        self._pending = pending
        self._sources = sources
        self._divided = divided  # by this, on the way

    def finish(self, out: torch.Tensor, scale: float, accumulate: bool) -> None:
        """Write `scale` times the sum over ranks into `out`, or add it.

        Args:
            out: `[chunk]`, of any floating dtype.
            scale: factor of the sum, 1 / world size for a mean.
            accumulate: add to what `out` holds.
        """
        self._pending.wait()
        factor = scale * self._divided
        if math.isclose(factor, 1.0):
            factor = 1.0
        reduce_sum(out, self._sources, scale=factor, accumulate=accumulate)
        self._sources = []

    def discard(self) -> None:
        """Wait, and forget the result."""
        self._pending.wait()
        self._sources = []


class Collectives(abc.ABC):
    """What the engine asks of a backend. Every method is collective over the data group, in the same order."""

    def __init__(self, topology: Topology, ledger: Ledger) -> None:
        self.topology = topology
        self.ledger = ledger

    @staticmethod
    def create(topology: Topology, ledger: Ledger) -> Collectives:
        """The implementation for the group's backend."""
        if topology.world_size == 1:
            return _Alone(topology, ledger)
        if topology.device.type == "cpu":
            return _PointToPoint(topology, ledger)
        return _Native(topology, ledger)

    @abc.abstractmethod
    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        """Fill `full` (`[world_size * chunk]`); this rank's chunk is already in place.

        Args:
            full: flat buffer.
            what: name for messages.
            tag: distinguishes operations that are in flight together.
            piece: largest number of elements of `full` per message.
        """

    @abc.abstractmethod
    def reduce_scatter(
        self, full: torch.Tensor, what: str, tag: int, piece: int, take: Callable[[int], torch.Tensor]
    ) -> PendingReduce:
        """Sum `full` over ranks, each rank receiving its chunk.

        Args:
            full: `[world_size * chunk]`, not to be touched until the result is finished.
            what: name for messages.
            tag: distinguishes operations that are in flight together.
            piece: largest number of elements of `full` per message.
            take: gives a scratch tensor of so many elements, of `full`'s dtype.
        """

    @abc.abstractmethod
    def all_to_all(self, send: torch.Tensor, received: torch.Tensor, what: str, tag: int) -> Pending:
        """Row `i` of `received` becomes what rank `i` has in the row of this rank.

        Args:
            send: `[world_size, row]`, contiguous, row `i` for rank `i`; not to be touched until it is over.
            received: of the same shape and dtype, another tensor.
            what: name for messages.
            tag: distinguishes operations that are in flight together.
        """

    @abc.abstractmethod
    def collect(self, own: torch.Tensor, full: torch.Tensor | None, what: str, tag: int) -> Pending:
        """Bring every rank's chunk to rank 0.

        Args:
            own: this rank's chunk.
            full: `[world_size * chunk]` on rank 0, None elsewhere.
            what: name for messages.
            tag: distinguishes operations that are in flight together.
        """

    def average(self, values: torch.Tensor, what: str, tag: int) -> None:
        """Replace `values` (`[world_size * chunk]`) by their mean over ranks, summed in rank order, and wait."""
        world = self.topology.world_size
        if world == 1:
            return
        pending = self.reduce_scatter(values, what, tag, values.numel(), values.new_empty)
        own = values.new_empty(values.numel() // world)
        pending.finish(own, 1.0 / world, False)
        values.view(world, -1)[self.topology.rank].copy_(own)
        self.all_gather(values, what, tag, values.numel()).wait()

    def broadcast(self, values: torch.Tensor, what: str, source: int = 0) -> None:
        """Make `values` equal to those of rank `source`, and wait."""
        topology = self.topology
        if topology.world_size == 1:
            return
        try:
            dist.broadcast(values, group_src=source, group=topology.data_group)
        except RuntimeError as error:
            raise TopologyError(self._describer("broadcast", what)(str(error))) from error
        if topology.rank == source:
            self.ledger.record("broadcast", values.nbytes * (topology.world_size - 1))

    def _describer(self, operation: str, what: str) -> Callable[[str], str]:
        topology = self.topology

        def describe(error: str) -> str:
            return (
                f"rank {topology.rank}: {operation} of unit {what} did not complete; a missing rank is waited for up "
                f"to {topology.timeout.total_seconds():g} s. Another rank has failed, or runs other modules or other "
                f"batches than this one: all ranks must gather and reduce the same units in the same order. {error}"
            )

        return describe

    def _pieces(self, chunk: int, piece: int) -> list[tuple[int, int]]:
        step = max(1, piece // self.topology.world_size)
        return [(lo, min(lo + step, chunk)) for lo in range(0, chunk, step)]


class _Alone(Collectives):
    """One rank: nothing to move."""

    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        return Pending([], (), str)

    def reduce_scatter(
        self, full: torch.Tensor, what: str, tag: int, piece: int, take: Callable[[int], torch.Tensor]
    ) -> PendingReduce:
        return PendingReduce(Pending([], (), str), [full])

    def all_to_all(self, send: torch.Tensor, received: torch.Tensor, what: str, tag: int) -> Pending:
        received.copy_(send)
        return Pending([], (), str)

    def collect(self, own: torch.Tensor, full: torch.Tensor | None, what: str, tag: int) -> Pending:
        if full is not None:
            full.copy_(own)
        return Pending([], (), str)


class _PointToPoint(Collectives):
    """See [Note: point to point on gloo]."""

    def _peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that no rank is everybody's first."""
        rank, size = self.topology.rank, self.topology.world_size
        return [(rank + step) % size for step in range(1, size)]

    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        rank, group = self.topology.rank, self.topology.data_group
        chunks = full.view(self.topology.world_size, -1)
        pieces = self._pieces(chunks.shape[1], piece)
        describe = self._describer("all-gather", what)
        works: list[Any] = []
        try:
            for peer in self._peers():
                for lo, hi in pieces:
                    works.append(dist.isend(chunks[rank, lo:hi], group=group, group_dst=peer, tag=tag))
                for lo, hi in pieces:
                    works.append(dist.irecv(chunks[peer, lo:hi], group=group, group_src=peer, tag=tag))
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        sent = chunks[rank].numel() * (self.topology.world_size - 1)
        self.ledger.record("all_gather", sent * full.element_size())
        return Pending(works, (full,), describe)

    def all_to_all(self, send: torch.Tensor, received: torch.Tensor, what: str, tag: int) -> Pending:
        rank, group = self.topology.rank, self.topology.data_group
        describe = self._describer("all-to-all", what)
        works: list[Any] = []
        try:
            for peer in self._peers():
                works.append(dist.isend(send[peer], group=group, group_dst=peer, tag=tag))
                works.append(dist.irecv(received[peer], group=group, group_src=peer, tag=tag))
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        received[rank].copy_(send[rank])
        self.ledger.record("all_to_all", send[rank].nbytes * (self.topology.world_size - 1))
        return Pending(works, (send, received), describe)

    def collect(self, own: torch.Tensor, full: torch.Tensor | None, what: str, tag: int) -> Pending:
        group = self.topology.data_group
        describe = self._describer("collection", what)
        works: list[Any] = []
        try:
            if full is None:
                works.append(dist.isend(own, group=group, group_dst=0, tag=tag))
                self.ledger.record("collect", own.nbytes)
            else:
                chunks = full.view(self.topology.world_size, -1)
                works += [dist.irecv(chunks[peer], group=group, group_src=peer, tag=tag) for peer in self._peers()]
                chunks[0].copy_(own)
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        return Pending(works, (own,), describe)

    def reduce_scatter(
        self, full: torch.Tensor, what: str, tag: int, piece: int, take: Callable[[int], torch.Tensor]
    ) -> PendingReduce:
        rank, size, group = self.topology.rank, self.topology.world_size, self.topology.data_group
        chunks = full.view(size, -1)
        sources = [chunks[rank] if peer == rank else take(chunks.shape[1]) for peer in range(size)]
        pieces = self._pieces(chunks.shape[1], piece)
        describe = self._describer("reduce-scatter", what)
        works: list[Any] = []
        try:
            for peer in self._peers():
                for lo, hi in pieces:
                    works.append(dist.isend(chunks[peer, lo:hi], group=group, group_dst=peer, tag=tag))
                for lo, hi in pieces:
                    works.append(dist.irecv(sources[peer][lo:hi], group=group, group_src=peer, tag=tag))
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        self.ledger.record("reduce_scatter", chunks.shape[1] * (size - 1) * full.element_size())
        return PendingReduce(Pending(works, (full, *sources), describe), sources)


class _Native(Collectives):
    """Backends with good collectives of their own. torch 2.13 renames them and warns on the old names."""

    def __init__(self, topology: Topology, ledger: Ledger) -> None:
        super().__init__(topology, ledger)
        self._gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        chunks = full.view(self.topology.world_size, -1)
        own = chunks[self.topology.rank]
        describe = self._describer("all-gather", what)
        try:
            work = self._gather(full, own, group=self.topology.data_group, async_op=True)
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        self.ledger.record("all_gather", own.numel() * (self.topology.world_size - 1) * full.element_size())
        return Pending([work], (full,), describe)

    def reduce_scatter(
        self, full: torch.Tensor, what: str, tag: int, piece: int, take: Callable[[int], torch.Tensor]
    ) -> PendingReduce:
        size = self.topology.world_size
        out = take(full.numel() // size)
        # A sum of many 16-bit gradients overflows or drowns; AVG divides each term before it is added.
        average = full.element_size() < 4
        describe = self._describer("reduce-scatter", what)
        try:
            work = self._scatter(
                out,
                full,
                op=dist.ReduceOp.AVG if average else dist.ReduceOp.SUM,
                group=self.topology.data_group,
                async_op=True,
            )
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        self.ledger.record("reduce_scatter", out.numel() * (size - 1) * full.element_size())
        return PendingReduce(Pending([work], (full, out), describe), [out], size if average else 1)

    def all_to_all(self, send: torch.Tensor, received: torch.Tensor, what: str, tag: int) -> Pending:
        describe = self._describer("all-to-all", what)
        try:
            work = dist.all_to_all_single(received, send, group=self.topology.data_group, async_op=True)
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        self.ledger.record("all_to_all", send[0].nbytes * (self.topology.world_size - 1))
        return Pending([work], (send, received), describe)

    def collect(self, own: torch.Tensor, full: torch.Tensor | None, what: str, tag: int) -> Pending:
        target = own.new_empty(own.numel() * self.topology.world_size) if full is None else full
        target.view(self.topology.world_size, -1)[self.topology.rank].copy_(own)
        return self.all_gather(target, what, tag, target.numel())
