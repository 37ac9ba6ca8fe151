"""Builds the schedule of the `scheduler` block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from ds_lightning.config.suggest import did_you_mean
from ds_lightning.errors import ConfigError
from ds_lightning.schedules.base import Schedule
from ds_lightning.schedules.one_cycle import OneCycle
from ds_lightning.schedules.range_test import LRRangeTest
from ds_lightning.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

_OURS: dict[str, type[Schedule]] = {
    cls.__name__.lower(): cls for cls in (LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR)
}


def build_schedule(kind: str, params: Mapping[str, Any], optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    """The schedule that `scheduler.type` names.

    Args:
        kind: a name of DeepSpeed's in any letter case, or the exact name of a class of `torch.optim.lr_scheduler`.
        params: `scheduler.params`.
        optimizer: what it sets the rates of.

    Raises:
        ConfigError: for an unknown name, arguments that the class does not take, and schedules that need a metric.
    """
    cls = _OURS.get(kind.lower()) or _torch_class(kind)
    if cls is lr_scheduler.ReduceLROnPlateau:
        raise ConfigError(
            "scheduler.type=ReduceLROnPlateau follows a metric, and schedules of the configuration are stepped after "
            "every optimizer step. Return it from configure_optimizers, with 'monitor'."
        )
    try:
        return cls(optimizer, **params)
    except (TypeError, ValueError, AttributeError) as error:
        module = "ds_lightning.schedules" if issubclass(cls, Schedule) else "torch.optim.lr_scheduler"
        raise ConfigError(f"scheduler.params do not fit {module}.{cls.__name__}: {error}") from error


def _torch_class(kind: str) -> type[Any]:
    theirs = lr_scheduler.LRScheduler
    known = {
        name: cls
        for name, cls in vars(lr_scheduler).items()
        if isinstance(cls, type) and issubclass(cls, theirs) and cls is not theirs and not name.startswith("_")
    }
    if kind in known:
        return known[kind]
    guess = did_you_mean(kind, [*known, *(cls.__name__ for cls in _OURS.values())])
    raise ConfigError(f"scheduler.type={kind!r} is not known; {guess or 'see torch.optim.lr_scheduler'}")
