"""Weights that travel as int8 and gradients that travel as int4 (ZeRO++, arXiv:2306.10209, sections 3.1 and 3.3).

Blocks of `BLOCK` elements share an fp32 scale (`ops/quantize.py`), so a weight takes 1 + 4/256 bytes on the wire and a
gradient 1/2 + 4/256. Blocks never cross the border of a chunk.

[Note: all ranks see the same weights] Every rank computes with what was sent, the owner of a chunk too: with its exact
values the ranks' models would differ. A weight is off by at most `absmax / 254` of its block, before it is rounded to
the dtype that computes. Gathering the same weights again gives the same bits.

[Note: the mean of quantized gradients] What a rank has itself is never quantized, sums are built in fp32 and the mean
is that over all ranks (the reference divides by the nodes alone). Each contribution that is sent is off by at most
`absmax / 14` of its block. In two steps (see [Note: two levels]) the partial sums of other nodes are quantized once
more: the error of a sum over N nodes of L ranks is at most the sum of `absmax / 14` over N * (L - 1) gradients and
N - 1 partial sums. What is not finite makes its block NaN on the rank that receives it, so overflow is still found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ds_lightning.comm.collectives import Chained, Collectives, Pending, PendingReduce
from ds_lightning.comm.feedback import ErrorFeedback
from ds_lightning.ops.quantize import dequantize, payload_bytes, quantize, scale_count
from ds_lightning.ops.reduce import reduce_sum
from ds_lightning.teams import Team

BLOCK = 256
"""Elements that share a scale. Chunks are multiples of it."""

QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantized; others travel as they are."""


class Scratch(Protocol):
    """Gives memory and takes it back."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with arbitrary content."""

    def give(self, tensor: torch.Tensor) -> None:
        """A tensor taken before, which nobody uses any more."""


class Gathers(Protocol):
    """What can gather a flat buffer over a team."""

    @property
    def team(self) -> Team:
        """The ranks that take part."""

    def all_gather(self, full: torch.Tensor, what: str, tag: int, piece: int) -> Pending:
        """See `Collectives.all_gather`."""


def gather_quantized(
    gathers: Gathers,
    full: torch.Tensor,
    what: str,
    tag: int,
    piece: int,
    scratch: Scratch,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Pending:
    """Fill `full` with every rank's chunk, as int8 sees it. Collective.

    Args:
        gathers: how to gather.
        full: `[team * chunk]` in one of `QUANTIZABLE`; this rank's chunk is in place unless `own` is given, and is
            replaced as well.
        what: name for messages.
        tag: distinguishes operations that are in flight together.
        piece: largest number of elements of `full` per message.
        scratch: memory for what is sent.
        own: this rank's chunk, quantized already: payload and scales.
    """
    payload = scratch.take(full.numel(), torch.uint8)
    scales = scratch.take(scale_count(full.numel(), BLOCK), torch.float32)
    size, place = gathers.team.size, gathers.team.place

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(size, -1)[place]

    if own is None:
        quantize(mine(payload), mine(scales), mine(full), block=BLOCK, bits=8)
    else:
        mine(payload).copy_(own[0])
        mine(scales).copy_(own[1])
    parts = [gathers.all_gather(payload, what, tag, piece), gathers.all_gather(scales, what, tag, piece)]

    def arrived() -> None:
        dequantize(full, payload, scales, block=BLOCK, bits=8)
        scratch.give(payload)
        scratch.give(scales)

    return Chained(parts, arrived)


class QuantizedReduce(PendingReduce):
    """A reduce-scatter in which int4 travels, in one step or in two. See [Note: the mean of quantized gradients].

    Args:
        steps: who exchanges: all ranks, or those inside a node and then those across nodes.
        full: `[team * chunk]` in one of `QUANTIZABLE`, not to be touched until the result is finished.
        what: name for messages.
        tag: distinguishes operations that are in flight together.
        scratch: memory for what is sent and summed.
        feedback: carries errors on; None loses them.
        unit: whose they are.
    """

    def __init__(
        self,
        steps: Sequence[Collectives],
        full: torch.Tensor,
        what: str,
        tag: int,
        scratch: Scratch,
        feedback: ErrorFeedback | None = None,
        unit: int = 0,
    ) -> None:
        super().__init__(Pending([], (), str), [])
        self._steps = list(steps)
        self._what = what
        self._tag = tag
        self._scratch = scratch
        self._feedback = feedback
        self._unit = unit
        self._values = full  # of the step under way
        self._owned = False  # whether `_values` is scratch
        self._exchange: _Exchange | None = None
        self._begin()

    def _begin(self) -> None:
        """Start the exchange of the next step."""
        step = self._steps.pop(0)
        outer = self._steps[0].team.size if self._steps else 1  # for how many later targets each message is
        numel = self._values.numel()
        payload = self._scratch.take(payload_bytes(numel, 4), torch.uint8)
        scales = self._scratch.take(scale_count(numel, BLOCK), torch.float32)
        if self._feedback is None:
            quantize(payload, scales, self._values, block=BLOCK, bits=4)
        else:
            take, give = self._scratch.take, self._scratch.give
            self._feedback.quantize((self._unit, len(self._steps)), payload, scales, self._values, take, give)
        self._exchange = _Exchange(step, self._values, payload, scales, outer, self._what, self._tag, self._scratch)
        self._scratch.give(payload)
        self._scratch.give(scales)

    def _land(self) -> None:
        """Wait for the exchange under way; what it sums to is the values of the next step."""
        assert self._exchange is not None
        exchange, self._exchange = self._exchange, None
        values = exchange.sum()
        if self._owned:
            self._scratch.give(self._values)
        self._values, self._owned = values, True

    def advance(self) -> None:
        """Begin the step across nodes, if that is what comes next."""
        while self._steps:
            self._land()
            self._begin()

    def finish(self, out: torch.Tensor, scale: float, accumulate: bool) -> None:
        """As `PendingReduce.finish`."""
        self.advance()
        self._land()
        reduce_sum(out, [self._values], scale=scale, accumulate=accumulate)
        self._scratch.give(self._values)

    def discard(self) -> None:
        """Take part to the end, and forget the result."""
        self.advance()
        self._land()
        self._scratch.give(self._values)


class _Exchange:
    """Every rank of a team sends each other one its part of some values, quantized.

    Args:
        collectives: the team.
        values: `[outer, team, n]`, flat; the rank at place p gets all `[:, p]`.
        payload: the values as int4.
        scales: of their blocks.
        outer: see there.
        what: name for messages.
        tag: of the messages.
        scratch: memory.
    """

    def __init__(
        self,
        collectives: Collectives,
        values: torch.Tensor,
        payload: torch.Tensor,
        scales: torch.Tensor,
        outer: int,
        what: str,
        tag: int,
        scratch: Scratch,
    ) -> None:
        size = collectives.team.size
        self._place = collectives.team.place
        self._scratch = scratch
        self._values = values.view(outer, size, -1)
        self._packed = payload.numel() // size  # bytes of a message before its scales
        self._numel = values.numel() // size
        message = self._packed + scales.nbytes // size
        self._sent = scratch.take(size * message, torch.uint8)
        self._received = scratch.take(size * message, torch.uint8)
        rows = self._sent.view(size, message)
        for target, source in ((rows[:, : self._packed], payload), (rows[:, self._packed :], scales.view(torch.uint8))):
            target.unflatten(1, (outer, -1)).copy_(source.view(outer, size, -1).transpose(0, 1))
        self._pending = collectives.all_to_all(rows, self._received.view(size, message), what, tag)

    def sum(self) -> torch.Tensor:
        """This rank's part of the sum over the team, flat, fp32: scratch memory of whoever asks. Waits."""
        self._pending.wait()
        total = self._scratch.take(self._numel, torch.float32)
        total.view(len(self._values), -1).copy_(self._values[:, self._place])
        for place, row in enumerate(self._received.view(self._values.shape[1], -1)):
            if place != self._place:
                payload, scales = row[: self._packed], row[self._packed :].view(torch.float32)
                dequantize(total, payload, scales, block=BLOCK, bits=4, accumulate=True)
        self._scratch.give(self._sent)
        self._scratch.give(self._received)
        return total
