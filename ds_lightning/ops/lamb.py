"""The two passes of LAMB (arXiv:1904.00962) over flat tensors in which several parameters may lie.

    m = lerp(m, g, 1 - beta1)
    v = beta2 v + ((1 - beta2) g) g
    u = m / (sqrt(v) + eps) + weight_decay p,  sqrt(v + eps) with `eps_inside_sqrt`
    p = p - step u

A step is the learning rate times the trust ratio of a parameter, for which the norms of p and u must be known: the
first pass gives their squares for each segment, and between the two they are summed over the ranks that share a
parameter. The second pass computes u again instead of keeping it: a step is bound by memory. Arithmetic, kernels and
references are as in `ds_lightning.ops.optim`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_lightning.errors import NativeOpError
from ds_lightning.ops import native
from ds_lightning.ops.optim import _PLAIN, Backend, Copies, Tensors, _lerp, _sqrt, _written
from ds_lightning.ops.reduce import NAMES

_KERNEL = {
    "params": (torch.float32,),
    "grads": (torch.float32, torch.bfloat16, torch.float16),
    "exp_avgs": (torch.float32, torch.bfloat16),
    "exp_avg_sqs": (torch.float32, torch.bfloat16),
    "copies": (torch.bfloat16, torch.float16),
}


class Segments(NamedTuple):
    """Parameters in a list of tensors: the k-th lies in tensor `of[k]`, `numels[k]` elements from `starts[k]` on.

    The order is that of the tensors.
    """

    of: list[int]
    starts: list[int]
    numels: list[int]


def lamb_moments(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    segments: Segments,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    backend: Backend = "auto",
    instruction_set: str = "auto",
) -> Tensor:
    """The first pass: updates the moments.

    Args:
        params: not changed; fp32 for the kernel.
        grads: one for each parameter, of its size.
        exp_avgs: the first moments, fp32 or bf16 for the kernel; updated.
        exp_avg_sqs: the second moments, likewise.
        segments: where parameters lie; elements of none belong to nobody.
        beta1: decay of the first moments.
        beta2: decay of the second moments.
        eps: added to the root, or under it.
        eps_inside_sqrt: whether under it.
        weight_decay: factor of the parameters in u.
        grad_scale: multiplies gradients on the way.
        backend: as in `ds_lightning.ops.optim`.
        instruction_set: likewise.

    Returns:
        Squares of the norms of p and of u, `[2, segments]`, fp64 on the CPU; the order of their sums depends on the
        length of a segment alone.

    Raises:
        NativeOpError: with backend "native", where the kernel is missing or does not take these tensors.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    call = _scan(lists, backend)
    if call is not None:
        numbers = (beta1, beta2, eps, eps_inside_sqrt, weight_decay, grad_scale)
        squares = native.load("_native", "lamb").lamb_moments(
            *call.pointers, *segments, *call.dtypes[1:3], *numbers, torch.get_num_threads(), instruction_set
        )
        _written(exp_avgs)
        _written(exp_avg_sqs)
        return torch.tensor(squares, dtype=torch.float64).view(2, -1)
    found: list[Tensor] = []
    within = _by_tensor(segments, len(params))
    for k, (p, g, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        dtype = _wide(p)
        gradient = g.to(dtype).reshape(p.shape) * grad_scale
        first, second = m.to(dtype), v.to(dtype)
        _lerp(first, gradient, 1 - beta1)
        second.mul_(beta2).add_(gradient.mul(1 - beta2).mul_(gradient))
        _store(m, first)
        _store(v, second)
        u = _direction(p, m, v, eps, eps_inside_sqrt, weight_decay)
        flats = p.detach().reshape(-1), u.reshape(-1)
        views = [flat[start : start + numel] for flat in flats for start, numel in within[k]]
        if views:
            found.append(torch.stack(torch._foreach_norm(views, 2.0, dtype=torch.float64)).view(2, -1))
    if not found:
        return torch.zeros(2, 0, dtype=torch.float64)
    return torch.cat([norms.cpu() for norms in found], 1).square_()


def lamb_apply(
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    copies: Copies,
    segments: Segments,
    steps: Sequence[float],
    *,
    eps: float,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    backend: Backend = "auto",
    instruction_set: str = "auto",
) -> None:
    """The second pass: updates the parameters.

    Args:
        params: updated.
        exp_avgs: as the first pass left them.
        exp_avg_sqs: likewise.
        copies: empty, or one tensor for each parameter that receives the updated values, of 16 bits for the kernel.
        segments: as in the first pass.
        steps: one for each segment.
        eps: as in the first pass.
        eps_inside_sqrt: likewise.
        weight_decay: likewise.
        backend: likewise.
        instruction_set: likewise.

    Raises:
        NativeOpError: as in the first pass.
    """
    lists = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "copies": copies}
    call = _scan(lists, backend)
    if call is not None:
        native.load("_native", "lamb").lamb_apply(
            *call.pointers,
            *segments,
            call.dtypes[1],
            call.dtypes[3],
            list(steps),
            eps,
            eps_inside_sqrt,
            weight_decay,
            torch.get_num_threads(),
            instruction_set,
        )
        _written(params)
        _written([copy for copy in copies if copy is not None])
        return
    within = _by_tensor(segments, len(params))
    left = iter(steps)
    for k, (p, m, v) in enumerate(zip(params, exp_avgs, exp_avg_sqs, strict=True)):
        u = _direction(p, m, v, eps, eps_inside_sqrt, weight_decay).reshape(-1)
        wide = p.detach().to(u.dtype).reshape(-1)
        parts = [slice(start, start + numel) for start, numel in within[k]]
        moves = [u[part] for part in parts]
        if moves:
            torch._foreach_mul_(moves, [_rounded(next(left), u.dtype) for _ in moves])
            torch._foreach_sub_([wide[part] for part in parts], moves)
        _store(p.detach(), wide.view(p.shape))
        copy = copies[k] if copies else None
        if copy is not None:
            copy.copy_(wide.view(copy.shape))


class _Call(NamedTuple):
    pointers: list[Any]
    dtypes: list[str]


def _scan(lists: Mapping[str, Copies], backend: Backend) -> _Call | None:
    """The arguments of a call of the kernel, if it takes these lists."""
    module = native.find("_native").module if backend != "native" else native.load("_native", "lamb")
    if module is None or backend == "reference":
        return None
    pointers, dtypes = [], []
    numels: Any = None
    for name, tensors in lists.items():
        found = module.scan(list(tensors), _PLAIN)
        fits = found is not None and (
            not tensors
            or (
                found.device.type == "cpu"
                and found.dtype in _KERNEL[name]
                and (numels is None or found.numels == numels)
            )
        )
        if not fits:
            if backend == "native":
                raise NativeOpError(
                    "lamb has no kernel for these tensors: it takes contiguous tensors on the CPU, fp32 parameters, "
                    "fp32, bf16 or fp16 gradients, fp32 or bf16 moments and bf16 or fp16 copies. Use backend='auto'."
                )
            return None
        numels = found.numels if tensors else numels
        pointers.append(found.pointers)
        dtypes.append(NAMES[found.dtype] if tensors else "bf16" if name == "copies" else "fp32")
    moments = dtypes[list(lists).index("exp_avgs")], dtypes[list(lists).index("exp_avg_sqs")]
    return _Call(pointers, dtypes) if moments[0] == moments[1] else None


def _by_tensor(segments: Segments, count: int) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for of, start, numel in zip(*segments, strict=True):
        found[of].append((start, numel))
    return found


def _direction(p: Tensor, m: Tensor, v: Tensor, eps: float, inside: bool, weight_decay: float) -> Tensor:
    """u, of the moments as they are stored."""
    dtype = _wide(p)
    second = v.to(dtype)
    root = _sqrt(second + eps) if inside else _sqrt(second).clone().add_(eps)
    return m.to(dtype).div(root).add_(p.detach().to(dtype) * weight_decay)


def _wide(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _store(kept: Tensor, value: Tensor) -> None:
    if value.data_ptr() != kept.data_ptr():
        kept.copy_(value.view(kept.shape))


def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype))
