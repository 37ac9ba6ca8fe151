"""The mean over ranks of values that travel as one bit per element, with error feedback on both sides.

[Note: the compressed mean] Every rank adds what it could not send before (its worker error) to its values and sends
signs, and for each parameter one scale, the root mean square of the parameter's compensated elements: that keeps the
2-norm (1-bit Adam, arXiv:2102.02888, section 4). The rank that owns a chunk averages what arrives, adds its own
remainder (the server error) and sends the result to everyone in the same form, with a scale for the part of each
parameter in its chunk. So all units together cost one all-to-all and one all-gather a step, of a 32nd of the bytes of
an fp32 all-reduce each way plus the scales, and every rank decodes the same bytes: results are equal bit by bit.

A scale for each parameter, as DeepSpeed has, and not one for all: momenta of different layers differ by orders of
magnitude. Alignment and padding of the flat layout, and parameters that take no part, count in no scale, and stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ds_lightning.comm.collectives import Collectives
from ds_lightning.ops.signs import pack_signs, unpack_signs

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Portion:
    """What one unit brings to an exchange.

    Attributes:
        compensated: `[unit.numel]`, fp32 or fp64: the values plus the worker error; afterwards the new worker error.
        server_error: `[unit.chunk]` of this rank's chunk, same dtype; changed in place.
        ranges: the elements of each parameter that takes part, ascending, none of them empty.
    """

    compensated: torch.Tensor
    server_error: torch.Tensor
    ranges: tuple[Range, ...]


class CompressedMean:
    """Owns the layout of the messages, which changes only with the parameters that take part.

    Args:
        collectives: how to communicate; a single rank does not, but compresses as if it did, twice.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._plans: dict[torch.dtype, tuple[object, _Plan]] = {}

    def __call__(self, portions: Sequence[Portion]) -> Iterator[tuple[int, torch.Tensor]]:
        """Average portions over ranks. Collective: every rank brings the same parameters.

        The communication is over when the first result is there. Results come one at a time, so that no more than one
        of them needs memory.

        Args:
            portions: of units, in the same order on every rank.

        Yields:
            For each portion its index and the mean, `[unit.numel]`; zeros outside of its ranges.

        Raises:
            TopologyError: when another rank did not take part in time, or is gone.
        """
        for dtype in (torch.float32, torch.float64):  # a model with both has two exchanges
            places = [place for place, portion in enumerate(portions) if portion.compensated.dtype == dtype]
            if places:
                chosen = [portions[place] for place in places]
                yield from zip(places, self._exchange(chosen, self._plan(chosen, dtype)), strict=True)

    def message_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that this rank sends to each other rank in each half of the last exchange of this dtype; 0 before."""
        found = self._plans.get(dtype)
        return 0 if found is None else found[1].row

    def _plan(self, portions: Sequence[Portion], dtype: torch.dtype) -> _Plan:
        key = tuple((portion.compensated.numel(), portion.ranges) for portion in portions)
        found = self._plans.get(dtype)
        if found is None or found[0] != key:
            topology = self._collectives.topology
            device = portions[0].compensated.device
            found = self._plans[dtype] = (key, _Plan(key, topology.world_size, topology.rank, dtype, device))
        return found[1]

    def _exchange(self, portions: Sequence[Portion], plan: _Plan) -> Iterator[torch.Tensor]:
        world, rank = self._collectives.topology.world_size, self._collectives.topology.rank
        sent = plan.rows(world)
        _send(portions, plan, sent)
        received = sent
        if world > 1:
            received = plan.rows(world)
            self._collectives.all_to_all(sent, received, "compressed momenta", 0).wait()
        result = plan.rows(world)
        _serve(portions, plan, received, result[rank])
        if world > 1:
            self._collectives.all_gather(result.view(-1), "compressed means", 0, result.numel()).wait()
        scales = plan.scales(result).reshape(-1)
        for portion, part in zip(portions, plan.parts, strict=True):
            bits = plan.bits(result)[:, part.bytes[0] : part.bytes[1]].reshape(-1)
            yield _decode(torch.empty_like(portion.compensated), bits, part.cells, scales[part.cell_scales])


class _Cut:
    """A flat tensor cut into ranges and what lies between them."""

    def __init__(self, numel: int, ranges: Sequence[Range]) -> None:
        self.sizes: list[int] = []
        self._inside: list[int] = []
        self._outside: list[int] = []
        end = 0
        for start, stop in ranges:
            if start > end:
                self._outside.append(len(self.sizes))
                self.sizes.append(start - end)
            self._inside.append(len(self.sizes))
            self.sizes.append(stop - start)
            end = stop
        if numel > end:
            self._outside.append(len(self.sizes))
            self.sizes.append(numel - end)

    def __len__(self) -> int:
        return len(self._inside)

    def inside(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The ranges, as views."""
        views = flat.split_with_sizes(self.sizes)
        return [views[place] for place in self._inside]

    def scale_(self, flat: torch.Tensor, scales: torch.Tensor) -> None:
        """Multiply each range by its scale, and make the rest zero."""
        views = flat.split_with_sizes(self.sizes)
        if self._inside:
            torch._foreach_mul_([views[place] for place in self._inside], list(scales.unbind()))
        if self._outside:
            torch._foreach_zero_([views[place] for place in self._outside])


@dataclass(frozen=True, slots=True)
class _Part:
    """Where one unit is in the messages.

    Attributes:
        bytes: of its signs within those of a message.
        whole: the unit, cut into parameters.
        first: the number of its first parameter among all.
        cells: the unit, cut into the parts that parameters have in chunks.
        cell_scales: places of their scales among those of all messages.
    """

    bytes: Range
    whole: _Cut
    first: int
    cells: _Cut
    cell_scales: torch.Tensor


class _Plan:
    """The layout of messages: scales first, for each part that a parameter has in the chunk of a rank, then signs.

    Attributes:
        parts: of the units.
        row: bytes of a message.
        chosen: `[world, width]`, the parameter of each scale; what a rank does not need repeats the first.
        roots: of the numbers of elements of all parameters.
        own: the chunks of this rank, one behind the other, cut into parts of parameters.
        own_roots: of the numbers of their elements.
    """

    def __init__(
        self,
        units: Sequence[tuple[int, tuple[Range, ...]]],
        world: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._dtype, self._device = dtype, device
        by_rank: list[list[int]] = [[] for _ in range(world)]  # numbers of the parameters of its scales
        places: list[list[tuple[int, int]]] = []  # by unit: (rank, place among its scales) of each cell
        cells: list[list[Range]] = []
        own: list[Range] = []
        own_numel = number = 0
        for numel, ranges in units:
            chunk = numel // world
            found: list[Range] = []
            where: list[tuple[int, int]] = []
            for offset, (start, stop) in enumerate(ranges):
                for server in range(start // chunk, -(-stop // chunk)):
                    cell = max(start, server * chunk), min(stop, (server + 1) * chunk)
                    found.append(cell)
                    where.append((server, len(by_rank[server])))
                    by_rank[server].append(number + offset)
                    if server == rank:
                        own.append((cell[0] - rank * chunk + own_numel, cell[1] - rank * chunk + own_numel))
            cells.append(found)
            places.append(where)
            own_numel += chunk
            number += len(ranges)
        width = max(len(numbers) for numbers in by_rank)
        self._bytes_of_scales = width * dtype.itemsize
        self._bytes_of_signs = own_numel // 8
        self.row = -(-(self._bytes_of_scales + self._bytes_of_signs) // dtype.itemsize) * dtype.itemsize
        self.numel = own_numel
        padded = [numbers + [0] * (width - len(numbers)) for numbers in by_rank]
        self.chosen = torch.tensor(padded, device=device)
        self.roots = self._roots([r for _, ranges in units for r in ranges])
        self.own = _Cut(own_numel, own)
        self.own_roots = self._roots(own)
        self.parts: list[_Part] = []
        first = end = 0
        for (numel, ranges), found, where in zip(units, cells, places, strict=True):
            span = end, end + numel // world // 8
            index = torch.tensor([server * width + place for server, place in where], dtype=torch.long, device=device)
            self.parts.append(_Part(span, _Cut(numel, ranges), first, _Cut(numel, found), index))
            first, end = first + len(ranges), span[1]

    def _roots(self, ranges: Sequence[Range]) -> torch.Tensor:
        return torch.tensor([stop - start for start, stop in ranges], dtype=self._dtype, device=self._device).sqrt()

    def rows(self, count: int) -> torch.Tensor:
        """Memory for so many messages; what is in none of their parts is zero."""
        return torch.zeros(count, self.row, dtype=torch.uint8, device=self._device)

    def scales(self, rows: torch.Tensor) -> torch.Tensor:
        """The scales of messages, a view."""
        return rows[..., : self._bytes_of_scales].view(self._dtype)

    def bits(self, rows: torch.Tensor) -> torch.Tensor:
        """The signs of messages, a view."""
        return rows[..., self._bytes_of_scales : self._bytes_of_scales + self._bytes_of_signs]


def _send(portions: Sequence[Portion], plan: _Plan, rows: torch.Tensor) -> None:
    """Fill a message for each rank, and leave the worker errors behind."""
    views = [
        view
        for portion, part in zip(portions, plan.parts, strict=True)
        for view in part.whole.inside(portion.compensated)
    ]
    scales = torch.stack(torch._foreach_norm(views)) / plan.roots
    plan.scales(rows).copy_(scales[plan.chosen])
    bits = plan.bits(rows)
    for portion, part in zip(portions, plan.parts, strict=True):
        values = portion.compensated
        packed = torch.empty(values.numel() // 8, dtype=torch.uint8, device=values.device)
        pack_signs(packed, values)
        bits[:, part.bytes[0] : part.bytes[1]].copy_(packed.view(len(rows), -1))
        mine = scales[part.first : part.first + len(part.whole)]
        values.sub_(_decode(torch.empty_like(values), packed, part.whole, mine))


def _serve(portions: Sequence[Portion], plan: _Plan, rows: torch.Tensor, answer: torch.Tensor) -> None:
    """Average what the ranks sent for this rank's chunks, and fill the answer for all of them."""
    errors = torch.cat([portion.server_error for portion in portions])
    total = torch.zeros_like(errors)
    decoded = torch.empty_like(errors)
    bits, scales = plan.bits(rows), plan.scales(rows)[:, : len(plan.own)]
    for source in range(len(rows)):  # in rank order, whoever sums
        total.add_(_decode(decoded, bits[source], plan.own, scales[source]))
    total.div_(len(rows)).add_(errors)
    packed = plan.bits(answer)
    pack_signs(packed, total)
    if len(plan.own):
        own = torch.stack(torch._foreach_norm(plan.own.inside(total))) / plan.own_roots
        plan.scales(answer)[: len(plan.own)].copy_(own)
        total.sub_(_decode(decoded, packed, plan.own, own))
    sizes = [portion.server_error.numel() for portion in portions]
    torch._foreach_copy_([portion.server_error for portion in portions], list(total.split_with_sizes(sizes)))


def _decode(out: torch.Tensor, packed: torch.Tensor, cut: _Cut, scales: torch.Tensor) -> torch.Tensor:
    """Signs times the scale of their range, zeros elsewhere."""
    unpack_signs(out, packed)
    cut.scale_(out, scales)
    return out


__all__ = ["CompressedMean", "Portion", "Range"]
