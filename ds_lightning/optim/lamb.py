"""LAMB, under the names that DeepSpeed has for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_lightning.errors import ConfigError
from ds_lightning.ops import lamb as ops
from ds_lightning.optim.adam import checked_betas
from ds_lightning.optim.native import NativeOptimizer, Preparation, Slices, check_positive, moment_dtype_name
from ds_lightning.optim.parts import Parts, WholeTensors


class Lamb(NativeOptimizer):
    """LAMB (arXiv:1904.00962, algorithm 2), its trust ratio bounded on both sides, as in DeepSpeed.

        u = m / (sqrt(v) + eps) + weight_decay p
        p = p - lr sqrt(1 - beta2^t) / (1 - beta1^t) c u,  c = clamp(|p| / |u|, min_coeff, max_coeff)

    c is 1 where one of the norms is 0. Norms are those of whole parameters, also where ranks hold slices of them: each
    rank adds the squares of its own elements in fp64, and one sum over the ranks serves all parameters. States are
    "step", "exp_avg" and "exp_avg_sq". The loss scale may be static or dynamic: gradients are unscaled before a step.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: whether to correct the moments for their start at zero; eps stays as it is.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
        eps_inside_sqrt: add eps under the root instead.
        weight_decay: factor of the decay, which is a part of u.
        max_coeff: largest trust ratio.
        min_coeff: smallest trust ratio.
        set_grad_none: only True, `zero_grad()`'s own default.
        moment_dtype: "fp32", "bf16" or "param", the dtype of the parameter. 16 bits are rounded to nearest here, so
            with beta2 = 0.999 second moments do not come down again.
        torch_only: switches of optimizers of `torch.optim`; on, they are refused.

    Raises:
        ConfigError: for a switch that only `torch.optim` has.
        ValueError: for hyper-parameters out of range.
    """

    moments = ("exp_avg", "exp_avg_sq")
    needs_parts = True
    _coefficients: Sequence[float] = ()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        *,
        set_grad_none: bool = True,
        moment_dtype: str | torch.dtype = "fp32",
        **torch_only: Any,
    ) -> None:
        if not set_grad_none:
            raise ConfigError("set_grad_none=False is not supported; call zero_grad(set_to_none=False) instead.")
        check_positive(lr=lr, eps=eps, weight_decay=weight_decay, max_coeff=max_coeff, min_coeff=min_coeff)
        if min_coeff > max_coeff:
            raise ValueError(f"min_coeff={min_coeff!r} is above max_coeff={max_coeff!r}.")
        defaults = {
            "lr": lr,
            "betas": checked_betas(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "bias_correction": bias_correction,
            "moment_dtype": moment_dtype_name(moment_dtype),
        }
        super().__init__(params, defaults, torch_only)

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, a copy.

        One for each parameter that had a gradient on any rank, in the order of the groups; the same on all ranks.
        Empty before the first step.
        """
        return list(self._coefficients)

    def _step_groups(self, slices: Sequence[Slices], preparation: Preparation) -> None:
        parts = preparation.parts or WholeTensors([each.params for each in slices])
        squares = torch.zeros(2, len(parts.parameters), dtype=torch.float64)
        portions = []
        for group, each in zip(self.param_groups, slices, strict=True):
            for count, chosen in self._counts(each).items() if each.params else ():
                portion = self._portion(group, chosen, parts, count)
                portions.append(portion)
                beta1, beta2 = map(float, group["betas"])
                found = ops.lamb_moments(
                    chosen.params,
                    chosen.grads,
                    *portion.moments,
                    portion.segments,
                    beta1=beta1,
                    beta2=beta2,
                    grad_scale=preparation.grad_scale,
                    **portion.form,
                )
                squares.index_add_(1, portion.numbers, found[:, portion.counted])
        coefficients = self._trust(parts, parts.total(squares))
        self._coefficients = coefficients.tolist()
        for portion in portions:
            steps = coefficients[portion.parameters].mul_(portion.lr).tolist()
            ops.lamb_apply(
                portion.slices.params,
                *portion.moments,
                portion.slices.copies,
                portion.segments,
                steps,
                **portion.form,
            )

    def _portion(self, group: dict[str, Any], slices: Slices, parts: Parts, count: float) -> _Portion:
        found = [(k, segment) for k, param in enumerate(slices.params) for segment in parts.segments(param)]
        counted = [place for place, (_, segment) in enumerate(found) if segment.counted]
        parameters = torch.tensor([segment.parameter for _, segment in found], dtype=torch.int64)
        lr = float(group["lr"])
        if group["bias_correction"]:
            beta1, beta2 = map(float, group["betas"])
            lr *= (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        return _Portion(
            slices,
            (self._moments(group, slices, "exp_avg"), self._moments(group, slices, "exp_avg_sq")),
            ops.Segments([k for k, _ in found], [s.start for _, s in found], [s.stop - s.start for _, s in found]),
            parameters,
            torch.tensor(counted, dtype=torch.int64),
            parameters[counted],
            lr,
            {key: group[key] for key in ("eps", "eps_inside_sqrt", "weight_decay")},
        )

    def _trust(self, parts: Parts, squares: Tensor) -> Tensor:
        """The trust ratio of each parameter, fp64."""
        of_param, of_direction = squares.sqrt()
        bounds = [(group["min_coeff"], group["max_coeff"]) for group in self.param_groups]
        limits = torch.tensor([bounds[whole.group] for whole in parts.parameters], dtype=torch.float64).view(-1, 2)
        ratio = (of_param / of_direction).clamp(limits[:, 0], limits[:, 1])
        return torch.where((of_param > 0) & (of_direction > 0), ratio, 1.0)


class FusedLamb(Lamb):
    """`Lamb` under DeepSpeed's name for the one on GPUs; it is the same class here."""


class _Portion(NamedTuple):
    """Tensors of one group that have been stepped on equally often.

    Attributes:
        slices: the tensors.
        moments: of them.
        segments: parameters in them.
        parameters: number of each segment's parameter.
        counted: the segments that this rank counts.
        numbers: numbers of their parameters.
        lr: learning rate, corrected for the start of the moments.
        form: what the formula of u depends on.
    """

    slices: Slices
    moments: tuple[list[Tensor], list[Tensor]]
    segments: ops.Segments
    parameters: Tensor
    counted: Tensor
    numbers: Tensor
    lr: float
    form: dict[str, Any]
