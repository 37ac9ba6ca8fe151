"""`Schedule`: what the schedules of DeepSpeed have in common."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Values = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


class Schedule(LRScheduler):
    """A schedule whose rates follow from the number of steps alone.

    [Note: counting] DeepSpeed counts from -1: that is the iteration in force when a schedule is new, and `step` makes
    it 0, 1, 2 ... Torch counts from 0. So `last_epoch == last_batch_iteration + 1`, which is the number of steps that
    the optimizer has taken, and the step number k (from 0) of the optimizer uses the equation at iteration k - 1. The
    rate in the optimizer is right as soon as there is a schedule.

    Rates that are tensors are filled in place. Groups that are added to the optimizer later follow too.

    Args:
        optimizer: its groups' `lr` is set.
        last_batch_iteration: the iteration that is in force at first; -1 is the beginning.

    Raises:
        ValueError: for values outside their range, and lists that do not have one value for each group.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        start = whole("last_batch_iteration", last_batch_iteration, -1)
        if start >= 0 and isinstance(optimizer, Optimizer):
            # Torch wants proof that the optimizer has been scheduled before; the equations need none.
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", _plain(group["lr"]))
        super().__init__(optimizer, start)

    @property
    def last_batch_iteration(self) -> int:
        """The iteration in force, as DeepSpeed counts: -1 before the first `step`."""
        return self.last_epoch - 1

    def rates(self, iteration: int) -> list[float]:
        """The rate of each group at an iteration (from -1), by the equation of the schedule."""
        raise NotImplementedError

    def momenta(self, iteration: int) -> list[float] | None:
        """The momentum of each group at an iteration; None where the schedule leaves it alone."""
        return None

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group at the iteration in force."""
        return [*self.rates(self.last_batch_iteration)]

    def step(self, epoch: int | None = None) -> None:
        """Go on by one step of the optimizer. `epoch` is for torch's `SequentialLR`."""
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(_plain(group.setdefault("initial_lr", _plain(group["lr"]))))
        super().step(epoch)
        self._set_momenta()

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands, as plain numbers. Its arguments are not in it: those of the new run count."""
        return {
            "last_batch_iteration": self.last_batch_iteration,
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "base_lrs": [_plain(lr) for lr in self.base_lrs],
            "_last_lr": [_plain(lr) for lr in self._last_lr],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there. The state of DeepSpeed's schedules (`last_batch_iteration` alone) is understood.

        The optimizer gets the rates of this iteration, unless it has others than this schedule has given it: then its
        own state has been loaded, or another schedule is at work.

        Raises:
            ValueError: the state is that of another number of parameter groups, or of no schedule.
        """
        if "last_batch_iteration" not in state_dict:
            raise ValueError(
                f"not the state of a {type(self).__name__}: no last_batch_iteration in {sorted(state_dict)}"
            )
        base = state_dict.get("base_lrs", self.base_lrs)
        groups = self.optimizer.param_groups
        if len(base) != len(groups):
            raise ValueError(f"the state has {len(base)} base_lrs, the optimizer {len(groups)} parameter groups")
        untouched = [_plain(group["lr"]) for group in groups] == [_plain(lr) for lr in self._last_lr]
        self.last_epoch = whole("last_batch_iteration", state_dict["last_batch_iteration"], -1) + 1
        self._step_count = state_dict.get("_step_count", self.last_epoch + 1)
        self.base_lrs = list(base)
        if untouched:
            for group, lr in zip(groups, self.rates(self.last_batch_iteration), strict=True):
                _set_rate(group, lr)
            self._set_momenta()
        self._last_lr = [_copy(group["lr"]) for group in groups]

    def _set_momenta(self) -> None:
        found = self.momenta(self.last_batch_iteration)
        if found is not None:
            for group, momentum in zip(self.optimizer.param_groups, found, strict=True):
                set_momentum(group, momentum)

    def each(self, name: str, values: Values) -> list[float]:
        """A value for each group of the optimizer.

        Raises:
            ValueError: `values` is a list of another length.
        """
        return spread(name, values, len(self.optimizer.param_groups))


def spread(name: str, values: Values, groups: int) -> list[float]:
    """One value for each of so many groups."""
    if not isinstance(values, Sequence):
        return [float(values)] * groups
    if len(values) != groups:
        raise ValueError(f"{name} has {len(values)} values, the optimizer {groups} parameter groups: give one for each")
    return [float(value) for value in values]


def whole(name: str, value: Any, at_least: int) -> int:
    """`value` as an int.

    Raises:
        ValueError: it is not a whole number, or too small.
    """
    try:
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if number < at_least or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}")
    return number


def has_momentum(group: dict[str, Any]) -> bool:
    """Whether the optimizer of this group has what `set_momentum` sets."""
    return "betas" in group or "momentum" in group


def set_momentum(group: dict[str, Any], momentum: float) -> None:
    """Set `betas[0]`, or `momentum` where there are no betas. The other betas stay."""
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    else:
        group["momentum"] = momentum


def _set_rate(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _plain(lr: Any) -> float:
    return float(lr)


def _copy(lr: Any) -> Any:
    return lr.clone() if isinstance(lr, Tensor) else lr
