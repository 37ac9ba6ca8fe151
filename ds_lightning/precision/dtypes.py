"""Which dtype each parameter computes in, and in which its optimizer updates it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ds_lightning.config.schema import DeepSpeedConfig

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""By their names in a configuration."""


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """Dtypes of parameters.

    Attributes:
        compute: 16-bit dtype of parameters while they compute; None leaves each as it is.
        frozen_masters: keep what the user gave in fp32 of frozen matrices too.
        narrow_masters: matrices have no fp32 master; their optimizer's results are rounded stochastically.
        narrow_states: with `narrow_masters`, optimizer states of matrices are kept in bf16 too.
        low: 16-bit dtype in which gradients of `safe` modules travel where parameters stay in fp32; None: as they are.
        safe: classes of these modules.

    With `compute`, matrices compute and travel in 16 bit and have fp32 masters. Vectors and scalars (norms, biases,
    gates) stay in fp32 altogether: autocast and every norm layer take them so, their memory does not matter, and
    batch norm refuses 16-bit weights beside fp32 statistics. Recurrent layers stay in fp32 too, because their kernels
    want one dtype.

    A frozen matrix has no master: nothing is ever added to it that 16 bits could not hold, and it computes with the
    same values whether there is one or not. What the user gave in fp32 is rounded once, to nearest. `frozen_masters`
    keeps it, at 4 bytes per element, which are sharded from stage 1 on.

    With `low`, parameters compute, are gathered and are updated in fp32: autocast casts them, operation by operation,
    and code that switches it off computes with all of their bits. Gradients are rounded once for their way.
    """

    compute: torch.dtype | None = None
    frozen_masters: bool = False
    narrow_masters: bool = False
    narrow_states: bool = False
    low: torch.dtype | None = None
    safe: tuple[type[nn.Module], ...] = ()

    def with_masters_of(self, config: DeepSpeedConfig) -> DtypePolicy:
        """The policy with what `*_master_weights_and_grads` and `bf16_optimizer_states` of a configuration say."""
        fp16 = self.compute is torch.float16 and config.fp16.fp16_master_weights_and_grads
        bf16 = self.compute is torch.bfloat16 and config.bf16.bf16_master_weights_and_grads
        return replace(self, narrow_masters=fp16 or bf16, narrow_states=bf16 and config.bf16.bf16_optimizer_states)

    def of(
        self, owner: nn.Module, given: torch.dtype, ndim: int, frozen: bool = False
    ) -> tuple[torch.dtype, torch.dtype]:
        """`(compute, master)` dtypes of a parameter.

        Args:
            owner: the module that registers it.
            given: its dtype as the user made it.
            ndim: its dimensions.
            frozen: nothing trains it.
        """
        if (
            self.compute is None
            or given is not torch.float32
            or ndim < 2
            or isinstance(owner, nn.RNNBase | nn.RNNCellBase)
        ):
            return given, given
        narrow = not self.frozen_masters if frozen else self.narrow_masters
        return self.compute, self.compute if narrow else given

    def travels(self, owners: Iterable[nn.Module], given: torch.dtype) -> torch.dtype | None:
        """In which dtype gradients of a parameter travel; None: in the dtype in which it computes.

        Args:
            owners: the modules that register it; one that is safe is enough.
            given: its dtype as the user made it.
        """
        if self.low is None or given is not torch.float32:
            return None
        return self.low if any(isinstance(owner, self.safe) for owner in owners) else None
