"""Time per optimizer step and tokens per second, on the progress bar and kept for a report."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


def count_tokens(batch: Any) -> int:
    """Return the elements of the first integer tensor with a time axis, else the samples."""
    tensors = list(_tensors(batch))
    for tensor in tensors:
        if tensor.ndim >= 2 and not tensor.is_floating_point():
            return tensor.numel()
    return tensors[0].shape[0] if tensors and tensors[0].ndim else 1


def _tensors(batch: Any) -> Sequence[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in _tensors(value)]
    if isinstance(batch, (list, tuple)):
        return [tensor for value in batch for tensor in _tensors(value)]
    return []


class Throughput(Callback):
    """Measures wall time from one optimizer step to the next, validation left out.

    Args:
        unit: What is counted, as shown on the progress bar: "tokens" becomes "tokens/s".
        count: How many of them a batch of one rank holds.
        every_n_steps: Optimizer steps between updates of the progress bar.
        warmup_steps: The first steps, which pay for allocation and compilation, are left out of the
            median.
    """

    def __init__(
        self,
        unit: str = "tokens",
        count: Callable[[Any], int] = count_tokens,
        every_n_steps: int = 10,
        warmup_steps: int = 3,
    ) -> None:
        self._unit = unit
        self._count = count
        self._every_n_steps = every_n_steps
        self._warmup_steps = warmup_steps
        self._steps: list[tuple[float, int]] = []
        self._started: float | None = None
        self._counted = 0
        self._last_step = 0

    @property
    def seconds_per_step(self) -> float | None:
        """Median wall time of an optimizer step; None before the first."""
        steps = self._measured()
        return statistics.median(seconds for seconds, _ in steps) if steps else None

    @property
    def per_second(self) -> float | None:
        """Tokens per second over all ranks; None before the first step."""
        steps = self._measured()
        return sum(count for _, count in steps) / sum(seconds for seconds, _ in steps) if steps else None

    def _measured(self) -> list[tuple[float, int]]:
        return self._steps[self._warmup_steps :] or self._steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new measurement."""
        self._steps.clear()
        self._last_step = trainer.global_step
        self._restart()

    def _restart(self) -> None:
        self._started = time.perf_counter()
        self._counted = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; close the measurement when an optimizer step was done."""
        assert self._started is not None
        # Equal batches on all ranks are assumed: asking the others each step would cost what it
        # measures.
        self._counted += self._count(batch) * trainer.world_size
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        if torch.cuda.is_available() and pl_module.device.type == "cuda" and self._due():
            # Only when a number is shown: the launch queue must not be drained each step.
            torch.cuda.synchronize()
        self._steps.append((time.perf_counter() - self._started, self._counted))
        self._restart()
        if self._due() and (rate := self.per_second) is not None:
            pl_module.log(f"{self._unit}/s", rate, prog_bar=True, rank_zero_only=True)

    def _due(self) -> bool:
        return len(self._steps) % self._every_n_steps == 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the time of validation out."""
        self._restart()
