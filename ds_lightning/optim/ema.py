"""Exponential moving averages of the weights, sharded: each rank averages the elements that it owns.

Averages of the last iterates generalize better than the last iterate (Polyak and Juditsky 1992; Ruppert 1988). An
average is element-wise, so it is computed where the master values are, without communication, and takes 4/N bytes per
parameter on each of N ranks. The arithmetic is that of `torch.optim.swa_utils.get_ema_multi_avg_fn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ds_lightning.errors import CheckpointError
from ds_lightning.zero.logical import flat_range

if TYPE_CHECKING:
    from ds_lightning.layout.flat import Slot, Unit
    from ds_lightning.zero.buffers import UnitBuffers
    from ds_lightning.zero.engine import ZeroEngine


def warmed_up(decay: float, updates: int) -> float:
    """A decay that begins small, so that the first weights are soon forgotten: `min(decay, (1 + n) / (10 + n))`.

    The rule of `tf.train.ExponentialMovingAverage(num_updates=n)`.

    Args:
        decay: the final one.
        updates: n, updates made before this one.
    """
    return min(decay, (1 + updates) / (10 + updates))


class Averages:
    """Owns the averages of this rank's elements of one engine, and how often they were updated.

    One flat vector, `[chunk]`, for each unit that an optimizer trains. Frozen parameters are their own averages. The
    first update copies the weights, as `torch.optim.swa_utils.AveragedModel` does; before it there are none.

    Args:
        engine: whose parameters; it lets the averages follow when it lays units out anew.
        dtype: of the averages; None takes fp32, or fp64 where the master values are.

    Attributes:
        vectors: by unit index.
        updates: made so far, the copy counted.
    """

    def __init__(self, engine: ZeroEngine, dtype: torch.dtype | None = None) -> None:
        self.engine = engine
        self.vectors: dict[int, torch.Tensor] = {}
        self.updates = 0
        self._dtype = dtype
        engine.accompany(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the averages on this rank, alignment and padding of units included."""
        return sum(vector.nbytes for vector in self.vectors.values())

    # Update ---------------------------------------------------------------------------------------------------------

    def update(self, decay: float) -> None:
        """`average = decay * average + (1 - decay) * weight`, in a few large operations. Not collective."""
        self.updates += 1
        if self.updates == 1:
            self._copy()
            return
        averages, weights = [], []
        with torch.no_grad():
            for index, average in self.vectors.items():
                own = self.engine.units[index].owned_master()
                if own.dtype == average.dtype:
                    averages.append(average)
                    weights.append(own)
                else:  # 16-bit weights without masters: one unit at a time is cast
                    average.lerp_(own.to(average.dtype), 1.0 - decay)
            if averages:
                torch._foreach_lerp_(averages, weights, 1.0 - decay)

    def begin(self) -> None:
        """Begin anew with the weights as they are, as if the first update had just been made. Not collective."""
        self.updates = 1
        self._copy()

    def clear(self) -> None:
        """Begin anew with the next update. Not collective."""
        self.updates = 0
        self.vectors.clear()

    def _copy(self) -> None:
        self.vectors = {index: self._copy_of(buffers) for index, buffers in self._trained()}

    def _trained(self) -> Iterator[tuple[int, UnitBuffers]]:
        for index, buffers in sorted(self.engine.units.items()):
            if buffers.unit.trainable and any(slot.group >= 0 for slot in buffers.unit.slots):
                yield index, buffers

    def _copy_of(self, buffers: UnitBuffers) -> torch.Tensor:
        own = buffers.owned_master()
        with torch.no_grad(), torch.inference_mode(False):
            return own.detach().to(self._dtype_of(own), copy=True)

    def _dtype_of(self, weights: torch.Tensor) -> torch.dtype:
        return self._dtype or (weights.dtype if weights.dtype == torch.float64 else torch.float32)

    # Whole values ---------------------------------------------------------------------------------------------------

    def full_param(self, parameter: nn.Parameter) -> torch.Tensor:
        """The average of a parameter, in its logical shape and the averages' dtype. Collective.

        Returns:
            A new tensor on every rank; the weight itself where there is no average.
        """
        unit, place = self.engine.table.slot_of(self.engine.table.name_of(parameter))
        slot = unit.slots[place]
        vector = self.vectors.get(unit.index)
        if vector is None:
            full = self.engine.values.full_values(unit.index)
            full = full.to(self._dtype_of(full)) if full.is_floating_point() else full
        else:
            full = self.engine.values.spread(unit.index, vector, vector.dtype)
        return full[slot.start : slot.stop].view(slot.shape).clone()

    # Layout ---------------------------------------------------------------------------------------------------------

    def leave(self, units: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Full averages of units that are laid out anew. Collective."""
        found: dict[str, torch.Tensor] = {}
        for index in units:
            vector = self.vectors.pop(index, None)
            if vector is not None:
                full = self.engine.values.spread(index, vector, vector.dtype)
                found.update({slot.name: full[slot.start : slot.stop] for slot in self.engine.units[index].unit.slots})
        return found

    def enter(self, units: Sequence[int], values: Mapping[str, torch.Tensor]) -> None:
        """Averages of new units. A parameter that was frozen was its own average so far."""
        if not self.updates:
            return
        trained = dict(self._trained())
        for index in units:
            buffers = self.engine.units[index]
            if index in trained or any(slot.name in values for slot in buffers.unit.slots):
                self.vectors[index] = self._filled(buffers, values)

    def _filled(self, buffers: UnitBuffers, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's elements of full values, of the weights where there is no value."""
        vector = self._copy_of(buffers)
        first, last = buffers.owned
        with torch.no_grad():
            for slot in buffers.unit.slots:
                start, stop = max(slot.start, first), min(slot.stop, last)
                if slot.name in values and stop > start:
                    own = flat_range(values[slot.name], start - slot.start, stop - slot.start)
                    vector[start - first : stop - first].copy_(own)
        return vector

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def load(self, saved: Mapping[str, torch.Tensor], updates: int) -> list[str]:
        """Go on with saved averages; each rank reads what it owns. Not collective; all ranks load the same.

        Args:
            saved: averages by name, in logical shapes; logical tensors are read range by range.
            updates: made when they were saved.

        Returns:
            Names of parameters without a saved average, which begin with the weights.

        Raises:
            CheckpointError: when shapes do not fit, before anything is changed.
        """
        units = list(self._trained())
        values: dict[str, torch.Tensor] = {}
        for slot in _slots(unit.unit for _, unit in units):
            for name in (slot.name, *slot.aliases):
                if name in saved:
                    values[slot.name] = saved[name]
                    break
        problems = [
            f"{slot.name}: {tuple(values[slot.name].shape)} in the checkpoint, {tuple(slot.shape)} in the model"
            for slot in _slots(unit.unit for _, unit in units)
            if slot.name in values and values[slot.name].shape != slot.shape
        ]
        if problems:
            raise CheckpointError("The averages in the checkpoint do not fit:\n  " + "\n  ".join(problems[:20]))
        self.updates = updates
        self.vectors = {index: self._filled(buffers, values) for index, buffers in units}
        return [slot.name for slot in _slots(unit.unit for _, unit in units) if slot.name not in values]


def _slots(units: Iterator[Unit]) -> Iterator[Slot]:
    for unit in units:
        yield from unit.slots
