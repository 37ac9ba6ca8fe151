"""Gradients of embeddings as rows: only those that some rank has are sent, each to the rank that owns it.

[Note: rows instead of units] An embedding with `sparse_gradients` is a unit of its own, cut between rows. At the end of
backward ranks tell each other how many rows they have for whom, then send row numbers (int32) and values: at stages 1-3
to the rank that owns the row, at stage 0 to all. Rows are summed in rank order in fp32, as [Note: one reducer] says, so
the result has the same bits as the dense reduction. Where rows would take more bytes than the whole, on any rank, the
unit is reduced densely: all ranks know all counts and choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ds_lightning.comm.agreement import Agreement
from ds_lightning.comm.averaging import Averaging
from ds_lightning.comm.collectives import Collectives, Pending
from ds_lightning.zero.buffers import UnitBuffers
from ds_lightning.zero.gradients import UnitGradients
from ds_lightning.zero.plan import StagePlan
from ds_lightning.zero.residency import TAGS

ROWS_TAG = 1
INDEX = torch.int32
"""Row numbers on their way."""


class RowGradients(UnitGradients):
    """The gradient of one embedding. `local` holds values of `rows`, `[n, row]`; rows are sorted and differ."""

    def __init__(
        self,
        buffers: UnitBuffers,
        plan: StagePlan,
        dtype: torch.dtype | None = None,
        kept: torch.dtype | None = None,
    ) -> None:
        super().__init__(buffers, plan, dtype, kept, shows=False)
        self.wide = torch.promote_types(self.kept, torch.float32)
        self.rows = torch.empty(0, dtype=torch.int64)

    def fold(self) -> None:
        """Take the gradient of a micro-batch as rows and add it to those of earlier ones."""
        gradient = self.parameters[0].grad
        if gradient is None:
            return
        self.present[0] = True
        self.arrived[0] = 1
        part = rows_of(gradient.detach(), self.wide)
        self.rows, self.local = part if self.local is None else sum_rows([(self.rows, self.local), part])
        self._drop()

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers, int64 `[n]`, and values `[n, row]` in fp32 or wider; what was there is forgotten."""
        self.fold()
        rows, values, self.local = self.rows, self.local, None
        if values is None:
            device = self.buffers.full.device
            return (
                torch.empty(0, dtype=torch.int64, device=device),
                torch.empty(0, self.unit.row, dtype=self.wide, device=device),
            )
        return rows, values

    def flatten(self, flat: torch.Tensor) -> None:
        """The dense gradient, `[unit.numel]`."""
        rows, values = self.take()
        flat.zero_()
        flat.view(-1, self.unit.row).index_copy_(0, rows, values.to(flat.dtype))

    def land(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Add reduced rows, numbered from where this rank's gradient begins, to what is there."""
        accumulate = self.valid
        own = self.open(accumulate)
        target = self.grad if self.whole else own
        assert target is not None
        if not accumulate:
            target.zero_()
        target.view(-1, self.unit.row).index_add_(0, rows, values.to(target.dtype))
        self.close(own)
        self.valid = True
        self.landed += 1


def rows_of(gradient: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and values of the rows of a gradient that are not zero, in `dtype`.

    Args:
        gradient: `[rows, row]`, sparse (row numbers may repeat) or dense.
        dtype: wide enough to sum repeated rows in.
    """
    if gradient.layout is torch.strided:
        rows = gradient.ne(0).any(1).nonzero().flatten()
        return rows, gradient[rows].to(dtype)
    rows, values = gradient._indices()[0], gradient._values().to(dtype)
    # `coalesce` would add repeated rows in any order, a dense gradient has them in that of the batch.
    return (rows, values) if gradient.is_coalesced() else sum_rows([(rows, values)])


def sum_rows(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum parts, each with different rows, one after the other: the order of additions is that of `parts`."""
    rows, places = torch.cat([rows for rows, _ in parts]).unique(return_inverse=True)
    total = parts[0][1].new_zeros(len(rows), parts[0][1].shape[1])
    start = 0
    for own, values in parts:
        total.index_add_(0, places[start : start + len(own)], values)
        start += len(own)
    return rows, total


class RowExchange:
    """Reduces embeddings.

    Args:
        collectives: to send rows.
        agreement: to tell counts.
        averaging: how the gradients of ranks become one.
    """

    def __init__(self, collectives: Collectives, agreement: Agreement, averaging: Averaging) -> None:
        self._collectives = collectives
        self._agreement = agreement
        self._averaging = averaging

    def run(self, units: Sequence[RowGradients]) -> list[RowGradients]:
        """Reduce these units. Collective; returns those that are to be reduced densely, with nothing taken from them.

        Args:
            units: the same on all ranks, in the same order.
        """
        for gradients in units:
            gradients.fold()
        counts = self._agree_on_counts(units)
        world, place = self._collectives.team.size, self._collectives.team.place
        dense, under_way = [], []
        for gradients, matrix in zip(units, counts.tolist(), strict=True):
            if _costs(gradients, matrix) >= _costs_densely(gradients, world):
                dense.append(gradients)
                continue
            under_way.append((gradients, *self._send(gradients, matrix[place], [row[place] for row in matrix])))
        for gradients, parts, pending in under_way:
            pending.wait()
            rows, total = sum_rows([(rows.long(), values.to(gradients.wide)) for rows, values in parts])
            total.mul_(self._averaging.behind(world))
            first = 0 if gradients.whole else gradients.buffers.owned[0] // gradients.unit.row
            gradients.land(rows - first, total)
        return dense

    def _agree_on_counts(self, units: Sequence[RowGradients]) -> torch.Tensor:
        """How many rows each rank has for each: `[units, senders, receivers]`."""
        world, place = self._collectives.team.size, self._collectives.team.place
        counts = torch.zeros(len(units), world, world, dtype=torch.int64)
        for index, gradients in enumerate(units):
            rows = gradients.rows if gradients.local is not None else gradients.rows[:0]
            borders = self._borders(gradients, rows)
            counts[index, place] = torch.tensor([stop - start for start, stop in borders])
        self._agreement.maximum(counts, "rows of embeddings").wait()
        return counts

    def _borders(self, gradients: RowGradients, rows: torch.Tensor) -> list[tuple[int, int]]:
        """Which of `rows` each rank gets: all at stage 0, otherwise those that it owns."""
        world = self._collectives.team.size
        if gradients.whole:
            return [(0, len(rows))] * world
        step = gradients.unit.chunk // gradients.unit.row
        ends = torch.arange(1, world, device=rows.device) * step
        cuts = [0, *torch.searchsorted(rows, ends).tolist(), len(rows)]
        return list(pairwise(cuts))

    def _send(
        self, gradients: RowGradients, sends: Sequence[int], receives: Sequence[int]
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Pending]:
        """Start the exchange of one unit; what is to be summed once it has arrived, in rank order."""
        world, place = self._collectives.team.size, self._collectives.team.place
        rows, values = gradients.take()
        before = self._averaging.before(world)
        values = (values if before == 1.0 else values * before).to(gradients.dtype)
        rows = rows.to(INDEX)
        borders = self._borders(gradients, rows.long())
        assert [stop - start for start, stop in borders] == list(sends)
        mine = [(rows[start:stop], values[start:stop]) for start, stop in borders]
        theirs = [
            mine[place] if rank == place else (rows.new_empty(n), values.new_empty(n, values.shape[1]))
            for rank, n in enumerate(receives)
        ]
        tag = gradients.unit.index * TAGS + ROWS_TAG
        works = [
            self._collectives.exchange([m[part] for m in mine], [t[part] for t in theirs], gradients.unit.name, tag)
            for part in (0, 1)
        ]
        return theirs, Pending.of(works)


def _costs(gradients: RowGradients, matrix: Sequence[Sequence[int]]) -> int:
    """Bytes that the busiest rank sends."""
    one = gradients.unit.row * gradients.dtype.itemsize + INDEX.itemsize
    return max(one * (sum(row) - row[rank]) for rank, row in enumerate(matrix))


def _costs_densely(gradients: RowGradients, world: int) -> int:
    """Bytes that each rank sends in a reduce-scatter, which stage 0 follows with an all-gather."""
    sizes = gradients.dtype.itemsize + (gradients.kept.itemsize if gradients.whole else 0)
    return max(1, (world - 1) * gradients.unit.chunk * sizes)
