"""The parameters in the runs of a sharded optimizer, and how their parts travel to one rank and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_lightning.comm.agreement import Agreement
from ds_lightning.comm.collectives import Collectives
from ds_lightning.optim.parts import Parts, Segment, Whole, Work
from ds_lightning.optim.routes import Routes, Shares, View
from ds_lightning.optim.sharded import Run, ShardedOptimizer


class RunParts(Parts):
    """Parts of the steps of one optimizer, as long as the same runs and parameters take part.

    Args:
        sharded: the optimizer, in a step.
        collectives: over all ranks, to bring parts together.
        agreement: to sum over ranks.
    """

    def __init__(self, sharded: ShardedOptimizer, collectives: Collectives, agreement: Agreement) -> None:
        self.device = collectives.topology.device
        self._collectives = collectives
        self._agreement = agreement
        self._key = _key(sharded)
        self._replicated = any(gradients.whole for gradients in sharded.units)
        self._shares: list[Shares] = []
        self._segments: dict[Tensor, list[Segment]] = {}
        self._routes: dict[tuple[int, ...], Routes] = {}
        self._find(sharded)
        self.parameters = [share.whole for share in self._shares]

    def fit(self, sharded: ShardedOptimizer) -> bool:
        """Whether they are those of the step that `sharded` is in."""
        tensors, present = _key(sharded)
        mine = self._key[0]
        return present == self._key[1] and len(tensors) == len(mine) and all(map(_same, tensors, mine))

    def _find(self, sharded: ShardedOptimizer) -> None:
        numbers: dict[tuple[int, int], int] = {}
        places = {
            id(parameter): (gradients, slot)
            for gradients in sharded.units
            for slot, parameter in enumerate(gradients.parameters)
        }
        for group, members in enumerate(sharded.user_params()):
            for parameter in members:
                found = places.get(id(parameter))
                if found is None or not (found[0].valid and found[0].present[found[1]]):
                    continue
                unit, place = found[0].unit, found[0].unit.slots[found[1]]
                numbers[unit.index, found[1]] = len(self._shares)
                spans = []
                for rank in range(unit.world_size):
                    start, stop = unit.owned(rank)
                    lo, hi = max(place.start, start), min(place.stop, stop)
                    spans.append((lo - place.start, max(0, hi - lo)))
                whole = Whole(group, place.shape, unit.master_dtype, place.name)
                self._shares.append(Shares(whole, spans, []))
        for run in sharded.near:
            self._segments[run.parameter] = self._segments_of(run, numbers)
        for share in self._shares:
            share.views.sort(key=lambda view: view.offset)

    def _segments_of(self, run: Run, numbers: Mapping[tuple[int, int], int]) -> list[Segment]:
        found = []
        unit = run.gradients.unit
        first, last = run.gradients.buffers.owned
        for slot in run.slots:
            start, stop = run.overlap(slot)
            if stop <= start:
                continue
            number, offset = numbers[unit.index, slot], start - unit.slots[slot].start
            segment = Segment(number, start - run.start, stop - run.start, offset, first <= start < last)
            found.append(segment)
            self._shares[number].views.append(View(run.parameter, segment.start, segment.stop, offset))
        return found

    def segments(self, tensor: Tensor) -> Sequence[Segment]:
        """See `Parts`."""
        return self._segments[tensor]

    def total(self, values: Tensor) -> Tensor:
        """See `Parts`."""
        self._agreement.total(values, "sums over whole parameters").wait()
        return values

    def on_wholes(
        self,
        values: Mapping[Tensor, Tensor],
        chosen: Sequence[int],
        costs: Sequence[float],
        dtype: torch.dtype,
        work: Work,
    ) -> None:
        """See `Parts`."""
        key = tuple(chosen)
        if key not in self._routes:
            self._routes[key] = Routes(self._shares, chosen, costs, self._replicated, self._collectives)
        self._routes[key].run(values, dtype, work)


class PartsOfSteps:
    """Owns the parts of each optimizer's last step: the next one mostly has the same.

    Args:
        collectives: over all ranks, to bring parts together.
        agreement: to sum over ranks.
    """

    def __init__(self, collectives: Collectives, agreement: Agreement) -> None:
        self._collectives = collectives
        self._agreement = agreement
        self._known: dict[int, RunParts] = {}  # by optimizer

    def of(self, sharded: ShardedOptimizer) -> RunParts | None:
        """The parts of the step that `sharded` is in; None where it does not look at whole parameters."""
        if not sharded.in_parts:
            return None
        known = self._known.get(sharded.first_group)
        if known is None or not known.fit(sharded):
            known = RunParts(sharded, self._collectives, self._agreement)
            self._known[sharded.first_group] = known
        return known

    def forget(self) -> None:
        """Units are laid out anew: nothing may keep the old ones' memory."""
        self._known.clear()


def _key(sharded: ShardedOptimizer) -> tuple[list[Tensor], list[tuple[bool, ...]]]:
    present = [tuple(each.present) if each.valid else () for each in sharded.units]
    return [run.parameter for run in sharded.near], present


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b
