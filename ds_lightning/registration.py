"""Makes the strategies known to Lightning by name."""

from __future__ import annotations

import sys
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "dszero0": {"stage": 0},
    "dszero1": {"stage": 1},
    "dszero2": {"stage": 2},
    "dszero3": {"stage": 3},
    "dszero1_offload": {"stage": 1, "offload_optimizer": "cpu"},
    "dszero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "dszero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "dszero3_nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
}


def make_strategy(**arguments: Any) -> Any:
    """Construct a `ZeroStrategy`; the registry holds this instead of the class, so that imports stay cheap."""
    from ds_lightning.strategy import ZeroStrategy

    return ZeroStrategy(**arguments)


def register() -> None:
    """Register all variants with Lightning's Trainer; harmless when it was done before.

    While Lightning is not imported yet, that is left until it is: commands that need neither stay fast.
    """
    if "lightning.pytorch" not in sys.modules:
        from ds_lightning.hydra_plugins.ds_lightning.registration import register_with_lightning

        register_with_lightning()
        return
    from lightning.pytorch.strategies import StrategyRegistry

    for name, arguments in VARIANTS.items():
        if name not in StrategyRegistry:
            described = ", ".join(f"{key}={value}" for key, value in arguments.items())
            StrategyRegistry.register(
                name, make_strategy, description=f"ZeRO ({described}) by ds_lightning", **arguments
            )
