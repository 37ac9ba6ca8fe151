"""Builds the optimizer of the `optimizer` block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ds_lightning.config.suggest import did_you_mean
from ds_lightning.errors import ConfigError
from ds_lightning.ops.optim import has_kernel
from ds_lightning.optim.adagrad import Adagrad, CPUAdagrad
from ds_lightning.optim.adam import Adam, AdamW, CPUAdam, FusedAdam
from ds_lightning.optim.lion import CPULion, FusedLion, Lion
from ds_lightning.optim.native import NativeOptimizer
from ds_lightning.optim.onebit import OneBitOptimizer
from ds_lightning.optim.onebit_adam import OneBitAdam
from ds_lightning.optim.onebit_lamb import OneBitLamb
from ds_lightning.optim.sgd import SGD
from ds_lightning.optim.zero_one_adam import ZeroOneAdam

_OURS: dict[str, type[NativeOptimizer]] = {
    cls.__name__.lower(): cls
    for cls in (Adam, AdamW, FusedAdam, CPUAdam, Lion, FusedLion, CPULion, Adagrad, CPUAdagrad, SGD)
}
_ONEBIT: dict[str, type[OneBitOptimizer]] = {cls.__name__.lower(): cls for cls in (OneBitAdam, ZeroOneAdam, OneBitLamb)}
_OPS = {"adam": Adam, "lion": Lion, "adagrad": Adagrad, "sgd": SGD}
_TORCH_ONLY = frozenset(
    {"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
)
_OURS_ONLY = {"bias_correction": True, "set_grad_none": True, "moment_dtype": "fp32", "fp32_optimizer_states": True}
"""Arguments that torch does not know, and the values with which it does the same."""


def build_optimizer(kind: str, params: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `optimizer.type` names.

    The names that DeepSpeed knows are classes of `ds_lightning.optim`, whose steps are native. Where the arguments ask
    for what only torch has (amsgrad, maximize ...) or `torch_adam` asks for it, and where neither CPU nor device
    has a kernel, it is torch's class.

    Args:
        kind: a name of DeepSpeed's in any letter case, or the exact name of a class of `torch.optim`.
        params: `optimizer.params`. `Adam` means decoupled weight decay unless `adam_w_mode` is false, as in DeepSpeed.
        parameters: what it updates.

    Raises:
        ConfigError: for an unknown name or arguments that the class does not take.
    """
    parameters = list(parameters)
    arguments = dict(params)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    if kind.lower() in _ONEBIT:
        return _made(_ONEBIT[kind.lower()], parameters, arguments)
    wanted = arguments.pop("torch_adam", False) or any(arguments.get(name) for name in _TORCH_ONLY)
    arguments = {name: value for name, value in arguments.items() if value or name not in _TORCH_ONLY}
    ours = _OURS.get(kind.lower())
    cls: type[torch.optim.Optimizer] | None = ours
    if ours is None:
        cls = _torch_class(kind)
    elif wanted or not _has_kernel(ours, parameters):
        theirs, rest = _of_torch(ours, arguments)
        if theirs is not None and (wanted or not _OURS_ONLY.keys() & rest.keys()):
            cls, arguments = theirs, rest
    if ours is not None and cls is ours and issubclass(ours, AdamW):
        arguments.pop("adam_w_mode", None)  # DeepSpeed's does not look at it either
    assert cls is not None
    return _made(cls, parameters, arguments)


def _made(
    cls: type[torch.optim.Optimizer], parameters: list[nn.Parameter], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    try:
        return cls(parameters, **arguments)
    except (TypeError, ValueError) as error:
        module = "ds_lightning.optim" if cls.__module__.startswith(__package__) else "torch.optim"
        raise ConfigError(f"optimizer.params do not fit {module}.{cls.__name__}: {error}") from error


def _of_torch(ours: type[NativeOptimizer], arguments: dict[str, Any]) -> tuple[type[torch.optim.Optimizer] | None, Any]:
    """The class of torch that does the same, and its arguments."""
    rest = {name: value for name, value in arguments.items() if (name, value) not in _OURS_ONLY.items()}
    decoupled = rest.pop("adam_w_mode", True) or issubclass(ours, AdamW)
    if issubclass(ours, Adam):
        return torch.optim.AdamW if decoupled else torch.optim.Adam, rest
    if issubclass(ours, Adagrad):
        return torch.optim.Adagrad, rest
    return (torch.optim.SGD, rest) if ours is SGD else (None, rest)


def _torch_class(kind: str) -> type[torch.optim.Optimizer]:
    found = getattr(torch.optim, kind, None)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    known = [n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
    known += [cls.__name__ for cls in (*_OURS.values(), *_ONEBIT.values())]
    raise ConfigError(f"optimizer.type={kind!r} is not known; {did_you_mean(kind, known) or 'see torch.optim'}")


def _has_kernel(ours: type[NativeOptimizer], parameters: list[nn.Parameter]) -> bool:
    """Whether a kernel serves parameters where they are now; parameters on the meta device are not anywhere yet."""
    op = next(name for name, base in _OPS.items() if issubclass(ours, base))
    return all(has_kernel(op, device) or device.type == "meta" for device in {p.device for p in parameters})
