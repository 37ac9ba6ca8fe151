"""Units, slots and shards: which element of which parameter lies where, and on which rank.

[Note: one layout for every stage] Stages 0-3 use the same units, slots and shards; a stage only decides which of the
three buffers (parameters, gradients, optimizer states) is kept whole. Sums over shards, such as the gradient norm,
are therefore the same at every stage, bit for bit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ds_lightning.layout.units import ROOT, ParamSpec

ALIGNMENT = 8
"""Elements to which slots and shards are aligned: 16 bytes in 16-bit dtypes, 32 in fp32, as vector kernels like it."""

RESIDENT_UNIT_NUMEL = 1 << 22
"""Small parameters are merged up to this many elements, so that their reduction still overlaps with backward."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in the flat buffer of its unit."""

    name: str
    aliases: tuple[str, ...]
    shape: torch.Size
    group: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """First element behind it."""
        return self.start + self.numel

    @property
    def end(self) -> int:
        """First element behind it and the zeros that align the next slot."""
        return _align(self.stop, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a unit whose slots belong to one parameter group: what an optimizer steps on as one tensor."""

    group: int
    start: int
    stop: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered, reduced and published together.

    Attributes:
        index: position in the layout, the same on all ranks.
        scope: module with which it is gathered.
        slots: its parameters, head to tail, aligned to `ALIGNMENT` elements.
        numel: elements of the flat buffer, padded to a multiple of the number of shards.
        world_size: number of shards: of ranks, except under MiCS.
        resident: kept whole at stage 3 (`stage3_param_persistence_threshold`).
        trainable: has gradients and optimizer states.
        given_dtype: dtype in which the user gave the parameters; that of the masters is narrower where they are frozen.
        travels: dtype in which gradients travel; None where that is `dtype`.
        row: elements of a row, where the unit is one embedding whose gradient is exchanged as rows, else 0. Shards hold
            whole rows then.
    """

    index: int
    scope: str
    slots: tuple[Slot, ...]
    numel: int
    world_size: int
    dtype: torch.dtype
    master_dtype: torch.dtype
    resident: bool
    trainable: bool
    given_dtype: torch.dtype
    travels: torch.dtype | None = None
    row: int = 0

    @property
    def saved_dtype(self) -> torch.dtype:
        """Dtype of the values in checkpoints, and in the module once it is plain again."""
        return torch.promote_types(self.given_dtype, self.master_dtype)

    @property
    def chunk(self) -> int:
        """Elements that each rank owns."""
        return self.numel // self.world_size

    @property
    def name(self) -> str:
        """For messages: its scope, what kind it is, and the parameters it begins and ends with."""
        kind = "resident" if self.resident else self.scope or "root"
        ends = self.slots[0].name if len(self.slots) == 1 else f"{self.slots[0].name} .. {self.slots[-1].name}"
        return f"{self.index}:{kind} ({ends})"

    def owned(self, rank: int) -> tuple[int, int]:
        """Range `[start, stop)` of the flat buffer that `rank` owns."""
        return rank * self.chunk, (rank + 1) * self.chunk

    def holes(self) -> list[tuple[int, int]]:
        """Ranges that belong to no parameter: alignment and padding. They hold zeros, always."""
        ends = [slot.stop for slot in self.slots]
        starts = [slot.start for slot in self.slots[1:]] + [self.numel]
        return [(a, b) for a, b in zip(ends, starts, strict=True) if b > a]

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The range `[start, stop)` cut at the borders of parameter groups; slots of no group are left out.

        A piece takes in the alignment behind its slots, so its length is a multiple of `ALIGNMENT` wherever `start` and
        `stop` are: vector kernels (torch's fused AdamW) round the elements of an odd tail in another way, and which
        elements are a tail must not depend on how the unit is cut.
        """
        pieces: list[Piece] = []
        for index, slot in enumerate(self.slots):
            lo, hi = max(slot.start, start), min(slot.end, stop)
            if min(slot.stop, stop) <= lo or slot.group < 0:
                continue
            if pieces and pieces[-1].group == slot.group:
                last = pieces[-1]
                pieces[-1] = Piece(slot.group, last.start, hi, (*last.slots, index))
            else:
                pieces.append(Piece(slot.group, lo, hi, (index,)))
        return pieces

    def block_borders(self, start: int, stop: int, size: int) -> list[int]:
        """Where the range `[start, stop)` is cut into segments for states that are encoded in blocks, from 0.

        A block never reaches into another slot or another rank's part, and within a slot blocks begin at multiples of
        `size` wherever these parts lie: the blocks of a range are the same at every stage, and few of them change with
        the world size. A segment is what one row of blocks of `size` elements covers, the last one cut short.
        """
        borders = {start, stop}
        first = bisect_right(self.slots, start, key=lambda slot: slot.start) - 1
        for slot in self.slots[max(first, 0) :]:
            if slot.start >= stop:
                break
            borders.add(max(slot.start, start))
            lo, hi = max(slot.start, start), min(slot.end, stop)
            for cut in (lo, *range(-(-(lo + 1) // self.chunk) * self.chunk, hi, self.chunk)):
                borders.add(cut)
                next_block = slot.start - (slot.start - cut) // size * size
                if next_block < hi:
                    borders.add(next_block)
        return sorted(border - start for border in borders)

    def block_cut(self, start: int, stop: int, size: int) -> int:
        """The last place in `(start, stop]` at which a block of some slot begins, else the first one behind `stop`."""
        slot = self.slots[max(bisect_right(self.slots, stop, key=lambda slot: slot.start) - 1, 0)]
        cut = slot.start + max(stop - slot.start, 0) // size * size
        return cut if cut > start else min(cut + size, slot.end)


@dataclass(frozen=True, slots=True)
class Layout:
    """All units of a model, in order; the same on every rank."""

    units: tuple[Unit, ...]
    world_size: int

    def slots(self) -> Iterator[tuple[Unit, Slot]]:
        """Every parameter with its unit."""
        for unit in self.units:
            for slot in unit.slots:
                yield unit, slot

    @property
    def numel(self) -> int:
        """Parameters of the model, padding not counted."""
        return sum(slot.numel for _, slot in self.slots())


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """The keys of `zero_optimization` that shape the layout; thresholds in elements.

    `alignment` is what a shard must be a multiple of.
    """

    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = 2**63 - 1
    round_robin: bool = False
    alignment: int = ALIGNMENT


def build_layout(
    specs: Sequence[ParamSpec], world_size: int, options: LayoutOptions | None = None, first: int = 0
) -> Layout:
    """Lay parameters into units.

    Args:
        specs: every parameter, in order of registration.
        world_size: number of shards.
        options: thresholds.
        first: index of the first unit.

    Within a unit: by optimizer group, then registration. Frozen and trainable parameters, different dtypes, and small
    ("resident") and large parameters never share a unit; small ones are merged across scopes.
    """
    options = options or LayoutOptions()
    buckets: dict[tuple[object, ...], list[ParamSpec]] = {}
    resident_numel = 0
    fill: dict[tuple[object, ...], tuple[int, int]] = {}
    for spec in specs:
        resident = (
            spec.numel <= options.param_persistence_threshold
            and resident_numel + spec.numel <= options.model_persistence_threshold
        )
        dtypes = (spec.dtype, spec.master_dtype, spec.given_dtype or spec.master_dtype, spec.travels)
        kind = (resident, spec.trainable and spec.active, spec.trainable, dtypes)
        if spec.row:
            resident_numel += spec.numel if resident else 0
            key: tuple[object, ...] = (*kind, ROOT if resident else spec.scope, spec.name)
        elif resident:
            resident_numel += spec.numel
            part, numel = fill.get(kind, (0, 0))
            if numel and numel + spec.numel > RESIDENT_UNIT_NUMEL:
                part, numel = part + 1, 0
            fill[kind] = (part, numel + spec.numel)
            key = (*kind, ROOT, part)
        else:
            key = (*kind, spec.scope, 0)
        buckets.setdefault(key, []).append(spec)

    def order(item: tuple[tuple[object, ...], list[ParamSpec]]) -> tuple[bool, bool]:
        resident, scope = bool(item[0][0]), item[0][4]
        return resident, not resident and scope == ROOT  # blocks, then the root, then the small ones

    ordered = sorted(buckets.items(), key=order)
    units = tuple(
        _lay(first + index, members, world_size, bool(key[0]), options) for index, (key, members) in enumerate(ordered)
    )
    return Layout(units, world_size)


def _lay(index: int, specs: list[ParamSpec], world_size: int, resident: bool, options: LayoutOptions) -> Unit:
    """Head to tail, group by group."""
    by_group: dict[int, list[ParamSpec]] = {}
    for spec in specs:
        by_group.setdefault(spec.group, []).append(spec)
    slots: list[Slot] = []
    end = 0
    for group in sorted(by_group):
        members = by_group[group]
        if options.round_robin:  # gradients that become ready one after the other then belong to different ranks
            members = [spec for rank in range(world_size) for spec in members[rank::world_size]]
        for spec in members:
            slots.append(Slot(spec.name, spec.aliases, spec.shape, spec.group, end, spec.numel))
            end = _align(end + spec.numel, ALIGNMENT)
    head = specs[0]
    multiple = world_size * math.lcm(options.alignment, head.row or 1)
    return Unit(
        index=index,
        scope=ROOT if resident else head.scope,
        slots=tuple(slots),
        numel=max(_align(end, multiple), multiple),
        world_size=world_size,
        dtype=head.dtype,
        master_dtype=head.master_dtype,
        resident=resident,
        trainable=head.trainable,
        given_dtype=head.given_dtype or head.master_dtype,
        travels=head.travels,
        row=head.row,
    )


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
