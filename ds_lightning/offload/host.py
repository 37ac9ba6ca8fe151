"""Host memory for what is offloaded, page-locked where that helps."""

from __future__ import annotations

import warnings

import torch


class HostMemory:
    """Owns the decision how host memory is had.

    Page-locked memory is what a GPU copies from and to without waiting. Where it cannot be had (a limit, WSL), ordinary
    memory serves: copies are slower, results the same.

    Args:
        device: the device that computes and copies; memory is locked for CUDA devices only.
        pin: `pin_memory`.

    Attributes:
        separate: whether it is another memory than the device's.
    """

    def __init__(self, device: torch.device, pin: bool) -> None:
        self.separate = device.type != "cpu"
        self._pin = pin and device.type == "cuda"

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with arbitrary content."""
        with torch.inference_mode(False):
            if self._pin:
                try:
                    return torch.empty(numel, dtype=dtype, pin_memory=True)
                except RuntimeError as error:
                    self._pin = False
                    warnings.warn(
                        f"{numel * dtype.itemsize >> 20} MiB of host memory could not be page-locked ({error}); "
                        "ordinary memory is used from here on, and copies to the GPU are slower. Raise `ulimit -l`, or "
                        "set pin_memory to false.",
                        stacklevel=2,
                    )
            return torch.empty(numel, dtype=dtype)
