"""A stage is data: which buffers are sharded."""

from __future__ import annotations

from dataclasses import dataclass

from ds_lightning.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a ZeRO stage shards; everything else about a stage follows from these three.

    Attributes:
        stage: 0 to 3.
        shard_params: parameters are gathered per unit and released again.
        shard_grads: each micro-batch is reduced straight into this rank's shard.
        shard_optimizer: each rank steps on, and keeps the states of, its own elements only.
    """

    stage: int
    shard_params: bool
    shard_grads: bool
    shard_optimizer: bool

    @classmethod
    def of(cls, stage: int) -> StagePlan:
        """The plan of a stage (arXiv:1910.02054, section 5)."""
        if stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_optimization.stage={stage!r} does not exist. Use 0, 1, 2 or 3.")
        return cls(stage, shard_params=stage >= 3, shard_grads=stage >= 2, shard_optimizer=stage >= 1)
