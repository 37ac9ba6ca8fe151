"""What comm.py has measured, as a table and a plot."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from comm_methods import methods


@dataclass(frozen=True)
class Run:
    """One method in one round; bytes are those of a step, of a host or of all."""

    seconds: float
    cpu: float
    wire: float
    counted: float
    """Bytes of all ranks by their ledgers, to those of all interfaces."""
    calls: float
    """Collectives of a rank."""
    loss: float
    numel: int
    profile: str
    """Of rank 0, where it was asked for."""

    @classmethod
    def of(cls, answers: list[dict[str, Any]], per_host: int, shared: bool) -> Run:
        """Put the answers of all ranks together.

        Args:
            answers: of `comm_rank.Rank.measure`.
            per_host: ranks of a host, of which each reads the same counters.
            shared: the hosts are one, so all do.
        """
        hosts = answers[::per_host]
        wires = [host["wire"] for host in hosts]
        sent = wires[0] if shared else sum(host["wire"] + host["local"] for host in hosts)
        return cls(
            seconds=max(answer["seconds"] for answer in answers),
            cpu=statistics.mean(answer["cpu"] for answer in answers),
            wire=statistics.mean(wires) / (len(hosts) if shared else 1),
            counted=sum(answer["ledger"] for answer in answers) / max(sent, 1.0),
            calls=answers[0]["calls"],
            loss=statistics.mean(answer["loss"] for answer in answers),
            numel=int(answers[0]["numel"]),
            profile=answers[0]["profile"],
        )


class Results:
    """Runs by link and method, and methods that there are no runs of, with the reason."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], dict[int, Run]] = {}
        self.skipped: dict[str, str] = {}
        self.failed: set[str] = set()
        self.rates: dict[str, float] = {}
        """Measured, in bytes a second."""

    def median(self, link: str, method: str, what: str) -> float:
        """Over rounds."""
        return statistics.median(getattr(run, what) for run in self.runs[link, method].values())

    def ratio(self, link: str, method: str, other: str) -> float | None:
        """Of the times of two methods in the same rounds."""
        ours, theirs = self.runs.get((link, method), {}), self.runs.get((link, other), {})
        ratios = [ours[turn].seconds / theirs[turn].seconds for turn in ours if turn in theirs]
        return statistics.median(ratios) if ratios else None


def report(results: Results, link: str, trip: float, names: list[str], per_host: int) -> None:
    """Print the table of one link."""
    from rich.console import Console
    from rich.table import Table

    known, done = methods(per_host), [name for name in names if (link, name) in results.runs]
    rate = results.rates[link]
    numel = results.runs[link, done[0]][0].numel if done else 0
    title = f"{link}: measured {rate * 8e-6:.0f} Mbit/s, round trip {trip * 1e3:.2f} ms; {numel / 1e6:.1f} M parameters"
    table = Table(title=title)
    for column in ("method", "ms", "x DDP", "x plain", "processor", "wire MB", "link busy", "calls", "counted", "loss"):
        table.add_column(column, justify="left" if column == "method" else "right")

    def ratio(name: str, other: str) -> str:
        found = results.ratio(link, name, other)
        return "-" if found is None or name == other else f"{found:.2f}"

    for name in done:
        seconds, wire = results.median(link, name, "seconds"), results.median(link, name, "wire")
        calls, counted = results.median(link, name, "calls"), results.median(link, name, "counted")
        table.add_row(
            name,
            f"{seconds * 1e3:.1f}",
            ratio(name, "ddp"),
            ratio(name, known[name].plain),
            f"{results.median(link, name, 'cpu') * 1e3:.1f}",
            f"{wire / 1e6:.2f}",
            f"{wire / rate / seconds:.0%}",
            f"{calls:.0f}" if calls else "-",
            f"{counted:.3f}" if counted else "-",
            f"{results.median(link, name, 'loss'):.4f}",
        )
    Console(width=120).print(table)
    for name in done:
        for run in list(results.runs[link, name].values())[-1:]:
            if run.profile:
                print(f"{name} on {link}, all measured steps of rank 0, by {run.profile}")


def plot(results: Results, links: list[str], names: list[str], file: str) -> None:
    """Draw a step's time by method and link, and DDP's as the line to stay below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    width = 0.8 / len(links)
    for place, link in enumerate(links):
        done = [name for name in names if (link, name) in results.runs]
        middles = [results.median(link, name, "seconds") * 1e3 for name in done]
        lefts = [names.index(name) + (place - (len(links) - 1) / 2) * width for name in done]
        bars = axes.bar(lefts, middles, width, label=link)
        axes.bar_label(bars, [f"{value:.0f}" for value in middles], fontsize=7)
        if "ddp" in done:
            axes.axhline(middles[done.index("ddp")], color=bars[0].get_facecolor(), linestyle="--", linewidth=1)
    axes.set(yscale="log", ylabel="ms per step", title="A training step by method and link; dashed: DDP")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.legend()
    figure.savefig(file, dpi=120)
    print(f"plot in {file}")
