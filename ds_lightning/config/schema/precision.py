"""Number formats: fp16, bf16, amp, autocast, accumulation."""

# ruff: noqa: RUF009 - `key` makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_lightning.config.schema.base import Block, key

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}


@dataclass
class Fp16Config(Block):
    """16-bit floats with loss scaling; `enabled` means the same as `precision="16-mixed"`."""

    enabled: bool = key(False, "Train in fp16.")
    auto_cast: bool = key(False, "Cast inputs to half.", status="inert", remark="inputs are always converted")
    loss_scale: float = key(0.0, "Fixed scale; 0 means dynamic.", at_least=0)
    initial_scale_power: int = key(16, "A dynamic scale starts at 2 to this power.", at_least=0, at_most=127)
    loss_scale_window: int = key(1000, "Clean steps before the scale doubles.")
    hysteresis: int = key(2, "Overflows before the scale halves.", at_least=1)
    consecutive_hysteresis: bool = key(False, "Every clean step refills the hysteresis.")
    min_loss_scale: int = key(1, "The scale never falls below this.")
    fp16_master_weights_and_grads: bool = key(False, "Masters in fp16; gradients add up in fp32.")


@dataclass
class Bf16Config(Block):
    """bfloat16; `enabled` means the same as `precision="bf16-mixed"`."""

    enabled: bool = key(False, "Train in bf16.")
    immediate_grad_update: bool = key(
        False,
        "Add each micro-gradient from the parameter hook.",
        status="inert",
        remark="gradients are added up block by block while backward runs, always",
    )
    check_grad_overflow: bool = key(False, "Skip a step with inf or NaN. Off here unless set, as in DDP.")
    bf16_master_weights_and_grads: bool = key(False, "Masters and gradients in bf16.")
    bf16_optimizer_states: bool = key(False, "Moments in bf16.")


@dataclass
class AmpConfig(Block):
    """The arguments of apex's `amp.initialize`, done by torch's autocast: see `config.amp`."""

    enabled: bool = key(False, "Mixed precision at an optimization level.")
    opt_level: str = key("O1", "O0 to O3.", choices=("O0", "O1", "O2", "O3"))
    loss_scale: Any = key(None, "A number or dynamic; null is the level's.")
    cast_model_type: Any = key(None, "dtype of the model.")
    patch_torch_functions: Any = key(None, "Patch torch functions.")
    keep_batchnorm_fp32: Any = key(None, "Batch norm in fp32.")
    master_weights: Any = key(None, "Keep masters.")
    cast_model_outputs: Any = key(None, "dtype of outputs.")
    num_losses: int = key(1, "Number of losses.", at_least=1, status="inert", remark="one loss scale serves all losses")
    verbosity: int = key(1, "0 is quiet.", status="inert", remark="strategy.loss_scale and skipped_steps tell all")
    min_loss_scale: Any = key(None, "Floor of a dynamic scale; null is 1. An overflow at the floor ends the run.")
    max_loss_scale: float = key(2.0**24, "Ceiling of a dynamic scale.", at_least=1)


@dataclass
class TorchAutocastConfig(Block):
    """Native autocast; parameters stay fp32."""

    enabled: bool = key(False, "Run forward under autocast.")
    dtype: str | None = key(None, "Low precision type.", choices={k: v for k, v in DTYPES.items() if v != "fp32"})
    lower_precision_safe_modules: list[str] | None = key(None, "Class paths communicated in the low type.")


@dataclass
class DataTypesConfig(Block):
    """Types of what is stored between steps."""

    grad_accum_dtype: str | None = key(None, "Type of accumulated gradients; null is fp32 here.", choices=DTYPES)
    param_dtype: str | None = key(None, "Must agree with fp16/bf16.", choices=DTYPES)
    buffer_dtype: str | None = key(None, "Cast module buffers; null keeps them.", choices=DTYPES)
