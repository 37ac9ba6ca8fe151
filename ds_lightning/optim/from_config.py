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
from ds_lightning.optim.adam8bit import Adam8bit, AdamW8bit
from ds_lightning.optim.groups import check_values
from ds_lightning.optim.lamb import FusedLamb, Lamb
from ds_lightning.optim.lion import CPULion, FusedLion, Lion
from ds_lightning.optim.muon import Muon
from ds_lightning.optim.muon_params import muon_groups
from ds_lightning.optim.mup import MUP, mup_optimizer
from ds_lightning.optim.native import NativeOptimizer
from ds_lightning.optim.onebit import OneBitOptimizer
from ds_lightning.optim.onebit_adam import OneBitAdam
from ds_lightning.optim.onebit_lamb import OneBitLamb
from ds_lightning.optim.sgd import SGD
from ds_lightning.optim.zero_one_adam import ZeroOneAdam

_OURS: dict[str, type[NativeOptimizer]] = {
    cls.__name__.lower(): cls
    for cls in (
        *(Adam, AdamW, FusedAdam, CPUAdam, Adam8bit, AdamW8bit, Lion, FusedLion, CPULion, Adagrad, CPUAdagrad, SGD),
        *(Lamb, FusedLamb, Muon),
    )
}
_ONEBIT: dict[str, type[OneBitOptimizer]] = {cls.__name__.lower(): cls for cls in (OneBitAdam, ZeroOneAdam, OneBitLamb)}
_OPS = {"adam8bit": Adam8bit, "adam": Adam, "lion": Lion, "adagrad": Adagrad, "sgd": SGD}
_TORCH_ONLY = frozenset(
    {"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
)
_OURS_ONLY = {"bias_correction": True, "set_grad_none": True, "moment_dtype": "fp32", "fp32_optimizer_states": True}
"""Arguments that torch does not know, and the values with which it does the same."""


def build_optimizer(
    kind: str,
    params: Mapping[str, Any],
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    where: str = "param_groups",
    module: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that `optimizer.type` names.

    The names that DeepSpeed knows are classes of `ds_lightning.optim`, whose steps are native. Where the arguments ask
    for what only torch has (amsgrad, maximize ...) or `torch_adam` asks for it, and where neither CPU nor device
    has a kernel, it is torch's class.

    Args:
        kind: a name of DeepSpeed's in any letter case, or the exact name of a class of `torch.optim`.
        params: `optimizer.params`. `Adam` means decoupled weight decay unless `adam_w_mode` is false, as in DeepSpeed.
        parameters: what it updates, or groups of it; "betas" of groups may be lists.
        where: groups come from, for messages: what a block of the configuration says must be a value of a group.
        module: where they are; Muon asks it which of them are embeddings, where there are no groups.

    Raises:
        ConfigError: for a package that is missing, an unknown name, arguments that the class does not take, or such
            values of groups.
    """
    members: list[Any] = [_with_tuple(entry) if isinstance(entry, dict) else entry for entry in parameters]
    groups = [entry for entry in members if isinstance(entry, dict)]
    leaves = [leaf for group in groups for leaf in group["params"]] if groups else members
    arguments = dict(params)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    onebit = _ONEBIT.get(kind.lower())
    wanted = arguments.pop("torch_adam", False) or any(arguments.get(name) for name in _TORCH_ONLY)
    arguments = {name: value for name, value in arguments.items() if value or name not in _TORCH_ONLY}
    if kind.lower() in MUP:
        return mup_optimizer(kind, arguments, members)
    ours = _OURS.get(kind.lower())
    cls: type[torch.optim.Optimizer] | None = ours or onebit
    if onebit is not None:
        arguments = {**params, **arguments}  # it refuses itself what it does not have
    elif ours is None:
        cls = _torch_class(kind)
    elif wanted or not _has_kernel(ours, leaves):
        theirs, rest = _of_torch(ours, arguments)
        if theirs is not None and (wanted or not _OURS_ONLY.keys() & rest.keys()):
            cls, arguments = theirs, rest
    if ours is not None and cls is ours and issubclass(ours, (AdamW, AdamW8bit)):
        arguments.pop("adam_w_mode", None)  # DeepSpeed's does not look at it either
    assert cls is not None
    if cls is Muon and module is not None and not groups:
        members = muon_groups(module)
    try:
        optimizer = cls(members, **arguments)
    except (TypeError, ValueError) as error:
        place = "ds_lightning.optim" if cls in (ours, onebit) else "torch.optim"
        raise ConfigError(f"optimizer.params do not fit {place}.{cls.__name__}: {error}") from error
    known = [*optimizer.defaults, *(("use_muon",) if cls is Muon else ())]
    check_values(groups, known, where, strict=where == "optimizer.param_groups")
    return optimizer


def _with_tuple(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "betas": tuple(group["betas"])} if "betas" in group else group


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
    op = next((name for name, base in _OPS.items() if issubclass(ours, base)), None)
    if op is None:  # torch has no such class
        return True
    return all(has_kernel(op, device) or device.type == "meta" for device in {p.device for p in parameters})
