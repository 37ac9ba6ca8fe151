"""Checkpoints written beside training: what goes on meanwhile, what waits, and what is in them."""

import os
import pickle
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import distributed as dist

from ds_lightning import checkpointing
from ds_lightning.checkpoint.background import BackgroundWriter
from ds_lightning.errors import CheckpointError
from tests.lightning.kills import keeping
from tests.lightning.runs import Model, full_weights, loader, same, trainer, zero
from tests.lightning.test_crash_safety import check_complete, names, read
from tests.pool import fresh_ranks, run_ranks

FORMS = pytest.mark.parametrize("form", ["full", "sharded"])


class Gate:
    """Holds up every write until it is opened, or somebody has begun to wait."""

    def __init__(self):
        self.opened = threading.Event()
        self.log = []

    @contextmanager
    def closed(self):
        complete = BackgroundWriter._complete

        def held(writer, write):
            assert self.opened.wait(30), "nobody opened the gate"
            complete(writer, write)
            self.log.append(f"{write.target.name} is complete")

        wait = BackgroundWriter.wait

        def waited_for(writer, limit=None):
            threading.Timer(0.3, self.opened.set).start()
            return wait(writer, limit)

        with (
            mock.patch.object(BackgroundWriter, "_complete", held),
            mock.patch.object(BackgroundWriter, "wait", waited_for),
        ):
            yield self


class Calls(Callback):
    """Calls a function at the end of each batch, with the number of steps."""

    def __init__(self, call):
        self.call = call

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_):
        self.call(trainer, trainer.global_step)


def beside(form, stage=3):
    method = zero(stage, checkpoint=form, async_save=True)
    said = []
    method._saver._log = said.append
    return method, said


def run_of(method, callbacks, steps=3):
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return trainer(method, steps=steps, callbacks=callbacks, enable_checkpointing=keeps)


# What goes on ---------------------------------------------------------------------------------------------------------


def save_beside_and_at_once(folder, form, stage):
    gate = Gate()

    def beside_training(run, step):
        gate.log.append(f"step {step}")
        if step == 2:
            run.save_checkpoint(f"{folder}/beside.ckpt")
            gate.log.append("training goes on")
        if step == 5:
            assert not os.path.exists(f"{folder}/beside.ckpt")
            gate.opened.set()

    def at_once(run, step):
        if step == 2:
            run.save_checkpoint(f"{folder}/at_once.ckpt")

    method, _ = beside(form, stage)
    with gate.closed():
        run_of(method, [Calls(beside_training)], 5).fit(Model(), loader())
    run_of(zero(stage, checkpoint=form), [Calls(at_once)], 5).fit(Model(), loader())
    return gate.log


@pytest.mark.parametrize(("form", "stage"), [("full", 3), ("sharded", 3), ("full", 0), ("sharded", 1)])
def test_training_goes_on_and_the_values_are_those_of_the_moment(tmp_path, form, stage):
    for log in run_ranks(save_beside_and_at_once, 2, str(tmp_path), form, stage):
        expected = ["step 1", "step 2", "training goes on", "step 3", "step 4", "step 5", "beside.ckpt is complete"]
        assert log == expected
    one, two = read(tmp_path / "beside.ckpt"), read(tmp_path / "at_once.ckpt")
    assert one["global_step"] == 2
    assert list(one["state_dict"]) == list(two["state_dict"])
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert same(plain(one[key]), plain(two[key]), key) == []


def plain(item):
    if torch.is_tensor(item):
        return item.clone()
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items()}
    return [plain(value) for value in item] if isinstance(item, list) else item


# What waits -----------------------------------------------------------------------------------------------------------


def save_last_too(folder, form):
    """At each step two checkpoints of the same values; the third one has to wait for both."""
    gate, seen = Gate(), []
    method, said = beside(form)

    def look(run, step):
        if step == 1:
            writes = method._saver._writer.writes
            seen.append([write.target.name for write in writes])
            assert writes[0].snapshot is writes[1].snapshot, "they share their memory"

    keep = keeping(folder)
    end = keep.on_train_batch_end

    def save_and_look(run, *args):
        end(run, *args)
        look(run, run.global_step)

    keep.on_train_batch_end = save_and_look
    with gate.closed():
        run_of(method, [keep], 2).fit(Model(), loader())
    return seen, said, gate.log


@FORMS
def test_a_second_checkpoint_of_the_same_values_stands_in_line_and_others_wait(tmp_path, form):
    for seen, said, log in run_ranks(save_last_too, 2, str(tmp_path), form):
        assert seen == [["step=1.ckpt", "last.ckpt"]]
        assert said[0].startswith("training waited ")
        assert f"for the checkpoint {tmp_path / 'step=1.ckpt'} and {tmp_path / 'last.ckpt'} to be written" in said[0]
        assert said[0].endswith(f"before {tmp_path / 'step=2.ckpt'} is saved")
        assert log == [f"{name}.ckpt is complete" for name in ("step=1", "last", "step=2", "last")]
    assert names(tmp_path) == ["last.ckpt", "latest", "step=2.ckpt"]
    check_complete(tmp_path)


def change_and_save(folder, form, what):
    """Between two saves something changes that no step has changed."""
    gate = Gate()
    method, _ = beside(form, 1)

    def save(run, step):
        run.save_checkpoint(f"{folder}/first.ckpt")
        module = run.lightning_module
        with torch.no_grad():
            if what == "a weight":
                module.gain.data[:1] = 7.0
            else:
                module.seen[0] = 7.0
        run.save_checkpoint(f"{folder}/second.ckpt")
        gate.log.append("saved")

    with gate.closed():
        run_of(method, [Calls(save)], 1).fit(Model(), loader())
    return gate.log


@pytest.mark.parametrize(("what", "waits"), [("a weight", True), ("a buffer", False)])
def test_a_second_checkpoint_holds_what_has_changed_since_the_first(tmp_path, what, waits):
    for log in run_ranks(change_and_save, 2, str(tmp_path), "full", what):
        assert (log.index("saved") > 0) == waits
    first, second = (read(tmp_path / name)["state_dict"] for name in ("first.ckpt", "second.ckpt"))
    key = "gain" if waits else "seen"
    assert [float(values[key][0]) == 7.0 for values in (first, second)] == [False, True]


def look_at_each_step(folder, form, save_last):
    """The first checkpoint is complete before the gate closes for the second."""
    gate, seen = Gate(), []
    gate.opened.set()
    method, _ = beside(form)

    def look(run, step):
        if step == 2:
            method._saver.wait("the gate closes", method._topology)
            gate.opened.clear()
            seen.append(sorted(os.listdir(folder)))
            run.strategy.barrier()
        if step == 3:
            seen.append(sorted(name for name in os.listdir(folder) if not name.startswith(".")))
            link = Path(folder, "last.ckpt")
            seen.append(os.readlink(link) if link.is_symlink() else "")
            run.strategy.barrier()
            gate.opened.set()

    with gate.closed():
        run_of(method, [Calls(look), keeping(folder, save_last)], 3).fit(Model(), loader())
    return seen


@FORMS
@pytest.mark.parametrize("save_last", [True, "link"])
def test_the_one_before_stays_until_the_new_one_is_complete(tmp_path, form, save_last):
    folder = tmp_path / "kept"
    for first, second, link in run_ranks(look_at_each_step, 2, str(folder), form, save_last):
        assert first == second == ["last.ckpt", "latest", "step=1.ckpt"]
        assert link == ("step=1.ckpt" if save_last == "link" else "")
    assert names(folder) == ["last.ckpt", "latest", "step=3.ckpt"]
    if save_last == "link":
        assert os.readlink(folder / "last.ckpt") == "step=3.ckpt"
    check_complete(folder)


def load_while_it_is_written(folder, form):
    gate = Gate()
    method, said = beside(form)
    loaded = []

    def save_and_load(run, step):
        path = f"{folder}/new/a.ckpt"
        run.save_checkpoint(path)  # into a folder that is not there before the write
        loaded.append(run.strategy.load_checkpoint(path)["global_step"])

    with gate.closed():
        run_of(method, [Calls(save_and_load)], 1).fit(Model(), loader())
    return loaded, said


@FORMS
def test_who_loads_waits_for_what_is_written(tmp_path, form):
    for loaded, said in run_ranks(load_while_it_is_written, 2, str(tmp_path), form):
        assert loaded == [1]
        assert said[0].endswith("to be written, before a checkpoint is loaded")


def best_and_hooks(folder, form):
    """The best one right after training; and what hooks save that come after the end of the strategy."""
    method, _ = beside(form)
    keep = ModelCheckpoint(f"{folder}/kept", filename="{step}", monitor="val_loss", save_last=True)

    class Saves(Model):
        def on_fit_end(self):
            self.trainer.save_checkpoint(f"{folder}/on_fit_end.ckpt")
            assert self.trainer.is_global_zero is False or os.path.exists(f"{folder}/on_fit_end.ckpt")

    run = trainer(method, steps=-1, max_epochs=3, limit_train_batches=2, callbacks=[keep], enable_checkpointing=True)
    model = Saves()
    run.fit(model, loader(), loader(seed=6))
    weights = full_weights(model)
    run.test(model, loader(seed=7), ckpt_path="best", verbose=False)
    return keep.best_model_path, weights


@FORMS
def test_the_best_is_tested_right_after_training_and_hooks_may_still_save(tmp_path, form):
    (best, weights), _ = run_ranks(best_and_hooks, 2, str(tmp_path), form)
    assert read(best)["global_step"] > 0
    saved = read(tmp_path / "on_fit_end.ckpt")["state_dict"]
    assert same(weights, {name: saved[name].clone() for name in weights}) == []
    check_complete(tmp_path / "kept")


# What fails -----------------------------------------------------------------------------------------------------------


def fail_to_remove(folder):
    """The removal of an older checkpoint fails on rank 0, beside training."""

    def withdraw(target):
        raise OSError(5, "the disk does not answer", str(target))

    method, _ = beside("full")
    with (
        mock.patch.object(checkpointing, "withdraw", withdraw),
        pytest.raises(CheckpointError, match=r"in the background failed.*does not answer") as failure,
    ):
        run_of(method, [keeping(folder, save_last=False)], 2).fit(Model(), loader())
    return str(failure.value)


def test_what_fails_behind_a_write_is_an_error_on_every_rank(tmp_path):
    first, second = run_ranks(fail_to_remove, 2, str(tmp_path))
    assert first == second
    assert names(tmp_path) == ["latest", "step=1.ckpt", "step=2.ckpt"]


def fail_in_training(folder, form, ranks):
    """Training fails while a checkpoint is written; it is completed."""
    gate = Gate()

    class Fails(Model):
        def training_step(self, tokens, index):
            if index == 2 and dist.get_rank() in ranks:
                gate.opened.set()
                raise ArithmeticError("training has failed")
            if index == 2:
                gate.opened.set()
            return super().training_step(tokens, index)

    method, _ = beside(form)
    save = Calls(lambda run, step: step == 2 and run.save_checkpoint(f"{folder}/a.ckpt"))
    with gate.closed():
        run_of(method, [save], 4).fit(Fails(), loader())


@pytest.mark.parametrize(("form", "ranks"), [("full", [0, 1]), ("sharded", [0, 1]), ("full", [1]), ("sharded", [0])])
def test_a_checkpoint_under_way_is_completed_when_training_fails(tmp_path, form, ranks):
    outcomes = fresh_ranks(fail_in_training, 2, str(tmp_path), form, ranks, timeout=60)
    for outcome in outcomes:
        assert not outcome.timed_out
        assert ("training has failed" in outcome.error) == (outcome.rank in ranks), outcome
    assert names(tmp_path) == ["a.ckpt"]
    assert read(tmp_path / "a.ckpt")["global_step"] == 2


def interrupt(folder, form):
    gate = Gate()

    def save(run, step):
        if step == 2:
            run.save_checkpoint(f"{folder}/a.ckpt")
            raise KeyboardInterrupt

    method, _ = beside(form)
    with gate.closed(), pytest.raises(SystemExit):
        run_of(method, [Calls(save)], 4).fit(Model(), loader())


def test_a_checkpoint_under_way_is_completed_when_the_user_interrupts(tmp_path):
    for outcome in fresh_ranks(interrupt, 2, str(tmp_path), "sharded"):
        assert not outcome.error, outcome.error
    assert read(tmp_path / "a.ckpt")["global_step"] == 2


def interrupt_a_save(folder, form):
    from ds_lightning.checkpoint import full, sharded

    def place(partial, target):
        raise KeyboardInterrupt

    full.place = sharded.place = place
    save = Calls(lambda run, step: run.save_checkpoint(f"{folder}/a.ckpt"))
    with pytest.raises(SystemExit):
        run_of(zero(3, checkpoint=form), [save], 1).fit(Model(), loader())


@FORMS
def test_an_interrupted_save_leaves_nothing(tmp_path, form):
    for outcome in fresh_ranks(interrupt_a_save, 1, str(tmp_path), form):
        assert not outcome.error, outcome.error
    assert names(tmp_path) == []


# Several of everything ------------------------------------------------------------------------------------------------


def save_again_and_again(folder, form, async_save):
    method = zero(2, checkpoint=form, async_save=async_save)

    def save(run, step):
        for name in (f"{step}/new/nested/a.ckpt", "same.ckpt", f"{step}/new/nested/a.ckpt"):
            run.save_checkpoint(f"{folder}/{name}")

    run_of(method, [Calls(save)], 2).fit(Model(), loader())


@pytest.mark.parametrize(("form", "async_save"), [("full", True), ("sharded", True), ("sharded", False)])
def test_four_ranks_save_into_new_folders_and_twice_under_one_name(tmp_path, form, async_save):
    run_ranks(save_again_and_again, 4, str(tmp_path), form, async_save)
    assert names(tmp_path) == ["1", "2", "same.ckpt"]
    for step in (1, 2):
        nested = tmp_path / str(step) / "new" / "nested"
        assert names(nested) == ["a.ckpt"]
        assert read(nested / "a.ckpt")["global_step"] == step
    assert read(tmp_path / "same.ckpt")["global_step"] == 2


def train_twice(folder, form):
    """Two Trainers in one process, the second with a copy of the first one's strategy."""
    for round_ in range(2):
        method, _ = beside(form)
        method = pickle.loads(pickle.dumps(method))
        run = run_of(method, [keeping(folder)], 2)
        run.fit(Model(), loader(), ckpt_path="last" if round_ else None)
        run.save_checkpoint(f"{folder}/after.ckpt")
        pickle.loads(pickle.dumps(method._saver))


@FORMS
def test_two_trainers_of_one_process_follow_each_other(tmp_path, form):
    run_ranks(train_twice, 2, str(tmp_path), form)
    check_complete(tmp_path)
    assert {"after.ckpt", "last.ckpt", "latest"} <= set(names(tmp_path))


# The writer alone -----------------------------------------------------------------------------------------------------


class Work:
    """A write that waits for a gate, and fails if it is told to."""

    def __init__(self, done, name, error=None, gate=None):
        self.done, self.target, self.error, self.gate = done, Path(name), error, gate

    def run(self):
        if self.gate is not None:
            self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.done.append(self.target.name)


def test_the_line_is_kept_in_order_and_ends_with_a_failure():
    done, gate = [], threading.Event()
    writer = BackgroundWriter()
    writer.then(lambda: done.append("at once"))
    writer.add(Work(done, "first", gate=gate))
    writer.then(lambda: done.append("behind first"))
    writer.add(Work(done, "second", OSError("full")))
    writer.then(lambda: done.append("never"))
    writer.add(Work(done, "nor this"))
    assert done == ["at once"]
    gate.set()
    _, error = writer.wait()
    assert str(error) == "full"
    assert done == ["at once", "first", "behind first"]
    assert writer.writes == []
    writer.then(lambda: done.append("at once"))
    writer.add(Work(done, "third"))
    assert writer.wait()[1] is None
    assert done[3:] == ["at once", "third"]


def test_a_failure_nobody_has_heard_of_stops_what_comes_later():
    done, writer = [], BackgroundWriter()
    writer.add(Work(done, "first", SystemExit()))
    writer._thread.join()
    writer.then(lambda: done.append("never"))
    writer.add(Work(done, "nor this"))
    assert isinstance(writer.wait()[1], SystemExit)
    assert done == []


def test_waiting_may_be_bounded():
    done, gate, writer = [], threading.Event(), BackgroundWriter()
    writer.add(Work(done, "slow", gate=gate))
    assert writer.wait(0.05)[1] is None
    assert [str(write.target) for write in writer.writes] == ["slow"]
    gate.set()
    writer.wait()
    assert done == ["slow"]
