"""Choosing a configuration by itself: autotuning and elasticity."""

# ruff: noqa: RUF009 - `key` makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_lightning.config.schema.base import Block, key


@dataclass
class ModelInfoConfig(Block):
    """What is known about the model beforehand."""

    profile: bool = key(False, "Find out by a run.")
    num_params: int | None = key(None, "Parameters.", at_least=1)
    trainable_num_params: int | None = key(None, "Trainable parameters.", at_least=1)
    activation_mem_per_gpu: int | None = key(None, "Bytes of activations at micro-batch 1.", at_least=0)
    hidden_size: int | None = key(None, "Width.", at_least=1)
    num_layers: int | None = key(None, "Depth.", at_least=1)


@dataclass
class AutotuningConfig(Block):
    """Search for the fastest configuration."""

    enabled: bool = key(False, "Turn it on.")
    fast: bool = key(True, "Tune the micro-batch size only.")
    results_dir: str = key("autotuning_results", "Directory of results.")
    exps_dir: str = key("autotuning_exps", "Directory of experiments.")
    overwrite: bool = key(True, "Delete old results.")
    metric: str = key("throughput", "What is best.", choices=("throughput", "latency", "flops"))
    start_profile_step: int = key(3, "First measured step.", at_least=0)
    end_profile_step: int = key(5, "Last measured step.", at_least=0)
    tuner_type: str = key("gridsearch", "Search.", choices=("gridsearch", "random", "model_based"))
    tuner_early_stopping: int = key(5, "Trials without a new best.", at_least=0)
    tuner_num_trials: int = key(50, "Most trials.", at_least=1)
    max_train_batch_size: int | None = key(None, "Most samples per step.", at_least=1)
    min_train_batch_size: int = key(1, "Fewest samples per step.", at_least=1)
    max_train_micro_batch_size_per_gpu: int = key(1024, "Most samples per micro-batch.", at_least=1)
    min_train_micro_batch_size_per_gpu: int = key(1, "Fewest samples per micro-batch.", at_least=1)
    num_tuning_micro_batch_sizes: int = key(3, "Micro-batch sizes to try.", at_least=1)
    mp_size: int = key(1, "Model-parallel size.", at_least=1)
    arg_mappings: dict[str, Any] | None = key(None, "Key -> flag of the script.")
    metric_path: str | None = key(None, "Where the metric is written.")
    model_info: ModelInfoConfig = key(ModelInfoConfig, "What is known of the model.")
    model_info_path: str | None = key(None, "Where that is written.")


@dataclass
class ElasticityConfig(Block):
    """Batch sizes that fit many world sizes."""

    enabled: bool = key(False, "Turn it on.")
    max_train_batch_size: int = key(2000, "Most samples per step.", at_least=1)
    micro_batch_sizes: list[int] = key(lambda: [2, 4, 6], "Allowed micro-batch sizes.", at_least=1)
    min_gpus: int = key(1, "Fewest devices.", at_least=1)
    max_gpus: int = key(10_000, "Most devices.", at_least=1)
    min_time: int = key(0, "Minutes before scaling again.", at_least=0)
    version: float = key(0.2, "Rules to use.", choices=(), at_least=0.1, at_most=0.2)
    prefer_larger_batch: bool = key(True, "Larger rather than smaller.", renamed={"prefer_large_batch": None})
    ignore_non_elastic_batch_info: bool = key(False, "Override the batch-size keys.")
    num_gpus_per_node: int = key(1, "Devices per node.", at_least=1)
    model_parallel_size: int = key(1, "Model-parallel size.", at_least=1)
