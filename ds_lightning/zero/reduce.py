"""Averages gradients over ranks, one flat reduction per unit, and keeps this rank's shard of the result.

[Note: the order of reductions] Ranks must start the same reductions in the same order, whatever their gradients look
like. Where backward gathers nothing, units are started in an order that all ranks share; a unit whose gradients are
complete waits for those before it. A rank may wait for a reduction in the middle of its backward, so every rank must
come to start it without being asked: at the end of backward a rank starts all that others may have started, with zeros
where it has nothing (a branch that it did not take). Units that no rank had gradients for in a recent backward are
late: nobody starts them before the end, where what is left (these, a second gradient from reentrant checkpointing) is
agreed upon on the control group, so that unused parameters cost no communication.

[Note: one reducer] The mean of a gradient is `1/world_size * ((g_0 + g_1) + g_2 ...)`, summed in rank order in fp32 (or
wider), at every stage; `Averaging` has the other factors. Stage 0 then gathers the shards; stages 1-3 keep them.

[Note: copies of the model] Under MiCS the sum over a shard group is added up in every micro-batch, and that over copies
of the model once in an accumulation window, with its last backward. Until then a shard's gradient is `apart`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ds_lightning.comm.agreement import Agreement
from ds_lightning.comm.averaging import Averaging
from ds_lightning.comm.collectives import Collectives, PendingReduce
from ds_lightning.errors import ConfigError
from ds_lightning.layout.units import ROOT
from ds_lightning.zero.buffers import ScratchPool, UnitBuffers
from ds_lightning.zero.closings import Closings
from ds_lightning.zero.gradients import UnitGradients
from ds_lightning.zero.plan import StagePlan
from ds_lightning.zero.residency import TAGS
from ds_lightning.zero.rows import RowExchange, RowGradients
from ds_lightning.zero.transport import Transport

REDUCE_TAG = 1
EXPOSE_TAG = 2
IN_FLIGHT = 2
"""Reductions that may be under way while backward goes on: each holds a unit's gradients once more."""


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """What the configuration says about reductions.

    Attributes:
        dtype: `communication_data_type`; None sends gradients in the dtype in which they arrive.
        piece: `reduce_bucket_size`, elements per message.
        overlap: `overlap_comm`; without it every reduction is waited for at once.
        ignore_unused: `ignore_unused_parameters`.
        averaging: how the gradients of ranks become one.
        accumulate: `data_types.grad_accum_dtype`, in which gradients add up; None is the dtype of the master values.
    """

    dtype: torch.dtype | None = None
    piece: int = 500_000_000
    overlap: bool = True
    ignore_unused: bool = True
    averaging: Averaging = field(default_factory=Averaging)
    accumulate: torch.dtype | None = None


class GradientReducer:
    """Owns the gradients of one engine between backward and step.

    Where `keeps_local` says so nothing but presence is communicated: a 1-bit optimizer compresses what it makes of each
    rank's own gradient.

    Args:
        units: buffers of the trainable units.
        plan: the stage.
        collectives: how to gather (stage 0).
        transport: how to reduce.
        agreement: how ranks decide what is left.
        pool: scratch memory.
        options: from the configuration.
        on_complete: called with the index of a unit whose gradients have all arrived; its values are not needed by
            backward any more.

    Attributes:
        guided: backward gathers, so `close` tells when reductions are due. See [Note: where backward gathers].
        closings: what is closed in a guided backward.
    """

    def __init__(
        self,
        units: Iterable[UnitBuffers],
        plan: StagePlan,
        collectives: Collectives,
        transport: Transport,
        agreement: Agreement,
        pool: ScratchPool,
        options: ReduceOptions,
        on_complete: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._collectives = collectives
        self._transport = transport
        self._agreement = agreement
        self._pool = pool
        self._options = options
        self._on_complete = on_complete
        self.units: dict[int, UnitGradients] = {}
        self._order: list[int] = []
        self._learnt = False
        self._late: set[int] = set()
        self._absent: set[int] = set()  # in the last backward
        self._cursor = 0
        self._completed: list[int] = []
        self._in_flight: deque[tuple[UnitGradients, PendingReduce, list[torch.Tensor]]] = deque()
        self._stale: deque[tuple[UnitGradients, PendingReduce, list[torch.Tensor]]] = deque()  # of a failed backward
        self._rows = RowExchange(collectives, agreement, options.averaging)
        self.sync = True
        self.keeps_local: Callable[[], bool] = _never
        self.guided = False
        self.closings = Closings()
        self.on_landing: Callable[[UnitGradients], None] = _nothing
        for buffers in units:
            self.add(buffers)

    def add(self, buffers: UnitBuffers) -> None:
        """Take charge of a unit's gradients."""
        index = buffers.unit.index
        # A sum would count what `p.grad` shows of earlier backwards once for each rank.
        shows = self._options.averaging.op == "mean"
        options = self._options
        if buffers.unit.row:
            self.units[index] = RowGradients(buffers, self._plan, options.dtype, options.accumulate)
            return
        self.units[index] = UnitGradients(buffers, self._plan, options.dtype, options.accumulate, shows)
        # Backward runs roughly against the order of registration, what lies in no block is complete last; the first
        # backward shows the true order.
        self._order = sorted(
            (unit for unit in self.units if not self.units[unit].unit.row),
            key=lambda unit: (unit in self._late, self.units[unit].unit.scope == ROOT, -unit),
        )
        self._learnt = False

    def remove(self, index: int) -> None:
        """Forget a unit."""
        del self.units[index]
        if index in self._order:
            self._order.remove(index)
        self._late.discard(index)
        self._absent.discard(index)
        self.closings.remove(index)

    @property
    def _communicates(self) -> bool:
        """Whether this backward reduces: inside an accumulation window only sharded gradients do."""
        return self.sync or self._plan.shard_grads

    def arrived(self, gradients: UnitGradients) -> None:
        """The first parameter of a unit has its gradient, or as many as are expected (called from hooks)."""
        if not gradients.expected:
            gradients.expected = sum(parameter.requires_grad for parameter in gradients.parameters)
        if gradients.ready < gradients.expected or gradients.complete:
            return
        if any(p.grad is None and p.requires_grad for p in gradients.parameters):
            return  # some hook ran twice (reentrant checkpointing); the rest comes later, or at the end
        gradients.complete = True
        index = gradients.unit.index
        if not gradients.unit.row:
            self._completed.append(index)
        if self.guided:
            if gradients.unit.row:
                return  # released when its scope is left; its rows are exchanged at the end
            if not gradients.buffers.sharded or gradients.unit.scope == ROOT:
                self.closings.found(index)
            elif index in self.closings.left:
                self._on_complete(index)
            return
        self._on_complete(index)
        if self._communicates:
            self._advance()
        else:
            with torch.no_grad():
                gradients.fold()

    def _advance(self) -> None:
        """Start every reduction whose turn it is."""
        while self._cursor < len(self._order):
            gradients = self.units[self._order[self._cursor]]
            if not gradients.complete or gradients.unit.index in self._late:
                return
            self._cursor += 1
            self._launch(gradients)

    def close(self, indices: Sequence[int]) -> None:
        """Backward has left these units, on all ranks at the same place of a guided backward: start what is due."""
        due = self.closings.close(indices, self._learnt)
        for index in indices:
            if index in self.units and self.units[index].complete:
                self._on_complete(index)
        for index in due:
            if index in self.units:
                self._start(index)

    def _start(self, index: int) -> None:
        """Start a unit's first reduction in this backward."""
        gradients = self.units[index]
        if not (gradients.launched or gradients.unit.row or index in self._late):
            self._launch(gradients)

    def _launch(self, gradients: UnitGradients) -> None:
        self._settle()
        unit = gradients.unit
        gradients.keep(self.keeps_local())
        if gradients.keeps_local:
            with torch.no_grad():
                gradients.take_local()
            gradients.valid = True
            gradients.launched += 1
            gradients.landed += 1
            return
        taken: list[torch.Tensor] = []

        def take(numel: int) -> torch.Tensor:
            taken.append(self._pool.take(numel, gradients.dtype))
            return taken[-1]

        limit = IN_FLIGHT if self._options.overlap else 0
        while len(self._in_flight) >= max(limit, 1):
            self._land()
        tag = unit.index * TAGS + REDUCE_TAG
        with torch.no_grad():
            for earlier, under_way, _ in self._in_flight:
                if earlier.buffers.sharded and not earlier.apart:
                    under_way.advance()
            flat = take(unit.numel)
            self._flatten(gradients, flat)
            pending = self._transport.reduce_scatter(
                gradients.buffers, flat, tag, self._options.piece, take, later=not self.sync
            )
        gradients.launched += 1
        self._in_flight.append((gradients, pending, taken))
        if not limit:
            self._land()

    def _flatten(self, gradients: UnitGradients, flat: torch.Tensor) -> None:
        """What this rank adds to the sum. Scaled first and cast then: what is too large for 16 bit may fit."""
        before = self._options.averaging.before(self._collectives.topology.world_size)
        if before == 1.0:
            gradients.flatten(flat)
            return
        wide = flat if flat.dtype == gradients.unit.dtype else self._pool.take(flat.numel(), gradients.unit.dtype)
        gradients.flatten(wide)
        torch.mul(wide, before, out=flat)
        if wide is not flat:
            self._pool.give(wide)

    def _land(self) -> None:
        """Wait for the oldest reduction and add its result to the shard."""
        gradients, pending, taken = self._in_flight.popleft()
        with torch.no_grad():
            # Exposed gradients came in through `p.grad` and are part of the first sum of a backward already.
            accumulate = gradients.valid and (not gradients.exposes or gradients.landed > 0)
            destination = gradients.open(accumulate)
            behind = self._options.averaging.behind(self._collectives.topology.world_size)
            apart = accumulate and gradients.apart
            if pending.partial and accumulate and not apart:
                destination.mul_(1.0 / self._transport.copies)  # every copy has it, and they will be summed
            if apart and not pending.partial:
                pending.include(destination, behind)
            pending.finish(destination, behind, accumulate and (pending.partial or not apart))
            gradients.close(destination)
        gradients.valid = True
        gradients.apart = pending.partial
        gradients.landed += 1
        for tensor in taken:
            self._pool.give(tensor)
        if self.sync:
            self.on_landing(gradients)

    def _drain(self) -> None:
        while self._in_flight:
            self._land()

    def finish(self) -> None:
        """Backward is over: reduce what is left, wait for everything. Collective where this backward communicates.

        Raises:
            ConfigError: for unused parameters, with `ignore_unused_parameters: false`.
        """
        if self._communicates:
            self._finish_reductions()
        else:
            with torch.no_grad():
                for gradients in self.units.values():
                    gradients.fold()
        device = self._collectives.topology.device
        if device.type == "cuda" and any(gradients.away for gradients in self.units.values()):
            torch.cuda.current_stream(device).synchronize()  # the host may read what was copied to it
        self.reset()

    def fail(self) -> None:
        """A backward has failed: what is under way still arrives, before anything new, and counts for nothing."""
        self._stale.extend(self._in_flight)
        self._in_flight.clear()
        self.reset()

    def _settle(self) -> None:
        while self._stale:
            _, pending, taken = self._stale.popleft()
            pending.discard()
            for tensor in taken:
                self._pool.give(tensor)

    def reset(self) -> None:
        """A backward is over."""
        for gradients in self.units.values():
            gradients.reset()
        self._cursor = 0
        self._completed = []
        self.closings.reset()

    def _finish_reductions(self) -> None:
        for index in self._order:
            self._start(index)
        units = [self.units[index] for index in sorted(self.units)]
        for gradients in units:
            for index, parameter in enumerate(gradients.parameters):
                if parameter.grad is not None or (gradients.local is not None and gradients.present[index]):
                    gradients.arrived[index] = 1
        wanted = bytearray(gradients.launched + int(gradients.pending()) for gradients in units)
        flags = bytearray().join(gradients.arrived for gradients in units)
        if not wanted:
            return
        learnt = None if self._learnt else self._learn()
        votes = torch.frombuffer(wanted + flags, dtype=torch.uint8)
        agreed = self._agreement.maximum(votes, "which gradients are left to reduce")
        self._drain()
        agreed.wait()
        result = votes.tolist()
        targets = {gradients.unit.index: result[place] for place, gradients in enumerate(units)}
        for index in self._order:
            while self.units[index].launched < targets[index]:
                self._launch(self.units[index])
        rows = [g for g in units if isinstance(g, RowGradients) and targets[g.unit.index]]
        dense = self._reduce_rows(rows)
        self._drain()
        if learnt is not None:
            order, self.closings.anchors = learnt
            self._order = order + [index for index in self._order if index not in order]
            self._learnt = True
        if self.guided:
            self.closings.again(index for index, target in targets.items() if target > 1)
        absent = self._note_presence(units, result[len(units) :])
        self._note_absence(absent)
        if self.sync:
            self.settle()
        if not self._plan.shard_optimizer:
            reduced = [g for g in units if targets[g.unit.index] and g.unit.index not in absent]
            self._gather_gradients([g for g in reduced if not g.unit.row or g in dense])

    def _reduce_rows(self, units: Sequence[RowGradients]) -> Sequence[UnitGradients]:
        """See [Note: rows instead of units]. Returns the units that were reduced densely."""
        if not units:
            return ()
        with torch.no_grad():
            dense = self._rows.run(units)
        for gradients in dense:
            self._launch(gradients)
        return dense

    def settle(self) -> None:
        """Sum what copies of the model hold apart (MiCS). Collective.

        A window's last backward does that; who looks at gradients before calls it.
        """
        for index in sorted(self.units):
            gradients = self.units[index]
            if not gradients.apart:
                continue
            with torch.no_grad():
                values = gradients.open(accumulate=True)
                tag = index * TAGS + REDUCE_TAG
                self._transport.sum_copies(gradients.buffers, values, tag, self._options.piece)
                gradients.close(values)
            gradients.apart = False

    def _note_absence(self, absent: set[int]) -> None:
        """Choose what is late in the next backward; every rank does so from the same knowledge."""
        for index in absent - self._late:
            gradients = self.units[index]
            if not any(gradients.present):  # what was reduced were zeros
                gradients.valid = gradients.apart = False
                gradients.grad = None
        # One backward with gradients is not enough to be early again: two networks may train in turns.
        self._late = absent | (self._late & self._absent)
        self._absent = absent
        self._order.sort(key=lambda index: index in self._late)

    def _note_presence(self, units: Sequence[UnitGradients], flags: Sequence[int]) -> set[int]:
        """Note which parameters had gradients on any rank; returns the units of which none had."""
        missing: list[str] = []
        absent: set[int] = set()
        place = 0
        for gradients in units:
            if not any(flags[place : place + len(gradients.unit.slots)]):
                absent.add(gradients.unit.index)
            for index, slot in enumerate(gradients.unit.slots):
                if flags[place + index]:
                    gradients.present[index] = True
                elif not gradients.present[index] and gradients.parameters[index].requires_grad:
                    missing.append(slot.name)
            place += len(gradients.unit.slots)
        if missing and not self._options.ignore_unused:
            raise ConfigError(
                f"{len(missing)} parameters received no gradient on any rank: {', '.join(missing[:10])}"
                f"{' ...' if len(missing) > 10 else ''}. zero_optimization.ignore_unused_parameters is false: freeze "
                "them (requires_grad=False), use them in the loss, or set the key to true."
            )
        return absent

    def _gather_gradients(self, units: Sequence[UnitGradients]) -> None:
        """Stage 0: every rank gets the whole averaged gradient, unless each keeps its own."""
        pending = []
        for gradients in units:
            assert gradients.grad is not None
            if gradients.keeps_local:
                continue
            tag = gradients.unit.index * TAGS + EXPOSE_TAG
            pending.append(self._collectives.all_gather(gradients.grad, gradients.unit.name, tag, self._options.piece))
        for work in pending:
            work.wait()
        for gradients in units:
            if gradients.exposes:
                gradients.expose()

    def _learn(self) -> tuple[list[int], dict[int, int]]:
        """The order in which rank 0's gradients were complete in its first backward, and the anchors."""
        again = [index for index in self._completed if self.units[index].pending()]  # closed too early
        early = [index for index in self._completed if index not in again]
        order = list(dict.fromkeys(early + again))
        learnt: tuple[list[int], dict[int, int]] = self._agreement.from_rank((order, self.closings.anchors))
        return learnt

    def hidden(self) -> list[int]:
        """Units with reduced gradients that `p.grad` does not show."""
        return [index for index in self.units if self.hides(index)]

    def hides(self, index: int) -> bool:
        """Whether a unit has reduced gradients that `p.grad` does not show; asked for every parameter that is read."""
        gradients = self.units.get(index)
        return gradients is not None and gradients.valid and not gradients.exposes

    def zero(self, groups: range) -> None:
        """Forget the reduced gradients of these parameter groups."""
        for gradients in self.units.values():
            gradients.zero(groups)

    def abandon(self) -> None:
        """Forget reductions in flight after a failure, without waiting for ranks that may be gone."""
        self._in_flight.clear()
        self._stale.clear()

    @property
    def state_nbytes(self) -> int:
        """Bytes of reduced gradients kept between steps."""
        return sum(g.grad.nbytes for g in self.units.values() if g.grad is not None)


def _never() -> bool:
    return False


def _nothing(gradients: UnitGradients) -> None:
    pass
