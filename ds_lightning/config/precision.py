"""Which precision a configuration asks for, and by which of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ds_lightning.config.amp import PRECISIONS, scale_options
from ds_lightning.config.schema import DeepSpeedConfig


@dataclass(frozen=True)
class AskedPrecision:
    """A precision that a block of the configuration switches on.

    Attributes:
        name: Lightning's name of it.
        block: "fp16", "bf16", "amp" or "torch_autocast".
        keeps_fp32: Parameters stay in fp32; autocast casts them, operation by operation.
        scale: Arguments of `LossScaleOptions` where the block has no `fp16` keys; None for no loss scale.
    """

    name: str
    block: str
    keeps_fp32: bool = False
    scale: dict[str, Any] | None = field(default=None, compare=False)


def asked_precision(config: DeepSpeedConfig) -> AskedPrecision | None:
    """What the configuration asks for; None when it leaves that to the Trainer."""
    if config.fp16.enabled:
        return AskedPrecision("16-mixed", "fp16")
    if config.bf16.enabled:
        return AskedPrecision("bf16-mixed", "bf16")
    amp, autocast = config.amp, config.torch_autocast
    if amp.enabled:
        return AskedPrecision(PRECISIONS[amp.opt_level], "amp", amp.opt_level == "O1", scale_options(amp))
    if not autocast.enabled:
        return None
    if autocast.dtype == "fp16":  # the numbers of torch.amp.GradScaler
        scale = {"loss_scale_window": 2000, "hysteresis": 1, "block": "torch_autocast"}
        return AskedPrecision("16-mixed", "torch_autocast", True, scale)
    return AskedPrecision("bf16-mixed", "torch_autocast", True)
