"""Where parts of parameters are kept while a model is built: in memory, or on the disk where they will live."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

from ds_lightning.errors import ConfigError
from ds_lightning.offload.policy import OffloadPolicy
from ds_lightning.offload.swap import trouble, unnamed_file
from ds_lightning.offload.tiles import padded
from ds_lightning.ops.aio import AsyncIO
from ds_lightning.ops.memory import return_freed_memory


class Part(Protocol):
    """A flat part of a parameter."""

    @property
    def numel(self) -> int:
        """Elements."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""

    def copy_to(self, target: torch.Tensor) -> None:
        """Fill `target`, 1-D, `numel` elements of the dtype."""

    def write(self, values: torch.Tensor) -> None:
        """Replace the first elements by `values`, 1-D, any dtype."""


class Shelf(Protocol):
    """Keeps parts."""

    def put(self, part: torch.Tensor) -> Part:
        """Keep a part, 1-D; the tensor belongs to the shelf from now on."""

    def close(self) -> None:
        """Nothing of it is needed any more."""


class _InMemory:
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.numel = values.numel()
        self.dtype = values.dtype

    def copy_to(self, target: torch.Tensor) -> None:
        target.copy_(self._values)

    def write(self, values: torch.Tensor) -> None:
        self._values[: values.numel()].copy_(values)


class MemoryShelf:
    """Keeps parts in memory, where they are."""

    def put(self, part: torch.Tensor) -> Part:
        """As `Shelf.put`."""
        return _InMemory(part)

    def close(self) -> None:
        """Nothing to do: parts are memory of their own."""


class _OnDisk:
    def __init__(self, shelf: DiskShelf, offset: int, numel: int, dtype: torch.dtype) -> None:
        self._shelf = shelf
        self._offset = offset
        self.numel = numel
        self.dtype = dtype

    def copy_to(self, target: torch.Tensor) -> None:
        self._shelf.read(target, self._offset)

    def write(self, values: torch.Tensor) -> None:
        self._shelf.write(values.to(device="cpu", dtype=self.dtype).contiguous(), self._offset)


class DiskShelf:
    """Keeps parts in one file without a name, see [Note: the life of a swap file].

    Args:
        folder: where; made if it does not exist.
        policy: says how files are read and written.

    Raises:
        ConfigError: when the folder cannot be used.
    """

    def __init__(self, folder: Path, policy: OffloadPolicy) -> None:
        return_freed_memory()  # layers come whole and go: what they leave is not to be kept for others
        self._folder = folder
        self._io = AsyncIO(**policy.aio)
        self._nbytes = 0
        try:
            self._file = unnamed_file(self._io, folder, "parameters under construction", 0)
        except OSError as error:
            raise ConfigError(trouble(folder, "the model's parameters", 0, error)) from error

    def put(self, part: torch.Tensor) -> Part:
        """As `Shelf.put`.

        Raises:
            ConfigError: when the disk is full.
        """
        kept = _OnDisk(self, self._nbytes, part.numel(), part.dtype)
        size = padded(part.nbytes)
        try:
            if size:
                os.posix_fallocate(self._file.fd, self._nbytes, size)
            self._nbytes += size
        except OSError as error:
            raise ConfigError(trouble(self._folder, "the model's parameters", self._nbytes + size, error)) from error
        kept.write(part)
        return kept

    def read(self, target: torch.Tensor, offset: int) -> None:
        """Fill `target` from byte `offset` on."""
        if target.numel():
            self._io.read(target, self._file, offset).wait()

    def write(self, values: torch.Tensor, offset: int) -> None:
        """Write `values` from byte `offset` on."""
        if values.numel():
            self._io.write(values, self._file, offset).wait()

    def close(self) -> None:
        """Give the file back to the disk."""
        self._file.close()
        self._io.close()


def shelf_for(policy: OffloadPolicy | None) -> Shelf:
    """On disk if anything that is trained or gathered will live there.

    Raises:
        ConfigError: when the folder cannot be used.
    """
    if policy is None or not policy.uses_disk:
        return MemoryShelf()
    return DiskShelf(policy.optimizer_path or policy.param_path or Path(), policy)
