"""What quantization took from gradients comes back with the next ones (LoCo, arXiv:2407.04480, algorithm 1).

With `e` the error that is carried for a gradient `g`, `h = g + e` is sent, which arrives as `Q(h)`, and
`beta * e + (1 - beta) * (h - Q(h))` is carried on. So with `beta = 0` nothing is lost, only late: `g + e_old` is
`Q(h) + e_new`. Errors are kept as int8 with a scale per block, one byte for each element that a rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_lightning.ops.quantize import dequantize, quantize, scale_count


@dataclass(frozen=True, slots=True)
class FeedbackOptions:
    """`zeropp_loco_param`.

    Attributes:
        beta: share of the carried error that stays when a new one comes (`err_beta`).
        reset: optimizer steps after which errors are forgotten (`reset_T`).
    """

    beta: float = 0.8
    reset: int = 1024


class ErrorFeedback:
    """Owns the errors of one rank.

    Args:
        options: from the configuration.
        block: elements that share a scale.
    """

    def __init__(self, options: FeedbackOptions, block: int) -> None:
        self._options = options
        self._block = block
        self._errors: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps = 0

    def quantize(
        self,
        key: tuple[int, int],
        payload: torch.Tensor,
        scales: torch.Tensor,
        values: torch.Tensor,
        take: Callable[[int, torch.dtype], torch.Tensor],
        give: Callable[[torch.Tensor], None],
    ) -> None:
        """As `ops.quantize.quantize` to 4 bits of values and what is carried for them; carries on what is lost.

        Args:
            key: whose values: the unit, and the step of its reduction.
            payload: as there.
            scales: as there.
            values: as there, flat.
            take: gives scratch memory.
            give: takes it back.
        """
        beta, block = self._options.beta, self._block
        error = self._errors.get(key)
        sent = take(values.numel(), torch.float32).copy_(values)
        if error is not None:
            dequantize(sent, *error, block=block, bits=8, accumulate=True)
        quantize(payload, scales, sent, block=block, bits=4)
        dequantize(sent, payload, scales.neg(), block=block, bits=4, accumulate=True)
        sent.mul_(1.0 - beta)
        if error is None:
            with torch.inference_mode(False):
                count = scale_count(values.numel(), block)
                carried = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
                error = self._errors[key] = carried, torch.empty(count, device=values.device)
        elif beta:
            dequantize(sent, error[0], error[1] * beta, block=block, bits=8, accumulate=True)
        quantize(*error, sent, block=block, bits=8)
        error[1].nan_to_num_(nan=0.0)  # what overflowed has no error worth carrying
        give(sent)

    def stepped(self) -> None:
        """An optimizer step was made."""
        self._steps += 1
        if self._steps % self._options.reset == 0:
            self.forget()

    def rescale(self, factor: float) -> None:
        """Gradients are that much larger from now on: the loss scale changes."""
        for _, scales in self._errors.values():
            scales.mul_(factor)

    def forget(self) -> None:
        """Begin anew: the gradients that errors belong to counted for nothing, or they are too old."""
        self._errors.clear()

    def drop(self, unit: int) -> None:
        """A unit is gone."""
        self._errors = {key: error for key, error in self._errors.items() if key[0] != unit}

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return sum(tensor.nbytes for error in self._errors.values() for tensor in error)
