"""Optimizers: DeepSpeed's, with native steps, by their names there; any other name is that of `torch.optim`.

The modules beside it run optimizers on shards.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Adagrad": "adagrad",
    "Adam": "adam",
    "AdamW": "adam",
    "CPUAdagrad": "adagrad",
    "CPUAdam": "adam",
    "CPULion": "lion",
    "FusedAdam": "adam",
    "FusedLion": "lion",
    "Lion": "lion",
    "NativeOptimizer": "native",
    "OneBitAdam": "onebit_adam",
    "OneBitLamb": "onebit_lamb",
    "SGD": "sgd",
    "ZeroOneAdam": "zero_one_adam",
}

if TYPE_CHECKING:
    from ds_lightning.optim.adagrad import Adagrad, CPUAdagrad
    from ds_lightning.optim.adam import Adam, AdamW, CPUAdam, FusedAdam
    from ds_lightning.optim.lion import CPULion, FusedLion, Lion
    from ds_lightning.optim.native import NativeOptimizer
    from ds_lightning.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "FusedAdam",
    "FusedLion",
    "Lion",
    "NativeOptimizer",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    if not name.startswith("_"):
        theirs = import_module("torch.optim")
        if hasattr(theirs, name):
            return getattr(theirs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
