"""The seam between states as an optimizer keeps them and as everybody else knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ds_lightning.offload.stored import Values
from ds_lightning.ops.blocks import Blocks


class StateCodec(Protocol):
    """Translates the state of one flat tensor; checkpoints, `state_dict` and users see decoded states alone.

    What was decoded and is encoded again, with the same blocks, is the same bit for bit.
    """

    def block_size(self, group: Mapping[str, Any]) -> int:
        """Elements that are encoded together, for parameters of a group."""

    def decoded(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state as `torch.optim` has it; its own values stay as they are.

        Args:
            state: encoded, decoded already, or empty.

        Returns:
            What belongs to elements is 1-D, and decoded when it is read; all else is as it is.
        """

    def encoded(self, state: Mapping[str, Any], blocks: Blocks) -> dict[str, Any]:
        """The inverse, for a state whose values are in memory: new tensors where there is something to encode."""


def decoded_values(codec: StateCodec | None, state: Mapping[str, Any]) -> Mapping[str, Any | Values]:
    """A state as `torch.optim` has it, whatever keeps it."""
    return state if codec is None else codec.decoded(state)
