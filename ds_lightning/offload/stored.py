"""Values that are somewhere else until someone needs them."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Stored:
    """A range of a flat vector on disk, or to be computed; indexing with a slice gives a part of it, `read` the values.

    Args:
        dtype: of the values.
        numel: elements.
        read: gives elements `[start, stop)` as a new 1-D tensor on CPU.
    """

    __slots__ = ("_first", "_numel", "_read", "dtype")

    def __init__(
        self, dtype: torch.dtype, numel: int, read: Callable[[int, int], torch.Tensor], first: int = 0
    ) -> None:
        self.dtype = dtype
        self._numel = numel
        self._read = read
        self._first = first

    def numel(self) -> int:
        """Elements."""
        return self._numel

    def __getitem__(self, part: slice) -> Stored:
        """Elements `part.start` to `part.stop`, still on disk."""
        start, stop, step = part.indices(self._numel)
        assert step == 1
        return Stored(self.dtype, max(stop - start, 0), self._read, self._first + start)

    def read(self) -> torch.Tensor:
        """The values, a new 1-D tensor on CPU."""
        return self._read(self._first, self._first + self._numel)


Values = torch.Tensor | Stored
"""A 1-D tensor, or one that must be read."""


def present(values: Values) -> torch.Tensor:
    """The values themselves."""
    return values.read() if isinstance(values, Stored) else values.detach()


def widened(values: Values, dtype: torch.dtype) -> Values:
    """The same in another dtype, which no memory is taken for until someone reads them."""
    if values.dtype == dtype:
        return values
    return Stored(dtype, values.numel(), lambda start, stop: present(values[start:stop]).cpu().to(dtype))
