"""Offload under a Trainer: the same runs, checkpoints that fit anywhere, swap files that nobody has to remove."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import distributed as dist

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from ds_lightning.offload.policy import OffloadPolicy
from tests.lightning.runs import SHARD_EVERYTHING, AtTrainStart, Model, full_weights, loader, same, trainer
from tests.lightning.test_checkpoints import compare
from tests.lightning.test_sharded import read
from tests.pool import run_ranks
from tests.resources import held, tensors_alive
from tests.warm import ROOT, run_python

# Stage, optimizer, parameters.
PLACES = [(1, "cpu", "none"), (2, "nvme", "none"), (3, "cpu", "cpu"), (3, "nvme", "nvme"), (3, "none", "nvme")]


@contextmanager
def everything_swaps() -> Iterator[None]:
    """Units go to disk however small they are."""
    original = OffloadPolicy.from_config

    def small(resolved: Any) -> OffloadPolicy | None:
        policy = original(resolved)
        return None if policy is None else dataclasses.replace(policy, smallest=0, max_in_cpu=0)

    with mock.patch.object(OffloadPolicy, "from_config", small):
        yield


def offload(folder: str | Path, optimizer: str, param: str) -> dict[str, Any]:
    """Arguments of the strategy."""
    found = {"offload_optimizer": optimizer, "offload_param": param, "nvme_path": str(folder)}
    return {key: value for key, value in found.items() if value != "none"}


def fit(
    folder: str,
    stage: int,
    optimizer: str,
    param: str,
    precision: str,
    kind: str = "adamw",
    zero: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Model]:
    model = Model(kind)
    run = trainer(stage, precision, zero={**(zero or {}), **offload(folder, optimizer, param)}, **options)
    with everything_swaps():
        run.fit(model, loader(1))
    return run, model


# Numbers -------------------------------------------------------------------------------------------------------------


def check_run(folder, stage, optimizer, param, precision):
    options: dict[str, Any] = {"steps": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    overflows = precision == "16-mixed"
    if overflows:  # the scale is so large that gradients overflow in the first steps
        fp16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
        options["zero"] = {"config": {"fp16": fp16, **SHARD_EVERYTHING}}
        precision = "32-true"  # the configuration's holds
    _, plain = fit(folder, stage, "none", "none", precision, **options)
    run, model = fit(folder, stage, optimizer, param, precision, **options)
    assert not overflows or 0 < run.strategy.skipped_steps < 6, run.strategy.skipped_steps
    assert model.losses == plain.losses
    assert same(full_weights(model), full_weights(plain)) == []
    assert run.strategy.engine.swaps == ("nvme" in (optimizer, param))
    assert os.listdir(folder) == []


@pytest.mark.parametrize("place", PLACES, ids=lambda p: "-".join(map(str, p)))
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_fit_is_bitwise_the_same(place, precision, tmp_path):
    run_ranks(check_run, 2, str(tmp_path), *place, precision)


def check_names(folder):
    for name in ("dszero1_offload", "dszero2_offload", "dszero3_offload"):
        model = Model()
        run = trainer(dsl.registration.make_strategy(**dsl.registration.VARIANTS[name]))
        run.fit(model, loader())
        homes = [b.home for b in run.strategy.engine.units.values() if b.unit.trainable]
        assert all(home is not None and home.steps_apart for home in homes), name
    with mock.patch.dict(os.environ, {"DS_LIGHTNING_NVME_PATH": folder}), everything_swaps():
        run = trainer(dsl.registration.make_strategy(**dsl.registration.VARIANTS["dszero3_nvme"]))
        run.fit(Model(), loader())
        assert run.strategy.engine.swaps
        assert run.strategy.engine.options.offload.pipeline_read
    with pytest.raises(ConfigError, match="DS_LIGHTNING_NVME_PATH"):
        dsl.ZeroStrategy(3, offload_optimizer="nvme")


def test_the_registered_names_offload(tmp_path):
    run_ranks(check_names, 2, str(tmp_path))


# Checkpoints ---------------------------------------------------------------------------------------------------------


def save_from(folder, stage, optimizer, param, precision, kind):
    options = {"steps": 3, "gradient_clip_val": 0.5, "kind": kind}
    plain, _ = fit(folder, stage, "none", "none", precision, **options)
    plain.save_checkpoint(f"{folder}/plain.ckpt")
    run, _ = fit(f"{folder}/swap", stage, optimizer, param, precision, **options)
    run.save_checkpoint(f"{folder}/full.ckpt")
    run.strategy._saver.sharded = True
    run.save_checkpoint(f"{folder}/sharded.ckpt")


def resume_at(folder, source, stage, optimizer, param, precision, kind):
    """Saves what it has restored."""
    zero = offload(f"{folder}/swap", optimizer, param)
    save = AtTrainStart(lambda run, _: run.save_checkpoint(f"{folder}/again.ckpt"))
    run = trainer(stage, precision, steps=4, zero=zero, callbacks=[save])
    with everything_swaps():
        run.fit(Model(kind, seed=2), loader(1), ckpt_path=f"{folder}/{source}")


@pytest.mark.parametrize(
    ("place", "precision", "kind"),
    [
        ((2, "nvme", "none"), "32-true", "adamw"),
        ((3, "nvme", "nvme"), "bf16-mixed", "adamw"),
        ((3, "nvme", "cpu"), "32-true", "odd"),
        ((3, "cpu", "cpu"), "bf16-mixed", "adagrad"),
        ((3, "none", "nvme"), "32-true", "sgd"),
    ],
    ids=str,
)
def test_a_checkpoint_holds_what_is_on_disk_and_loads_at_any_other_offload(place, precision, kind, tmp_path):
    run_ranks(save_from, 2, str(tmp_path), *place, precision, kind)
    assert compare(tmp_path / "plain.ckpt", tmp_path / "full.ckpt") == []
    full = torch.load(tmp_path / "full.ckpt", weights_only=True)
    sharded = read(tmp_path / "sharded.ckpt")
    for key in ("state_dict", "optimizer_states"):
        assert same(_plain(sharded[key]), _plain(full[key]), key) == []
    for world, source, other in [
        (2, "full.ckpt", (3, "nvme", "nvme")),
        (1, "sharded.ckpt", (2, "nvme", "none")),
        (3, "sharded.ckpt", (1, "cpu", "none")),
        (2, "sharded.ckpt", (3, "none", "none")),
    ]:
        run_ranks(resume_at, world, str(tmp_path), source, *other, precision, kind)
        assert compare(tmp_path / "plain.ckpt", tmp_path / "again.ckpt") == [], (world, source, other)
    assert os.listdir(tmp_path / "swap") == []


def _plain(item):
    if torch.is_tensor(item):
        return item.clone()
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    return [_plain(value) for value in item] if isinstance(item, list) else item


def unbroken(folder, optimizer, param, asynchronous):
    """Resuming with another offload in the middle ends as the run that went on."""
    options = {"max_epochs": 4, "limit_train_batches": 3, "accumulate_grad_batches": 2, "steps": -1}
    saving = {"async_save": asynchronous, "checkpoint": "sharded"}
    _, model = fit(folder, 3, "none", "none", "bf16-mixed", **options)
    expected, losses = full_weights(model), model.losses
    half, _ = fit(folder, 3, optimizer, param, "bf16-mixed", **{**options, "max_epochs": 2}, zero=saving)
    half.save_checkpoint(f"{folder}/half.ckpt")
    run = trainer(3, "bf16-mixed", zero=offload(folder, "cpu", "nvme"), **options)
    model = Model(seed=2)
    with everything_swaps():
        run.fit(model, loader(1), ckpt_path=f"{folder}/half.ckpt")
    assert model.losses == losses[6:]
    assert same(expected, full_weights(model)) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_changes_its_offload_ends_as_the_unbroken_one(asynchronous, tmp_path):
    run_ranks(unbroken, 2, str(tmp_path), "nvme", "nvme", asynchronous)


# What goes wrong -----------------------------------------------------------------------------------------------------


def fail_to_set_up(folder, match, rank_local=False):
    path = folder if not rank_local or dist.get_rank() == 1 else str(Path(folder).parents[1] / "fine")
    run = trainer(3, zero=offload(path, "nvme", "nvme"))
    with everything_swaps(), pytest.raises(ConfigError, match=match):
        run.fit(Model(), loader())


def test_a_folder_that_is_no_folder_is_told_at_set_up(tmp_path):
    (tmp_path / "file").write_text("here already")
    run_ranks(fail_to_set_up, 2, str(tmp_path / "file"), "swap file of unit")
    assert (tmp_path / "file").read_text() == "here already"


def test_a_folder_that_cannot_be_made_is_told_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    run_ranks(fail_to_set_up, 2, str(tmp_path / "file" / "below"), "rank 1: .*Set nvme_path", True)


def test_a_missing_folder_is_made(tmp_path):
    run_ranks(check_run, 1, str(_made_later(tmp_path)), 3, "nvme", "nvme", "32-true")


def _made_later(tmp_path):
    (tmp_path / "a").mkdir()
    return tmp_path / "a"


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def is_empty(folder: Path) -> bool:
    """No names, and no bytes of files without names."""
    told = os.statvfs(folder)
    return os.listdir(folder) == [] and told.f_bfree == told.f_blocks


@pytest.fixture
def small_disk(tmp_path):
    with disk(tmp_path / "small", "64k") as folder:
        yield folder


@pytest.fixture
def own_disk(tmp_path):
    with disk(tmp_path / "own", "8m") as folder:
        yield folder


def test_a_disk_that_is_too_small_is_told_before_training(small_disk):
    run_ranks(fail_to_set_up, 2, str(small_disk), "No space left.*KiB|MiB are free there")
    assert is_empty(small_disk)  # what was reserved before it was full is given back


def test_a_disk_that_cannot_be_written_is_told_before_training(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    run_ranks(fail_to_set_up, 2, str(small_disk), "Read-only file system.*Set nvme_path")


def truncate(folder):
    """Someone shortens a swap file between two steps."""

    class Cut(AtTrainStart):
        def on_train_batch_end(self, run, *_: Any) -> None:
            for buffers in run.strategy.engine.units.values():
                if buffers.home is not None and buffers.home.swap is not None:
                    os.ftruncate(buffers.home.swap.file.fd, 0)

    run = trainer(3, steps=3, zero=offload(folder, "nvme", "nvme"), callbacks=[Cut(lambda *_: None)])
    with everything_swaps(), pytest.raises(dsl.errors.FileIOError, match="swap file of unit"):
        run.fit(Model(), loader())


def test_a_swap_file_that_was_cut_short_ends_the_run_in_words(tmp_path):
    run_ranks(truncate, 1, str(tmp_path))


SCRIPT = """
import os, signal, sys
import lightning.pytorch as pl
import ds_lightning as dsl
from tests.lightning.test_offload import everything_swaps, is_empty, offload
from tests.lightning.runs import Model, loader, zero

folder, end = sys.argv[1:]

class End(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        assert trainer.strategy.engine.homes.disk_bytes > 0
        assert os.listdir(folder) == []  # not even while it runs: the files have no names
        assert not is_empty(folder)
        print("ready", flush=True)
        if end == "exception":
            raise RuntimeError("as asked")
        if end.startswith("SIG"):  # Lightning takes SIGTERM as a wish, and fulfils it after this batch
            os.kill(os.getpid(), getattr(signal, end))

with everything_swaps():
    pl.Trainer(
        accelerator="cpu", devices=1, strategy=zero(3, **offload(folder, "nvme", "nvme")), max_steps=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[End()],
    ).fit(Model(), loader())
"""


@pytest.mark.parametrize(
    ("end", "code", "batches"), [("exit", 0, 3), ("exception", 1, 1), ("SIGTERM", 0, 1), ("SIGKILL", -9, 1)]
)
def test_no_swap_file_outlives_its_process(end, code, batches, own_disk, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = run_python([str(script), str(own_disk), end], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.count("ready") == batches
    assert is_empty(own_disk)


def count_descriptors(folder):
    """Open files and threads after each of many steps."""
    counts = []

    class Count(AtTrainStart):
        def on_train_batch_end(self, *_: Any) -> None:
            counts.append(held())

    run = trainer(3, steps=30, zero=offload(folder, "nvme", "nvme"), callbacks=[Count(lambda *_: None)])
    with everything_swaps():
        run.fit(Model(), loader(1, 64))
    assert len(set(counts[3:])) == 1, counts


def test_descriptors_and_threads_do_not_grow(tmp_path):
    run_ranks(count_descriptors, 1, str(tmp_path))


def test_a_home_folder_is_found():
    resolved = mock.MagicMock()
    resolved.zero_optimization.offload_optimizer.device = "nvme"
    resolved.zero_optimization.offload_optimizer.nvme_path = "~/swap"
    resolved.zero_optimization.offload_param.device = "none"
    resolved.zero_optimization.offload_param.nvme_path = None
    found = OffloadPolicy.from_config(resolved)
    assert found is not None
    assert found.optimizer_path == Path.home() / "swap"


# Life and death ------------------------------------------------------------------------------------------------------


class Counting(Model):
    """Counts tensors after each step."""

    counts: list[Any]

    def on_train_batch_end(self, outputs, batch, index):
        super().on_train_batch_end(outputs, batch, index)
        engine = self.trainer.strategy.engine
        engine.residency.forget_expected()
        if engine.homes.space is not None:  # what is under way just now keeps its memory
            for pool in (engine.homes.space.records, engine.homes.space.chunks, engine.homes.space.shards):
                pool.clear()
        self.counts.append(tensors_alive())


def live_and_die(folder, optimizer, param):
    after_fits = []
    with everything_swaps():
        for _ in range(3):
            model = Counting()
            model.counts = []
            places = offload(folder, optimizer, param)
            run = trainer(3, "bf16-mixed", steps=8, zero=places, accumulate_grad_batches=2)
            run.fit(model, loader(1, 64))
            assert len(set(model.counts[4::2])) == 1, model.counts
            assert len(set(model.counts[5::2])) == 1, model.counts
            engine = run.strategy.engine
            watched = [weakref.ref(found) for found in (model, run, engine, engine.homes, model.blocks[0].up.weight)]
            del model, run, engine
            gc.collect()
            assert [reference() for reference in watched] == [None] * len(watched)
            after_fits.append((*tensors_alive(), *held()))
    assert all(last <= second for last, second in zip(after_fits[-1], after_fits[1], strict=True)), after_fits


@pytest.mark.parametrize(("optimizer", "param"), [("cpu", "cpu"), ("nvme", "nvme")])
def test_nothing_grows_from_step_to_step_or_outlives_a_fit(optimizer, param, tmp_path):
    run_ranks(live_and_die, 2, str(tmp_path), optimizer, param)


def fail_and_fit_again(folder, optimizer, where, again):
    """A run fails on all ranks alike; the same Trainer, or another one, goes on from the weights as they are."""

    class Fails(Callback):
        def on_after_backward(self, run: Any, *_: Any) -> None:
            self.fail(run, "backward")

        def on_before_optimizer_step(self, run: Any, *_: Any) -> None:
            self.fail(run, "step")

        def fail(self, run: Any, place: str) -> None:
            if place == where and run.global_step == 1 and not hasattr(self, "over"):
                self.over = True
                raise RuntimeError("as asked")

    model = Model()
    places = offload(folder, optimizer, optimizer)
    with everything_swaps():
        run = trainer(3, steps=3, zero=places, callbacks=[Fails()])
        with pytest.raises(RuntimeError, match="as asked"):
            run.fit(model, loader())
        if again == "other":
            run = trainer(3, steps=3, zero=places)
        run.fit(model, loader())
    return full_weights(model), model.losses


@pytest.mark.parametrize("where", ["backward", "step"])
@pytest.mark.parametrize("again", ["same", "other"])
def test_a_module_is_trained_on_after_a_run_that_failed(where, again, tmp_path):
    wanted = run_ranks(fail_and_fit_again, 2, str(tmp_path), "none", where, again)
    found = run_ranks(fail_and_fit_again, 2, str(tmp_path), "nvme", where, again)
    assert same(list(found), list(wanted)) == []
