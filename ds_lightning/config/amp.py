"""What the `amp` block means: apex's optimization levels by torch's own autocast and our loss scale.

| level | precision | parameters | loss scale |
|---|---|---|---|
| O0 | `32-true` | fp32 | none |
| O1 | `16-mixed` | fp32; autocast casts them, operation by operation | dynamic |
| O2 | `16-mixed` | matrices in fp16 with fp32 masters, vectors and batch norm in fp32 | dynamic |
| O3 | `16-true` | fp16 | none, unless one is given |

Sources: `amp.initialize` and `apex.amp.scaler.LossScaler` of NVIDIA apex, which is retired.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ds_lightning.config.problems import Problem
from ds_lightning.config.schema.precision import DTYPES, AmpConfig

PRECISIONS = {"O0": "32-true", "O1": "16-mixed", "O2": "16-mixed", "O3": "16-true"}

_HOLDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "O0": {
        "keep_batchnorm_fp32": (True,),
        "master_weights": (True, False),
        "cast_model_type": ("fp32",),
        "patch_torch_functions": (False,),
    },
    "O1": {
        "keep_batchnorm_fp32": (True,),
        "master_weights": (True, False),
        "cast_model_type": (),
        "patch_torch_functions": (True,),
    },
    "O2": {
        "keep_batchnorm_fp32": (True,),
        "master_weights": (True,),
        "cast_model_type": ("fp16",),
        "patch_torch_functions": (True, False),
    },
    "O3": {
        "keep_batchnorm_fp32": (False,),
        "master_weights": (False,),
        "cast_model_type": ("fp16",),
        "patch_torch_functions": (False,),
    },
}
"""Values of apex's keys that hold at a level anyway; weights in fp32 are their own masters."""

_INSTEAD = {
    "keep_batchnorm_fp32": "batch norm is in fp32 at O0, O1 and O2, and in fp16 at O3",
    "master_weights": "O2 has fp32 masters, O3 has none",
    "cast_model_type": "O2 and O3 cast to fp16; for bf16 use bf16.enabled, or torch_autocast with dtype bfloat16",
    "patch_torch_functions": "O1 and O2 run under autocast, O0 and O3 do not",
    "cast_model_outputs": "cast them at the end of forward",
}

_SMALLEST, _LARGEST = 2.0**-127, 2.0**127


def fixed_loss_scale(block: AmpConfig) -> float | None:
    """The loss scale that never changes; None where it is dynamic or there is none."""
    value = block.loss_scale
    if value is None or (isinstance(value, str) and value.casefold() == "dynamic"):
        return None
    return float(value)


def is_dynamic(block: AmpConfig) -> bool:
    """Whether the loss scale follows overflows."""
    if block.loss_scale is None:
        return block.opt_level in ("O1", "O2")
    return fixed_loss_scale(block) is None


def scale_options(block: AmpConfig) -> dict[str, Any] | None:
    """Arguments of `LossScaleOptions`; None for no loss scale.

    apex's: from 2**16, doubled after 2000 clean steps, halved at every overflow.
    """
    fixed = fixed_loss_scale(block)
    if fixed is not None:
        return None if fixed == 1.0 and block.opt_level in ("O0", "O3") else {"loss_scale": fixed, "block": "amp"}
    if not is_dynamic(block):
        return None
    floor = 1.0 if block.min_loss_scale is None else float(block.min_loss_scale)
    return {
        "initial_scale_power": max(0, min(16, math.floor(math.log2(block.max_loss_scale)))),
        "loss_scale_window": 2000,
        "hysteresis": 1,
        "min_loss_scale": floor,
        "max_loss_scale": float(block.max_loss_scale),
        "block": "amp",
    }


def check_amp(block: AmpConfig) -> Iterator[Problem]:
    """Everything in the block that does not go with its level."""
    if not block.enabled:
        return
    level = block.opt_level
    for name, values in {**_HOLDS[level], "cast_model_outputs": ()}.items():
        value = _plain(name, getattr(block, name))
        if value is not None and value not in values:
            yield Problem(f"amp.{name}", f"{value!r} does not go with opt_level {level}: {_INSTEAD[name]}")
    yield from _check_scale(block)


def _check_scale(block: AmpConfig) -> Iterator[Problem]:
    value = block.loss_scale
    if value is not None and not (isinstance(value, str) and value.casefold() == "dynamic"):
        number = _number(value)
        if number is None or not _SMALLEST <= number <= _LARGEST:
            yield Problem("amp.loss_scale", f"must be 'dynamic', null or a number above 0, got {value!r}")
            return
    if block.opt_level == "O0" and value is not None and (is_dynamic(block) or fixed_loss_scale(block) != 1.0):
        yield Problem("amp.loss_scale", "O0 trains in fp32, which needs none; leave it out, or use O1")
    floor = block.min_loss_scale
    if floor is None or not is_dynamic(block):
        return
    number = _number(floor)
    if number is None or not _SMALLEST <= number <= _LARGEST:
        yield Problem("amp.min_loss_scale", f"must be null or a number above 0, got {floor!r}")
    elif number > block.max_loss_scale:
        yield Problem("amp.min_loss_scale", f"{number:g} is above amp.max_loss_scale {block.max_loss_scale:g}")


def _number(value: Any) -> float | None:
    """A finite number, also as text, which apex takes as well."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _plain(name: str, value: Any) -> Any:
    """Apex takes "True" and "False", and dtypes under many names."""
    if not isinstance(value, str):
        return value
    if name in ("cast_model_type", "cast_model_outputs"):
        return DTYPES.get(value.casefold(), value)
    return {"true": True, "false": False}.get(value.casefold(), value)
