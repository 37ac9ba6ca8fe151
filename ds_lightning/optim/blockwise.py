"""Runs an optimizer that steps on whole units at once: the 1-bit family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_lightning.comm.collectives import Collectives
from ds_lightning.comm.compressed import CompressedMean
from ds_lightning.errors import ConfigError
from ds_lightning.offload.policy import OffloadPolicy
from ds_lightning.optim.blocks import Block, Work
from ds_lightning.optim.onebit import OneBitOptimizer
from ds_lightning.optim.sharded import ShardedOptimizer
from ds_lightning.optim.unit_states import UnitState
from ds_lightning.zero.gradients import UnitGradients
from ds_lightning.zero.logical import flat_range

GATHER_TAG = 0


class BlockwiseOptimizer(ShardedOptimizer):
    """Owns the blocks of one 1-bit optimizer on this rank.

    Args:
        optimizer: the user's.
        first_group: index of its first group among the groups of all optimizers.
        collectives: how its momenta travel.
    """

    def __init__(self, optimizer: OneBitOptimizer, first_group: int, collectives: Collectives) -> None:
        super().__init__(optimizer, first_group, elementwise=True)
        self.onebit = optimizer
        self.mean = CompressedMean(collectives)
        self._collectives = collectives
        self._blocks: dict[UnitGradients, Block] = {}
        self._settled = 0  # after how many steps everything was made equal

    @property
    def local(self) -> bool:
        """Whether the gradients of the next step are those of each rank alone."""
        return self.onebit.local_gradients

    @property
    def kept_keys(self) -> frozenset[str]:
        """Keys of groups that checkpoints neither hold nor change."""
        return self.onebit.kept_keys

    def adopt(self, gradients: UnitGradients) -> None:
        """Make the block of a unit, if it has parameters of this optimizer."""
        unit, buffers = gradients.unit, gradients.buffers
        if any(slot.group in self.groups for slot in unit.slots):
            self._blocks[gradients] = Block(
                unit,
                self.first_group,
                buffers.owned,
                (buffers.start, buffers.stop),
                self.onebit.extents,
                self.onebit.per_parameter,
                buffers.full.device,
                gradients.parameters,
            )
            self.take_user_state(gradients)

    def drop(self, gradients: UnitGradients) -> None:
        """Forget the block of a unit."""
        self._blocks.pop(gradients, None)

    def prepare_step(self) -> None:
        """Hand the optimizer what its next step is about. In a step, after `swap_in`."""
        working = []
        for gradients in self.units:
            block, buffers = self._blocks[gradients], gradients.buffers
            working.append(block)
            if not gradients.valid:
                block.begin(buffers.master, buffers.master[:0], 0, [])
                continue
            if self.local and not gradients.whole:
                raise ConfigError(
                    f"Gradients from before step {self.onebit.steps + 1} are still there: {type(self.onebit).__name__} "
                    "takes each rank's own ones from that step on. Call zero_grad() after each step."
                )
            start, stop = (0, gradients.unit.numel) if gradients.whole else buffers.owned
            present = [place for place, there in enumerate(gradients.present) if there]
            block.begin(buffers.master, gradients.read(start, stop), start, present)
        self.onebit.prepare_step(Work(working, self.mean, self._gather))

    def _gather(self, block: Block, state: torch.Tensor) -> None:
        self._collectives.all_gather(state, block.unit.name, GATHER_TAG, state.numel()).wait()

    def settle(self, everything: bool) -> list[int]:
        """Make equal on all ranks, as the mean, what differs between them. Collective.

        Args:
            everything: what a checkpoint needs; otherwise what parameters depend on.

        Returns:
            Units whose master values have changed.
        """
        if self._settled == self.onebit.steps:
            return []
        blocks = []
        for gradients, block in self._blocks.items():
            block.master = gradients.buffers.master
            blocks.append(block)
        try:
            with torch.no_grad():
                changed = self.onebit.settle(blocks, self._average, everything)
        finally:
            for block in blocks:
                block.end()
        if everything:  # once: a mean of equal numbers may round
            self._settled = self.onebit.steps
        return sorted(block.unit.index for block in blocks) if changed else []

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors of whole units by their means over ranks."""
        for values in tensors:
            self._collectives.average(values, "states of a 1-bit optimizer", GATHER_TAG)

    # State ----------------------------------------------------------------------------------------------------------

    def load_unit(self, gradients: UnitGradients, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the states of a unit, see `ShardedOptimizer.load_unit`."""
        if gradients in self._blocks:
            self._blocks[gradients].load(states, flat_range)
            self.onebit.restart()
            self._settled = -1

    def unit_state(self, gradients: UnitGradients) -> UnitState:
        """States of a unit on this rank, by parameter name and key."""
        return self._blocks[gradients].saved() if gradients in self._blocks else {}

    @property
    def state_nbytes(self) -> int:
        """Bytes of states on this rank."""
        return sum(block.nbytes for block in self._blocks.values())


def check_blockwise(optimizers: Sequence[torch.optim.Optimizer], stage: int, offload: OffloadPolicy | None) -> None:
    """Refuse what a 1-bit optimizer cannot work with.

    Args:
        optimizers: all of a run.
        stage: of ZeRO.
        offload: what lives elsewhere, if anything does.

    Raises:
        ConfigError: with what to do instead.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, OneBitOptimizer):
            continue
        name = type(optimizer).__name__
        stages = " or ".join(map(str, optimizer.stages))
        if stage not in optimizer.stages:
            raise ConfigError(
                f"{name} exchanges whole momenta and works at stage {stages}, the stage is {stage}. Use "
                f"ZeroStrategy(stage={optimizer.stages[-1]}), or Adam."
            )
        if len(optimizers) > 1:
            raise ConfigError(
                f"{name} must be the only optimizer of a run, there are {len(optimizers)}: it decides when gradients "
                "are averaged. Give its parameters to several groups of one optimizer."
            )
        if offload is not None:
            raise ConfigError(f"{name} keeps its states on the device. Leave offload_optimizer out, or use Adam.")
