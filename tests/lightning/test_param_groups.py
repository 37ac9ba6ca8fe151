"""Parameter groups by the configuration and by the module, under a Trainer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

import ds_lightning as dsl
from ds_lightning.schedules import WarmupLR
from tests.lightning import common
from tests.lightning.common import Net, assert_same, fit, make_trainer, run, weights, zero
from tests.lightning.test_configuration import WithoutOptimizer, message_of
from tests.pool import run_ranks

BLOCKS = [
    {"name": "still", "names": ["embed.*"], "lr": 0.0},
    {"name": "plain", "modules": ["LayerNorm"], "names": ["*.bias", "gain"], "weight_decay": 0.0, "betas": [0.8, 0.9]},
    {"name": "fast", "names": [r"regex:^blocks\.1\."], "lr": 0.02},
]
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.5}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": [0.01, 0.0, 0.01, 0.02]}}
CONFIG = {"optimizer": {**ADAM, "param_groups": BLOCKS}, "scheduler": WARMUP}


def groups_by_hand(module: Any) -> list[dict[str, Any]]:
    """What `BLOCKS` says, in torch's own words."""
    found: dict[str, list[Any]] = {"default": [], "still": [], "plain": [], "fast": []}
    for name, parameter in module.named_parameters():
        plain = name.endswith(".bias") or ".norm." in name or name == "gain"
        place = "still" if name.startswith("embed.") else "plain" if plain else "default"
        found["fast" if place == "default" and name.startswith("blocks.1.") else place].append(parameter)
    values: dict[str, dict[str, Any]] = {
        "still": {"lr": 0.0},
        "plain": {"weight_decay": 0.0, "betas": (0.8, 0.9)},
        "fast": {"lr": 0.02},
    }
    return [{"params": params, "name": name, **values.get(name, {})} for name, params in found.items()]


def by_hand(module: Any) -> Any:
    optimizer = torch.optim.AdamW(groups_by_hand(module), lr=0.01, weight_decay=0.5)
    schedule = WarmupLR(optimizer, **WARMUP["params"])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByHook(WithoutOptimizer):
    def configure_param_groups(self) -> list[dict[str, Any]]:
        return groups_by_hand(self)


def check_training() -> None:
    before = weights(Net())
    expected = run(functools.partial(Net, by_hand), "ddp", max_epochs=2)
    by_module = {"optimizer": ADAM, "scheduler": WARMUP}
    small = {"zero_optimization": {"sub_group_size": 8, "offload_optimizer": {"device": "cpu"}}}
    cases = [(stage, WithoutOptimizer, CONFIG) for stage in common.STAGES]
    cases += [(2, ByHook, by_module), (3, WithoutOptimizer, {**CONFIG, **small})]
    for stage, make, config in cases:
        found = run(make, stage, config, max_epochs=2)
        assert_same(found["weights"], expected["weights"], f"stage {stage}")
        assert found["lr"] == expected["lr"]
        for name, value in found["weights"].items():
            moved = not torch.equal(value, before[name])
            assert moved == (not name.startswith("embed.") and name != "offset"), name


def test_every_stage_trains_groups_with_their_own_rates_decays_and_betas():
    run_ranks(check_training, 2)


def check_decay() -> None:
    """Without gradients nothing but decay moves a weight."""

    class Still(WithoutOptimizer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 0

    block = {"names": ["*.bias"], "weight_decay": 0.0}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}, "param_groups": [block]}}
    before = weights(Net())
    for stage in common.STAGES:
        module = Still()
        fit(module, zero(stage, {**config, "zero_optimization": {"sub_group_size": 8}}), max_steps=1)
        for name, value in weights(module).items():
            factor = 1.0 if name.endswith(".bias") or name == "offset" else 1 - 0.1 * 0.5
            torch.testing.assert_close(value, before[name] * factor, rtol=1e-6, atol=0, msg=name)


def test_only_what_a_group_says_is_decayed():
    run_ranks(check_decay, 2)


def check_resuming(folder: str) -> None:
    path = f"{folder}/groups.ckpt"
    whole = WithoutOptimizer()
    fit(whole, zero(2, CONFIG), max_epochs=2)
    first = WithoutOptimizer()
    fit(first, zero(2, CONFIG)).save_checkpoint(path)
    second = WithoutOptimizer()
    trainer = make_trainer(zero(3, CONFIG), max_epochs=2)
    trainer.fit(second, common.data(), ckpt_path=path)
    expected, found = weights(whole), weights(second)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups][1] == 0.0


def test_a_run_that_resumes_in_the_middle_of_the_warm_up_goes_on_as_if_unbroken(tmp_path):
    run_ranks(check_resuming, 2, str(tmp_path))


def monitored(folder: str) -> list[str]:
    monitor = LearningRateMonitor("step")
    fit(
        WithoutOptimizer(),
        zero(2, CONFIG),
        logger=CSVLogger(folder, version=0),
        callbacks=[monitor],
        log_every_n_steps=1,
    )
    return sorted(monitor.lrs)


def test_names_of_groups_show_in_the_learning_rate_monitor(tmp_path):
    (found,) = run_ranks(monitored, 1, str(tmp_path))
    assert [name.rpartition("/")[2] for name in found] == ["default", "fast", "plain", "still"]


REFUSED: list[tuple[dict[str, Any], tuple[str, ...], Any]] = [
    (CONFIG, ("optimizer.param_groups", "ByHook.configure_param_groups", "Drop one"), ByHook),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}, "param_groups": BLOCKS}},
        ("Both", "optimizer.type=AdamW", "Net.configure_optimizers"),
        Net,
    ),
    (
        {"optimizer": {**ADAM, "param_groups": [{"modules": ["LayerNrom"], "weight_decay": 0}]}},
        ("optimizer.param_groups.0", "LayerNorm"),
        WithoutOptimizer,
    ),
    (
        {"optimizer": {"type": "RAdam", "param_groups": [{"names": ["*"], "wieght_decay": 0}]}},
        ("optimizer.param_groups.0.wieght_decay", "'weight_decay'"),
        WithoutOptimizer,
    ),
    (
        {"optimizer": {**ADAM, "param_groups": [{"names": ["*"], "adam_w_mode": False}]}},
        ("optimizer.param_groups.0.adam_w_mode", "unknown argument"),
        WithoutOptimizer,
    ),
]


@pytest.mark.parametrize(("config", "said", "module"), REFUSED, ids=[row[1][0] for row in REFUSED])
def test_groups_that_cannot_be_are_refused_in_words(config, said, module):
    (found,) = run_ranks(message_of, 1, config, None, module)
    assert found
    assert all(word in found for word in said), found


def test_groups_are_made_by_a_public_function_too():
    found = dsl.optim.param_groups(Net(), [{"modules": ["LayerNorm"], "weight_decay": 0.0}])
    assert [len(group["params"]) for group in found] == [11, 4]
