"""Offload blocks and the asynchronous I/O they use."""

from __future__ import annotations

from dataclasses import dataclass

from ds_lightning.config.schema.base import Block, key

DEVICES = ("none", "cpu", "nvme")


@dataclass
class OffloadParamConfig(Block):
    """Where parameter shards live between uses (stage 3)."""

    device: str = key("none", "Where the shards live.", choices=DEVICES)
    nvme_path: str | None = key(None, "Directory on a fast local disk.")
    buffer_count: int = key(5, "Staging buffers for NVMe; with super_offload units that step early.", at_least=1)
    buffer_size: int = key(100_000_000, "Elements per staging buffer.", at_least=1)
    max_in_cpu: int = key(1_000_000_000, "Elements kept in host memory instead of on disk.", at_least=0)
    pin_memory: bool = key(True, "Page-locked host memory, for overlapped copies.")

    @property
    def is_on(self) -> bool:
        """Whether anything is offloaded."""
        return self.device != "none"


@dataclass
class OffloadOptimizerConfig(Block):
    """Where optimizer states live and step."""

    device: str = key("none", "Where the states live.", choices=DEVICES)
    nvme_path: str | None = key(None, "Directory on a fast local disk.")
    buffer_count: int = key(4, "Staging buffers for NVMe; with super_offload units that step early.", at_least=1)
    pin_memory: bool = key(True, "Page-locked host memory, for overlapped copies.")
    pipeline_read: bool = key(False, "Read the next tile while the current one steps.")
    pipeline_write: bool = key(False, "Write the previous tile while the current one steps.")
    fast_init: bool = key(False, "Set up the next unit while the values of the last one are written.")
    ratio: float = key(1.0, "Share of the states that steps on the host.", at_least=0, at_most=1)
    super_offload: bool = key(False, "Speculative host step (GH200 class machines).")
    cpuadam_cores_perc: float = key(0.8, "Share of the cores given to the speculative step.", above=0, at_most=1)

    @property
    def is_on(self) -> bool:
        """Whether anything is offloaded."""
        return self.device != "none"


@dataclass
class AioConfig(Block):
    """Asynchronous file I/O."""

    block_size: int = key(1_048_576, "Bytes per request.", at_least=1)
    queue_depth: int = key(8, "Requests in flight.", at_least=1)
    intra_op_parallelism: int = key(1, "Threads sharing one transfer.", at_least=1, renamed={"thread_count": None})
    single_submit: bool = key(False, "Submit requests one by one.")
    overlap_events: bool = key(True, "Submit and complete at the same time.")
    use_gds: bool = key(False, "GPUDirect Storage.")
