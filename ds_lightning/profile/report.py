"""The report of a profile: text, rich tables on a terminal, JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_lightning.profile.tree import Measured, ModuleProfile
from ds_lightning.profile.units import (
    flops_text,
    macs_text,
    number_text,
    percent_text,
    rate_text,
    seconds_text,
)

_WIDTH = 70
_LEGEND = (
    "One MAC is a multiplication with its addition: 2 FLOPs. FLOPS are FLOPs per second. Shares are of the model's",
    "forward; a module's numbers include what lies in it. Parameters are whole ones, however they are sharded.",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a report shows; the keys of the `flops_profiler` block.

    Attributes:
        step: in the title.
        depth: of the aggregated part; -1 is the deepest.
        top: modules per depth there.
        detailed: show the tree.
        facts: further lines of the summary.
    """

    step: int = 1
    depth: int = -1
    top: int = 1
    detailed: bool = True
    facts: dict[str, str] = field(default_factory=dict)


def give(tree: ModuleProfile, settings: Settings, output_file: str | Path | None) -> None:
    """Write a report to a file, or show it.

    Args:
        tree: what was measured.
        settings: what to show.
        output_file: JSON where it ends in `.json`, else text; its folder is made. None prints, in colours on a
            terminal.
    """
    if output_file is not None:
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        found = json.dumps(as_data(tree, settings), indent=1) if path.suffix == ".json" else text(tree, settings)
        path.write_text(found + "\n")
    elif sys.stdout.isatty():
        from ds_lightning.profile.table import show

        show(tree, settings)
    else:
        print(text(tree, settings))


def text(tree: ModuleProfile, settings: Settings) -> str:
    """The report as plain text."""
    lines = [
        f"{' Flops profile ':-^{_WIDTH}}",
        f"Profile summary at step {settings.step}",
        *_LEGEND,
        "",
        *(f"{name + ':':<{_WIDTH}} {value}" for name, value in summary(tree, settings)),
        "",
        f"{' Aggregated profile ':-^{_WIDTH}}",
        *aggregated(tree, settings.depth, settings.top),
    ]
    if settings.detailed:
        lines += ["", f"{' Detailed profile ':-^{_WIDTH}}", *detailed(tree)]
    return "\n".join([*lines, "-" * _WIDTH])


def summary(tree: ModuleProfile, settings: Settings) -> list[tuple[str, str]]:
    """Names and values of the whole model's numbers."""
    total = tree.total()
    lines = [(name, value) for name, value in settings.facts.items()]
    lines += [
        ("params of the model", number_text(tree.parameters)),
        ("fwd MACs per rank", macs_text(total.forward_macs)),
        ("fwd flops per rank", flops_text(total.forward_flops)),
    ]
    if total.forward_seconds:
        lines += [
            ("fwd latency", seconds_text(total.forward_seconds)),
            (
                "fwd FLOPS per rank = fwd flops per rank / fwd latency",
                _rate(total.forward_flops, total.forward_seconds),
            ),
        ]
    if total.backward_flops:
        lines.append(("bwd flops per rank", flops_text(total.backward_flops)))
        if total.recomputed_flops:
            lines.append(("recomputed in bwd, flops per rank", flops_text(total.recomputed_flops)))
        if total.backward_seconds:
            backward = total.backward_flops + total.recomputed_flops
            lines += [
                ("bwd latency", seconds_text(total.backward_seconds)),
                ("bwd FLOPS per rank", _rate(backward, total.backward_seconds)),
                ("fwd+bwd FLOPS per rank", _rate(total.flops, total.seconds)),
            ]
    return lines


def aggregated(tree: ModuleProfile, depth: int, top: int) -> list[str]:
    """For each depth, the classes of modules with most parameters, MACs and time."""
    levels = tree.levels()
    wanted = len(levels) if depth == -1 else min(depth + 1, len(levels))
    lines = []
    for number, level in enumerate(levels[:wanted]):
        by_kind: dict[str, tuple[int, Measured]] = {}
        for node in level:
            parameters, known = by_kind.get(node.kind, (0, Measured()))
            total = node.total()
            known.add_work(total)
            known.forward_seconds += total.forward_seconds
            by_kind[node.kind] = parameters + node.parameters, known
        lines.append(f"depth {number}:")
        for name, value, shown in (
            ("params", lambda item: item[0], number_text),
            ("MACs", lambda item: item[1].forward_macs, macs_text),
            ("fwd latency", lambda item: item[1].forward_seconds, seconds_text),
        ):
            ranked = sorted(by_kind.items(), key=lambda entry: -value(entry[1]))[:top]
            lines.append(f"    {name:<12}" + ", ".join(f"{kind}: {shown(value(item))}" for kind, item in ranked))
    return lines


def detailed(tree: ModuleProfile) -> list[str]:
    """The tree of modules."""
    whole = tree.total()
    lines: list[str] = []

    def visit(node: ModuleProfile, indent: str) -> None:
        lines.append(f"{indent}{f'({node.label}): ' if node.name else ''}{node.kind}(")
        lines.append(f"{indent}  " + ", ".join(columns(node, tree, whole)))
        if node.described:
            lines.append(f"{indent}  {node.described}")
        for child in node.children:
            visit(child, indent + "  ")
        lines.append(f"{indent})")

    visit(tree, "")
    return lines


def columns(node: ModuleProfile, tree: ModuleProfile, whole: Measured) -> list[str]:
    """What the tree says about a module."""
    total = node.total()
    found = [
        f"{number_text(node.parameters)} = {percent_text(node.parameters, tree.parameters)} params",
        f"{macs_text(total.forward_macs)} = {percent_text(total.forward_macs, whole.forward_macs)} MACs",
        f"{flops_text(total.forward_flops)} = {percent_text(total.forward_flops, whole.forward_flops)} fwd flops",
    ]
    if total.backward_flops or total.recomputed_flops:
        found.append(f"{flops_text(total.backward_flops + total.recomputed_flops)} bwd")
    if total.forward_seconds:
        found += [
            f"{seconds_text(total.forward_seconds)} = "
            f"{percent_text(total.forward_seconds, whole.forward_seconds)} fwd latency",
            _rate(total.forward_flops, total.forward_seconds),
        ]
    if total.backward_seconds:
        found.append(f"{seconds_text(total.backward_seconds)} bwd latency")
    return found


def as_data(tree: ModuleProfile, settings: Settings) -> dict[str, Any]:
    """The report for programs: plain numbers; seconds, FLOPs, MACs, elements."""

    def node_data(node: ModuleProfile) -> dict[str, Any]:
        total = node.total()
        return {
            "name": node.name,
            "class": node.kind,
            "parameters": node.parameters,
            "calls": node.own.calls,
            "forward_flops": total.forward_flops,
            "forward_macs": total.forward_macs,
            "backward_flops": total.backward_flops,
            "recomputed_flops": total.recomputed_flops,
            "forward_seconds": total.forward_seconds,
            "backward_seconds": total.backward_seconds,
            "children": [node_data(child) for child in node.children],
        }

    return {"step": settings.step, "facts": settings.facts, "model": node_data(tree)}


def _rate(flops: int, seconds: float) -> str:
    return rate_text(flops / seconds) if seconds else "-"
