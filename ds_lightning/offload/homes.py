"""Where the values of units live, and how they come from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ds_lightning.layout.flat import Piece, Unit
from ds_lightning.offload.gradients import SwappedGradient
from ds_lightning.offload.host import HostMemory
from ds_lightning.offload.policy import Home, OffloadPolicy, Placement
from ds_lightning.offload.stored import Stored
from ds_lightning.offload.swap import SwapSpace, UnitSwap
from ds_lightning.offload.tiles import GRADIENT, MASTER, SHARD, TileLayout, choose_tile
from ds_lightning.ops.aio import Transfer

States = Callable[[Unit], Mapping[str, torch.dtype]]
"""The optimizer states of a unit that have one value per element, with their dtypes."""


class UnitHome:
    """Where one unit's values live on this rank.

    Args:
        unit: the unit.
        placement: on which kind of memory.
        device: that computes.
        master_memory: host memory for master values, gradients and states.
        shard_memory: host memory for what gathers read.
        space: staging buffers; None without disks.
        swap: the unit's file; None if it has none.
        own_shard: where gathers read from a copy of their own; None where they read the master values or a disk.
        start: where this rank's chunk begins in the unit.
        fast_init: do not wait until the first values are written.
    """

    def __init__(
        self,
        unit: Unit,
        placement: Placement,
        device: torch.device,
        master_memory: HostMemory,
        shard_memory: HostMemory,
        space: SwapSpace | None,
        swap: UnitSwap | None,
        own_shard: Home | None,
        start: int,
        fast_init: bool,
    ) -> None:
        self.unit = unit
        self._start = start
        self._fast_init = fast_init
        self.placement = placement
        self.swap = swap
        self._device = device
        self._master_memory = master_memory
        self._shard_memory = shard_memory
        self._space = space
        self._own_shard = own_shard
        self._ahead: list[tuple[int, int, torch.Tensor, list[Transfer]]] = []  # parts of the shard being read

    @property
    def master_on_disk(self) -> bool:
        """Whether master values are in the unit's file."""
        return self.swap is not None and MASTER in self.swap.layout.regions

    @property
    def shard_on_disk(self) -> bool:
        """Whether the file has a copy for gathers in another dtype."""
        return self.swap is not None and self.swap.layout.shard is not None

    @property
    def steps_apart(self) -> bool:
        """Whether the optimizer steps on this unit by itself, where its states are."""
        return self.unit.trainable and self.placement.master is not Home.DEVICE

    @property
    def away(self) -> bool:
        """Whether master values, gradients and states are in another memory than the device's, when in memory."""
        return self.placement.master is not Home.DEVICE and self._master_memory.separate

    @property
    def keeps_views(self) -> bool:
        """Whether master values may be a view of the parameters."""
        return not self.master_on_disk and not self.away

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for master values, gradients or states, flat, with arbitrary content."""
        if self.away:
            return self._master_memory.empty(numel, dtype)
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self._device)

    def take_master(self, own: torch.Tensor) -> torch.Tensor:
        """Put master values where they live. Returns them, or a tensor without elements if that is a disk."""
        if self.master_on_disk:
            self._begin_write(MASTER, own)
            return own.new_empty(0)
        return self.tensor(own.numel(), own.dtype).copy_(own)

    def take_shard(self, own: torch.Tensor) -> torch.Tensor | None:
        """Put what gathers read where it lives. Returns it if it is a copy of its own in memory."""
        if self.shard_on_disk:
            self._begin_write(SHARD, own)
        if self._own_shard is None:
            return None
        if self._own_shard is Home.DEVICE:
            return own.to(device=self._device, dtype=self.unit.dtype, copy=True)
        return self._shard_memory.empty(own.numel(), self.unit.dtype).copy_(own)

    def gradient(self, pieces: Sequence[Piece]) -> SwappedGradient | None:
        """The unit's gradient, if that lives on disk.

        Args:
            pieces: the ranges of this rank's chunk that belong to one parameter group each.
        """
        if self.swap is None or GRADIENT not in self.swap.layout.regions:
            return None
        assert self._space is not None
        return SwappedGradient(self.swap, self._space.chunks, self._start, pieces)

    def _begin_write(self, key: str, own: torch.Tensor) -> None:
        """Write the first values of a region; with `fast_init` they are on their way when this returns."""
        assert self.swap is not None
        if not self._fast_init:
            self.write(key, 0, own)
            return
        assert self._space is not None
        dtype = self.swap.layout.dtype(key)
        buffer = self._space.chunks.take()
        values = buffer[: own.numel() * dtype.itemsize].view(dtype).copy_(own)
        self._space.chunks.give(buffer, self.swap.start_write(key, 0, values))

    # Disk -------------------------------------------------------------------------------------------------------------

    def stored(self, key: str) -> Stored:
        """A region of the file, read on demand."""
        assert self.swap is not None
        return self.swap.stored(key)

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Write elements of a region of the file, from element `start` of the chunk on."""
        assert self.swap is not None
        if key == self._gathered:
            self.forget_ahead()
        self.swap.write(key, start, values)

    @property
    def _gathered(self) -> str:
        return SHARD if self.shard_on_disk else MASTER

    def expect(self) -> None:
        """The shard will be gathered soon: begin to read it, as far as buffers are free."""
        if self._space is None or self.swap is None or self._own_shard is not None or self._ahead:
            return
        key, chunk = self._gathered, self.swap.layout.numel
        if key not in (SHARD, *self.swap.layout.regions):
            return
        dtype = self.swap.layout.dtype(key)
        start = 0
        while start < chunk and (buffer := self._space.shards.try_take()) is not None:
            stop = min(start + buffer.numel() // dtype.itemsize, chunk)
            values = buffer[: (stop - start) * dtype.itemsize].view(dtype)
            self._ahead.append((start, stop, buffer, self.swap.start_read(key, start, stop, values)))
            start = stop

    def load_shard(self, target: torch.Tensor) -> None:
        """Fill `target`, `[chunk]` in the compute dtype, with what is on disk."""
        assert self.swap is not None
        assert self._space is not None
        key, done = self._gathered, 0
        while self._ahead:
            start, stop, buffer, transfers = self._ahead.pop(0)
            try:
                for transfer in transfers:
                    transfer.wait()
                target[start:stop].copy_(buffer[: (stop - start) * target.itemsize].view(target.dtype))
            except BaseException:
                self._space.shards.lose()
                self.forget_ahead()
                raise
            self._space.shards.give(buffer)
            done = stop
        if done == target.numel():
            return
        if target.device.type == "cpu":
            for transfer in self.swap.start_read(key, done, target.numel(), target[done:]):
                transfer.wait()
        else:
            target[done:].copy_(self.swap.read(key, done, target.numel()))

    def forget_ahead(self) -> None:
        """Values change, or nobody comes for them: drop what was read ahead."""
        ahead, self._ahead = self._ahead, []
        for _, _, buffer, transfers in ahead:
            assert self._space is not None
            self._space.shards.give(buffer, transfers)

    def close(self) -> None:
        """The unit is gone."""
        self.forget_ahead()
        if self.swap is not None:
            assert self._space is not None
            self._space.remove(self.swap)
            self.swap = None


class Homes:
    """Owns where the units of one engine live, with all files and staging buffers.

    Args:
        policy: from the configuration.
        device: that computes.
        sharded: whether the stage shards parameters.
        tile: `sub_group_size`.
        rank: this rank.
    """

    def __init__(self, policy: OffloadPolicy, device: torch.device, sharded: bool, tile: int, rank: int) -> None:
        self.policy = policy
        self._rank = rank
        self._device = device
        self._sharded = sharded
        self._tile = tile
        self._master_memory = HostMemory(device, policy.pin_optimizer)
        self._shard_memory = HostMemory(device, policy.pin_param)
        self.space: SwapSpace | None = None
        self._homes: dict[int, UnitHome] = {}

    def admit(self, units: Sequence[Unit], states: States) -> dict[int, UnitHome]:
        """Homes for new units, by index; those that stay on the device have none.

        Raises:
            ConfigError: when a swap file cannot be made; nothing is left of the others then.
        """
        places = self.policy.place(tuple(units), self._sharded)
        layouts = self._layouts(units, places, states)
        if layouts and self.space is None:
            self.space = SwapSpace(self.policy.aio, self.policy.slots, self.policy.param_buffer_count)
        made: dict[int, UnitHome] = {}
        try:
            for unit in units:
                if places[unit.index] != Placement():
                    made[unit.index] = self._home(unit, places[unit.index], layouts.get(unit.index))
        except BaseException:
            for home in made.values():
                home.close()
            raise
        self._homes.update(made)
        self._fit()
        return made

    def _layouts(self, units: Sequence[Unit], places: Mapping[int, Placement], states: States) -> dict[int, TileLayout]:
        """What the files of units on disk hold."""
        on_disk = [unit for unit in units if places[unit.index].master is Home.DISK]
        largest = min(max((unit.chunk for unit in on_disk), default=0), self._tile)
        found = {}
        for unit in on_disk:
            regions: dict[str, torch.dtype] = {}
            sharded = self._sharded and not unit.resident
            if unit.trainable:
                regions[GRADIENT] = unit.master_dtype
            # Where `full` on the host holds the very same values, there is no second copy.
            if sharded or unit.dtype != unit.master_dtype or self._master_memory.separate:
                regions[MASTER] = unit.master_dtype
            if unit.trainable:
                regions.update(states(unit))
            copy = unit.dtype if places[unit.index].shard is Home.DISK and unit.dtype != unit.master_dtype else None
            tile = (
                choose_tile(unit.chunk, largest, regions, self.policy.buffer_count, self.policy.slots)
                if unit.trainable
                else unit.chunk
            )
            found[unit.index] = TileLayout(unit.chunk, tile, regions, copy)
        return found

    def _home(self, unit: Unit, place: Placement, layout: TileLayout | None) -> UnitHome:
        swap = None
        if layout is not None:
            assert self.space is not None
            folder = self.policy.optimizer_path if unit.trainable else self.policy.param_path
            swap = self.space.create(folder or Path(), unit.name, layout)
        return UnitHome(
            unit,
            place,
            self._device,
            self._master_memory if unit.trainable else self._shard_memory,
            self._shard_memory,
            self.space,
            swap,
            self._own_shard(unit, place),
            unit.owned(self._rank)[0],
            self.policy.fast_init,
        )

    def _own_shard(self, unit: Unit, place: Placement) -> Home | None:
        """Where gathers find a copy of their own; None where the master values serve, or a copy on disk."""
        if not self._sharded or unit.resident or not unit.trainable:
            return None
        if place.master is Home.DISK:
            return None if place.shard is Home.DISK else place.shard
        if place.master is Home.HOST and self._master_memory.separate:
            if place.shard is Home.DEVICE:
                return Home.DEVICE
            return None if unit.dtype == unit.master_dtype else Home.HOST
        return None

    def _fit(self) -> None:
        """Staging buffers as large as the units need them."""
        if self.space is None:
            return
        for home in self._homes.values():
            home.forget_ahead()
        layouts = [home.swap.layout for home in self._homes.values() if home.swap is not None]
        stepped = [layout for layout in layouts if GRADIENT in layout.regions]
        self.space.records.fit(max((layout.step_bytes for layout in stepped), default=0))
        whole = layouts if self.policy.fast_init else stepped
        self.space.chunks.fit(max((layout.chunk_bytes for layout in whole), default=0))
        largest = max((layout.numel for layout in layouts), default=0)
        itemsize = max((layout.dtype(key).itemsize for layout in layouts for key in _gathered(layout)), default=0)
        self.space.shards.fit(min(largest, self.policy.param_buffer_size) * itemsize)

    def drop(self, index: int) -> None:
        """A unit is gone."""
        home = self._homes.pop(index, None)
        if home is not None:
            home.close()

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return 0 if self.space is None else self.space.nbytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of staging buffers in memory."""
        return 0 if self.space is None else self.space.buffer_bytes

    def close(self) -> None:
        """Give everything back."""
        for index in list(self._homes):
            self.drop(index)
        if self.space is not None:
            self.space.close()
            self.space = None


def _gathered(layout: TileLayout) -> list[str]:
    return [SHARD] if layout.shard is not None else [MASTER] if MASTER in layout.regions else []
