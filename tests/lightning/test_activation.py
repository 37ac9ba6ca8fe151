"""The block `activation_checkpointing` under a Trainer with real ranks."""

from __future__ import annotations

import gc
import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ds_lightning as dsl
from ds_lightning.activation import checkpointing
from ds_lightning.activation.region import Region
from ds_lightning.demo import ByteGPT
from tests.lightning.common import STAGES, data, fit, gathering, run, sgd, weights, zero
from tests.lightning.common import Net as Plain
from tests.pool import run_ranks


class Recomputed(pl.Callback):
    """Counts forwards of blocks in backward, and looks at the module while it trains."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.batches = 0
        self.forwards = {False: 0, True: 0}
        for block in pl_module.blocks:
            block.down.register_forward_pre_hook(self._count)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def _count(self, *_: Any) -> None:
        self.forwards[torch._C._current_graph_task_id() != -1] += 1


class Net(Plain):
    """Dropout between blocks' layers, and what a callback saw."""

    def __init__(self, optimize: Any = sgd) -> None:
        super().__init__(optimize, blocks=3)
        for block in self.blocks:
            block.down = nn.Sequential(nn.Dropout(0.5), block.down, nn.Dropout(0.5))

    def val_dataloader(self) -> DataLoader:
        return data(8)


class Checked(Net):
    """Looks at itself in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert [name for name, _ in self.named_parameters()] == [name for name, _ in Checked().named_parameters()]
        assert [type(module) for module in self.modules()] == [type(module) for module in Checked().modules()]
        if batch_idx == 0:
            assert list(self.state_dict()) == list(Checked().state_dict())
        assert all("forward" in vars(block) for block in self.blocks)
        loss = self.loss(batch)
        gc.collect()
        assert sum(type(o) is Region for o in gc.get_objects()) == len(self.blocks)
        return loss


BLOCKS = ({"enabled": True}, {"enabled": True, "policy": "selective"}, {"cpu_checkpointing": True})


def policies(precision: str, stages: tuple[int, ...], **arguments: Any) -> None:
    def train(*words: Any, **more: Any) -> Any:
        how = {"plugins": [dsl.ZeroPrecision(precision)]} if precision == "16-mixed" else {"precision": precision}
        return run(*words, val_check_interval=2, limit_val_batches=1, max_steps=4, **how, **arguments, **more)

    for stage in stages:
        wanted = train(Net, stage)
        for block in BLOCKS if precision == "32-true" else BLOCKS[:2]:
            counter = Recomputed()
            got = train(Net, stage, {"activation_checkpointing": block}, callbacks=lambda c=counter: [c])
            assert counter.forwards[True] == 3 * counter.batches
            assert counter.forwards[False] > 3 * counter.batches, "validation did not run"
            for name, value in wanted["weights"].items():
                assert torch.equal(got["weights"][name], value), (stage, block, name)


@pytest.mark.parametrize(
    ("precision", "accumulate", "stages"),
    [
        ("32-true", 1, STAGES),
        ("bf16-mixed", 2, (1, 3)),
        ("16-mixed", 1, (0, 3)),
        *(
            pytest.param(precision, accumulate, STAGES, marks=pytest.mark.full)
            for precision in ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
            for accumulate in (1, 2)
        ),
    ],
)
def test_configuration_alone_gives_the_same_bits(precision, accumulate, stages):
    run_ranks(policies, 2, precision, stages, accumulate_grad_batches=accumulate)


def inside_and_after() -> None:
    module = Checked()
    keys = list(module.state_dict())
    for _ in range(2):  # a second fit starts over
        fit(module, zero(3, {"activation_checkpointing": {"enabled": True}}), data())
        assert list(module.state_dict()) == keys
        assert all("forward" not in vars(child) for child in module.modules())
    assert weights(module).keys() == set(keys)


def test_the_module_is_itself_meanwhile_and_afterwards():
    run_ranks(inside_and_after, 2)


def failing() -> None:
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            if batch_idx == 1:
                raise KeyError("mine")
            return loss

    module = Broken()
    with pytest.raises(KeyError, match="mine"):
        fit(module, zero(2, {"activation_checkpointing": {"enabled": True}}), data())
    assert all("forward" not in vars(child) for child in module.modules())
    assert not checkpointing.is_configured()


def test_a_failed_run_leaves_the_module_plain():
    run_ranks(failing, 1)


def every_other() -> None:
    counter = Recomputed()
    block = {"enabled": True, "every": 2}
    run(Net, 1, {"activation_checkpointing": block}, callbacks=lambda: [counter], max_steps=1)
    assert counter.forwards == {False: 3, True: 2}


def test_every_second_block():
    run_ranks(every_other, 1)


def gpt(config: dict[str, Any] | None, caplog: Any = None) -> list[Tensor]:
    torch.manual_seed(0)
    module = ByteGPT(layers=2, width=16, heads=2, block_size=8, dropout=0.1)
    tokens = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2)
    torch.manual_seed(1)
    fit(module, dsl.ZeroStrategy(stage=3, config=gathering(config)), loader)
    return [dsl.full_param(p) for p in module.parameters()]


def profiled() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        wanted = gpt(None)
        got = gpt({"activation_checkpointing": {"enabled": True, "policy": "selective", "profile": True}})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    tables = [text for text in said if "activation checkpointing" in text]
    assert len(tables) == (dist.get_rank() == 0)
    if tables:
        rows = tables[0].splitlines()
        assert [row.split()[0] for row in rows] == ["activation", "unit", "blocks.0", "blocks.1", "all"]
        assert rows[2].split()[1] == "1"  # calls on this rank


def test_a_profile_is_told_once_by_rank_0():
    run_ranks(profiled, 2)


def warned(config: dict[str, Any], text: str) -> None:
    class Bare(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.b(dsl.checkpoint(self.a, x)), y)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    from tests.lightning.common import make_trainer

    trainer = make_trainer(zero(2, {"activation_checkpointing": config}), max_steps=2)
    with pytest.warns(UserWarning, match=text):
        trainer.fit(Bare(), data())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"enabled": True}, "no repeated blocks"),
        ({"partition_activations": True}, "there is no model parallelism"),
        (
            {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4},
            "contiguous_memory_optimization has nothing to do either",
        ),
    ],
    ids=["no blocks", "partition", "contiguous"],
)
def test_what_has_no_effect_is_said(config, text):
    run_ranks(warned, 1, config, text)


def by_hand() -> None:
    seen = []

    class ByHand(Net):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(checkpointing.front().how)
            x = dsl.checkpoint(self.embed, x)
            for block in self.blocks:
                x = dsl.checkpoint(block, x)
            return self.head(x) * self.gain + self.offset

    wanted = run(Net, 3)["weights"]
    found = run(ByHand, 3, {"activation_checkpointing": {"enabled": True, "policy": "selective"}})["weights"]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(how.selective for how in seen)
    assert not checkpointing.front().how.selective
    assert not checkpointing.is_configured()


def test_calls_by_hand_follow_the_configuration_for_the_run():
    run_ranks(by_hand, 2)
