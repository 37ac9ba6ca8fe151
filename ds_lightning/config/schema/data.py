"""Data efficiency: curriculum learning, dynamic batching, random-LTD."""

# ruff: noqa: RUF009 - `key` makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass

from ds_lightning.config.schema.base import Block, key

_SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")


@dataclass
class ScheduleConfig(Block):
    """How difficulty grows."""

    total_curriculum_step: int | None = key(None, "Steps until the maximum.", at_least=1)
    difficulty_step: int | None = key(None, "Difficulty is a multiple of this.", at_least=1)
    root_degree: float | None = key(None, "Root of the growth.", above=0)
    difficulty: list[int] | None = key(None, "Discrete difficulties.")
    max_step: list[int] | None = key(None, "Last step of each difficulty but the last.")


@dataclass
class CurriculumLearningConfig(Block):
    """The legacy form: one curriculum over the sequence length."""

    enabled: bool = key(False, "Turn it on.")
    curriculum_type: str = key("seqlen", "What grows.", choices=("seqlen",))
    min_difficulty: int | None = key(None, "Difficulty at the start.", at_least=1)
    max_difficulty: int | None = key(None, "Difficulty at the end.", at_least=1)
    schedule_type: str | None = key(None, "How it grows.", choices=_SCHEDULES)
    schedule_config: ScheduleConfig = key(ScheduleConfig, "Numbers of the schedule.")


@dataclass
class CurriculumMetricConfig(Block):
    """One metric of the sampler."""

    index_to_sample_path: str | None = key(None, "File of the analyzer.")
    index_to_metric_path: str | None = key(None, "File of the analyzer.")
    difficulty_type: str = key("value", "Units of difficulty.", choices=("value", "percentile"))
    clustering_type: str = key(
        "schedule_based", "How samples are grouped.", choices=("schedule_based", "single_cluster")
    )
    min_difficulty: int | None = key(None, "Difficulty at the start.", at_least=0)
    max_difficulty: int | None = key(None, "Difficulty at the end.", at_least=0)
    schedule_type: str | None = key(None, "How it grows.", choices=_SCHEDULES)
    schedule_config: ScheduleConfig = key(ScheduleConfig, "Numbers of the schedule.")


@dataclass
class SamplerCurriculumConfig(Block):
    """Curriculum learning in the data sampler."""

    enabled: bool = key(False, "Turn it on.")
    data_cluster_path: str | None = key(None, "Directory for clusters.")
    curriculum_metrics: dict[str, CurriculumMetricConfig] = key(dict, "Metrics by name.")


@dataclass
class DynamicBatchingConfig(Block):
    """Batches of equal length sums."""

    enabled: bool = key(False, "Turn it on.")
    lr_scaling_method: str = key("linear", "Learning rate by batch size.", choices=("linear", "sqrt", "none"))
    min_batch_size: int = key(1, "Fewest samples.", at_least=1)
    max_batch_size: int | None = key(None, "Most samples.", at_least=1)
    sequence_picking_order: str = key("dataloader", "Order.", choices=("dataloader", "random", "seqlen"))
    max_tokens: int | None = key(None, "Most tokens per micro-batch.", at_least=1)
    metrics_path: str | None = key(None, "Lengths from the analyzer.")


@dataclass
class DataSamplingConfig(Block):
    """What the sampler does."""

    enabled: bool = key(False, "Turn it on.")
    num_epochs: int = key(1000, "Epochs.", at_least=1)
    num_workers: int = key(0, "Loader workers.", at_least=0)
    pin_memory: bool = key(False, "Page-locked batches.")
    curriculum_learning: SamplerCurriculumConfig = key(SamplerCurriculumConfig, "Curriculum.")
    dynamic_batching: DynamicBatchingConfig = key(DynamicBatchingConfig, "Batches by length.")


@dataclass
class LtdScheduleStepsConfig(Block):
    """Numbers of the random-LTD schedule."""

    require_steps: int | None = key(None, "Steps until the maximum.", at_least=1)
    seq_per_step: int | None = key(None, "Length is a multiple of this.", at_least=1)


@dataclass
class LtdScheduleConfig(Block):
    """How many tokens are kept."""

    min_value: int | None = key(None, "Tokens at the start.", at_least=1)
    max_value: int | None = key(None, "Tokens at the end.", at_least=1)
    schedule_type: str = key("fixed_linear", "How it grows.", choices=("fixed_linear",))
    schedule_config: LtdScheduleStepsConfig = key(LtdScheduleStepsConfig, "Numbers of the schedule.")


@dataclass
class LtdLrScheduleConfig(Block):
    """Learning rate by tokens consumed (never implemented by the reference)."""

    enabled: bool = key(False, "Turn it on.")
    total_layer_tokens: int | None = key(None, "Tokens over all layers.", at_least=1)
    warmup_layer_tokens: int | None = key(None, "Tokens of the warm-up.", at_least=0)


@dataclass
class RandomLtdConfig(Block):
    """Random layer-wise token dropping."""

    enabled: bool = key(False, "Turn it on.")
    total_layer_num: int | None = key(None, "Layers of the model.", at_least=1)
    random_ltd_layer_num: int | None = key(None, "Layers that drop tokens.", at_least=0)
    random_ltd_layer_id: list[int] = key(list, "Those layers.", at_least=0)
    model_mask_name: str | None = key(None, "Forward argument with the attention mask.")
    model_type: str = key("decoder", "Kind of mask.", choices=("decoder", "encoder"))
    hidden_state_order: str = key("batch_seq_dim", "Axes.", choices=("batch_seq_dim", "seq_batch_dim"))
    random_ltd_schedule: LtdScheduleConfig = key(LtdScheduleConfig, "How many tokens stay.")
    global_batch_size: int | None = key(None, "Samples per step.", status="inert", remark="known from the run")
    layer_token_lr_schedule: LtdLrScheduleConfig = key(LtdLrScheduleConfig, "Learning rate by tokens.")


@dataclass
class DataRoutingConfig(Block):
    """What happens to tokens inside the model."""

    enabled: bool = key(False, "Turn it on.")
    random_ltd: RandomLtdConfig = key(RandomLtdConfig, "Token dropping.")


@dataclass
class DataEfficiencyConfig(Block):
    """Sampling and routing."""

    enabled: bool = key(False, "Turn it on.")
    seed: int = key(1234, "Seed of the sampler.", at_least=0)
    data_sampling: DataSamplingConfig = key(DataSamplingConfig, "The sampler.")
    data_routing: DataRoutingConfig = key(DataRoutingConfig, "The model.")
