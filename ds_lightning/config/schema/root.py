"""The whole ds_config."""

# ruff: noqa: RUF009 - `key` makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_lightning.config.schema.activation import (
    ActivationCheckpointingConfig,
    SparseAttentionConfig,
)
from ds_lightning.config.schema.base import Block, ignored, key
from ds_lightning.config.schema.checkpoint import CheckpointConfig
from ds_lightning.config.schema.data import CurriculumLearningConfig, DataEfficiencyConfig
from ds_lightning.config.schema.monitor import (
    CometConfig,
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    TimersConfig,
    WandbConfig,
)
from ds_lightning.config.schema.offload import AioConfig
from ds_lightning.config.schema.optimizer import OptimizerConfig, SchedulerConfig
from ds_lightning.config.schema.precision import (
    DTYPES,
    AmpConfig,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    TorchAutocastConfig,
)
from ds_lightning.config.schema.training import EigenvalueConfig, ProgressiveLayerDropConfig
from ds_lightning.config.schema.tuning import AutotuningConfig, ElasticityConfig
from ds_lightning.config.schema.zero import ZeroConfig

_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass
class DeepSpeedConfig(Block):
    """Every top-level key; defaults are those of the run without a configuration."""

    train_batch_size: int | None = key(None, "Samples per optimizer step over all ranks.", at_least=1)
    train_micro_batch_size_per_gpu: int | None = key(None, "Samples per rank and backward.", at_least=1)
    gradient_accumulation_steps: int | None = key(None, "Backwards per optimizer step.", at_least=1)
    managed_gradient_accumulation: bool = key(True, "The engine, not the caller, owns the boundary.")
    steps_per_print: int | None = key(None, "Optimizer steps between progress lines; null is never.", at_least=1)
    wall_clock_breakdown: bool = key(
        False,
        "Time per phase.",
        status="inert",
        remark="use Lightning's profilers (Trainer(profiler='simple'))",
    )
    memory_breakdown: bool = key(
        False, "Memory per phase.", status="inert", remark="use Lightning's DeviceStatsMonitor"
    )
    dump_state: bool = key(False, "Print the resolved configuration once.")
    log_level: str | None = key(None, "Level of this package's logger.", choices=_LEVELS)
    disable_allgather: bool = key(False, "Unused by the reference too.", status="inert", remark="never had an effect")
    communication_data_type: str | None = key(
        None, "Type of gradients on the wire; null follows the training type.", choices=DTYPES
    )
    seq_parallel_communication_data_type: str = key(
        "fp32",
        "The same in sequence-parallel groups.",
        choices=DTYPES,
        status="inert",
        remark="no such groups here",
    )
    prescale_gradients: bool = key(False, "Divide before the reduction.")
    gradient_predivide_factor: float = key(1.0, "Divide by this before, multiply after.", above=0)
    gradient_allreduce_op: str = key("mean", "How gradients of ranks combine.", choices=("mean", "sum"))
    sparse_gradients: bool = key(False, "Exchange embedding gradients as rows.")
    gradient_clipping: float | None = key(None, "Largest global norm; 0 is off, absent is the Trainer's.", at_least=0)
    zero_allow_untested_optimizer: bool = key(False, "Shard the states of any optimizer.")
    zero_force_ds_cpu_optimizer: bool = key(
        True,
        "Offload needs a host optimizer.",
        status="inert",
        remark="any element-wise optimizer steps on the host",
    )
    optimizer: OptimizerConfig = key(OptimizerConfig, "The optimizer.")
    scheduler: SchedulerConfig = key(SchedulerConfig, "The schedule.")
    fp16: Fp16Config = key(Fp16Config, "16-bit floats.")
    bf16: Bf16Config = key(Bf16Config, "bfloat16.", renamed={"bfloat16": None})
    amp: AmpConfig = key(AmpConfig, "The levels of NVIDIA apex.")
    torch_autocast: TorchAutocastConfig = key(TorchAutocastConfig, "Native autocast.")
    data_types: DataTypesConfig = key(DataTypesConfig, "Types of what is stored.")
    zero_optimization: ZeroConfig = key(ZeroConfig, "Sharding.")
    allgather_size: int | None = key(
        None,
        "Old companion of `zero_optimization: true`.",
        at_least=1,
        status="inert",
        remark="use zero_optimization.allgather_bucket_size",
    )
    aio: AioConfig = key(AioConfig, "How files of NVMe offload are read and written.")
    activation_checkpointing: ActivationCheckpointingConfig = key(ActivationCheckpointingConfig, "Recomputation.")
    sparse_attention: SparseAttentionConfig | None = key(None, "Block-sparse attention; present is on.")
    flops_profiler: FlopsProfilerConfig = key(FlopsProfilerConfig, "Operations per module.")
    autotuning: AutotuningConfig = key(AutotuningConfig, "Search.")
    data_efficiency: DataEfficiencyConfig = key(DataEfficiencyConfig, "Sampling and routing.")
    curriculum_learning: CurriculumLearningConfig = key(CurriculumLearningConfig, "Curriculum, legacy form.")
    elasticity: ElasticityConfig = key(ElasticityConfig, "Batch sizes for many world sizes.")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "Checkpoints.")
    timers: TimersConfig = key(TimersConfig, "Timers.")
    tensorboard: TensorBoardConfig = key(TensorBoardConfig, "TensorBoard.")
    csv_monitor: CsvMonitorConfig = key(CsvMonitorConfig, "CSV files.")
    wandb: WandbConfig = key(WandbConfig, "Weights & Biases.")
    comet: CometConfig = key(CometConfig, "Comet.")
    comms_logger: CommsLoggerConfig = key(CommsLoggerConfig, "Times of collectives.")
    progressive_layer_drop: ProgressiveLayerDropConfig = key(ProgressiveLayerDropConfig, "Drop layers.")
    eigenvalue: EigenvalueConfig = key(EigenvalueConfig, "Hessian eigenvalues.")
    dataloader_drop_last: bool = key(
        False, "Drop a short last batch.", status="inert", remark="set drop_last on your DataLoader"
    )
    vocabulary_size: int | None = key(None, "Rows of the vocabulary.", at_least=1, status="inert", remark="a hint only")
    graph_harvesting: bool = key(False, "Step in a CUDA graph.", status="inert", remark="one fused step here")
    sequence_parallel_size: int = key(1, "Ranks sharing a sequence.", at_least=1)
    data_parallel_size: int | None = key(
        None, "Ranks with different data.", at_least=1, status="inert", remark="known from the run"
    )
    use_data_before_expert_parallelism: bool = key(
        False, "Order of expert groups.", status="ignored", remark="no expert parallelism here"
    )
    compression_training: dict[str, Any] = ignored("Compression of models.")
    weight_quantization: dict[str, Any] = ignored("Quantized training.")
    hybrid_engine: dict[str, Any] = ignored("Generation while training.")
    compile: dict[str, Any] = ignored("Compilation.")
    tensor_parallel: dict[str, Any] = ignored("Tensor parallelism.")
    expert_parallel: dict[str, Any] = ignored("Expert parallelism.")
    pipeline: dict[str, Any] = ignored("Pipeline parallelism.")
    nebula: dict[str, Any] = ignored("Azure checkpoints.")
    data_states: dict[str, Any] = ignored("Asynchronous checkpoints.")
