"""Warm-up: alone, before a linear decay, and before a cosine."""

from __future__ import annotations

import math
import warnings
from typing import Literal

from torch.optim import Optimizer

from ds_lightning.config.suggest import did_you_mean
from ds_lightning.schedules.base import Schedule, Values, whole

WARMUP_TYPES = ("log", "linear")


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr`, then constant.

    At iteration i, counted from -1 ([Note: counting] in `base`), with n = max(2, `warmup_num_steps`)::

        lr = min + (max - min) * g(i),  g(i) = 0 if i < 0 else 1 if i >= n else i / n if linear else ln(i + 1) / ln(n)

    As in DeepSpeed the first two steps of the optimizer use `warmup_min_lr`, since g(0) is 0 as well.

    Args:
        optimizer: its groups' `lr` is set.
        warmup_min_lr: where it begins; one number, or one for each parameter group.
        warmup_max_lr: where it ends; None takes the rate each group has in the optimizer.
        warmup_num_steps: length of the warm-up, at least 1.
        warmup_type: "log" or "linear". Another word is an error at construction; DeepSpeed warms up by "log" then.
        last_batch_iteration: as in `Schedule`.

    Raises:
        ValueError: as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_min_lr = warmup_min_lr
        self.warmup_max_lr = warmup_max_lr
        self.warmup_num_steps = _steps(warmup_num_steps)
        self.warmup_type = _type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def factor(self, iteration: int) -> float:
        """How far the rate is from the smallest (0) to the largest (1)."""
        return min(1.0, warmth(iteration, self.warmup_num_steps, self.warmup_type))

    def rates(self, iteration: int) -> list[float]:
        """The rate of each group at an iteration (from -1)."""
        lows = self.each("warmup_min_lr", self.warmup_min_lr)
        if self.warmup_max_lr is None:
            highs = [float(lr) for lr in self.base_lrs]
        else:
            highs = self.each("warmup_max_lr", self.warmup_max_lr)
        factor = self.factor(iteration)
        return [low + (high - low) * factor for low, high in zip(lows, highs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """From `warmup_min_lr` to `warmup_max_lr`, then linearly back to `warmup_min_lr`.

    As `WarmupLR` while i < n; then, with t = `total_num_steps`::

        lr = min + (max - min) * max(0, (t - i) / max(1, t - n))

    Args:
        optimizer: its groups' `lr` is set.
        total_num_steps: steps of the optimizer in the whole run, at least 1.
        warmup_min_lr: as in `WarmupLR`.
        warmup_max_lr: as in `WarmupLR`, but its default is a number, as in DeepSpeed.
        warmup_num_steps: as in `WarmupLR`. More than `total_num_steps` is a warning: the run ends while it warms up.
        warmup_type: as in `WarmupLR`.
        last_batch_iteration: as in `Schedule`.

    Raises:
        ValueError: as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def factor(self, iteration: int) -> float:
        """How far the rate is from the smallest (0) to the largest (1)."""
        if iteration < self.warmup_num_steps:
            return warmth(iteration, self.warmup_num_steps, self.warmup_type)
        left, decay = self.total_num_steps - iteration, self.total_num_steps - self.warmup_num_steps
        return max(0.0, left / max(1, decay))


class WarmupCosineLR(Schedule):
    """Fractions of the rate each group has in the optimizer: up in a warm-up, down half a cosine.

    With g and n as in `WarmupLR`, r = `warmup_min_ratio`, c = `cos_min_ratio` and t = `total_num_steps`::

        ratio = r + (1 - r) * g(i)                            if i < n
        ratio = c + (1 - c) * (1 + cos(pi * q)) / 2           otherwise, q = min(1, (i - n + 1) / max(1, t - n))

    The first step of the optimizer uses r, in all groups; DeepSpeed's uses 0 whatever r is.

    Args:
        optimizer: its groups' `lr` is set.
        total_num_steps: steps of the optimizer in the whole run, at least 1.
        warmup_min_ratio: where the warm-up begins.
        warmup_num_steps: as in `WarmupDecayLR`.
        cos_min_ratio: where the cosine ends.
        warmup_type: as in `WarmupLR`.
        last_batch_iteration: as in `Schedule`.

    Raises:
        ValueError: as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total(total_num_steps, warmup_num_steps)
        self.warmup_min_ratio = float(warmup_min_ratio)
        self.warmup_num_steps = _steps(warmup_num_steps)
        self.cos_min_ratio = float(cos_min_ratio)
        self.warmup_type = _type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def ratio(self, iteration: int) -> float:
        """The fraction of each group's own rate."""
        low = self.warmup_min_ratio
        if iteration < self.warmup_num_steps:
            return low + (1 - low) * warmth(iteration, self.warmup_num_steps, self.warmup_type)
        done, whole_way = iteration - self.warmup_num_steps + 1, self.total_num_steps - self.warmup_num_steps
        wave = (1 + math.cos(math.pi * min(1.0, done / max(1, whole_way)))) / 2
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * wave

    def rates(self, iteration: int) -> list[float]:
        """The rate of each group at an iteration (from -1)."""
        ratio = self.ratio(iteration)
        return [float(lr) * ratio for lr in self.base_lrs]


def warmth(iteration: int, steps: int, kind: str) -> float:
    """g(i) of `WarmupLR`, above 1 after the warm-up."""
    if iteration <= 0:
        return 0.0
    return iteration / steps if kind == "linear" else math.log(iteration + 1) / math.log(steps)


def _steps(value: int) -> int:
    return max(2, whole("warmup_num_steps", value, 1))


def _type(value: str) -> Literal["log", "linear"]:
    for known in WARMUP_TYPES:
        if value == known:
            return known  # type: ignore[return-value]
    guess = did_you_mean(str(value), WARMUP_TYPES)
    raise ValueError(f"warmup_type must be 'log' or 'linear', got {value!r}" + (f"; {guess}" if guess else ""))


def _total(total: int, warmup: int) -> int:
    total, warmup = whole("total_num_steps", total, 1), whole("warmup_num_steps", warmup, 1)
    if total < warmup:
        warnings.warn(
            f"total_num_steps={total} is less than warmup_num_steps={warmup}: the run ends while it warms up",
            stacklevel=3,
        )
    return total
