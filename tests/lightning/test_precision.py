"""Precisions under a Trainer with real ranks: dtypes, the loss scale, and overflows that all ranks skip."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DistributedSampler

import ds_lightning as dsl
from ds_lightning.precision.plugin import NAMES
from tests.lightning import common
from tests.lightning.common import Net, adamw, assert_same, data, fit, parity, weights, zero
from tests.pool import run_ranks
from tests.unit.test_loss_scale import Reference

DTYPES = {
    # name: (matrices, vectors, masters of matrices, inputs in the step)
    "32-true": (torch.float32, torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.bfloat16, torch.float32, torch.float32, torch.float32),
    "16-mixed": (torch.float16, torch.float32, torch.float32, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16, torch.float16, torch.float16),
    "64-true": (torch.float64, torch.float64, torch.float64, torch.float64),
}


class Seen(Net):
    """Writes down dtypes as a step sees them."""

    def __init__(self) -> None:
        super().__init__(functools.partial(common.sgd))
        self.register_buffer("frequencies", 1.0 / 10_000.0 ** torch.linspace(0, 1, 4))
        self.said: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x)
        loss = nn.functional.mse_loss(output.to(y.dtype), y)
        self.said = {
            "input": str(x.dtype),
            "linear": str(self.embed(x).dtype),
            "loss": str(loss.dtype),
            "made": str(torch.zeros(1).dtype),
            "buffer": str(self.frequencies.dtype),
        }
        return 0.01 * loss


def dtypes(name: str, flag: bool) -> None:
    arguments = {"precision": name} if flag else {"plugins": [dsl.ZeroPrecision(name)]}
    expected = None if name == "16-mixed" else common.run(Seen, "ddp", precision=name)["said"]
    matrices, vectors, masters, inputs = DTYPES[name]
    for stage in common.STAGES:
        module = Seen()
        before = weights(module)
        trainer = fit(module, zero(stage), **arguments)
        assert trainer.precision == name
        assert isinstance(trainer.precision_plugin, dsl.ZeroPrecision)
        assert {p.dtype for p in module.parameters() if p.ndim > 1} == {matrices}
        assert {p.dtype for p in module.parameters() if p.ndim <= 1} == {vectors}
        held = {units.unit.dtype: units.unit.master_dtype for units in trainer.strategy.engine.units.values()}
        assert held[matrices] == masters
        if name.endswith("true"):  # no copy in another width anywhere
            assert set(held.values()) == {matrices}
        assert module.said["input"] == str(inputs)
        if expected is not None:
            assert module.said == expected, stage
        else:
            assert module.said["linear"] == "torch.float16"
            assert module.said["buffer"] == "torch.float32"
        common.assert_moved(module, before, ["embed.weight", "head.bias"])
        if not name.endswith("true"):
            assert torch.equal(module.frequencies, 1.0 / 10_000.0 ** torch.linspace(0, 1, 4))


@pytest.mark.parametrize(
    ("name", "flag"),
    [(name, flag) for name in NAMES for flag in (True, False) if not (name == "16-mixed" and flag)],
)
def test_parameters_masters_inputs_and_losses_have_the_dtypes_of_the_precision(name, flag):
    run_ranks(dtypes, 2, name, flag)


@pytest.mark.parametrize(
    ("name", "tolerance"), [("bf16-mixed", 2e-3), ("bf16-true", 8e-3), ("16-true", 2e-3), ("64-true", 1e-14)]
)
def test_each_precision_trains_close_to_ddp_in_the_same_precision(name, tolerance):
    run_ranks(
        parity,
        2,
        functools.partial(Net, slow),
        precision=name,
        tolerance=tolerance,
        accumulate_grad_batches=2,
        gradient_clip_val=5.0,
    )


def slow(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.9)


def test_64_true_agrees_with_a_plain_loop_in_float64():
    run_ranks(against_a_plain_loop, 2)


def against_a_plain_loop() -> None:
    module = Net(slow).double()
    optimizer = slow(module)
    x, y = (tensor.double() for tensor in data().dataset.tensors)
    ranks = [list(DistributedSampler(data().dataset, 2, rank)) for rank in range(2)]  # as Lightning's for training
    for start in range(0, 10, 2):
        picked = [index for rank in ranks for index in rank[start : start + 2]]
        optimizer.zero_grad()
        module.loss((x[picked], y[picked])).backward()
        optimizer.step()
    expected = weights(module)
    for stage in common.STAGES:
        assert_same(
            common.run(functools.partial(Net, slow), stage, precision="64-true")["weights"], expected, tolerance=1e-13
        )


# The loss scale ------------------------------------------------------------------------------------------------------


def scaled(power: int = 4, **options: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": power, **options}}


class Planted(Net):
    """Plants an inf in one gradient of one rank, in some batches; writes down scales.

    Args:
        bad: batches.
        rank: where; None means everywhere.
    """

    def __init__(self, bad: tuple[int, ...] = (), rank: int | None = 1, optimize: Any = None) -> None:
        super().__init__(optimize or scheduled_adamw)
        self.bad = bad
        self.rank = rank
        self.said: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        here = self.rank is None or dist.get_rank() == self.rank
        if self.training and here and self.trainer.fit_loop.total_batch_idx in self.bad:
            hidden.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.gain + self.offset

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        self.said.append(
            {
                "scale": strategy.loss_scale,
                "skipped": strategy.skipped_steps,
                "norm": strategy.last_grad_norm,
                "lr": self.trainer.optimizers[0].param_groups[0]["lr"],
                "step": int(dsl.full_optimizer_state(self.embed.weight, "step") or 0),
                "weights": weights(self),
                "moment": dsl.full_optimizer_state(self.embed.weight, "exp_avg"),
                "compute": self.compute_weights(),
            }
        )

    def compute_weights(self) -> Tensor:
        with dsl.gathered(self.embed):
            return self.embed.weight.detach().clone()


def scheduled_adamw(module: nn.Module) -> Any:
    optimizer = adamw(module)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def planted(stage: int, config: Any, bad: tuple[int, ...], **arguments: Any) -> list[dict[str, Any]]:
    module = Planted(bad)
    fit(module, zero(stage, config), **arguments)
    return module.said


def overflow_on_one_rank() -> list[list[float]]:
    history = []
    for stage in common.STAGES:
        said = planted(stage, scaled(4, hysteresis=1), (2,))
        before, bad, after = said[1], said[2], said[3]
        assert (before["skipped"], bad["skipped"], after["skipped"]) == (0, 1, 1)
        assert (before["scale"], bad["scale"], after["scale"]) == (16.0, 8.0, 8.0)
        assert not math.isfinite(bad["norm"])
        assert math.isfinite(after["norm"])
        assert after["norm"] > 0
        assert bad["lr"] == before["lr"]
        assert after["lr"] == before["lr"] * 0.9
        assert (before["step"], bad["step"], after["step"]) == (2, 2, 3)
        assert all(torch.equal(bad["weights"][name], before["weights"][name]) for name in bad["weights"])
        assert torch.equal(bad["moment"], before["moment"])
        assert not torch.equal(after["weights"]["embed.weight"], bad["weights"]["embed.weight"])
        for entry in said:  # what computes is what was updated
            assert torch.equal(entry["compute"], entry["weights"]["embed.weight"].half())
        history.append([entry["scale"] for entry in said])
    return history


def test_an_overflow_on_one_rank_is_skipped_on_all_and_touches_nothing():
    first, second = run_ranks(overflow_on_one_rank, 2)
    assert first == second
    assert all(scales == first[0] for scales in first)


def follow_the_machine(options: dict[str, Any], bad: tuple[int, ...]) -> None:
    for stage in (0, 3):
        said = planted(stage, {"fp16": {"enabled": True, **options}}, bad, max_epochs=3)
        reference = Reference(
            2.0 ** options.get("initial_scale_power", 16),
            options.get("hysteresis", 2),
            options.get("loss_scale_window", 1000),
            options.get("min_loss_scale", 1),
            options.get("consecutive_hysteresis", False),
        )
        for index, entry in enumerate(said):
            reference.update(index in bad)
            assert entry["scale"] == reference.scale, (stage, index)
            assert entry["skipped"] == sum(place in bad for place in range(index + 1))


@pytest.mark.parametrize(
    ("options", "bad"),
    [
        ({"initial_scale_power": 3}, (1, 2, 5, 9)),
        ({"initial_scale_power": 3, "loss_scale_window": 2}, (4,)),
        ({"initial_scale_power": 3, "hysteresis": 3}, (0, 1, 2, 3)),
        ({"initial_scale_power": 3, "hysteresis": 2, "consecutive_hysteresis": True}, (1, 3, 5, 6)),
        ({"initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 2}, (1, 2)),
        ({"loss_scale_window": 4, "hysteresis": 1}, (0, 1, 2, 3, 4)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_the_scale_follows_the_specification_for_every_key(options, bad):
    run_ranks(follow_the_machine, 2, options, bad)


def initial_scales() -> None:
    for key, value in {
        "loss_scale_window": 7,
        "hysteresis": 3,
        "min_loss_scale": 2,
        "consecutive_hysteresis": True,
        "auto_cast": True,
        "loss_scale": 0,
    }.items():
        assert dsl.ZeroStrategy(config={"fp16": {"enabled": True, key: value}}).loss_scale == 2.0**16, key
    assert dsl.ZeroStrategy(config={"fp16": {"enabled": True, "loss_scale": 128}}).loss_scale == 128.0


def test_the_initial_scale_does_not_depend_on_other_keys():
    initial_scales()


def smallest_scale() -> str:
    module = Planted(tuple(range(20)), rank=0)
    try:
        fit(module, zero(2, scaled(2, hysteresis=1)), max_epochs=10)
    except dsl.errors.ConfigError as error:
        assert len(module.said) == 2
        return str(error)
    return "nothing"


def test_an_overflow_at_the_smallest_scale_ends_the_run_in_words_on_all_ranks():
    first, second = run_ranks(smallest_scale, 2)
    assert first == second
    assert "fp16.min_loss_scale=1" in first


def fixed_scale() -> None:
    expected = common.run(functools.partial(Planted, (), None, slow), 0, scaled(0))["weights"]
    for stage in common.STAGES:
        module = Planted((3,), 1)
        fit(module, zero(stage, {"fp16": {"enabled": True, "loss_scale": 128}}))
        assert {entry["scale"] for entry in module.said} == {128.0}
        assert [entry["skipped"] for entry in module.said] == [0, 0, 0, 1, 1]
        # A power of two changes no bit of a gradient that neither overflows nor vanishes.
        fixed = common.run(
            functools.partial(Planted, (), None, slow), stage, {"fp16": {"enabled": True, "loss_scale": 128}}
        )
        assert_same(fixed["weights"], expected, f"stage {stage}", 1e-4)


def test_a_fixed_scale_stays_skips_overflows_and_changes_no_result():
    run_ranks(fixed_scale, 2)


def close_to_fp32(arguments: dict[str, Any]) -> None:
    expected = common.run(functools.partial(Net, slow), "ddp", **arguments)["weights"]
    for stage in common.STAGES:
        for power in (0, 10):
            found = common.run(functools.partial(Net, slow), stage, scaled(power), **arguments)["weights"]
            assert_same(found, expected, f"stage {stage}, scale 2**{power}", 1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 1.0},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    ],
    ids=["plain", "windows", "clipped", "clipped by value in windows"],
)
def test_gradients_are_unscaled_before_they_are_used(arguments):
    run_ranks(close_to_fp32, 2, arguments)


class ManualClip(Net):
    """Clips by hand before the step, and accumulates over steps at which the scale grows."""

    def __init__(self) -> None:
        super().__init__(slow)
        self.automatic_optimization = False
        self.said: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def clipped_by_hand() -> None:
    expected = common.run(ManualClip, "ddp")["weights"]
    for stage in common.STAGES:
        found = common.run(ManualClip, stage, scaled(8, loss_scale_window=1))["weights"]
        assert_same(found, expected, f"stage {stage}", 1e-3)


def test_clipping_by_hand_clips_unscaled_gradients():
    run_ranks(clipped_by_hand, 2)


class TwoNetworks(Net):
    """The scale changes in the step of one optimizer while gradients of the other wait."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.said: list[float] = []

    def configure_optimizers(self) -> Any:
        front = [*self.embed.parameters(), *self.blocks.parameters()]
        back = [*self.head.parameters(), self.gain]
        return [torch.optim.SGD(front, lr=0.005), torch.optim.SGD(back, lr=0.005)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        front, back = self.optimizers()
        self.manual_backward(self.loss(batch))
        front.step()
        front.zero_grad()
        self.manual_backward(self.loss(batch))
        back.step()
        back.zero_grad()
        front.zero_grad()


def two_networks() -> None:
    expected = common.run(TwoNetworks, "ddp_find_unused_parameters_true")["weights"]
    for stage in common.STAGES:
        found = common.run(TwoNetworks, stage, scaled(4, loss_scale_window=1))["weights"]
        assert_same(found, expected, f"stage {stage}", 1e-3)


def test_gradients_are_unscaled_by_the_scale_that_produced_them():
    run_ranks(two_networks, 2)


def bf16_overflow(config: dict[str, Any]) -> None:
    for stage in common.STAGES:
        module = Planted((2,), 1)
        fit(module, zero(stage, config), precision="bf16-mixed")
        said = module.said
        assert all(entry["scale"] == 1.0 for entry in said)
        assert not math.isfinite(said[2]["norm"])
        if config:
            assert [entry["skipped"] for entry in said] == [0, 0, 1, 1, 1]
            assert torch.equal(said[2]["weights"]["embed.weight"], said[1]["weights"]["embed.weight"])
            assert said[2]["lr"] == said[1]["lr"]
            assert all(value.isfinite().all() for value in said[-1]["weights"].values())
        else:
            assert [entry["skipped"] for entry in said] == [0] * 5
            assert not said[2]["weights"]["embed.weight"].isfinite().all()


def test_bf16_lets_a_non_finite_gradient_through_with_an_honest_norm():
    run_ranks(bf16_overflow, 2, {})


def test_bf16_skips_a_non_finite_gradient_if_asked_to():
    run_ranks(bf16_overflow, 2, {"bf16": {"enabled": True, "check_grad_overflow": True}})


def skips_of_a_resumed_run(folder: str) -> None:
    config = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    first = fit(Planted((2,), 1), zero(3, config), precision="bf16-mixed")
    first.save_checkpoint(f"{folder}/a.ckpt")
    trainer = common.make_trainer(zero(1, config), precision="bf16-mixed", max_epochs=2)
    trainer.fit(Planted(), common.data(), ckpt_path=f"{folder}/a.ckpt")
    assert first.strategy.skipped_steps == trainer.strategy.skipped_steps == 1


def test_skipped_steps_are_counted_on_in_a_resumed_run(tmp_path):
    run_ranks(skips_of_a_resumed_run, 2, str(tmp_path))


class Step(Net):
    """A norm is reported in every precision."""

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy.last_grad_norm, float)
        assert strategy.last_grad_norm > 0


def test_the_norm_is_a_number_at_every_stage_and_precision():
    run_ranks(norms_of_all, 2)


def norms_of_all() -> None:
    for stage in common.STAGES:
        for name in ("32-true", "bf16-mixed"):
            module = Step(resting)
            strategy = zero(stage)
            fit(module, strategy, precision=name)
            assert strategy.loss_scale == 1.0
            assert strategy.skipped_steps == 0


def resting(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.0)


def constant_norm() -> None:
    """With rate 0 and one batch, no step changes anything: nothing may pile up."""

    class Same(Net):
        def __init__(self) -> None:
            super().__init__(resting)
            self.norms: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = data().dataset.tensors
            return self.loss((x[:4], y[:4]))

        def on_train_batch_end(self, *args: Any) -> None:
            self.norms.append(self.trainer.strategy.last_grad_norm)

    for stage in common.STAGES:
        found = {}
        for name in ("32-true", "bf16-mixed"):
            module = Same()
            fit(module, zero(stage), precision=name)
            assert len(set(module.norms)) == 1, (stage, name, module.norms)
            found[name] = module.norms[0]
        assert math.isclose(found["bf16-mixed"], found["32-true"], rel_tol=2e-2)


def test_the_norm_of_the_same_batch_stays_the_same():
    run_ranks(constant_norm, 2)


# Plugins -------------------------------------------------------------------------------------------------------------


def test_inputs_are_cast_in_any_container_and_nothing_else_is():
    x = torch.ones(2)
    ids = torch.ones(2, dtype=torch.long)
    batch = {"x": x, "more": [ids, (x.double(), None, "text", 3)], "nested": {"mask": torch.ones(2, dtype=torch.bool)}}
    for name, dtype in (("bf16-true", torch.bfloat16), ("16-true", torch.float16), ("64-true", torch.float64)):
        found = dsl.ZeroPrecision(name).convert_input(batch)
        assert list(found) == list(batch)
        assert found["x"].dtype == dtype
        assert found["more"][0] is ids
        assert isinstance(found["more"][1], tuple)
        assert found["more"][1][0].dtype == dtype
        assert found["more"][1][1:] == (None, "text", 3)
        assert found["nested"]["mask"].dtype == torch.bool
    for name in ("bf16-mixed", "16-mixed", "32-true"):
        assert dsl.ZeroPrecision(name).convert_input(batch)["x"] is x
    assert dsl.ZeroPrecision("16-mixed", cast_inputs=True).convert_input(batch)["x"].dtype == torch.float16


@pytest.mark.parametrize(
    ("given", "name"),
    [(16, "16-mixed"), ("16", "16-mixed"), ("bf16", "bf16-mixed"), (32, "32-true"), ("64", "64-true")],
)
def test_short_names_of_lightning_are_understood(given, name):
    assert dsl.ZeroPrecision(given).precision == name


@pytest.mark.parametrize(("wrong", "guess"), [("bf16-mixd", "bf16-mixed"), ("fp16-mixed", "16-mixed"), ("8-true", "")])
def test_a_misspelt_precision_is_refused_with_a_guess(wrong, guess):
    with pytest.raises(dsl.errors.ConfigError, match=re.escape(repr(wrong))) as info:
        dsl.ZeroPrecision(wrong)
    assert guess in str(info.value)


class OwnPrecision(Precision):
    """A user's."""


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (Precision(), "32-true"),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (MixedPrecision("16-mixed", "cpu"), "16-mixed"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (HalfPrecision("16-true"), "16-true"),
        (DoublePrecision(), "64-true"),
        (OwnPrecision(), None),
        (MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0)), None),
        (MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_factor=4.0)), None),
    ],
    ids=lambda value: getattr(value, "precision", value),
)
def test_plugins_of_lightning_are_converted_or_refused_by_name(plugin, name):
    if name is None:
        with pytest.raises(dsl.errors.ConfigError, match=f"{type(plugin).__name__}|GradScaler"):
            dsl.ZeroStrategy(precision_plugin=plugin)
        return
    found = dsl.ZeroStrategy(precision_plugin=plugin).precision_plugin
    assert found.precision == name
    assert isinstance(found, type(plugin)), "Lightning's callbacks ask for the class"


def test_the_same_plugin_object_stays():
    strategy = dsl.ZeroStrategy()
    assert strategy.precision_plugin is strategy.precision_plugin
    mine = dsl.ZeroPrecision("16-mixed")
    strategy.precision_plugin = mine
    assert strategy.precision_plugin is mine


def trainer(**arguments: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **arguments)


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        ({"fp16": {"enabled": True}}, {"precision": "bf16-true"}, ("fp16.enabled", "'bf16-true'")),
        ({"bf16": {"enabled": True}}, {"precision": "16-true"}, ("bf16.enabled", "'16-true'")),
        ({"bf16": {"enabled": True}}, {"precision": "64-true"}, ("bf16.enabled", "'64-true'")),
        ({"fp16": {"enabled": True}}, {"plugins": "bf16-mixed"}, ("fp16.enabled", "'bf16-mixed'")),
        ({"bf16": {"enabled": True}}, {"plugins": "16-mixed"}, ("bf16.enabled", "'16-mixed'")),
    ],
)
def test_precisions_that_contradict_each_other_are_an_error_that_names_both(config, arguments, said):
    if "plugins" in arguments:
        arguments = {"plugins": [dsl.ZeroPrecision(arguments["plugins"])]}
    with pytest.raises(dsl.errors.ConfigError) as info:
        trainer(strategy=dsl.ZeroStrategy(config=config), **arguments)
    assert all(word in str(info.value) for word in said), info.value


@pytest.mark.filterwarnings("ignore:You passed `Trainer")
def test_fp16_on_a_cpu_explains_what_lightning_made_of_the_flag():
    with pytest.raises(dsl.errors.ConfigError, match="Leave precision out"):
        trainer(strategy=dsl.ZeroStrategy(config={"fp16": {"enabled": True}}), precision="16-mixed")
    assert trainer(strategy=dsl.ZeroStrategy(config={"fp16": {"enabled": True}})).precision == "16-mixed"


def test_the_configuration_completes_a_plugin_of_the_user():
    config = {"fp16": {"enabled": True, "initial_scale_power": 5, "auto_cast": True}}
    plugin = dsl.ZeroPrecision("16-mixed")
    strategy = dsl.ZeroStrategy(config=config)
    trainer(strategy=strategy, plugins=[plugin])
    assert strategy.loss_scale == 32.0
    assert plugin.cast_inputs
    plugin = dsl.ZeroPrecision("bf16-mixed")
    trainer(
        strategy=dsl.ZeroStrategy(config={"bf16": {"enabled": True, "check_grad_overflow": True}}), plugins=[plugin]
    )
    assert plugin.check_grad_overflow
    mine = dsl.ZeroPrecision("16-mixed", fp16=dsl.LossScaleOptions(initial_scale_power=7))
    with pytest.raises(dsl.errors.ConfigError, match=r"initial_scale_power=5.*initial_scale_power=7"):
        trainer(strategy=dsl.ZeroStrategy(config=config), plugins=[mine])
    strategy = dsl.ZeroStrategy(config={"fp16": {"enabled": True}})
    trainer(strategy=strategy, plugins=[mine])
    assert strategy.loss_scale == 128.0


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16-true", "64-true"])
def test_an_automatic_block_follows_the_trainer(name):
    config = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    assert trainer(strategy=dsl.ZeroStrategy(config=config), precision=name).precision == name


# Buffers -------------------------------------------------------------------------------------------------------------


class Buffers(Net):
    """Floating buffers, one of them shared, and counts."""

    def __init__(self) -> None:
        super().__init__(slow)
        self.register_buffer("frequencies", 1.0 / 10_000.0 ** torch.linspace(0, 1, 4))
        self.head.register_buffer("again", self.frequencies, persistent=False)
        self.register_buffer("count", torch.tensor(3))


def buffer_dtypes() -> None:
    given = 1.0 / 10_000.0 ** torch.linspace(0, 1, 4)
    for stage in common.STAGES:
        for name, precision in (("bf16", "32-true"), ("fp32", "bf16-true"), ("fp16", "bf16-mixed")):
            module = Buffers()
            plugin = dsl.ZeroPrecision(precision)
            fit(module, zero(stage, {"data_types": {"buffer_dtype": name}}), plugins=[plugin])
            dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[name]
            assert torch.equal(module.frequencies, given.to(dtype)), "cast once, from what the user gave"
            assert module.head.again is module.frequencies
            assert module.offset.dtype == dtype
            assert module.count.dtype == torch.int64


def test_floating_buffers_take_the_dtype_that_the_configuration_names():
    run_ranks(buffer_dtypes, 2)
