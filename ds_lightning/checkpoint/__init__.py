"""Checkpoints by parameter name and logical shape, whatever the stage and the world size.

The name means two things: `ds_lightning.checkpoint(function, *args)` is activation checkpointing by hand, and
importing anything from this folder puts the folder in that place. So the module can be called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `ds_lightning.activation.checkpointing.checkpoint`."""
        from ds_lightning.activation.checkpointing import checkpoint

        return checkpoint(function, *args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
