"""Flat ranges of row-major tensors as N-dimensional boxes: pure arithmetic.

[Note: boxes] Rank r owns a range of a unit's flat buffer, so of a parameter it owns a range of row-major elements. Such
a range is at most `2 * ndim - 1` boxes: in each dimension but the last a partial row before and one behind the full
rows. Boxes are what `torch.distributed.checkpoint` calls chunks, so shards can be stored as ordinary pieces of an
ordinary tensor, whatever the stage and the world size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """An axis-parallel part of a tensor whose elements are contiguous in row-major order.

    Attributes:
        offsets: index of its first element, one number per dimension.
        sizes: its shape.
        start: position of its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the flat range `[start, stop)` of a tensor of `shape` into boxes, in order.

    An empty range has none. A tensor of no dimensions is one box of one element.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"[{start}, {stop}) is no range of a tensor of shape {shape}")
    return [Box(offsets, sizes, at) for offsets, sizes, at in _cut(shape, start, stop)] if stop > start else []


def _cut(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    if not shape:
        yield (), (), 0
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # full rows [first, last)
    if first > last:  # within one row
        yield from _inner(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _inner(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        rest = (0,) * (len(shape) - 1)
        yield (first, *rest), (last - first, *shape[1:]), first * row
    if stop > last * row:
        yield from _inner(shape, last, 0, stop - last * row)


def _inner(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    base = index * math.prod(shape[1:])
    for offsets, sizes, at in _cut(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes), base + at


def overlap(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of what a box shares with another one, in the tensor's coordinates; None when nothing."""
    lo = tuple(max(a, b) for a, b in zip(box.offsets, offsets, strict=True))
    hi = tuple(min(a + m, b + n) for a, m, b, n in zip(box.offsets, box.sizes, offsets, sizes, strict=True))
    if any(b <= a for a, b in zip(lo, hi, strict=True)):
        return None
    return lo, tuple(b - a for a, b in zip(lo, hi, strict=True))
