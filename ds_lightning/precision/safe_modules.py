"""Modules whose gradients may travel in 16 bit under autocast."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

from torch import nn

from ds_lightning.errors import ConfigError

DEFAULT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""What autocast runs in 16 bit, so that their gradients are 16-bit numbers already."""


def safe_modules(paths: Sequence[str] | None) -> tuple[type[nn.Module], ...]:
    """The classes that `torch_autocast.lower_precision_safe_modules` names.

    Args:
        paths: as `torch.nn.Linear`; None for `DEFAULT`.

    Raises:
        ConfigError: for what is no class of modules, all of it in one message.
    """
    if paths is None:
        return DEFAULT
    found, problems = [], []
    for path in paths:
        made = _class_at(path)
        if isinstance(made, str):
            problems.append(f"'{path}': {made}")
        else:
            found.append(made)
    if problems:
        raise ConfigError(
            "torch_autocast.lower_precision_safe_modules must name classes of modules, as 'torch.nn.Linear':\n  "
            + "\n  ".join(problems)
        )
    return tuple(found)


def _class_at(path: str) -> type[nn.Module] | str:
    """The class, or what is wrong."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name) if module else None
    except ImportError as error:
        return str(error)
    except AttributeError:
        return f"{module} has no {name}"
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        return "no class of modules"
    return found


def unused(classes: Iterable[type[nn.Module]], module: nn.Module) -> list[str]:
    """Names of classes of which the model has no module."""
    kinds = {type(child) for child in module.modules()}
    return [c.__name__ for c in classes if not any(issubclass(kind, c) for kind in kinds)]
