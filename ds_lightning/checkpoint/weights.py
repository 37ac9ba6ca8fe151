"""The weights of a checkpoint, chosen, renamed and converted on their way to another file.

[Note: constant memory] Nothing here holds values. Tensors on their way are stand-ins, and whoever writes them takes one
piece of one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_lightning.checkpoint import keys
from ds_lightning.config.suggest import did_you_mean
from ds_lightning.errors import CheckpointError, ConfigError
from ds_lightning.zero.logical import LogicalTensor, flat_range, memory

STATE_DICT = "state_dict"
_PIECE = 1 << 20
"""Elements that are read, converted and written at a time; small, as each stage has its copy."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which weights, and how they are to be.

    Attributes:
        dtype: of every floating entry; None leaves each as it is stored.
        key: where in the checkpoint they are; dots lead into nested dicts.
        exclude_frozen: leave out parameters that needed no gradient.
        strip_prefix: what names lose that begin with it.
    """

    dtype: torch.dtype | None = None
    key: str = STATE_DICT
    exclude_frozen: bool = False
    strip_prefix: str = ""


@dataclass(slots=True)
class Weights:
    """Tensors on their way.

    Attributes:
        tensors: stand-ins by name; names of one tied tensor have the same one.
        others: entries that are no tensors.
        excluded: names that were left out because they were frozen.
        notes: what a user should know.
        overflowed: by name, values that became infinite; counted as they are read.
    """

    tensors: dict[str, torch.Tensor]
    others: dict[str, Any]
    excluded: list[str]
    notes: list[str]
    overflowed: dict[str, int] = field(default_factory=dict)

    def ties(self) -> list[list[str]]:
        """The names of each tensor."""
        found: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            found.setdefault(id(tensor), []).append(name)
        return list(found.values())


def choose(checkpoint: Mapping[str, Any], choice: Choice, bare: bool = True) -> Weights:
    """The weights that are to be written.

    Args:
        checkpoint: a Lightning checkpoint; its tensors may be logical.
        choice: what is wanted.
        bare: they go alone. Otherwise they stay in their checkpoint, with names and other entries as they are.

    Raises:
        CheckpointError: when they are not there, or the checkpoint does not tell which they are.
        ConfigError: when the choice makes no sense for them.
    """
    found = dict(named_tensors(checkpoint, choice.key))
    own = checkpoint.get("ds_lightning", {})
    notes: list[str] = []
    excluded: list[str] = []
    absent = [name for name in own.get("excluded_parameters", ()) if name not in found]
    if absent and choice.key == STATE_DICT:
        notes.append(f"frozen and not in the checkpoint: {shown(absent)}")
    if choice.exclude_frozen:
        if "frozen_parameters" not in own:
            raise CheckpointError(
                "--exclude-frozen: this checkpoint does not tell which parameters were frozen; those that ZeroStrategy "
                "writes do."
            )
        excluded = [name for name in own["frozen_parameters"] if found.pop(name, None) is not None]
        notes.append(f"frozen and left out: {shown(excluded)}")
    others = {name: value for name, value in found.items() if not torch.is_tensor(value)}
    tensors = {name: value for name, value in found.items() if torch.is_tensor(value)}
    if bare:
        tensors = _without(choice.strip_prefix, keys.strip_compiled(tensors))
        if others:
            notes.append(f"no tensors and left out: {shown(others)}")
    elif choice.strip_prefix:
        raise ConfigError("--strip-prefix is for weights alone: a Lightning checkpoint needs its names as they are.")
    weights = Weights({}, others, excluded, notes)
    made: dict[object, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(f"{name} cannot be exported: it has no ordinary values ({tensor.layout}).")
        key = memory(tensor)
        if key not in made:
            made[key] = _stand_in(tensor, choice.dtype, name, weights.overflowed)
        weights.tensors[name] = made[key]
    if not weights.tensors:
        raise CheckpointError(f"There is nothing to export: no tensors are left of '{choice.key}'.")
    return weights


def named_tensors(checkpoint: Mapping[str, Any], key: str, option: str = "--key {}") -> dict[str, Any]:
    """The dict of tensors under a key.

    Args:
        checkpoint: nested dicts.
        key: of the outermost one, or keys with dots between them.
        option: how the user spells the key, for messages.

    Raises:
        CheckpointError: when there are none.
    """
    value: Any = checkpoint.get(key)
    if value is None:
        value = checkpoint
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if _has_tensors(value):
        return dict(value)
    candidates = sorted(_places(checkpoint))
    guess = did_you_mean(key, candidates) or f"Weights are under: {', '.join(candidates) or 'nothing'}."
    raise CheckpointError(f"{option.format(key)}: the checkpoint has no named tensors there. {guess}")


def _has_tensors(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and any(torch.is_tensor(entry) for entry in value.values())
    )


def _places(value: Mapping[str, Any], prefix: str = "", depth: int = 3) -> Iterator[str]:
    for key, child in value.items():
        if isinstance(key, str) and isinstance(child, Mapping):
            if _has_tensors(child):
                yield prefix + key
            elif depth:
                yield from _places(child, f"{prefix}{key}.", depth - 1)


def _without(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """Names without a prefix; those that do not begin with it stay."""
    if not prefix:
        return tensors
    if not any(name.startswith(prefix) for name in tensors):
        first = sorted({f"{name.partition('.')[0]}." for name in tensors if "." in name})
        raise ConfigError(f"--strip-prefix {prefix}: no name begins with it. Names begin with: {shown(first)}.")
    names = [name.removeprefix(prefix) for name in tensors]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice or "" in names:
        raise ConfigError(f"--strip-prefix {prefix}: several tensors would have the same name: {shown(twice)}.")
    return dict(zip(names, tensors.values(), strict=True))


@dataclass(frozen=True, slots=True)
class _Converted:
    """A tensor in another dtype, or in its own."""

    inner: torch.Tensor
    dtype: torch.dtype
    name: str
    overflowed: dict[str, int]

    @property
    def shape(self) -> torch.Size:
        return self.inner.shape

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Row-major elements `[start, stop)`."""
        values = flat_range(self.inner, start, stop).cpu()
        converted = values.to(self.dtype)
        if self.dtype == torch.float16 and values.dtype != self.dtype:
            lost = int((converted.isinf() & values.isfinite()).sum())
            if lost:
                self.overflowed[self.name] = self.overflowed.get(self.name, 0) + lost
        return converted

    def pieces(self) -> list[tuple[int, torch.Tensor]]:
        """Everything: it is on no rank in particular."""
        return [(0, self.flat(0, self.shape.numel()))]


def _stand_in(tensor: torch.Tensor, dtype: torch.dtype | None, name: str, overflowed: dict[str, int]) -> torch.Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=wanted)
    return LogicalTensor(_Converted(tensor, wanted, name, overflowed))


def read(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The row-major elements of a tensor, one piece at a time."""
    for start in range(0, tensor.numel(), _PIECE):
        yield flat_range(tensor, start, min(start + _PIECE, tensor.numel()))


def shown(names: Iterable[str]) -> str:
    """Some names for a message."""
    every = list(names)
    return (", ".join(every[:5]) + (f" and {len(every) - 5} more" if len(every) > 5 else "")) or "none"
