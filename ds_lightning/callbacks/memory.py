"""Memory of a run, per rank: the peak of the process or GPU, and what the model states take."""

import resource
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak so far: of the GPU it trains on, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MemoryUse(Callback):
    """Measures at the end of training, when every buffer exists, on all ranks.

    Attributes:
        peak: Peak bytes of each rank.
        baseline: Peak bytes of each rank when training began: the interpreter, libraries and data.
        model_states: Bytes of parameters, gradients and optimizer states of each rank.
    """

    def __init__(self) -> None:
        self.peak: list[int] = []
        self.baseline: list[int] = []
        self.model_states: list[int] = []
        self._baseline = 0
        self._states = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remember what the process took before the first training."""
        if stage == "fit" and not self._baseline:
            self._baseline = peak_bytes(trainer.strategy.root_device)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Measure once while gradients and optimizer states are alive together."""
        if trainer.global_step and not self._states:
            self._states = _model_state_bytes(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the numbers of all ranks; every rank takes part."""
        device = trainer.strategy.root_device
        own = (
            peak_bytes(device),
            self._baseline,
            self._states or _model_state_bytes(trainer, pl_module),
        )
        every = [own] * trainer.world_size
        if torch.distributed.is_initialized():
            torch.distributed.all_gather_object(every, own)
        peak, baseline, states = zip(*every, strict=True)
        self.peak, self.baseline, self.model_states = list(peak), list(baseline), list(states)


def _model_state_bytes(trainer: Trainer, pl_module: LightningModule) -> int:
    measure = getattr(trainer.strategy, "model_state_bytes", None)
    if measure is not None:
        return int(measure())
    storages: dict[int, int] = {}  # a tied or viewed tensor counts once
    for tensor in _states(trainer, pl_module):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _states(trainer: Trainer, pl_module: LightningModule) -> Iterator[Tensor]:
    for parameter in pl_module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
