"""ds_lightning: ZeRO training natively in PyTorch Lightning.

Importing it registers the strategies `dszero0` to `dszero3` and their offload variants. Everything else is imported
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_lightning import errors
from ds_lightning.registration import register

__version__ = "0.1.0"

_LAZY = {
    "ZeroStrategy": "ds_lightning.strategy",
    "ZeroPrecision": "ds_lightning.precision.plugin",
    "LossScaleOptions": "ds_lightning.precision.loss_scale",
    "load_from_checkpoint": "ds_lightning.checkpoint.lightning_module",
    "load_pretrained": "ds_lightning.checkpoint.pretrained",
    "gathered": "ds_lightning.zero.access",
    "full_param": "ds_lightning.zero.access",
    "full_grad": "ds_lightning.zero.access",
    "full_optimizer_state": "ds_lightning.zero.access",
    "grad_norms": "ds_lightning.zero.access",
}
_LAZY_MODULES = ("callbacks", "checkpoint", "ops", "optim", "profile", "schedules")

if TYPE_CHECKING:
    from ds_lightning import callbacks, ops, optim, profile, schedules
    from ds_lightning.activation.checkpointing import checkpoint
    from ds_lightning.checkpoint.lightning_module import load_from_checkpoint
    from ds_lightning.checkpoint.pretrained import load_pretrained
    from ds_lightning.precision.loss_scale import LossScaleOptions
    from ds_lightning.precision.plugin import ZeroPrecision
    from ds_lightning.strategy import ZeroStrategy
    from ds_lightning.zero.access import full_grad, full_optimizer_state, full_param, gathered, grad_norms

__all__ = [
    "LossScaleOptions",
    "ZeroPrecision",
    "ZeroStrategy",
    "callbacks",
    "checkpoint",
    "errors",
    "full_grad",
    "full_optimizer_state",
    "full_param",
    "gathered",
    "grad_norms",
    "load_from_checkpoint",
    "load_pretrained",
    "ops",
    "optim",
    "profile",
    "register",
    "schedules",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _LAZY_MODULES:
        return import_module(f"ds_lightning.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})


register()
