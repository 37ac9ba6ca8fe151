"""What checkpointing costs and saves, call by call (`profile`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_lightning.activation.inputs import is_plain

_HEAD = ("unit", "calls", "forward", "recompute", "without", "kept", "saved")


@dataclass
class Row:
    """Sums over all calls of one unit. Seconds and bytes.

    Attributes:
        calls: forwards that were checkpointed.
        recomputations: how often they were computed again.
        forward: seconds of forwards.
        recompute: seconds of recomputations.
        without: bytes that autograd would have saved without checkpointing, parameters left out.
        kept: bytes that are kept: inputs, and results of expensive operations.
    """

    calls: int = 0
    recomputations: int = 0
    forward: float = 0.0
    recompute: float = 0.0
    without: int = 0
    kept: int = 0


class Profile:
    """Measures checkpointed calls; clocks are read with the device at rest."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def forward_is_over(self, name: str, seconds: float, without: int, kept: int) -> None:
        """Note a forward."""
        row = self.rows.setdefault(name, Row())
        row.calls += 1
        row.forward += seconds
        row.without += without
        row.kept += kept

    def recomputation_is_over(self, name: str, seconds: float) -> None:
        """Note a recomputation."""
        row = self.rows.setdefault(name, Row())
        row.recomputations += 1
        row.recompute += seconds

    def table(self) -> str:
        """Per unit: means per call, and the sum over units of these means."""
        lines: list[tuple[str, ...]] = [_HEAD]
        total = Row(calls=1, recomputations=1)
        for name, row in self.rows.items():
            mean = Row(
                row.calls,
                row.recomputations,
                row.forward / max(row.calls, 1),
                row.recompute / max(row.recomputations, 1),
                row.without // max(row.calls, 1),
                row.kept // max(row.calls, 1),
            )
            total.forward += mean.forward
            total.recompute += mean.recompute
            total.without += mean.without
            total.kept += mean.kept
            lines.append(_line(name, mean, str(row.calls)))
        lines.append(_line("all units", total, ""))
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        texts = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        return "\n".join(["activation checkpointing, means per call:", *texts])


def _line(name: str, row: Row, calls: str) -> tuple[str, ...]:
    saved = f"{100 * (1 - row.kept / row.without):.0f} %" if row.without else "-"
    times = (f"{1e3 * row.forward:.2f} ms", f"{1e3 * row.recompute:.2f} ms")
    return (name, calls, *times, f"{row.without / 1e6:.2f} MB", f"{row.kept / 1e6:.2f} MB", saved)


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def clock() -> float:
    """Seconds, with the device at rest."""
    synchronize()
    return time.perf_counter()


def bytes_besides(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> int:
    """Bytes of the memory behind `tensors` that is not behind `others`."""
    known = {tensor.untyped_storage()._cdata for tensor in others if is_plain(tensor)}
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if is_plain(t)}
    return sum(size for storage, size in found.items() if storage not in known)
