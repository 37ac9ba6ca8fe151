"""Which unit lives where: pure decisions from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ds_lightning.config import ResolvedConfig
from ds_lightning.layout.flat import Unit

SMALLEST_SWAP = 1 << 20
"""Bytes of master values below which a unit is not worth a file: it lives in host memory."""


class Home(Enum):
    """Where values live between uses; the names are those of `device` in the offload blocks."""

    DEVICE = "none"
    HOST = "cpu"
    DISK = "nvme"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of one unit live on every rank.

    Attributes:
        master: master values, gradient shard and optimizer states.
        shard: what gathers read at stage 3. Where it has the dtype of the master values and these are in memory, or
            can be read just as well, there is no second copy.
    """

    master: Home = Home.DEVICE
    shard: Home = Home.DEVICE


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """The offload blocks of a configuration.

    Attributes:
        optimizer: where master values, gradients and optimizer states of trainable units live.
        param: where the shards of parameters live at stage 3; it decides for frozen units alone.
        optimizer_path: folder for swap files of `optimizer`.
        param_path: folder for swap files of `param`.
        buffer_count: staging buffers of a step, each for one state of `tile` elements.
        pipeline_read: read the next tile while one steps.
        pipeline_write: write the last tile while one steps.
        speculative: begin steps in host memory while backward goes on, on `buffer_count` units.
        cores: share of the threads for these.
        fast_init: at set-up go on to the next unit while the values of the last one are written.
        ratio: share of the units whose optimizer is offloaded, the last ones of the layout.
        param_buffer_count: staging buffers for parameters that are read ahead.
        param_buffer_size: elements of such a buffer.
        max_in_cpu: elements of parameter shards that stay in host memory although `param` says disk.
        pin_optimizer: page-locked host memory for `optimizer`.
        pin_param: page-locked host memory for `param`.
        smallest: bytes of master values from which a unit goes to disk.
        aio: arguments of `ops.aio.AsyncIO`.
    """

    optimizer: Home = Home.DEVICE
    param: Home = Home.DEVICE
    optimizer_path: Path | None = None
    param_path: Path | None = None
    buffer_count: int = 4
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    speculative: bool = False
    cores: float = 0.8
    ratio: float = 1.0
    param_buffer_count: int = 5
    param_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_optimizer: bool = True
    pin_param: bool = True
    smallest: int = SMALLEST_SWAP
    aio: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, resolved: ResolvedConfig) -> OffloadPolicy | None:
        """What a configuration asks for; None when nothing is offloaded."""
        zero = resolved.zero_optimization
        optimizer, param, aio = zero.offload_optimizer, zero.offload_param, resolved.aio
        policy = cls(
            optimizer=Home(optimizer.device),
            param=Home(param.device),
            optimizer_path=Path(optimizer.nvme_path).expanduser() if optimizer.nvme_path else None,
            param_path=Path(param.nvme_path).expanduser() if param.nvme_path else None,
            buffer_count=int(optimizer.buffer_count),
            pipeline_read=bool(optimizer.pipeline_read),
            pipeline_write=bool(optimizer.pipeline_write),
            fast_init=bool(optimizer.fast_init),
            speculative=bool(optimizer.super_offload),
            cores=float(optimizer.cpuadam_cores_perc),
            ratio=float(optimizer.ratio),
            param_buffer_count=int(param.buffer_count),
            param_buffer_size=int(param.buffer_size),
            max_in_cpu=int(param.max_in_cpu),
            pin_optimizer=bool(optimizer.pin_memory),
            pin_param=bool(param.pin_memory),
            smallest=max(SMALLEST_SWAP, int(aio.block_size)),
            aio={
                "block_size": int(aio.block_size),
                "queue_depth": int(aio.queue_depth),
                "single_submit": bool(aio.single_submit),
                "overlap_events": bool(aio.overlap_events),
                "intra_op_parallelism": int(aio.intra_op_parallelism),
            },
        )
        return policy if policy.is_on else None

    @property
    def is_on(self) -> bool:
        """Whether anything is offloaded."""
        return self.optimizer is not Home.DEVICE or self.param is not Home.DEVICE

    @property
    def uses_disk(self) -> bool:
        """Whether anything may go to disk."""
        return Home.DISK in (self.optimizer, self.param)

    @property
    def slots(self) -> int:
        """Tiles that are in memory at the same time during a step."""
        return 1 + self.pipeline_read + self.pipeline_write

    @property
    def read_ahead(self) -> int:
        """Elements of shards that fit into the buffers for parameters."""
        return self.param_buffer_count * self.param_buffer_size

    def place(self, units: tuple[Unit, ...], sharded: bool) -> dict[int, Placement]:
        """Where each unit lives, by index; the same on all ranks.

        Args:
            units: in the order of the layout.
            sharded: whether the stage shards parameters.
        """
        trained = [unit for unit in units if unit.trainable]
        first = int(round((1.0 - self.ratio) * len(trained), 6))  # not one less because of a rounding error
        offloaded = {unit.index for unit in trained[first:]} if self.optimizer is not Home.DEVICE else set()
        room = self.max_in_cpu
        places = {}
        for unit in units:
            shard = self.param if sharded and not unit.resident else Home.DEVICE
            if shard is Home.DISK:
                room -= unit.chunk
                if room >= 0:
                    shard = Home.HOST
            master = self.optimizer if unit.index in offloaded else Home.DEVICE if unit.trainable else shard
            places[unit.index] = Placement(self._worthwhile(master, unit), self._worthwhile(shard, unit))
        return places

    def _worthwhile(self, home: Home, unit: Unit) -> Home:
        small = unit.chunk * unit.master_dtype.itemsize < self.smallest
        return Home.HOST if home is Home.DISK and small else home
