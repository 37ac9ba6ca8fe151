"""What comm.py compares: methods as configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LR = 1e-3
FREEZE = 2  # steps before an optimizer begins to compress, few, so that what is measured comes after them
WARMUP = 6  # steps before the measurement: the first are slow, and the local steps of ZeroOneAdam settle in
LOCAL = 4  # ZeroOneAdam with local steps synchronizes so seldom


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        plain: the method that it is to beat: the same, uncompressed.
        config: a ds_config; None is plain DDP.
        hook: a communication hook of DDP, `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`.
    """

    plain: str
    config: dict[str, Any] | None = field(default_factory=dict)
    hook: str | None = None

    @property
    def has_optimizer(self) -> bool:
        """Whether the configuration makes the optimizer."""
        return bool(self.config) and "optimizer" in self.config


def _zero(plain: str, stage: int, /, rest: dict[str, Any] | None = None, **zero: Any) -> Method:
    return Method(plain, {"zero_optimization": {"stage": stage, **zero}, **(rest or {})})


def _onebit(name: str, **params: Any) -> Method:
    """A variance that is frozen so soon is zero for bytes that have not come up, so eps keeps their steps small."""
    params = {"lr": LR / 10, "eps": 1e-4, **params}
    return _zero("stage0", 0, {"optimizer": {"type": name, "params": params}})


def methods(ranks_per_host: int) -> dict[str, Method]:
    """All of them by name.

    Args:
        ranks_per_host: of which hierarchical methods make their small groups.
    """
    bf16 = {"communication_data_type": "bf16"}
    weights, gradients = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
    secondary = {"zero_hpz_partition_size": ranks_per_host}
    frozen = {"var_freeze_step": FREEZE, "var_update_scaler": 1}
    found = {
        "ddp": Method("ddp", None),
        "ddp_fp16": Method("ddp", None, "fp16_compress_hook"),
        **{f"stage{stage}": _zero("ddp", stage) for stage in range(4)},
        **{f"stage{stage}_bf16": _zero(f"stage{stage}", stage, bf16) for stage in (0, 2)},
        "OneBitAdam": _onebit("OneBitAdam", freeze_step=FREEZE),
        "OneBitLamb": _onebit("OneBitLamb", freeze_step=FREEZE),
        "ZeroOneAdam": _onebit("ZeroOneAdam", **frozen, local_step_clipper=1),
        "ZeroOneAdam_local": _onebit("ZeroOneAdam", **frozen, local_step_scaler=1, local_step_clipper=LOCAL),
        "qwZ": _zero("stage3", 3, **weights),
        "qgZ": _zero("stage3", 3, **gradients),
        "qwZ_qgZ": _zero("stage3", 3, **weights, **gradients),
    }
    if ranks_per_host > 1:
        found["hpZ"] = _zero("stage3", 3, **secondary)
        found["qwZ_qgZ_hpZ"] = _zero("stage3", 3, **weights, **gradients, **secondary)
        found["MiCS"] = _zero("stage3", 3, mics_shard_size=ranks_per_host)
    return found


NODE_SIZE = "COMM_NODE_SIZE"
"""Environment variable: ranks of a host, where the machine does not tell hosts apart."""

HIERARCHICAL = ("ddp", "stage2", "stage3", "qwZ", "qgZ", "hpZ", "qwZ_qgZ_hpZ", "MiCS")
"""What is compared by default where hosts have several ranks."""
