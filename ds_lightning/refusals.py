"""What a Trainer may bring that cannot work on shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from ds_lightning.config.suggest import did_you_mean
from ds_lightning.errors import ConfigError

_DDP_ONLY = ("static_graph", "gradient_as_bucket_view", "ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")


def refuse_ddp_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments of `DDPStrategy` that mean nothing here, and unknown ones."""
    for name, value in options.items():
        if name == "find_unused_parameters":
            rank_zero_info("ds_lightning: find_unused_parameters is not needed, unused parameters always work.")
        elif name in _DDP_ONLY:
            raise ConfigError(
                f"{name}={value!r} is an option of DistributedDataParallel, which ZeroStrategy does not use."
            )
        else:
            guess = did_you_mean(name, known)
            hint = f" {guess[0].upper()}{guess[1:]}" if guess else ""
            raise ConfigError(f"ZeroStrategy has no argument {name!r}.{hint} Keys of a ds_config go into config=.")


def refuse_callbacks(trainer: pl.Trainer, stage: int) -> None:
    """Callbacks that copy or prune whole parameters cannot work on shards."""
    if stage < 3:
        return
    names = {"StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning"}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(cls.__name__ in names for cls in type(callback).__mro__):
            raise ConfigError(
                f"The callback {type(callback).__name__} copies or prunes whole parameters, which no rank holds at "
                "zero_optimization.stage=3. Use stage 0, 1 or 2 with it, or, for an exponential moving average, "
                "ds_lightning.callbacks.EMA, which averages shards."
            )
