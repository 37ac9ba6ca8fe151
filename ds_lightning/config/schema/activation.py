"""Activation memory: checkpointing and sparse attention."""

# ruff: noqa: RUF009 - `key` makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass

from ds_lightning.config.schema.base import Block, key


@dataclass
class ActivationCheckpointingConfig(Block):
    """Recompute activations in backward instead of keeping them."""

    enabled: bool = key(False, "Turn it on with plain recomputation (a key of this package).")
    policy: str = key(
        "full",
        "full recomputes everything; selective keeps results of matrix products and attention (of this package).",
        choices=("full", "selective"),
    )
    every: int = key(1, "Checkpoint every n-th block only (a key of this package).", at_least=1)
    partition_activations: bool = key(False, "Share inputs of blocks out to model-parallel ranks.")
    cpu_checkpointing: bool = key(False, "Keep inputs of blocks in host memory.")
    contiguous_memory_optimization: bool = key(False, "Keep these slices in memory allocated once.")
    number_checkpoints: int | None = key(
        None,
        "Checkpointed calls per forward, for contiguous_memory_optimization.",
        at_least=1,
    )
    synchronize_checkpoint_boundary: bool = key(False, "Synchronize the device around each checkpoint.")
    profile: bool = key(False, "Measure what each checkpoint costs and saves; it waits for the device.")

    @property
    def is_on(self) -> bool:
        """On by its own key or by any of the three memory switches; a block of falses is off."""
        switches = (
            self.partition_activations,
            self.cpu_checkpointing,
            self.contiguous_memory_optimization,
        )
        return self.enabled or any(switches)


@dataclass
class SparseAttentionConfig(Block):
    """A block-sparse attention pattern."""

    mode: str = key("fixed", "The pattern.", choices=("dense", "fixed", "variable", "bigbird", "bslongformer"))
    block: int = key(16, "Side of a block.", at_least=1)
    different_layout_per_head: bool = key(False, "Each head has its own pattern.")
    num_local_blocks: int = key(4, "Blocks per local window.", at_least=1)
    num_global_blocks: int = key(1, "Global blocks per window.", at_least=0)
    attention: str = key("bidirectional", "Direction.", choices=("unidirectional", "bidirectional"))
    horizontal_global_attention: bool = key(False, "Global rows too.")
    num_different_global_patterns: int = key(1, "Patterns shared out over heads.", at_least=1)
    num_random_blocks: int = key(0, "Random blocks per row.", at_least=0)
    local_window_blocks: list[int] = key(lambda: [4], "Sizes of local windows.", at_least=1)
    global_block_indices: list[int] = key(lambda: [0], "Global blocks, or starts of ranges.", at_least=0)
    global_block_end_indices: list[int] | None = key(None, "Ends of ranges.", at_least=1)
    num_sliding_window_blocks: int = key(3, "Width of the sliding window.", at_least=1)
