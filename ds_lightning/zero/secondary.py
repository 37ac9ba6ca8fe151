"""Second shards of gathered weights, kept inside a node (hpZ of ZeRO++, arXiv:2306.10209, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_lightning.comm.collectives import Collectives, Pending
from ds_lightning.zero.buffers import UnitBuffers


class SecondaryShards:
    """Owns the second shards of this rank, in the dtype that computes.

    A group of k consecutive ranks keeps what was gathered, `numel / k` elements each, until values change: backward,
    and whatever runs before the next step, gathers inside the group. Which units have one is the same on every rank,
    because gathers and changes of values are collective.

    Args:
        collectives: over the group.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._kept: dict[int, torch.Tensor] = {}
        self._valid: set[int] = set()

    def __contains__(self, index: int) -> bool:
        """Whether the unit can be gathered from second shards."""
        return index in self._valid

    def keep(self, buffers: UnitBuffers) -> None:
        """The unit has just been gathered: keep this rank's part."""
        index = buffers.unit.index
        own = self._own(buffers)
        if index not in self._kept:
            with torch.inference_mode(False):
                self._kept[index] = torch.empty_like(own)
        self._kept[index].copy_(own)
        self._valid.add(index)

    def gather(self, buffers: UnitBuffers, tag: int, piece: int) -> Pending:
        """Fill the unit's `full`, which must have its memory. Collective over the group."""
        self._own(buffers).copy_(self._kept[buffers.unit.index])
        return self._collectives.all_gather(buffers.full, buffers.unit.name, tag, piece)

    def _own(self, buffers: UnitBuffers) -> torch.Tensor:
        team = self._collectives.team
        return buffers.full.view(team.size, -1)[team.place]

    def outdate(self, indices: Iterable[int]) -> None:
        """The values of these units change. Their memory is kept for the next ones."""
        self._valid.difference_update(indices)

    def drop(self, index: int) -> None:
        """The unit is gone."""
        self._valid.discard(index)
        self._kept.pop(index, None)

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return sum(kept.nbytes for kept in self._kept.values())
