"""The loss scale of fp16 training, a pure state machine (spec of DeepSpeed's ZeRO stages; the same at every stage)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ds_lightning.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LossScaleOptions:
    """The `fp16` block.

    Attributes:
        loss_scale: a fixed scale; 0 for a dynamic one.
        initial_scale_power: the dynamic scale begins at `2 ** initial_scale_power`.
        loss_scale_window: clean steps in a row after which the scale doubles.
        hysteresis: overflows that are tolerated before the scale is halved.
        consecutive_hysteresis: refill the tolerance at every clean step, not only when the scale grows.
        min_loss_scale: an overflow at this scale, with the tolerance used up, ends the run.
        max_loss_scale: the scale grows no further.
        block: of the configuration, for messages.
    """

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    max_loss_scale: float = math.inf
    block: str = "fp16"

    def __post_init__(self) -> None:
        """Check ranges, for options that no configuration has checked.

        Raises:
            ConfigError: for the first value that is out of range.
        """
        limits = {
            "loss_scale": (0, 2.0**127),
            "initial_scale_power": (0, 127),
            "loss_scale_window": (1, math.inf),
            "hysteresis": (1, math.inf),
            "min_loss_scale": (2.0**-127, 2.0**127),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{self.block}.{name} must be a number from {low:g} to {high:g}, not {value!r}.")

    @classmethod
    def from_block(cls, block: Any) -> LossScaleOptions:
        """From an `fp16` block, some of whose values may be "auto" still."""
        values = {name: getattr(block, name) for name in cls.__dataclass_fields__ if hasattr(block, name)}
        return cls(**{name: value for name, value in values.items() if value not in ("auto", None)})


class LossScaler:
    """Owns the loss scale. Every rank runs the same machine on the same, agreed, overflow flags.

    The scale in force during backward is the one to unscale with: `update` must not be called in between.
    """

    def __init__(self, options: LossScaleOptions | None = None) -> None:
        self.options = options or LossScaleOptions()
        self.dynamic = self.options.loss_scale == 0
        self.scale = float(2.0**self.options.initial_scale_power if self.dynamic else self.options.loss_scale)
        self.iteration = 0
        self.last_overflow = -1
        self.tolerance = self.options.hysteresis
        self.skipped = 0

    def update(self, overflow: bool) -> None:
        """A step is over.

        Args:
            overflow: whether any rank found a non-finite gradient, so that the step was skipped.

        Raises:
            ConfigError: when the scale cannot go down any further.
        """
        if overflow:
            self.skipped += 1
        if not self.dynamic:
            self.iteration += 1
            return
        if overflow:
            self._shrink()
            self.last_overflow = self.iteration
        else:
            self._perhaps_grow()
        self.iteration += 1

    def _shrink(self) -> None:
        if self.options.hysteresis > 1 and self.tolerance > 1:
            self.tolerance -= 1
            return
        if self.scale <= self.options.min_loss_scale:
            raise ConfigError(
                f"The gradients overflow at the smallest loss scale ({self.options.block}.min_loss_scale="
                f"{self.options.min_loss_scale:g}), after {self.skipped} skipped steps. The loss itself is "
                "not finite, or fp16 cannot hold these "
                "gradients: check the data and the learning rate, clip gradients, or train in bf16."
            )
        self.scale = max(self.scale / 2, self.options.min_loss_scale)

    def _perhaps_grow(self) -> None:
        if self.options.consecutive_hysteresis:
            self.tolerance = self.options.hysteresis
        stable = self.iteration - self.last_overflow - 1
        if stable > 0 and stable % self.options.loss_scale_window == 0:
            if not self.options.consecutive_hysteresis:
                self.tolerance = self.options.hysteresis
            self.scale = max(self.scale, min(self.scale * 2, self.options.max_loss_scale))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to go on with the same sequence of scales; plain numbers."""
        return {
            "scale": self.scale,
            "iteration": self.iteration,
            "last_overflow": self.last_overflow,
            "tolerance": self.tolerance,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. A fixed scale stays what the configuration says."""
        if self.dynamic:
            self.scale = float(state["scale"])
        self.iteration = int(state["iteration"])
        self.last_overflow = int(state["last_overflow"])
        self.tolerance = int(state["tolerance"])
        self.skipped = int(state["skipped"])

    def grad_scaler_state(self) -> dict[str, Any]:
        """The same in the form of `torch.amp.GradScaler`, as far as it goes, so that plain Lightning can resume."""
        window = self.options.loss_scale_window
        return {
            "scale": self.scale,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": window,
            "_growth_tracker": max(self.iteration - self.last_overflow - 1, 0) % window,
        }

    def load_grad_scaler_state(self, state: dict[str, Any]) -> None:
        """Go on from a `torch.amp.GradScaler`."""
        scale = float(state["scale"])
        if not self.dynamic or not math.isfinite(scale) or scale <= 0:
            return
        self.scale = scale
        self.last_overflow = self.iteration - 1 - int(state["_growth_tracker"])
