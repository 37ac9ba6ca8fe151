"""Symmetric quantization in blocks, to 8 or 4 bits: what ZeRO++ (arXiv:2306.10209) sends.

The elements of a tensor, in their order, are cut into blocks of `block`, of which the last may be
shorter. A block has one fp32 scale, `max|x| / (2**(bits-1) - 1)`, and its elements become
`x / scale`, rounded to the nearest integer, ties to even. Multiplied by the scale again they are off
by half a step at most (and what is within a rounding of the largest fp32 number may come back as
infinity). Eight bits are stored as int8; of four bits, two to a byte, the even element in
the low half.

A block that holds anything not finite gets the scale NaN, and with it NaN everywhere when it is
dequantized: an overflow is seen by whoever receives it and by nobody else's block. Where the scale
would not be a normal fp32 number (max|x| below 1.5e-36 with 8 bits, all zeros included) it is 0.
In both cases the payload is zeros.

Every backend gives the same bits; `quantize_reference` and `dequantize_reference` are the definition.
"""

from typing import Literal, get_args

import torch

from ds_lightning.ops import native
from ds_lightning.ops.reduce import NAMES, Backend

Bits = Literal[8, 4]

_DTYPES = tuple(dtype for dtype in NAMES if dtype != torch.float64)


def payload_bytes(numel: int, bits: Bits) -> int:
    """Bytes that hold `numel` quantized elements, scales not counted."""
    return numel if bits == 8 else -(-numel // 2)


def scale_count(numel: int, block: int) -> int:
    """Blocks, and so scales, of `numel` elements."""
    return -(-numel // block)


def quantize(
    dst: torch.Tensor,
    scales: torch.Tensor,
    src: torch.Tensor,
    *,
    block: int,
    bits: Bits,
    backend: Backend = "auto",
) -> None:
    """Sets `dst` and `scales` to `src`, quantized.

    Args:
        dst: uint8 of shape (`payload_bytes(src.numel(), bits)`,); written in place.
        scales: fp32 of shape (`scale_count(src.numel(), block)`,); written in place.
        src: Of any shape; fp32, bf16 or fp16. All tensors are on one device.
        block: Elements that share a scale, at least 1; even for 4 bits.
        bits: 8 or 4.
        backend: "auto" takes the kernel where there is one for these tensors and the reference
            elsewhere; "native" raises `NativeOpError` if the kernel's module is missing.
    """
    _check("quantize", dst, scales, src, block, bits, backend)
    if not _takes_kernel((dst, scales, src), backend):
        quantize_reference(dst, scales, src, block=block, bits=bits)
        return
    pointers = (src.data_ptr(), dst.data_ptr(), scales.data_ptr())
    arguments = (*pointers, src.numel(), block, bits, NAMES[src.dtype])
    if src.is_cuda:
        with torch.cuda.device(src.device):
            stream = torch.cuda.current_stream().cuda_stream
            native.load("_cuda", "quantize").quantize(*arguments, stream)
    else:
        native.load("_native", "quantize").quantize(*arguments)
    native.mark_written(dst, scales)


def dequantize(
    dst: torch.Tensor,
    src: torch.Tensor,
    scales: torch.Tensor,
    *,
    block: int,
    bits: Bits,
    accumulate: bool = False,
    backend: Backend = "auto",
) -> None:
    """Sets `dst` to what `quantize` left in `src` and `scales`, or adds that to it.

    Args:
        dst: Of any shape; fp32, bf16 or fp16. Written in place; products and the sum, if any, are
            built in fp32 and rounded once.
        src: uint8 of shape (`payload_bytes(dst.numel(), bits)`,).
        scales: fp32 of shape (`scale_count(dst.numel(), block)`,). All tensors are on one device.
        block: As given to `quantize`.
        bits: As given to `quantize`.
        accumulate: Whether to add to what `dst` holds.
        backend: As for `quantize`.
    """
    _check("dequantize", src, scales, dst, block, bits, backend)
    if not _takes_kernel((src, scales, dst), backend):
        dequantize_reference(dst, src, scales, block=block, bits=bits, accumulate=accumulate)
        return
    pointers = (src.data_ptr(), scales.data_ptr(), dst.data_ptr())
    arguments = (*pointers, dst.numel(), block, bits, NAMES[dst.dtype], accumulate)
    if dst.is_cuda:
        with torch.cuda.device(dst.device):
            stream = torch.cuda.current_stream().cuda_stream
            native.load("_cuda", "dequantize").dequantize(*arguments, stream)
    else:
        native.load("_native", "dequantize").dequantize(*arguments)
    native.mark_written(dst)


@torch.no_grad()
def quantize_reference(dst: torch.Tensor, scales: torch.Tensor, src: torch.Tensor, *, block: int, bits: Bits) -> None:
    """`quantize` in torch's own operations: what every kernel must equal bit for bit."""
    blocks = torch.zeros(scales.numel() * block, dtype=torch.float32, device=src.device)
    blocks[: src.numel()] = src.flatten()
    blocks = blocks.view(-1, block)
    # Beyond every finite number, so that it is found by the maximum, which loses no NaN either.
    found = blocks.abs().amax(dim=1) / (127 if bits == 8 else 7)
    found = torch.where(found < torch.finfo(torch.float32).tiny, 0.0, found)
    scales.copy_(torch.where(found.isfinite(), found, torch.nan))
    steps = (blocks / scales.unsqueeze(1)).round()
    steps = torch.where(scales.unsqueeze(1) > 0, steps, 0.0).flatten()[: src.numel()].to(torch.int8)
    dst.copy_(steps.view(torch.uint8) if bits == 8 else _pairs_to_bytes(steps))


@torch.no_grad()
def dequantize_reference(
    dst: torch.Tensor,
    src: torch.Tensor,
    scales: torch.Tensor,
    *,
    block: int,
    bits: Bits,
    accumulate: bool = False,
) -> None:
    """`dequantize` in torch's own operations: what every kernel must equal bit for bit."""
    steps = src.view(torch.int8) if bits == 8 else _bytes_to_pairs(src)[: dst.numel()]
    values = steps.float() * scales.repeat_interleave(block)[: dst.numel()]
    values = values.view(dst.shape)
    if accumulate:
        dst += values
    else:
        dst.copy_(values)


def _pairs_to_bytes(steps: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(steps.numel() + steps.numel() % 2, dtype=torch.uint8, device=steps.device)
    padded[: steps.numel()] = steps.view(torch.uint8) & 15
    return padded[0::2] | (padded[1::2] << 4)


def _bytes_to_pairs(src: torch.Tensor) -> torch.Tensor:
    halves = torch.stack((src & 15, src >> 4), dim=1).flatten().to(torch.int8)
    return (halves ^ 8) - 8


def _takes_kernel(tensors: tuple[torch.Tensor, ...], backend: Backend) -> bool:
    if backend != "auto":
        return backend == "native"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    module = {"cpu": "_native", "cuda": "_cuda"}.get(tensors[0].device.type)
    return module is not None and native.find(module).module is not None


def _check(
    op: str,
    payload: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    block: int,
    bits: Bits,
    backend: Backend,
) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(get_args(Backend))}.")
    if bits not in get_args(Bits):
        raise ValueError(f"{op} knows 8 and 4 bits, not {bits!r}.")
    if block < 1 or (bits == 4 and block % 2 != 0):
        raise ValueError(f"{op}: block={block} is not a positive number, which is even for 4 bits.")
    if values.dtype not in _DTYPES:
        raise ValueError(f"{op} knows {', '.join(map(str, _DTYPES))}, not {values.dtype}.")
    numel = values.numel()
    for name, tensor, dtype, count in (
        ("the payload", payload, torch.uint8, payload_bytes(numel, bits)),
        ("scales", scales, torch.float32, scale_count(numel, block)),
    ):
        if tensor.dtype != dtype or tensor.shape != (count,):
            raise ValueError(
                f"{op}: for {numel} elements {name} must be {dtype} of shape ({count},), "
                f"not {tensor.dtype} of {tuple(tensor.shape)}."
            )
        if tensor.device != values.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, but the values are on {values.device}.")
    if backend == "native" and not all(tensor.is_contiguous() for tensor in (payload, scales, values)):
        raise ValueError(f"The kernel of {op} needs contiguous tensors.")
