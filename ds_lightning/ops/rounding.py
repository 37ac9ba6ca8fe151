"""Stochastic rounding of fp32 to 16 bits: up or down with odds that make the mean exact.

What 16-bit weights need to learn from updates smaller than half of their last digit (Gupta et al., arXiv:1502.02551).
The dice are a hash of the number and a seed and of nothing else: the same at every place, cut, stage and world size,
and again when a step is made again. Equal numbers throw equal dice. Every backend gives the same bits;
`round_stochastic_reference` is the definition.
"""

from __future__ import annotations

from typing import get_args

import torch

from ds_lightning.ops import native
from ds_lightning.ops.reduce import NAMES, Backend

_MASK = 0xFFFFFFFF


def round_stochastic(dst: torch.Tensor, src: torch.Tensor, *, seed: int, backend: Backend = "auto") -> None:
    """Sets `dst` to the values of `src`, each rounded to one of its two neighbours.

    A number that `dst` can hold stays as it is. The chance of the upper neighbour is the distance from the lower one in
    units of theirs, to 16 bits. bf16 never makes something infinite of something finite.

    Args:
        dst: bf16 or fp16, written in place.
        src: fp32, of the shape and on the device of `dst`.
        seed: of the dice; the number of a step, for example. Its low 32 bits count.
        backend: "auto" takes the kernel where there is one for these tensors and the reference elsewhere; "native"
            raises `NativeOpError` if the kernel's module is missing.

    Raises:
        ValueError: for other dtypes, or tensors that do not go together.
    """
    _check(dst, src, backend)
    seed &= _MASK
    module = "_cuda" if dst.is_cuda else "_native"
    packed = dst.is_contiguous() and src.is_contiguous()
    if backend == "native" or (backend == "auto" and packed and _has_kernel(dst.device, module)):
        arguments = (src.data_ptr(), dst.data_ptr(), dst.numel(), NAMES[dst.dtype], seed)
        kernel = native.load(module, "round_stochastic").round_stochastic
        if dst.is_cuda:
            with torch.cuda.device(dst.device):
                kernel(*arguments, torch.cuda.current_stream().cuda_stream)
        else:
            kernel(*arguments)
        native.mark_written(dst)
    else:
        round_stochastic_reference(dst, src, seed=seed)


@torch.no_grad()
def round_stochastic_reference(dst: torch.Tensor, src: torch.Tensor, *, seed: int) -> None:
    """`round_stochastic` in torch's own operations: what every kernel must equal bit for bit."""
    bits = src.contiguous().view(torch.int32).long() & _MASK
    size = bits & 0x7FFFFFFF
    random = _mixed(bits ^ int(_mixed(torch.tensor(seed & _MASK)))) >> 16
    if dst.dtype == torch.bfloat16:
        found = (size + random).clamp_(max=0x7F7FFFFF) >> 16
        infinite, nan = 0x7F80, 0x7FC0
    else:
        exponent = size >> 23
        normal = (size + (random >> 3) >> 13) - (112 << 10)
        gone = torch.where(exponent > 112, 14, (126 - exponent).clamp(max=40))
        mantissa = torch.where(exponent == 0, 0, size & 0x7FFFFF | 0x800000)
        dust = torch.where(gone < 16, random >> (16 - gone).clamp(min=0), random << (gone - 16).clamp(min=0))
        found = torch.where(exponent < 113, mantissa + dust >> gone, normal).clamp_(max=0x7C00)
        infinite, nan = 0x7C00, 0x7E00
    special = torch.where(size > 0x7F800000, nan, infinite)
    found = torch.where(size < 0x7F800000, found, special) | bits >> 16 & 0x8000
    dst.copy_((found - (found >> 15 << 16)).to(torch.int16).view(dst.dtype).view(dst.shape))


def _mixed(h: torch.Tensor) -> torch.Tensor:
    """The finalizer of MurmurHash3, on 32 bits held in 64."""
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK
    return h ^ h >> 16


def _has_kernel(device: torch.device, module: str) -> bool:
    return device.type in ("cpu", "cuda") and native.find(module).module is not None


def _check(dst: torch.Tensor, src: torch.Tensor, backend: Backend) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(get_args(Backend))}.")
    if src.dtype != torch.float32 or dst.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"round_stochastic makes bf16 or fp16 of fp32, not {dst.dtype} of {src.dtype}.")
    if dst.shape != src.shape or dst.device != src.device:
        raise ValueError(
            f"round_stochastic: dst is {tuple(dst.shape)} on {dst.device}, src {tuple(src.shape)} on {src.device}."
        )
    if backend == "native" and not (dst.is_contiguous() and src.is_contiguous()):
        raise ValueError("The kernel of round_stochastic needs contiguous tensors.")
