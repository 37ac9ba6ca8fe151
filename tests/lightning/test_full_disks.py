"""A disk that is full or fails: an error on every rank, the checkpoint before it whole, nothing half there."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from torch import distributed as dist

from ds_lightning.checkpoint import placement
from ds_lightning.errors import CheckpointError
from tests.lightning.kills import STEPS, keeping, resumed, unbroken
from tests.lightning.runs import Model, loader, same, trainer, zero
from tests.lightning.test_crash_safety import check_complete, names
from tests.pool import fresh_ranks, run_ranks


def limit_files():
    """Files may not grow beyond a few bytes: what a full disk is to who writes, without a disk."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fail_to_sync():
    def fsync(descriptor):
        raise OSError(errno.EIO, "the disk does not answer")

    os.fsync = fsync


def fail_to_place():
    def replace(self, target):
        raise OSError(errno.EROFS, "the file system has become read-only", str(target))

    Path.replace = Path.rename = replace
    placement._exchange = replace


FAULTS = {"limit": limit_files, "sync": fail_to_sync, "place": fail_to_place}


class Fails(Callback):
    """From its last step on, the disk of a rank fails."""

    def __init__(self, fault, rank):
        self.fault, self.rank = fault, rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, index):
        if index == STEPS - 1:
            trainer.strategy._saver.wait("it fails", trainer.strategy._topology)
            trainer.strategy.barrier()
            if dist.get_rank() == self.rank:
                FAULTS[self.fault]()


def fail(folder, form, beside, fault, rank, steps):
    """Train until a save fails: the message, and after how many steps it came."""
    model, method = Model(), zero(3, checkpoint=form, async_save=beside)
    callbacks = [keeping(folder), Fails(fault, rank)]
    run = trainer(method, steps=steps, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(CheckpointError, match="could not be written") as failure:
        run.fit(model, loader())
    return str(failure.value), len(model.losses)


@pytest.fixture(scope="module")
def weights():
    return run_ranks(unbroken, 2)[0]


CELLS = [
    ("full", False, "limit", 0),
    ("full", True, "sync", 0),
    ("full", True, "limit", 0),
    ("sharded", False, "limit", 1),
    ("sharded", True, "sync", 1),
    ("sharded", True, "place", 0),
    *(
        pytest.param(*cell, marks=pytest.mark.full)
        for cell in [
            ("full", False, "sync", 0),
            ("full", False, "place", 0),
            ("full", True, "place", 0),
            ("sharded", False, "limit", 0),
            ("sharded", False, "sync", 0),
            ("sharded", False, "sync", 1),
            ("sharded", False, "place", 0),
            ("sharded", True, "limit", 0),
            ("sharded", True, "limit", 1),
            ("sharded", True, "sync", 0),
        ]
    ),
]


@pytest.mark.parametrize(("form", "beside", "fault", "rank"), CELLS)
def test_what_cannot_be_written_is_an_error_on_every_rank(tmp_path, weights, form, beside, fault, rank):
    folder = tmp_path / "kept"
    steps = STEPS if beside and fault == "sync" else STEPS + 2  # that one is told at the end of the run
    outcomes = fresh_ranks(fail, 2, str(folder), form, beside, fault, rank, steps, timeout=90)
    for outcome in outcomes:
        assert not outcome.error, outcome.error
        assert not outcome.timed_out
        message, trained = outcome.result
        assert message == outcomes[0].result[0]
        # Beside training, it is the next save that tells: that of `last.ckpt`, or that after the next step.
        assert STEPS <= trained <= STEPS + beside
        assert "step=3.ckpt" in message
        assert ("in the background" in message) == beside
        if form == "sharded" and fault != "place":
            assert f"rank {rank}" in message
    assert names(folder) == ["last.ckpt", "latest", "step=2.ckpt"]
    check_complete(folder)
    (step, found, said), _ = run_ranks(resumed, 2, str(folder), form, str(folder))
    assert (step, said) == (2, [])
    assert same(weights[2], found) == []


@contextmanager
def small_disk(path, size):
    """A small file system, where this process may mount one."""
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], capture_output=True
    ).returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(folder, form, beside):
    """Train until the disk is full."""
    method = zero(3, checkpoint=form, async_save=beside)
    if not os.path.ismount(folder):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit_files_after(5)
    keep = keeping(f"{folder}/kept", save_last=False)
    keep.save_top_k = -1
    run = trainer(method, steps=60, callbacks=[keep], enable_checkpointing=True)
    with pytest.raises(CheckpointError, match=r"No space left|File too large"):
        run.fit(Model(), loader())
    return run.global_step


def limit_files_after(saves):
    """Where there is no small disk: the limit comes after so many saves."""
    left = [saves]
    real = placement.place

    def place(partial, target):
        real(partial, target)
        left[0] -= 1
        if left[0] == 0:
            limit_files()

    from ds_lightning.checkpoint import full, sharded

    full.place = sharded.place = place


@pytest.mark.parametrize(
    ("form", "beside", "mounted"),
    [
        ("full", False, True),
        ("sharded", True, True),
        pytest.param("full", True, False, marks=pytest.mark.full),
        pytest.param("sharded", False, False, marks=pytest.mark.full),
    ],
)
def test_a_disk_that_fills_up_keeps_all_that_was_complete(tmp_path, form, beside, mounted):
    with small_disk(tmp_path / "disk", "256k" if form == "full" else "768k") as disk:
        folder = disk if mounted and disk is not None else tmp_path
        outcomes = fresh_ranks(fill, 2, str(folder), form, beside, timeout=90)
        for outcome in outcomes:
            assert not outcome.error, outcome.error
        assert outcomes[0].result == outcomes[1].result
        kept = folder / "kept"
        check_complete(kept)
        assert len(names(kept)) > 2
        steps = sorted(int(name.removeprefix("step=").removesuffix(".ckpt")) for name in names(kept) if "step" in name)
        assert steps == list(range(1, len(steps) + 1))
        # The last few bytes may have been enough for the checkpoint and not for the name in `latest`.
        assert (kept / "latest").read_text() in [f"step={step}.ckpt" for step in steps[-2:]]


def save_where_nothing_can_be(path, form, beside):
    """The folder of the checkpoint lies below a file. No limit of rights would stop root."""
    start = time.monotonic()

    class Saves(Model):
        def on_train_batch_end(self, *_):
            self.trainer.save_checkpoint(path)

    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        trainer(zero(2, checkpoint=form, async_save=beside), steps=1).fit(Saves(), loader())
    return time.monotonic() - start


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path, form, beside):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "folder" / "a.ckpt"
    assert max(run_ranks(save_where_nothing_can_be, 2, str(path), form, beside)) < 30
    assert names(tmp_path) == ["file"]


def save_on_two_disks(folder, form):
    """Rank 1 does not see the folder that rank 0 has made."""
    if dist.get_rank() == 1:
        real = Path.is_dir
        Path.is_dir = lambda self: real(self) and not self.name.endswith(".partial")
    run = trainer(zero(3, checkpoint=form), steps=1)
    run.fit(Model(), loader())
    with pytest.raises(CheckpointError, match=r"rank 1: .*must see the file system of rank 0"):
        run.save_checkpoint(f"{folder}/a.ckpt")


def test_a_folder_that_one_rank_does_not_see_is_refused(tmp_path):
    for outcome in fresh_ranks(save_on_two_disks, 2, str(tmp_path), "sharded"):
        assert not outcome.error, outcome.error
    assert names(tmp_path) == []


def test_an_archive_that_is_given_up_says_nothing_more(tmp_path):
    """Python's own closes itself when it is dropped, into a file that is closed already."""
    script = """
import torch
from ds_lightning.checkpoint.torch_file import StreamedFile
file = StreamedFile({"a": torch.zeros(3)})
stream = open("a.pt", "wb")
file.open(stream)
file.abandon()
stream.close()
del file
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Exception ignored" not in ended.stderr
