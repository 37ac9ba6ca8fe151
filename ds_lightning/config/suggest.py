"""Guesses what a misspelt or misplaced name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_CUTOFF = 0.6


def closest(name: str, candidates: Iterable[str], cutoff: float = _CUTOFF) -> str | None:
    """The candidate nearest to `name`, or None when nothing is near; letter case does not count."""
    by_fold: dict[str, str] = {}
    for candidate in candidates:
        by_fold.setdefault(candidate.casefold(), candidate)
    matches = difflib.get_close_matches(name.casefold(), list(by_fold), n=1, cutoff=cutoff)
    return by_fold[matches[0]] if matches else None


def did_you_mean(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """A question that names the nearest candidate (after `prefix`), or an empty string."""
    guess = closest(name, candidates)
    return f"did you mean '{prefix}{guess}'?" if guess else ""


def listed(names: Sequence[str], limit: int = 12) -> str:
    """Names for the end of a sentence: `'a', 'b' or 'c'`, shortened beyond `limit`."""
    shown = [f"'{name}'" for name in names[:limit]]
    if len(names) > limit:
        return ", ".join(shown) + ", ..."
    if len(shown) < 2:
        return "".join(shown)
    return ", ".join(shown[:-1]) + f" or {shown[-1]}"
