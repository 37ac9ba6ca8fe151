"""Which tensor of a source is which of a module: renaming, prefixes, tied names, and everything that does not fit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_lightning.checkpoint import keys
from ds_lightning.checkpoint.transformers_names import TransformersNames
from ds_lightning.checkpoint.weights import shown
from ds_lightning.errors import CheckpointError

Rename = Mapping[str, str | None] | Callable[[str], str | None]
_SHOWN = 20


@dataclass(slots=True)
class Match:
    """Tensors of a source under the names of a module.

    Attributes:
        values: by name; of the names of a tied tensor only one.
        missing: names of the module that the source lacks.
        unexpected: names that the source has for nothing.
        unfit: tensors of another shape or kind, with the reason.
        notes: what a user should know.
        twins: pairs of names that the module ties and the source has both; the first is what counts.
    """

    values: dict[str, Any]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    twins: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Everything that does not fit, a line each."""
        lines = [f"{name}: {reason}" for name, reason in self.unfit.items()]
        lines += [f"{name}: missing in the source" for name in self.missing]
        lines += [f"{name}: not in the module" for name in self.unexpected]
        return lines[:_SHOWN] + ([f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])


def match(module: nn.Module, found: Mapping[str, Any], rename: Rename | None, prefix: str | None) -> Match:
    """Find the place of each tensor. Nothing is changed, and no value is read.

    Args:
        module: where they belong.
        found: what the source has, by its own names.
        rename: names of the source to names of the module, None for what is left out: a function, or a table of what
            names begin with.
        prefix: what names of the source begin with that the module's do not have. None: as it fits best.

    Raises:
        CheckpointError: when the names make no sense.
    """
    own = keys.saved_tensors(module)
    others = TransformersNames.of(module)
    result = Match(_renamed(found, others.rename if rename is None else _function(rename)))
    note = ""
    if prefix:
        result.values, note = _without(prefix, result.values)
    elif prefix is None and keys.loads_as_usual(module):  # otherwise it may know names that we do not
        known = {name.replace(keys.COMPILED, "") for name in own}
        known |= {name for name in result.values if name.startswith(keys.formats_of_their_own(module))}
        result.values, note = _shifted(result.values, known)
    result.notes += [note] if note else []
    result.values = dict(keys.align_compiled(result.values, module))
    if keys.loads_as_usual(module):
        _sort_out(result, module, own, others)
    return result


def _function(rename: Rename) -> Callable[[str], str | None]:
    if not isinstance(rename, Mapping):
        return rename
    beginnings = sorted(rename.items(), key=lambda item: -len(item[0]))

    def renamed(name: str) -> str | None:
        for old, new in beginnings:
            if name.startswith(old):
                return None if new is None else new + name.removeprefix(old)
        return name

    return renamed


def _renamed(found: Mapping[str, Any], rename: Callable[[str], str | None]) -> dict[str, Any]:
    origin: dict[str, str] = {}
    for name in found:
        new = rename(name)
        if new is None:
            continue
        if new in origin:
            raise CheckpointError(f"{origin[new]} and {name} would both be {new}. Change `rename`.")
        origin[new] = name
    return {new: found[name] for new, name in origin.items()}


def _without(prefix: str, found: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What begins with a prefix, without it."""
    inside = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
    outside = [name for name in found if not name.startswith(prefix)]
    if not inside:
        first = sorted({f"{name.partition('.')[0]}." for name in found if "." in name})
        raise CheckpointError(f"prefix={prefix!r}: no name begins with it. Names begin with: {shown(first)}.")
    return inside, f"what does not begin with {prefix!r} is left out: {shown(outside)}" if outside else ""


def _shifted(found: dict[str, Any], own: set[str]) -> tuple[dict[str, Any], str]:
    """Names as most of them fit: as they are, inside of the module, or with the module's inside of them."""
    overlap = len(own & found.keys())
    inner, fitting = _most(own, found)
    outer, holding = _most(found, own)
    if max(fitting, holding) <= overlap:
        return found, ""
    if fitting >= holding:
        return {inner + name: value for name, value in found.items()}, f"names are those of {inner.rstrip('.')!r} here"
    inside, left_out = _without(outer, found)
    return inside, f"the module is {outer.rstrip('.')!r} there" + (f"; {left_out}" if left_out else "")


def _most(longer: Iterable[str], shorter: Iterable[str]) -> tuple[str, int]:
    """What most names of one kind have in front of a name of the other kind; "" when that is not clear."""
    wanted = set(shorter)
    counts: Counter[str] = Counter()
    for name in longer:
        for place, letter in enumerate(name):
            if letter == "." and name[place + 1 :] in wanted:
                counts[name[: place + 1]] += 1
    best = counts.most_common(2)
    if not best or (len(best) == 2 and best[0][1] == best[1][1]):
        return "", 0
    return best[0]


def _sort_out(result: Match, module: nn.Module, own: Mapping[str, torch.Tensor], others: TransformersNames) -> None:
    """Take what has no place, or another shape, out of the values."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, tensor in own.items():
        groups[id(tensor)].append(name)
    values, kept = result.values, {}
    for names in groups.values():
        present = [name for name in names if name in values]
        reasons = {name: _unfit(values[name], own[name]) for name in present}
        result.unfit |= {name: reason for name, reason in reasons.items() if reason is not None}
        fitting = [name for name, reason in reasons.items() if reason is None]
        if fitting:
            kept[fitting[0]] = values[fitting[0]]
            result.twins += [(fitting[0], name, values[name]) for name in fitting[1:]]
        elif not present:
            result.missing += [name for name in names[:1] if not others.may_lack(name)]
    formats = keys.formats_of_their_own(module)
    temporary = {name for name, _ in module.named_buffers(remove_duplicate=False)} - own.keys()
    for name, value in values.items():
        if name in own:
            continue
        if name.startswith(formats):
            kept[name] = value
        elif name not in temporary and not others.may_have(name):
            result.unexpected.append(name)
    computed = [name for name in values if name in temporary]
    result.notes += [f"the module computes these itself: {shown(computed)}"] if computed else []
    result.values = kept


def _unfit(value: Any, own: torch.Tensor) -> str | None:
    """Why a value cannot become that of a tensor."""
    if not torch.is_tensor(value):
        return f"a {type(value).__name__} in the source"
    if value.shape != own.shape:
        return f"{tuple(value.shape)} in the source, {tuple(own.shape)} in the module"
    if value.dtype == own.dtype:
        return None
    if value.is_floating_point() != own.is_floating_point() or value.is_complex() != own.is_complex():
        return f"{value.dtype} in the source, {own.dtype} in the module"
    if value.is_floating_point() and min(value.dtype.itemsize, own.dtype.itemsize) == 1:
        return f"{value.dtype} in the source, {own.dtype} in the module; scales of 8-bit values are not applied"
    return None
