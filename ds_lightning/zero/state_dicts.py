"""`state_dict` and `load_state_dict` of sharded modules: full values out, shards in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_lightning.comm.agreement import Agreement
from ds_lightning.zero.buffers import UnitBuffers
from ds_lightning.zero.logical import flat_range
from ds_lightning.zero.residency import Residency, ResidencyManager
from ds_lightning.zero.table import ParameterTable
from ds_lightning.zero.values import FullValues


class StateDicts:
    """Owns what `state_dict` and `load_state_dict` of the module see of its parameters at the moment.

    Args:
        units: buffers by unit index, shared with the engine.
        table: names and places.
        values: full values.
        residency: where values are.
        agreement: for direct calls.
    """

    def __init__(
        self,
        units: Mapping[int, UnitBuffers],
        table: ParameterTable,
        values: FullValues,
        residency: ResidencyManager,
        agreement: Agreement,
    ) -> None:
        self._units = units
        self._table = table
        self._values = values
        self._residency = residency
        self._agreement = agreement
        self._depth = 0
        self._collected: Mapping[str, torch.Tensor] | None = None
        self._loading = False

    def answers(self, func: Callable[..., Any]) -> bool:
        """Whether this touch of a released parameter is part of loading or saving."""
        return self._loading or (self._depth > 0 and func is torch.Tensor.detach)

    def answer(self, index: int, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Load into a unit's shard, or stand in for values that are filled in later."""
        if self._loading and func is torch.Tensor.copy_:
            return self._load_parameter(index, args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            if self._residency.state(index) is Residency.FULL:
                return func(*args, **kwargs)
            return torch.zeros((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """`load_state_dict` inside writes every rank's shard, without communication; all ranks load the same values."""
        for entry in self._residency.units.values():
            for parameter in entry.buffers.parameters:
                parameter.__class__ = entry.released
        self._loading = True
        try:
            yield
        finally:
            self._loading = False
            for entry in self._residency.units.values():
                if entry.state is Residency.FULL:
                    for parameter in entry.buffers.parameters:
                        parameter.__class__ = nn.Parameter

    def _load_parameter(self, index: int, parameter: nn.Parameter, source: torch.Tensor) -> nn.Parameter:
        buffers = self._units[index]
        unit = buffers.unit
        slot = unit.slots[self._table.slot_of(self._table.name_of(parameter))[1]]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._residency.state(index) is Residency.FULL:
                buffers.full[slot.start : slot.stop].copy_(flat_range(source, 0, slot.numel))
                torch.autograd.graph.increment_version(parameter)
            start, stop = max(slot.start, buffers.start), min(slot.stop, buffers.stop)
            if stop > start and not buffers.aliased:  # else these are the values that have just been copied
                buffers.write_master(start, flat_range(source, start - slot.start, stop - slot.start))
        self._values.forget(index)
        return parameter

    def before_state_dict(self) -> None:
        """Some module's `state_dict` begins."""
        direct = not self._depth and self._collected is None
        if direct and any(not b.keeps_all and not self._is_current(i) for i, b in self._units.items()):
            self._agreement.rendezvous(
                "state_dict() of a sharded module", "Call it on every rank, or save with trainer.save_checkpoint."
            )
        self._depth += 1

    def _is_current(self, index: int) -> bool:
        """Whether a unit's parameters show its master values, or what `gathered` promises instead."""
        entry = self._residency.units[index]
        return self._units[index].aliased or (entry.pins > 0 and entry.exact)

    def after_state_dict(self, module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
        """Some module's `state_dict` is filled: put full master values where only shards, or 16-bit values, are."""
        self._depth -= 1
        for local, parameter in module._parameters.items():
            if parameter is None or prefix + local not in destination or parameter not in self._table:
                continue
            name = self._table.name_of(parameter)
            if self._collected is not None:
                if name in self._collected:
                    destination[prefix + local] = self._collected[name]
                continue
            unit, place = self._table.slot_of(name)
            if not self._is_current(unit.index):
                slot = unit.slots[place]
                full = self._values.full_values(unit.index)
                value = full[slot.start : slot.stop].view(slot.shape)
                destination[prefix + local] = value.to(unit.saved_dtype, copy=True)
            elif unit.saved_dtype != unit.dtype and not self._residency.units[unit.index].pins:
                destination[prefix + local] = destination[prefix + local].to(unit.saved_dtype)

    @contextmanager
    def collected(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """`state_dict` inside shows these values, by canonical name, and does not communicate."""
        self._collected = values
        try:
            yield
        finally:
            self._collected = None
