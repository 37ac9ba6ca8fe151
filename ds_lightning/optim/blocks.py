"""Units as the 1-bit optimizers see them: flat states, and what a step reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ds_lightning.comm.compressed import CompressedMean, Portion
from ds_lightning.layout.flat import Unit
from ds_lightning.optim.unit_states import Elements, UnitState


class Extent(Enum):
    """Which elements of a unit a rank has a state of."""

    WHOLE = "whole"  # all of them
    UPDATED = "updated"  # those whose parameters it updates: all at stage 0, its chunk at stage 1
    OWNED = "owned"  # its chunk


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring parameters of one group, with the alignment between them: `[start, stop)` of the unit."""

    group: int
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Block:
    """The states of one unit on one rank; they are zeros until a step or a checkpoint changes them.

    Attributes:
        unit: the unit.
        first_group: number of the optimizer's first group among the groups of all optimizers.
        owned: this rank's chunk, `[start, stop)`.
        updated: the elements whose master values this rank updates.
        parameters: the user's, by slot.
        extents: of the states with one value per element, by name.
        per_parameter: first values of the states with one value per parameter, by name.
        elements: the states with one value per element that exist.
        numbers: the states with one value per parameter that exist, `[slots]`, on the device.
        known: by slot, whether it has been stepped on.
        master: master values of `updated`, in a step.
        gradient: its gradient in a step, from `gradient_start` on: of `updated`, or the whole unit's.
        present: slots that take part in a step.
        new: names of those that never did before.
    """

    unit: Unit
    first_group: int
    owned: tuple[int, int]
    updated: tuple[int, int]
    extents: Mapping[str, Extent]
    per_parameter: Mapping[str, float]
    device: torch.device
    parameters: Sequence[torch.Tensor] = ()
    elements: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    known: list[bool] = field(default_factory=list)
    master: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    gradient_start: int = 0
    present: tuple[int, ...] = ()
    new: tuple[str, ...] = ()
    _members: dict[Span, tuple[int, ...]] = field(default_factory=dict)
    _places: dict[Span, torch.Tensor] = field(default_factory=dict)
    _ranges: tuple[tuple[int, int], ...] = ()
    _spans: tuple[Span, ...] = ()
    _seen: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.known = [False] * len(self.unit.slots)

    @property
    def dtype(self) -> torch.dtype:
        """Of the states: fp32, or fp64 where parameters are."""
        return torch.float64 if self.unit.master_dtype == torch.float64 else torch.float32

    # Step -----------------------------------------------------------------------------------------------------------

    def begin(self, master: torch.Tensor, gradient: torch.Tensor, start: int, present: Sequence[int]) -> None:
        """A step begins.

        Args:
            master: values of `updated`, written in place.
            gradient: 1-D.
            start: its first element, in the unit.
            present: slots that have a gradient on any rank, ascending; slots without elements count for nothing.
        """
        self.master, self.gradient, self.gradient_start = master, gradient, start
        self.choose(present)
        slots = self.unit.slots
        self.new = tuple(slots[place].name for place in self.present if not self.known[place])
        for place in present:
            self.known[place] = True

    def choose(self, places: Sequence[int]) -> None:
        """Let spans and ranges be of these slots, in a step."""
        self.present = tuple(place for place in places if self.unit.slots[place].numel)
        if self.present != self._seen:
            self._seen = self.present
            self._ranges = tuple((self.unit.slots[p].start, self.unit.slots[p].stop) for p in self.present)
            self._spans = tuple(self._find_spans())
            self._members = {
                span: tuple(p for p in self.present if span.start <= self.unit.slots[p].start < span.stop)
                for span in self._spans
            }
            self._places.clear()

    def end(self) -> None:
        """The step is over: keep neither gradients nor parameters alive."""
        self.master = self.gradient = torch.empty(0)

    def _find_spans(self) -> Iterator[Span]:
        last: Span | None = None
        before = -2
        for place in self.present:
            slot = self.unit.slots[place]
            empty_between = all(not self.unit.slots[other].numel for other in range(before + 1, place))
            if last is not None and last.group == slot.group - self.first_group and empty_between:
                last = Span(last.group, last.start, slot.end)
            else:
                if last is not None:
                    yield last
                last = Span(slot.group - self.first_group, slot.start, slot.end)
            before = place
        if last is not None:
            yield last

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The elements of the parameters that take part, in the unit."""
        return self._ranges

    def spans(self, within: tuple[int, int] | None = None) -> list[Span]:
        """What takes part, in as few parts as there can be.

        Args:
            within: only these elements of the unit.
        """
        if within is None or within == (0, self.unit.numel):
            return list(self._spans)
        cut = [Span(s.group, max(s.start, within[0]), min(s.stop, within[1])) for s in self._spans]
        return [span for span in cut if span.stop > span.start]

    def members(self, span: Span) -> list[int]:
        """The slots of a span."""
        return list(self._members[span])

    def places(self, span: Span) -> torch.Tensor:
        """The slots of a span, as an index on the device."""
        if span not in self._places:
            self._places[span] = torch.tensor(self._members[span], device=self.device)
        return self._places[span]

    def members_of(self, span: Span, values: torch.Tensor) -> list[torch.Tensor]:
        """The values of each parameter of a span, views; without the alignment between them."""
        slots = [self.unit.slots[place] for place in self._members[span]]
        return [values[slot.start - span.start : slot.stop - span.start] for slot in slots]

    def state(self, name: str) -> torch.Tensor:
        """A state with one value per element, 1-D over its extent; zeros if it is new."""
        if name not in self.elements:
            start, stop = self.extent(name)
            with torch.inference_mode(False):
                self.elements[name] = torch.zeros(stop - start, dtype=self.dtype, device=self.device)
        return self.elements[name]

    def number(self, name: str) -> torch.Tensor:
        """A state with one value per parameter, `[slots]`."""
        if name not in self.numbers:
            with torch.inference_mode(False):
                values = torch.full((len(self.unit.slots),), self.per_parameter[name], dtype=self.dtype)
            self.numbers[name] = values.to(self.device)
        return self.numbers[name]

    def part(self, name: str, span: Span) -> torch.Tensor:
        """A span of a state, a view."""
        start = self.extent(name)[0]
        return self.state(name)[span.start - start : span.stop - start]

    def part_of_master(self, span: Span) -> torch.Tensor:
        """A span of the master values, a view."""
        return self.master[span.start - self.updated[0] : span.stop - self.updated[0]]

    def part_of_gradient(self, span: Span) -> torch.Tensor:
        """A span of the gradient, a view."""
        return self.gradient[span.start - self.gradient_start : span.stop - self.gradient_start]

    def extent(self, name: str) -> tuple[int, int]:
        """The elements of the unit of which this rank has a state."""
        kind = self.extents[name]
        if kind is Extent.WHOLE:
            return 0, self.unit.numel
        return self.updated if kind is Extent.UPDATED else self.owned

    # State ----------------------------------------------------------------------------------------------------------

    def saved(self) -> UnitState:
        """All states, by parameter name and key; the elements are views."""
        found: dict[str, dict[str, Any]] = {}
        numbers = {key: values.tolist() for key, values in self.numbers.items()}
        for place, slot in enumerate(self.unit.slots):
            if not self.known[place]:
                continue
            entry: dict[str, Any] = {}
            for key, values in self.elements.items():
                first, last = self.extent(key)
                start, stop = max(slot.start, first), min(slot.stop, last)
                pieces = [(start, values[start - first : stop - first])] if stop > start else []
                if pieces or not slot.numel:
                    entry[key] = Elements(values.dtype, list(pieces))
            entry.update({key: values[place] for key, values in numbers.items()})
            if entry:
                found[slot.name] = entry
        return found

    def load(
        self,
        states: Mapping[str, Mapping[str, Any]],
        read: Callable[[torch.Tensor, int, int], torch.Tensor],
    ) -> None:
        """Replace all states.

        Args:
            states: by parameter name, in logical shapes; what has no entry is new. Other keys are left out.
            read: gives row-major elements `[start, stop)` of such a tensor, 1-D.
        """
        for values in self.elements.values():
            values.zero_()
        self.numbers.clear()
        for place, slot in enumerate(self.unit.slots):
            entry = states.get(slot.name)
            self.known[place] = bool(entry)
            for key, value in (entry or {}).items():
                if key in self.extents and slot.numel:
                    first, last = self.extent(key)
                    start, stop = max(slot.start, first), min(slot.stop, last)
                    if stop > start:
                        source = read(value, start - slot.start, stop - slot.start)
                        self.state(key)[start - first : stop - first].copy_(source)
                elif key in self.per_parameter:
                    self.number(key)[place] = float(value)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(values.nbytes for values in (*self.elements.values(), *self.numbers.values()))


Average = Callable[[Sequence[torch.Tensor]], None]
"""Replaces tensors of whole units by their means over ranks."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step is about.

    Attributes:
        blocks: all of the optimizer's, with masters, and with gradients where any rank has one.
        mean: the compressed exchange.
        gather: completes a whole state of a block from the chunks that ranks own. Collective.
    """

    blocks: Sequence[Block]
    mean: CompressedMean
    gather: Callable[[Block, torch.Tensor], None]

    def means(self) -> Iterator[tuple[Block, torch.Tensor]]:
        """Average what has been added to the worker errors of the slots that take part. Collective.

        Yields:
            Each block that has such slots and its mean, `[unit.numel]`; the worker error holds what was not sent.
        """
        chosen = [block for block in self.blocks if block.present]
        portions = [Portion(b.state("worker_error"), b.state("server_error"), b.ranges) for b in chosen]
        for place, mean in self.mean(portions):
            yield chosen[place], mean
