"""One cycle of the learning rate and the momentum, then a decay."""

from __future__ import annotations

import warnings

from torch.optim import Optimizer

from ds_lightning.schedules.base import Schedule, Values, has_momentum, whole


class OneCycle(Schedule):
    """Up and down again, while the momentum goes down and up; then both decay (arXiv:1803.09820).

    With b the number of steps that the optimizer has taken, f and s the sizes of the two halves, T = f + s::

        p   = b / f if b <= f else (T - b) / s
        lr  = min + (max - min) * p,  momentum = max_mom - (max_mom - min_mom) * p        while b < T
        d   = (b - T) / decay_step_size
        lr  = min / (1 + decay_lr_rate * d),  momentum = max_mom * (1 + decay_mom_rate * d)        afterwards

    A stair count k > 0 makes each half k steps of equal height: floor(k * way) / k of the way through the half.
    Momentum is `betas[0]`, or `momentum` for optimizers without betas.

    Where DeepSpeed differs: it overwrites `betas[1]` by 0.99, and begins with the smallest momentum and goes on with
    the largest; here `betas[1]` stays and the largest momentum is in force from the first step on. It cycles no
    `momentum`.

    Args:
        optimizer: its groups' `lr`, and `betas` or `momentum`, are set.
        cycle_min_lr: the rate at both ends of the cycle; one number, or one for each parameter group.
        cycle_max_lr: the rate in the middle.
        decay_lr_rate: how fast the rate decays after the cycle; 0 for no decay.
        cycle_first_step_size: steps of the optimizer in the first half, at least 1.
        cycle_second_step_size: in the second half, at least 0; None takes the first's.
        cycle_first_stair_count: stairs in the first half, 0 for a line.
        cycle_second_stair_count: in the second half; None takes the first's.
        decay_step_size: steps of the optimizer in which the decay goes on by one rate; 0 for no decay.
        cycle_momentum: cycle the momentum too. An optimizer that has none is a warning.
        cycle_min_mom: the momentum in the middle of the cycle; one number, or one for each parameter group.
        cycle_max_mom: the momentum at both ends.
        decay_mom_rate: how fast the momentum grows after the cycle; 0 for not at all.
        last_batch_iteration: as in `Schedule`.

    Raises:
        ValueError: as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Values,
        cycle_max_lr: Values,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Values = 0.8,
        cycle_max_mom: Values = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first, stairs = cycle_first_step_size, cycle_first_stair_count
        second = first if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.cycle_min_lr, self.cycle_max_lr = cycle_min_lr, cycle_max_lr
        self.cycle_min_mom, self.cycle_max_mom = cycle_min_mom, cycle_max_mom
        self.cycle_first_step_size = whole("cycle_first_step_size", first, 1)
        self.cycle_second_step_size = whole("cycle_second_step_size", second, 0)
        self.cycle_first_stair_count = whole("cycle_first_stair_count", stairs, 0)
        self.cycle_second_stair_count = whole("cycle_second_stair_count", second_stairs, 0)
        self.decay_step_size = whole("decay_step_size", decay_step_size, 0)
        self.decay_lr_rate, self.decay_mom_rate = float(decay_lr_rate), float(decay_mom_rate)
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and isinstance(optimizer, Optimizer) and not all(map(has_momentum, optimizer.param_groups)):
            warnings.warn(
                f"cycle_momentum is off: {type(optimizer).__name__} has groups without betas and momentum", stacklevel=2
            )
            self.cycle_momentum = False
        super().__init__(optimizer, last_batch_iteration)

    def height(self, steps: int) -> float:
        """The p above, for so many steps within the cycle: from 0 up to 1 and back to 0."""
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        if steps <= first:
            return _way(steps, first, self.cycle_first_stair_count)
        return 1.0 - _way(steps - first, second, self.cycle_second_stair_count)

    def rates(self, iteration: int) -> list[float]:
        """The rate of each group at an iteration (from -1)."""
        lows = self.each("cycle_min_lr", self.cycle_min_lr)
        highs = self.each("cycle_max_lr", self.cycle_max_lr)
        decays = self._decays(iteration)
        if decays is not None:
            return [low / (1 + self.decay_lr_rate * decays) for low in lows]
        height = self.height(iteration + 1)
        return [low + (high - low) * height for low, high in zip(lows, highs, strict=True)]

    def momenta(self, iteration: int) -> list[float] | None:
        """The momentum of each group at an iteration (from -1); None without `cycle_momentum`."""
        if not self.cycle_momentum:
            return None
        lows = self.each("cycle_min_mom", self.cycle_min_mom)
        highs = self.each("cycle_max_mom", self.cycle_max_mom)
        decays = self._decays(iteration)
        if decays is not None:
            return [high * (1 + self.decay_mom_rate * decays) for high in highs]
        height = self.height(iteration + 1)
        return [high - (high - low) * height for low, high in zip(lows, highs, strict=True)]

    def get_mom(self) -> list[float] | None:
        """The momentum of each group at the iteration in force; None without `cycle_momentum`."""
        return self.momenta(self.last_batch_iteration)

    def _decays(self, iteration: int) -> float | None:
        """The d above; None within the cycle."""
        over = iteration + 1 - self.cycle_first_step_size - self.cycle_second_step_size
        if over < 0:
            return None
        return over / self.decay_step_size if self.decay_step_size else 0.0


def _way(steps: int, size: int, stairs: int) -> float:
    """The part of a half that lies behind; in whole numbers, so that no stair is missed by rounding."""
    return stairs * steps // size / stairs if stairs else steps / size
