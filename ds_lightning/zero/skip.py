"""Keeps a learning-rate scheduler where it is when the optimizer's step was skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex


def hold_on_skip(scheduler: Any, skipped: Callable[[], bool]) -> None:
    """Make `scheduler.step` do nothing after a skipped step.

    Lightning steps schedulers by itself, whether the optimizer stepped or not; an overflow would move the schedule. The
    object gets a class of its own rather than an attribute: a scheduler's `state_dict` is its attributes. A copy of it,
    also a pickled one, is an ordinary scheduler.

    Args:
        scheduler: stepped once per optimizer step.
        skipped: whether the last step was skipped.
    """
    kind = type(scheduler)
    plain: Any = kind.__base__ if getattr(kind, "_held_by_ds_lightning", False) else kind

    class Held(plain):
        _held_by_ds_lightning = True

        def step(self, *args: Any, **kwargs: Any) -> None:
            if not skipped():
                super().step(*args, **kwargs)

        def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
            make, arguments, *rest = super().__reduce_ex__(protocol)
            arguments = (plain if argument is Held else argument for argument in arguments)
            return (_new if make.__name__ == "__newobj__" else make), tuple(arguments), *rest

    Held.__name__, Held.__qualname__, Held.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    scheduler.__class__ = Held


def _new(kind: Any, *arguments: Any) -> Any:
    """As `copyreg.__newobj__`, with which pickle insists on the class that the object has."""
    return kind.__new__(kind, *arguments)
