"""`amp` and `torch_autocast`: fp32 parameters under autocast, at every stage, against plain loops and DDP."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DistributedSampler

import ds_lightning as dsl
from ds_lightning.config import load
from ds_lightning.precision.choice import zero_precision
from ds_lightning.precision.loss_scale import LossScaleOptions
from ds_lightning.precision.plugin import Autocast
from tests.lightning import common
from tests.lightning.common import Net, assert_same, data, distance, fit, weights, zero
from tests.pool import run_ranks


def slow(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.9)


def autocast(dtype: str = "bfloat16", **rest: Any) -> dict[str, Any]:
    return {"torch_autocast": {"enabled": True, "dtype": dtype, **rest}}


def amp(level: str = "O1", **rest: Any) -> dict[str, Any]:
    return {"amp": {"enabled": True, "opt_level": level, **rest}}


class Seen(Net):
    """Writes down dtypes, with a region of its own that is not cast."""

    def __init__(self) -> None:
        super().__init__(slow)
        self.norm = nn.BatchNorm1d(7)
        self.said: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embed(x))
        with torch.autocast("cpu", enabled=False):
            plain = nn.functional.linear(x.to(self.embed.weight.dtype), self.embed.weight)
        self.said = {"cast": str(self.embed(x).dtype), "plain": str(plain.dtype), "kept": str(self.embed.weight.dtype)}
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.gain + self.offset


# Numbers ------------------------------------------------------------------------------------------------------------


def against_ddp(stages: tuple[int, ...]) -> None:
    expected = common.run(functools.partial(Net, slow), "ddp", precision="bf16-mixed")["weights"]
    for stage in stages:
        exact = common.run(functools.partial(Net, slow), stage, autocast(lower_precision_safe_modules=[]))["weights"]
        assert_same(exact, expected, f"stage {stage}, everything travels in fp32", 1e-6)
        found = common.run(functools.partial(Net, slow), stage, autocast())["weights"]
        assert distance(found, exact) == 0, "gradients that autocast makes are bf16 numbers: nothing is lost"


def test_bf16_autocast_is_ddps_bf16_mixed_but_for_what_travels():
    run_ranks(against_ddp, 2, common.STAGES)


def against_a_plain_loop(config: dict[str, Any]) -> None:
    """torch's autocast over fp32 weights with a fixed scale, both ranks' batches in one process."""
    module = Net(slow)
    optimizer = slow(module)
    ranks = [list(DistributedSampler(data().dataset, 2, rank)) for rank in range(2)]
    x, y = data().dataset.tensors
    for start in range(0, 10, 2):
        optimizer.zero_grad()
        for rank in ranks:
            picked = rank[start : start + 2]
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = module.loss((x[picked], y[picked]))
            (loss * 128 / 2).backward()
        for parameter in module.parameters():
            parameter.grad /= 128
        optimizer.step()
    expected = weights(module)
    for stage in common.STAGES:
        assert_same(
            common.run(functools.partial(Net, slow), stage, config)["weights"], expected, f"stage {stage}", 1e-6
        )


def test_amp_o1_is_torchs_autocast_over_fp32_weights():
    run_ranks(against_a_plain_loop, 2, amp("O1", loss_scale=128))


def levels() -> None:
    expected = {
        "O0": (torch.float32, torch.float32, torch.float32, "torch.float32", 1.0),
        "O1": (torch.float32, torch.float32, torch.float32, "torch.float16", 1024.0),
        "O2": (torch.float16, torch.float32, torch.float32, "torch.float16", 1024.0),
        "O3": (torch.float16, torch.float16, torch.float16, "torch.float16", 1.0),
    }
    close = common.run(Seen, "ddp")["weights"]
    for level, (matrix, batch_norm, master, cast, scale) in expected.items():
        for stage in (0, 2, 3):
            module = Seen()
            trainer = fit(module, zero(stage, amp(level, max_loss_scale=1024)))
            assert module.embed.weight.dtype == matrix
            assert module.norm.weight.dtype == batch_norm
            units = trainer.strategy.engine.units.values()
            assert {u.unit.master_dtype for u in units if any(s.name == "embed.weight" for s in u.unit.slots)} == {
                master
            }
            assert module.said["cast"] == cast
            assert trainer.strategy.loss_scale == scale
            assert trainer.strategy.skipped_steps == 0
            assert distance(weights(module), close) < 3e-2, (level, stage)


def test_every_level_of_amp_has_its_dtypes_and_scale_and_trains():
    run_ranks(levels, 2)


# What travels, and what does not change ------------------------------------------------------------------------------


class Spy:
    """Notes the dtype of every reduction, by unit."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.dtype] = {}

    def watch(self, engine: Any) -> None:
        collectives = engine.collectives
        original = collectives.reduce_scatter

        def reduce_scatter(full: Tensor, what: str, *rest: Any) -> Any:
            self.seen[what] = full.dtype
            return original(full, what, *rest)

        collectives.reduce_scatter = reduce_scatter


class Watched(Seen):
    def on_train_start(self) -> None:
        self.spy = Spy()
        self.spy.watch(self.trainer.strategy.engine)


def travels(dtype: torch.dtype, config: dict[str, Any]) -> None:
    for stage in common.STAGES:
        module = Watched()
        trainer = fit(module, zero(stage, config))
        for buffers in trainer.strategy.engine.units.values():
            unit = buffers.unit
            assert buffers.full.dtype == unit.master_dtype == torch.float32
            safe = {any(part in slot.name for part in ("embed", "up", "down", "head")) for slot in unit.slots}
            assert len(safe) == 1, "what travels in two dtypes shares no unit"
            assert module.spy.seen[unit.name] == (dtype if safe.pop() else torch.float32), unit.name
        assert module.said == {"cast": str(dtype), "plain": "torch.float32", "kept": "torch.float32"}


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_gradients_of_safe_modules_travel_in_16_bit_and_parameters_stay_in_fp32(name):
    run_ranks(travels, 2, getattr(torch, name), autocast(name))


def outer() -> list[str]:
    module = Seen()
    with warnings.catch_warnings(record=True) as caught, torch.autocast("cpu", torch.float16):
        trainer = common.make_trainer(zero(2, autocast()))
        warnings.simplefilter("always")
        trainer.fit(module, data())
    assert module.said["cast"] == "torch.bfloat16"
    return [str(w.message) for w in caught if "is overridden" in str(w.message)]


def test_an_outer_autocast_is_overridden_and_that_is_said_once():
    first, second = run_ranks(outer, 2)
    assert len(first) == 1
    assert "torch.float16 around the step" in first[0]
    assert not second


# The loss scale ------------------------------------------------------------------------------------------------------


class Planted(Net):
    """Plants an inf on rank 1 in the third batch."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=5.0))
        self.said: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = 1e-3 * self.loss(batch)  # overflows nowhere else
        if batch_idx == 2 and dist.get_rank() == 1:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        strategy = self.trainer.strategy
        self.said.append((strategy.loss_scale, strategy.skipped_steps, weights(self)))


def overflow(config: dict[str, Any], scales: list[float]) -> None:
    for stage in common.STAGES:
        said = common.run(Planted, stage, config)["said"]
        assert [scale for scale, _, _ in said] == scales
        assert [skipped for _, skipped, _ in said] == [0, 0, 1, 1, 1]
        assert all(torch.equal(said[1][2][name], said[2][2][name]) for name in said[1][2])
        assert not torch.equal(said[2][2]["embed.weight"], said[3][2]["embed.weight"])


@pytest.mark.parametrize(
    ("config", "after"),
    [
        (amp("O1"), 2.0**15),
        (amp("O2", max_loss_scale=1024), 512.0),
        (amp("O3", loss_scale=64), 64.0),
        (autocast("float16"), 2.0**15),
    ],
    ids=["O1", "O2", "O3", "autocast"],
)
def test_an_overflow_on_one_rank_is_skipped_on_all(config, after):
    before = 64.0 if after == 64.0 else 2 * after
    run_ranks(overflow, 2, config, [before, before, after, after, after])


# Reconciled ----------------------------------------------------------------------------------------------------------


def test_a_plugin_and_the_configuration_agree_or_are_refused():
    plugin = dsl.ZeroPrecision("16-mixed", LossScaleOptions(loss_scale=8))
    with pytest.raises(dsl.errors.ConfigError, match="amp block of the configuration"):
        dsl.ZeroStrategy(config=amp(), precision_plugin=plugin)
    with pytest.raises(dsl.errors.ConfigError, match=r"torch_autocast\.enabled, which is precision='bf16-mixed'"):
        dsl.ZeroStrategy(config=autocast(), precision_plugin=dsl.ZeroPrecision("64-true"))
    with pytest.raises(dsl.errors.ConfigError, match="autocast computes in 16 bit"):
        dsl.ZeroPrecision("32-true", autocast=Autocast())
    taken = dsl.ZeroStrategy(config=autocast(), precision_plugin=dsl.ZeroPrecision("bf16-mixed")).precision_plugin
    assert taken.autocast.safe == (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    assert taken.dtypes.compute is None
    with pytest.raises(dsl.errors.ConfigError, match=r"torch\.nn has no Linaer"):
        zero_precision(Precision(), load(autocast(lower_precision_safe_modules=["torch.nn.Linaer"])))
