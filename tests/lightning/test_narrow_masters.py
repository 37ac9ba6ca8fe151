"""Masters of 16 bits under a Trainer: loss scales, overflows, clipping and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_lightning as dsl
from tests.lightning import common
from tests.lightning.common import Net, fit, make_trainer, weights, zero
from tests.lightning.test_precision import Planted
from tests.pool import run_ranks

DIGIT = {"fp16": 2**-10, "bf16": 2**-7}  # the last one of a number in [1, 2)


def narrow(kind: str = "fp16", **options: Any) -> dict[str, Any]:
    scale = {"initial_scale_power": 8, "hysteresis": 1} if kind == "fp16" else {}
    return {kind: {"enabled": True, f"{kind}_master_weights_and_grads": True, **scale, **options}}


def overflow() -> None:
    found = []
    for masters in (False, True):
        module = Planted((2,))
        config = narrow(fp16_master_weights_and_grads=masters)
        trainer = fit(module, zero(2, config), gradient_clip_val=0.5)
        held = {units.unit.dtype: units.unit.master_dtype for units in trainer.strategy.engine.units.values()}
        assert held[torch.float16] == (torch.float16 if masters else torch.float32)
        kept = {units.kept for units in trainer.strategy.engine.reducer.units.values()}
        assert kept == {torch.float32}  # of fp16, small ones would vanish when they are unscaled
        found.append(module.said)
    wide, said = found
    assert [step["skipped"] for step in said] == [step["skipped"] for step in wide]
    assert [step["scale"] for step in said] == [step["scale"] for step in wide]
    assert said[2]["skipped"] == 1
    assert not common.distance(said[2]["weights"], said[1]["weights"])
    assert torch.equal(said[2]["moment"], said[1]["moment"])
    assert common.distance(said[3]["weights"], said[2]["weights"]) > 0
    assert said[0]["norm"] == wide[0]["norm"]  # both have computed with weights rounded to nearest
    for mine, theirs in zip(said, wide, strict=True):
        if mine is not said[2]:
            assert mine["norm"] == pytest.approx(theirs["norm"], rel=0.02)
    assert common.distance(said[-1]["weights"], wide[-1]["weights"]) < 10 * DIGIT["fp16"]


def test_an_overflow_is_skipped_and_norms_are_those_of_unscaled_gradients():
    run_ranks(overflow, 2)


class Faint(Net):
    """Gradients that fp16 holds as long as they are scaled, and large steps along them."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=3e5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        return loss * 1e-7


def faint() -> None:
    found = []
    for masters in (False, True):
        module = Faint()
        before = weights(module)
        fit(module, zero(2, narrow(fp16_master_weights_and_grads=masters, loss_scale=2**14)), max_steps=3)
        found.append((before, weights(module)))
    (before, wide), (_, ours) = found
    assert common.distance(before, wide) > 0.01
    assert common.distance(wide, ours) < 6 * DIGIT["fp16"]


def test_gradients_that_vanish_unscaled_in_16_bits_train():
    run_ranks(faint, 2)


def train(stage: int, kind: str, epochs: int, path: str | None = None) -> Any:
    states = {"bf16_optimizer_states": True} if kind == "bf16" else {}
    module = Net(native)
    trainer = make_trainer(zero(stage, narrow(kind, **states)), max_epochs=epochs)
    trainer.fit(module, common.data(), ckpt_path=path)
    return module, trainer


def native(module: nn.Module) -> torch.optim.Optimizer:
    return dsl.optim.AdamW(module.parameters(), lr=0.01)


def check_resuming(folder: str, kind: str) -> None:
    whole, _ = train(2, kind, 2)
    _, trainer = train(2, kind, 1)
    trainer.save_checkpoint(f"{folder}/half.ckpt")
    for stage in (2, 3):
        ours, _ = train(stage, kind, 2, f"{folder}/half.ckpt")
        assert not common.distance(weights(ours), weights(whole)), stage


class Restored(Exception):
    pass


class Stops(Net):
    """Ends when everything is restored."""

    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        found = {name: dsl.full_param(p) for name, p in self.named_parameters()}
        moments = {name: dsl.full_optimizer_state(p, "exp_avg_sq") for name, p in self.named_parameters()}
        raise Restored(found, moments, [group["rounded_steps"] for group in optimizer.param_groups])


def check_other_world(path: str, kind: str, stage: int) -> None:
    states = {"bf16_optimizer_states": True} if kind == "bf16" else {}
    trainer = make_trainer(zero(stage, narrow(kind, **states)), max_epochs=2)
    with pytest.raises(Restored) as caught:
        trainer.fit(Stops(native), common.data(), ckpt_path=path)
    found, moments, counts = caught.value.args
    saved = torch.load(path, weights_only=True)
    (state,) = saved["optimizer_states"]
    assert counts == [group["rounded_steps"] for group in state["param_groups"]] == [5]
    for number, (name, value) in enumerate(found.items()):
        assert torch.equal(value.float(), saved["state_dict"][name].float()), name
        assert torch.equal(moments[name].float(), state["state"][number]["exp_avg_sq"].float()), name


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_run_that_resumes_goes_on_with_the_same_bits_and_at_any_world_size(kind, tmp_path):
    run_ranks(check_resuming, 2, str(tmp_path), kind)
    run_ranks(check_other_world, 3, f"{tmp_path}/half.ckpt", kind, 3)
    run_ranks(check_other_world, 1, f"{tmp_path}/half.ckpt", kind, 1)
