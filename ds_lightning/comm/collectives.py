"""All-gather and reduce-scatter of flat buffers, per backend.

[Note: point to point on gloo] Gloo's own all-gather and reduce-scatter are slow, the latter moves as many bytes as an
all-reduce, and neither fixes the order of the sum. Here both are pairwise `isend`/`irecv` of the chunks, straight from
and into place: half an all-reduce's bytes each, and every rank sums its chunk in rank order, so results do not depend
on timing, bucket sizes or the stage.

Within a machine a rank sends first: to receive invites what the peer has ready, and gloo's thread keeps the pair locked
while it reads that, so that a send behind it would block. Between machines it receives first: there the wire is what
takes time, and a peer that is not invited yet does not use it.

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
from ds_lightning.teams import Team
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


class Chained(Pending):
    """Several collectives in flight, and what is done once all of them have arrived."""

    __slots__ = ("_action", "_parts")

    def __init__(self, parts: Sequence[Pending], action: Callable[[], None]) -> None:
        super().__init__([], (), str)
        self._parts = parts
        self._action: Callable[[], None] | None = action

    def wait(self) -> None:
        """As `Pending.wait`; then the action, once."""
        for part in self._parts:
            part.wait()
        action, self._action = self._action, None
        if action is not None:
            action()
        self._parts = ()


class PendingReduce:
    """A reduce-scatter in flight: `finish` waits and adds this rank's chunk of the sum to its destination.

    Attributes:
        partial: the sum is one over this copy of the model alone; what other copies have is added later (MiCS).
    """

    __slots__ = ("_divided", "_pending", "_sources", "partial")

    def __init__(self, pending: Pending, sources: list[torch.Tensor], divided: int = 1) -> None:
        self._pending = pending
        self._sources = sources
        self._divided = divided  # by this, on the way
        self.partial = False

    def advance(self) -> None:
        """Begin the next step of a reduction that has several, waiting for the one before. Collective, as `finish`."""

    def include(self, earlier: torch.Tensor, scale: float) -> None:
        """Let a sum over copies of the model take in `scale` times what this copy has from earlier, partial ones."""
        raise NotImplementedError("only sums over copies have something left to add")

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
    """What the engine asks of a backend. Every method is collective over the team, in the same order.

    Attributes:
        topology: all ranks.
        ledger: counts.
        team: the ranks that take part; chunks are numbered by their places.
    """

    def __init__(self, topology: Topology, ledger: Ledger, team: Team) -> None:
        self.topology = topology
        self.ledger = ledger
        self.team = team
        self._beyond = topology.teams.beyond(team)

    @staticmethod
    def create(topology: Topology, ledger: Ledger, team: Team | None = None) -> Collectives:
        """The implementation for the group's backend.

        Args:
            topology: all ranks.
            ledger: counts.
            team: the ranks that take part; None takes those over which the model is cut.
        """
        team = topology.teams.shards if team is None else team
        if team.size == 1:
            return _Alone(topology, ledger, team)
        if topology.device.type == "cpu":
            return _PointToPoint(topology, ledger, team)
        return _Native(topology, ledger, team)

    @abc.abstractmethod
    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        """Fill `full` (`[team * chunk]`); this rank's chunk is already in place.

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
            full: `[team * chunk]`, not to be touched until the result is finished.
            what: name for messages.
            tag: distinguishes operations that are in flight together.
            piece: largest number of elements of `full` per message.
            take: gives a scratch tensor of so many elements, of `full`'s dtype.
        """

    @abc.abstractmethod
    def collect(self, own: torch.Tensor, full: torch.Tensor | None, what: str, tag: int) -> Pending:
        """Bring every rank's chunk to the first rank of the team.

        Args:
            own: this rank's chunk.
            full: `[team * chunk]` there, None elsewhere.
            what: name for messages.
            tag: distinguishes operations that are in flight together.
        """

    @abc.abstractmethod
    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, what: str, tag: int) -> Pending:
        """Row p of `received` becomes what the rank at place p has in the row of this rank's place.

        Args:
            sent: `[team, n]`, contiguous, not to be touched until it is over.
            received: another tensor of the same shape and dtype.
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
        """Make `values` equal to those of rank `source` on all ranks, those outside the team too, and wait."""
        topology = self.topology
        if topology.world_size == 1:
            return
        try:
            dist.broadcast(values, group_src=source, group=topology.data_group)
        except RuntimeError as error:
            raise TopologyError(self._describer("broadcast", what)(str(error))) from error
        if topology.rank == source:
            everyone = topology.teams.everyone
            beyond = topology.teams.beyond(everyone)
            self.ledger.record("broadcast", values.nbytes * (everyone.size - 1), values.nbytes * beyond)

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
        step = max(1, piece // self.team.size)
        return [(lo, min(lo + step, chunk)) for lo in range(0, chunk, step)]

    def _sent(self, operation: str, nbytes: int) -> None:
        """Count `nbytes` sent to each of the others."""
        self.ledger.record(operation, nbytes * (self.team.size - 1), nbytes * self._beyond)


class _Alone(Collectives):
    """One rank: nothing to move."""

    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        return Pending([], (), str)

    def reduce_scatter(
        self, full: torch.Tensor, what: str, tag: int, piece: int, take: Callable[[int], torch.Tensor]
    ) -> PendingReduce:
        return PendingReduce(Pending([], (), str), [full])

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, what: str, tag: int) -> Pending:
        received.copy_(sent)
        return Pending([], (), str)

    def collect(self, own: torch.Tensor, full: torch.Tensor | None, what: str, tag: int) -> Pending:
        if full is not None:
            full.copy_(own)
        return Pending([], (), str)


class _PointToPoint(Collectives):
    """See [Note: point to point on gloo]."""

    def _peers(self) -> list[tuple[int, int]]:
        """Places and ranks of the others, beginning with the next one, so that no rank is everybody's first."""
        place, size = self.team.place, self.team.size
        return [(peer, self.team.ranks[peer]) for peer in ((place + step) % size for step in range(1, size))]

    def _exchange(
        self,
        outgoing: Sequence[torch.Tensor] | torch.Tensor,
        incoming: Sequence[torch.Tensor] | torch.Tensor,
        pieces: Sequence[tuple[int, int]],
        tag: int,
        describe: Callable[[str], str],
    ) -> list[Any]:
        """Begin to send each place its row of `outgoing`, piece by piece, and to receive its row of `incoming`."""
        group, nodes = self.topology.data_group, self.topology.teams.nodes
        works: list[Any] = []

        def send(peer: int, rank: int) -> None:
            row = outgoing[peer]
            works.extend(dist.isend(row[lo:hi], group=group, group_dst=rank, tag=tag) for lo, hi in pieces)

        def receive(peer: int, rank: int) -> None:
            row = incoming[peer]
            works.extend(dist.irecv(row[lo:hi], group=group, group_src=rank, tag=tag) for lo, hi in pieces)

        try:
            for peer, rank in self._peers():
                far = nodes[rank] != nodes[self.topology.rank]
                for begin in (receive, send) if far else (send, receive):
                    begin(peer, rank)
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        return works

    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        own = self.team.place
        chunks = full.view(self.team.size, -1)
        pieces = self._pieces(chunks.shape[1], piece)
        describe = self._describer("all-gather", what)
        works = self._exchange([chunks[own]] * self.team.size, chunks, pieces, tag, describe)
        self._sent("all_gather", chunks[own].nbytes)
        return Pending(works, (full,), describe)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, what: str, tag: int) -> Pending:
        describe = self._describer("all-to-all", what)
        works = self._exchange(sent, received, [(0, sent.shape[1])], tag, describe)
        received[self.team.place].copy_(sent[self.team.place])
        self._sent("all_to_all", sent[0].nbytes)
        return Pending(works, (sent, received), describe)

    def collect(self, own: torch.Tensor, full: torch.Tensor | None, what: str, tag: int) -> Pending:
        group = self.topology.data_group
        describe = self._describer("collection", what)
        works: list[Any] = []
        try:
            if full is None:
                first = self.team.ranks[0]
                works.append(dist.isend(own, group=group, group_dst=first, tag=tag))
                nodes = self.topology.teams.nodes
                self.ledger.record("collect", own.nbytes, own.nbytes * (nodes[first] != nodes[self.topology.rank]))
            else:
                chunks = full.view(self.team.size, -1)
                works += [dist.irecv(chunks[at], group=group, group_src=rank, tag=tag) for at, rank in self._peers()]
                chunks[0].copy_(own)
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        return Pending(works, (own,), describe)

    def reduce_scatter(
        self, full: torch.Tensor, what: str, tag: int, piece: int, take: Callable[[int], torch.Tensor]
    ) -> PendingReduce:
        own, size = self.team.place, self.team.size
        chunks = full.view(size, -1)
        sources = [chunks[own] if peer == own else take(chunks.shape[1]) for peer in range(size)]
        pieces = self._pieces(chunks.shape[1], piece)
        describe = self._describer("reduce-scatter", what)
        works = self._exchange(chunks, sources, pieces, tag, describe)
        self._sent("reduce_scatter", chunks[own].nbytes)
        return PendingReduce(Pending(works, (full, *sources), describe), sources)


class _Native(Collectives):
    """Backends with good collectives of their own. torch 2.13 renames them and warns on the old names."""

    def __init__(self, topology: Topology, ledger: Ledger, team: Team) -> None:
        super().__init__(topology, ledger, team)
        self._gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        chunks = full.view(self.team.size, -1)
        own = chunks[self.team.place]
        describe = self._describer("all-gather", what)
        try:
            work = self._gather(full, own, group=self.team.group, async_op=True)
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        self._sent("all_gather", own.nbytes)
        return Pending([work], (full,), describe)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor, what: str, tag: int) -> Pending:
        describe = self._describer("all-to-all", what)
        try:
            work = dist.all_to_all_single(received, sent, group=self.team.group, async_op=True)
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        self._sent("all_to_all", sent[0].nbytes)
        return Pending([work], (sent, received), describe)

    def reduce_scatter(
        self, full: torch.Tensor, what: str, tag: int, piece: int, take: Callable[[int], torch.Tensor]
    ) -> PendingReduce:
        size = self.team.size
        out = take(full.numel() // size)
        # A sum of many 16-bit gradients overflows or drowns; AVG divides each term before it is added.
        average = full.element_size() < 4
        describe = self._describer("reduce-scatter", what)
        try:
            work = self._scatter(
                out,
                full,
                op=dist.ReduceOp.AVG if average else dist.ReduceOp.SUM,
                group=self.team.group,
                async_op=True,
            )
        except RuntimeError as error:
            raise TopologyError(describe(str(error))) from error
        self._sent("reduce_scatter", out.nbytes)
        return PendingReduce(Pending([work], (full, out), describe), [out], size if average else 1)

    def collect(self, own: torch.Tensor, full: torch.Tensor | None, what: str, tag: int) -> Pending:
        target = own.new_empty(own.numel() * self.team.size) if full is None else full
        target.view(self.team.size, -1)[self.team.place].copy_(own)
        return self.all_gather(target, what, tag, target.numel())
