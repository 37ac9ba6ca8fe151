"""Gradient norms and clipping over shards: every element counted once, the same result on every rank."""

from __future__ import annotations

import math

import torch

from ds_lightning.comm.agreement import Agreement
from ds_lightning.comm.collectives import Pending
from ds_lightning.optim.gradients import ReducedGradients
from ds_lightning.optim.sharded import ShardedOptimizer


class PendingNorm:
    """A gradient norm whose sum over ranks is under way."""

    def __init__(self, votes: torch.Tensor, pending: Pending, norm_type: float) -> None:
        self._votes = votes
        self._pending = pending
        self._norm_type = norm_type

    def value(self) -> float:
        """The norm: inf or NaN when an element is. Waits, but does not communicate."""
        self._pending.wait()
        first = float(self._votes[0])
        if math.isinf(self._norm_type):
            return math.nan if self._votes[1] > 0 else first
        return float(first ** (1.0 / self._norm_type))


def start_norm(gradients: ReducedGradients, norm_type: float, agreement: Agreement, local: bool = False) -> PendingNorm:
    """Begin the norm of gradients spread over the ranks. Collective.

    Args:
        gradients: this rank's part.
        norm_type: p, `inf` for the maximum.
        agreement: to sum over ranks.
        local: they are not parts of one gradient, but each rank's own, of which the p-mean of the norms is taken: for
            2 the root of the mean square.
    """
    norms = gradients.norms(norm_type) if agreement.topology.first_replica else []
    mine = _together(norms) if norms else torch.zeros(1, dtype=torch.float64)
    if math.isinf(norm_type):
        worst = mine.max()
        # MAX may drop NaNs, so they travel as a count of their own.
        votes = torch.stack([worst.nan_to_num(nan=0.0, posinf=math.inf), worst.isnan().double()]).cpu()
        return PendingNorm(votes, agreement.maximum(votes, "the gradient norm"), norm_type)
    votes = mine.pow(norm_type).sum().reshape(1).cpu() / (agreement.topology.world_size if local else 1)
    return PendingNorm(votes, agreement.total(votes, "the gradient norm"), norm_type)


def _together(norms: list[torch.Tensor]) -> torch.Tensor:
    """Norms in fp64 on one device."""
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.cpu() for norm in norms]
    return torch.stack([norm.double() for norm in norms])


def total_norm(gradients: ReducedGradients, norm_type: float, agreement: Agreement) -> float:
    """Norm of gradients spread over the ranks, see `start_norm`. Collective."""
    return start_norm(gradients, norm_type, agreement).value()


class GradientNorms:
    """Owns global 2-norms: of gradients as they are, and of the last step's, averaged and unscaled, before clipping.

    Where each rank keeps its own gradient (the compressed steps of a 1-bit optimizer), the norm is the root of the mean
    square of their norms, so that all ranks clip with one coefficient.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._now: dict[int, PendingNorm] = {}  # by optimizer
        self._before: dict[int, PendingNorm] = {}  # the same before clipping
        self._last: PendingNorm | None = None

    def start(self, sharded: ShardedOptimizer) -> PendingNorm:
        """The norm of an optimizer's gradients; computed once while they stay the same. Collective."""
        key = sharded.first_group
        if key not in self._now:
            gradients = sharded.reduced_gradients(owned=not sharded.local)
            self._now[key] = start_norm(gradients, 2.0, self._agreement, sharded.local)
            self._before.setdefault(key, self._now[key])
        return self._now[key]

    def clipped(self, sharded: ShardedOptimizer) -> None:
        """The optimizer's gradients have been clipped."""
        self._now.pop(sharded.first_group, None)

    def step_begins(self, sharded: ShardedOptimizer) -> None:
        """The norm before clipping is the one of the last step from now on. Collective, if it is not known yet."""
        key = sharded.first_group
        if key not in self._before:
            self._now.pop(key, None)
            self.start(sharded)
        self._last = self._before.pop(key)
        self._now.pop(key, None)

    def forget(self) -> None:
        """Gradients have come or gone."""
        self._now.clear()
        self._before.clear()

    def last(self) -> float | None:
        """The norm of the last step; None before the first."""
        return None if self._last is None else self._last.value()


def clip_by_norm(gradients: ReducedGradients, max_norm: float, norm: float) -> None:
    """Scale gradients of norm `norm` down to `max_norm`, with `torch.nn.utils.clip_grad_norm_`'s coefficient."""
    coefficient = max_norm / (norm + 1e-6)
    if not coefficient >= 1.0:  # NaN must reach the gradients, as it does in torch
        gradients.scale_(coefficient)


def clip_by_value(gradients: ReducedGradients, value: float) -> None:
    """Clamp every gradient element to `[-value, value]`."""
    gradients.clamp_(value)


def unscale(gradients: ReducedGradients, inverse_scale: float, agreement: Agreement) -> bool:
    """Multiply gradients by `inverse_scale` and look for inf and NaN. Collective.

    Returns:
        Whether any rank found a non-finite gradient.
    """
    found = torch.tensor([float(gradients.unscale_(inverse_scale))])
    agreement.maximum(found, "whether a gradient overflowed").wait()
    return bool(found.item())
