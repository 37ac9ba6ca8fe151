"""What is done to the reduced gradients of an optimizer between backward and step, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ds_lightning.offload.gradients import SwappedGradient


class OnDisk(NamedTuple):
    """A piece of a gradient on disk."""

    gradient: SwappedGradient
    place: int


class ReducedGradients:
    """Disjoint ranges of reduced gradients on this rank, in a fixed order.

    Args:
        parts: views of what is in memory, and pieces on disk.
    """

    def __init__(self, parts: Sequence[torch.Tensor | OnDisk]) -> None:
        self._parts = parts

    @property
    def in_memory(self) -> list[torch.Tensor]:
        """The views."""
        return [part for part in self._parts if isinstance(part, torch.Tensor)]

    @property
    def on_disk(self) -> list[OnDisk]:
        """The pieces."""
        return [part for part in self._parts if not isinstance(part, torch.Tensor)]

    def norms(self, norm_type: float) -> list[torch.Tensor]:
        """The norm of each part, 0-dim, in order."""
        views = self.in_memory
        known = iter(_norms(views, norm_type))
        return [
            next(known) if isinstance(part, torch.Tensor) else part.gradient.norm(part.place, norm_type)
            for part in self._parts
        ]

    def scale_(self, factor: float) -> None:
        """Multiply all elements."""
        views = self.in_memory
        if views:
            torch._foreach_mul_(views, factor)
        for gradient, place in self.on_disk:
            gradient.change(place, ("mul", factor))

    def clamp_(self, bound: float) -> None:
        """Clamp all elements to `[-bound, bound]`."""
        views = self.in_memory
        if views:
            torch._foreach_clamp_min_(views, -bound)
            torch._foreach_clamp_max_(views, bound)
        for gradient, place in self.on_disk:
            gradient.change(place, ("clamp", bound))

    def unscale_(self, inverse_scale: float) -> bool:
        """Multiply all elements by `inverse_scale`; whether some were inf or NaN."""
        found = False
        for (device, _), members in _by_kind(self.in_memory).items():
            flag = torch.zeros(1, device=device)
            factor = torch.full((1,), inverse_scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(members, flag, factor)
            torch.autograd.graph.increment_version(members)  # this operation does not do so itself
            found |= bool(flag.item())
        for gradient, place in self.on_disk:
            found |= not bool(gradient.norm(place, 2.0).isfinite())
            gradient.change(place, ("mul", inverse_scale))
        return found


def _norms(views: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """In fp32 at least: a norm of 16-bit elements has more digits than they have."""
    found: dict[int, torch.Tensor] = {}
    for (_, dtype), members in _by_kind(views).items():
        wide = torch.float32 if dtype.itemsize == 2 else None
        found.update(zip(map(id, members), torch._foreach_norm(members, norm_type, dtype=wide), strict=True))
    return [found[id(view)] for view in views]


def _by_kind(tensors: Sequence[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups
