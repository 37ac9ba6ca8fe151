"""The gradients of one unit on one rank, from the hooks of its parameters to its reduced shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_lightning.zero.buffers import UnitBuffers
from ds_lightning.zero.plan import StagePlan


class UnitGradients:
    """The gradients of one unit on this rank, from the hooks of its parameters to its reduced shard.

    Attributes:
        dtype: in which gradients travel.
        kept: dtype in which they add up, over ranks and micro-batches, and wait for the step.
        grad: reduced gradient, `[chunk]`, or `[unit.numel]` at stage 0; None before the first, and where gradients
            live on disk.
        on_disk: the reduced gradient, where it lives on disk.
        valid: whether `grad` holds anything since it was last zeroed.
        present: per slot, whether any rank had a gradient since it was last zeroed.
        apart: whether `grad` is to be summed over copies of the model yet (MiCS, inside an accumulation window).
        whole: whether `grad` is the gradient of the whole unit.
        keeps_local: whether it is this rank's own, of the whole unit, and not an average.
    """

    def __init__(
        self,
        buffers: UnitBuffers,
        plan: StagePlan,
        dtype: torch.dtype | None = None,
        kept: torch.dtype | None = None,
        shows: bool = True,
    ) -> None:
        unit = buffers.unit
        self.buffers = buffers
        self.home = buffers.home
        self.unit = unit
        self.parameters = buffers.parameters
        self.dtype = dtype or unit.travels or unit.dtype
        # fp16 is for loss-scaled gradients: unscaled in it, small ones would be gone before the step widens them.
        loses = buffers.narrow and unit.master_dtype is torch.float16
        self.kept = kept or (torch.float32 if loses else unit.master_dtype)
        self._sharded = plan.shard_optimizer
        self.whole = not self._sharded
        # Stage 0 shows the averaged gradient in `p.grad`, as DDP does.
        self.exposes = shows and self.whole and unit.dtype == unit.master_dtype == self.kept
        self.all_pieces = unit.pieces(0, unit.numel)
        self.owned_pieces = unit.pieces(*buffers.owned)
        self.grad: torch.Tensor | None = None
        self._landing: torch.Tensor | None = None  # between `open` and `close`
        self.on_disk = self.home.gradient(self.owned_pieces) if self.home is not None else None
        if self.on_disk is not None:
            self.kept = self.on_disk.dtype
        self.valid = False
        self.apart = False
        self.present = [False] * len(unit.slots)
        self.arrived = bytearray(len(unit.slots))  # in this backward
        self.keeps_local = False  # see `keep`
        self.local: torch.Tensor | None = None  # sum of the micro-batches of a window that is not communicated
        self.ready = 0
        self.expected = 0
        self.complete = False
        self.launched = 0
        self.landed = 0
        templates: list[torch.Tensor] = []
        self._slots: list[tuple[int, int]] = []  # (slot, its place among the views)
        self._holes: list[int] = []
        holes = dict(unit.holes())
        for index, (slot, view) in enumerate(zip(unit.slots, buffers.views, strict=True)):
            if slot.numel:
                self._slots.append((index, len(templates)))
                templates.append(view.detach())
            if slot.stop in holes:  # once, where several slots without elements lie at the same place
                self._holes.append(len(templates))
                templates.append(torch.empty(holes.pop(slot.stop) - slot.stop))
        self._templates = templates

    def reset(self) -> None:
        """A backward is over."""
        self.ready = self.expected = self.launched = self.landed = 0
        self.complete = False
        self.arrived = bytearray(len(self.unit.slots))

    @property
    def away(self) -> bool:
        """Whether reduced gradients live in another memory than the device's."""
        return self.home is not None and self.home.away

    @property
    def complete_set(self) -> bool:
        """Whether every parameter of the unit has a gradient."""
        return self.valid and all(self.present)

    def pending(self) -> bool:
        """Whether there are gradients that have not been reduced."""
        return self.local is not None or any(parameter.grad is not None for parameter in self.parameters)

    def _views(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        views: Sequence[torch.Tensor] = torch._C._nn.unflatten_dense_tensors(flat, self._templates)
        return views

    def flatten(self, flat: torch.Tensor) -> None:
        """Move all gradients into `flat` (`[unit.numel]`, any dtype), zeros where there are none."""
        views = self._views(flat)
        targets, sources = [], []
        empty = [views[place] for place in self._holes]
        base = self.local
        self.local = None
        for index, place in self._slots:
            gradient = self.parameters[index].grad
            if gradient is None:
                if base is None:
                    empty.append(views[place])
                continue
            self.arrived[index] = 1
            targets.append(views[place])
            sources.append(gradient)
        if base is not None:
            if targets:
                torch._foreach_add_([self._views(base)[p] for i, p in self._slots if self.arrived[i]], sources)
            flat.copy_(base)
        else:
            if targets:
                torch._foreach_copy_(targets, sources)
            if empty:
                torch._foreach_zero_(empty)
        for index, slot in enumerate(self.unit.slots):
            if not slot.numel and self.parameters[index].grad is not None:
                self.arrived[index] = 1
        self._drop()

    def fold(self) -> None:
        """Add gradients of a micro-batch that is not communicated to their sum, where that has another dtype."""
        if self.unit.dtype == self.kept or not self.pending():
            return
        if self.local is None:
            self.local = torch.zeros(self.unit.numel, dtype=self.kept, device=self.buffers.full.device)
        views = self._views(self.local)
        targets, sources = [], []
        for index, place in self._slots:
            gradient = self.parameters[index].grad
            if gradient is not None:
                self.present[index] = True
                targets.append(views[place])
                sources.append(gradient)
        if targets:
            torch._foreach_add_(targets, sources)
        self._drop()

    def keep(self, local: bool) -> None:
        """Hold, from the next backward on, this rank's own whole gradient, or its part of the average.

        Nothing when there is a gradient already: the backwards of a step do alike.
        """
        if local == self.keeps_local or self.valid:
            return
        self.keeps_local = local
        whole = local or not self._sharded
        if whole != self.whole:
            self.whole = whole
            self.grad = None

    def take_local(self) -> None:
        """Make this rank's own gradient the unit's, or add it to that; see `keep`."""
        grad = self._all()
        # What is exposed comes in through `p.grad` again, with the first of what a backward brings.
        if not self.valid or (self.exposes and not self.landed):
            self.flatten(grad)
            return
        if self.local is not None:
            grad.add_(self.local)
            self.local = None
        views = self._views(grad)
        targets, sources = [], []
        for index, place in self._slots:
            gradient = self.parameters[index].grad
            if gradient is not None:
                targets.append(views[place])
                sources.append(gradient)
        if targets:
            torch._foreach_add_(targets, sources)
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.arrived[index] = 1
        self._drop()

    def _drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def open(self, accumulate: bool) -> torch.Tensor:
        """Where this rank's chunk of a reduced gradient is to be put, or added to what is there; then `close`."""
        home = self._landing = self.on_disk.open(accumulate) if self.on_disk is not None else self._own()
        if not self.away:
            return home
        # Reductions add on the device that computes; what lives on the host visits it.
        visiting = torch.empty_like(home, device=self.buffers.full.device)
        return visiting.copy_(home, non_blocking=True) if accumulate else visiting

    def close(self, values: torch.Tensor) -> None:
        """What `open` gave holds the gradient."""
        assert self._landing is not None
        home, self._landing = self._landing, None
        if self.away:
            home.copy_(values, non_blocking=self.on_disk is None)
        if self.on_disk is not None:
            self.on_disk.close(home)

    def _own(self) -> torch.Tensor:
        """This rank's chunk of the reduced gradient in memory."""
        start, stop = self.buffers.owned
        return self._all()[start:stop] if self.whole else self._all()

    def _all(self) -> torch.Tensor:
        """The reduced gradient in memory, which is allocated once."""
        if self.grad is None:
            numel = self.unit.numel if self.whole else self.unit.chunk
            if self.home is not None:
                self.grad = self.home.tensor(numel, self.kept)
            else:
                with torch.inference_mode(False):
                    self.grad = torch.empty(numel, dtype=self.kept, device=self.buffers.full.device)
        return self.grad

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Reduced gradient of elements `[start, stop)` of the unit that are on this rank, not to be changed."""
        if self.on_disk is not None:
            return self.on_disk.read(start, stop)
        assert self.grad is not None
        offset = 0 if self.whole else self.buffers.owned[0]
        return self.grad[start - offset : stop - offset]

    def expose(self) -> None:
        """Show the averaged gradient in `p.grad` (stage 0)."""
        assert self.grad is not None
        for slot, parameter, present in zip(self.unit.slots, self.parameters, self.present, strict=True):
            if present:
                parameter.grad = self.grad[slot.start : slot.stop].view(slot.shape)

    def zero(self, groups: range) -> None:
        """Forget the gradients of these parameter groups."""
        kept = [slot.group not in groups for slot in self.unit.slots]
        self.present = [present and keep for present, keep in zip(self.present, kept, strict=True)]
        if not any(kept):
            self.valid = self.apart = False
            self.local = None
            return
        if self.on_disk is not None and self.valid:
            self.on_disk.zero(groups)
        for slot, keep in zip(self.unit.slots, kept, strict=True):
            if keep:
                continue
            if self.local is not None:
                self.local[slot.start : slot.stop].zero_()
            if self.grad is not None and self.valid:
                offset = 0 if self.whole else self.buffers.owned[0]
                start, stop = max(slot.start - offset, 0), min(slot.stop - offset, self.grad.numel())
                if stop > start:
                    self.grad[start:stop].zero_()
