"""Learning-rate schedules follow the optimizer that really steps, at every stage."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.optim import lr_scheduler

import ds_lightning as dsl
from tests.lightning import common
from tests.lightning.common import Net, parity, zero
from tests.pool import run_ranks


class Followed(Net):
    """Writes down the rate with which each step was taken, seen by how far a weight moved."""

    def __init__(self, schedule: str, window: int = 1) -> None:
        super().__init__()
        self.schedule = schedule
        self.said: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return SCHEDULES[self.schedule](self, optimizer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        before = dsl.full_param(self.gain)
        optimizer_closure()
        gradient = self.gain.grad if not self.is_ours else dsl.full_grad(self.gain)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        self.said.append(rate)
        moved = float(dsl.full_param(self.gain) - before)
        assert math.isclose(moved, -rate * float(gradient), rel_tol=1e-3, abs_tol=1e-6), (moved, rate, gradient)

    @property
    def is_ours(self) -> bool:
        return isinstance(self.trainer.strategy, dsl.ZeroStrategy)

    def val_dataloader(self) -> Any:
        return common.data(8, 2)


def by_step(optimizer: Any, schedule: Any, **keys: Any) -> Any:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", **keys}}


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda m, o: by_step(o, lr_scheduler.LambdaLR(o, lambda step: (1 + step) / 10)),
    "OneCycleLR": lambda m, o: by_step(
        o, lr_scheduler.OneCycleLR(o, 0.1, total_steps=int(m.trainer.estimated_stepping_batches), cycle_momentum=False)
    ),
    "SequentialLR": lambda m, o: by_step(
        o,
        lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
        ),
    ),
    "StepLR every epoch": lambda m, o: ([o], [lr_scheduler.StepLR(o, 1, gamma=0.3)]),
    "StepLR every second step": lambda m, o: by_step(o, lr_scheduler.StepLR(o, 1, gamma=0.5), frequency=2),
    "ReduceLROnPlateau": lambda m, o: {
        "optimizer": o,
        "lr_scheduler": {
            "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
            "monitor": "val_loss",
        },
    },
    "CyclicLR": lambda m, o: by_step(o, lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False)),
}


RARE = ("CyclicLR", "StepLR every second step")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=pytest.mark.full) if name in RARE else name for name in SCHEDULES]
)
def test_steps_are_taken_with_the_rates_of_the_schedule(schedule):
    (first, _) = run_ranks(parity, 2, functools.partial(Followed, schedule), stages=(1, 3), max_epochs=3)
    assert len(first["said"]) == 15
    assert len(set(first["said"])) > 1, "the rate never changed"


@pytest.mark.parametrize("schedule", ["LambdaLR", "StepLR every epoch", "OneCycleLR"])
def test_a_short_last_window_is_one_step_of_the_schedule(schedule):
    (first, _) = run_ranks(parity, 2, functools.partial(Followed, schedule), max_epochs=2, accumulate_grad_batches=3)
    assert len(first["said"]) == 2 * 2


class Estimating(Net):
    """Asks how many steps there will be while it makes its optimizer."""

    def __init__(self) -> None:
        super().__init__(common.adamw)
        self.said: list[float] = []

    def configure_optimizers(self) -> Any:
        self.said.append(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_epochs": 3}, 15),
        ({"max_epochs": 3, "accumulate_grad_batches": 3}, 6),
        ({"max_steps": 4, "max_epochs": -1}, 4),
    ],
    ids=["epochs", "windows", "steps"],
)
def test_the_number_of_steps_is_known_in_configure_optimizers(arguments, steps):
    (first, _) = run_ranks(parity, 2, Estimating, **arguments)
    assert first["said"] == [steps]
    assert first["steps"] == steps


def monitored(folder: str) -> None:
    written = {}
    for kind in ("ddp", *common.STAGES):
        logger = CSVLogger(folder, name=str(kind), version=0)
        monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
        module = Net(two_groups)
        common.fit(
            module, common.strategy_of(kind), logger=logger, callbacks=[monitor], log_every_n_steps=1, max_epochs=2
        )
        if module.global_rank == 0:
            written[kind] = [{k: float(v) for k, v in row.items()} for row in logger.experiment.metrics] or monitor.lrs
            assert monitor.lrs, "nothing was monitored"
            written[kind] = {name: list(map(float, values)) for name, values in monitor.lrs.items()}
    for kind in written:
        assert written[kind] == written["ddp"], kind
        assert len(written[kind]) == 2


def two_groups(module: Any) -> Any:
    optimizer = torch.optim.SGD(
        [
            {"params": list(module.blocks.parameters()), "lr": 0.02},
            {"params": [*module.embed.parameters(), *module.head.parameters(), module.gain]},
        ],
        lr=0.01,
        momentum=0.9,
    )
    return by_step(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9))


def test_the_learning_rate_monitor_sees_what_it_sees_under_ddp(tmp_path):
    run_ranks(monitored, 2, str(tmp_path))


def tensor_rate() -> None:
    class Tensor(Net):
        def configure_optimizers(self) -> Any:
            self.rate = torch.tensor(0.01)
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, foreach=False)
            return by_step(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5))

    expected = common.run(Tensor, "ddp")["weights"]
    for stage in common.STAGES:
        module = Tensor()
        common.fit(module, zero(stage))
        common.assert_same(common.weights(module), expected, f"stage {stage}")
        assert module.trainer.optimizers[0].param_groups[0]["lr"] is module.rate


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    run_ranks(tensor_rate, 2)


class LateGroup(Callback):
    """Adds a parameter to the optimizer after the first epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": [pl_module.gain], "lr": 0.02})


def all_but_gain(module: Any) -> Any:
    return torch.optim.AdamW([p for name, p in module.named_parameters() if name != "gain"], lr=0.01)


def late_group() -> list[Callback]:
    return [LateGroup()]


def test_a_group_that_is_added_during_training_trains():
    run_ranks(parity, 2, functools.partial(Net, all_but_gain), callbacks=late_group, max_epochs=3)
