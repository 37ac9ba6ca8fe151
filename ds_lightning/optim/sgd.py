"""SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ds_lightning.ops import optim as ops
from ds_lightning.optim.native import NativeOptimizer, Slices, check_positive, moment_dtype_name


class SGD(NativeOptimizer):
    """SGD as `torch.optim.SGD` has it. The formula is that of `ds_lightning.ops.optim.sgd`.

    The state is "momentum_buffer", where there is momentum; its first value is the first gradient. Where that is not
    fp32 there is a "step" too.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        momentum: decay of the buffer; 0 for no buffer.
        dampening: the gradient's share in the buffer is `1 - dampening`.
        weight_decay: factor of the parameters that is added to gradients.
        nesterov: whether to look ahead; needs momentum and no dampening.
        moment_dtype: of the buffer: "fp32", "bf16" or "param", the dtype of the parameter. 16 bits are rounded
            stochastically, by dice that "step" seeds.
        torch_only: switches of `torch.optim.SGD`; on, they are refused.

    Raises:
        ConfigError: for a switch that only `torch.optim` has.
        ValueError: for hyper-parameters out of range.
    """

    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        moment_dtype: str | torch.dtype = "fp32",
        **torch_only: Any,
    ) -> None:
        check_positive(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov=True needs momentum above 0 and dampening=0.")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "moment_dtype": moment_dtype_name(moment_dtype),
        }
        super().__init__(params, defaults, torch_only)

    def _step(self, group: dict[str, Any], slices: Slices, grad_scale: float) -> None:
        name = "momentum_buffer"
        if group["momentum"] == 0:
            parts = [(slices, False)]
        else:
            # torch keeps a None where there is no buffer yet.
            new = [k for k, state in enumerate(slices.states) if state.get(name) is None]
            if len(new) in (0, len(slices.states)):
                parts = [(slices, bool(new))]
            else:
                old = [k for k, state in enumerate(slices.states) if state.get(name) is not None]
                parts = [(slices.take(new), True), (slices.take(old), False)]
        for each, first in parts:
            for count, part in self._rounds(group, each) if group["momentum"] != 0 else ((0, each),):
                ops.sgd(
                    part.params,
                    part.grads,
                    self._moments(group, part, name) if group["momentum"] != 0 else (),
                    part.copies,
                    lr=float(group["lr"]),
                    momentum=group["momentum"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                    weight_decay=group["weight_decay"],
                    first=first,
                    grad_scale=grad_scale,
                    seed=count,
                )
