"""What the engine takes from the configuration, in the units in which it works."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_lightning.comm.averaging import Averaging
from ds_lightning.config import ResolvedConfig
from ds_lightning.layout.flat import LayoutOptions
from ds_lightning.layout.units import LeafModules
from ds_lightning.offload.policy import Home, OffloadPolicy
from ds_lightning.precision.dtypes import DtypePolicy
from ds_lightning.zero.reduce import ReduceOptions

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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
        offload: where shards live that are not on the device; None keeps all of them there.
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
    offload: OffloadPolicy | None = None

    @property
    def read_ahead(self) -> int:
        """Elements of shards on disk that are read before they are gathered; 0 without such shards."""
        policy = self.offload
        return 0 if policy is None or policy.param is not Home.DISK else policy.read_ahead

    @classmethod
    def from_config(cls, resolved: ResolvedConfig, dtypes: DtypePolicy | None) -> EngineOptions:
        """What a configuration asks for.

        Args:
            resolved: the configuration in force.
            dtypes: from the precision; None leaves every parameter as it is.
        """
        zero = resolved.zero_optimization
        given = resolved.given

        def chosen(key: str) -> int | None:
            """A limit that the user set; the reference's defaults are made for models of billions of parameters."""
            return int(getattr(zero, key)) if f"zero_optimization.{key}" in given else None

        dtype, accumulate = resolved.communication_data_type, resolved.data_types.grad_accum_dtype
        return cls(
            layout=LayoutOptions(
                param_persistence_threshold=int(zero.stage3_param_persistence_threshold),
                model_persistence_threshold=int(zero.stage3_model_persistence_threshold),
                round_robin=bool(zero.round_robin_gradients) and zero.stage in (1, 2),
            ),
            leaves=LeafModules(
                tuple(zero.leaf_module.classes), tuple(zero.leaf_module.names), tuple(zero.leaf_module.name_suffixes)
            ),
            reduce=ReduceOptions(
                dtype=_DTYPES[dtype] if dtype else None,
                piece=max(1, int(zero.reduce_bucket_size)),
                # At stages below 3 the reference's default is no overlap, which has no advantage here.
                overlap=bool(zero.overlap_comm) or "zero_optimization.overlap_comm" not in given,
                ignore_unused=bool(zero.ignore_unused_parameters),
                averaging=Averaging(
                    resolved.gradient_allreduce_op,
                    bool(resolved.prescale_gradients),
                    float(resolved.gradient_predivide_factor),
                ),
                accumulate=_DTYPES[accumulate] if accumulate else None,
            ),
            dtypes=dtypes or DtypePolicy(),
            allgather_piece=max(1, int(zero.allgather_bucket_size)),
            tile=max(1, int(zero.sub_group_size)),
            prefetch=chosen("stage3_prefetch_bucket_size"),
            max_live=int(zero.stage3_max_live_parameters),
            max_reuse_distance=chosen("stage3_max_reuse_distance"),
            allow_untested_optimizer=bool(resolved.zero_allow_untested_optimizer),
            offload=OffloadPolicy.from_config(resolved),
        )
