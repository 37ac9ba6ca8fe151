"""A learning rate that grows without end, to see how much a model bears."""

from __future__ import annotations

from torch.optim import Optimizer

from ds_lightning.schedules.base import Schedule, Values, whole


class LRRangeTest(Schedule):
    """The rate grows linearly from its smallest value (arXiv:1803.09820).

    With b the number of steps that the optimizer has taken::

        lr = min * (1 + lr_range_test_step_rate * b / lr_range_test_step_size)

    Args:
        optimizer: its groups' `lr` is set.
        lr_range_test_min_lr: where it begins; one number, or one for each parameter group.
        lr_range_test_step_size: steps of the optimizer in which it grows by one rate, at least 1.
        lr_range_test_step_rate: how much of the smallest rate is added in that time.
        lr_range_test_staircase: grow at once after each step size: b / size is rounded down.
        last_batch_iteration: as in `Schedule`.

    Raises:
        ValueError: as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Values = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.lr_range_test_min_lr = lr_range_test_min_lr
        self.lr_range_test_step_size = whole("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.lr_range_test_step_rate = float(lr_range_test_step_rate)
        self.lr_range_test_staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """The rate of each group at an iteration (from -1)."""
        size, steps = self.lr_range_test_step_size, iteration + 1
        intervals = steps // size if self.lr_range_test_staircase else steps / size
        lows = self.each("lr_range_test_min_lr", self.lr_range_test_min_lr)
        return [low * (1 + self.lr_range_test_step_rate * intervals) for low in lows]
