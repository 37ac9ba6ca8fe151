"""Optimizers: DeepSpeed's, with native steps, by their names there; any other name is that of `torch.optim`.

The modules beside it run optimizers on shards.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Adagrad": "adagrad",
    "Adam": "adam",
    "Adam8bit": "adam8bit",
    "AdamW": "adam",
    "AdamW8bit": "adam8bit",
    "CPUAdagrad": "adagrad",
    "CPUAdam": "adam",
    "CPULion": "lion",
    "FusedAdam": "adam",
    "FusedLamb": "lamb",
    "FusedLion": "lion",
    "Lamb": "lamb",
    "Lion": "lion",
    "Muon": "muon",
    "NativeOptimizer": "native",
    "OneBitAdam": "onebit_adam",
    "OneBitLamb": "onebit_lamb",
    "SGD": "sgd",
    "ZeroOneAdam": "zero_one_adam",
    "muon_groups": "muon_params",
    "param_groups": "groups",
}

if TYPE_CHECKING:
    from ds_lightning.optim.adagrad import Adagrad, CPUAdagrad
    from ds_lightning.optim.adam import Adam, AdamW, CPUAdam, FusedAdam
    from ds_lightning.optim.adam8bit import Adam8bit, AdamW8bit
    from ds_lightning.optim.groups import param_groups
    from ds_lightning.optim.lamb import FusedLamb, Lamb
    from ds_lightning.optim.lion import CPULion, FusedLion, Lion
    from ds_lightning.optim.muon import Muon
    from ds_lightning.optim.muon_params import muon_groups
    from ds_lightning.optim.native import NativeOptimizer
    from ds_lightning.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "Lamb",
    "Lion",
    "Muon",
    "NativeOptimizer",
    "muon_groups",
    "param_groups",
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
