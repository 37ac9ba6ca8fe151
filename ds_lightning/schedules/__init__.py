"""Learning rate schedules: DeepSpeed's, by their names there; any other name is that of `torch.optim.lr_scheduler`.

All are torch `LRScheduler`s, to be stepped once after each step of the optimizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_LAZY = {
    "LRRangeTest": "range_test",
    "OneCycle": "one_cycle",
    "Schedule": "base",
    "WarmupCosineLR": "warmup",
    "WarmupDecayLR": "warmup",
    "WarmupLR": "warmup",
}

if TYPE_CHECKING:
    from ds_lightning.schedules.base import Schedule
    from ds_lightning.schedules.one_cycle import OneCycle
    from ds_lightning.schedules.range_test import LRRangeTest
    from ds_lightning.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "Schedule", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    if not name.startswith("_"):
        theirs = import_module("torch.optim.lr_scheduler")
        if hasattr(theirs, name):
            return getattr(theirs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
