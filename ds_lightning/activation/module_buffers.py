"""Buffers that a forward changes (running statistics, power iterations): a recomputation must not change them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from weakref import ref

import torch
from torch import nn


class ModuleBuffers:
    """Knows which buffers of a module its forward changes. One object per module.

    Versions do not tell: batch normalisation writes its statistics behind autograd's back. So the first forward in
    training compares values; later ones copy only what was found then, or what a version has given away since.

    Args:
        module: its buffers and those of its children.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = [(owner, name) for owner in module.modules() for name in owner._buffers]
        self._places = [(ref(owner), name) for owner, name in owners if owner._buffers[name] is not None]
        self._changing: set[int] | None = None if self._places else set()

    def before_forward(self) -> BufferValues | None:
        """To be called before a forward; the result knows the values it begins with. None outside of training."""
        if not any(self._place(place)[0].training for place in range(len(self._places))):
            return None
        wanted = range(len(self._places)) if self._changing is None else sorted(self._changing)
        values: dict[int, torch.Tensor] = {}
        for place in wanted:
            buffer = self._at(place)
            if buffer is not None:
                values[place] = buffer.detach().clone()
        versions = [None if (buffer := self._at(i)) is None else buffer._version for i in range(len(self._places))]
        return BufferValues(self, values, versions)

    def _at(self, place: int) -> torch.Tensor | None:
        owner, name = self._place(place)
        return owner._buffers.get(name)

    def _place(self, place: int) -> tuple[nn.Module, str]:
        reference, name = self._places[place]
        owner = reference()
        assert owner is not None, "who runs a module holds it"
        return owner, name

    def learn(self, values: dict[int, torch.Tensor], versions: list[int | None]) -> None:
        """A forward is over: keep in `values` what has changed."""
        moved = {
            place
            for place, version in enumerate(versions)
            if version is not None and (buffer := self._at(place)) is not None and buffer._version != version
        }
        if self._changing is None:
            self._changing = {
                place
                for place, value in values.items()
                if place in moved or (now := self._at(place)) is None or not _same(now, value)
            }
        self._changing |= moved
        for place in list(values):
            if place not in self._changing:
                del values[place]

    @contextmanager
    def showing(self, values: dict[int, torch.Tensor]) -> Iterator[None]:
        """Put copies of `values` in the place of the buffers inside."""
        before: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        for place, value in values.items():
            owner, name = self._place(place)
            before.append((owner, name, owner._buffers.get(name)))
            owner._buffers[name] = value.clone()
        try:
            yield
        finally:
            for owner, name, buffer in before:
                owner._buffers[name] = buffer


class BufferValues:
    """Buffers as they were before one forward, those that it changed."""

    def __init__(self, buffers: ModuleBuffers, values: dict[int, torch.Tensor], versions: list[int | None]) -> None:
        self._buffers = buffers
        self._values = values
        self._versions = versions

    def forward_is_over(self) -> None:
        """Forget what the forward left alone."""
        self._buffers.learn(self._values, self._versions)

    def showing(self) -> AbstractContextManager[None]:
        """The old values inside; changes are thrown away."""
        return self._buffers.showing(self._values)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())
