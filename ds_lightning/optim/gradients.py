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
        known = iter(torch._foreach_norm(views, norm_type) if views else ())
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
        for device, members in _by_device(self.in_memory).items():
            flag = torch.zeros(1, device=device)
            factor = torch.full((1,), inverse_scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(members, flag, factor)
            found |= bool(flag.item())
        for gradient, place in self.on_disk:
            found |= not bool(gradient.norm(place, 2.0).isfinite())
            gradient.change(place, ("mul", inverse_scale))
        return found


def _by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups
