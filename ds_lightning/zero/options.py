"""What the engine takes from the configuration, in the units in which it works."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_lightning.comm.averaging import Averaging
from ds_lightning.comm.feedback import FeedbackOptions
from ds_lightning.config import ResolvedConfig
from ds_lightning.layout.flat import LayoutOptions
from ds_lightning.layout.units import LeafModules
from ds_lightning.offload.policy import Home, OffloadPolicy
from ds_lightning.precision.dtypes import DTYPES, DtypePolicy
from ds_lightning.teams import Grouping
from ds_lightning.topology import Topology
from ds_lightning.zero.reduce import ReduceOptions
from ds_lightning.zero.transport import TransportOptions


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
        sparse: `sparse_gradients`; gradients of embeddings are exchanged as rows.
        allow_untested_optimizer: `zero_allow_untested_optimizer`.
        transport: how sharded units travel.
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
    sparse: bool = False
    allow_untested_optimizer: bool = False
    transport: TransportOptions = field(default_factory=TransportOptions)
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
        loco = zero.zeropp_loco_param if zero.stage == 3 else None
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
                dtype=DTYPES[dtype] if dtype else None,
                piece=max(1, int(zero.reduce_bucket_size)),
                # At stages below 3 the reference's default is no overlap, which has no advantage here.
                overlap=bool(zero.overlap_comm) or "zero_optimization.overlap_comm" not in given,
                ignore_unused=bool(zero.ignore_unused_parameters),
                averaging=Averaging(
                    resolved.gradient_allreduce_op,
                    bool(resolved.prescale_gradients),
                    float(resolved.gradient_predivide_factor),
                ),
                accumulate=DTYPES[accumulate] if accumulate else None,
            ),
            dtypes=dtypes or DtypePolicy(),
            allgather_piece=max(1, int(zero.allgather_bucket_size)),
            tile=max(1, int(zero.sub_group_size)),
            prefetch=chosen("stage3_prefetch_bucket_size"),
            max_live=int(zero.stage3_max_live_parameters),
            max_reuse_distance=chosen("stage3_max_reuse_distance"),
            sparse=bool(resolved.sparse_gradients),
            allow_untested_optimizer=bool(resolved.zero_allow_untested_optimizer),
            transport=TransportOptions(
                quantized_weights=bool(zero.zero_quantized_weights) and zero.stage == 3,
                quantized_gradients=bool(zero.zero_quantized_gradients) and zero.stage == 3,
                quantized_frozen=bool(zero.zero_quantized_nontrainable_weights) and zero.stage == 3,
                feedback=None if loco is None else FeedbackOptions(float(loco.err_beta), int(loco.reset_T)),
                hierarchical_gather=bool(zero.mics_hierarchical_params_gather) and zero.stage == 3,
            ),
            offload=OffloadPolicy.from_config(resolved),
        )


def grouping(resolved: ResolvedConfig) -> Grouping:
    """How a configuration divides the ranks."""
    zero = resolved.zero_optimization
    if zero.stage < 3:
        return Grouping(zero.node_size)
    return Grouping(
        node_size=zero.node_size,
        shard_size=zero.mics_shard_size if zero.mics_shard_size > 0 else None,
        secondary_size=zero.zero_hpz_partition_size,
        levels=bool(zero.zero_quantized_gradients or zero.mics_hierarchical_params_gather),
    )


def remarks(resolved: ResolvedConfig, topology: Topology, packed: bool) -> list[str]:
    """What a configuration asks of the way things travel, and these ranks, or this model, give no occasion for.

    Args:
        resolved: the configuration in force.
        topology: the ranks.
        packed: whether some frozen unit is kept as int8.
    """
    zero, teams = resolved.zero_optimization, topology.teams
    if zero.stage < 3:
        return []
    found = []
    if zero.zero_quantized_nontrainable_weights and not packed:
        found.append(
            "zero_quantized_nontrainable_weights: no frozen parameter is larger than "
            "stage3_param_persistence_threshold, so none is kept as int8"
        )
    asked = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "mics_shard_size": zero.mics_shard_size > 0,
        "mics_hierarchical_params_gather": zero.mics_hierarchical_params_gather,
    }
    if topology.world_size == 1:
        given = [key for key, wanted in asked.items() if wanted]
        return [*found, f"{', '.join(given)}: nothing is sent, there is one rank"] if given else found
    if asked["zero_hpz_partition_size"] and teams.secondary is None:
        found.append(
            f"zero_hpz_partition_size={zero.zero_hpz_partition_size} takes in all {topology.world_size} ranks, so a "
            "second shard would be no larger than the first: none is kept"
        )
    if asked["mics_shard_size"] and teams.replicas.size == 1:
        found.append(f"mics_shard_size={zero.mics_shard_size} takes in all ranks: there is one copy of the model")
    nodes = len(set(teams.nodes))
    why = "all ranks are on one node" if nodes == 1 else "nodes have one rank, or differ in their number of ranks"
    if teams.inside is None and asked["zero_quantized_gradients"]:
        found.append(f"zero_quantized_gradients: gradients travel as int4 in one step, because {why}")
    if teams.inside is None and asked["mics_hierarchical_params_gather"]:
        found.append(f"mics_hierarchical_params_gather: gathers take one step, because {why} that share shards")
    return found
