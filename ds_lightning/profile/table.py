"""A profile on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ds_lightning.profile import report
from ds_lightning.profile.tree import ModuleProfile
from ds_lightning.profile.units import flops_text, macs_text, number_text, percent_text, rate_text, seconds_text


def show(tree: ModuleProfile, settings: report.Settings, console: Console | None = None) -> None:
    """Print the summary and the tree of modules as tables.

    Args:
        tree: what was measured.
        settings: what to show.
        console: where; None is standard output.
    """
    console = console or Console()
    head = Table(title=f"Flops profile, step {settings.step}", show_header=False, title_justify="left")
    for name, value in report.summary(tree, settings):
        head.add_row(name, value)
    console.print(head)
    if settings.detailed:
        console.print(_modules(tree))
    for line in report.aggregated(tree, settings.depth, settings.top):
        console.print(line, highlight=False)


def _modules(tree: ModuleProfile) -> Table:
    table = Table(title="By module", title_justify="left")
    table.add_column("module", overflow="fold")
    for name in ("params", "MACs", "fwd flops", "share", "bwd flops", "fwd latency", "bwd latency", "fwd FLOPS"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = tree.total()

    def visit(node: ModuleProfile, indent: str) -> None:
        total = node.total()
        table.add_row(
            f"{indent}{node.label or 'model'} [dim]{node.kind}[/dim]",
            number_text(node.parameters),
            macs_text(total.forward_macs),
            flops_text(total.forward_flops),
            percent_text(total.forward_flops, whole.forward_flops),
            flops_text(total.backward_flops + total.recomputed_flops),
            seconds_text(total.forward_seconds),
            seconds_text(total.backward_seconds),
            rate_text(total.forward_flops / total.forward_seconds) if total.forward_seconds else "-",
        )
        for child in node.children:
            visit(child, indent + "  ")

    visit(tree, "")
    return table
