"""Numbers in 8 bits, in blocks, by the dynamic map of 8-bit optimizers (Dettmers et al., arXiv:2110.02861).

A block has one fp32 scale, the largest magnitude in it, and its elements become codes of `x / scale`. The map has seven
decades from 1e-7 to 1; decade `i`, `[10^(i-7), 10^(i-6))`, is cut into `2^i` bins of one width (twice as many without
a sign), and a code stands for the middle of its bin: what is small keeps its order of magnitude, what is large some two
digits. Code 0 is zero.

    signed:    int8 in [-127, 127]; the last bin, from 0.9859375 on, stands for 1
    unsigned:  uint8; codes 1 to 254 are bins, 255 is 1 and takes what is nearer to 1 than to the last bin's middle

Both maps hold the block's largest element exactly (the published signed map lacks -1), so that what was dequantized is
quantized again to the same codes and scales. What is below 1e-7 of the scale becomes zero, but in the unsigned map,
where only zero does: a second moment is divided by.

A block that holds anything not finite gets the scale NaN, and with it NaN everywhere. Where the scale would not be a
normal fp32 number it is 0. In both cases the codes are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_DECADES = 7
_POWERS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_TOP = 0.9982421875
"""From here on 1 is nearer than the middle of the last bin of 256 that end there."""


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """How a flat tensor is cut into blocks.

    Attributes:
        size: most elements in a block.
        borders: int64 on CPU, `[segments + 1]`, from 0 to the number of elements, increasing: each segment begins with
            a block of its own, and only its last block may be shorter than `size`.
    """

    size: int
    borders: Tensor

    @staticmethod
    def whole(numel: int, size: int) -> Blocks:
        """One segment; none where there are no elements."""
        return Blocks(size, torch.tensor([0, numel] if numel else [0]))

    @property
    def numel(self) -> int:
        """Elements."""
        return int(self.borders[-1])

    @property
    def count(self) -> int:
        """Blocks, and so scales."""
        return int(self._counts().sum())

    def _counts(self) -> Tensor:
        return (self.borders.diff() + (self.size - 1)) // self.size

    def starts(self) -> Tensor:
        """The first element of each block, and the number of elements at the end; int64, `[count + 1]`."""
        counts = self._counts()
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return torch.cat([self.borders[:-1].repeat_interleave(counts) + within * self.size, self.borders[-1:]])


@torch.no_grad()
def quantize_blocks(values: Tensor, blocks: Blocks, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of values.

    Args:
        values: 1-D, fp32 (other dtypes are converted); at least 0 where not `signed`.
        blocks: how to cut them.
        signed: which map.

    Returns:
        New tensors on the same device: codes, int8 or uint8, one for each element, and scales, fp32, `[blocks.count]`.
    """
    values = values.detach().float()
    starts = blocks.starts().to(values.device)
    lengths = starts.diff()
    magnitudes = values.abs()
    # The bits of magnitudes are in their order, with NaN beyond infinity.
    largest = torch.segment_reduce(magnitudes.double(), "max", lengths=lengths, unsafe=True) if len(lengths) else starts
    scales = largest.float() if len(lengths) else magnitudes.new_empty(0)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    sound = scales > 0
    inverse = torch.where(sound, 1.0 / scales, 0.0).repeat_interleave(lengths)
    x = torch.where(sound.repeat_interleave(lengths), magnitudes, 0.0) * inverse
    slopes, offsets = (each.to(values.device) for each in _lines())
    decade = torch.bucketize(x, torch.tensor(_POWERS[:-1], device=values.device), right=True)
    u = x * slopes[decade] + offsets[decade]
    if signed:
        codes = u.to(torch.int32).clamp_(max=127)
        return torch.where(values < 0, -codes, codes).to(torch.int8), scales
    codes = (u * 2).to(torch.int32).sub_(1).clamp_(max=254)
    codes = torch.where(x >= _TOP, 255, codes)
    present = (magnitudes > 0) & (inverse > 0)
    return torch.where(present, codes.clamp(min=1), 0).to(torch.uint8), scales


@torch.no_grad()
def dequantize_blocks(codes: Tensor, scales: Tensor, blocks: Blocks, start: int = 0, stop: int | None = None) -> Tensor:
    """Elements `[start, stop)` of what `quantize_blocks` was given, fp32, a new tensor.

    Args:
        codes: of these elements alone.
        scales: of all blocks.
        blocks: of the whole.
        start: first element.
        stop: first element behind them; all by default.
    """
    starts = blocks.starts()
    stop = int(starts[-1]) if stop is None else stop
    lengths = starts.clamp(start, stop).diff().to(codes.device)
    signed = codes.dtype == torch.int8
    table = _signed_map() if signed else _unsigned_map()
    places = codes.to(torch.int32)
    values = table.to(codes.device)[places + 127 if signed else places]
    return values.mul_(scales.repeat_interleave(lengths))


@cache
def _signed_map() -> Tensor:
    """What codes stand for, fp32, `[255]`, from -1 to 1."""
    values = _middles(torch.arange(128) + 0.5)
    values[0], values[127] = 0.0, 1.0
    return torch.cat([-values[1:].flip(0), values])


@cache
def _unsigned_map() -> Tensor:
    """What codes stand for, fp32, `[256]`, from 0 to 1."""
    values = _middles(torch.arange(256) * 0.5 + 0.75)
    values[0], values[255] = 0.0, 1.0
    return values


def _middles(stretched: Tensor) -> Tensor:
    """The inverse of the lines below, in the kernels' arithmetic: decade and place by exponent and fraction."""
    half, exponent = stretched.frexp()
    decade = (exponent - 1).clamp(0, _DECADES - 1).long()
    return torch.tensor(_POWERS)[decade] * (half * 2 * 0.9 - 0.8)


@cache
def _lines() -> tuple[Tensor, Tensor]:
    """Slopes and offsets, fp32, `[7]`: `x slope + offset` runs from `2^i` to `2^(i+1)` over decade `i`."""
    slopes = [2.0**i / (0.9 * _POWERS[i]) for i in range(_DECADES)]
    offsets = [2.0**i * 0.8 / 0.9 for i in range(_DECADES)]
    return torch.tensor(slopes, dtype=torch.float64).float(), torch.tensor(offsets, dtype=torch.float64).float()
