"""Runs that die in the midst of a save, at points with names, and what the next run finds."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import distributed as dist

from ds_lightning import checkpointing
from ds_lightning.checkpoint import background, full, placement, saver, sharded, snapshot, torch_file
from tests.lightning.runs import AtTrainStart, Model, full_weights, loader, trainer, zero

STEPS = 3
"""The saves after this step do not end."""


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, call: int = 1, matching: str = "") -> Callable[[], None]:
    """Die in the place of a call of a function: the first, second ... whose first argument contains `matching`."""

    def arm() -> None:
        real, left = getattr(owner, name), [call]

        def instead(*args: Any, **kwargs: Any) -> Any:
            if matching in str(args[0] if args else ""):
                left[0] -= 1
                if left[0] == 0:
                    die()
            return real(*args, **kwargs)

        setattr(owner, name, instead)

    return arm


def after(owner: Any, name: str, call: int = 1) -> Callable[[], None]:
    """Die as soon as a function has returned for the first, second ... time."""

    def arm() -> None:
        real, left = getattr(owner, name), [call]

        def instead(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                die()

        setattr(owner, name, instead)

    return arm


def during_removal() -> None:
    """Die just before an old file is removed, or when part of an old folder is."""

    def rmtree(path: Any, *_: Any, **__: Any) -> None:
        os.unlink(f"{path}/.metadata")
        die()

    shutil.rmtree = rmtree  # type: ignore[assignment]
    before(Path, "unlink", matching=f"step={STEPS - 1}.ckpt")()


def while_a_link_waits() -> None:
    """Die when the link has been turned back from what is still being written."""
    complete = background.BackgroundWriter._complete

    def slowly(self: Any, write: Any) -> None:
        time.sleep(5)
        complete(self, write)

    background.BackgroundWriter._complete = slowly  # type: ignore[method-assign]
    after(saver, "relink")()


def without_exchange() -> None:
    """Die between the two renames of a file system that cannot exchange names."""
    real = Path.rename

    def rename(self: Path, target: Any) -> Path:
        moved = real(self, target)
        if ".replaced" in str(target):
            die()
        return moved

    placement.ctypes.CDLL = lambda *_, **__: object()  # type: ignore[assignment, misc]
    Path.rename = rename  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Point:
    """Where a run dies, and from which step the next one goes on."""

    arm: Callable[[], None]
    last: int
    """With `ckpt_path="last"`."""
    latest: int
    """With the folder as `ckpt_path`."""
    rank: int = 0
    save_last: Any = True


LATEST = f".{placement.LATEST}."
FULL = {
    "its folder is made": Point(before(full, "make_folder"), 2, 2),
    "between two tensors": Point(before(torch_file.StreamedFile, "write", 3), 2, 2),
    "another rank sends": Point(before(snapshot.Vector, "chunk", 3), 2, 2, rank=1),
    "the table of its content": Point(before(torch_file.StreamedFile, "close"), 2, 2),
    "it is synced": Point(before(os, "fsync"), 2, 2),
    "it is renamed": Point(before(full, "place"), 2, 2),
    "it was renamed": Point(after(full, "place"), 2, 2),
    "latest is written": Point(before(saver, "point_to"), 2, 2),
    "latest is renamed": Point(before(Path, "replace", matching=LATEST), 2, 2),
    "an old one is removed": Point(during_removal, 2, 3),
    "last is replaced": Point(before(full, "place", 2), 2, 3),
    "last was replaced": Point(after(full, "place", 2), 3, 3),
    "a link waits": Point(while_a_link_waits, 2, 2, save_last="link"),
    "a link lost its target": Point(after(checkpointing, "withdraw"), 3, 3, save_last="link"),
}
SHARDED = {
    **FULL,
    "its folder is made": Point(before(sharded, "make_folder"), 2, 2),
    "between two tensors": Point(before(sharded, "_alone", 3), 2, 2),
    "another rank sends": Point(before(sharded, "_alone", 3), 2, 2, rank=1),
    "the table of its content": Point(before(sharded._Writer, "finish"), 2, 2),
    "what is no tensor": Point(before(sharded.ShardedWrite, "_finish"), 2, 2),
    "it is renamed": Point(before(sharded, "place"), 2, 2),
    "it was renamed": Point(after(sharded, "place"), 2, 2),
    "last is replaced": Point(before(sharded, "place", 2), 2, 3),
    "last was replaced": Point(before(placement, "remove", matching="last.ckpt"), 3, 3),
    "last is set aside": Point(without_exchange, 2, 3),
}
POINTS = {"full": FULL, "sharded": SHARDED}


class Armed(Callback):
    """Arms a point once all earlier saves are complete."""

    def __init__(self, point: Point) -> None:
        self.point = point

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == STEPS - 1:
            trainer.strategy._saver.wait("it dies", trainer.strategy._topology)
            trainer.strategy.barrier()
            if dist.get_rank() == self.point.rank:
                self.point.arm()


def keeping(folder: str, save_last: Any = True, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_last=save_last, **options)


def killed(folder: str, form: str, beside: bool, name: str) -> None:
    """Train, and die."""
    point = POINTS[form][name]
    callbacks = [keeping(folder, point.save_last), Armed(point)]
    method = zero(3, checkpoint=form, async_save=beside)
    trainer(method, steps=STEPS + 2, callbacks=callbacks, enable_checkpointing=True).fit(Model(), loader())


def resumed(folder: str, form: str, path: str, save_last: Any = True) -> tuple[int, Any, list[str]]:
    """Go on: the step and the weights with which that begins, and what was said."""
    method = zero(1, checkpoint=form)
    said: list[str] = []
    method._saver._log = said.append
    start = AtTrainStart(lambda run, model: (run.global_step, full_weights(model)))
    callbacks = [keeping(folder, save_last), start]
    run = trainer(method, steps=STEPS + 2, callbacks=callbacks, enable_checkpointing=True)
    run.fit(Model(seed=2), loader(), ckpt_path=path)
    assert run.global_step == STEPS + 2
    return *start.result, said


class Recorder(Callback):
    def __init__(self) -> None:
        self.weights: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.weights[trainer.global_step] = full_weights(pl_module)


def unbroken() -> dict[int, Any]:
    """Weights after each step."""
    recorder = Recorder()
    trainer(3, steps=STEPS + 2, callbacks=[recorder]).fit(Model(), loader())
    return recorder.weights
