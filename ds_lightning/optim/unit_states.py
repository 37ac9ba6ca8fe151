"""Optimizer states of one unit by parameter: what belongs to elements, and what ranks know of it together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_lightning.offload.stored import Values


@dataclass(slots=True)
class Elements:
    """What a rank has of a state with one value per element of a parameter.

    Attributes:
        dtype: of the values.
        pieces: `(first element, counted in the unit; 1-D values, in memory or on disk)`.
    """

    dtype: torch.dtype
    pieces: list[tuple[int, Values]] = field(default_factory=list)


UnitState = Mapping[str, Mapping[str, Any]]
"""By parameter name and key: `Elements`, or a value that belongs to the parameter as a whole."""

Outline = dict[str, dict[str, tuple[str, Any]]]
"""By parameter name and key: `("elements", dtype)` or `("value", value)`; small enough to be sent around."""


def outline(state: UnitState) -> Outline:
    """What there is, without the elements."""
    return {
        name: {
            key: ("elements", value.dtype) if isinstance(value, Elements) else ("value", _portable(value))
            for key, value in entry.items()
        }
        for name, entry in state.items()
    }


def merged(outlines: Sequence[Outline]) -> Outline:
    """What any rank has: a rank that owns nothing of a parameter knows nothing of its states."""
    known: Outline = {}
    for found in outlines:
        for name, entry in found.items():
            known.setdefault(name, {}).update(entry)
    return known


def element_keys(known: Outline) -> list[tuple[str, torch.dtype]]:
    """Keys and dtypes of the states that belong to elements, in an order that all ranks share."""
    return sorted({(k, v[1]) for entry in known.values() for k, v in entry.items() if v[0] == "elements"}, key=str)


def pieces_of(state: UnitState, key: str, dtype: torch.dtype) -> list[tuple[int, Values]]:
    """A rank's pieces of one state, of all parameters, in order."""
    found = [entry[key] for entry in state.values() if isinstance(entry.get(key), Elements)]
    return sorted(
        (piece for value in found if value.dtype == dtype for piece in value.pieces), key=lambda piece: piece[0]
    )


def _portable(value: Any) -> Any:
    return value.detach().cpu() if torch.is_tensor(value) else value
