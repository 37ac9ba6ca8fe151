"""Keeps module buffers equal to rank 0's, as DDP does."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from ds_lightning.comm.collectives import Collectives


class BufferSync:
    """Broadcasts all buffers of a module from rank 0, in one call per dtype."""

    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        self._collectives = collectives
        self._due = True
        # Walking the modules of a large model takes longer than the broadcast of a few buffers.
        self._owners = [(child, name) for child in module.modules() for name in child._buffers]

    def before_forward(self, will_reduce: bool) -> None:
        """Called before each forward. As in DDP, a forward whose gradients stay local sends nothing the next time."""
        if self._due:
            self.run()
        self._due = will_reduce

    def run(self) -> None:
        """Broadcast now. Collective."""
        topology = self._collectives.topology
        if topology.world_size == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for owner, name in self._owners:
            buffer = owner._buffers.get(name)
            if buffer is None:
                continue
            if buffer.numel() and not buffer.is_sparse and buffer.device.type == topology.device.type:
                by_dtype[buffer.dtype].append(buffer)
        with torch.no_grad():
            for buffers in by_dtype.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                self._collectives.broadcast(flat, "buffers")
                pieces = flat.split([buffer.numel() for buffer in buffers])
                for buffer, piece in zip(buffers, pieces, strict=True):
                    buffer.copy_(piece.view(buffer.shape))
