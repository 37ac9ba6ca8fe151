"""What the Trainer, the module and the data say about a run, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


@dataclass(frozen=True)
class Facts:
    """Everything a configuration is reconciled with; None means unknown.

    Attributes:
        world_size: Ranks with different data.
        accumulate_grad_batches: The Trainer's.
        accumulate_is_default: The user did not pass it to the Trainer, so the configuration may
            decide.
        gradient_clip_val: The Trainer's.
        gradient_clip_algorithm: The Trainer's, "norm" or "value".
        clip_is_default: The user did not pass a clip value to the Trainer.
        precision: Lightning's name of it, such as "bf16-mixed".
        precision_is_default: The user passed neither `precision` nor a precision plugin.
        micro_batch_size: Batch size of the training dataloader.
        max_steps: Optimizer steps of the whole run, an estimate.
        warmup_steps: Optimizer steps of warm-up, as a hyperparameter of the module.
        hidden_size: Width of the model.
        optimizer_defaults: lr, betas, eps, weight_decay of the module's own optimizer or
            hyperparameters.
        group_rates: lr of each group of the module's own optimizer, where they differ.
        has_optimizer: The module brings its own optimizer.
        has_schedule: The module brings its own schedule.
        trains: The run makes steps; one that does not needs neither optimizer nor schedule.
        stage: `ZeroStrategy(stage=...)`.
    """

    world_size: int | None = None
    accumulate_grad_batches: int | None = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    precision: str | int | None = None
    micro_batch_size: int | None = None
    max_steps: int | None = None
    warmup_steps: int | None = None
    hidden_size: int | None = None
    optimizer_defaults: Mapping[str, Any] | None = None
    group_rates: list[float] | None = None
    has_optimizer: bool | None = None
    has_schedule: bool | None = None
    trains: bool = True
    stage: int | None = None
    accumulate_is_default: bool = False
    clip_is_default: bool = False
    precision_is_default: bool = False

    @property
    def precision_name(self) -> str | None:
        """The precision in Lightning's full spelling."""
        if self.precision is None:
            return None
        name = str(self.precision)
        return _PRECISIONS.get(name, name)
