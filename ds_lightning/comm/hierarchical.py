"""Collectives in two steps, so that less crosses the borders of nodes or of replicas."""

from __future__ import annotations

import torch

from ds_lightning.comm.collectives import Chained, Collectives, Pending, PendingReduce
from ds_lightning.comm.quantized import Scratch
from ds_lightning.ops.reduce import reduce_sum
from ds_lightning.teams import Team


class HierarchicalGather:
    """All-gathers first across nodes, then inside (MiCS, arXiv:2205.00119, section 3.3); see [Note: two levels].

    A rank sends its chunk once to each other node, instead of to each rank there.

    Args:
        whole: over all ranks that take part.
        across: over those with the same place in their nodes.
        inside: over those of a node.
        scratch: memory to put chunks in order.
    """

    def __init__(self, whole: Collectives, across: Collectives, inside: Collectives, scratch: Scratch) -> None:
        self._whole = whole
        self._across = across
        self._inside = inside
        self._scratch = scratch

    @property
    def team(self) -> Team:
        """The ranks that take part."""
        return self._whole.team

    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        """See `Collectives.all_gather`. The step inside nodes begins when the result is waited for."""
        nodes, local = self._across.team.size, self._inside.team.size
        chunks = full.view(nodes, local, -1)
        numel = full.numel()
        ordered = self._scratch.take(numel, full.dtype)  # by place inside the node first
        column = ordered.view(local, -1)[self._inside.team.place]
        column.view(nodes, -1)[self._across.team.place].copy_(chunks[self._across.team.place, self._inside.team.place])
        first = self._across.all_gather(column, what, tag, piece)

        def spread() -> None:
            self._inside.all_gather(ordered, what, tag, piece).wait()
            chunks.copy_(ordered.view(local, nodes, -1).transpose(0, 1))
            self._scratch.give(ordered)

        return Chained([first], spread)


def all_reduce(
    collectives: Collectives, values: torch.Tensor, what: str, tag: int, piece: int, scratch: Scratch
) -> None:
    """Replace `values` by their sum over a team, the same bits on every rank. Collective; waits.

    Args:
        collectives: over the team.
        values: flat, a multiple of the team's size.
        what: name for messages.
        tag: of the messages.
        piece: elements per message.
        scratch: memory.
    """
    taken: list[torch.Tensor] = []

    def take(numel: int) -> torch.Tensor:
        taken.append(scratch.take(numel, values.dtype))
        return taken[-1]

    own = values.view(collectives.team.size, -1)[collectives.team.place]
    collectives.reduce_scatter(values, what, tag, piece, take).finish(own, 1.0, accumulate=False)
    collectives.all_gather(values, what, tag, piece).wait()
    for tensor in taken:
        scratch.give(tensor)


class ReplicatedReduce(PendingReduce):
    """A reduce-scatter inside a shard group, then an all-reduce among the owners of the same shard (MiCS, section 3.2).

    The all-reduce is a reduce-scatter and an all-gather, so that every copy of a shard has the same bits.

    Args:
        inner: the reduction inside the shard group, in flight.
        numel: elements of the shard; a multiple of the number of replicas.
        dtype: in which sums are built.
        shards: ranks of the shard group.
        replicas: over the owners of this shard.
        what: name for messages.
        tag: of the messages.
        piece: elements per message.
        scratch: memory.
    """

    def __init__(
        self,
        inner: PendingReduce,
        numel: int,
        dtype: torch.dtype,
        shards: int,
        replicas: Collectives,
        what: str,
        tag: int,
        piece: int,
        scratch: Scratch,
    ) -> None:
        super().__init__(Pending([], (), str), [])
        self._inner: PendingReduce | None = inner
        self._numel = numel
        self._dtype = dtype
        self._shards = shards
        self._replicas = replicas
        self._names = what, tag, piece
        self._scratch = scratch
        self._taken: list[torch.Tensor] = []
        self._begun = False

    def _take(self, numel: int) -> torch.Tensor:
        self._taken.append(self._scratch.take(numel, self._dtype))
        return self._taken[-1]

    def include(self, earlier: torch.Tensor, scale: float) -> None:
        """As `PendingReduce.include`; before the sum over replicas has begun."""
        self._own_mean().add_(earlier, alpha=1.0 / (scale * self._shards))

    def _own_mean(self) -> torch.Tensor:
        """The mean over the shard group."""
        if self._inner is not None:
            inner, self._inner = self._inner, None
            self._mean = self._take(self._numel)
            inner.finish(self._mean, 1.0 / self._shards, accumulate=False)  # a backend may give means only
        return self._mean

    def advance(self) -> None:
        """Begin to sum over replicas."""
        if self._begun:
            return
        self._begun = True
        self._own_mean()
        what, tag, piece = self._names
        self._across = self._replicas.reduce_scatter(self._mean, what, tag, piece, self._take)

    def _total(self) -> torch.Tensor:
        """The sum over replicas of the means over shard groups."""
        self.advance()
        team = self._replicas.team
        own = self._mean.view(team.size, -1)[team.place]
        self._across.finish(own, 1.0, accumulate=False)
        self._replicas.all_gather(self._mean, *self._names).wait()
        return self._mean

    def finish(self, out: torch.Tensor, scale: float, accumulate: bool) -> None:
        """As `PendingReduce.finish`, with the sum over all ranks."""
        reduce_sum(out, [self._total()], scale=scale * self._shards, accumulate=accumulate)
        self._free()

    def discard(self) -> None:
        """Take part to the end, and forget the result."""
        self._total()
        self._free()

    def _free(self) -> None:
        for tensor in self._taken:
            self._scratch.give(tensor)
        self._taken = []
