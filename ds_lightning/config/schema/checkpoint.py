"""The `checkpoint` block."""

# ruff: noqa: RUF009 - `key` makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass

from ds_lightning.config.schema.base import Block, key

_FILES = "Lightning's ModelCheckpoint and ZeroStrategy(checkpoint=...) decide what is written"


@dataclass
class ParallelWriteConfig(Block):
    """Parallel writing."""

    pipeline_stage: bool = key(False, "Pipeline layers in parallel.", status="inert", remark=_FILES)


@dataclass
class WriterConfig(Block):
    """The file writer."""

    type: str | None = key(None, "Kind of writer.", choices=("FAST", "PYTHON", "MOCK"), status="inert", remark=_FILES)
    io_buffer_size: int = key(64 * 2**20, "Bytes.", at_least=1, status="inert", remark=_FILES)
    io_buffer_double: bool = key(True, "Two buffers.", status="inert", remark=_FILES)
    show_statistics: bool = key(False, "Print timings.", status="inert", remark=_FILES)
    data_parallel: str | None = key(
        None, "Who writes.", choices=("replica", "socket", "machine"), status="inert", remark=_FILES
    )
    decoupled: bool = key(False, "Write in the background.", status="inert", remark=_FILES)
    io_multiplier: int = key(1, "Writers per process.", at_least=1, status="inert", remark=_FILES)


@dataclass
class CheckpointConfig(Block):
    """How checkpoints are written and read."""

    tag_validation: str = key(
        "Warn",
        "Compare tags between ranks.",
        choices=("Ignore", "Warn", "Fail"),
        status="inert",
        remark=_FILES,
    )
    load_universal: bool = key(False, "Load converted universal checkpoints.")
    use_node_local_storage: bool = key(False, "Every node writes shared files.", status="inert", remark=_FILES)
    parallel_write: ParallelWriteConfig = key(ParallelWriteConfig, "Parallel writing.")
    writer: WriterConfig = key(WriterConfig, "The file writer.")
    checkpoint_serialization: bool = key(True, "Serialize with torch.save.", status="inert", remark=_FILES)
