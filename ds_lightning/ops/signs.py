"""One bit per element: the signs of a tensor as bytes, and back as plus or minus a scale.

What 1-bit compression sends (1-bit Adam, arXiv:2102.02888). Element i is bit `i % 8`, the lowest
first, of byte `i // 8`: 1 for x >= 0, also for -0, and 0 below and for NaN, which a sign cannot tell.
The spare bits of the last byte are 0. Every backend gives the same bits; `pack_signs_reference` and
`unpack_signs_reference` are the definition.
"""

from typing import get_args

import torch

from ds_lightning.ops import native
from ds_lightning.ops.reduce import NAMES, Backend


def packed_bytes(numel: int) -> int:
    """Bytes that hold `numel` signs."""
    return -(-numel // 8)


def pack_signs(dst: torch.Tensor, src: torch.Tensor, *, backend: Backend = "auto") -> None:
    """Sets `dst` to the signs of `src`.

    Args:
        dst: uint8 of shape (`packed_bytes(src.numel())`,), on the device of `src`; written in place.
        src: Of any shape, read in the order of its elements; fp32, bf16, fp16 or fp64.
        backend: "auto" takes the kernel where there is one for these tensors and the reference
            elsewhere; "native" raises `NativeOpError` if the kernel's module is missing.
    """
    _check("pack_signs", dst, src, backend)
    if _takes_kernel(dst, src, backend):
        arguments = (src.data_ptr(), dst.data_ptr(), src.numel(), NAMES[src.dtype])
        if src.is_cuda:
            with torch.cuda.device(src.device):
                stream = torch.cuda.current_stream().cuda_stream
                native.load("_cuda", "pack_signs").pack_signs(*arguments, stream)
        else:
            native.load("_native", "pack_signs").pack_signs(*arguments)
        native.mark_written(dst)
    else:
        pack_signs_reference(dst, src)


def unpack_signs(
    dst: torch.Tensor,
    src: torch.Tensor,
    *,
    scale: float | torch.Tensor = 1.0,
    accumulate: bool = False,
    backend: Backend = "auto",
) -> None:
    """Sets each element of `dst` to `scale` where its bit is 1 and to `-scale` elsewhere, or adds that.

    Args:
        dst: Of any shape; fp32, bf16, fp16 or fp64. Written in place; the sum, if any, is built in
            fp32 (fp64 for fp64) and rounded once.
        src: uint8 of shape (`packed_bytes(dst.numel())`,), on the device of `dst`.
        scale: A number, or an fp32 tensor of one element on the device of `dst`; then nothing waits
            for the device.
        accumulate: Whether to add to what `dst` holds.
        backend: As for `pack_signs`.
    """
    _check("unpack_signs", src, dst, backend)
    if isinstance(scale, torch.Tensor):
        _check_scale(scale, dst)
    if _takes_kernel(src, dst, backend):
        _unpack_signs_native(dst, src, scale, accumulate)
    else:
        unpack_signs_reference(dst, src, scale=scale, accumulate=accumulate)


@torch.no_grad()
def pack_signs_reference(dst: torch.Tensor, src: torch.Tensor) -> None:
    """`pack_signs` in torch's own operations: what every kernel must equal bit for bit."""
    bits = torch.zeros(dst.numel() * 8, dtype=torch.uint8, device=src.device)
    bits[: src.numel()] = (src >= 0).flatten()
    dst.zero_()
    for k in range(8):
        dst |= bits[k::8] << k


@torch.no_grad()
def unpack_signs_reference(
    dst: torch.Tensor, src: torch.Tensor, *, scale: float | torch.Tensor = 1.0, accumulate: bool = False
) -> None:
    """`unpack_signs` in torch's own operations: what every kernel must equal bit for bit."""
    shifts = torch.arange(8, dtype=torch.uint8, device=src.device)
    bits = (src.unsqueeze(1) >> shifts & 1).flatten()[: dst.numel()].bool()
    sum_dtype = torch.float64 if dst.dtype == torch.float64 else torch.float32
    plus = torch.as_tensor(scale, dtype=sum_dtype, device=dst.device).reshape(())
    values = torch.where(bits, plus, -plus).view(dst.shape)
    if accumulate:
        dst += values
    else:
        dst.copy_(values)


def _unpack_signs_native(dst: torch.Tensor, src: torch.Tensor, scale: float | torch.Tensor, accumulate: bool) -> None:
    on_device = dst.is_cuda and isinstance(scale, torch.Tensor)
    number = 1.0 if on_device else float(scale)
    arguments = (src.data_ptr(), dst.data_ptr(), dst.numel(), number, NAMES[dst.dtype], accumulate)
    if dst.is_cuda:
        pointer = scale.data_ptr() if isinstance(scale, torch.Tensor) else 0
        with torch.cuda.device(dst.device):
            stream = torch.cuda.current_stream().cuda_stream
            native.load("_cuda", "unpack_signs").unpack_signs(*arguments, stream, scale_ptr=pointer)
    else:
        native.load("_native", "unpack_signs").unpack_signs(*arguments)
    native.mark_written(dst)


def _takes_kernel(packed: torch.Tensor, values: torch.Tensor, backend: Backend) -> bool:
    if backend != "auto":
        return backend == "native"
    if not packed.is_contiguous() or not values.is_contiguous():
        return False
    if values.device.type == "cpu":
        return native.find("_native").module is not None
    if values.device.type == "cuda":
        return native.find("_cuda").module is not None and values.dtype != torch.float64
    return False


def _check(op: str, packed: torch.Tensor, values: torch.Tensor, backend: Backend) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(get_args(Backend))}.")
    if values.dtype not in NAMES:
        raise ValueError(f"{op} knows {', '.join(map(str, NAMES))}, not {values.dtype}.")
    if packed.dtype != torch.uint8:
        raise ValueError(f"{op} packs signs into torch.uint8, not {packed.dtype}.")
    shape = (packed_bytes(values.numel()),)
    if packed.shape != shape:
        raise ValueError(f"{op}: {values.numel()} signs are packed in shape {shape}, not {tuple(packed.shape)}.")
    if packed.device != values.device:
        raise ValueError(f"{op}: packed signs are on {packed.device}, but values are on {values.device}.")
    if backend == "native" and not (packed.is_contiguous() and values.is_contiguous()):
        raise ValueError(f"The kernel of {op} needs contiguous tensors.")


def _check_scale(scale: torch.Tensor, dst: torch.Tensor) -> None:
    if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != dst.device:
        raise ValueError(
            f"unpack_signs: scale as a tensor is one torch.float32 on {dst.device}, "
            f"not {scale.dtype} of {tuple(scale.shape)} on {scale.device}."
        )
