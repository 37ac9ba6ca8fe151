"""Where the rest of a module lives: what is not sharded."""

from __future__ import annotations

import torch
from torch import nn

from ds_lightning.topology import Topology


def move_all_but_parameters(module: nn.Module, device: torch.device) -> None:
    """Move buffers and metrics; parameters move when they are sharded, one unit at a time."""
    if device.type == "cpu":
        return
    from torchmetrics import Metric

    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
        if hasattr(child, "_device"):
            child._device = device  # type: ignore[assignment]


def equalize(module: nn.Module, topology: Topology) -> None:
    """Give every rank the parameters and buffers of rank 0. Collective."""
    if topology.world_size == 1:
        return
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.numel():
                values = tensor.detach().contiguous()
                torch.distributed.broadcast(values, group_src=0, group=topology.data_group)
                tensor.copy_(values)
