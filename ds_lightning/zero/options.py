"""What the engine takes from the configuration, in the units in which it works."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_lightning.layout.flat import LayoutOptions
from ds_lightning.layout.units import LeafModules
from ds_lightning.precision.dtypes import DtypePolicy
from ds_lightning.zero.reduce import ReduceOptions


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one engine. Sizes in elements; None means "choose for this model".

    Attributes:
        layout: thresholds of resident parameters.
        leaves: `leaf_module`.
        reduce: reductions.
        dtypes: precision of parameters.
        allgather_piece: `allgather_bucket_size`.
        tile: `sub_group_size`.
        prefetch: `stage3_prefetch_bucket_size`; None fetches one unit ahead.
        max_live: `stage3_max_live_parameters`; bounds prefetching, and decides whether evaluation gathers the whole
            model once.
        max_reuse_distance: `stage3_max_reuse_distance`; None keeps a unit only when it is needed again at once.
        allow_untested_optimizer: `zero_allow_untested_optimizer`.
    """

    layout: LayoutOptions = field(default_factory=LayoutOptions)
    leaves: LeafModules = field(default_factory=LeafModules)
    reduce: ReduceOptions = field(default_factory=ReduceOptions)
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)
    allgather_piece: int = 500_000_000
    tile: int = 1_000_000_000
    prefetch: int | None = None
    max_live: int = 1_000_000_000
    max_reuse_distance: int | None = None
    allow_untested_optimizer: bool = False


COMM_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
