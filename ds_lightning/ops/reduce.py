"""The sum of several equal buffers, scaled, into a destination: the local half of a reduction.

Every backend adds in the order of the sources and rounds alike, so the result does not depend on
which one ran. `reduce_sum` picks; `reduce_sum_reference` is the definition.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from ds_lightning.ops import native

Backend = Literal["auto", "native", "reference"]

# What the kernels call a dtype.
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}


def reduce_sum(
    dst: torch.Tensor,
    srcs: Sequence[torch.Tensor],
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    backend: Backend = "auto",
) -> None:
    """Sets `dst` to `scale * (srcs[0] + srcs[1] + ...)`, or adds that to it.

    Sums are built in fp32 (fp64 for fp64 tensors) from left to right and rounded once into `dst`.

    Args:
        dst: Written in place. It may be one of the sources, if of their dtype.
        srcs: At least one tensor; all of one dtype, on the device of `dst` and of its shape.
        scale: Multiplies the sum before it reaches `dst`.
        accumulate: Whether to add to what `dst` holds.
        backend: "auto" takes the kernel where there is one for these tensors and the reference
            elsewhere; "native" raises `NativeOpError` if the kernel's module is missing.
    """
    _check(dst, srcs, backend)
    if backend == "native" or (backend == "auto" and _has_kernel(dst, srcs)):
        _reduce_sum_native(dst, srcs, scale, accumulate)
    else:
        reduce_sum_reference(dst, srcs, scale=scale, accumulate=accumulate)


@torch.no_grad()
def reduce_sum_reference(
    dst: torch.Tensor,
    srcs: Sequence[torch.Tensor],
    *,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """`reduce_sum` in torch's own operations: what every kernel must equal bit for bit."""
    acc = srcs[0].to(_sum_dtype(srcs[0].dtype), copy=True)
    for src in srcs[1:]:
        acc += src.to(acc.dtype)
    acc *= scale
    if accumulate:
        dst += acc
    else:
        dst.copy_(acc)


def _reduce_sum_native(dst: torch.Tensor, srcs: Sequence[torch.Tensor], scale: float, accumulate: bool) -> None:
    arguments = (
        dst.data_ptr(),
        [src.data_ptr() for src in srcs],
        dst.numel(),
        NAMES[srcs[0].dtype],
        NAMES[dst.dtype],
        scale,
        accumulate,
    )
    if dst.is_cuda:
        stream = torch.cuda.current_stream(dst.device)
        with torch.cuda.device(dst.device):
            native.load("_cuda", "reduce_sum").reduce_sum(*arguments, stream.cuda_stream)
    else:
        native.load("_native", "reduce_sum").reduce_sum(*arguments)
    native.mark_written(dst)


def _has_kernel(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> bool:
    if not all(tensor.is_contiguous() for tensor in (dst, *srcs)):
        return False
    if dst.device.type == "cpu":
        return native.find("_native").module is not None
    if dst.device.type == "cuda":
        module = native.find("_cuda").module
        return module is not None and dst.dtype != torch.float64 and len(srcs) <= module.MAX_SOURCES
    return False


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(dst: torch.Tensor, srcs: Sequence[torch.Tensor], backend: Backend) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(get_args(Backend))}.")
    if not srcs:
        raise ValueError("reduce_sum needs at least one source.")
    for k, src in enumerate(srcs):
        if src.shape != dst.shape:
            raise ValueError(f"srcs[{k}] is of {src.shape}, but dst is of {dst.shape}.")
        if src.device != dst.device:
            raise ValueError(f"srcs[{k}] is on {src.device}, but dst is on {dst.device}.")
        if src.dtype != srcs[0].dtype:
            raise ValueError(f"srcs[{k}] is {src.dtype}, but srcs[0] is {srcs[0].dtype}.")
    for dtype in (dst.dtype, srcs[0].dtype):
        if dtype not in NAMES:
            raise ValueError(f"reduce_sum knows {', '.join(map(str, NAMES))}, not {dtype}.")
    if (dst.dtype == torch.float64) != (srcs[0].dtype == torch.float64):
        raise ValueError(f"reduce_sum adds fp64 only to fp64, not {srcs[0].dtype} to {dst.dtype}.")
    if backend == "native" and not all(tensor.is_contiguous() for tensor in (dst, *srcs)):
        raise ValueError("The kernel of reduce_sum needs contiguous tensors.")
