"""A ds_config under a Trainer: what agrees, what contradicts, and an optimizer that the configuration makes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import ds_lightning as dsl
from tests.lightning import common
from tests.lightning.common import Net, assert_same, data, fit, gathering, make_trainer, parity, run, weights, zero
from tests.pool import run_ranks

ConfigError = dsl.errors.ConfigError


def message_of(config: Any, stage: int | None = None, module: Any = Net, **arguments: Any) -> str:
    """What a fit with this configuration says when it is refused; nothing if it trains. In each rank."""
    try:
        fit(module(), dsl.ZeroStrategy(stage=stage, config=config), **arguments)
    except ConfigError as error:
        return str(error)
    return ""


# The batch-size triangle and accumulation ----------------------------------------------------------------------------


def resolved_batch(config: dict[str, Any], **arguments: Any) -> tuple[Any, ...]:
    strategy = zero(2, config)
    fit(Net(), strategy, **arguments)
    found = strategy.config
    return found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 12},
        {"train_micro_batch_size_per_gpu": 2},
        {"gradient_accumulation_steps": 3},
        {"train_batch_size": 12, "gradient_accumulation_steps": 3},
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2},
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
        {"train_batch_size": 12.0},
    ],
    ids=str,
)
def test_batch_sizes_that_agree_with_the_trainer_are_completed(config):
    for found in run_ranks(resolved_batch, 2, config, accumulate_grad_batches=3):
        assert found == (12, 2, 3)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"gradient_accumulation_steps": 4},
            ("gradient_accumulation_steps", "4", "Trainer(accumulate_grad_batches=3)"),
        ),
        ({"train_batch_size": 8}, ("train_batch_size", "8", "accumulat")),
        ({"train_micro_batch_size_per_gpu": 5}, ("train_micro_batch_size_per_gpu", "5", "batch_size=2")),
        ({"train_batch_size": 13}, ("train_batch_size", "13")),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            ("train_batch_size", "24", "2 x", "3 x", "world size 2 = 12"),
        ),
    ],
    ids=str,
)
def test_batch_sizes_that_do_not_agree_are_an_error_that_names_both(config, said):
    first, second = run_ranks(message_of, 2, config, 2, accumulate_grad_batches=3)
    assert first == second
    assert all(word in first for word in said), first


def test_accumulation_in_the_configuration_alone_is_refused_with_the_way_out():
    for said in run_ranks(message_of, 2, {"gradient_accumulation_steps": 4}, 2):
        assert "Trainer(accumulate_grad_batches=4)" in said


# Clipping ------------------------------------------------------------------------------------------------------------


def clipping_of_the_configuration() -> None:
    make = functools.partial(Net, functools.partial(torch_sgd, lr=2.0))
    expected = run(make, "ddp", gradient_clip_val=0.02)["weights"]
    for stage in common.STAGES:
        for arguments in ({}, {"gradient_clip_val": 0.02}):
            found = run(make, stage, {"gradient_clipping": 0.02}, **arguments)["weights"]
            assert_same(found, expected, f"stage {stage}")
        found = run(make, stage, {"gradient_clipping": "auto"}, gradient_clip_val=0.02)["weights"]
        assert_same(found, expected, f"stage {stage}, auto")


def torch_sgd(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def test_clipping_by_the_configuration_is_clipping_by_the_trainer_and_happens_once():
    run_ranks(clipping_of_the_configuration, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gradient_clip_val": 0.5}, ("gradient_clipping", "0.02", "gradient_clip_val=0.5")),
        ({"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, ("gradient_clipping", "value")),
    ],
)
def test_two_different_clippings_are_an_error_that_names_both(arguments, said):
    (found,) = run_ranks(message_of, 1, {"gradient_clipping": 0.02}, 2, **arguments)
    assert all(word in found for word in said), found


# The optimizer of the configuration ----------------------------------------------------------------------------------


class WithoutOptimizer(Net):
    """Leaves the optimizer to the configuration."""

    def configure_optimizers(self) -> None:
        return None


def from_configuration(block: dict[str, Any], kind: str, arguments: dict[str, Any]) -> None:
    def expected_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(module.parameters(), **arguments)

    expected = run(functools.partial(Net, expected_optimizer), "ddp", max_epochs=2)["weights"]
    for stage in common.STAGES:
        strategy = zero(stage, {"optimizer": block})
        module = WithoutOptimizer()
        trainer = fit(module, strategy, max_epochs=2)
        wants_torch = block["params"].get("torch_adam", False)
        cls = getattr(torch.optim, kind) if wants_torch else getattr(dsl.optim, block["type"])
        assert type(trainer.optimizers[0]) is cls
        assert_same(weights(module), expected, f"stage {stage}")


DECAY = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
AS_JSON = {**DECAY, "betas": [0.8, 0.99]}


@pytest.mark.parametrize(
    ("block", "kind", "arguments"),
    [
        ({"type": "Adam", "params": AS_JSON}, "AdamW", DECAY),
        ({"type": "Adam", "params": {**AS_JSON, "adam_w_mode": True}}, "AdamW", DECAY),
        ({"type": "Adam", "params": {**AS_JSON, "adam_w_mode": False}}, "Adam", DECAY),
        ({"type": "Adam", "params": {**AS_JSON, "torch_adam": True}}, "AdamW", DECAY),
        ({"type": "Adam", "params": {**AS_JSON, "torch_adam": True, "adam_w_mode": False}}, "Adam", DECAY),
        ({"type": "AdamW", "params": AS_JSON}, "AdamW", DECAY),
        ({"type": "AdamW", "params": {**AS_JSON, "lr": "1e-2", "eps": "1e-6"}}, "AdamW", DECAY),
        ({"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}, "SGD", {"lr": 0.02, "momentum": 0.9}),
        ({"type": "Adagrad", "params": {"lr": 0.05}}, "Adagrad", {"lr": 0.05}),
        ({"type": "CPUAdam", "params": {**AS_JSON, "adam_w_mode": False}}, "Adam", DECAY),
        ({"type": "RMSprop", "params": {"lr": 0.01, "alpha": 0.9}}, "RMSprop", {"lr": 0.01, "alpha": 0.9}),
        ({"type": "NAdam", "params": {"lr": 0.01}}, "NAdam", {"lr": 0.01}),
    ],
    ids=lambda value: None if isinstance(value, str) else value.get("type"),
)
def test_an_optimizer_of_the_configuration_trains_as_its_counterpart_in_torch(block, kind, arguments):
    run_ranks(from_configuration, 2, block, kind, arguments)


def automatic_values() -> None:
    block = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    expected = run(functools.partial(Net, common.adamw), "ddp")["weights"]
    strategy = zero(2, {"optimizer": block})
    module = Net(common.adamw)
    fit(module, strategy)
    assert_same(weights(module), expected)
    assert strategy.config.optimizer.params["lr"] == 0.01

    class Rates(WithoutOptimizer):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"learning_rate": 0.01, "weight_decay": 0.1})

    module = Rates()
    trainer = fit(module, zero(2, {"optimizer": block}))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01
    assert_same(weights(module), expected)


def test_automatic_values_of_an_optimizer_come_from_the_module():
    run_ranks(automatic_values, 2)


REFUSED: list[tuple[dict[str, Any], tuple[str, ...], Any]] = [
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
        ("optimizer.type=AdamW", "configure_optimizers", "Net"),
        Net,
    ),
    ({"optimizer": {"type": "Addam", "params": {"lr": 0.1}}}, ("optimizer.type", "Addam", "Adam"), WithoutOptimizer),
    ({"optimizer": {"type": "AdamW", "params": {"lrr": 0.1}}}, ("optimizer.params", "lrr"), WithoutOptimizer),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, ("optimizer.params.lr", "auto"), WithoutOptimizer),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, ("gradient_clipping",), WithoutOptimizer),
    ({"optimizer": {"type": "AdamW", "params": {"lr": True}}}, ("optimizer.params.lr",), WithoutOptimizer),
    ({"gradient_clipping": True}, ("gradient_clipping",), Net),
    ({"fp16": {"enabled": True, "loss_scale": False}}, ("fp16.loss_scale",), Net),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, ("fp16.loss_scale_window",), Net),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, ("fp16.min_loss_scale",), Net),
    ({"fp16": {"enabled": True, "hysteresis": 0}}, ("fp16.hysteresis",), Net),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("fp16", "bf16"), Net),
    ({"zero_optimisation": {"stage": 2}}, ("zero_optimisation", "zero_optimization"), Net),
    ({"zero_optimization": {"stage": 5}}, ("zero_optimization.stage",), Net),
    ({"fp16": {"enable": True}}, ("fp16.enable", "enabled"), Net),
]


@pytest.mark.parametrize(("config", "said", "module"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_a_configuration_that_cannot_be_is_refused_in_words(config, said, module):
    (found,) = run_ranks(message_of, 1, config, None, module)
    assert found
    assert all(word in found for word in said), found


def test_all_conflicts_are_told_at_once():
    config = {
        "gradient_clipping": 0.3,
        "gradient_accumulation_steps": 7,
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": 1},
    }
    (found,) = run_ranks(message_of, 1, config, 1, gradient_clip_val=0.1, accumulate_grad_batches=2)
    for word in ("gradient_clipping", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        assert word in found, found
    with pytest.raises(ConfigError) as info:
        dsl.ZeroStrategy(stage=2, config={**config, "optimizer": {"type": "Addam"}, "unknown_key": 1})
    assert "stage" in str(info.value) or "unknown_key" in str(info.value)


# Reuse ---------------------------------------------------------------------------------------------------------------


def two_trainers() -> None:
    config = gathering(
        {
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95]}},
            "bf16": {"enabled": "auto"},
        }
    )
    untouched = copy.deepcopy(config)
    for window, clip in ((1, 0.5), (2, 1.0)):
        strategy = dsl.ZeroStrategy(stage=3, config=config)
        fit(WithoutOptimizer(), strategy, accumulate_grad_batches=window, gradient_clip_val=clip)
        assert config == untouched
        assert strategy.config.gradient_accumulation_steps == window
        assert strategy.config.train_batch_size == 4 * window
        assert strategy.config.gradient_clipping == clip


def test_one_configuration_serves_two_trainers_and_stays_as_it_was():
    run_ranks(two_trainers, 2)


def test_a_strategy_object_serves_one_trainer_only():
    strategy = dsl.ZeroStrategy()
    trainer(strategy=strategy)
    with pytest.raises(MisconfigurationException, match="accelerator"):  # Lightning itself looks first
        trainer(strategy=strategy)
    with pytest.raises(ConfigError, match=r"belongs to another Trainer.*new strategy object"):
        strategy._configure_launcher()


def one_trainer_twice() -> None:
    for stage in common.STAGES:
        strategy = zero(stage, {"gradient_clipping": 0.5})
        trainer = make_trainer(strategy)
        module = Net(common.adamw)
        trainer.fit(module, data())
        first = weights(module)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data())
        common.assert_moved(module, first, ["embed.weight"])
        expected = run(functools.partial(Net, common.adamw), "ddp", gradient_clip_val=0.5)["weights"]
        assert_same(first, expected, f"stage {stage}")


def test_one_trainer_fits_twice():
    run_ranks(one_trainer_twice, 2)


def test_the_stage_of_the_configuration_and_of_the_argument_must_agree():
    assert dsl.ZeroStrategy(config={"zero_optimization": {"stage": 3}}).config.stage == 3
    assert dsl.ZeroStrategy(config={"zero_optimization": {"stage": 3}}, stage=3).config.stage == 3
    assert dsl.ZeroStrategy(config={}).config.stage == 0
    assert dsl.ZeroStrategy().config.stage == 2
    with pytest.raises(ConfigError, match=r"zero_optimization.stage.*3.*ZeroStrategy\(stage=2\)"):
        dsl.ZeroStrategy(stage=2, config={"zero_optimization": {"stage": 3}})
    for wrong in (4, -1, "2", True, 1.0):
        with pytest.raises(ConfigError, match="stage"):
            dsl.ZeroStrategy(stage=wrong)


# Names and arguments -------------------------------------------------------------------------------------------------


def trainer(**arguments: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **arguments)


@pytest.mark.parametrize("stage", common.STAGES)
def test_every_stage_has_a_name(stage):
    strategy = trainer(strategy=f"dszero{stage}").strategy
    assert isinstance(strategy, dsl.ZeroStrategy)
    assert isinstance(strategy, DDPStrategy)
    assert strategy.config.stage == stage


def test_a_misspelt_strategy_is_an_error_of_lightning_that_names_it():
    with pytest.raises(ValueError, match="dszero4"):
        trainer(strategy="dszero4")


@pytest.mark.parametrize("value", [True, False])
def test_find_unused_parameters_is_accepted(value):
    assert dsl.ZeroStrategy(find_unused_parameters=value).config.stage == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"static_graph": True}, "static_graph=True.*DistributedDataParallel"),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook"),
        ({"stages": 3}, "'stages'.*config="),
        ({"reduce_bucket_size": 3}, "'reduce_bucket_size'.*config="),
        ({"checkpoint": "shardd"}, "'shardd'"),
    ],
)
def test_arguments_that_do_not_exist_are_refused_by_name(arguments, said):
    with pytest.raises(ConfigError, match=said):
        dsl.ZeroStrategy(**arguments)


def test_other_accelerators_are_refused_in_words():
    strategy = dsl.ZeroStrategy(parallel_devices=[torch.device("mps", 0)])
    with pytest.raises(ConfigError, match=r"not on mps.*accelerator='cpu'"):
        strategy._configure_launcher()


def lbfgs() -> str:
    class Whole(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    return message_of(None, 2, Whole)


def test_lbfgs_is_refused_in_words():
    for said in run_ranks(lbfgs, 2):
        assert "LBFGS" in said


def inert_switches() -> None:
    """Switches of speed and memory change no result."""
    config = {
        "zero_optimization": {
            "reduce_bucket_size": 50,
            "allgather_bucket_size": 33,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "reduce_scatter": False,
            "sub_group_size": 17,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 1,
            "stage3_max_reuse_distance": 0,
            "round_robin_gradients": True,
        }
    }
    parity(functools.partial(Net, common.adamw), config=config, accumulate_grad_batches=2)


def test_switches_of_speed_change_no_result():
    run_ranks(inert_switches, 2)
