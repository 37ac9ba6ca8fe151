"""Tensors in nested arguments: taken out, and put back into a copy of what held them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

_DEEPEST = 8  # deeper nests are data of someone's own


class _Place:
    """Stands for a tensor that was taken out."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What is left of `value` without its tensors, which are appended to `tensors`.

    Looks into lists, tuples, named tuples, dicts and dataclasses, and copies them, so that a list which is appended to
    later is as it was. Other objects are left alone, and so are parameters: whoever holds the model holds them.
    """

    def leave(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter):
            return leaf
        tensors.append(leaf)
        return _Place(len(tensors) - 1)

    return _map(value, leave)


def put_back(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A new copy of what `take_out` left, with these tensors in place."""
    return _map(value, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors where `take_out` looks, parameters too."""
    found: list[torch.Tensor] = []

    def see(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    _map(value, see)
    return found


def _map(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind is _Place or depth > _DEEPEST:
        return change(value)

    def inner(member: Any) -> Any:
        return _map(member, change, depth + 1)

    if kind in (list, tuple):
        return kind(inner(member) for member in value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(inner(member) for member in value))
    if kind in (dict, OrderedDict):
        return kind((name, inner(member)) for name, member in value.items())
    if is_dataclass(value) and not isinstance(value, type | Mapping | nn.Module):
        twin = copy.copy(value)
        for item in fields(value):
            if hasattr(value, item.name):
                object.__setattr__(twin, item.name, inner(getattr(value, item.name)))
        return twin
    return change(value)
