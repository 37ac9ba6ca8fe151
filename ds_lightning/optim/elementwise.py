"""Which optimizers may step on slices: those that treat every element alike, whatever tensor it lies in."""

from __future__ import annotations

import torch
from torch import nn

from ds_lightning.errors import ConfigError
from ds_lightning.optim.adagrad import Adagrad, CPUAdagrad
from ds_lightning.optim.adam import Adam, AdamW, CPUAdam, FusedAdam
from ds_lightning.optim.lion import CPULion, FusedLion, Lion
from ds_lightning.optim.sgd import SGD

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
) | {Adam, AdamW, FusedAdam, CPUAdam, Lion, FusedLion, CPULion, Adagrad, CPUAdagrad, SGD}
_WHOLE = frozenset(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name))


def check_supported(optimizer: torch.optim.Optimizer, stage: int, allow_untested: bool) -> bool:
    """Whether `optimizer` may step on slices.

    Args:
        optimizer: the user's.
        stage: ZeRO stage; at stage 0 any optimizer works, one that needs whole tensors steps on whole tensors.
        allow_untested: `zero_allow_untested_optimizer`: take the user's word for an unknown class.

    Raises:
        ConfigError: for an optimizer that cannot work at this stage, by name.
    """
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates its closure several times a step, which no ZeRO stage supports. Use another optimizer."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError("SparseAdam needs sparse gradients, which are not supported yet (sparse_gradients).")
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
            "steps on slices of tensors. Use stage 0, an element-wise optimizer (Adam, AdamW, SGD ...), or, if you "
            "know that it is element-wise, zero_allow_untested_optimizer: true."
        )
    return elementwise


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
                copy = type(optimizer)(parameters, **optimizer.defaults)
                for gradient in gradients:
                    pieces = [gradient] if parameters is whole else [gradient.flatten()[:7], gradient.flatten()[7:]]
                    for parameter, piece in zip(parameters, pieces, strict=True):
                        parameter.grad = piece.clone()
                    copy.step()
    except Exception as error:
        return False, f"could not be tried on a small example ({type(error).__name__}: {error})"
    left, right = whole[0].detach().flatten(), torch.cat([p.detach() for p in sliced])
    if torch.allclose(left, right, rtol=1e-6, atol=1e-7):
        return True, ""
    return False, "gives other results on slices of a tensor than on the tensor"
