"""Steps of Adam whose moments are kept in 8 bits, on lists of tensors: one native call, one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from ds_lightning.errors import NativeOpError
from ds_lightning.ops import native
from ds_lightning.ops.blocks import Blocks, dequantize_blocks, quantize_blocks
from ds_lightning.ops.optim import Backend, Copies, Tensors, adam

LARGEST_BLOCK = 4096
"""Elements of a block that the kernels for CPUs keep in the first-level cache."""

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_COPIES = (torch.bfloat16, torch.float16)
_PLAIN = (Tensor, torch.nn.Parameter)


def adam8bit(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    exp_avg_scales: Tensors,
    exp_avg_sq_scales: Tensors,
    blocks: Sequence[Blocks],
    copies: Copies = (),
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction1: float,
    bias_correction2: float,
    grad_scale: float = 1.0,
    backend: Backend = "auto",
    instruction_set: str = "auto",
) -> None:
    """One step of `ds_lightning.ops.optim.adam` on moments that are dequantized before and quantized after it.

    The step itself uses the unrounded moments. The reference, and so the definition, is just that, tensor by tensor;
    the kernels give its bits.

    Args:
        params: Updated in place; fp32 for the kernels.
        grads: One for each parameter, of its size: fp32, bf16 or fp16 for the kernels. Not changed.
        exp_avgs: Codes of the first moments, int8, see `ds_lightning.ops.blocks`; updated.
        exp_avg_sqs: Codes of the second moments, uint8; updated.
        exp_avg_scales: fp32, one for each block of a parameter; updated.
        exp_avg_sq_scales: Likewise.
        blocks: How each parameter is cut; of one size, at most `LARGEST_BLOCK` for the kernels.
        copies: Empty, or one bf16 or fp16 tensor (or None) for each parameter that receives the updated values.
        lr: Learning rate. This and all else are as for `adam`.
        beta1: Decay of the first moments.
        beta2: Decay of the second moments.
        eps: Added to the root of the second moments.
        weight_decay: Factor of the parameters in the decay.
        decoupled: Whether the decay stays out of the moments.
        bias_correction1: `1 - beta1 ** step`, or 1 for none.
        bias_correction2: `1 - beta2 ** step`, or 1 for none.
        grad_scale: Multiplies gradients on the way.
        backend: "auto" takes a kernel for the tensors that have one and the reference for others; "native" demands
            it for all.
        instruction_set: Of the CPU kernel, for tests: one of `instruction_sets()`.

    Raises:
        ValueError: for lists of unequal lengths, or tensors that do not fit each other.
        NativeOpError: with backend "native", where a kernel is missing or does not take these tensors.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(get_args(Backend))}.")
    lists: list[Sequence[Any]] = [params, grads, exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, blocks]
    lists += [copies] if copies else []
    if {len(each) for each in lists} != {len(params)}:
        raise ValueError(f"adam8bit got lists of {[len(each) for each in lists]} entries; they must be equal.")
    if not params:
        return
    numbers = (lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction1, bias_correction2, grad_scale)
    if backend != "reference" and _native(lists, numbers, instruction_set):
        return
    if len(params) > 1:
        for k in range(len(params)):
            one = [each[k : k + 1] for each in lists]
            if copies and copies[k] is None:
                one[-1] = ()
            adam8bit(
                *one,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=weight_decay,
                decoupled=decoupled,
                bias_correction1=bias_correction1,
                bias_correction2=bias_correction2,
                grad_scale=grad_scale,
                backend=backend,
                instruction_set=instruction_set,
            )
        return
    if backend == "native":
        native.load("_cuda" if params[0].is_cuda else "_native", "adam8bit")
        raise NativeOpError(
            "adam8bit has no kernel for these tensors: it takes contiguous tensors of equal sizes on one CPU or CUDA "
            f"device, fp32 parameters, fp32, bf16 or fp16 gradients, blocks of one size of at most {LARGEST_BLOCK} and "
            "bf16 or fp16 copies. Use backend='auto'."
        )
    stored = ((exp_avgs[0], exp_avg_scales[0]), (exp_avg_sqs[0], exp_avg_sq_scales[0]))
    for codes, scales in stored:
        if codes.numel() != params[0].numel() or scales.numel() != blocks[0].count:
            raise ValueError(
                f"adam8bit: a parameter of {params[0].numel()} elements in {blocks[0].count} blocks has "
                f"{codes.numel()} codes and {scales.numel()} scales."
            )
    moments = [dequantize_blocks(codes.view(-1), scales, blocks[0]) for codes, scales in stored]
    adam(
        params,
        grads,
        moments[:1],
        moments[1:],
        copies,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        bias_correction1=bias_correction1,
        bias_correction2=bias_correction2,
        grad_scale=grad_scale,
        backend="reference",
    )
    for (codes, scales), moment in zip(stored, moments, strict=True):
        new_codes, new_scales = quantize_blocks(moment, blocks[0], signed=codes.dtype == torch.int8)
        codes.view(-1).copy_(new_codes)
        scales.copy_(new_scales)


def _native(lists: Sequence[Sequence[Any]], numbers: tuple[float, ...], instruction_set: str) -> bool:
    """One native call, if there can be one."""
    blocks: Sequence[Blocks] = lists[6]
    device = lists[0][0].device
    name = {"cpu": "_native", "cuda": "_cuda"}.get(device.type)
    function = None if name is None else getattr(native.find(name).module, "adam8bit", None)
    size = blocks[0].size
    if function is None or size > LARGEST_BLOCK or any([each.size != size for each in blocks]):
        return False
    scan = native.load("_native", "adam8bit").scan
    found = [scan(each if type(each) is list else list(each), _PLAIN) for each in lists[:6]]
    borders = scan([each.borders for each in blocks], _PLAIN)
    copies = scan(list(lists[7]), _PLAIN) if len(lists) > 7 else None
    if len(lists) > 7 and copies is None:
        return False
    if any([each is None or each.device != device for each in found]):
        return False
    param, grad, first, second, first_scales, second_scales = found
    same = [grad, first, second, *([copies] if copies is not None else [])]
    if (
        any([each.numels != param.numels for each in same])
        or first_scales.numels != second_scales.numels
        or param.dtype != torch.float32
        or grad.dtype not in _NAMES
        or (first.dtype, second.dtype) != (torch.int8, torch.uint8)
        or {first_scales.dtype, second_scales.dtype} != {torch.float32}
        or (copies is not None and (copies.dtype not in _COPIES or copies.device != device))
    ):
        return False
    arguments = [each.pointers for each in (param, grad, first, second, first_scales, second_scales, borders)]
    arguments += [borders.numels, first_scales.numels]
    arguments += [copies.pointers if copies is not None else [], param.numels]
    names = (_NAMES[grad.dtype], _NAMES[copies.dtype] if copies is not None else "bf16")
    if device.type == "cuda":
        as_lists = [each if isinstance(each, list) else each.tolist() for each in arguments]
        with torch.cuda.device(device):
            function(*as_lists, *names, size, *numbers, torch.cuda.current_stream(device).cuda_stream)
    else:
        function(*arguments, *names, size, *numbers, torch.get_num_threads(), instruction_set)
    native.mark_written(*lists[0], *(lists[7] if copies is not None else ()))
    return True
