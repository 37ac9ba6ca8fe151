"""Where in the files of a DeepSpeed checkpoint the elements of each parameter are.

[Note: layouts of DeepSpeed] Stages 1 and 2 lay the parameters of a group head to tail in the order of `param_shapes`,
pad the end, and cut the whole into equal parts, one of each rank; the part of the last rank is saved without its
padding, its moments with it. (`param_slice_mappings` in the same files is wrong with `round_robin_gradients`, so it is
not used.) Stage 3 cuts each parameter by itself, padded to a multiple of the ranks, and lays the slices of a rank head
to tail in sub-groups. Stage 0 does not cut anything, and does not save names of what the optimizer has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ds_lightning.checkpoint.deepspeed.pickles import read
from ds_lightning.errors import CheckpointError

_OF_RANKS = frozenset({"worker_error", "server_error"})


class StoredTensor(Protocol):
    """A tensor that is in files until a part of it is asked for."""

    @property
    def shape(self) -> torch.Size:
        """The logical shape."""

    @property
    def dtype(self) -> torch.dtype:
        """float32 for values that were saved in 16 bits; otherwise as saved."""

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Row-major elements `[start, stop)`: 1-D, of `dtype`, on the CPU; a view of the file where possible."""


def whole(stored: StoredTensor) -> torch.Tensor:
    """All of a stored tensor, in its logical shape. It may be a view of a private map of the file."""
    return stored.flat(0, math.prod(stored.shape)).view(stored.shape)


def read_value(value: Any, tensor: Callable[[StoredTensor], Any]) -> Any:
    """A value of an optimizer's state, with what `tensor` makes in the place of a stored one."""
    return value if torch.is_tensor(value) or not hasattr(value, "flat") else tensor(value)


@dataclass(frozen=True)
class Pieces:
    """A tensor in pieces; `parts` are `(first row-major element, 1-D values)` in order, without gaps."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[tuple[int, torch.Tensor], ...]

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """See `StoredTensor`."""
        found = [
            values[max(start - first, 0) : stop - first]
            for first, values in self.parts
            if first < stop and first + values.numel() > start
        ]
        if not found:
            return torch.empty(0, dtype=self.dtype)
        return (found[0] if len(found) == 1 else torch.cat(found)).to(self.dtype)


@dataclass(frozen=True)
class InFile:
    """A tensor that has a file for itself, which is opened anew each time: there may be more files than maps."""

    shape: torch.Size
    dtype: torch.dtype
    path: Path

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """See `StoredTensor`."""
        return tensor_in(self.path, math.prod(self.shape)).reshape(-1)[start:stop].to(self.dtype)


@dataclass
class Contents:
    """What the optimizer's files hold, by the names in them.

    Attributes:
        stage: 0 to 3.
        world_size: the number of ranks that wrote it.
        weights: masters of trainable parameters.
        states: optimizer states; tensors with one value per element, and numbers.
        groups: hyper-parameters of each group, and the names of its parameters; None where they are not known.
        by_number: states by number, at stage 0; the numbers go through the groups.
        numbers: how many parameters each group has, at stage 0.
        header: the dict of the optimizer.
    """

    stage: int
    world_size: int
    weights: dict[str, StoredTensor] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[tuple[dict[str, Any], list[str] | None]] = field(default_factory=list)
    by_number: dict[int, dict[str, Any]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    header: Mapping[str, Any] = field(default_factory=dict)


def stored(values: torch.Tensor) -> Pieces:
    """A whole tensor as a stored one."""
    return Pieces(values.shape, wide(values.dtype), ((0, values.detach().reshape(-1)),))


def cut(
    where: Sequence[tuple[int, torch.Tensor | None]], start: int, shape: torch.Size, paths: Sequence[Path]
) -> Pieces:
    """Elements `[start, start + numel)` of values that begin at the given places, as a tensor of `shape`.

    Raises:
        CheckpointError: when some of them are nowhere.
    """
    numel = math.prod(shape)
    parts: list[tuple[int, torch.Tensor]] = []
    done = 0
    for first, values in where:
        if values is None:
            continue
        low, high = max(start + done, first), min(start + numel, first + values.numel())
        if low == start + done and low < high:
            parts.append((done, values[low - first : high - first]))
            done = high - start
    if done != numel:
        raise CheckpointError(
            f"{paths[0].parent}: a tensor of {numel} elements has only {done} in the files. One of {paths[0].name} to "
            f"{paths[-1].name} belongs to another checkpoint, or lacks the state of the optimizer."
        )
    return Pieces(torch.Size(shape), wide(parts[0][1].dtype) if parts else torch.float32, tuple(parts))


def head_to_tail(shapes: Mapping[str, Any], paddings: Sequence[int] | None) -> dict[str, tuple[int, torch.Size]]:
    """First element and shape of each parameter in a buffer; padding comes after a parameter."""
    places: dict[str, tuple[int, torch.Size]] = {}
    start = 0
    for number, (name, shape) in enumerate(shapes.items()):
        places[name] = (start, torch.Size(shape))
        start += math.prod(shape) + (paddings[number] if paddings else 0)
    return places


def running(parts: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor | None]]:
    """Tensors that follow each other, with the first element of each."""
    where: list[tuple[int, torch.Tensor | None]] = []
    start = 0
    for part in parts:
        where.append((start, part.detach().reshape(-1)))
        start += part.numel()
    return where


def elementwise(states: Sequence[Mapping[str, Any]], partitions: Sequence[torch.Tensor]) -> list[str]:
    """Keys of states that have one value per element.

    Error buffers of compressed optimizers have not: they belong to ranks and mean nothing to others.
    """
    for state, partition in zip(states, partitions, strict=True):
        if state and partition.numel():
            least = partition.numel()
            return [
                key
                for key, value in state.items()
                if key not in _OF_RANKS
                and torch.is_tensor(value)
                and value.ndim == 1
                and least <= value.numel() < least + 2 * len(partitions)  # padded
            ]
    return []


def state_of(state: Mapping[str, Any], key: str) -> torch.Tensor | None:
    """A state as 1-D values."""
    value = state.get(key)
    return value.detach().reshape(-1) if torch.is_tensor(value) else None


def numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state has once for all elements."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, int | float | str | None) or (torch.is_tensor(value) and value.ndim == 0)
    }


def with_step(entry: dict[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's fused optimizers count steps in the group."""
    if any(hasattr(value, "flat") for value in entry.values()) and "step" not in entry and "step" in group:
        entry["step"] = group["step"]
    if isinstance(entry.get("step"), int | float):
        entry["step"] = torch.tensor(float(entry["step"]))
    return entry


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group."""
    return {key: value for key, value in group.items() if key not in ("params", "step")}


def tensor_in(path: Path, numel: int) -> torch.Tensor:
    """The tensor that a file of a universal checkpoint holds, in whatever shape.

    Raises:
        CheckpointError: when it is missing or damaged, or has another number of elements.
    """
    values = read(path)
    values = values.get("param") if isinstance(values, Mapping) else values
    if not torch.is_tensor(values) or values.numel() != numel:
        raise CheckpointError(
            f"{path} does not hold the {numel} elements that it should. Convert the checkpoint again with "
            "ds_to_universal."
        )
    return values.detach()


def mapping_in(path: Path) -> Mapping[str, Any]:
    """The dict that a file holds.

    Raises:
        CheckpointError: when it is missing or damaged, or holds something else.
    """
    found = read(path)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} is no file of DeepSpeed: it holds {found!r} where a dict was expected.")
    return found


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit floats, any other as it is."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
