"""Configurations people use train the demo model: losses are finite and fall, and nothing is left "auto"."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ds_lightning as dsl
from ds_lightning.demo.model import ByteGPT
from tests.lightning import common
from tests.pool import run_ranks

FILES = Path(__file__).parents[1] / "data" / "ds_configs"
STEPS = 20


class Losses(pl.Callback):
    """Notes the loss of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


class Demo(ByteGPT):
    """The demo model, optimized as the configuration says."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(layers=1, width=32, heads=2, block_size=16, warmup_steps=2, total_steps=STEPS)

    def configure_optimizers(self) -> None:  # type: ignore[override]
        """Left to the configuration."""


def batches(size: int) -> DataLoader:
    """Text of few different bytes: its statistics are learnt in few steps."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(97, 101, (STEPS * size * 2, 17), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=size)


def trains(name: str, rate: float) -> list[float]:
    data = json.loads((FILES / f"{name}.json").read_text())
    params = data["optimizer"]["params"]
    if params["lr"] != "auto":
        params["lr"] = rate  # theirs are made for thousands of steps
    if "scheduler" in data and data["scheduler"]["params"].get("warmup_max_lr") not in (None, "auto"):
        data["scheduler"]["params"].update(warmup_max_lr=rate, warmup_num_steps=4)
    losses = Losses()
    strategy = dsl.ZeroStrategy(config=data)
    trainer = common.fit(Demo(), strategy, batches(4), max_steps=STEPS, max_epochs=-1, callbacks=[losses])
    assert trainer.global_step == STEPS
    assert '"auto"' not in json.dumps(strategy.config.to_dict())
    assert all(math.isfinite(loss) for loss in losses.seen)
    return losses.seen


@pytest.mark.parametrize(
    "name",
    ["adam", "amp", "minimal_fp16", "zero2_auto", "zero3_auto", "onebit_adam", "onebit_lamb", "zero_one_adam"],
)
def test_a_configuration_of_users_trains_the_demo_model(name):
    losses = run_ranks(trains, 2, name, 0.01)
    for seen in losses:
        assert len(seen) == STEPS
        assert sum(seen[-5:]) < 0.95 * sum(seen[:5]), seen


class Frozen(pl.LightningModule):
    """Nothing of it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> None:
        """Left to the configuration."""


def nothing_to_train() -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    trainer = common.make_trainer(dsl.ZeroStrategy(stage=2, config=config), max_steps=1)
    with pytest.raises(dsl.errors.ConfigError, match="requires a gradient"):
        trainer.fit(Frozen(), DataLoader(TensorDataset(torch.ones(4, 2)), 2))


def test_a_configured_optimizer_without_anything_to_train_is_an_error_in_words() -> None:
    run_ranks(nothing_to_train, 1)
