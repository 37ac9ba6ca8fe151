"""Tensors in files of `torch.save`, read range by range where they are.

[Note: reading without mapping] A map of a file costs no memory of its own, but what has been read through it counts as
the process's until the system wants it back. Whoever goes once through a checkpoint larger than memory reads ranges
into buffers instead. torch tells where each storage begins when it loads to the device "meta"; torch 2.6 does not, and
the file is mapped.
"""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ds_lightning.errors import CheckpointError
from ds_lightning.zero.logical import LogicalTensor


@dataclass(frozen=True, slots=True)
class FileSource:
    """A tensor whose elements lie in a file.

    Attributes:
        path: the file.
        offset: bytes before the tensor's first element.
        shape: of the tensor.
        stride: of the tensor in the file, in elements.
        dtype: of the tensor.
    """

    path: Path
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_contiguous(self) -> bool:
        """Whether row-major ranges are ranges of the file."""
        return self.stride == row_major(self.shape)

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Row-major elements `[start, stop)`; of a tensor that lies otherwise in the file, all of it is read."""
        if self.is_contiguous:
            return self._range(start, stop)
        return self.part((0,) * len(self.shape), self.shape).reshape(-1)[start:stop]

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of the tensor, which is not empty; what lies between its first and last element is read."""
        start = sum(offset * step for offset, step in zip(offsets, self.stride, strict=True))
        reach = sum((size - 1) * step for size, step in zip(sizes, self.stride, strict=True))
        return self._range(start, start + reach + 1).as_strided(tuple(sizes), self.stride)

    def pieces(self) -> list[tuple[int, torch.Tensor]]:
        """Everything: it is on no rank in particular."""
        return [(0, self.flat(0, self.shape.numel()))]

    def _range(self, start: int, stop: int) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=self.dtype)
        if not values.numel():
            return values
        memory = values.view(torch.uint8).numpy().data
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset + start * self.dtype.itemsize)
                found = file.readinto(memory)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        if found != memory.nbytes:
            raise CheckpointError(f"{self.path} ends too early: it is truncated, or is being replaced.")
        return values


def source_of(tensor: torch.Tensor, path: Path, before: int = 0) -> FileSource | None:
    """Where the values of a tensor are that was loaded to "meta"; None when torch does not tell.

    Args:
        tensor: the tensor.
        path: the file it was loaded from.
        before: bytes before the part of the file that torch was given.
    """
    if tensor.layout != torch.strided:
        return None
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if offset is None:
        return None
    offset += before + tensor.storage_offset() * tensor.dtype.itemsize
    return FileSource(path, offset, tensor.shape, tensor.stride(), tensor.dtype)


def stand_ins(content: Any, path: Path) -> Any:
    """Content of a file that was loaded to "meta", with logical tensors; the same one where memory is shared.

    Raises:
        ValueError: when the place of a tensor is not known.
    """
    made: dict[FileSource, torch.Tensor] = {}

    def replaced(item: Any) -> Any:
        if torch.is_tensor(item):
            source = source_of(item, path)
            if source is None:
                raise ValueError("a tensor without a place")
            if source not in made:
                made[source] = LogicalTensor(source) if item.numel() else torch.empty(item.shape, dtype=item.dtype)
            return made[source]
        if type(item) in (dict, OrderedDict, defaultdict):
            copy = item.copy()
            copy.update({key: replaced(value) for key, value in item.items()})
            return copy
        if type(item) in (list, tuple):
            return type(item)(replaced(value) for value in item)
        return item

    return replaced(content)


class Window(io.RawIOBase):
    """A part of a file that looks like a whole one.

    Args:
        file: the file; closing the window leaves it open.
        offset: where the part begins.
        length: bytes of it.
    """

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, as in every file."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read, as in every file."""
        wanted = min(len(buffer), max(0, self._length - self._position))
        self._file.seek(self._offset + self._position)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)
