"""Adagrad, under the names that DeepSpeed has for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ds_lightning.ops import optim as ops
from ds_lightning.optim.native import NativeOptimizer, Slices, check_positive, moment_dtype_name


class Adagrad(NativeOptimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011). The formula is that of `ds_lightning.ops.optim.adagrad`.

    States are "step" and "sum". Unlike in `torch.optim.Adagrad` they are made at the first step, not by the
    constructor: where parameters are sharded, no rank ever holds whole ones.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        lr_decay: the learning rate of step t is `lr / (1 + (t - 1) lr_decay)`.
        weight_decay: factor of the parameters that is added to gradients.
        initial_accumulator_value: first value of the sums.
        eps: added to the root of the sums.
        moment_dtype: of the sums: "fp32", "bf16" or "param", the dtype of the parameter. 16 bits are rounded
            stochastically, so that a sum grows on average also by squares that are below its last digit.
        torch_only: switches of `torch.optim.Adagrad`; on, they are refused.

    Raises:
        ConfigError: for a switch that only `torch.optim` has.
        ValueError: for hyper-parameters out of range.
    """

    moments = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        moment_dtype: str | torch.dtype = "fp32",
        **torch_only: Any,
    ) -> None:
        check_positive(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "moment_dtype": moment_dtype_name(moment_dtype),
        }
        super().__init__(params, defaults, torch_only)

    def _initial(self, name: str, param: torch.Tensor, dtype: torch.dtype, group: Mapping[str, Any]) -> torch.Tensor:
        value = group["initial_accumulator_value"]
        return torch.full_like(param, value, dtype=dtype, memory_format=torch.preserve_format)

    def _step(self, group: dict[str, Any], slices: Slices, grad_scale: float) -> None:
        for count, part in self._counts(slices).items():
            ops.adagrad(
                part.params,
                part.grads,
                self._moments(group, part, "sum"),
                part.copies,
                lr=float(group["lr"]) / (1 + (count - 1) * group["lr_decay"]),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                grad_scale=grad_scale,
                seed=int(count),
            )


class CPUAdagrad(Adagrad):
    """`Adagrad` under DeepSpeed's name for the one on CPUs; it is the same class here."""
