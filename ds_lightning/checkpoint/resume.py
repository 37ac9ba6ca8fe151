"""What a resumed run takes up beside weights and optimizer states: its place in the data and in random numbers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from ds_lightning.checkpoint import rng
from ds_lightning.checkpoint.data_position import DataPosition
from ds_lightning.comm.agreement import Agreement
from ds_lightning.topology import Topology


class Resumption:
    """Owns the data position and the states of random number generators of this rank.

    The states are restored twice: before the iterators of the train dataloaders are made, so that these seed their
    workers as in the unbroken run, and as the last thing before the first batch, because iterators and hooks have drawn
    in between.
    """

    def __init__(self) -> None:
        self._position = DataPosition()
        self._loaded: dict[str, Any] | None = None
        self._before_window: dict[str, Any] | None = None

    # Saving ---------------------------------------------------------------------------------------------------------

    def state(self, trainer: pl.Trainer, topology: Topology) -> dict[str, Any]:
        """`{"data": ..., "rng": [one entry per rank]}`, plain data. Collective."""
        if self._loaded is not None:
            mine = self._loaded  # nothing has been trained since it was loaded
        elif self._before_window is not None and self._position.is_within_window(trainer):
            mine = self._before_window
        else:
            mine = rng.capture(topology.device)
        return {"data": self._position.state(trainer), "rng": list(Agreement(topology).everyone(mine))}

    def between_steps(self, trainer: pl.Trainer, topology: Topology) -> None:
        """Called where an accumulation window may begin: a checkpoint within it goes back to here."""
        if trainer.accumulate_grad_batches > 1:
            self._before_window = rng.capture(topology.device)

    def end_validation(self, trainer: pl.Trainer, topology: Topology) -> None:
        """Called after each validation: its iterators have drawn."""
        if trainer.state.fn == TrainerFn.FITTING and not self._position.is_within_window(trainer):
            self.between_steps(trainer, topology)

    def begin_batch(self, trainer: pl.Trainer, topology: Topology, batch_idx: int) -> None:
        """Called before each training batch."""
        self._position.begin_batch(trainer)
        if batch_idx == 0:
            self.between_steps(trainer, topology)

    # Resuming -------------------------------------------------------------------------------------------------------

    def load(self, trainer: pl.Trainer, topology: Topology, checkpoint: dict[str, Any]) -> None:
        """Take what concerns this rank from a checkpoint that `fit` resumes from."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        saved = checkpoint.get("ds_lightning") or {}
        self._position = DataPosition(saved.get("data"))
        states = saved.get("rng") or []
        self._loaded = self._before_window = None
        if len(states) == topology.world_size:
            self._loaded = states[topology.rank]
        elif states:
            rank_zero_info(
                f"ds_lightning: the checkpoint has the states of random number generators of {len(states)} ranks; they "
                f"are not restored on {topology.world_size}, so dropout and augmentations differ from an unbroken run."
            )

    def process_dataloader(self, trainer: pl.Trainer, topology: Topology, loader: Any) -> Any:
        """The dataloader to be used in place of `loader`. Collective when a run resumes."""
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return loader
        made = self._position.process(trainer, loader, Agreement(topology))
        if self._loaded is not None:
            rng.restore(self._loaded, topology.device)
        return made

    def start_training(self, trainer: pl.Trainer, topology: Topology) -> None:
        """Called as the last thing before the loops begin."""
        if self._loaded is not None:
            rng.restore(self._loaded, topology.device)
            self._loaded = None
            loaders = trainer.fit_loop._combined_loader
            if self._position.begins_epoch and loaders is not None:
                rng.draw_for_iterators(loaders.flattened)
        self.between_steps(trainer, topology)
