"""Lion, under the names that DeepSpeed has for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ds_lightning.errors import ConfigError
from ds_lightning.ops import optim as ops
from ds_lightning.optim.adam import checked_betas
from ds_lightning.optim.native import NativeOptimizer, Slices, check_positive, moment_dtype_name


class Lion(NativeOptimizer):
    """Lion (arXiv:2302.06675). The formula is that of `ds_lightning.ops.optim.lion`; the state is "exp_avg".

    Where that is not fp32 there is a "step" too.

    Args:
        params: parameters or groups of them.
        lr: learning rate; a third to a tenth of Adam's.
        betas: weights of the momentum in the update and in its own average.
        weight_decay: factor of the decoupled weight decay; three to ten times Adam's.
        set_grad_none: only True, `zero_grad()`'s own default.
        moment_dtype: "fp32", "bf16" or "param", the dtype of the parameter. 16 bits are rounded stochastically, by
            dice that "step" seeds.
        torch_only: switches of optimizers of `torch.optim`; on, they are refused.

    Raises:
        ConfigError: for a switch that only `torch.optim` has.
        ValueError: for hyper-parameters out of range.
    """

    moments = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        set_grad_none: bool = True,
        moment_dtype: str | torch.dtype = "fp32",
        **torch_only: Any,
    ) -> None:
        if not set_grad_none:
            raise ConfigError("set_grad_none=False is not supported; call zero_grad(set_to_none=False) instead.")
        check_positive(lr=lr, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": checked_betas(betas),
            "weight_decay": weight_decay,
            "moment_dtype": moment_dtype_name(moment_dtype),
        }
        super().__init__(params, defaults, torch_only)

    def _step(self, group: dict[str, Any], slices: Slices, grad_scale: float) -> None:
        beta1, beta2 = map(float, group["betas"])
        for count, part in self._rounds(group, slices):
            ops.lion(
                part.params,
                part.grads,
                self._moments(group, part, "exp_avg"),
                part.copies,
                lr=float(group["lr"]),
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                grad_scale=grad_scale,
                seed=count,
            )


class FusedLion(Lion):
    """`Lion` under DeepSpeed's name for the one on GPUs; it is the same class here."""


class CPULion(Lion):
    """`Lion` under DeepSpeed's name for the one on CPUs; it is the same class here."""
