"""Says what was probably meant by a key the schema does not know."""

from __future__ import annotations

from functools import cache

from ds_lightning.config.schema import DeepSpeedConfig
from ds_lightning.config.schema.base import Block, renames, rules, walk
from ds_lightning.config.suggest import closest, listed


@cache
def _places() -> dict[str, tuple[str, ...]]:
    """Last part of every known name, old ones included -> where it belongs."""
    places: dict[str, list[str]] = {}
    for path, rule in walk(DeepSpeedConfig):
        block, _, name = path.rpartition(".")
        for spelling in (name, *rule.renamed):
            places.setdefault(spelling, []).append(f"{block}.{name}" if block else name)
    return {name: tuple(paths) for name, paths in places.items()}


def why_unknown(cls: type[Block], raw: str, prefix: str) -> str:
    """What was probably meant by an unknown key: it is misplaced, misspelt, or both."""
    elsewhere = _places().get(raw, ())
    if 0 < len(elsewhere) <= 3:
        return f"unknown key here; it belongs at {listed(elsewhere)}"
    if here := closest(raw, [*rules(cls), *renames(cls)]):
        return f"unknown key; did you mean '{prefix}{here}'?"
    all_paths = {path for paths in _places().values() for path in paths}
    if anywhere := closest(prefix + raw, all_paths) or closest(raw, _places(), cutoff=0.75):
        places = _places().get(anywhere, (anywhere,))
        return f"unknown key; did you mean {listed(places)}?"
    if prefix:
        return f"unknown key; '{prefix.rstrip('.')}' knows {listed(list(rules(cls)), 30)}"
    return "unknown key"
