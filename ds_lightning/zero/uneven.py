"""Evaluation of a model that fits on no rank whole, where ranks may have different numbers of batches.

[Note: rounds] A gather needs every rank, but a rank that is out of batches, or generates a shorter text, runs no
forward any more. So in such an evaluation nothing is gathered unasked. Before a gather all ranks meet in a round on
the control group, in which each names the unit that it wants, or none; then all of them join the gathers of every
unit that was named, in order. A rank that has nothing to run `serve`s: it comes to rounds until one in which nobody
wants anything. It serves wherever ranks meet for another reason as well (a metric is reduced, a checkpoint is saved,
the evaluation ends), because the others reach that place only with its help. Programs whose ranks meet alike under
DDP do so here.
"""

from __future__ import annotations

import torch

from ds_lightning.comm.agreement import Agreement
from ds_lightning.zero.residency import ResidencyManager


class UnevenEvaluation:
    """Takes over the gathers of one engine until it is closed. See [Note: rounds].

    Args:
        residency: whose gathers are announced.
        agreement: carries the rounds; whatever else ranks agree upon waits until all of them are idle.
    """

    def __init__(self, residency: ResidencyManager, agreement: Agreement) -> None:
        self._residency = residency
        self._agreement = agreement
        self._units = sorted(index for index, entry in residency.units.items() if entry.buffers.sharded)
        residency.on_demand = self.gather
        agreement.before = self.serve

    def gather(self, index: int) -> None:
        """Gather a unit for this rank, and whatever the others want in the same round."""
        self._round(index)

    def serve(self) -> None:
        """Join the gathers of others until no rank wants any."""
        while self._round(None):
            pass

    def close(self) -> None:
        """Gathers are as usual again. Not collective."""
        self._residency.on_demand = None
        self._agreement.before = None

    def _round(self, wanted: int | None) -> bool:
        """One round. Returns whether any rank wanted a unit."""
        votes = torch.tensor([index == wanted for index in self._units], dtype=torch.uint8)
        self._agreement.exchange(votes, "which units to gather for an evaluation").wait()
        named = [index for index, vote in zip(self._units, votes.tolist(), strict=True) if vote]
        for index in named:
            self._residency.join(index, keep=index == wanted)
        return bool(named)
