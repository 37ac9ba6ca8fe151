"""Buffers of modules in a dtype of their own."""

from __future__ import annotations

import torch
from torch import nn


class CastBuffers:
    """Floating buffers of a module, cast from the values that the user gave, whatever happens to the module meanwhile.

    A buffer that several modules share stays shared. Integers and booleans (counts, masks) stay as they are.

    Args:
        module: whose buffers are taken.
        dtype: `data_types.buffer_dtype`.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        cast: dict[int, torch.Tensor] = {}
        self._held: list[tuple[nn.Module, str, torch.Tensor]] = []
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    self._held.append((owner, name, cast.setdefault(id(buffer), buffer.to(dtype))))

    def put(self) -> None:
        """Let the module have them."""
        for owner, name, buffer in self._held:
            owner._buffers[name] = buffer
