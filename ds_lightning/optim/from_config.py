"""Builds the optimizer of the `optimizer` block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ds_lightning.config.suggest import did_you_mean
from ds_lightning.errors import ConfigError


def build_optimizer(kind: str, params: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `optimizer.type` names, a plain torch one.

    Args:
        kind: `Adam` or `AdamW` in any letter case, or the exact name of a class of `torch.optim`.
        params: `optimizer.params`. `Adam` means decoupled weight decay unless `adam_w_mode` is false, as in DeepSpeed;
            `torch_adam` makes no difference here.
        parameters: what it updates.

    Raises:
        ConfigError: for an unknown name or arguments that the class does not take.
    """
    arguments = dict(params)
    arguments.pop("torch_adam", None)
    decoupled = arguments.pop("adam_w_mode", True)
    lowered = kind.lower()
    name = {"adam": "AdamW" if decoupled else "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}.get(lowered)
    cls = getattr(torch.optim, name or kind, None)
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        known = [
            n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
        ]
        raise ConfigError(f"optimizer.type={kind!r} is not known; {did_you_mean(kind, known) or 'see torch.optim'}")
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    try:
        return cls(list(parameters), **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params do not fit torch.optim.{cls.__name__}: {error}") from error
