"""The optimizer and scheduler blocks, and the parameters each type knows."""

# ruff: noqa: RUF009 - `key` makes a dataclass field

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_lightning.config.schema.base import Block, key

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("lr", "eps", "weight_decay", "max_coeff", "min_coeff", "coeff_beta", "factor_max"), float),
    **dict.fromkeys(
        ("factor_min", "factor_threshold", "momentum", "dampening", "lr_decay", "max_grad_norm"),
        float,
    ),
    **dict.fromkeys(("muon_lr", "adam_lr", "alpha", "initial_accumulator_value", "momentum_decay"), float),
    **dict.fromkeys(("freeze_step", "var_freeze_step", "var_update_scaler"), int),
    **dict.fromkeys(("local_step_scaler", "local_step_clipper", "block_size"), int),
    **dict.fromkeys(
        ("bias_correction", "amsgrad", "torch_adam", "adam_w_mode", "set_grad_none", "cuda_aware"),
        bool,
    ),
    **dict.fromkeys(("eps_inside_sqrt", "nesterov", "maximize", "foreach", "fused", "capturable"), bool),
    **dict.fromkeys(("differentiable", "decoupled_weight_decay", "fp32_optimizer_states", "centered"), bool),
    **dict.fromkeys(("comm_backend_name", "ns_method", "ns_dtype", "moment_dtype"), str),
    **dict.fromkeys(("betas", "etas", "step_sizes"), list[float]),
}
_TORCH_SWITCHES = "maximize foreach differentiable fused"
_ADAM = (
    "lr betas eps weight_decay bias_correction amsgrad torch_adam adam_w_mode set_grad_none "
    f"capturable moment_dtype fp32_optimizer_states decoupled_weight_decay {_TORCH_SWITCHES}"
)
_ADAM_8BIT = "lr betas eps weight_decay bias_correction adam_w_mode set_grad_none block_size"
_ADAGRAD = f"lr eps weight_decay amsgrad lr_decay initial_accumulator_value moment_dtype {_TORCH_SWITCHES}"
_LION = "lr betas weight_decay set_grad_none moment_dtype"
_LAMB = (
    "lr betas eps eps_inside_sqrt weight_decay max_coeff min_coeff bias_correction amsgrad set_grad_none moment_dtype"
)
_ONEBIT = "lr betas eps eps_inside_sqrt weight_decay bias_correction amsgrad cuda_aware comm_backend_name"
_LOCAL_STEPS = "var_freeze_step var_update_scaler local_step_scaler local_step_clipper"
_FROZEN_COEFF = "freeze_step max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold"
_BUILTIN_PARAMS = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "CPUAdam": _ADAM,
    "FusedAdam": _ADAM,
    "Adam8bit": _ADAM_8BIT,
    "AdamW8bit": _ADAM_8BIT,
    "Adagrad": _ADAGRAD,
    "CPUAdagrad": _ADAGRAD,
    "Lamb": _LAMB,
    "FusedLamb": _LAMB,
    "Lion": _LION,
    "CPULion": _LION,
    "FusedLion": _LION,
    "Muon": "lr momentum weight_decay betas eps ns_method ns_dtype muon_lr adam_lr moment_dtype",
    "OneBitAdam": f"{_ONEBIT} freeze_step",
    "ZeroOneAdam": f"{_ONEBIT} {_LOCAL_STEPS}",
    "OneBitLamb": f"{_ONEBIT} {_FROZEN_COEFF}",
    "MuAdam": "lr betas eps weight_decay amsgrad",
    "MuAdamW": "lr betas eps weight_decay amsgrad",
    "MuSGD": "lr momentum dampening weight_decay nesterov",
    "SGD": f"lr momentum dampening weight_decay nesterov moment_dtype {_TORCH_SWITCHES}",
}
BUILTIN_OPTIMIZERS = tuple(_BUILTIN_PARAMS)
TORCH_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam"),
)
ENCODED_OPTIMIZERS = ("Adam8bit", "AdamW8bit")
WHOLE_TENSOR_OPTIMIZERS = ("Lamb", "FusedLamb", "Muon")
COMPRESSED_OPTIMIZERS = {"OneBitAdam": 1, "ZeroOneAdam": 0, "OneBitLamb": 0}
"""Those that send one bit per element, and the highest stage at which they work."""

COMMUNICATION_BACKENDS = ("nccl", "gloo", "mpi", "hccl", "compressed")
"""What DeepSpeed's 1-bit optimizers take as `comm_backend_name`."""

_WARMUP: dict[str, Any] = {"warmup_num_steps": int, "warmup_type": str, "last_batch_iteration": int}
_WARMUP_LR: dict[str, Any] = {
    "warmup_min_lr": float | list[float],
    "warmup_max_lr": float | list[float],
}
_BUILTIN_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {**_WARMUP, **_WARMUP_LR},
    "WarmupDecayLR": {**_WARMUP, **_WARMUP_LR, "total_num_steps": int},
    "WarmupCosineLR": {
        **_WARMUP,
        "total_num_steps": int,
        "warmup_min_ratio": float,
        "cos_min_ratio": float,
    },
    "OneCycle": {
        "cycle_min_lr": float | list[float],
        "cycle_max_lr": float | list[float],
        "decay_lr_rate": float,
        "cycle_first_step_size": int,
        "cycle_second_step_size": int | None,
        "cycle_first_stair_count": int,
        "cycle_second_stair_count": int | None,
        "decay_step_size": int,
        "cycle_momentum": bool,
        "cycle_min_mom": float | list[float],
        "cycle_max_mom": float | list[float],
        "decay_mom_rate": float,
        "last_batch_iteration": int,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": float | list[float],
        "lr_range_test_step_size": int,
        "lr_range_test_step_rate": float,
        "lr_range_test_staircase": bool,
        "last_batch_iteration": int,
    },
}
BUILTIN_SCHEDULES = tuple(_BUILTIN_SCHEDULES)


def optimizer_params(kind: str | None) -> Mapping[str, Any] | None:
    """Names and types of `optimizer.params` for a type; None when every name may be right.

    `max_grad_norm` is known everywhere, so that it is refused by its own message instead of as a
    typo.
    """
    if kind not in _BUILTIN_PARAMS:
        return None
    return {name: _TYPES[name] for name in [*_BUILTIN_PARAMS[kind].split(), "max_grad_norm"]}


GROUP_SELECTORS: Mapping[str, Any] = {
    "name": str,
    "names": list[str],
    "modules": list[str],
    "max_ndim": int,
}
"""Keys of a block of `optimizer.param_groups` that say which parameters it is about; all others are their values."""

_NOT_PER_GROUP = (
    "torch_adam",
    "adam_w_mode",
    "set_grad_none",
    "fp32_optimizer_states",
    "max_grad_norm",
    "moment_dtype",
)


def group_params(kind: str | None) -> Mapping[str, Any] | None:
    """Names and types of the values of a parameter group; None when every name may be right."""
    known = optimizer_params(kind)
    return None if known is None else {name: hint for name, hint in known.items() if name not in _NOT_PER_GROUP}


def optimizer_param_type(name: str) -> Any:
    """The type of an optimizer parameter by its usual name; Any for an unusual one."""
    return _TYPES.get(name, Any)


def scheduler_params(kind: str | None) -> Mapping[str, Any] | None:
    """Names and types of `scheduler.params` for a type; None when every name may be right."""
    return _BUILTIN_SCHEDULES.get(kind or "")


def _folded(*names: str) -> dict[str, str]:
    return {name.casefold(): name for name in names}


@dataclass
class OptimizerConfig(Block):
    """The optimizer, when the module does not bring its own."""

    type: str | None = key(
        None,
        "One of ours, or a name in torch.optim.",
        choices=_folded(*BUILTIN_OPTIMIZERS, *TORCH_OPTIMIZERS),
        open_choices=True,
    )
    params: dict[str, Any] = key(dict, "Its arguments.", params=optimizer_params)
    param_groups: list[dict[str, Any]] = key(
        list,
        "Parameters with other values than `params`: blocks with names, modules or max_ndim.",
        params=group_params,
        selectors=GROUP_SELECTORS,
        remark="ours, DeepSpeed does not know it",
    )
    legacy_fusion: bool = key(False, "Old fusion of loss scaling.", status="inert", remark="one implementation here")


@dataclass
class SchedulerConfig(Block):
    """The learning rate schedule, stepped once per optimizer step."""

    type: str | None = key(
        None,
        "One of ours, or a name in torch.optim.lr_scheduler.",
        choices=BUILTIN_SCHEDULES,
        open_choices=True,
    )
    params: dict[str, Any] = key(dict, "Its arguments.", params=scheduler_params)
