"""Adam and AdamW, under the names that DeepSpeed has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ds_lightning.errors import ConfigError
from ds_lightning.ops import optim as ops
from ds_lightning.optim.native import NativeOptimizer, Slices, check_positive, moment_dtype_name


class AdamSteps(NativeOptimizer):
    """Steps of Adam on moments "exp_avg" and "exp_avg_sq"; the base of those that make such steps."""

    def _step_adam(self, group: dict[str, Any], slices: Slices, grad_scale: float) -> None:
        """A group that does not say otherwise corrects its moments and decouples its weight decay."""
        for count, part in self._counts(slices).items():
            ops.adam(
                part.params,
                part.grads,
                self._moments(group, part, "exp_avg"),
                self._moments(group, part, "exp_avg_sq"),
                part.copies,
                **numbers_of_step(group, count),
                grad_scale=grad_scale,
                seed=int(count),
            )


class Adam(AdamSteps):
    """Adam (arXiv:1412.6980); with decoupled weight decay (AdamW, arXiv:1711.05101) unless told otherwise.

    The formula is that of `ds_lightning.ops.optim.adam`. States are "step", "exp_avg" and "exp_avg_sq".

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: whether to correct the moments for their start at zero.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
        adam_w_mode: whether weight decay is decoupled, as in AdamW, or added to the gradient. Groups keep it as
            `decoupled_weight_decay`, the name that torch has for it.
        weight_decay: factor of the weight decay.
        set_grad_none: only True, `zero_grad()`'s own default.
        moment_dtype: "fp32", "bf16" or "param", the dtype of the parameter. bf16 moments save 4 bytes per element;
            they are rounded stochastically, so that they decay on average also where beta2 = 0.999 makes steps that
            bf16 has no digits for. The dice are seeded by "step", so a run that resumes throws the same.
        fp32_optimizer_states: False is DeepSpeed's word for `moment_dtype="param"`.
        torch_only: switches of `torch.optim.Adam`; on, they are refused.

    Raises:
        ConfigError: for a switch that only `torch.optim.Adam` has.
        ValueError: for hyper-parameters out of range.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        *,
        set_grad_none: bool = True,
        moment_dtype: str | torch.dtype = "fp32",
        fp32_optimizer_states: bool = True,
        **torch_only: Any,
    ) -> None:
        if not set_grad_none:
            raise ConfigError("set_grad_none=False is not supported; call zero_grad(set_to_none=False) instead.")
        check_positive(lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": checked_betas(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": adam_w_mode,
            "moment_dtype": moment_dtype_name(moment_dtype, fp32_optimizer_states),
        }
        super().__init__(params, defaults, torch_only)

    def _step(self, group: dict[str, Any], slices: Slices, grad_scale: float) -> None:
        self._step_adam(group, slices, grad_scale)


class Decoupled(NativeOptimizer):
    """Mixed into a kind of Adam it makes AdamW of it, with torch's arguments and default decay."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        **rest: Any,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, True, weight_decay, **rest)  # type: ignore[call-arg, arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state of Adam may say otherwise
            group["decoupled_weight_decay"] = True


class FusedAdam(Adam):
    """`Adam` under DeepSpeed's name for the one on GPUs; it is the same class here."""


class CPUAdam(Adam):
    """`Adam` under DeepSpeed's name for the one on CPUs; it is the same class here."""


class AdamW(Decoupled, Adam):
    """`Adam` with decoupled weight decay, whatever else is asked for; its default decay is that of torch, 0.01."""


def numbers_of_step(group: Mapping[str, Any], count: float) -> dict[str, Any]:
    """The numbers of step `count`, counted from 1, as `ops.optim.adam` takes them."""
    beta1, beta2 = map(float, group["betas"])
    corrects = group.get("bias_correction", True)
    return {
        "lr": float(group["lr"]),
        "beta1": beta1,
        "beta2": beta2,
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
        "decoupled": group.get("decoupled_weight_decay", True),
        "bias_correction1": 1 - beta1**count if corrects else 1.0,
        "bias_correction2": 1 - beta2**count if corrects else 1.0,
    }


def checked_betas(betas: Sequence[float]) -> tuple[float, float]:
    """Two decays in [0, 1).

    Raises:
        ValueError: for anything else.
    """
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} are not two numbers of at least 0 and below 1.")
    return float(betas[0]), float(betas[1])
