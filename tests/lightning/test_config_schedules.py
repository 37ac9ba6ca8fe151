"""The schedule of a ds_config under a Trainer."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim import lr_scheduler

import ds_lightning as dsl
from ds_lightning.demo import ByteGPT
from tests.lightning import common
from tests.lightning.common import Net, fit, gathering, parity, zero
from tests.lightning.test_configuration import WithoutOptimizer, message_of
from tests.pool import run_ranks

ADAM = {"type": "AdamW", "params": {"lr": 0.01}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "total_num_steps": "auto",
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": 3,
        "warmup_type": "linear",
    },
}
CYCLE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 4, "decay_step_size": 2},
}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}
RANGE = {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 3}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
STEP = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
BLOCKS = {block["type"]: block for block in (WARMUP, DECAY, COSINE, CYCLE, RANGE, STEP)}


class Rates(Callback):
    """Writes down the rate and the momentum of every step that is about to be taken."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        self.found.append((group["lr"], group["betas"][0] if "betas" in group else group["momentum"]))


def train(module: Any, strategy: Any, **arguments: Any) -> list[Any]:
    rates = Rates()
    callbacks = [rates, *arguments.pop("callbacks", [])]
    fit(module, strategy, callbacks=callbacks, **arguments)
    return rates.found


def by_hand(block: Any, steps: int, **filled: Any) -> list[Any]:
    """The rates of a plain loop with the schedule."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    schedule = getattr(dsl.schedules, block["type"])(optimizer, **{**block["params"], **filled})
    found = []
    for _ in range(steps):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]))
        optimizer.step()
        schedule.step()
    return found


def filled_in(block: Any, steps: int) -> dict[str, Any]:
    values = {"total_num_steps": steps, "warmup_min_lr": 0.0, "warmup_max_lr": 0.01}
    return {name: values[name] for name, value in block["params"].items() if value == "auto"}


def own_adam(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def stepped(kind: str, stages: tuple[int, ...], **arguments: Any) -> None:
    block = BLOCKS[kind]
    steps = {1: 15, 3: 6}[arguments.get("accumulate_grad_batches", 1)]
    expected = by_hand(block, steps, **filled_in(block, steps))
    for stage in stages:
        config = {"optimizer": ADAM, "scheduler": block}
        strategy = zero(stage, config)
        assert train(WithoutOptimizer(), strategy, max_epochs=3, **arguments) == expected, stage
        assert not any("brings its own" in note for note in strategy.config.notes)
        assert strategy.config.scheduler.params.get("total_num_steps", steps) == steps
        own = {"scheduler": block}
        assert train(Net(own_adam), zero(stage, own), max_epochs=3, **arguments) == expected, f"{stage}, own"


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        pytest.param(kind, window, marks=[] if (number + window // 3) % 2 == 0 else pytest.mark.full)
        for number, kind in enumerate(BLOCKS)
        for window in (1, 3)
    ],
)
def test_it_is_stepped_once_per_optimizer_step(kind, window):
    run_ranks(stepped, 2, kind, (1 + window % 3,), accumulate_grad_batches=window)


def own_cycle(module: Any) -> Any:
    optimizer = own_adam(module)
    schedule = dsl.schedules.OneCycle(optimizer, **CYCLE["params"])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_schedule_from_the_module_trains_as_under_ddp():
    run_ranks(parity, 2, functools.partial(Net, own_cycle), stages=(0, 1, 2, 3), max_epochs=2)


# Resuming ------------------------------------------------------------------------------------------------------------

PLACES = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2 on the host": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "stage 3": {"zero_optimization": {"stage": 3}},
    "stage 3 on the host": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    },
    "stage 3 on disk": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
}


def resumed(folder: str, place: str, kind: str, checkpoint: str) -> None:
    config = gathering({**PLACES[place], "optimizer": ADAM, "scheduler": BLOCKS[kind]})
    offload = config["zero_optimization"].get("offload_optimizer", {})
    if offload.get("device") == "nvme":
        config["zero_optimization"]["offload_optimizer"] = {**offload, "nvme_path": f"{folder}/swap"}
    make = functools.partial(dsl.ZeroStrategy, config=config, checkpoint=checkpoint)
    keep = ModelCheckpoint(dirpath=folder, filename="at", every_n_train_steps=7, save_top_k=1)
    saved = {"enable_checkpointing": True, "max_epochs": 3}
    module = WithoutOptimizer()
    whole = train(module, make(), callbacks=[keep], **saved)
    assert len(whole) == 15
    expected = common.weights(module)
    rates, again = Rates(), WithoutOptimizer()
    trainer = common.make_trainer(make(), callbacks=[rates], max_epochs=3)
    trainer.fit(again, common.data(), ckpt_path=keep.best_model_path)
    assert rates.found == whole[-len(rates.found) :]
    assert len(rates.found) == 15 - 14
    common.assert_same(common.weights(again), expected, place)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("place", "kind", "checkpoint"),
    [
        pytest.param(place, kind, checkpoint, marks=[] if (number + first) % 2 == second == 0 else pytest.mark.full)
        for number, place in enumerate(PLACES)
        for first, kind in enumerate(("WarmupDecayLR", "OneCycle"))
        for second, checkpoint in enumerate(("full", "sharded"))
    ],
)
def test_a_resumed_run_goes_on_with_the_rates_of_the_unbroken_one(tmp_path, place, kind, checkpoint):
    run_ranks(resumed, 2, str(tmp_path), place, kind, checkpoint)


# Skipped steps -------------------------------------------------------------------------------------------------------


def skipped() -> None:
    config = {"optimizer": ADAM, "scheduler": WARMUP, "fp16": {"enabled": True, "initial_scale_power": 60}}
    config["fp16"]["hysteresis"] = 1
    found: list[int] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            schedule = trainer.lr_scheduler_configs[0].scheduler
            assert schedule.get_last_lr() == [trainer.optimizers[0].param_groups[0]["lr"]]
            found.append(schedule.last_epoch)

    strategy = zero(2, config)
    trainer = fit(WithoutOptimizer(), strategy, max_epochs=12, callbacks=[Watch()])
    assert strategy.skipped_steps > 3
    assert found[:3] == [0, 0, 0]
    assert found[-1] == len(found) - strategy.skipped_steps
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01


def test_skipped_steps_do_not_move_it():
    run_ranks(skipped, 1)


# Values that are found out -------------------------------------------------------------------------------------------


def two_groups(module: Any) -> Any:
    groups = [{"params": [module.gain], "lr": 0.5}, {"params": [*module.embed.parameters()]}]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def automatic() -> None:
    auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    block = {"type": "WarmupDecayLR", "params": auto}

    class Hinted(Net):
        def __init__(self) -> None:
            super().__init__(two_groups)
            self.save_hyperparameters({"warmup_steps": 4})

    strategy = zero(1, {"scheduler": block})
    trainer = fit(Hinted(), strategy, max_epochs=2)
    params = strategy.config.scheduler.params
    assert dict(params) == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": [0.5, 0.02],
        "warmup_num_steps": 4,
        "total_num_steps": 20,
    }
    schedule = trainer.lr_scheduler_configs[0].scheduler
    assert schedule.rates(4) == [0.5, 0.02]
    trainer.validate(Hinted(), common.data(), verbose=False)
    strategy = zero(1, {"scheduler": block})
    common.make_trainer(strategy).validate(WithoutOptimizer(), common.data(), verbose=False)
    strategy = zero(1, {"scheduler": {**block, "params": {**auto, "warmup_num_steps": 2}}})
    fit(Net(two_groups), strategy, max_steps=4, max_epochs=-1)
    assert strategy.config.scheduler.params["total_num_steps"] == 4


@pytest.mark.filterwarnings("ignore")
def test_automatic_values_come_from_the_trainer_and_the_module():
    run_ranks(automatic, 1)


def with_schedule(module: Any) -> Any:
    optimizer = own_adam(module)
    return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]


def own_schedule_stays() -> None:
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}}}
    strategy = zero(1, config)
    trainer = fit(Net(with_schedule), strategy, max_epochs=2)
    (found,) = trainer.lr_scheduler_configs
    assert (type(found.scheduler).__name__, found.interval) == ("StepLR", "epoch")
    assert "the module brings its own schedule; the one of the configuration is not used" in strategy.config.notes


def test_an_automatic_block_leaves_the_modules_own_schedule():
    run_ranks(own_schedule_stays, 1)


class Several(Net):
    """Two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.gain], lr=0.1), torch.optim.SGD(self.embed.parameters(), lr=0.1)]


ENDLESS = {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, ...]]] = {
    "both": (
        functools.partial(Net, with_schedule),
        WARMUP,
        {},
        ("scheduler.type=WarmupLR", "configure_optimizers", "Drop one of the two"),
    ),
    "no optimizer": (WithoutOptimizer, WARMUP, {}, ("scheduler.type=WarmupLR", "needs one optimizer", "has none")),
    "two": (Several, WARMUP, {}, ("needs one optimizer", "has 2")),
    "no end": (Net, ENDLESS, {"max_epochs": -1}, ("scheduler.params.total_num_steps", "the Trainer")),
    "metric": (Net, {"type": "ReduceLROnPlateau"}, {}, ("follows a metric", "configure_optimizers")),
    "arguments": (Net, {"type": "StepLR"}, {}, ("scheduler.params", "step_size")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_words(case):
    module, block, arguments, said = REFUSED[case]
    (found,) = run_ranks(message_of, 1, {"scheduler": block}, 1, module, **arguments)
    assert all(word in found for word in said), found


class ByHand(Net):
    """Steps its optimizer and the schedule of the configuration by hand."""

    def __init__(self) -> None:
        super().__init__(own_adam)
        self.automatic_optimization = False
        self.said: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.said.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.lr_schedulers().step()


def manual() -> None:
    module = ByHand()
    fit(module, zero(2, {"scheduler": RANGE}))
    assert module.said == [rate for rate, _ in by_hand(RANGE, 10)]


def test_manual_optimization_steps_it_by_hand():
    run_ranks(manual, 1)


def monitored(folder: str) -> None:
    monitor = LearningRateMonitor("step", log_momentum=True)
    strategy = zero(2, {"optimizer": ADAM, "scheduler": CYCLE})
    logger = CSVLogger(folder)
    found = train(WithoutOptimizer(), strategy, logger=logger, log_every_n_steps=1, callbacks=[monitor])
    rows = logger.experiment.metrics or [
        dict(zip(("lr-AdamW", "lr-AdamW-momentum"), row, strict=True)) for row in found
    ]
    assert [(float(r["lr-AdamW"]), float(r["lr-AdamW-momentum"])) for r in rows if "lr-AdamW" in r] == found
    assert set(monitor.lrs) == {"lr-AdamW"}


def test_the_learning_rate_monitor_shows_it(tmp_path):
    run_ranks(monitored, 1, str(tmp_path))


# Configurations people use -------------------------------------------------------------------------------------------

FILES = Path(__file__).parents[1] / "data" / "ds_configs"


class Bytes(ByteGPT):
    """The demo, that leaves its optimizer to the configuration."""

    def configure_optimizers(self) -> Any:
        return None


def tiny_text() -> Any:
    tokens = torch.randint(0, 256, (16, 9), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return torch.utils.data.DataLoader(data, batch_size=4)


def demo(name: str, owner: type[ByteGPT]) -> None:
    config = json.loads((FILES / f"{name}.json").read_text())
    size = config.get("train_micro_batch_size_per_gpu", "auto")
    module = owner(layers=1, width=16, heads=2, block_size=8, warmup_steps=2)
    loader = tiny_text()
    if isinstance(size, int):
        loader = torch.utils.data.DataLoader(loader.dataset, batch_size=size)
    elif isinstance(config.get("train_batch_size"), int):
        loader = torch.utils.data.DataLoader(loader.dataset, batch_size=config["train_batch_size"])
    strategy = dsl.ZeroStrategy(config=config)
    rates = Rates()
    trainer = fit(module, strategy, loader, max_epochs=2, callbacks=[rates])
    assert len(rates.found) == trainer.global_step > 0
    kind = type(trainer.lr_scheduler_configs[0].scheduler).__name__
    assert kind == ("WarmupLR" if owner is Bytes else "LambdaLR")
    if owner is Bytes:
        highest, warmup = (0.001, 1000) if name == "adam" else (module.lr, 2)
        lrs = [rate for rate, _ in rates.found]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=highest)
        schedule = dsl.schedules.WarmupLR(optimizer, 0.0, highest, warmup)
        assert lrs == [schedule.rates(step - 1)[0] for step in range(len(lrs))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "owner"), [("adam", Bytes), ("zero2_auto", Bytes), ("zero3_auto", Bytes), ("zero2_auto", ByteGPT)]
)
def test_the_demo_trains_with_the_schedules_of_files_people_use(name, owner):
    run_ranks(demo, 1, name, owner)
