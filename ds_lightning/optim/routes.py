"""Whole parameters on one rank each: who works on which, and what travels there and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_lightning.comm.collectives import Collectives
from ds_lightning.optim.parts import Whole, Work, balanced

ROUND_NUMEL = 1 << 26
"""Elements that a rank works on between two exchanges, on average: so much is in buffers at once."""

BATCH_NUMEL = 1 << 24
"""Elements of the parameters that are worked on together."""

_TAG = 1 << 30  # beyond those of units


@dataclass(frozen=True, slots=True)
class View:
    """What this rank has of a parameter in one tensor: elements `[start, stop)`, from `offset` in the parameter on."""

    tensor: Tensor
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start

    def of(self, values: Mapping[Tensor, Tensor]) -> Tensor:
        """The values there."""
        return values[self.tensor][self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Shares:
    """A parameter and who holds what of it.

    Attributes:
        whole: the parameter.
        spans: first element and number of elements that each rank owns.
        views: what this rank holds, in order: what it owns, or all of it.
    """

    whole: Whole
    spans: list[tuple[int, int]]
    views: list[View]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a part of a parameter lies in the buffer that its owner exchanges with a peer."""

    peer: int
    start: int
    offset: int
    numel: int


@dataclass(slots=True)
class _Round:
    """What is exchanged at once. One buffer per peer serves both ways.

    Attributes:
        batches: parameters that this rank owns, those of one group and shape together.
        pieces: of each of them, what peers hold.
        sizes: by peer, elements of these.
        views: by owner, what this rank holds of its parameters, in the same order.
    """

    batches: list[list[int]]
    pieces: dict[int, list[_Piece]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    views: list[list[View]] = field(default_factory=list)


class Routes:
    """Takes chosen parameters to their owners and the results back.

    Costs are balanced over all ranks, whatever the layout is. Where each rank holds everything (stage 0), nothing
    travels to owners, and each of them sends its results to all: the work is shared at every stage.

    Args:
        shares: of all parameters of a step, by number.
        chosen: numbers of those that are worked on; the same on all ranks.
        costs: of each of them.
        replicated: every rank holds everything.
        collectives: over all ranks.
    """

    def __init__(
        self,
        shares: Sequence[Shares],
        chosen: Sequence[int],
        costs: Sequence[float],
        replicated: bool,
        collectives: Collectives,
    ) -> None:
        self._shares = shares
        self._replicated = replicated
        self._collectives = collectives
        self._topology = collectives.topology
        self._rounds = [self._round(*each) for each in self._assign(chosen, costs)]

    def run(self, values: Mapping[Tensor, Tensor], dtype: torch.dtype, work: Work) -> None:
        """Apply `work` to the chosen parameters and put the results in the place of the values. Collective.

        Args:
            values: by tensor that is stepped on.
            dtype: of all values, on every rank.
            work: see `Work`.
        """
        for each in self._rounds:
            sizes = [sum(view.numel for view in views) for views in each.views]
            held = self._buffers(sizes, dtype)
            if self._replicated:
                shared = self._buffers([max(each.sizes)], dtype)[0]
                owned = [shared] * len(sizes)  # the results are the same for all
                owned[self._topology.rank] = shared[:0]
            else:
                owned = self._buffers(each.sizes, dtype)
                self._pack(each, values, held)
                self._exchange(held, owned, 0)
            for batch in each.batches:
                self._work(batch, each, values, owned, dtype, work)
            self._exchange(owned, held, 1)
            self._unpack(each, values, held)

    # Plan -------------------------------------------------------------------------------------------------------------

    def _assign(self, chosen: Sequence[int], costs: Sequence[float]) -> Iterator[tuple[list[int], list[int]]]:
        """Parameters of each round and their owners."""
        ranks = self._topology.world_size
        loads = [0.0] * ranks
        members: list[int] = []
        price: list[float] = []
        for number, cost in zip((*chosen, -1), (*costs, 0.0), strict=True):
            filled = sum(self._shares[member].whole.numel for member in members)
            if members and (number < 0 or filled + self._shares[number].whole.numel > ROUND_NUMEL * ranks):
                owners = balanced(price, ranks, loads)
                for owner, each in zip(owners, price, strict=True):
                    loads[owner] += each
                yield members, owners
                members, price = [], []
            members.append(number)
            price.append(cost)

    def _round(self, members: Sequence[int], owners: Sequence[int]) -> _Round:
        rank, ranks = self._topology.rank, self._topology.world_size
        found = _Round([], sizes=[0] * ranks, views=[[] for _ in range(ranks)])
        mine: dict[tuple[int, torch.Size], list[int]] = {}
        for number, owner in zip(members, owners, strict=True):
            share = self._shares[number]
            if owner != rank:
                found.views[owner] += share.views
                continue
            mine.setdefault((share.whole.group, share.whole.shape), []).append(number)
            found.pieces[number] = []
            for peer, (offset, numel) in enumerate(share.spans):
                if self._replicated:
                    offset, numel = 0, share.whole.numel
                if peer != rank and numel:
                    found.pieces[number].append(_Piece(peer, found.sizes[peer], offset, numel))
                    found.sizes[peer] += numel
        for (_, shape), numbers in mine.items():
            if shape.numel():
                count = max(1, BATCH_NUMEL // shape.numel())
                found.batches += [numbers[k : k + count] for k in range(0, len(numbers), count)]
        return found

    # One round --------------------------------------------------------------------------------------------------------

    def _buffers(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        flat = torch.empty(sum(sizes), dtype=dtype, device=self._topology.device)
        return list(flat.split(list(sizes)))

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], way: int) -> None:
        self._collectives.exchange(outgoing, incoming, "whole parameters", _TAG + way).wait()

    def _pack(self, each: _Round, values: Mapping[Tensor, Tensor], held: Sequence[Tensor]) -> None:
        _copy(_split(each, held), [view.of(values) for views in each.views for view in views])

    def _unpack(self, each: _Round, values: Mapping[Tensor, Tensor], held: Sequence[Tensor]) -> None:
        _copy([view.of(values) for views in each.views for view in views], _split(each, held))

    def _work(
        self,
        batch: Sequence[int],
        each: _Round,
        values: Mapping[Tensor, Tensor],
        owned: Sequence[Tensor],
        dtype: torch.dtype,
        work: Work,
    ) -> None:
        """Put parameters of one shape together, work on them, and take the results apart."""
        numel = self._shares[batch[0]].whole.numel
        together = torch.empty(len(batch), numel, dtype=dtype, device=self._topology.device)
        here: list[Tensor] = []
        places: list[tuple[int, int, int]] = []
        theirs: list[tuple[Tensor, int, int]] = []
        for k, number in enumerate(batch):
            for view in self._shares[number].views:
                here.append(view.of(values))
                places.append((k, view.offset, view.offset + view.numel))
            for piece in each.pieces[number]:
                theirs.append((owned[piece.peer][piece.start : piece.start + piece.numel], k, piece.offset))
        if not self._replicated:
            _copy([together[k, at : at + part.numel()] for part, k, at in theirs], [part for part, _, _ in theirs])
        _copy([together[k, start:stop] for k, start, stop in places], here)
        result = work(batch, together)
        _copy(here, [result[k, start:stop] for k, start, stop in places])
        if self._replicated:  # one buffer stands for all peers
            theirs = list({part.data_ptr(): (part, k, at) for part, k, at in theirs}.values())
        _copy([part for part, _, _ in theirs], [result[k, at : at + part.numel()] for part, k, at in theirs])


def _split(each: _Round, held: Sequence[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for views, buffer in zip(each.views, held, strict=True):
        found += buffer.split([view.numel for view in views]) if views else ()
    return found


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
