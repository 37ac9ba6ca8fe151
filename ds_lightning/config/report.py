"""What becomes of every key of a configuration: the table behind `ds-lightning check`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_lightning.config import auto
from ds_lightning.config.deepspeed import ParsedConfig, draft
from ds_lightning.config.facts import Facts
from ds_lightning.config.free import Entry
from ds_lightning.config.inert import inert_reason
from ds_lightning.config.problems import Problem
from ds_lightning.config.resolve import ResolvedConfig, try_resolve
from ds_lightning.config.schema.base import value_at

_STYLES = {"error": "bold red", "not supported yet": "magenta", "renamed": "yellow", "auto": "cyan"}
_HEAD = ("key", "value", "status", "remark")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        key: Dotted path as the user wrote it.
        value: The value as given.
        status: used | renamed | inert | ignored | not supported yet | error | auto.
        remark: One sentence, or empty.
    """

    key: str
    value: Any
    status: str
    remark: str = ""


def check_table(source: Any, facts: Facts | None = None) -> list[Row]:
    """One row per given key, and one per problem without a key. Mistakes are rows, not exceptions.

    Args:
        source: Anything `load` accepts.
        facts: What is known about the run; with it, conflicts are found and "auto" shows its value.

    Raises:
        ConfigError: The source cannot be read at all.
    """
    parsed, problems = draft(source)
    known = facts or Facts()
    resolved, conflicts = try_resolve(parsed, known)
    if facts is None:
        conflicts = [problem for problem in conflicts if problem.key not in parsed.autos]
    rows = [_row(entry, parsed, resolved, facts is not None) for entry in parsed.report]
    names = [entry.name for entry in parsed.report]
    _mark(rows, names, [Problem(*item) for item in parsed.unsupported], "not supported yet")
    _mark(rows, names, [*problems, *conflicts], "error")
    return rows


def _row(entry: Entry, parsed: ParsedConfig, resolved: ResolvedConfig, has_facts: bool) -> Row:
    row = Row(entry.key, entry.value, entry.status, entry.remark)
    if entry.status == "auto":
        return replace(row, remark=_auto_remark(entry, resolved, has_facts))
    if entry.status == "used":
        reason = inert_reason(entry.name, resolved, resolved.stage, parsed.autos)
        return replace(row, status="inert", remark=reason) if reason else row
    return row


def _auto_remark(entry: Entry, resolved: ResolvedConfig, has_facts: bool) -> str:
    renamed = f"now '{entry.name}'; " if entry.name != entry.key else ""
    if not has_facts:
        return f"{renamed}comes from {auto.origin_of(entry.name)}"
    value = value_at(resolved, entry.name)
    return f"{renamed}becomes {'its default' if value is None else _shown(value)}"


def _mark(rows: list[Row], names: list[str], problems: Sequence[Problem], status: str) -> None:
    """Put each problem on the row of its key, or in a row of its own."""
    for key, text in dict.fromkeys(problems):
        at = next((i for i, row in enumerate(rows) if key in (row.key, names[i])), None)
        if at is None:
            rows.append(Row(key, None, status, text))
            names.append(key)
        elif rows[at].status == status and rows[at].remark != text:
            rows[at] = replace(rows[at], remark=f"{rows[at].remark}; {text}")
        else:
            rows[at] = replace(rows[at], status=status, remark=text)


def render(rows: Sequence[Row], width: int | None = None) -> str:
    """The table as text, drawn by rich where that is installed."""
    cells = [(row.key, _shown(row.value), row.status, row.remark) for row in rows]
    try:
        return _rich(cells, width)
    except ImportError:
        return _plain(cells)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def _rich(cells: Sequence[tuple[str, str, str, str]], width: int | None) -> str:
    from io import StringIO

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _HEAD:
        table.add_column(name, overflow="fold")
    for cell in cells:
        table.add_row(*(Text(text) for text in cell), style=_STYLES.get(cell[2], ""))
    console = Console(file=StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().rstrip() + "\n"


def _plain(cells: Sequence[tuple[str, str, str, str]]) -> str:
    lines = [_HEAD, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    text = ("  ".join([*(line[i].ljust(widths[i]) for i in range(3)), line[3]]).rstrip() for line in lines)
    return "\n".join(text) + "\n"
