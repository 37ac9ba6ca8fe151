"""Inputs of checkpointed calls, shared out over a model-parallel group (`partition_activations`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ds_lightning.activation.inputs import InputStore, Kept, WholeStore


class _Sliced:
    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        places: Sequence[int],
        slices: Kept,
        rest: Kept,
        group: dist.ProcessGroup,
    ) -> None:
        self._shapes = {place: tensors[place].shape for place in places}
        self._count = len(tensors)
        self._slices = slices
        self._rest = rest
        self._group = group
        self.nbytes = slices.nbytes + rest.nbytes

    def restore(self) -> list[torch.Tensor]:
        whole = iter(self._rest.restore())
        mine = iter(self._slices.restore())
        return [
            self._gathered(next(mine), self._shapes[place]) if place in self._shapes else next(whole)
            for place in range(self._count)
        ]

    def _gathered(self, mine: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        size = dist.get_world_size(self._group)
        flat = mine.new_empty(size * len(mine))
        dist.all_gather(list(flat.chunk(size)), mine, group=self._group)
        return flat[: shape.numel()].view(shape)


class SlicedStore:
    """Each rank of a group that computes on the same inputs keeps a part of each; all of them restore it together.

    Floating-point inputs with at least one element per rank are flattened, padded with zeros and cut into equal
    slices; inputs that carry a true attribute `no_checkpointing` and all others stay whole.

    Args:
        group: the model-parallel group.
        slices: where slices are kept.
    """

    def __init__(self, group: dist.ProcessGroup, slices: InputStore) -> None:
        self._group = group
        self._slices = slices
        self._whole = WholeStore()

    def keep(self, tensors: Sequence[torch.Tensor]) -> Kept:
        """See `InputStore`."""
        size = dist.get_world_size(self._group)
        places = [
            place
            for place, tensor in enumerate(tensors)
            if tensor.is_floating_point()
            and tensor.layout is torch.strided
            and tensor.numel() >= size
            and not getattr(tensor, "no_checkpointing", False)
        ]
        slices = [self._mine(tensors[place], size) for place in places]
        rest = [tensor for place, tensor in enumerate(tensors) if place not in places]
        return _Sliced(tensors, places, self._slices.keep(slices), self._whole.keep(rest), self._group)

    def _mine(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        length = -(-flat.numel() // size)
        part = flat[dist.get_rank(self._group) * length :][:length]
        mine = flat.new_zeros(length)
        mine[: len(part)] = part
        return mine
