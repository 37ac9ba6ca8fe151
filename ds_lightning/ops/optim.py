"""Optimizer steps on lists of tensors: one native call, and one pass over memory, for any number of them.

Every op has a reference in torch's own operations, slice by slice, which is its definition; the kernel for CPUs equals
it bit for bit. All arithmetic is fp32 (fp64 for fp64 parameters), whatever is stored. Moments of 16 bits are rounded
stochastically when stored (`ops.rounding`): to nearest, an average could not take the small steps by which it decays.
In the formulas `g` is the gradient times `grad_scale`, and `lerp(a, b, w)` is `a + w (b - a)`, or `b + (1 - w) (a - b)`
for `w >= 0.5`, as in torch. Factors that depend on hyper-parameters alone are computed in fp64 and rounded once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ds_lightning.errors import NativeOpError
from ds_lightning.ops import native
from ds_lightning.ops.rounding import round_stochastic_reference

Backend = Literal["auto", "native", "reference"]
Tensors = Sequence[Tensor]
Copies = Sequence[Tensor | None]

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MOMENTS = (torch.float32, torch.bfloat16)
_COPIES = (torch.bfloat16, torch.float16)
_SEEDS = 0x7FFFFFFF
_PLAIN = (Tensor, torch.nn.Parameter)
"""Other types may hold no memory of their own, or not what they show (DTensor, FakeTensor)."""


def adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
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
    seed: int = 0,
    backend: Backend = "auto",
    instruction_set: str = "auto",
) -> None:
    """One step of Adam (arXiv:1412.6980), or of AdamW (arXiv:1711.05101) where `decoupled`.

        decoupled:  p = p (1 - lr weight_decay)
        otherwise:  g = g + weight_decay p
        m = lerp(m, g, 1 - beta1)
        v = beta2 v + ((1 - beta2) g) g
        p = p - ((lr / bias_correction1 c) m) / (sqrt(v) + eps c),  c = sqrt(bias_correction2)

    torch computes `sqrt(v) / c + eps` instead of the last denominator: the same but for the last bit.

    Args:
        params: Updated in place; fp32 for the kernels.
        grads: One for each parameter, of its size: fp32, bf16 or fp16 for the kernels. Not changed.
        exp_avgs: The first moments, fp32 or bf16 for the kernels; updated. 16 bits are rounded stochastically when
            stored; the step itself uses the unrounded value.
        exp_avg_sqs: The second moments, likewise.
        copies: Empty, or one bf16 or fp16 tensor (or None) for each parameter that receives the updated values.
        lr: Learning rate.
        beta1: Decay of the first moments.
        beta2: Decay of the second moments.
        eps: Added to the root of the second moments.
        weight_decay: Factor of the parameters in the decay.
        decoupled: Whether the decay stays out of the moments.
        bias_correction1: `1 - beta1 ** step`, or 1 for none.
        bias_correction2: `1 - beta2 ** step`, or 1 for none.
        grad_scale: Multiplies gradients on the way: the coefficient of clipping over the loss scale.
        seed: Of the rounding of moments of 16 bits: another one in each step, the same when a step is made again.
            Its low 31 bits count.
        backend: "auto" takes a kernel for the tensors that have one and the reference for others; "native" demands
            it for all.
        instruction_set: Of the CPU kernel, for tests: one of `instruction_sets()`.

    Raises:
        ValueError: for lists of unequal lengths or sizes.
        NativeOpError: with backend "native", where a kernel is missing or does not take these tensors.
    """
    c = math.sqrt(bias_correction2)

    def rule(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        if decoupled:
            p.mul_(1 - lr * weight_decay)
        elif weight_decay != 0:
            g = g + p * weight_decay
        _lerp(m, g, 1 - beta1)
        v.mul_(beta2).add_(g.mul(1 - beta2).mul_(g))
        p.add_(m.mul(-(lr / bias_correction1 * c)).div_(_sqrt(v).add_(eps * c)))

    numbers = (lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction1, bias_correction2)
    step = _Step("adam", rule, numbers, grad_scale, seed, backend, instruction_set)
    step.run(params, grads, (exp_avgs, exp_avg_sqs), copies)


def lion(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    copies: Copies = (),
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    seed: int = 0,
    backend: Backend = "auto",
    instruction_set: str = "auto",
) -> None:
    """One step of Lion (arXiv:2302.06675).

        c = lerp(m, g, 1 - beta1)
        p = p (1 - lr weight_decay) - lr sign(c),  sign(0) = 0 and sign(NaN) = NaN
        m = lerp(m, g, 1 - beta2)

    Args and errors are those of `adam`.
    """

    def rule(p: Tensor, g: Tensor, m: Tensor) -> None:
        c = m.clone()
        _lerp(c, g, 1 - beta1)
        sign = torch.where(c.isnan(), c, c.sign())
        p.mul_(1 - lr * weight_decay).sub_(sign.mul_(lr))
        _lerp(m, g, 1 - beta2)

    step = _Step("lion", rule, (lr, beta1, beta2, weight_decay), grad_scale, seed, backend, instruction_set)
    step.run(params, grads, (exp_avgs,), copies)


def adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    copies: Copies = (),
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    seed: int = 0,
    backend: Backend = "auto",
    instruction_set: str = "auto",
) -> None:
    """One step of Adagrad (Duchi et al., JMLR 12, 2011); `lr` is the decayed learning rate of this step.

        g = g + weight_decay p
        s = s + g g
        p = p - (lr g) / (sqrt(s) + eps)

    Args and errors are those of `adam`.
    """

    def rule(p: Tensor, g: Tensor, s: Tensor) -> None:
        if weight_decay != 0:
            g = g + p * weight_decay
        s.add_(g * g)
        p.add_(g.mul(-lr).div_(_sqrt(s).add_(eps)))

    step = _Step("adagrad", rule, (lr, eps, weight_decay), grad_scale, seed, backend, instruction_set)
    step.run(params, grads, (sums,), copies)


def sgd(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors = (),
    copies: Copies = (),
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    first: bool,
    grad_scale: float = 1.0,
    seed: int = 0,
    backend: Backend = "auto",
    instruction_set: str = "auto",
) -> None:
    """One step of SGD; `momentum_buffers` is empty for none. `first` marks the first step of the buffers.

        g = g + weight_decay p
        b = momentum b + (1 - dampening) g, or g where `first`
        p = p - lr (g + momentum b where `nesterov`, else b)

    Other args, and errors, are those of `adam`.
    """

    def rule(p: Tensor, g: Tensor, b: Tensor | None = None) -> None:
        if weight_decay != 0:
            g = g + p * weight_decay
        if b is not None:
            if first:
                b.copy_(g)
            else:
                b.mul_(momentum).add_(g * (1 - dampening))
            g = g + b * momentum if nesterov else b
        p.add_(g * -lr)

    numbers = (lr, momentum, dampening, nesterov, weight_decay, first)
    step = _Step("sgd", rule, numbers, grad_scale, seed, backend, instruction_set)
    step.run(params, grads, (momentum_buffers,), copies)


def increment(counts: Tensors) -> list[float]:
    """Adds 1 to 0-dim tensors, as the step counts of parameters are, and returns their new values."""
    module = native.find("_native").module
    found = None if module is None else module.scan(list(counts), _PLAIN)
    if module is not None and found is not None:
        plain = found.dtype == torch.float32 and found.device.type == "cpu" and set(found.numels.tolist()) == {1}
        if plain:
            values: list[float] = module.increment(found.pointers)
            return values
    with torch.no_grad():
        for count in counts:
            count.add_(1)
    return [float(count) for count in counts]


def instruction_sets() -> list[str]:
    """What the CPU kernels can be run with on this machine, the slowest first; empty without native code."""
    module = native.find("_native").module
    return [] if module is None else list(module.instruction_sets())


def has_kernel(op: str, device: torch.device) -> bool:
    """Whether there is a kernel of this module's `op` for tensors on `device`."""
    return _function(op, device.type) is not None and native.find("_native").module is not None


class _Call(NamedTuple):
    """The arguments of one native call."""

    device: torch.device
    pointers: list[Any]
    """The native lists of addresses of parameters, gradients, moments and copies."""
    numels: Any
    dtypes: tuple[torch.dtype, ...]
    """Of gradients, moments and copies."""


class _Step(NamedTuple):
    """One step of an op with its numbers, on any tensors."""

    op: str
    rule: Callable[..., None]
    numbers: tuple[float, ...]
    grad_scale: float
    seed: int
    backend: Backend
    instruction_set: str

    def run(self, params: Tensors, grads: Tensors, moments: tuple[Tensors, ...], copies: Copies) -> None:
        if self.backend not in get_args(Backend):
            raise ValueError(f"backend={self.backend!r} is not one of {', '.join(get_args(Backend))}.")
        lists: list[Copies] = [params, grads, *(each for each in moments if each), *([copies] if copies else [])]
        if {len(each) for each in lists} != {len(params)}:
            raise ValueError(f"{self.op} got lists of {[len(each) for each in lists]} tensors; they must be equal.")
        if not params:
            return
        call = None if self.backend == "reference" else self._call(params, grads, moments, copies)
        if call is not None:
            self._native(call, params, copies)
            return
        if len(params) > 1:
            self._by_kind(params, grads, moments, copies)
        elif self.backend == "native":
            native.load("_cuda" if params[0].is_cuda else "_native", self.op)
            raise NativeOpError(
                f"{self.op} has no kernel for these tensors: it takes contiguous tensors of equal sizes on one CPU or "
                "CUDA device, fp32 parameters, fp32, bf16 or fp16 gradients, fp32 or bf16 moments and bf16 or fp16 "
                "copies. Use backend='auto'."
            )
        else:
            self._reference(params[0], grads[0], [each[0] for each in moments if each], copies[0] if copies else None)

    def _by_kind(self, params: Tensors, grads: Tensors, moments: tuple[Tensors, ...], copies: Copies) -> None:
        """One call for the slices of each kind."""
        places: dict[Any, list[int]] = {}
        for k, param in enumerate(params):
            copy = copies[k] if copies else None
            kind: Any = k
            if self.backend != "reference":
                of_copy = () if copy is None else (copy,)
                call = self._call([param], grads[k : k + 1], tuple(each[k : k + 1] for each in moments), of_copy)
                kind = k if call is None else (call.device, call.dtypes, copy is None)
            places.setdefault(kind, []).append(k)
        for chosen in places.values():
            self.run(
                [params[k] for k in chosen],
                [grads[k] for k in chosen],
                tuple([each[k] for k in chosen] if each else () for each in moments),
                [copies[k] for k in chosen] if copies and copies[chosen[0]] is not None else (),
            )

    def _call(self, params: Tensors, grads: Tensors, moments: tuple[Tensors, ...], copies: Copies) -> _Call | None:
        """One native call for all of them, if there can be one."""
        device = params[0].device
        if _function(self.op, device.type) is None:
            return None
        scan = native.load("_native", self.op).scan
        scanned: list[Any] = []
        for each in (params, grads, *moments, copies):
            found = scan(each if type(each) is list else list(each), _PLAIN)
            if found is None or (each and (found.device != device or (scanned and found.numels != scanned[0].numels))):
                return None
            scanned.append(found)
        param, grad, *of_moments, copy = (found.dtype for found in scanned)
        if (
            param != torch.float32
            or grad not in _NAMES
            or len(set(of_moments)) > 1
            or of_moments[0] not in (None, *_MOMENTS)
            or copy not in (None, *_COPIES)
        ):
            return None
        dtypes = (grad, of_moments[0] or torch.float32, copy or torch.bfloat16)
        return _Call(device, [found.pointers for found in scanned], scanned[0].numels, dtypes)

    def _native(self, call: _Call, params: Tensors, copies: Copies) -> None:
        function = _function(self.op, call.device.type)
        assert function is not None
        names = [_NAMES[dtype] for dtype in call.dtypes]
        lists = [*call.pointers, call.numels]
        arguments = (*names, *self.numbers, self.grad_scale)
        seed = self.seed & _SEEDS
        if call.device.type == "cuda":
            lists = [each.tolist() for each in lists]
            with torch.cuda.device(call.device):
                function(*lists, *arguments, torch.cuda.current_stream(call.device).cuda_stream, seed=seed)
        else:
            function(*lists, *arguments, torch.get_num_threads(), self.instruction_set, seed=seed)
        # Autograd must learn of a write behind its back, as of any in-place operation.
        _written(params)
        _written([copy for copy in copies if copy is not None])

    @torch.no_grad()
    def _reference(self, param: Tensor, grad: Tensor, moments: Tensors, copy: Tensor | None) -> None:
        if param.is_complex() or grad.layout != torch.strided:
            what = "complex numbers" if param.is_complex() else f"gradients of layout {grad.layout}"
            raise ValueError(f"{self.op} does not know {what}; use an optimizer of torch.optim that does.")
        for other in (grad, *moments, *([] if copy is None else [copy])):
            if other.numel() != param.numel():
                raise ValueError(
                    f"{self.op}: a parameter of {param.numel()} elements has a gradient, moment or copy of "
                    f"{other.numel()}."
                )
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        stored = (param, *moments)
        wide = [each.to(dtype) for each in stored]
        scaled = grad.to(dtype).reshape(param.shape) * self.grad_scale
        # `view_as` of the shape it has already would turn a non-contiguous moment away.
        shaped = [each if each.shape == param.shape else each.view(param.shape) for each in wide]
        self.rule(shaped[0], scaled, *shaped[1:])
        if wide[0] is not param:
            param.copy_(wide[0])
        for place, (kept, value) in enumerate(zip(moments, wide[1:], strict=True)):
            if kept.dtype.itemsize == 2:
                round_stochastic_reference(kept, value.float(), seed=2 * (self.seed & _SEEDS) + place)
            elif value is not kept:
                kept.copy_(value)
        if copy is not None:
            copy.copy_(wide[0].reshape(copy.shape))


def _function(op: str, device: str) -> Callable[..., None] | None:
    name = {"cpu": "_native", "cuda": "_cuda"}.get(device)
    module = None if name is None else native.find(name).module
    return getattr(module, op, None)


def _written(tensors: Tensors) -> None:
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # inference tensors have no version
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _lerp(a: Tensor, b: Tensor, weight: float) -> None:
    """`a = lerp(a, b, weight)`, each product and each sum rounded, unlike in `torch.lerp` on some CPUs."""
    if a.dtype == torch.float32:
        weight = ctypes.c_float(weight).value
    if weight < 0.5:
        a.add_((b - a).mul_(weight))
    else:
        a.copy_(b + (a - b).mul_(1 - weight))


def _sqrt(a: Tensor) -> Tensor:
    """The square root, correctly rounded; that of torch on CPUs, from MKL, is off by a bit for each fifth number."""
    return a.double().sqrt_().float() if a.is_cpu and a.dtype == torch.float32 else a.sqrt()
