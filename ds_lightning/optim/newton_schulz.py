"""Orthogonalisation of matrices by Newton-Schulz iterations, as Muon does it (K. Jordan et al., 2024).

Both methods compute five steps of X <- a X + (b A + c A^2) X with A = X X^T, whose coefficients bring singular values
from (0, 1] close to 1, not quite to it. "standard" computes with X itself; "gram" with the small square matrices X X^T
and the product of the polynomials (Dao-AILab's "Gram Newton-Schulz"), which costs less the longer X is.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ds_lightning.errors import ConfigError

Method = Literal["gram", "standard"]

STEPS = 5
EPS = 1e-7
"""Is added to the norm by which a matrix is divided first."""

_A, _B, _C = 3.4445, -4.7750, 2.0315
_RESTART = 2
"""Step before which "gram" computes X X^T anew: rounding errors of the product grow."""


def check_method(method: str) -> None:
    """Refuse other names.

    Raises:
        ConfigError: for those.
    """
    if method not in get_args(Method):
        raise ConfigError(f"ns_method={method!r} is not one of {', '.join(get_args(Method))}.")


def compute_dtype(method: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """In which dtype a method computes: 16 bits on GPUs, as DeepSpeed does; CPUs are no faster with them.

    Args:
        method: "gram" takes fp16, whose products carry more bits; "standard" bf16, where there is hardware for it.
        device: that computes.
        stored: dtype of the parameters; fp64 ones compute in fp64.
    """
    if stored == torch.float64:
        return stored
    if device.type != "cuda":
        return torch.float32
    if method == "gram":
        return torch.float16
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32


def orthogonalize(x: Tensor, method: str) -> Tensor:
    """Five steps on matrices of one shape.

    Args:
        x: `[k, rows, cols]`, each of a norm of at most 1.
        method: "gram" or "standard".

    Returns:
        As many matrices with singular values of about 1 (0.7 to 1.2), of `x`'s dtype.
    """
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = _gram(x) if method == "gram" and x.size(-2) < x.size(-1) else _standard(x)
    return x.mT if tall else x


def _standard(x: Tensor) -> Tensor:
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, _polynomial(gram), x, beta=_A)
    return x


def _gram(x: Tensor) -> Tensor:
    gram = x @ x.mT
    product: Tensor | None = None
    for step in range(STEPS):
        if step == _RESTART and product is not None:
            x = product @ x
            gram = x @ x.mT
            product = None
        z = _polynomial(gram)
        if product is None:
            product = z.clone()
            product.diagonal(dim1=-2, dim2=-1).add_(_A)
        else:
            product = torch.baddbmm(product, z, product, beta=_A)
        if step not in (_RESTART - 1, STEPS - 1):
            once = torch.baddbmm(gram, z, gram, beta=_A)
            gram = torch.baddbmm(once, z, once, beta=_A)
    assert product is not None
    return product @ x


def _polynomial(gram: Tensor) -> Tensor:
    """What is multiplied with X, but for a X."""
    return torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)


def cost(rows: int, cols: int) -> float:
    """Multiplications of the iterations, roughly: to share them out."""
    small, large = sorted((rows, cols))
    return float(small * small * (2 * large + small))
