"""Lightning's counters of epochs and batches: what they say after loading, and how to correct them.

[Note: what Lightning 2.6 does when it resumes]
It restores its counters and never the position in the data: the k batches done are counted, and the first batches of
the epoch's order come again under the numbers k, k+1, ... It distinguishes, by the counters alone:
- within an epoch: the same epoch goes on with batch k;
- after the last batch, in `on_train_batch_end`: the next epoch begins, without `on_train_epoch_start`;
- after the last batch, in a validation: the epoch is brought to its end;
- after the epoch: the next one begins. But with `max_steps` every loop counts as interrupted, so that a batch more is
  trained as number k of an epoch of its own;
- `max_steps` has ended the run within an epoch: counted as a whole epoch. With `max_steps` the next one goes on with
  batch k, without it the next one begins with batch 0.
The iterators of the first epoch are made before samplers are told its number, and are not made again.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop


class LoopProgress:
    """The counters of a Trainer's fit loop. In a resumed run they may be changed until training starts."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._fit = trainer.fit_loop
        # Lightning declares the counters by their base class.
        self._epochs: Any = trainer.fit_loop.epoch_progress.current
        self._progress: Any = trainer.fit_loop.epoch_loop.batch_progress

    @property
    def resuming(self) -> bool:
        """Whether a checkpoint has been loaded and its first epoch is not over."""
        return bool(self._fit.is_resuming)

    @property
    def continues(self) -> bool:
        """Whether Lightning goes on with the batch counter as it is, rather than with 0."""
        return bool(self._fit.restarting)

    @property
    def epoch(self) -> int:
        """The number that samplers are given now."""
        return int(self._epochs.processed)

    @property
    def within_epoch(self) -> bool:
        """Whether an epoch has begun and has not been brought to its end."""
        return bool(self._epochs.processed < self._epochs.started)

    @property
    def batches(self) -> int:
        """Batches of this rank in the present epoch, or in the last one between epochs."""
        return int(self._progress.current.processed)

    @property
    def after_last_batch(self) -> bool:
        """Whether the present epoch has no more batches."""
        return bool(self._progress.is_last_batch) or self.batches >= self._fit.max_batches

    def move_to(self, batches: int, *, back: bool = False) -> None:
        """Go on with this batch of the epoch.

        Args:
            batches: how many are done.
            back: the batch at which the run was saved comes again, so that what Lightning makes up for after a batch
                (a step of the loggers, a validation that was due) must be left out.
        """
        self._add(batches - self.batches)
        self._progress.is_last_batch = False
        if back:
            for counter in (self._progress.total, self._progress.current):
                counter.ready = counter.started = counter.completed = counter.processed

    def begin_next_epoch(self, length: float) -> int:
        """Go on with the first batch of the next epoch. Returns the number that samplers will be given then.

        Args:
            length: batches of an epoch; infinite where it is unknown.
        """
        if self.continues and not self.within_epoch:
            base: Any = _Loop.restarting
            base.fset(self._fit, False)  # FitLoop's own setter insists when there is max_steps
            total: Any = self._fit.epoch_progress.total
            for epochs in (total, self._epochs):
                epochs.ready = epochs.started  # one that was about to start is counted when it does
        if not self.continues or length == float("inf"):
            return self.epoch + self.within_epoch
        if not self._ends_in_validation(length):
            # As saved in on_train_batch_end of the last batch.
            self._add(int(length) - self.batches)
            self._progress.is_last_batch = True
            for counter in (self._progress.total, self._progress.current):
                counter.ready = counter.started = counter.processed
                counter.completed = counter.processed - 1
        return self.epoch + 1

    def _ends_in_validation(self, length: float) -> bool:
        """Saved in the validation after the last batch, and that validation is due here, too."""
        current = self._progress.current
        return current.completed == current.processed == length and bool(self._fit.epoch_loop._should_check_val_epoch())

    @property
    def makes_iterators_again(self) -> bool:
        """Whether the first epoch to be trained makes new iterators of its loaders."""
        current = self._progress.current
        return self.continues and self.within_epoch and self.after_last_batch and current.completed == current.processed

    def _add(self, batches: int) -> None:
        for counter in (self._progress.total, self._progress.current):
            counter.ready += batches
            counter.started += batches
            counter.processed += batches
            counter.completed += batches
