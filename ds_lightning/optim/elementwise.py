"""Which optimizers may step on slices: those that treat every element alike, whatever tensor it lies in."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import nn

from ds_lightning.errors import ConfigError
from ds_lightning.optim.adagrad import Adagrad, CPUAdagrad
from ds_lightning.optim.adam import Adam, AdamW, CPUAdam, FusedAdam
from ds_lightning.optim.adam8bit import Adam8bit, AdamW8bit
from ds_lightning.optim.lion import CPULion, FusedLion, Lion
from ds_lightning.optim.native import NativeOptimizer
from ds_lightning.optim.sgd import SGD

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
) | {Adam, AdamW, FusedAdam, CPUAdam, Adam8bit, AdamW8bit, Lion, FusedLion, CPULion, Adagrad, CPUAdagrad, SGD}
_WHOLE = frozenset(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name))

_INSTEAD = {kind: "stage 0, ds_lightning.optim.Muon" for kind in _WHOLE if kind.__name__ == "Muon"}


def check_supported(optimizer: torch.optim.Optimizer, stage: int, allow_untested: bool, on_disk: bool = False) -> bool:
    """Whether `optimizer` may step on slices.

    Args:
        optimizer: the user's.
        stage: ZeRO stage; at stage 0 any optimizer works, one that needs whole tensors steps on whole tensors.
        allow_untested: `zero_allow_untested_optimizer`: take the user's word for an unknown class.
        on_disk: its states are on disk, and it steps tile by tile.

    Raises:
        ConfigError: for an optimizer that cannot work at this stage, by name.
    """
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates its closure several times a step, which no ZeRO stage supports. Use another optimizer."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "SparseAdam steps on sparse gradients; reduced ones are dense, also with sparse_gradients. Use Adam."
        )
    if takes_parts(optimizer):
        if on_disk:
            raise ConfigError(
                f"{kind.__name__} looks at whole tensors, so it cannot step tile by tile on states on disk "
                "(offload_optimizer.device: nvme). Use offload_optimizer.device: cpu, or an element-wise optimizer "
                "(Adam, AdamW, SGD ...)."
            )
        return True
    if kind in _ELEMENTWISE:
        return True
    if kind in _WHOLE:
        elementwise, why = False, "needs whole tensors"
    elif allow_untested:
        return True
    else:
        elementwise, why = _probe(optimizer)
    if not elementwise and stage > 0:
        raise ConfigError(
            f"{kind.__name__} {why}, so it is not supported yet at zero_optimization.stage={stage}, where each rank "
            f"steps on slices of tensors. Use {_INSTEAD.get(kind, 'stage 0')}, an element-wise optimizer (Adam, AdamW, "
            "SGD ...), or, if you know that it is element-wise, zero_allow_untested_optimizer: true."
        )
    return elementwise


def takes_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer steps on slices and is told which parameters lie in them; see [Note: tensors in parts]."""
    return isinstance(optimizer, NativeOptimizer) and optimizer.needs_parts


def _probe(optimizer: torch.optim.Optimizer) -> tuple[bool, str]:
    """Try an unknown class: do three steps on a matrix equal the same steps on two slices of it?"""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator)
    gradients = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    whole = [nn.Parameter(start.clone())]
    sliced = [nn.Parameter(start.flatten()[:7].clone()), nn.Parameter(start.flatten()[7:].clone())]
    try:
        with torch.enable_grad(), torch.inference_mode(False):
            for parameters in (whole, sliced):
                twin = _twin(optimizer, parameters)
                for gradient in gradients:
                    pieces = [gradient] if parameters is whole else [gradient.flatten()[:7], gradient.flatten()[7:]]
                    for parameter, piece in zip(parameters, pieces, strict=True):
                        parameter.grad = piece.clone()
                    twin.step()
    except Exception as error:
        return False, f"could not be tried on a small example ({type(error).__name__}: {error})"
    left, right = whole[0].detach().flatten(), torch.cat([p.detach() for p in sliced])
    if torch.allclose(left, right, rtol=1e-6, atol=1e-7):
        return True, ""
    return False, "gives other results on slices of a tensor than on the tensor"


def _twin(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Another optimizer of this class, with the same defaults."""
    known = inspect.signature(type(optimizer)).parameters
    # Not every default is an argument: AdamW keeps what it tells Adam.
    named = {key: value for key, value in optimizer.defaults.items() if key in known}
    takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    if takes_more and named != optimizer.defaults:
        with suppress(TypeError):
            return type(optimizer)(parameters, **optimizer.defaults)
    return type(optimizer)(parameters, **named)


def element_states(optimizer: torch.optim.Optimizer, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states with one value per element that an optimizer makes for the parameters of a group, with their dtypes.

    Found by a step of a twin on a small parameter; the optimizer itself is not touched.

    Args:
        optimizer: the user's.
        group: index of the parameter group.
        dtype: of the parameters it steps on.

    Raises:
        ConfigError: when no twin can be made from the optimizer's defaults, or its states are encoded.
    """
    if isinstance(optimizer, NativeOptimizer) and optimizer.codec is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} keeps encoded states, which offload_optimizer.device: nvme does not write. "
            "Use offload_optimizer.device: cpu (its states are small), or an optimizer with fp32 states."
        )
    with torch.enable_grad(), torch.inference_mode(False):
        parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        settings = {key: value for key, value in optimizer.param_groups[group].items() if key != "params"}
        try:
            twin = _twin(optimizer, [parameter])
            twin.param_groups[0].update(copy.deepcopy(settings))
            twin.step()
        except Exception as error:
            raise ConfigError(
                f"{type(optimizer).__name__} could not be tried on a small example ({type(error).__name__}: {error}), "
                "so the size of its states on disk is not known. Use offload_optimizer.device: cpu, or an optimizer "
                "whose constructor takes the parameters and its defaults."
            ) from error
    state = twin.state[parameter]
    return {k: v.dtype for k, v in state.items() if torch.is_tensor(v) and v.shape == parameter.shape}


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """The optimizer's own step, without the hooks that torch runs around it.

    Torch wraps the `step` of a class once it has an instance, and schedulers wrap that of the instance: a step that is
    done part by part must run all this once, and not for each part.
    """
    step = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return partial(step, optimizer)
