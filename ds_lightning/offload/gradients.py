"""The reduced gradient of a unit whose states are on disk.

It is written where it arrives and read with the tile that needs it. What is done to gradients in between (unscaling,
clipping) is noted, and done when they are read: one pass over the disk in each direction. Norms are taken as they
arrive, over the very ranges that gradients in memory are summed over, so they are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ds_lightning.layout.flat import Piece
from ds_lightning.offload.swap import BufferPool, UnitSwap
from ds_lightning.offload.tiles import GRADIENT

Change = tuple[str, float]
"""`("mul", factor)`, `("clamp", bound)` or `("zero", 0.0)`."""


class SwappedGradient:
    """This rank's shard of one unit's gradient, `[chunk]`, on disk.

    Args:
        swap: the unit's file.
        pool: staging buffers of at least a chunk.
        start: where the chunk begins in the unit.
        pieces: the ranges that belong to one parameter group each, in unit coordinates.
    """

    def __init__(self, swap: UnitSwap, pool: BufferPool, start: int, pieces: Sequence[Piece]) -> None:
        self._swap = swap
        self._pool = pool
        self._start = start
        self.pieces = pieces
        self.numel = swap.layout.numel
        self.dtype = swap.layout.dtype(GRADIENT)
        self._changes: list[list[Change]] = [[] for _ in pieces]
        self._norms: list[torch.Tensor | None] = [None for _ in pieces]
        self._buffer: torch.Tensor | None = None

    # Arrival ----------------------------------------------------------------------------------------------------------

    def open(self, accumulate: bool) -> torch.Tensor:
        """Room for the gradient, `[chunk]`, with what it is so far if more is to be added."""
        if self._buffer is not None:  # a failure came before `close`
            self._buffer = None
            self._pool.lose()
        self._buffer = self._pool.take()
        values = self._buffer[: self.numel * self.dtype.itemsize].view(self.dtype)
        if accumulate:
            for transfer in self._swap.start_read(GRADIENT, 0, self.numel, values):
                transfer.wait()
            self.apply(values, self._start)
        return values

    def close(self, values: torch.Tensor) -> None:
        """The gradient has arrived in what `open` gave: on its way to disk from here on."""
        assert self._buffer is not None
        self._changes = [[] for _ in self.pieces]
        ranges = [values[piece.start - self._start : piece.stop - self._start] for piece in self.pieces]
        self._norms = list(torch._foreach_norm(ranges, 2.0)) if ranges else []
        transfers = self._swap.start_write(GRADIENT, 0, values)
        self._pool.give(self._buffer, transfers)
        self._buffer = None

    # Changes ----------------------------------------------------------------------------------------------------------

    def change(self, piece: int, change: Change) -> None:
        """Note what is to be done to the gradient of a piece."""
        self._changes[piece].append(change)
        norm = self._norms[piece]
        if change[0] == "mul":
            self._norms[piece] = None if norm is None else norm * abs(change[1])
        elif change[0] == "zero":
            self._norms[piece] = torch.zeros((), dtype=self.dtype)
        else:
            self._norms[piece] = None

    def zero(self, groups: range) -> None:
        """Forget the gradients of these parameter groups."""
        for place, piece in enumerate(self.pieces):
            if piece.group in groups:
                self._changes[place] = []
                self.change(place, ("zero", 0.0))

    def apply(self, values: torch.Tensor, start: int) -> None:
        """Do what was noted to `values`, which begin at element `start` of the unit."""
        for view, changes in self._changed(values, start):
            for what, number in changes:
                if what == "mul":
                    view.mul_(number)
                elif what == "clamp":
                    view.clamp_(-number, number)
                else:
                    view.zero_()

    def factor(self, start: int, stop: int) -> float | None:
        """The one factor to which all changes of elements `[start, stop)` of the unit come down; None if to none."""
        found = {
            tuple(self._changes[place])
            for place, piece in enumerate(self.pieces)
            if piece.start < stop and start < piece.stop
        }
        if len(found) > 1 or any(what != "mul" for changes in found for what, _ in changes):
            return None
        return math.prod(number for changes in found for _, number in changes)

    def _changed(self, values: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, list[Change]]]:
        for piece, changes in zip(self.pieces, self._changes, strict=True):
            first, last = max(piece.start, start), min(piece.stop, start + values.numel())
            if changes and last > first:
                yield values[first - start : last - start], changes

    # Reading ----------------------------------------------------------------------------------------------------------

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)` in unit coordinates, with all changes: a new tensor on CPU."""
        values = self._swap.read(GRADIENT, start - self._start, stop - self._start)
        self.apply(values, start)
        return values

    def norm(self, piece: int, norm_type: float) -> torch.Tensor:
        """The norm of a piece."""
        known = self._norms[piece]
        if norm_type == 2.0 and known is not None:
            return known
        values = self.read(self.pieces[piece].start, self.pieces[piece].stop)
        norm: torch.Tensor = torch._foreach_norm([values], norm_type)[0]
        if norm_type == 2.0:
            self._norms[piece] = norm
        return norm
