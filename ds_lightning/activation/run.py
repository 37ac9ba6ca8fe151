"""Activation checkpointing of one run, as the configuration asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from ds_lightning.activation import checkpointing
from ds_lightning.activation.blocks import CheckpointedBlocks, worth_checkpointing
from ds_lightning.activation.options import ActivationOptions, shares_inputs
from ds_lightning.config.schema.activation import ActivationCheckpointingConfig


class ActivationRun:
    """Checkpoints a model's blocks from now until `stop`; calls by hand follow the same settings meanwhile.

    Args:
        modules: what is gathered as one, by name.
        block: the configuration.
        before_recomputation: called with the name of a module whose forward is about to be computed again.
        warn: told what has no effect.

    Raises:
        ConfigError: for settings that contradict each other.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        block: ActivationCheckpointingConfig,
        before_recomputation: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        front = checkpointing.front()
        self._before = None if front.configured else front.block
        if self._before is not None:
            front.set(block, front.mpu)
            how = front.how
        else:  # the script's settings hold for its own calls
            how = ActivationOptions.from_config(block, front.group, front.tracker)
        chosen = worth_checkpointing(modules, block.every)
        if not chosen:
            warn(
                "activation_checkpointing is on, but the model has no repeated blocks (elements of a ModuleList or "
                "Sequential), so only calls of ds_lightning.checkpoint(function, ...) are checkpointed. "
                "zero_optimization.leaf_module names other modules to be treated as blocks."
            )
        if block.partition_activations and not shares_inputs(front.group):
            warn(checkpointing.NOTHING_TO_PARTITION)
        self._blocks = CheckpointedBlocks(chosen, how, before_recomputation)

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that are checkpointed."""
        return self._blocks.names

    def stop(self) -> str:
        """Leave the model as it was.

        Returns:
            What it cost and saved (`profile`), empty when that was not measured.
        """
        self._blocks.remove()
        if self._before is not None:
            front = checkpointing.front()
            front.set(self._before, front.mpu)
            self._before = None
        profile = self._blocks.how.profile
        return profile.table() if profile is not None and profile.rows else ""
