"""How calls are checkpointed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from ds_lightning.activation.host import HostStore
from ds_lightning.activation.inputs import InputStore, WholeStore
from ds_lightning.activation.measure import Profile
from ds_lightning.activation.random_states import RandomStateTracker
from ds_lightning.activation.slices import SlicedStore
from ds_lightning.activation.slots import SlotStore
from ds_lightning.config.schema.activation import ActivationCheckpointingConfig
from ds_lightning.errors import ConfigError


@dataclass(frozen=True)
class ActivationOptions:
    """What one kind of checkpointed call does.

    Attributes:
        store: where inputs wait for backward.
        selective: results of expensive operations are kept, see `selective.py`.
        synchronize: wait for the device before and after each forward and recomputation.
        tracker: named random generators that a recomputation repeats too.
        profile: measures, if given.
    """

    store: InputStore = field(default_factory=WholeStore)
    selective: bool = False
    synchronize: bool = False
    tracker: RandomStateTracker | None = None
    profile: Profile | None = None

    @classmethod
    def from_config(
        cls,
        block: ActivationCheckpointingConfig,
        group: dist.ProcessGroup | None = None,
        tracker: RandomStateTracker | None = None,
    ) -> ActivationOptions:
        """What the block `activation_checkpointing` asks for.

        Args:
            block: the block, checked.
            group: ranks that compute on the same inputs (model parallelism); None where there are none.
            tracker: named random generators.

        Raises:
            ConfigError: for pre-allocated memory without a number of slots, or without partitioning.
        """
        if block.contiguous_memory_optimization and (not block.partition_activations or not block.number_checkpoints):
            raise ConfigError(
                "contiguous_memory_optimization needs partition_activations=true and number_checkpoints, the number "
                f"of checkpointed calls of a forward (got {block.partition_activations} and "
                f"{block.number_checkpoints})."
            )
        if not shares_inputs(group):
            group = None
        store: InputStore = HostStore() if block.cpu_checkpointing else WholeStore()
        if group is not None and block.partition_activations:
            if block.contiguous_memory_optimization:
                assert block.number_checkpoints is not None
                store = SlotStore(block.number_checkpoints, on_host=block.cpu_checkpointing)
            store = SlicedStore(group, store)
        return cls(
            store,
            block.policy == "selective",
            block.synchronize_checkpoint_boundary,
            tracker,
            Profile() if block.profile else None,
        )


def shares_inputs(group: dist.ProcessGroup | None) -> bool:
    """Whether there is someone to share inputs out to."""
    return group is not None and dist.is_initialized() and dist.get_world_size(group) > 1
