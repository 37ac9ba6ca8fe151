"""The `zero_optimization` block."""

# ruff: noqa: RUF009 - `key` makes a dataclass field

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from ds_lightning.config.schema.base import Block, key
from ds_lightning.config.schema.offload import OffloadOptimizerConfig, OffloadParamConfig

_STAGE_3 = frozenset({3})
_STAGE_1_2 = frozenset({1, 2})
_SHARDED = frozenset({1, 2, 3})
_HF_MOE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


def _cpu_device(switch: Any) -> Any:
    """The block meant by the old boolean switch `cpu_offload`."""
    if not isinstance(switch, bool):
        raise ValueError("expected true or false")
    return {"device": "cpu"} if switch else None


def _short(name: str) -> dict[str, None]:
    """The name without its `stage3_` prefix is accepted too."""
    return {name.removeprefix("stage3_"): None}


def _stage3(name: str, default: Any, doc: str, **rest: Any) -> Any:
    """A `stage3_*` key: acts at stage 3 only and is known without its prefix as well."""
    renamed = {**_short(name), **rest.pop("renamed", {})}
    return key(default, doc, stages=_STAGE_3, renamed=renamed, **rest)


@dataclass
class LeafModuleConfig(Block):
    """Modules gathered as one unit, whatever is inside."""

    classes: list[str] = key(lambda: list(_HF_MOE_BLOCKS), "Class names or full class paths.")
    names: list[str] = key(list, "Full module names.")
    name_suffixes: list[str] = key(list, "Ends of module names.")


@dataclass
class ZeroppLocoConfig(Block):
    """Error feedback for quantized gradients."""

    err_beta: float = key(0.8, "Decay of the carried error.", at_least=0, at_most=1)
    reset_T: int = key(1024, "Steps between resets of the error.", at_least=1)


@dataclass
class ZenFlowConfig(Block):
    """Important gradient columns step on the device, the rest later on the host."""

    topk_ratio: float = key(0.1, "Share of columns stepped on the device.", above=0, at_most=1)
    select_strategy: str = key("auto", "When the columns are chosen anew.", choices=("auto", "step", "epoch"))
    select_interval: int | str = key("auto", "Steps or epochs between choices.")
    update_interval: int | str = key("auto", "Steps between host updates.")
    overlap_step: bool = key(False, "Host updates overlap with compute.")
    offload: bool = key(False, "Selective states live on the host too.")
    auto_ratio: float = key(0.99, "Share of importance to keep for automatic intervals.", at_least=0, at_most=1)
    full_warm_up_rounds: int = key(0, "Rounds with full updates first.", at_least=0)
    steps_per_epoch: int | None = key(None, "Steps per epoch, for select_strategy=epoch.", at_least=1)
    pt_reserved_cores_perc: float = key(0.5, "Share of the cores left to the framework.", at_least=0, at_most=1)


@dataclass
class ZeroConfig(Block):
    """What is sharded and how it moves."""

    stage: int = key(0, "0 nothing, 1 optimizer, 2 + gradients, 3 + parameters.", at_least=0, at_most=3)
    contiguous_gradients: bool = key(True, "Gradients are gathered in one buffer as they appear.")
    reduce_scatter: bool = key(True, "Reduce to the owner only instead of to everybody.")
    reduce_bucket_size: int = key(500_000_000, "Elements per reduction.", at_least=1)
    use_multi_rank_bucket_allreduce: bool = key(
        True, "One reduction for all owners.", status="inert", remark="always so here"
    )
    allgather_partitions: bool = key(
        True,
        "All-gather instead of broadcasts.",
        status="inert",
        remark="always an all-gather here",
    )
    allgather_bucket_size: int = key(500_000_000, "Elements per all-gather.", at_least=1)
    overlap_comm: bool | None = key(None, "Communicate while computing; null means at stage 3.")
    load_from_fp32_weights: bool = key(True, "Resume from the fp32 master weights.")
    elastic_checkpoint: bool = key(
        False,
        "Resume at another world size.",
        status="inert",
        remark="every checkpoint can do that here",
    )
    sub_group_size: int = key(1_000_000_000, "Elements stepped at once.", at_least=1, stages=_STAGE_3)
    offload_optimizer: OffloadOptimizerConfig = key(
        OffloadOptimizerConfig,
        "Where optimizer states live.",
        stages=_SHARDED,
        renamed={"cpu_offload": _cpu_device},
    )
    offload_param: OffloadParamConfig = key(
        OffloadParamConfig, "Where parameters live.", renamed={"cpu_offload_param": _cpu_device}
    )
    cpu_offload_use_pin_memory: bool | None = key(
        None, "Deprecated.", status="ignored", remark="use pin_memory inside the offload block"
    )
    grad_hooks: bool | None = key(None, "Deprecated.", status="ignored", remark="gradient hooks are always used")
    stage3_prefetch_bucket_size: int = _stage3(
        "stage3_prefetch_bucket_size", 50_000_000, "Elements gathered ahead.", at_least=0
    )
    stage3_param_persistence_threshold: int = _stage3(
        "stage3_param_persistence_threshold",
        100_000,
        "Parameters up to this size stay gathered.",
        at_least=0,
    )
    stage3_model_persistence_threshold: int = _stage3(
        "stage3_model_persistence_threshold",
        sys.maxsize,
        "Most elements that stay gathered.",
        at_least=0,
    )
    stage3_max_live_parameters: int = _stage3(
        "stage3_max_live_parameters", 1_000_000_000, "Most elements gathered at a time.", at_least=0
    )
    stage3_max_reuse_distance: int = _stage3(
        "stage3_max_reuse_distance",
        1_000_000_000,
        "Keep what is used again within this many elements.",
        at_least=0,
    )
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False,
        "16-bit weights beside each checkpoint, at any stage; every checkpoint holds whole weights anyway.",
        renamed={
            "stage3_gather_fp16_weights_on_model_save": None,
            "gather_16bit_weights_on_model_save": None,
            "gather_fp16_weights_on_model_save": None,
        },
    )
    stage3_module_granularity_threshold: int = _stage3(
        "stage3_module_granularity_threshold",
        0,
        "Treat modules with little between gathers as leaves.",
        at_least=0,
        status="inert",
        remark="units are found from the model here",
    )
    stage3_use_all_reduce_for_fetch_params: bool = _stage3(
        "stage3_use_all_reduce_for_fetch_params",
        False,
        "Gather by all-reduce.",
        status="inert",
        remark="always an all-gather here",
    )
    stage3_allgather_sequential: bool = _stage3(
        "stage3_allgather_sequential",
        False,
        "Gather parameter by parameter.",
        status="inert",
        remark="units are gathered whole here",
    )
    ignore_unused_parameters: bool = key(True, "Parameters without a gradient are no error.")
    legacy_stage1: bool = key(False, "Removed.", status="ignored", remark="there is one stage 1 only")
    round_robin_gradients: bool = key(False, "Spread copies over ranks.", stages=_STAGE_1_2)
    zero_hpz_partition_size: int = key(
        1, "Consecutive ranks that keep what was gathered until weights change; 1 is off.", at_least=1, stages=_STAGE_3
    )
    zero_quantized_weights: bool = key(False, "Weights of sharded units travel as int8.", stages=_STAGE_3)
    zero_quantized_nontrainable_weights: bool = key(
        False, "Frozen weights of sharded units are kept, and travel, as int8.", stages=_STAGE_3
    )
    zero_quantized_gradients: bool = key(
        False, "Gradients of sharded units travel as int4, first inside nodes, then across.", stages=_STAGE_3
    )
    zeropp_loco_param: ZeroppLocoConfig | None = key(None, "Error feedback for quantized gradients.", stages=_STAGE_3)
    mics_shard_size: int = key(
        -1, "Ranks over which one copy of the model is cut; above 0 turns MiCS on.", at_least=-1, stages=_STAGE_3
    )
    mics_hierarchical_params_gather: bool = key(
        False, "Gather across nodes, then inside; also without MiCS.", stages=_STAGE_3
    )
    node_size: int | None = key(
        None,
        "Consecutive ranks that share a node; null asks the machines.",
        at_least=1,
        remark="ours, DeepSpeed does not know it",
    )
    memory_efficient_linear: bool = key(
        True,
        "Linear layers keep no gathered weight.",
        status="inert",
        remark="no layer keeps one here",
    )
    pipeline_loading_checkpoint: bool = key(
        False,
        "Load module by module.",
        status="inert",
        remark="loading always works module by module",
    )
    override_module_apply: bool = key(
        True,
        "Module.apply sees gathered values.",
        status="inert",
        remark="use ds_lightning.gathered",
    )
    log_trace_cache_warnings: bool = key(False, "Warn when the order of modules changes.", stages=_STAGE_3)
    enable_sanity_checks: bool = key(False, "Expensive assertions.", stages=_STAGE_3)
    save_muon_momentum_buffer_in_memory: bool = key(
        False,
        "Keep Muon's momentum in memory.",
        status="inert",
        remark="states live where offload says",
    )
    leaf_module: LeafModuleConfig = key(LeafModuleConfig, "Modules gathered as one unit.", stages=_STAGE_3)
    zenflow: ZenFlowConfig | None = key(None, "Important gradients first.")
