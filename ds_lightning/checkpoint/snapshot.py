"""The values of a model and its optimizers at one moment, where they are: every rank holds its part.

[Note: who decides what is saved] As under DDP, the checkpoint dict of rank 0 is what is written. It holds logical
tensors, which point into vectors of the snapshot; the other ranks only lend their parts of those vectors. Hooks of any
rank may touch a logical tensor: that rank then announces the vector that it wants, and all ranks join the gather, those
that are done with their hooks in `serve`. So a hook on rank 0 alone works, and so does one on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_lightning.comm.agreement import Agreement
from ds_lightning.comm.collectives import Collectives
from ds_lightning.comm.ledger import Ledger
from ds_lightning.errors import CheckpointError
from ds_lightning.offload.stored import Stored, Values, present, widened
from ds_lightning.topology import Topology
from ds_lightning.zero.logical import logical


@dataclass(frozen=True, slots=True)
class Vector:
    """One value for every element of a unit, of which each rank holds its chunk.

    Attributes:
        what: name for messages.
        numel: elements, padding included.
        owned: this rank's range `[start, stop)`.
        dtype: of the values in the checkpoint.
        pieces: what this rank has of its range: `(first element, 1-D values)`, in order; zeros elsewhere. Frozen
            parameters may lie here in a narrower dtype, and are widened when they are read.
    """

    what: str
    numel: int
    owned: tuple[int, int]
    dtype: torch.dtype
    pieces: tuple[tuple[int, Values], ...]

    @property
    def on_disk(self) -> bool:
        """Whether some of it must be read."""
        return any(isinstance(values, Stored) for _, values in self.pieces)

    def within(self, start: int, stop: int) -> list[tuple[int, Values]]:
        """This rank's pieces of `[start, stop)`, views, counted from `start`."""
        found = []
        for first, values in self.pieces:
            lo, hi = max(first, start), min(first + values.numel(), stop)
            if hi > lo:
                found.append((lo - start, widened(values[lo - first : hi - first], self.dtype)))
        return found

    def chunk(self) -> torch.Tensor:
        """This rank's range as one tensor on CPU, zeros where it has nothing."""
        start, stop = self.owned
        if len(self.pieces) == 1 and self.pieces[0][1].numel() == stop - start:
            return present(widened(self.pieces[0][1], self.dtype)).cpu()
        own = torch.zeros(stop - start, dtype=self.dtype)
        for first, values in self.pieces:
            own[first - start : first - start + values.numel()].copy_(present(values))
        return own

    def staged(self, buffers: Sequence[torch.Tensor] = ()) -> Vector:
        """The same with copies on CPU, in pinned memory where they come from a GPU.

        Args:
            buffers: memory for the copies of each piece, used where it fits.
        """
        copies = [
            _copied(present(values), buffers[place] if place < len(buffers) else None)
            for place, (_, values) in enumerate(self.pieces)
        ]
        firsts = (first for first, _ in self.pieces)
        return dataclasses.replace(self, pieces=tuple(zip(firsts, copies, strict=True)))

    def same(self, other: Vector) -> bool:
        """Whether both hold the same bits on this rank."""
        if (self.what, self.numel, self.owned, self.dtype) != (other.what, other.numel, other.owned, other.dtype):
            return False
        return len(self.pieces) == len(other.pieces) and all(
            first == start and torch.equal(_bits(present(values)), _bits(present(others)))
            for (first, values), (start, others) in zip(self.pieces, other.pieces, strict=True)
        )


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().contiguous().view(torch.uint8)  # compared as numbers, NaN would be no NaN


def _copied(values: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
        buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return buffer.copy_(values, non_blocking=values.is_cuda)


@dataclass(frozen=True, slots=True)
class ShardSource:
    """A parameter's part of a vector, over all ranks."""

    snapshot: Snapshot
    vector: int
    start: int
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the vector."""
        return self.snapshot.vectors[self.vector].dtype

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Row-major elements `[start, stop)`, a copy. Collective, see [Note: who decides what is saved]."""
        return self.snapshot.fetch(self.vector)[self.start + start : self.start + stop].clone()

    def pieces(self) -> Sequence[tuple[int, Values]]:
        """What this rank holds, views."""
        return self.snapshot.vectors[self.vector].within(self.start, self.start + self.shape.numel())


class Snapshot:
    """Owns the vectors of one checkpoint. All ranks add the same vectors in the same order.

    Args:
        topology: ranks and groups.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.vectors: list[Vector] = []
        self._agreement = Agreement(topology)
        # Touches of hooks go over the control group, which training does not use meanwhile.
        self._collectives = Collectives.create(topology.host(topology.control_group), Ledger())
        self._cached: tuple[int, torch.Tensor] | None = None
        self._open = True

    def add(self, vector: Vector) -> int:
        """Take a vector in; returns its number."""
        self.vectors.append(vector)
        return len(self.vectors) - 1

    def tensor(self, vector: int, start: int, shape: torch.Size) -> torch.Tensor:
        """The logical tensor that lies at `start` of a vector; one without elements is an ordinary one."""
        return logical(ShardSource(self, vector, start, shape))

    def fetch(self, vector: int) -> torch.Tensor:
        """A whole vector, for this rank and all others. Collective with `fetch` and `serve` of the others."""
        if not self._open:
            raise CheckpointError("This tensor belonged to a checkpoint that has been written; its values are gone.")
        while self._cached is None or self._cached[0] != vector:
            self._round(vector)
        return self._cached[1]

    def serve(self) -> None:
        """Join what the hooks of other ranks ask for, until all ranks are here; nothing can be asked any more."""
        while self._round(-1):
            pass
        self.close()

    def close(self) -> None:
        """Nothing can be asked any more. Not collective."""
        self._open = False
        self._cached = None

    def staged(self, before: Snapshot | None = None) -> Snapshot:
        """The same with copies of this rank's values on CPU: the model may go on.

        Args:
            before: an earlier one that nobody needs any more; its memory is used again. New memory costs more than the
                copy: on CPUs pages fault in, and GPUs want it pinned.
        """
        copy = Snapshot(self.topology)
        old = [[present(v) for _, v in vector.pieces] for vector in before.vectors] if before is not None else []
        copy.vectors = [
            vector.staged(old[place] if place < len(old) else ()) for place, vector in enumerate(self.vectors)
        ]
        copy.close()
        if any(getattr(values, "is_cuda", False) for vector in self.vectors for _, values in vector.pieces):
            torch.cuda.current_stream().synchronize()
        return copy

    def same(self, other: Snapshot) -> bool:
        """Whether both hold the same bits on this rank. Not collective."""
        return len(self.vectors) == len(other.vectors) and all(
            mine.same(theirs) for mine, theirs in zip(self.vectors, other.vectors, strict=True)
        )

    def _round(self, wanted: int) -> bool:
        """All ranks name a vector, or none (-1), and gather one of those named. Returns whether one was."""
        votes = torch.tensor([wanted])
        self._agreement.exchange(votes, "which tensors the hooks of a checkpoint look at").wait()
        named = int(votes)
        if named < 0:
            return False
        vector = self.vectors[named]
        full = torch.empty(vector.numel, dtype=vector.dtype)
        full[vector.owned[0] : vector.owned[1]].copy_(vector.chunk())
        self._collectives.all_gather(full, vector.what, named, full.numel()).wait()
        self._cached = (named, full)
        return True
