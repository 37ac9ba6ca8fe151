"""Which dtype each parameter computes in, and in which its optimizer updates it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """Dtypes of parameters.

    Attributes:
        compute: 16-bit dtype of parameters while they compute; None leaves each as it is.

    With `compute`, matrices compute and travel in 16 bit and have fp32 masters. Vectors and scalars (norms, biases,
    gates) stay in fp32 altogether: autocast and every norm layer take them so, their memory does not matter, and
    batch norm refuses 16-bit weights beside fp32 statistics. Recurrent layers stay in fp32 too, because their kernels
    want one dtype. Frozen matrices have masters as well: what the user gave in fp32 is saved, and unfrozen later, in
    fp32. Who wants them in 16 bit throughout gives them in 16 bit.
    """

    compute: torch.dtype | None = None

    def of(self, owner: nn.Module, parameter: nn.Parameter) -> tuple[torch.dtype, torch.dtype]:
        """`(compute, master)` dtypes of a parameter that `owner` registers."""
        if (
            self.compute is None
            or parameter.dtype is not torch.float32
            or parameter.ndim < 2
            or isinstance(owner, nn.RNNBase | nn.RNNCellBase)
        ):
            return parameter.dtype, parameter.dtype
        return self.compute, parameter.dtype
