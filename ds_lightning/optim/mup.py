"""The optimizers of the `mup` package (arXiv:2203.03466): Adam and SGD whose groups have learning rates by width."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ds_lightning.errors import ConfigError
from ds_lightning.optim.adam import Adam, AdamW
from ds_lightning.optim.sgd import SGD

MUP: Mapping[str, tuple[str, Any]] = {
    "muadam": ("MuAdam", partial(Adam, adam_w_mode=False)),
    "muadamw": ("MuAdamW", AdamW),
    "musgd": ("MuSGD", SGD),
}
"""Their names in lower case: functions of `mup`, and the class of ours that does the step."""

_DEFAULT_LR = 1e-3


def mup_optimizer(kind: str, arguments: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of ours with the groups that `mup` makes.

    Args:
        kind: "MuAdam", "MuAdamW" or "MuSGD", in any letter case.
        arguments: of the optimizer.
        parameters: of a model on which `mup.set_base_shapes` was called.

    Raises:
        ConfigError: where the package is missing, or does not take the parameters.
    """
    name, implementation = MUP[kind.lower()]
    try:
        mup = import_module("mup")
    except ImportError as error:
        raise ConfigError(
            f"optimizer.type={kind!r} needs the package mup, which cannot be imported ({error}). Install it "
            f"(pip install mup) for {sys.executable}, or use another optimizer."
        ) from error
    make = mup.MuSGD if name == "MuSGD" else mup.MuAdam
    try:
        made: torch.optim.Optimizer = make(parameters, impl=implementation, **{"lr": _DEFAULT_LR, **arguments})
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"mup.{name} does not take these parameters or optimizer.params: {error}. Call mup.set_base_shapes on the "
            "model in its constructor."
        ) from error
    return made
