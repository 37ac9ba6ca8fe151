"""Mistakes in a configuration: collected, then raised together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_lightning.errors import ConfigError


class Problem(NamedTuple):
    """One mistake: the dotted key it is about, and a text for the user."""

    key: str
    text: str


def raise_all(problems: Sequence[Problem], source: str) -> None:
    """Raise one ConfigError with a numbered list, or return when there is nothing to say."""
    unique = list(dict.fromkeys(problems))
    if not unique:
        return
    count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
    lines = [f"  {number}. {problem.key}: {problem.text}" for number, problem in enumerate(unique, 1)]
    raise ConfigError("\n".join([f"{count} in {source}:", *lines]))
