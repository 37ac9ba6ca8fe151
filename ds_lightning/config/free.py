"""The free arguments of an optimizer or schedule, and what a reading notes of every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_lightning.config.coerce import coerce, shown
from ds_lightning.config.problems import Problem
from ds_lightning.config.schema.base import AUTO, Key
from ds_lightning.config.schema.optimizer import optimizer_param_type
from ds_lightning.config.suggest import closest, listed

NULL = "null is the same as absent"


@dataclass(frozen=True)
class Entry:
    """What became of one key the user gave.

    Attributes:
        key: Dotted path as the user wrote it.
        name: Dotted path of the canonical key.
        value: The value as given.
        status: used | renamed | inert | ignored | auto | error.
        remark: One sentence, or empty.
    """

    key: str
    name: str
    value: Any
    status: str
    remark: str = ""


class FreeArguments:
    """Reads arguments whose names depend on a type. Owns what one reading finds."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.problems: list[Problem] = []
        self.given: set[str] = set()
        self.autos: set[str] = set()

    def params(self, value: Any, path: str, rule: Key, kind: str | None) -> dict[str, Any]:
        """The free arguments of an optimizer or schedule, checked as far as its type is known."""
        if not isinstance(value, Mapping):
            raise ValueError(f"expected an object, got {shown(value)}")
        assert rule.params is not None
        return self._arguments(value, path, rule.params(kind), kind)

    def rows_of_params(self, value: Any, path: str, rule: Key, kind: str | None) -> list[dict[str, Any]]:
        """A list of blocks of such arguments and selectors, or an object of them by name."""
        assert rule.params is not None
        assert rule.selectors is not None
        if isinstance(value, Mapping):
            named = [(name, {"name": name, **row} if isinstance(row, Mapping) else row) for name, row in value.items()]
        elif isinstance(value, list | tuple):
            named = [(str(place), row) for place, row in enumerate(value)]
        else:
            raise ValueError(f"expected a list of objects, got {shown(value)}")
        known = rule.params(kind)
        known = None if known is None else {**rule.selectors, **known}
        rows = []
        for name, row in named:
            here = f"{path}.{name}"
            if isinstance(row, Mapping):
                rows.append(self._arguments(row, here, known, kind, rule))
            else:
                self._fail(here, row, f"expected an object, got {shown(row)}")
        return rows

    def _arguments(
        self,
        values: Mapping[str, Any],
        path: str,
        known: Mapping[str, Any] | None,
        kind: str | None,
        row: Key | None = None,
    ) -> dict[str, Any]:
        """Arguments by name; those of a `row` may be selectors and are not automatic."""
        selectors = {} if row is None or row.selectors is None else row.selectors
        found: dict[str, Any] = {}
        for name, item in values.items():
            here = f"{path}.{name}"
            if known is not None and name not in known:
                self._fail(here, item, _unknown_argument(name, known, kind, path))
            elif item is None:
                self._note(here, None, "used", NULL)
            elif is_auto(item) and row is not None:
                self._fail(here, item, "'auto' is for optimizer.params; leave it out, and the group has that value")
            elif is_auto(item):
                self.autos.add(here)
                found[name] = item
                self._note(here, item, "auto")
            else:
                hint = selectors.get(name) or (optimizer_param_type(name) if known is None else known[name])
                found.update(self._argument(here, name, item, hint, "" if row is None else row.remark))
        return found

    def _argument(self, path: str, name: str, value: Any, hint: Any, remark: str) -> dict[str, Any]:
        """The argument under its name; nothing when its value is wrong."""
        try:
            result = coerce(value, hint)
        except ValueError as error:
            self._fail(path, value, str(error))
            return {}
        self.given.add(path)
        self._note(path, value, "used", "; ".join(text for text in (result.remark, remark) if text))
        return {name: result.value}

    def _note(self, path: str, value: Any, status: str, remark: str = "", *, name: str | None = None) -> None:
        self.entries.append(Entry(path, name or path, value, status, remark))

    def _fail(self, path: str, value: Any, text: str) -> None:
        self.problems.append(Problem(path, text))
        self.entries.append(Entry(path, path, value, "error", text))


def is_auto(value: Any) -> bool:
    """Whether a value is the word."""
    return isinstance(value, str) and value.strip().lower() == AUTO


def _unknown_argument(name: str, known: Mapping[str, Any], kind: str | None, path: str) -> str:
    guess = closest(name, known)
    hint = f"did you mean '{path}.{guess}'?" if guess else f"{kind} knows {listed(list(known), 30)}"
    return f"unknown argument of {kind}; {hint}"
