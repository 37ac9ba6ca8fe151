"""1-bit LAMB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from ds_lightning.optim.blocks import Block, Extent, Span, Work
from ds_lightning.optim.onebit import FreezingOptimizer


class OneBitLamb(FreezingOptimizer):
    """1-bit LAMB (arXiv:2104.06069): LAMB for `freeze_step` steps, then one bit per element of its momentum.

    The warm-up is LAMB (arXiv:1904.00962): `p -= lr * c * u` with `u = m / (sqrt(v) + eps) + weight_decay * p` and, for
    each parameter, `c = |p| / |u|` between `min_coeff` and `max_coeff`, 1 where a norm is 0; a running mean of `c` with
    decay `coeff_beta` is kept. From step `freeze_step + 1` on `v` and that mean stay what they are, and momenta are
    averaged with one bit per element ([Note: the compressed mean]). What LAMB would make of `c` is estimated from a
    second variance `w`, which goes on with the gradient that the averaged momentum stands for,
    `(m - beta1 * m_before) / (1 - beta1)`: `c` is the mean times the largest element of `(sqrt(v) + eps) / (sqrt(w) +
    eps)`, between `factor_min` and `factor_max`, and no further than `factor_threshold` from the last factor
    (Algorithm 1).

    Differences from DeepSpeed's: momenta are not scaled to one size before they are exchanged, because each parameter
    has a scale of its own here, which such a factor leaves the result unchanged by; bias correction, when it is on,
    acts on the moments before `u` is made, as in the paper, and not on the learning rate; a parameter whose coefficient
    could never be measured, because its norm or its update was 0, goes on with 1 and not with 0; a checkpoint from the
    warm-up brings its mean of `c` along; no step is lost to initialising buffers. Stage 0 only. States are "exp_avg",
    "exp_avg_sq", "exp_avg_sq_fresh" (w), "worker_error" and "server_error", and for each parameter "lamb_coeff_freeze"
    and "last_factor".

    Args:
        params: parameters or groups of them; see `OneBitOptimizer` for `exp_avg_mask`.
        lr: learning rate.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
        weight_decay: factor of the weight decay.
        freeze_step: number of warm-up steps, at least 1.
        max_coeff: largest coefficient of the warm-up.
        min_coeff: smallest coefficient of the warm-up.
        coeff_beta: decay of the mean of the coefficients.
        factor_max: largest factor of the mean afterwards.
        factor_min: smallest factor.
        factor_threshold: most by which a factor differs from the last one, relative to that.
        bias_correction: whether to correct the moments for their start at zero.
        eps_inside_sqrt: add eps to the second moment before the root is taken.
        amsgrad: only False.
        cuda_aware: of no effect; for configurations of DeepSpeed.
        comm_backend_name: of no effect; communication is the run's own.

    Raises:
        ConfigError: for amsgrad, an unknown backend or a mask that does not fit.
        ValueError: for hyper-parameters out of range.
    """

    extents: ClassVar = {
        "exp_avg": Extent.WHOLE,
        "exp_avg_sq": Extent.UPDATED,
        "exp_avg_sq_fresh": Extent.UPDATED,
        "worker_error": Extent.WHOLE,
        "server_error": Extent.OWNED,
    }
    per_parameter: ClassVar = {"lamb_coeff_freeze": 0.0, "last_factor": 1.0}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        bias_correction: bool = False,
        eps_inside_sqrt: bool = False,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        for low, high in ((min_coeff, max_coeff), (factor_min, factor_max)):
            if not 0 <= low <= high:
                raise ValueError(f"Bounds of {low} and {high} are no range of numbers of at least 0.")
        if not (0 <= coeff_beta < 1 and factor_threshold >= 0):
            raise ValueError(f"coeff_beta={coeff_beta} is in [0, 1), factor_threshold={factor_threshold} at least 0.")
        self._coefficients: list[tuple[Block, list[int], torch.Tensor]] = []
        own = {
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
        }
        super().__init__(
            params,
            own,
            freeze_step=freeze_step,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt,
            amsgrad=amsgrad,
            cuda_aware=cuda_aware,
            comm_backend_name=comm_backend_name,
        )

    def get_lamb_coeffs(self) -> list[float]:
        """The coefficients of the last step, in the order of the parameters that took part; a list of its own."""
        known: dict[int, float] = {}
        for block, places, values in self._coefficients:
            stepped = [id(block.parameters[place]) for place in places]
            known.update(zip(stepped, values.tolist(), strict=True))
        parameters = [p for group in self.param_groups for p in group["params"]]
        return [known[id(p)] for p in parameters if id(p) in known]

    def _update(self, work: Work, count: int) -> None:
        self._coefficients = []
        if not self._is_frozen(count):
            for block in work.blocks:
                for span in block.spans():
                    self._warm(block, span, count)
                if count == self.freeze_step:
                    block.state("exp_avg_sq_fresh").copy_(block.state("exp_avg_sq"))
            return
        for block in work.blocks:
            for span in block.spans():
                self._advance(block, span, "worker_error", block.part_of_gradient(span))
        for block, mean in work.means():
            self._mask(block, mean)
            for span in block.spans():
                self._go_on(block, span, mean[span.start : span.stop], count)

    def _warm(self, block: Block, span: Span, count: int) -> None:
        gradient = block.part_of_gradient(span)
        self._advance(block, span, "exp_avg", gradient)
        self._vary(block, span, gradient)
        group = self.param_groups[span.group]
        update = self._direction(block, span, self._denominator(block, span, count), count)
        if group["weight_decay"]:
            update.add_(block.part_of_master(span), alpha=group["weight_decay"])
        norms = _norms(block.members_of(span, block.part_of_master(span).to(block.dtype)))
        length = _norms(block.members_of(span, update))
        measured = (norms > 0) & (length > 0)
        ones = torch.ones_like(norms)
        ratio = torch.where(measured, norms, ones) / torch.where(measured, length, ones)
        coefficients = torch.where(measured, ratio.clamp(group["min_coeff"], group["max_coeff"]), ones)
        places = block.places(span)
        known = block.number("lamb_coeff_freeze")
        before = known[places]
        known[places] = torch.where(measured, before.lerp(coefficients, 1 - group["coeff_beta"]), before)
        self._descend_by(block, span, update, coefficients)

    def _go_on(self, block: Block, span: Span, mean: torch.Tensor, count: int) -> None:
        group = self.param_groups[span.group]
        beta = group["betas"][0]
        momentum = block.part("exp_avg", span)
        self._vary(block, span, momentum.mul_(-beta).add_(mean).div_(1 - beta), "exp_avg_sq_fresh")
        momentum.copy_(mean)
        frozen = self._denominator(block, span, self.freeze_step)
        change = frozen / self._denominator(block, span, count, "exp_avg_sq_fresh")
        change.masked_fill_(frozen.isinf(), 0.0)
        factor = torch.stack(torch._foreach_max(block.members_of(span, change)))
        update = self._direction(block, span, frozen, count)
        if group["weight_decay"]:
            adaptive = _norms(block.members_of(span, update))
            update.add_(block.part_of_master(span), alpha=group["weight_decay"])
            length = _norms(block.members_of(span, update))
            share = torch.where(length > 0, adaptive / length.clamp_min(1e-38), 1.0).clamp_max(1.0)
            factor = factor * share + (1 - share)
        places = block.places(span)
        last = block.number("last_factor")
        allowed = group["factor_threshold"]
        factor = factor.clamp(group["factor_min"], group["factor_max"])
        factor = factor.clamp(last[places] * (1 - allowed), last[places] * (1 + allowed))
        last[places] = factor
        known = block.number("lamb_coeff_freeze")[places]
        self._descend_by(block, span, update, torch.where(known > 0, known, 1.0) * factor)

    def _direction(self, block: Block, span: Span, denominator: torch.Tensor, count: int) -> torch.Tensor:
        """The momentum over the root, in place of that."""
        group = self.param_groups[span.group]
        correction = 1 - group["betas"][0] ** count if group["bias_correction"] else 1.0
        return torch.div(block.part("exp_avg", span), denominator, out=denominator).div_(correction)

    def _descend_by(self, block: Block, span: Span, update: torch.Tensor, coefficients: torch.Tensor) -> None:
        """`p -= lr * coefficient * update`, parameter by parameter; `update` is used up."""
        self._coefficients.append((block, block.members(span), coefficients))
        torch._foreach_mul_(block.members_of(span, update), list(coefficients.unbind()))
        block.part_of_master(span).sub_(update.mul_(float(self.param_groups[span.group]["lr"])))


def _norms(views: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(views))
