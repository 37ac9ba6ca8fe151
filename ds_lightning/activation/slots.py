"""Slices of inputs in memory that is allocated once (`contiguous_memory_optimization`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_lightning.activation.inputs import Kept
from ds_lightning.errors import RecomputationError


class _Column:
    """The slots of one argument position: as many as there are checkpointed calls in a forward."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots
        self.free = list(range(len(slots) - 1, -1, -1))

    @property
    def unused(self) -> bool:
        return len(self.free) == len(self.slots)


class _Slotted:
    def __init__(self, tensors: Sequence[torch.Tensor], taken: list[tuple[_Column, int, torch.Tensor]]) -> None:
        self._places = [(tensor.device, tensor.shape) for tensor in tensors]
        self._taken = taken
        self.nbytes = sum(slot.numel() * slot.element_size() for _, _, slot in taken)

    def restore(self) -> list[torch.Tensor]:
        # A slot is written again only once nothing of this call is left, so on its own device it is lent out.
        return [
            slot.detach().to(device, non_blocking=True).view(shape)
            for (device, shape), (_, _, slot) in zip(self._places, self._taken, strict=True)
        ]

    def __del__(self) -> None:
        for column, index, _ in self._taken:
            column.free.append(index)


class SlotStore:
    """Inputs are copied into slots, one column of them per argument position, which live as long as the store.

    What is restored is the slot itself and must not be changed; it holds what was cut from inputs, see `slices.py`.

    Args:
        number: slots per column (`number_checkpoints`).
        on_host: slots lie in pinned host memory.
    """

    def __init__(self, number: int, on_host: bool = False) -> None:
        self._number = number
        self._on_host = on_host
        self._columns: dict[tuple[int, torch.dtype, torch.device], _Column] = {}

    def keep(self, tensors: Sequence[torch.Tensor]) -> Kept:
        """See `InputStore`.

        Raises:
            RecomputationError: when more calls wait for backward than there are slots, or when sizes differ.
        """
        taken: list[tuple[_Column, int, torch.Tensor]] = []
        kept = _Slotted(tensors, taken)
        for position, tensor in enumerate(tensors):
            column = self._column(position, tensor)
            if not column.free:
                raise RecomputationError(
                    f"activation_checkpointing.number_checkpoints={self._number}, but more checkpointed calls than "
                    "that wait for their backward. Set it to the number of checkpointed calls of a forward, and call "
                    "reset() after a forward without a backward."
                )
            index = column.free.pop()
            slot = column.slots[index, : tensor.numel()]
            taken.append((column, index, slot))
            slot.copy_(tensor.detach().reshape(-1), non_blocking=True)
        kept.nbytes = sum(slot.numel() * slot.element_size() for _, _, slot in taken)
        return kept

    def _column(self, position: int, tensor: torch.Tensor) -> _Column:
        key = (position, tensor.dtype, tensor.device)
        column = self._columns.get(key)
        length = tensor.numel()
        if column is not None and length > column.slots.shape[1] and not column.unused:
            raise RecomputationError(
                f"contiguous_memory_optimization has slots of {column.slots.shape[1]} elements for argument "
                f"{position}, but a call brings {length}. All checkpointed calls of a forward must have inputs of one "
                "size; switch it off otherwise."
            )
        if column is None or length > column.slots.shape[1]:
            pinned = self._on_host and tensor.is_cuda
            device = torch.device("cpu") if self._on_host else tensor.device
            column = _Column(torch.empty(self._number, length, dtype=tensor.dtype, device=device, pin_memory=pinned))
            self._columns[key] = column
        return column
