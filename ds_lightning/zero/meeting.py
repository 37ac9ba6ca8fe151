"""Metrics communicate by themselves: ranks that still evaluate are served first, see `zero/uneven.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a metric asks before it communicates, by itself, through torch."""

    meet: Callable[[], None]
    original: Callable[[], bool]

    def __call__(self) -> bool:
        """Answer as before, when all ranks are here."""
        self.meet()
        return self.original()


def metrics_of(module: nn.Module) -> list[Any]:
    """The torchmetrics of a module."""
    from torchmetrics import Metric

    return [child for child in module.modules() if isinstance(child, Metric)]
