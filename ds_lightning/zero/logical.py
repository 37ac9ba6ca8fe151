"""Tensors of a checkpoint in their logical shapes, whose values are elsewhere until someone needs them.

[Note: logical tensors] A checkpoint is a dict of whole tensors, and users' hooks see and edit it. No rank should hold
these tensors just because of that, so they are stand-ins: shape and dtype are there, and the first operation on one
makes its values, by asking all ranks for their shards (saving) or by reading a file (loading). Whoever writes or loads
does not touch them but takes the flat range that belongs to this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ds_lightning.layout.boxes import Box, boxes
from ds_lightning.offload.stored import Values, present
from ds_lightning.zero.released import METADATA


class Source(Protocol):
    """Where the values of a logical tensor are."""

    @property
    def shape(self) -> torch.Size:
        """The logical shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Row-major elements `[start, stop)`, 1-D, on CPU."""


class SharedSource(Source, Protocol):
    """A source that is spread over ranks."""

    def pieces(self) -> Sequence[tuple[int, Values]]:
        """What this rank has to write: `(first row-major element, 1-D values)`, disjoint over all ranks."""


class LogicalTensor(torch.Tensor):
    """A stand-in for a whole tensor; see [Note: logical tensors]. It reads as a CPU tensor."""

    _source: Source
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls: type[LogicalTensor], source: Source) -> LogicalTensor:
        """Make one over `source`."""
        made: LogicalTensor = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype)
        made._source = source
        made._value = None
        return made

    @property
    def source(self) -> Source:
        """Where the values are, as long as nobody has touched them."""
        return self._source

    @property
    def value(self) -> torch.Tensor | None:
        """The whole tensor, if someone has touched it (and perhaps changed it)."""
        return self._value

    def whole(self) -> torch.Tensor:
        """The whole tensor; it is kept, so that changes to it last. Collective where `source.flat` is."""
        if self._value is None:
            self._value = self._source.flat(0, self.numel()).reshape(self.shape)
        return self._value

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Row-major elements `[start, stop)`, without touching the others."""
        if self._value is not None:
            return self._value.reshape(-1)[start:stop]
        return self._source.flat(start, stop)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions about shape and dtype; anything else makes the values."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach:
            return args[0]
        if func is torch.Tensor.copy_ and not isinstance(args[0], LogicalTensor):  # loaded once, so not kept
            source = args[1]
            return func(args[0], source.flat(0, source.numel()).reshape(source.shape), *args[2:], **(kwargs or {}))
        return func(*_values(tuple(args)), **_values(dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """As `__torch_function__`, for calls from C++."""
        return func(*_values(tuple(args)), **_values(dict(kwargs or {})))

    # What torch.distributed.checkpoint asks: ordinary chunks of an N-dimensional tensor.

    def _boxes(self) -> Iterator[tuple[Box, Values]]:
        """The boxes of this rank with their values, 1-D."""
        if self._value is None and hasattr(self._source, "pieces"):
            pieces = self._source.pieces()
        else:
            pieces = [(0, self.flat(0, self.numel()))]
        for start, values in pieces:
            for box in boxes(self.shape, start, start + values.numel()):
                yield box, values[box.start - start : box.start - start + box.numel]

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        """One item per box."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=properties,
                    size=self.shape,
                ),
            )
            for box, _ in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """The boxes of this rank."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in self._boxes()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The values of the box at an index."""
        for box, values in self._boxes():
            if torch.Size(box.offsets) == index.offset:
                return present(values).view(box.sizes)
        raise KeyError(f"{index} is not on this rank")


def _values(item: Any) -> Any:
    """Whole tensors in the place of stand-ins, in containers that calls of torch use."""
    if isinstance(item, LogicalTensor):
        return item.whole()
    if isinstance(item, tuple):
        return tuple(_values(part) for part in item)
    if isinstance(item, list):
        return [_values(part) for part in item]
    if isinstance(item, dict):
        return {key: _values(part) for key, part in item.items()}
    return item


def logical(source: Source) -> torch.Tensor:
    """A stand-in for what `source` holds; an ordinary tensor where that has no elements."""
    return LogicalTensor(source) if source.shape.numel() else torch.empty(source.shape, dtype=source.dtype)


def is_stored(values: Mapping[str, Any]) -> bool:
    """Whether some of these tensors are stand-ins whose values are to be read."""
    return any(isinstance(value, LogicalTensor) and value.value is None for value in values.values())


def settle(module: nn.Module) -> None:
    """Read what modules have kept of a state as it was given to them; metrics do so. Its file may soon be gone."""
    for child in module.modules():
        for values in (child.__dict__, child._buffers):
            for key, value in values.items():
                if isinstance(value, LogicalTensor):
                    values[key] = value.whole()
                elif type(value) is list and any(isinstance(part, LogicalTensor) for part in value):
                    values[key] = _values(value)


def flat_range(values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Row-major elements `[start, stop)` of a tensor, which may be a stand-in."""
    if isinstance(values, LogicalTensor):
        return values.flat(start, stop)
    return values.detach().reshape(-1)[start:stop]


def memory(values: torch.Tensor) -> object:
    """What two names of one tensor have in common, and no other tensor has; while it is alive."""
    if isinstance(values, LogicalTensor):
        if values.value is None:
            return "stand-in", id(values)
        values = values.value
    if not values.numel() or values.layout != torch.strided:
        return "object", id(values)
    storage = values.untyped_storage()._cdata
    return storage, values.storage_offset(), tuple(values.shape), values.stride(), values.dtype
