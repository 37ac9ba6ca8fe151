"""How the gradients of all ranks become one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Averaging:
    """The factors before and behind the sum over ranks; without communication (one rank) they hold as well.

    | | before | behind |
    |---|---|---|
    | mean | `1 / predivide` | `predivide / world_size` |
    | mean, `prescale` | `1 / world_size` | 1 |
    | sum | 1 | 1 |

    The mean is the same for any `predivide`, but for rounding: what it changes is the size of the numbers while they
    are added, where gradients travel in 16 bit.

    Attributes:
        op: `gradient_allreduce_op`: "mean" or "sum".
        prescale: `prescale_gradients`; `predivide` then means nothing.
        predivide: `gradient_predivide_factor`.
    """

    op: str = "mean"
    prescale: bool = False
    predivide: float = 1.0

    def before(self, world_size: int) -> float:
        """Factor of each rank's gradient, in the dtype in which it travels."""
        if self.op == "sum":
            return 1.0
        return 1.0 / world_size if self.prescale else 1.0 / self.predivide

    def behind(self, world_size: int) -> float:
        """Factor of the sum, in fp32."""
        if self.op == "sum" or self.prescale:
            return 1.0
        return self.predivide / world_size
