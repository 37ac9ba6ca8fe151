"""Swap files: units whose values live on a disk.

[Note: the life of a swap file] A swap file has no name. It is made without one (`O_TMPFILE`) or loses it before
anything is in it, so the kernel removes it with the process, whatever ends that: nothing is left to tidy up after
SIGKILL, and two jobs in one folder cannot meet. Its full size is reserved when it is made, so a disk that is too small
is an error before training and not in the middle of a step.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_lightning.errors import ConfigError
from ds_lightning.offload.stored import Stored
from ds_lightning.offload.tiles import GRADIENT, MASTER, SHARD, TileLayout
from ds_lightning.ops.aio import AsyncIO, File, Transfer


class BufferPool:
    """Aligned staging buffers of one size, at most `limit`; one is free again once its last transfer is over.

    Args:
        make: allocates a buffer of so many bytes.
        limit: most buffers.
    """

    def __init__(self, make: Callable[[int], torch.Tensor], limit: int) -> None:
        self._make = make
        self.limit = limit
        self._nbytes = 0
        self._made = 0
        self._free: list[torch.Tensor] = []
        self._busy: deque[tuple[torch.Tensor, list[Transfer]]] = deque()

    def fit(self, nbytes: int) -> None:
        """Buffers must have so many bytes from now on. None is in use."""
        if nbytes > self._nbytes:
            self.clear()
            self._nbytes = nbytes

    def take(self) -> torch.Tensor:
        """A buffer, uint8, with arbitrary content; waits for a transfer where all are in use."""
        self._collect()
        if self._free:
            return self._free.pop()
        if self._made < self.limit:
            self._made += 1
            return self._make(self._nbytes)
        assert self._busy, "more staging buffers taken than there are"
        self._recycle()
        return self._free.pop()

    def try_take(self) -> torch.Tensor | None:
        """A buffer if one is free without waiting."""
        self._collect()
        if not self._free and self._made >= self.limit:
            return None
        return self.take()

    def give(self, buffer: torch.Tensor, transfers: list[Transfer] | None = None) -> None:
        """Hand a buffer back; it is used again once these transfers are over."""
        if transfers:
            self._busy.append((buffer, transfers))
        else:
            self._free.append(buffer)

    def lose(self) -> None:
        """A failure leaves a buffer that was taken to whatever is still under way in it; another may take its place."""
        self._made -= 1

    def _collect(self) -> None:
        while self._busy and all(transfer.done for transfer in self._busy[0][1]):
            self._recycle()

    def _recycle(self) -> None:
        """The oldest buffer in use is free once its transfers are over, well or not: who needs the bytes is told."""
        buffer, transfers = self._busy[0]
        for transfer in transfers:
            transfer.join()
        self._busy.popleft()
        self._free.append(buffer)

    def clear(self) -> None:
        """Wait for transfers and give the memory back."""
        while self._busy:
            self._recycle()
        self._free = []
        self._made = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self._made * self._nbytes


class UnitSwap:
    """The values of one unit that live on disk, in a file of its own.

    Args:
        io: does the transfers.
        file: with its full size.
        layout: what lies where.
    """

    def __init__(self, io: AsyncIO, file: File, layout: TileLayout) -> None:
        self._io = io
        self.file = file
        self.layout = layout
        self._writes: list[tuple[int, int, Transfer]] = []  # byte range
        self.stateful: set[int] = set()
        """Tiles with optimizer states of some parameter in them."""

    # Ranges of one region ---------------------------------------------------------------------------------------------

    def stored(self, key: str) -> Stored:
        """A region as values that are read on demand."""
        return Stored(self.layout.dtype(key), self.layout.numel, lambda start, stop: self.read(key, start, stop))

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)` of a region, a new 1-D tensor on CPU."""
        with torch.inference_mode(False):
            out = torch.empty(stop - start, dtype=self.layout.dtype(key))
        _wait(self.start_read(key, start, stop, out))
        return out

    def start_read(self, key: str, start: int, stop: int, out: torch.Tensor) -> list[Transfer]:
        """Begin to read elements `[start, stop)` of a region into `out`, 1-D, on CPU, of the region's dtype."""
        transfers = []
        for offset, first, last in self.layout.extents(key, start, stop):
            self._settle(offset, offset + (last - first) * out.itemsize)
            transfers.append(self._io.read(out[first - start : last - start], self.file, offset))
        return transfers

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Write elements of a region, from `start` on, and wait."""
        source = values.detach().to(device="cpu", dtype=self.layout.dtype(key)).contiguous()
        _wait(self.start_write(key, start, source))

    def start_write(self, key: str, start: int, values: torch.Tensor) -> list[Transfer]:
        """Begin to write elements of a region; `values` is 1-D, on CPU, of the region's dtype, and must not change."""
        transfers = []
        for offset, first, last in self.layout.extents(key, start, start + values.numel()):
            transfers.append(self._start_write(values[first - start : last - start], offset))
            if key not in (GRADIENT, MASTER, SHARD):
                self.stateful.add(first // self.layout.tile)
        return transfers

    # Tiles ------------------------------------------------------------------------------------------------------------

    def view(self, buffer: torch.Tensor, tile: int, key: str) -> torch.Tensor:
        """A region of a tile in a staging buffer, 1-D."""
        start, stop = self.layout.span(tile)
        first, dtype = self.layout.within(key), self.layout.dtype(key)
        return buffer[first : first + (stop - start) * dtype.itemsize].view(dtype)

    def shard_view(self, buffer: torch.Tensor, tile: int) -> torch.Tensor:
        """Room for the copy for gathers behind a record in a staging buffer, 1-D."""
        (start, stop), dtype = self.layout.span(tile), self.layout.dtype(SHARD)
        first = self.layout.record
        return buffer[first : first + (stop - start) * dtype.itemsize].view(dtype)

    def start_read_tile(self, tile: int, buffer: torch.Tensor, last: str) -> list[Transfer]:
        """Begin to read a record up to, and with, the region `last`."""
        offset, end = tile * self.layout.record, self.layout.behind(last)
        self._settle(offset, offset + end)
        return [self._io.read(buffer[:end], self.file, offset)]

    def start_write_tile(self, tile: int, buffer: torch.Tensor, first: str) -> list[Transfer]:
        """Begin to write a record from the region `first` on; the buffer must not change meanwhile."""
        begin, end = self.layout.within(first), self.layout.record
        self.stateful.add(tile)
        return [self._start_write(buffer[begin:end], tile * end + begin)]

    # Order ------------------------------------------------------------------------------------------------------------

    def _start_write(self, values: torch.Tensor, offset: int) -> Transfer:
        self._settle(offset, offset + values.nbytes)
        transfer = self._io.write(values, self.file, offset)
        self._writes.append((offset, offset + values.nbytes, transfer))
        return transfer

    def _settle(self, start: int, stop: int) -> None:
        """Wait for writes that overlap bytes `[start, stop)`."""
        left = []
        for first, last, transfer in self._writes:
            if first < stop and start < last:
                transfer.wait()
            elif not transfer.done:
                left.append((first, last, transfer))
            else:
                transfer.wait()  # it may have failed
        self._writes = left

    def settle(self) -> None:
        """Wait for all writes; what they could not do is an error here."""
        writes, self._writes = self._writes, []
        _wait([transfer for _, _, transfer in writes])

    def close(self) -> None:
        """Give the file back to the disk."""
        self._writes = []
        self.file.close()


class SwapSpace:
    """Owns the swap files and staging buffers of one engine on this rank.

    Args:
        aio: arguments of `AsyncIO`.
        records: most tiles in memory at the same time during a step.
        shards: most parameter shards that are read ahead.
    """

    def __init__(self, aio: dict[str, Any], records: int, shards: int) -> None:
        self.io = AsyncIO(**aio)
        self.records = BufferPool(self.io.empty, records)
        self.chunks = BufferPool(self.io.empty, 2)
        self.shards = BufferPool(self.io.empty, shards)
        self.nbytes = 0
        """Bytes on disk."""

    def create(self, folder: Path, what: str, layout: TileLayout) -> UnitSwap:
        """A swap file of full size.

        Args:
            folder: where; made if it does not exist.
            what: name of the unit, for messages.
            layout: what it will hold.

        Raises:
            ConfigError: when the folder cannot be used, or the disk is too small.
        """
        try:
            file = unnamed_file(self.io, folder, f"unit {what}", layout.nbytes)
        except OSError as error:
            raise ConfigError(trouble(folder, f"unit {what}", layout.nbytes, error)) from error
        self.nbytes += layout.nbytes
        return UnitSwap(self.io, file, layout)

    def remove(self, swap: UnitSwap) -> None:
        """A unit is gone."""
        self.nbytes -= swap.layout.nbytes
        swap.close()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of staging buffers in memory."""
        return self.records.nbytes + self.chunks.nbytes + self.shards.nbytes

    def close(self) -> None:
        """Give everything back. Files of units are closed by then."""
        for pool in (self.records, self.chunks, self.shards):
            pool.clear()
        self.io.close()


def unnamed_file(io: AsyncIO, folder: Path, what: str, nbytes: int) -> File:
    """A new file without a name, with its full size; see [Note: the life of a swap file].

    Args:
        io: opens it.
        folder: where; made if it does not exist.
        what: will be in it, for messages.
        nbytes: its size.

    Raises:
        OSError: when that is not possible.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _unnamed(folder)
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
        file = io.open(f"/proc/self/fd/{descriptor}", mode="r+")
        file.path = folder / f"(swap file of {what})"
        return file
    finally:
        os.close(descriptor)


def _unnamed(folder: Path) -> int:
    """A descriptor of a new file without a name."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # not every file system can do that; a folder that cannot be used fails again
        descriptor, name = tempfile.mkstemp(prefix=".ds_lightning_swap_", dir=folder)
        os.unlink(name)
        return descriptor


def trouble(folder: Path, what: str, nbytes: int, error: OSError) -> str:
    """What to tell the user when `unnamed_file` fails."""
    size = f"{nbytes / 2**20:.1f} MiB"
    text = f"The swap file of {what} ({size}) cannot be made in {folder}: {error.strerror or error}."
    if folder.is_dir():
        free = os.statvfs(folder)
        text += f" {free.f_bavail * free.f_frsize / 2**20:.1f} MiB are free there."
    return f"{text} Set nvme_path to a folder on a disk with enough space that this user may write to."


def _wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
