"""A resumed run sees the samples that the interrupted one had not, and draws the random numbers it would have drawn."""

import random
import warnings
from collections import Counter
from functools import partial

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from tests.lightning import runs
from tests.lightning.runs import full_weights, same
from tests.pool import run_ranks

SIZE = 24


class Numbers(Dataset):
    """Sample i is i; with `noise`, also what is drawn for it in this process."""

    def __init__(self, size=SIZE, noise=False):
        self.size, self.noise = size, noise

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = random.random() + numpy.random.rand() + torch.rand(()).item() if self.noise else 0.0
        return torch.tensor([float(index), drawn])


class Stream(IterableDataset):
    def __init__(self, size=SIZE):
        self.size = size

    def __iter__(self):
        return iter(torch.arange(2.0 * self.size).view(-1, 2))


class Seen(pl.LightningModule):
    """Notes (epoch of Lightning, batch_idx, samples) of each batch."""

    def __init__(self, loader=None, dropout=0.5, manual=False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(2, 5), nn.Dropout(dropout), nn.Linear(5, 1))
        self.seen = []
        self.loader = loader
        self.automatic_optimization = not manual

    def train_dataloader(self):
        return self.loader()

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, list | tuple) else [batch]
        samples = [part[:, 0].long().tolist() for part in parts]
        self.seen.append((self.trainer.fit_loop.epoch_progress.current.processed, batch_idx, *samples))
        loss = sum(self.net(part / SIZE).square().mean() for part in parts)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SaveAt(Callback):
    """Saves at the n-th call of a hook, and ends the run."""

    def __init__(self, path, hook, at):
        self.path, self.at, self.calls = path, at, 0
        setattr(self, hook, self.called)

    def called(self, trainer, *args, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def make_loader(batch=2, size=SIZE, shuffle=True, sampler=None, noise=False, **options):
    data = Numbers(size, noise)
    if sampler is None and not shuffle:
        sampler = partial(DistributedSampler, shuffle=False)
    if sampler is not None:
        return DataLoader(data, batch, sampler=sampler(data), **options)
    return DataLoader(data, batch, shuffle=True, **options)


loader = partial(partial, make_loader)


def fit(make, path=None, save=None, kind=2, manual=False, val=False, **options):
    """Train, from `path` if given; save as (path, hook, at) says, or as (path,) after the run."""
    callbacks = options.pop("callbacks", [])
    if save and len(save) > 1:
        callbacks = [*callbacks, SaveAt(*save)]
    defaults = {"steps": -1, "max_epochs": 1, "use_distributed_sampler": True, "callbacks": callbacks}
    trainer = runs.trainer(kind, **{**defaults, **options})
    module = Seen(make, manual=manual)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, val_dataloaders=DataLoader(Numbers(4), 2) if val else None, ckpt_path=path)
        if save and len(save) == 1:
            trainer.save_checkpoint(save[0])
    said = [str(w.message) for w in caught]
    weights = full_weights(module) if kind != "ddp" else {}
    return {"seen": module.seen, "said": said, "weights": weights, "epoch": trainer.current_epoch}


def samples(results, epoch=None, part=0):
    """All samples that the ranks saw, of one epoch of Lightning's or of all."""
    return Counter(
        index
        for result in results
        for number, _, *parts in result["seen"]
        if epoch in (None, number)
        for index in parts[part]
    )


def check_each_once(counter, size=SIZE, padding=0):
    assert set(counter) == set(range(size)), set(range(size)) - set(counter)
    assert counter.total() - size <= padding, counter.most_common(3)


def batch_numbers(results, epoch=0):
    return [number for found, number, *_ in results[0]["seen"] if found == epoch]


SAME = (loader(), loader())


def resume(path, first, second, worlds=(2, 2), at=2, hook="on_train_batch_end", makes=SAME, **options):
    """Interrupt in `worlds[0]` ranks, resume in `worlds[1]`."""
    before = run_ranks(fit, worlds[0], makes[0], None, (str(path), hook, at), **{**options, **first})
    return before, run_ranks(fit, worlds[1], makes[1], str(path), **{**options, **second})


# Other ranks, other batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "shuffle"),
    [
        *((before, after, True) for before in (1, 2, 3) for after in (1, 2, 3)),
        *((before, after, False) for before, after in ((1, 3), (2, 2), (3, 2))),
    ],
)
def test_every_sample_of_the_epoch_is_seen_once_whatever_the_number_of_ranks(tmp_path, before, after, shuffle):
    make = loader(shuffle=shuffle)
    one, two = resume(tmp_path / "a.ckpt", {}, {"max_epochs": 2}, (before, after), at=2, makes=(make, make))
    check_each_once(samples(one) + samples(two, epoch=0), padding=after - 1)
    check_each_once(samples(two, epoch=1))
    assert samples(one).total() == 2 * 2 * before
    assert batch_numbers(two)[-1] == SIZE // 2 // after - 1
    assert batch_numbers(two, 1) == list(range(SIZE // 2 // after))


@pytest.mark.parametrize(("batch", "after"), [(4, 2), (1, 2), (5, 1), (3, 3)])
def test_with_another_batch_size_and_an_odd_number_of_samples(tmp_path, batch, after):
    size = 29
    makes = (loader(2, size), loader(batch, size))
    one, two = resume(tmp_path / "a.ckpt", {}, {"max_epochs": 2}, (2, after), at=3, makes=makes)
    check_each_once(samples(one) + samples(two, epoch=0), size, padding=after - 1)
    check_each_once(samples(two, epoch=1), size, padding=after - 1)
    per_rank = -(-size // after)
    assert batch_numbers(two, 1) == list(range(-(-per_rank // batch)))
    assert batch_numbers(two)[-1] == -(-per_rank // batch) - 1


def test_drop_last_drops_only_what_does_not_fill_a_batch(tmp_path):
    make = loader(4, 27, drop_last=True)
    one, two = resume(tmp_path / "a.ckpt", {}, {"max_epochs": 2}, (1, 2), at=2, makes=(make, make))
    found = samples(one) + samples(two, epoch=0)
    assert found.total() == 8 + 16
    assert max(found.values()) == 1
    assert len(batch_numbers(two, 1)) == 3


def test_an_epoch_of_which_nothing_is_left_is_over(tmp_path):
    makes = (loader(2, drop_last=True), loader(4, drop_last=True))
    one, two = resume(tmp_path / "a.ckpt", {}, {"max_epochs": 2}, (1, 2), at=10, makes=makes)
    assert samples(one).total() == 20  # 4 are left: no batch of 4 for each of 2 ranks
    assert samples(two, epoch=0).total() == 0
    assert batch_numbers(two, 1) == [0, 1, 2]
    check_each_once(samples(two, epoch=1))


def test_resumed_twice_in_three_settings(tmp_path):
    one, two, three = tmp_path / "1.ckpt", tmp_path / "2.ckpt", tmp_path / "3.ckpt"
    first = run_ranks(fit, 1, loader(3, 50), None, (str(one), "on_train_batch_end", 3))
    second = run_ranks(fit, 3, loader(2, 50), str(one), (str(two), "on_train_batch_end", 2))
    third = run_ranks(fit, 2, loader(5, 50), str(two), (str(three), "on_train_batch_end", 1))
    last = run_ranks(fit, 1, loader(4, 50), str(three))
    assert [samples(found).total() for found in (first, second, third, last)] == [9, 12, 10, 19]
    check_each_once(samples(first) + samples(second) + samples(third) + samples(last), 50)


def test_samples_whose_gradients_were_waiting_for_a_step_come_again(tmp_path):
    options = {"accumulate_grad_batches": 2}
    one, two = resume(tmp_path / "a.ckpt", options, options, (2, 1), at=3)
    for result in one:
        assert [number for _, number, _ in result["seen"]] == [0, 1, 2]
        result["seen"].pop()  # no step has used it
    check_each_once(samples(one) + samples(two))


def test_another_seed_counts_from_the_next_epoch_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    one = run_ranks(seeded, 2, 1, None, (str(tmp_path / "a.ckpt"), "on_train_batch_end", 2))
    two = run_ranks(seeded, 2, 2, str(tmp_path / "a.ckpt"))
    check_each_once(samples(one) + samples(two))


def seeded(seed, *args):
    pl.seed_everything(seed, verbose=False)
    return fit(make_loader, *args)


# Where the run was interrupted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_steps": 12}], ids=str)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"])
def test_after_the_end_of_an_epoch_the_next_is_seen_in_full(tmp_path, hook, limits):
    val = hook == "on_validation_end"
    options = {**limits, "val": val}
    if "max_steps" in limits:
        options["max_epochs"] = -1
    at = 6 if hook == "on_train_batch_end" else 1
    one, two = resume(tmp_path / "a.ckpt", options, options, hook=hook, at=at)
    check_each_once(samples(one))
    check_each_once(samples(two))
    assert batch_numbers(two, 1) == list(range(6))
    unbroken = run_ranks(fit, 2, loader(), **options)
    assert [r["seen"] for r in two] == [[s for s in r["seen"] if s[0] == 1] for r in unbroken]
    assert not same([r["weights"] for r in two], [r["weights"] for r in unbroken])


@pytest.mark.parametrize("after", [1, 2])
def test_a_last_batch_in_one_setting_is_one_in_the_other(tmp_path, after):
    one, two = resume(tmp_path / "a.ckpt", {}, {"max_epochs": 2}, (3, after), at=4)
    check_each_once(samples(one))
    check_each_once(samples(two))
    assert batch_numbers(two, 1) == list(range(12 // after))


@pytest.mark.parametrize("steps", [4, 6])
def test_a_run_that_max_steps_has_ended_goes_on_as_if_it_had_not(tmp_path, steps):
    """Lightning counts the epoch that was cut short as a whole one; the order of the data does not."""
    path = str(tmp_path / "a.ckpt")
    options = {"max_epochs": -1}
    one = run_ranks(fit, 2, loader(), None, (path,), max_steps=steps, **options)
    two = run_ranks(fit, 2, loader(), path, max_steps=15, **options)
    unbroken = run_ranks(fit, 2, loader(), max_steps=15, **options)
    for before, after, whole in zip(one, two, unbroken, strict=True):
        assert [s[1:] for s in before["seen"] + after["seen"]] == [s[1:] for s in whole["seen"]]
        assert not same(after["weights"], whole["weights"])


def test_without_max_steps_a_run_that_had_ended_begins_a_new_epoch(tmp_path):
    path = str(tmp_path / "a.ckpt")
    run_ranks(fit, 2, loader(), None, (path,), max_steps=4, max_epochs=-1)
    two = run_ranks(fit, 2, loader(), path, max_epochs=2)
    check_each_once(samples(two))


def test_a_checkpoint_written_before_the_first_batch_of_a_resumed_run_has_its_position(tmp_path):
    one, two, three = (str(tmp_path / f"{n}.ckpt") for n in (1, 2, 3))
    before = run_ranks(fit, 3, loader(), None, (one, "on_train_batch_end", 2))
    run_ranks(fit, 2, loader(), one, (two, "on_train_start", 1))
    run_ranks(fit, 1, loader(), two, (three, "on_train_batch_start", 1))
    check_each_once(samples(before) + samples(run_ranks(fit, 3, loader(), three)))


# Bit for bit --------------------------------------------------------------------------------------------------------


CASES = {
    "plain": {},
    "manual": {"manual": True},
    "accumulation": {"accumulate_grad_batches": 2},
    "window": {"accumulate_grad_batches": 3},
    "validation": {"val": True, "val_check_interval": 2, "hook": "on_validation_end", "at": 2},
    "window-validation": {
        "val": True,
        "val_check_interval": 2,
        "accumulate_grad_batches": 3,
        "hook": "on_validation_end",
        "at": 2,
    },
    "window-after-validation": {"val": True, "val_check_interval": 2, "accumulate_grad_batches": 2, "at": 3},
    "second-epoch": {"at": 9},
    "first-batch": {"at": 1, "accumulate_grad_batches": 2},
    "limited": {"limit_train_batches": 5, "at": 7},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize(
    ("case", "stage"), [*((case, 2) for case in CASES), ("plain", 0), ("plain", 1), ("plain", 3), ("window", 3)]
)
def test_weights_are_those_of_the_unbroken_run(tmp_path, case, stage):
    """With dropout, and with augmentations that draw from Python's, NumPy's and torch's generators."""
    options = {"max_epochs": 3, "kind": stage, **CASES[case]}
    at, hook = options.pop("at", 4), options.pop("hook", "on_train_batch_end")
    make = loader(noise=case != "first-batch")
    one, two = resume(tmp_path / "a.ckpt", options, options, at=at, hook=hook, makes=(make, make))
    unbroken = run_ranks(fit, 2, make, **options)
    assert not same([r["weights"] for r in two], [r["weights"] for r in unbroken])
    n = options.get("accumulate_grad_batches", 1)
    for before, after, whole in zip(one, two, unbroken, strict=True):
        again = len(before["seen"]) % 6 % n  # batches whose gradients were waiting for a step
        assert (before["seen"][: len(before["seen"]) - again] + after["seen"]) == whole["seen"]
    assert not any("not resumable" in text for result in two for text in result["said"])


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at", [4, 6])
def test_with_workers_that_fetch_ahead(tmp_path, at, persistent):
    options = {"max_epochs": 3}
    make = loader(num_workers=1, persistent_workers=persistent, multiprocessing_context="fork")
    _, two = resume(tmp_path / "a.ckpt", options, options, at=at, makes=(make, make))
    unbroken = run_ranks(fit, 2, make, **options)
    for after, whole in zip(two, unbroken, strict=True):
        assert after["seen"] == whole["seen"][at:]
    assert not same([r["weights"] for r in two], [r["weights"] for r in unbroken])


def test_the_states_are_plain_and_one_per_rank(tmp_path):
    path = tmp_path / "a.ckpt"
    resume(path, {}, {}, at=2)
    entry = torch.load(path, weights_only=True)["ds_lightning"]
    assert len(entry["rng"]) == 2
    assert entry["data"]["epoch"] == 0
    assert not entry["data"]["finished"]
    assert entry["data"]["loaders"][0]["consumed"] == 8
    kinds = {type(value) for state in entry["rng"] for value in state.values()}
    assert kinds == {tuple, list, torch.Tensor}
    assert all(type(v) in (int, float, str, list) for v in entry["rng"][0]["numpy"])
    assert len(torch.load(path, weights_only=False)["ds_lightning"]["rng"][0]["numpy"][1]) == 624


def test_a_checkpoint_with_weights_only_has_neither(tmp_path):
    path = tmp_path / "w.ckpt"
    run_ranks(save_weights, 2, str(path))
    entry = torch.load(path, weights_only=True)["ds_lightning"]
    assert "rng" not in entry
    assert "data" not in entry


def save_weights(path):
    trainer = runs.trainer(2, max_steps=2, use_distributed_sampler=True)
    trainer.fit(Seen(loader()))
    trainer.save_checkpoint(path, weights_only=True)


# Loaders of many kinds ----------------------------------------------------------------------------------------------


def own_sampler(data):
    return DistributedSampler(data, seed=7)


def own_batches():
    data = Numbers()
    return DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, seed=7), 2, False))


def no_batches():
    data = Numbers()
    return DataLoader(data, batch_size=None, sampler=DistributedSampler(data), collate_fn=one_more_dimension)


def one_more_dimension(sample):
    return sample[None]


class Backwards(Sampler):
    """An order of the user's own, by epoch."""

    def __init__(self, data):
        self.size, self.epoch = len(data), 0

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter([(i + 5 * self.epoch) % self.size for i in reversed(range(self.size))])

    def set_epoch(self, epoch):
        self.epoch = epoch


RESTORED = {
    "own-sampler": loader(sampler=own_sampler),
    "own-batches": own_batches,
    "no-batches": no_batches,
    "wrapped": loader(sampler=Backwards),
}


@pytest.mark.parametrize("after", [2, 3])
@pytest.mark.parametrize("kind", RESTORED)
def test_loaders_that_go_on(tmp_path, kind, after):
    make = RESTORED[kind]
    one, two = resume(tmp_path / "a.ckpt", {}, {"max_epochs": 2}, (2, after), makes=(make, make))
    check_each_once(samples(one) + samples(two, epoch=0), padding=after - 1)
    check_each_once(samples(two, epoch=1), padding=after - 1)
    assert not any("cannot be restored" in text for result in two for text in result["said"])


def test_every_rank_sees_all_samples_in_order_where_that_was_asked_for(tmp_path):
    options = {"use_distributed_sampler": False, "max_epochs": 2}
    _, two = resume(tmp_path / "a.ckpt", options, options, (2, 3), makes=(in_order, in_order))
    for result in two:
        found = [i for _, _, part in result["seen"] for i in part]
        assert found == list(range(4, SIZE)) + list(range(SIZE))


def in_order():
    return DataLoader(Numbers(), 2)


class Moody(Backwards):
    """Depends on random numbers that no checkpoint has."""

    def __iter__(self):
        return iter(
            torch.randperm(
                self.size, generator=torch.Generator().manual_seed(random.SystemRandom().getrandbits(40))
            ).tolist()
        )


class OwnOrder(DistributedSampler):
    """Shares out blocks instead of turns."""

    def __iter__(self):
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


class OwnBatches(BatchSampler):
    pass


def strange_batches():
    data = Numbers()
    return DataLoader(data, batch_sampler=OwnBatches(DistributedSampler(data), 2, False))


def stream():
    return DataLoader(Stream(), 2)


REFUSED = {
    "iterable": (stream, "IterableDataset", {}),
    "random": (loader(), "RandomSampler shuffles anew", {"use_distributed_sampler": False}),
    "unknown": (loader(sampler=OwnOrder), "OwnOrder is not known", {}),
    "batches": (strange_batches, "batch sampler OwnBatches", {}),
    "moody": (loader(sampler=Moody), "another order", {}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_where_it_cannot_go_on_it_says_so(tmp_path, kind):
    make, text, options = REFUSED[kind]
    _, two = resume(tmp_path / "a.ckpt", options, {**options, "max_epochs": 2}, makes=(make, make))
    said = [line for line in two[0]["said"] if "cannot be restored" in line]
    assert len(said) == 1, two[0]["said"]
    assert text in said[0]
    assert "ends of epochs" in said[0]
    assert not any("cannot be restored" in line for line in two[1]["said"])
    assert two[0]["epoch"] == 2  # and trains on
    ends = resume(tmp_path / "b.ckpt", options, {**options, "max_epochs": 2}, hook="on_train_epoch_end", at=1)[1]
    assert not any("cannot be restored" in line for line in ends[0]["said"])


def test_other_data_is_told_apart(tmp_path):
    _, two = resume(tmp_path / "a.ckpt", {}, {}, makes=(loader(size=24), loader(size=25)))
    assert any("24 samples" in line and "25 now" in line for line in two[0]["said"])


class Counting(DataLoader):
    """A loader with a state of its own, as torchdata's."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.given = self.skip = 0

    def __iter__(self):
        skip, self.skip = self.skip, 0
        self.given = skip
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self.given += 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.skip = state["given"]


def counting():
    data = Numbers()
    return Counting(data, 2, sampler=DistributedSampler(data))


def test_a_loader_with_a_state_of_its_own_is_left_to_lightning(tmp_path):
    one, two = resume(tmp_path / "a.ckpt", {}, {"max_epochs": 2}, makes=(counting, counting))
    check_each_once(samples(one) + samples(two, epoch=0))
    check_each_once(samples(two, epoch=1))
    _, three = resume(tmp_path / "b.ckpt", {}, {}, (2, 1), makes=(counting, counting))
    assert any("state is that of one of 2 ranks" in line for line in three[0]["said"])


def two_loaders(mode, first, second):
    return CombinedLoader([make_loader(2, first), make_loader(2, second)], mode)


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_several_loaders(tmp_path, mode, after):
    sizes = {"max_size_cycle": (8, 24), "min_size": (16, 24), "max_size": (24, 24)}[mode]
    make = partial(two_loaders, mode, *sizes)
    one, two = resume(tmp_path / "a.ckpt", {}, {"max_epochs": 2}, (2, after), at=3, makes=(make, make))
    main = 0 if mode == "min_size" else 1
    check_each_once(samples(one, part=main) + samples(two, epoch=0, part=main), sizes[main])
    check_each_once(samples(two, epoch=1, part=main), sizes[main])
    other = samples(one, part=1 - main) + samples(two, epoch=0, part=1 - main)
    assert max(other.values()) - min(other.values()) <= 1


# Other checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [2, 3])
def test_a_checkpoint_of_ddp_is_read_by_its_counters(tmp_path, after):
    one, two = resume(tmp_path / "a.ckpt", {"kind": "ddp"}, {"max_epochs": 2}, (2, after))
    if after == 2:
        check_each_once(samples(one) + samples(two, epoch=0))
    check_each_once(samples(two, epoch=1))
    assert any("does not say how many samples were used" in line for line in two[0]["said"])


def test_a_checkpoint_of_ddp_from_the_end_of_an_epoch_needs_no_guess(tmp_path):
    _, two = resume(tmp_path / "a.ckpt", {"kind": "ddp"}, {"max_epochs": 2}, hook="on_train_epoch_end", at=1)
    check_each_once(samples(two))
    assert not any("does not say" in line for line in two[0]["said"])


def test_ddp_reads_ours(tmp_path):
    _, two = resume(tmp_path / "a.ckpt", {}, {"kind": "ddp"}, hook="on_train_epoch_end", at=1, max_epochs=2)
    check_each_once(samples(two))
