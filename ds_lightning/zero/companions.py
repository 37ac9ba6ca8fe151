"""What accompanies the parameters of an engine, element by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch


class Companion(Protocol):
    """One value for each element of some units, which belongs to no optimizer. See `ZeroEngine.accompany`."""

    def leave(self, units: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """These units are about to go.

        Returns:
            Full values by name of the parameter, for as long as it takes. Collective.
        """

    def enter(self, units: Sequence[int], values: Mapping[str, torch.Tensor]) -> None:
        """These units have come, with what `leave` gave for their parameters."""
