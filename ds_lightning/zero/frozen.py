"""Frozen weights kept as int8, as for LoRA (`zero_quantized_nontrainable_weights`).

[Note: quantized once] Quantizing what was dequantized gives the same integers, but the scale may be another one by a
rounding. So values are quantized twice when they come in: what is kept then survives reading and writing bit for bit,
and a checkpoint, which holds the dequantized values, restores what it was made from.
"""

from __future__ import annotations

import torch

from ds_lightning.comm.quantized import BLOCK
from ds_lightning.ops.quantize import dequantize, quantize, scale_count


class QuantizedChunk:
    """Owns this rank's values of one frozen unit: an int8 each, and an fp32 scale for a block of `BLOCK`.

    A value is off by at most `absmax / 254` of its block and a rounding to `dtype`, once and for all.

    Args:
        values: `[chunk]`, a multiple of `BLOCK`.
        dtype: in which values are read, and were computed.

    Attributes:
        payload: `[chunk]`, uint8.
        scales: `[chunk / BLOCK]`, fp32.
    """

    def __init__(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        self.dtype = dtype
        with torch.inference_mode(False):
            self.payload = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
            self.scales = torch.empty(scale_count(values.numel(), BLOCK), device=values.device)
        self._take(0, values)

    def _take(self, first: int, values: torch.Tensor) -> None:
        """Keep the values of whole blocks, see [Note: quantized once]."""
        payload = self.payload[first * BLOCK : first * BLOCK + values.numel()]
        scales = self.scales[first : first + values.numel() // BLOCK]
        values = values.to(self.dtype, copy=True)
        quantize(payload, scales, values, block=BLOCK, bits=8)
        dequantize(values, payload, scales, block=BLOCK, bits=8)
        quantize(payload, scales, values, block=BLOCK, bits=8)

    def copy_to(self, target: torch.Tensor) -> None:
        """Fill `target`, `[chunk]` of any floating dtype up to fp32."""
        dequantize(target, self.payload, self.scales, block=BLOCK, bits=8)

    def read(self) -> torch.Tensor:
        """The values, a new tensor."""
        with torch.inference_mode(False):
            values = torch.empty(self.payload.numel(), dtype=self.dtype, device=self.payload.device)
        self.copy_to(values)
        return values

    def write(self, start: int, values: torch.Tensor) -> None:
        """Change values from element `start` on. What shares a block with them is quantized with them."""
        stop = start + values.numel()
        first, last = start // BLOCK, -(-stop // BLOCK)
        part = slice(first * BLOCK, last * BLOCK)
        blocks = torch.empty((last - first) * BLOCK, dtype=self.dtype, device=self.payload.device)
        dequantize(blocks, self.payload[part], self.scales[first:last], block=BLOCK, bits=8)
        blocks[start - first * BLOCK : stop - first * BLOCK].copy_(values.reshape(-1))
        self._take(first, blocks)

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.payload.nbytes + self.scales.nbytes
