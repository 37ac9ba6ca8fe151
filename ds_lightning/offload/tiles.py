"""How the values of one unit lie in its swap file: pure arithmetic.

[Note: tiles] An optimizer steps tile by tile, and a tile needs its gradient, its master values and every state of them
at once. So they lie side by side, as one record: a tile is read in one piece and written in one piece, without its
gradient, which comes first. Every region begins at a multiple of `SECTOR`, as direct I/O wants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

SECTOR = 4096
"""Bytes to which regions are aligned: a page, and what the logical block of any disk divides."""

_GRAIN = 1024

GRADIENT = ".grad"
MASTER = ".master"
SHARD = ".shard"


@dataclass(frozen=True, slots=True)
class TileLayout:
    """The file of one unit on one rank.

    Attributes:
        numel: elements of this rank's chunk.
        tile: elements of a tile; the last one may have fewer.
        regions: what a record holds, in order, with dtypes.
        shard: dtype of a copy of the whole chunk behind the records, for gathers; None without one.
    """

    numel: int
    tile: int
    regions: Mapping[str, torch.dtype]
    shard: torch.dtype | None = None

    @property
    def tiles(self) -> int:
        """Number of records."""
        return -(-self.numel // self.tile)

    @property
    def record(self) -> int:
        """Bytes of a record."""
        return sum(self._stride(dtype) for dtype in self.regions.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.tiles * self.record + (0 if self.shard is None else padded(self.numel * self.shard.itemsize))

    @property
    def step_bytes(self) -> int:
        """Bytes of a staging buffer for a record, with the copy for gathers behind it."""
        return self.record + (0 if self.shard is None else self._stride(self.shard))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a staging buffer for one value of every element: the whole gradient, or master values."""
        return padded(self.numel * max(self.dtype(key).itemsize for key in (GRADIENT, MASTER) if key in self.regions))

    def _stride(self, dtype: torch.dtype) -> int:
        return padded(self.tile * dtype.itemsize)

    def dtype(self, key: str) -> torch.dtype:
        """Of a region, or of the copy for gathers."""
        if key == SHARD:
            assert self.shard is not None
            return self.shard
        return self.regions[key]

    def span(self, tile: int) -> tuple[int, int]:
        """Elements `[start, stop)` of the chunk in a tile."""
        return tile * self.tile, min((tile + 1) * self.tile, self.numel)

    def within(self, key: str) -> int:
        """Byte at which a region begins in its record; also of the end of the one before it."""
        offset = 0
        for name, dtype in self.regions.items():
            if name == key:
                return offset
            offset += self._stride(dtype)
        raise KeyError(key)

    def behind(self, key: str) -> int:
        """Byte behind a region in its record."""
        return self.within(key) + self._stride(self.regions[key])

    def extents(self, key: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where elements `[start, stop)` of a region lie: `(byte in the file, first element, element behind)`."""
        if key == SHARD:
            yield self.tiles * self.record + start * self.dtype(key).itemsize, start, stop
            return
        offset, size = self.within(key), self.regions[key].itemsize
        while start < stop:
            tile = start // self.tile
            end = min((tile + 1) * self.tile, stop)
            yield tile * self.record + offset + (start - tile * self.tile) * size, start, end
            start = end


def padded(nbytes: int) -> int:
    """The next multiple of `SECTOR`."""
    return -(-nbytes // SECTOR) * SECTOR


def choose_tile(chunk: int, largest: int, regions: Mapping[str, torch.dtype], buffers: int, slots: int) -> int:
    """The largest tile of which `slots` fit into `buffers` staging buffers.

    Args:
        chunk: elements of the unit on this rank.
        largest: elements of one staging buffer of 4 bytes per element: `sub_group_size`, or the largest chunk.
        regions: what a tile holds.
        buffers: `buffer_count`.
        slots: tiles that are in memory at the same time.

    Returns:
        Elements, a multiple of `_GRAIN`, so that kernels see whole vectors.
    """
    per_element = sum(dtype.itemsize for dtype in regions.values())
    fits = buffers * largest * 4 // (slots * per_element)
    return max(_GRAIN, min(fits, largest, -(-chunk // _GRAIN) * _GRAIN) // _GRAIN * _GRAIN)
