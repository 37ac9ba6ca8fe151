"""Where the inputs of a checkpointed call wait for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ds_lightning.errors import RecomputationError


class Kept(Protocol):
    """Tensors that were put away."""

    def restore(self) -> list[torch.Tensor]:
        """The values, on their device, in their shape; may be asked for more than once."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""


class InputStore(Protocol):
    """A way of putting tensors away."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> Kept:
        """Put tensors away until the returned object is dropped."""


class _Save(torch.autograd.Function):
    """Saves tensors as an operation does: checked for changes in place, and seen by hooks around (a checkpoint)."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("nothing depends on this")


class _Whole:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.nbytes = storage_bytes(tensors)
        self._anchored = None
        if tensors:
            anchor = torch.empty(0, requires_grad=True)
            self._anchored = _Save.apply(anchor, *(tensor.detach() for tensor in tensors))

    def restore(self) -> list[torch.Tensor]:
        if self._anchored is None:
            return []
        try:
            return list(self._anchored.grad_fn.saved_tensors)
        except RuntimeError as error:
            if "inplace operation" in str(error):
                raise changed_in_place() from error
            raise


class WholeStore:
    """Inputs stay where they are: nothing is copied."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> Kept:
        """See `InputStore`."""
        return _Whole(tensors)


def changed_in_place() -> RecomputationError:
    """An input is not what it was when the forward saw it."""
    return RecomputationError(
        "An input of a checkpointed call was changed in place between its forward and its backward, so the forward "
        "cannot be computed again. Change a copy instead (x = x + 1 in place of x += 1), or leave this call out of "
        "activation checkpointing."
    )


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors, what they share counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if is_plain(t)}.values())


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a window on a storage."""
    return tensor.layout is torch.strided and not tensor.is_nested
