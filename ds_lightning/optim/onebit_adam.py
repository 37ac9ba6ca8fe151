"""1-bit Adam."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from ds_lightning.ops import optim as ops
from ds_lightning.optim.adam import numbers_of_step
from ds_lightning.optim.blocks import Block, Extent, Work
from ds_lightning.optim.onebit import FreezingOptimizer


class OneBitAdam(FreezingOptimizer):
    """1-bit Adam (arXiv:2102.02888): Adam for `freeze_step` steps, then one bit per element of its momentum.

    In the warm-up gradients are averaged as ever. From step `freeze_step + 1` on the variance stays what it is, every
    rank takes its own gradient into the momentum, and the momenta are averaged with error feedback (Algorithm 1; the
    exchange is [Note: the compressed mean]). The update is `p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)`: the
    paper has no weight decay, DeepSpeed adds it to the update, which is the decoupled one.

    Stage 0, and stage 1: variance and masters are sharded there, so fp32 masters and variances cost 8 / world size
    bytes per element; momentum and worker error stay whole on every rank (8 bytes per element), because each rank
    compresses all of its own momentum, and so does its own gradient (4). New parameters are all-gathered in the compute
    dtype as at stage 1 with any optimizer; at fp32 that alone is half of what an all-reduce sends.

    Differences from DeepSpeed's: no step is lost to initialising buffers, the first compressed step is
    `freeze_step + 1` and not `freeze_step`, and `bias_correction` acts when it is on (the correction of the variance
    stops with the variance). States are "exp_avg", "exp_avg_sq", "worker_error" and "server_error".

    Args:
        params: parameters or groups of them; see `OneBitOptimizer` for `exp_avg_mask`.
        lr: learning rate.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
        weight_decay: factor of the weight decay.
        freeze_step: number of warm-up steps, at least 1; the paper takes 15 to 25 % of all steps.
        bias_correction: whether to correct the moments for their start at zero.
        eps_inside_sqrt: add eps to the second moment before the root is taken.
        amsgrad: only False.
        cuda_aware: of no effect; for configurations of DeepSpeed.
        comm_backend_name: of no effect; communication is the run's own.

    Raises:
        ConfigError: for amsgrad, an unknown backend or a mask that does not fit.
        ValueError: for hyper-parameters out of range.
    """

    stages = (0, 1)
    extents: ClassVar = {
        "exp_avg": Extent.WHOLE,
        "exp_avg_sq": Extent.UPDATED,
        "worker_error": Extent.WHOLE,
        "server_error": Extent.OWNED,
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        bias_correction: bool = False,
        eps_inside_sqrt: bool = False,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        super().__init__(
            params,
            {},
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

    def _update(self, work: Work, count: int) -> None:
        if not self._is_frozen(count):
            for block in work.blocks:
                self._warm(block, count)
            return
        for block in work.blocks:
            if count == self.freeze_step + 1 and block.updated != (0, block.unit.numel):
                work.gather(block, block.state("exp_avg"))  # so far each rank has had its own chunk of it
            for span in block.spans():
                self._advance(block, span, "worker_error", block.part_of_gradient(span))
        for block, mean in work.means():
            self._mask(block, mean)
            for span in block.spans():
                block.part("exp_avg", span).copy_(mean[span.start : span.stop])
            for span in block.spans(block.updated):
                denominator = self._denominator(block, span, self.freeze_step)
                self._descend(block, span, torch.div(block.part("exp_avg", span), denominator, out=denominator), count)

    def _warm(self, block: Block, count: int) -> None:
        for span in block.spans(block.updated):
            group = self.param_groups[span.group]
            gradient, master = block.part_of_gradient(span), block.part_of_master(span)
            if group["eps_inside_sqrt"]:
                self._advance(block, span, "exp_avg", gradient)
                self._vary(block, span, gradient)
                self._descend(block, span, block.part("exp_avg", span) / self._denominator(block, span, count), count)
                continue
            ops.adam(
                [master],
                [gradient],
                [block.part("exp_avg", span)],
                [block.part("exp_avg_sq", span)],
                [],
                **numbers_of_step(group, count),
            )
