"""Owns the storage of units: flat parameters, the values this rank updates, and scratch memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ds_lightning.layout.flat import Unit
from ds_lightning.offload.homes import UnitHome
from ds_lightning.offload.stored import Values
from ds_lightning.offload.tiles import MASTER, SHARD
from ds_lightning.ops.memory import keep_freed_memory, return_freed_memory
from ds_lightning.zero.frozen import QuantizedChunk
from ds_lightning.zero.plan import StagePlan

ReadParameter = Callable[[nn.Parameter], torch.Tensor]


class ScratchPool:
    """Owns flat scratch buffers that are used again and again.

    On CPU, memory that is freed goes back to the kernel and faults in page by page when it is allocated again, which
    costs as much as a gather. On GPUs torch's caching allocator keeps it, and so does the C library if it can be told
    to (`ops.memory.keep_freed_memory`): then nothing is kept here, and what is free serves other purposes too.

    Args:
        device: where buffers are.
        lean: memory is scarce, so nothing that is free is kept anywhere.
    """

    def __init__(self, device: torch.device, lean: bool = False) -> None:
        self._device = device
        self._keeps = False
        if lean:
            return_freed_memory()
        elif device.type == "cpu":
            self._keeps = not keep_freed_memory()
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements with arbitrary content."""
        free = self._free[numel, dtype]
        if free:
            return free.pop()
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, tensor: torch.Tensor) -> None:
        """Hand back a tensor taken before; nobody may use it any more."""
        if self._keeps:
            self._free[tensor.numel(), tensor.dtype].append(tensor)

    def clear(self) -> None:
        """Drop everything that is not in use."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for later."""
        return sum(t.nbytes for free in self._free.values() for t in free)


class UnitBuffers:
    """Owns the parameters of one unit on this rank.

    Args:
        unit: the unit.
        parameters: of its slots, in order.
        plan: the stage.
        rank: this rank.
        home: where values live that are offloaded; None keeps everything on the device.
        packed: keep this rank's values as int8.

    Attributes:
        full: `[unit.numel]` in the compute dtype; the parameters are views of it. At stage 3 its storage is empty
            while the unit is released, but stays the same object: autograd saves views of weights, so a gather must
            land in the same storage.
        master: what this rank keeps and its optimizer updates: `[chunk]`, or `[unit.numel]` where the optimizer is not
            sharded. A view of `full` wherever device, dtype and stage allow; without elements where it is on disk, or
            packed.
        aliased: whether updating master values updates `full`.
        start: where the master values begin in the unit.
        stop: the element behind them.
        shard: this rank's chunk in the compute dtype, what a gather reads; None where it reads `master` or a disk.
        quantized: this rank's chunk as int8; None where it is not packed.
    """

    def __init__(
        self,
        unit: Unit,
        parameters: Sequence[nn.Parameter],
        plan: StagePlan,
        rank: int,
        home: UnitHome | None = None,
        packed: bool = False,
    ) -> None:
        self.unit = unit
        self.parameters = list(parameters)
        self.rank = rank
        self.home = home
        self.sharded = plan.shard_params and not unit.resident
        self.owned = unit.owned(rank)
        one_copy = unit.dtype == unit.master_dtype and not self.sharded  # `master` would cost nothing
        keeps_all = not plan.shard_optimizer or (not unit.trainable and one_copy)
        self.start, self.stop = (0, unit.numel) if keeps_all else self.owned
        self.full = torch.empty(0)
        self.master = torch.empty(0)
        self.shard: torch.Tensor | None = None
        self.quantized: QuantizedChunk | None = None
        self._packed = packed
        self.aliased = False
        self.views: list[torch.Tensor] = []
        self._aside: tuple[torch.Tensor, torch.Tensor] | None = None  # copies of master values and `full`

    def fill(self, read: ReadParameter, synchronize: Callable[[torch.Tensor], None], device: torch.device) -> None:
        """Take over the parameters' values and turn the parameters into views. Collective through `synchronize`.

        Args:
            read: gives the full value of a parameter.
            synchronize: makes a flat tensor equal on all ranks.
            device: where the unit computes.
        """
        unit = self.unit
        with torch.inference_mode(False), torch.no_grad():
            values = torch.zeros(unit.numel, dtype=unit.master_dtype, device=device)
            for slot, parameter in zip(unit.slots, self.parameters, strict=True):
                values[slot.start : slot.stop].view(slot.shape).copy_(read(parameter))
            synchronize(values)
            self.full = values if unit.dtype == unit.master_dtype else values.to(unit.dtype)
            self.views = [self.full[slot.start : slot.stop].view(slot.shape) for slot in unit.slots]
            own = values[self.start : self.stop]
            # A view costs nothing, but would keep the whole unit alive where the unit is to be released.
            keeps_views = self.home is None or self.home.keeps_views
            self.aliased = self.full is values and not self.sharded and keeps_views
            if self._packed:
                self.quantized = QuantizedChunk(own, unit.master_dtype)
            elif self.home is None:
                self.master = own if self.aliased else own.clone()
            else:
                self.master = own if self.aliased else self.home.take_master(own)
                self.shard = self.home.take_shard(own) if self.sharded else None
            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.data = view

    # Master values ----------------------------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        """Master values on this rank."""
        return self.stop - self.start

    @property
    def narrow(self) -> bool:
        """Whether master values have fewer bits than the user gave; see [Note: masters of 16 bits]."""
        return self.unit.trainable and self.unit.master_dtype != self.unit.saved_dtype

    @property
    def keeps_all(self) -> bool:
        """Whether this rank has master values for the whole unit."""
        return self.numel == self.unit.numel

    @property
    def on_disk(self) -> bool:
        """Whether master values are on disk."""
        return self.home is not None and self.home.master_on_disk

    def stored_master(self) -> Values:
        """Master values of `[start, stop)`, where they are: a view, or what reads them."""
        if self.on_disk:
            assert self.home is not None
            return self.home.stored(MASTER)
        return self.master if self.quantized is None else self.quantized.read()

    def read_master(self) -> torch.Tensor:
        """Master values of `[start, stop)`, not to be changed: a view, or a copy of what is on disk."""
        values = self.stored_master()
        return values if isinstance(values, torch.Tensor) else values.read()

    def write_master(self, start: int, values: torch.Tensor) -> None:
        """Change master values from element `start` of the unit on; gathers see them."""
        first = start - self.start
        last = first + values.numel()
        if self.on_disk:
            assert self.home is not None
            self.home.write(MASTER, first, values)
        elif self.quantized is not None:
            self.quantized.write(first, values)
        else:
            self.master[first:last].copy_(values.view_as(self.master[first:last]))
        if self.shard is not None:
            self.shard[first:last].copy_(values)
        elif self.home is not None and self.home.shard_on_disk:
            self.home.write(SHARD, first, values)

    def owned_values(self) -> Values:
        """The values that training goes on from, of the elements that this rank owns, `[chunk]`: as `stored_master`."""
        values = self.stored_master() if self._aside is None else self._aside[0]
        return values[self.owned[0] - self.start : self.owned[1] - self.start]

    def owned_master(self) -> torch.Tensor:
        """As `owned_values`, read if they are on disk."""
        values = self.owned_values()
        return values if isinstance(values, torch.Tensor) else values.read()

    # Full values ------------------------------------------------------------------------------------------------------

    def own_chunk(self) -> torch.Tensor:
        """This rank's chunk of `full`."""
        return self.full[self.owned[0] : self.owned[1]]

    def place_own(self) -> None:
        """Copy this rank's values into its chunk of `full`, which must have its memory: what a gather sends."""
        if self.shard is not None:
            self.own_chunk().copy_(self.shard, non_blocking=True)
        elif self.home is not None and (self.home.shard_on_disk or self.on_disk):
            self.home.load_shard(self.own_chunk())
        elif self.quantized is not None:
            self.quantized.copy_to(self.own_chunk())
        else:
            self.own_chunk().copy_(self.master, non_blocking=True)

    def refresh(self) -> None:
        """Copy this rank's master values into `full`, which must have its memory."""
        if not self.aliased:
            self.full[self.start : self.stop].copy_(self.read_master())

    def published(self, start: int, stop: int) -> torch.Tensor | None:
        """Where new master values of elements `[start, stop)` of the unit must be copied to in memory; None: nowhere.

        Not what `home` itself writes to disk.
        """
        if self.sharded:
            return None if self.shard is None else self.shard[start - self.start : stop - self.start]
        return None if self.aliased else self.full[start:stop]

    # Other values for a while -----------------------------------------------------------------------------------------

    def set_aside(self) -> None:
        """Keep a copy of the values, so that others can be shown; `put_back` then needs no communication."""
        with torch.no_grad(), torch.inference_mode(False):
            master = self.read_master()
            if self.sharded:
                self._aside = master if self.on_disk else master.clone(), self.full
                return
            full = self.full.clone()
            if self.aliased:
                master = full[self.start : self.stop]
            elif not self.on_disk:
                master = master.clone()
            self._aside = master, full

    def put_back(self) -> None:
        """Undo `set_aside`, bit for bit; nothing if nothing is aside.

        A gathered `full` at stage 3 still shows the other values; whoever gathered it releases it or gathers it again.
        """
        if self._aside is None:
            return
        (master, full), self._aside = self._aside, None
        with torch.no_grad():
            if not self.sharded:
                self.full.copy_(full)
                torch.autograd.graph.increment_version(self.parameters)
            if not self.aliased:
                self.write_master(self.start, master)

    # Memory -----------------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Give `full` its memory back, with arbitrary content."""
        self.full.untyped_storage().resize_(self.unit.numel * self.full.element_size())

    def free(self) -> None:
        """Return the memory of `full`, keeping the storage object."""
        self.full.untyped_storage().resize_(0)

    @property
    def state_nbytes(self) -> int:
        """Bytes held in memory between steps, on the device or the host."""
        held = 0 if self.sharded else self.full.nbytes
        held += 0 if self.shard is None else self.shard.nbytes
        held += 0 if self.quantized is None else self.quantized.nbytes
        return held + (0 if self.aliased else self.master.nbytes)

    def dissolve(self, values: torch.Tensor) -> None:
        """Give the parameters memory of their own again, with `values` (`[unit.numel]`)."""
        with torch.inference_mode(False), torch.no_grad():
            for slot, parameter in zip(self.unit.slots, self.parameters, strict=True):
                parameter.data = values[slot.start : slot.stop].view(slot.shape).clone()
