"""Every block and key of a ds_config as mutable dataclasses; the single table of what is known.

Types, defaults, ranges, old names and remarks live on the fields. Reading, validation, the report,
the Hydra store and
the resolved objects are all driven from them, so a new key is one new field.
"""

from ds_lightning.config.schema.activation import (
    ActivationCheckpointingConfig,
    SparseAttentionConfig,
)
from ds_lightning.config.schema.base import Block, Key
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
from ds_lightning.config.schema.offload import AioConfig, OffloadOptimizerConfig, OffloadParamConfig
from ds_lightning.config.schema.optimizer import OptimizerConfig, SchedulerConfig
from ds_lightning.config.schema.precision import (
    AmpConfig,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    TorchAutocastConfig,
)
from ds_lightning.config.schema.root import DeepSpeedConfig
from ds_lightning.config.schema.training import EigenvalueConfig, ProgressiveLayerDropConfig
from ds_lightning.config.schema.tuning import AutotuningConfig, ElasticityConfig
from ds_lightning.config.schema.zero import (
    LeafModuleConfig,
    ZenFlowConfig,
    ZeroConfig,
    ZeroppLocoConfig,
)

__all__ = [
    "ActivationCheckpointingConfig",
    "AioConfig",
    "AmpConfig",
    "AutotuningConfig",
    "Bf16Config",
    "Block",
    "CheckpointConfig",
    "CometConfig",
    "CommsLoggerConfig",
    "CsvMonitorConfig",
    "CurriculumLearningConfig",
    "DataEfficiencyConfig",
    "DataTypesConfig",
    "DeepSpeedConfig",
    "EigenvalueConfig",
    "ElasticityConfig",
    "FlopsProfilerConfig",
    "Fp16Config",
    "Key",
    "LeafModuleConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "ProgressiveLayerDropConfig",
    "SchedulerConfig",
    "SparseAttentionConfig",
    "TensorBoardConfig",
    "TimersConfig",
    "TorchAutocastConfig",
    "WandbConfig",
    "ZenFlowConfig",
    "ZeroConfig",
    "ZeroppLocoConfig",
]
