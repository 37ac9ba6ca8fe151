"""Keeps a learning-rate scheduler where it is when the optimizer's step was skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hold_on_skip(scheduler: Any, skipped: Callable[[], bool]) -> None:
    """Make `scheduler.step` do nothing after a skipped step.

    Lightning steps schedulers by itself, whether the optimizer stepped or not; an overflow would then move the
    schedule. The instance gets a `step` of its own that asks first.

    Args:
        scheduler: stepped once per optimizer step.
        skipped: whether the last step was skipped.
    """
    if "step" in vars(scheduler):
        return
    original = scheduler.step

    def step(*args: Any, **kwargs: Any) -> None:
        if not skipped():
            original(*args, **kwargs)

    scheduler.step = step
