"""Where training is in its data: what a checkpoint says about it, and how a resumed run goes on from there."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls, _set_sampler_epoch, sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ds_lightning.checkpoint.data_order import (
    ResumedSampler,
    batches_of,
    fingerprint,
    order_of_all_ranks,
    remainder,
)
from ds_lightning.checkpoint.loop_progress import LoopProgress
from ds_lightning.comm.agreement import Agreement

SAVE_BETWEEN_EPOCHS = "Or use checkpoints from the ends of epochs."
USE_LIGHTNINGS_SAMPLER = (
    "Use a torch DistributedSampler, or leave the sampler to Lightning (use_distributed_sampler=True). "
    + SAVE_BETWEEN_EPOCHS
)
USE_STATEFUL_LOADER = (
    "Give the dataloader state_dict and load_state_dict, as torchdata's StatefulDataLoader has. " + SAVE_BETWEEN_EPOCHS
)
LIGHTNINGS_WARNING = ".*ended before the epoch ended and your dataloader is not resumable"


@dataclass(frozen=True, slots=True)
class LoaderOrder:
    """How a dataloader orders its samples.

    Attributes:
        kind: "distributed" (torch's sampler), "wrapped" (Lightning's around the user's), "sequential" (on every rank),
            "stateful" (has a state of its own), or what else it is; the first three can go on anywhere.
        sampler: gives this rank's samples, for the first three kinds.
        batch_size: samples of a rank's batch; 1 where unknown.
        drop_last: whether an incomplete batch is left out.
        obstacle: why the order cannot go on in the middle of an epoch, and what to do; empty for the first three kinds.
    """

    kind: str
    sampler: DistributedSampler[Any] | None = None
    batch_size: int = 1
    drop_last: bool = False
    obstacle: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, loader: object) -> LoaderOrder:
        """Find out by the types of its parts."""
        if isinstance(loader, _Stateful):
            return cls("stateful", obstacle=("its own state is not in the checkpoint", SAVE_BETWEEN_EPOCHS))
        if not isinstance(loader, DataLoader):
            return cls("iterable", obstacle=(f"{type(loader).__name__} begins at its start", USE_STATEFUL_LOADER))
        if isinstance(loader.dataset, IterableDataset):
            why = f"{type(loader.dataset).__name__} is an IterableDataset, which begins at its start"
            return cls("iterable", obstacle=(why, USE_STATEFUL_LOADER))
        batches = loader.batch_sampler
        if batches is None:  # batch_size=None: the sampler's samples are the batches
            return cls._of_sampler(loader.sampler, 1, False)
        if type(batches) is not BatchSampler:
            name = type(batches).__name__
            why = f"it is not known which samples the batch sampler {name} puts first"
            return cls(f"batches:{name}", obstacle=(why, USE_STATEFUL_LOADER))
        return cls._of_sampler(batches.sampler, batches.batch_size, batches.drop_last)

    @classmethod
    def _of_sampler(cls, sampler: Any, batch_size: int, drop_last: bool) -> LoaderOrder:
        if isinstance(sampler, ResumedSampler):
            return cls._of_sampler(sampler.original, batch_size, drop_last)
        if type(sampler) is DistributedSampler:
            return cls("distributed", sampler, batch_size, drop_last)
        if type(sampler) is DistributedSamplerWrapper:
            return cls("wrapped", sampler, batch_size, drop_last)
        if type(sampler) is SequentialSampler:
            data: Any = sampler.data_source
            alone: DistributedSampler[Any] = DistributedSampler(data, 1, 0, shuffle=False)
            return cls("sequential", alone, batch_size, drop_last)
        if type(sampler) is RandomSampler:
            obstacle = ("RandomSampler shuffles anew, on each rank by itself", USE_LIGHTNINGS_SAMPLER)
            return cls("random", None, batch_size, drop_last, obstacle)
        name = type(sampler).__name__
        obstacle = (f"the order of the sampler {name} is not known", USE_LIGHTNINGS_SAMPLER)
        return cls(f"sampler:{name}", None, batch_size, drop_last, obstacle)

    def describe(self) -> dict[str, Any]:
        """What a reader must know to find the same order again; plain data."""
        found: dict[str, Any] = {"kind": self.kind, "batch_size": self.batch_size, "drop_last": self.drop_last}
        sampler = self.sampler
        if sampler is not None:
            found.update(
                size=len(sampler.dataset),  # type: ignore[arg-type]
                replicas=sampler.num_replicas,
                seed=sampler.seed,
                shuffle=sampler.shuffle,
                sampler_drop_last=sampler.drop_last,
            )
        return found

    def batches_per_epoch(self) -> int:
        """Batches of this rank in a whole epoch."""
        assert self.sampler is not None
        return batches_of(len(self.sampler), self.batch_size, self.drop_last)

    def samples_after(self, batches: int) -> int:
        """Samples over all ranks that so many batches of each of them have used."""
        return batches * self.batch_size * (self.sampler.num_replicas if self.sampler is not None else 1)


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a loader was when its run resumed: after `samples` of its order, before batch number `batch`."""

    samples: int = 0
    batch: int = 0
    rest: int | None = None
    """Batches left of that order; None for all."""


class DataPosition:
    """Knows how far training is in its data, over all ranks; in a resumed run, goes on from there.

    Counts samples, not batches, so that another number of ranks or another batch size goes on after the same sample.
    See [Note: samples, not batches] and [Note: what Lightning 2.6 does when it resumes].

    A checkpoint between two optimizer steps of an accumulation window has the position before the window: its
    gradients are in no checkpoint, so its samples must come again to count once.

    Args:
        entry: what `state` returned in the run that is resumed; None for a fresh run, or a checkpoint without it.
    """

    def __init__(self, entry: dict[str, Any] | None = None) -> None:
        self._entry = entry
        self._planned = False
        self._shift = 0
        self._first_epoch = 0
        self._restores = False
        self._loaders: list[tuple[LoaderOrder, int]] = []
        self._starts: list[_Start] = []
        self._start_epoch: int | None = None
        self._epoch: int | None = None  # of the order from which the last batch came
        self._fingerprint: tuple[int, str] | None = None
        self._filter: Any = None
        self.begins_epoch = False
        """Whether the resumed run begins with a whole epoch whose iterators exist already."""

    # Saving ---------------------------------------------------------------------------------------------------------

    def state(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        """The position, as plain data; None when no training data is known."""
        loaders = trainer.fit_loop._combined_loader
        if self._epoch is None and self._entry is not None:
            return self._entry  # nothing has been trained since it was loaded
        if loaders is None:
            return None
        progress = LoopProgress(trainer)
        epoch = progress.epoch - self._shift if self._epoch is None else self._epoch
        finished = progress.after_last_batch
        batches = self._window_start(trainer, progress)
        orders = [LoaderOrder.of(loader) for loader in loaders.flattened]
        found = []
        for index, order in enumerate(orders):
            entry = order.describe()
            entry["consumed"] = self._consumed(index, order, epoch, batches, loaders._mode)
            if order.kind == "wrapped" and not finished and entry["consumed"]:
                entry["fingerprint"] = self._fingerprint_of(order, epoch)
            found.append(entry)
        return {
            "epoch": epoch,
            "finished": finished,
            "waiting": progress.batches - batches,
            "mode": loaders._mode,
            "world_size": trainer.world_size,
            "loaders": found,
        }

    def is_within_window(self, trainer: pl.Trainer) -> bool:
        """Whether gradients of batches are waiting for a step, so that those batches must come again."""
        progress = LoopProgress(trainer)
        return self._window_start(trainer, progress) < progress.batches

    def _window_start(self, trainer: pl.Trainer, progress: LoopProgress) -> int:
        """Batches that have entered optimizer steps; all of them where a loader cannot go back."""
        loaders = trainer.fit_loop._combined_loader
        stateful = loaders is not None and any(isinstance(loader, _Stateful) for loader in loaders.flattened)
        if stateful or progress.after_last_batch:
            return progress.batches
        first = 0
        if self._start_epoch is not None and self._epoch in (None, self._start_epoch):
            first = max((start.batch for start in self._starts), default=0)  # earlier ones are of the interrupted run
        return max(first, progress.batches - progress.batches % trainer.accumulate_grad_batches)

    def _consumed(self, index: int, order: LoaderOrder, epoch: int, batches: int, mode: str) -> int:
        """Samples over all ranks that are used up in this pass over the loader."""
        start = self._starts[index] if epoch == self._start_epoch and index < len(self._starts) else _Start()
        if order.sampler is None:
            return order.samples_after(batches)
        whole, size = order.batches_per_epoch(), len(order.sampler.dataset)  # type: ignore[arg-type]
        rest = whole if start.rest is None else start.rest
        done = batches - start.batch
        if mode == "max_size_cycle" and done >= rest and whole:
            return order.samples_after((done - rest) % whole)
        return min(start.samples + order.samples_after(done), size)

    def _fingerprint_of(self, order: LoaderOrder, epoch: int) -> str:
        # Lightning has written the user's order down when the epoch began; asking its sampler again might change it.
        if self._fingerprint is None or self._fingerprint[0] != epoch:
            assert order.sampler is not None
            dataset: Any = order.sampler.dataset
            self._fingerprint = epoch, fingerprint(dataset[place] for place in range(len(dataset)))
        return self._fingerprint[1]

    # Training -------------------------------------------------------------------------------------------------------

    def begin_batch(self, trainer: pl.Trainer) -> None:
        """Called before each training batch."""
        self._epoch = LoopProgress(trainer).epoch - self._shift
        if self._filter is not None:
            if self._filter in warnings.filters:
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
            self._filter = None

    # Resuming -------------------------------------------------------------------------------------------------------

    def process(self, trainer: pl.Trainer, loader: Any, agreement: Agreement | None) -> Any:
        """The train dataloader to be used in place of `loader`. Collective when a run resumes.

        Before training starts it also corrects Lightning's counters, so that the epoch ends where its data ends.
        """
        progress = LoopProgress(trainer)
        if not progress.resuming:
            return self._at_shift(loader)
        order = LoaderOrder.of(loader)
        entry = self._entry_for(trainer, order, progress)
        saved = entry["loaders"][len(self._loaders) % len(entry["loaders"])]
        length = self._limited(trainer, loader)
        if not self._planned:
            self._plan(entry, progress, length)
        if self._restores and order.kind == "stateful":
            self._leave_to_itself(trainer, order, saved)
        elif self._restores and (saved["consumed"] or progress.batches):
            loader = self._go_on(trainer, loader, order, saved, progress, agreement)
        else:
            loader = self._at_shift(loader)
        # An iterator with workers asks for its first batches before Lightning tells the epoch.
        _set_sampler_epoch(loader, self._first_epoch)
        return loader

    def _entry_for(self, trainer: pl.Trainer, order: LoaderOrder, progress: LoopProgress) -> dict[str, Any]:
        if self._entry is not None and not self._entry.get("inferred"):
            return self._entry
        if self._entry is None:
            finished = progress.after_last_batch
            cut_short = not progress.within_epoch and progress.batches > 0
            self._entry = {
                "epoch": progress.epoch - cut_short,
                "finished": finished,
                "waiting": 0,
                "mode": "max_size_cycle",
                "world_size": trainer.world_size,
                "loaders": [],
                "inferred": True,
            }
            if progress.continues and not finished and progress.batches:
                rank_zero_warn(
                    "The checkpoint is from the middle of an epoch and does not say how many samples were used. "
                    f"{progress.batches} batches of each rank are taken for used, at the present world size "
                    f"({trainer.world_size}), batch size and order of the data. If one of these was another, samples "
                    "are repeated or left out in this epoch."
                )
        batches = progress.batches
        if trainer.lightning_module.automatic_optimization:
            batches -= batches % trainer.accumulate_grad_batches
        self._entry["waiting"] = max(self._entry["waiting"], progress.batches - batches)
        self._entry["loaders"].append({**order.describe(), "consumed": order.samples_after(batches)})
        return self._entry

    def _plan(self, entry: dict[str, Any], progress: LoopProgress, length: float) -> None:
        """Decide with which epoch the run goes on."""
        self._planned = True
        epoch = int(entry["epoch"])
        used = any(saved["consumed"] for saved in entry["loaders"])
        if entry["finished"]:
            self._next_epoch(epoch + 1, progress, length)
        elif progress.continues:
            self._first_epoch = progress.epoch
            self._shift = progress.epoch - epoch
            self._start_epoch = epoch
            self._restores = True
        else:
            self._first_epoch = progress.epoch
            if used and progress.epoch > epoch:
                rank_zero_info(
                    f"ds_lightning: the interrupted run had ended within epoch {epoch}; a new epoch begins, and what "
                    "was left of that one is not seen. Resume with max_steps to go on within it."
                )

    def _next_epoch(self, epoch: int, progress: LoopProgress, length: float) -> None:
        self._restores = False
        self._first_epoch = progress.begin_next_epoch(length)
        self._shift = self._first_epoch - epoch
        self.begins_epoch = not progress.makes_iterators_again

    def _limited(self, trainer: pl.Trainer, loader: Any) -> float:
        length = sized_len(loader)
        limit = trainer.limit_train_batches
        if length is None:
            return float("inf")
        assert limit is not None
        return _parse_num_batches(RunningStage.TRAINING, length, limit)

    def _go_on(
        self,
        trainer: pl.Trainer,
        loader: Any,
        order: LoaderOrder,
        saved: dict[str, Any],
        progress: LoopProgress,
        agreement: Agreement | None,
    ) -> Any:
        """Within an epoch: leave out what has been used, if that is possible."""
        assert self._entry is not None
        limit = self._limited(trainer, loader)
        rest, obstacle = self._rest(order, saved)
        if order.kind == "wrapped" and agreement is not None:
            # The user's sampler may give each rank another order; all must decide alike.
            obstacle = next((found for found in agreement.everyone(obstacle) if found is not None), None)
        if obstacle is None:
            made = self._with_sampler(loader, order, rest)
            if isinstance(made, str):
                obstacle = (made, USE_LIGHTNINGS_SAMPLER)
        if obstacle is not None:
            self._warn(obstacle)
            if progress.batches >= limit:
                progress.move_to(max(0, int(limit) - 1))
            self._starts.append(_Start(batch=progress.batches))
            self._loaders.append((order, progress.batches))
            return loader
        left = batches_of(len(rest), order.batch_size, order.drop_last)
        batch = order.batches_per_epoch() - left
        self._loaders.append((order, batch))
        batch = self._deciding_batch()
        self._starts = [_Start(item.samples, batch, item.rest) for item in self._starts]
        self._starts.append(_Start(saved["consumed"], batch, left))
        if batch >= limit:
            # Nothing is left: drop_last leaves it out, or the epoch is limited to fewer batches.
            progress.move_to(0)
            self._next_epoch(int(self._entry["epoch"]) + 1, progress, limit)
            return self._at_shift(loader)
        progress.move_to(batch, back=bool(self._entry["waiting"]))
        self._tell(trainer, order, saved, batch, int(limit))
        return made

    def _leave_to_itself(self, trainer: pl.Trainer, order: LoaderOrder, saved: dict[str, Any]) -> None:
        """Lightning restores a loader that has a state of its own; it has saved that of rank 0."""
        assert self._entry is not None
        self._starts.append(_Start())
        self._loaders.append((order, 0))
        before = self._entry["world_size"]
        if not trainer.fit_loop._combined_loader_states_to_load:
            self._warn(order.obstacle)
        elif before != trainer.world_size:
            why = f"the dataloader's own state is that of one of {before} ranks, and there are {trainer.world_size} now"
            self._warn((why, f"Resume on {before} ranks. " + SAVE_BETWEEN_EPOCHS))

    def _deciding_batch(self) -> int:
        """The batch of the epoch that comes next: that of the loader whose length is the epoch's."""
        assert self._entry is not None
        known = [(order.batches_per_epoch(), batch) for order, batch in self._loaders if order.sampler is not None]
        return (min if self._entry["mode"] == "min_size" else max)(known)[1]

    def _rest(self, order: LoaderOrder, saved: dict[str, Any]) -> tuple[list[Any], tuple[str, str] | None]:
        sampler = order.sampler
        if sampler is None:
            return [], order.obstacle
        if saved["kind"] != order.kind:
            why = f"the data had another order in the interrupted run ({saved['kind']}, now {order.kind})"
            return [], (why, "Resume with the sampler of that run.")
        size = len(sampler.dataset)  # type: ignore[arg-type]
        if saved["size"] != size:
            why = f"the dataset had {saved['size']} samples in the interrupted run and has {size} now"
            return [], (why, "Resume with the same data.")
        assert self._entry is not None
        # A new seed counts from the next epoch on: this one has begun with the old one.
        changes = {"seed": saved["seed"], "shuffle": saved["shuffle"]}
        everything = order_of_all_ranks(sampler, int(self._entry["epoch"]), **changes)
        if order.kind == "wrapped" and not self._is_same(order, saved):
            why = "the sampler that Lightning has wrapped gives another order than in the interrupted run"
            return [], (why, "Let its order depend on a seed and on set_epoch alone. " + SAVE_BETWEEN_EPOCHS)
        args = (sampler.num_replicas, sampler.rank, sampler.drop_last)
        return remainder(everything, saved["consumed"], *args), None

    def _is_same(self, order: LoaderOrder, saved: dict[str, Any]) -> bool:
        dataset: Any = order.sampler.dataset  # type: ignore[union-attr]
        given = fingerprint(dataset[place] for place in range(len(dataset)))
        if "fingerprint" in saved:
            return bool(saved["fingerprint"] == given)
        dataset.reset()  # not known; at least it must give the same twice
        return given == fingerprint(dataset[place] for place in range(len(dataset)))

    def _at_shift(self, loader: Any) -> Any:
        """The loader in whole epochs."""
        if self._shift == 0:
            return loader
        order = LoaderOrder.of(loader)
        if order.sampler is None:
            return loader
        made = self._with_sampler(loader, order, None)
        return loader if isinstance(made, str) else made

    def _with_sampler(self, loader: Any, order: LoaderOrder, rest: list[Any] | None) -> Any:
        """The loader made again with a sampler that goes on, or why that is impossible."""
        assert order.sampler is not None
        sampler = ResumedSampler(order.sampler, rest, self._first_epoch, self._shift)
        try:
            args, options = _get_dataloader_init_args_and_kwargs(loader, sampler, RunningStage.TRAINING)
            if loader.batch_size is None and loader.batch_sampler is not None:  # the user's own BatchSampler object
                batches = BatchSampler(sampler, order.batch_size, order.drop_last)
                options.update(sampler=None, batch_sampler=batches, batch_size=1, drop_last=False, shuffle=False)
            return _reinstantiate_wrapped_cls(loader, *args, **options)
        except (MisconfigurationException, TypeError) as error:
            return f"{type(loader).__name__} cannot be made again with another sampler ({error})"

    # Words ----------------------------------------------------------------------------------------------------------

    def _warn(self, obstacle: tuple[str, str]) -> None:
        assert self._entry is not None
        why, advice = obstacle
        rank_zero_warn(
            f"The checkpoint is from the middle of epoch {self._entry['epoch']}, and the position in its data cannot "
            f"be restored: {why}. The data begins anew: of this epoch's samples, those that were used may be seen "
            "again, and as many others not at all. " + advice
        )

    def _tell(self, trainer: pl.Trainer, order: LoaderOrder, saved: dict[str, Any], batch: int, limit: int) -> None:
        assert self._entry is not None
        if self._filter is None:
            # Lightning knows of loaders with a state of their own only.
            warnings.filterwarnings("ignore", message=LIGHTNINGS_WARNING)
            self._filter = warnings.filters[0]
        window = trainer.accumulate_grad_batches
        note = ""
        if batch % window:
            note = f" The first step uses {window - batch % window} batches instead of {window}."
        rank_zero_info(
            f"ds_lightning: epoch {self._entry['epoch']} continues after {saved['consumed']} of {saved['size']} "
            f"samples, with batch {batch + 1} of {limit}.{note}"
        )
