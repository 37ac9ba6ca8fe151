"""Full values from shards: parameters, optimizer states, and what users change in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_lightning.comm.agreement import Agreement
from ds_lightning.comm.collectives import Collectives
from ds_lightning.errors import ConfigError, ReleasedParameterError
from ds_lightning.offload.stored import present
from ds_lightning.optim.sharded import ShardedOptimizer
from ds_lightning.optim.unit_states import element_keys, merged, outline, pieces_of
from ds_lightning.zero.buffers import UnitBuffers
from ds_lightning.zero.passes import Passes
from ds_lightning.zero.plan import StagePlan
from ds_lightning.zero.reduce import GradientReducer
from ds_lightning.zero.residency import TAGS, ResidencyManager
from ds_lightning.zero.table import ParameterTable

VALUES_TAG = 3


class FullValues:
    """Puts full values together and takes changed ones apart. Owns which versions of parameters were seen.

    Args:
        units: buffers by unit index, shared with the engine.
        table: names and places.
        passes: what is under way.
        residency: gathers and releases.
        reducer: knows the trainable units.
        collectives: how to communicate.
        agreement: small agreements.
        plan: the stage.
    """

    def __init__(
        self,
        units: Mapping[int, UnitBuffers],
        table: ParameterTable,
        passes: Passes,
        residency: ResidencyManager,
        reducer: GradientReducer,
        collectives: Collectives,
        agreement: Agreement,
        plan: StagePlan,
    ) -> None:
        self._units = units
        self._table = table
        self._passes = passes
        self._residency = residency
        self._reducer = reducer
        self._collectives = collectives
        self._agreement = agreement
        self._topology = agreement.topology
        self._plan = plan
        self._versions: dict[int, tuple[int, ...]] = {}
        self._shown: list[int] = []

    def full_values(self, index: int) -> torch.Tensor:
        """Master values of a whole unit, `[unit.numel]`. Collective."""
        buffers = self._units[index]
        if buffers.keeps_all:
            return buffers.read_master().to(self._topology.device)
        if buffers.aliased:
            return buffers.full
        return self.spread(index, buffers.read_master(), buffers.unit.master_dtype)

    def spread(self, index: int, own: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Put every rank's chunk of a unit-sized tensor together, zeros where a rank has none. Collective."""
        buffers = self._units[index]
        self._passes.meet()
        with torch.no_grad(), torch.inference_mode(False):
            full = torch.zeros(buffers.unit.numel, dtype=dtype, device=self._topology.device)
            if own is not None:
                full[buffers.owned[0] : buffers.owned[1]].copy_(own)
            tag, name = index * TAGS + VALUES_TAG, buffers.unit.name
            self._collectives.all_gather(full, name, tag, full.numel()).wait()
        return full

    def full_unit_state(self, sharded: ShardedOptimizer, index: int) -> dict[str, dict[str, Any]]:
        """Optimizer state of a unit's parameters in logical shapes, by name and key. Collective."""
        gradients = self._reducer.units[index]
        unit = gradients.unit
        mine = sharded.unit_state(gradients)
        known = merged(self._agreement.everyone(outline(mine)))
        whole: dict[str, torch.Tensor] = {}
        buffers = self._units[index]
        for key, dtype in element_keys(known):
            local = torch.zeros(unit.numel, dtype=dtype, device=self._topology.device)
            for start, values in pieces_of(mine, key, dtype):
                local[start : start + values.numel()].copy_(present(values))
            if self._plan.shard_optimizer:
                own = local[buffers.owned[0] : buffers.owned[1]]
                local = self.spread(index, own, dtype)
            whole[key] = local
        result: dict[str, dict[str, Any]] = {}
        template = next(iter(known.values()), {})
        for slot in unit.slots:
            entry = known.get(slot.name)
            if entry is None and not slot.numel and slot.group in sharded.groups:
                entry = template  # a parameter without elements lies on no rank
            if entry:
                result[slot.name] = {
                    key: whole[key][slot.start : slot.stop].view(slot.shape) if kind == "elements" else value
                    for key, (kind, value) in entry.items()
                }
        return result

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
        """Full values inside. Collective on entry, and on exit with `modifier_rank`; see `ds_lightning.gathered`."""
        units = sorted({self._table.unit_of(parameter).index for parameter in parameters})
        inside = self._passes.depth > 0 or self._passes.evaluating
        for index in units:
            self._residency.prefetch(index, exact=not inside)
        for index in units:
            self._residency.gather(index, exact=not inside)
        if modifier_rank is not None and any(not self._residency.units[index].exact for index in units):
            raise ConfigError(
                "ds_lightning.gathered(modifier_rank=...) inside a step shows the quantized weights that compute "
                "(zero_quantized_weights), from which no weights can be set. Change weights between steps."
            )
        for index in units:
            self._residency.units[index].pins += 1
        versions = [parameter._version for parameter in parameters]
        try:
            yield
            changed = [p for p, version in zip(parameters, versions, strict=True) if p._version != version]
            if modifier_rank is not None:
                self._keep_changes(parameters, units, modifier_rank)
            elif changed or any(self._rewritten(index) for index in units):
                raise ReleasedParameterError(
                    f"{', '.join(self._table.name_of(p) for p in changed[:5]) or 'Values'} changed inside "
                    "ds_lightning.gathered(...). Changes are kept only with modifier_rank: the values of that rank are "
                    "then sent to all others."
                )
        finally:
            for index in units:
                entry = self._residency.units[index]
                entry.pins -= 1
                if not self._passes.depth and not self._passes.evaluating:
                    self._residency.release(index)

    def _rewritten(self, index: int) -> bool:
        """Whether this rank's part of a sharded unit was changed past autograd's eyes, through `.data`."""
        buffers = self._units[index]
        if not buffers.sharded or not self._residency.units[index].exact:
            return False
        own = buffers.own_chunk()
        same = buffers.read_master().to(device=own.device, dtype=own.dtype)
        return not torch.allclose(own, same, rtol=0, atol=0, equal_nan=True)

    def _keep_changes(self, parameters: Sequence[nn.Parameter], units: Sequence[int], modifier_rank: int) -> None:
        with torch.no_grad():
            for parameter in parameters:
                self._collectives.broadcast(parameter.detach(), self._table.name_of(parameter), modifier_rank)
            for index in units:
                self.absorb_unit(index)
            self._residency.outdate(units)

    # Other values for a while ----------------------------------------------------------------------------------------

    @property
    def showing(self) -> bool:
        """Whether the module has other values than those that are trained."""
        return bool(self._shown)

    def show(self, vectors: Mapping[int, torch.Tensor]) -> None:
        """Give the module other values until `hide`: averages, for an evaluation. Collective.

        What is trained is kept aside meanwhile: this rank's elements, and `full` where the stage keeps it whole.
        Checkpoints hold what is trained.

        Args:
            vectors: by unit index, this rank's elements, `[chunk]` in any floating dtype.

        Raises:
            ConfigError: inside a step, inside `gathered`, or when others are shown already.
        """
        pinned = any(self._residency.units[index].pins for index in vectors)
        if self._passes.depth or pinned or self._shown:
            raise ConfigError(
                "Other values cannot be put into a module inside a step, inside ds_lightning.gathered(...), or while "
                "others are there already. Do it between steps, around everything else."
            )
        self._passes.meet()
        self.absorb()
        if not self._passes.evaluating:
            self._residency.release_all()
        self._shown = sorted(vectors)
        with torch.no_grad():
            for index in self._shown:
                buffers, own = self._units[index], vectors[index]
                buffers.set_aside()
                if buffers.numel == buffers.unit.numel > buffers.unit.chunk:  # every rank keeps all of it
                    own = self.spread(index, own, own.dtype)
                buffers.write_master(buffers.start, own)
        self._residency.republish(self._shown)
        self.written(self._shown)

    def hide(self, together: bool = True) -> None:
        """Undo `show`, bit for bit; nothing where nothing is shown. Collective while an evaluation is under way.

        Args:
            together: all ranks do it. Otherwise nothing communicates, and what is gathered is released.
        """
        shown, self._shown = self._shown, []
        if not shown:
            return
        together = together and not self._passes.failed
        if together:
            self._passes.meet()
        for index in shown:
            self._units[index].put_back()
        if not together:
            self._residency.release_present()
        elif self._passes.evaluating:  # who comes next in this evaluation sees what is trained
            self._residency.republish([index for index in shown if self._units[index].sharded])
        else:
            self._residency.release_all()
        self.written(shown)

    # What users write -----------------------------------------------------------------------------------------------

    def absorb(self) -> None:
        """Take over what users wrote into 16-bit parameters that are not sharded (weight averaging, constraints)."""
        for index, buffers in self._units.items():
            if buffers.sharded or buffers.aliased or not buffers.unit.trainable:
                continue
            versions = versions_of(buffers)
            if versions != self._versions.get(index, versions):
                self.absorb_unit(index)
            self._versions[index] = versions

    def absorb_unit(self, index: int) -> None:
        """Master values follow `full` where the two differ by more than rounding."""
        buffers = self._units[index]
        with torch.no_grad():
            if buffers.aliased:
                return
            current = buffers.full[buffers.start : buffers.stop]
            master = buffers.read_master()
            if current.dtype == master.dtype:
                buffers.write_master(buffers.start, current)
                return
            current = current.to(master.device)
            changed = current.ne(master.to(current.dtype))
            buffers.write_master(buffers.start, torch.where(changed, current.to(master.dtype), master))

    def written(self, units: Iterable[int]) -> None:
        """The engine itself has written these units: that is no news to `absorb`."""
        units = list(units)
        self._residency.outdate(units)
        for index in units:
            if index in self._versions:
                self._versions[index] = versions_of(self._units[index])

    def forget(self, index: int) -> None:
        """Whatever was seen of a unit is out of date, and its master values are right."""
        self._versions.pop(index, None)
        self._residency.outdate((index,))


def versions_of(buffers: UnitBuffers) -> tuple[int, ...]:
    """Version counters of a unit's parameters: they grow when someone writes in place."""
    return tuple(parameter._version for parameter in buffers.parameters)
