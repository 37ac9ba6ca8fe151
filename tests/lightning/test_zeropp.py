"""ZeRO++ and MiCS from a configuration: two nodes of two ranks, played by four ranks of one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset

import ds_lightning as dsl
from ds_lightning.demo import ByteGPT
from ds_lightning.demo.text import StdlibText
from ds_lightning.errors import ConfigError
from tests.lightning.runs import Model, Words, close, full_weights, listening, loader, same, trainer
from tests.pool import run_ranks

NEAR = {"zero_hpz_partition_size": 2}
WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
EVERYTHING = {**NEAR, **WEIGHTS, **GRADIENTS}
COPIES = {"mics_shard_size": 2}


def strategy(keys: dict[str, Any], **options: Any) -> dsl.ZeroStrategy:
    block = {"node_size": 2, "stage3_param_persistence_threshold": 0, **keys}
    return dsl.ZeroStrategy(stage=3, config={"zero_optimization": block}, **options)


def fit(keys: dict[str, Any], precision: str = "32-true", steps: int = 3, **options: Any) -> tuple[Any, Any]:
    run = trainer(strategy(keys, **options), precision, steps=steps, accumulate_grad_batches=2)
    model = Model()
    run.fit(model, loader())
    return run, model


# Offload, evaluation --------------------------------------------------------------------------------------------------


def check_offload(folder: str, keys: dict[str, Any], precision: str, device: str) -> None:
    wanted = full_weights(fit(keys, precision)[1])
    places = {"offload_optimizer": device, "offload_param": device, "nvme_path": folder}
    assert same(full_weights(fit(keys, precision, **places)[1]), wanted) == []


KEYS = {"near": NEAR, "everything": EVERYTHING, "copies": COPIES}


@pytest.mark.parametrize(
    ("keys", "precision", "device"),
    [
        ("everything", "bf16-mixed", "cpu"),
        *(
            pytest.param(keys, precision, device, marks=pytest.mark.full)
            for keys in KEYS
            for precision in ("32-true", "bf16-mixed")
            for device in ("cpu", "nvme")
            if (keys, precision, device) != ("everything", "bf16-mixed", "cpu")
        ),
    ],
)
def test_offload_changes_no_bit(tmp_path: Path, keys: str, precision: str, device: str) -> None:
    run_ranks(check_offload, 4, str(tmp_path), KEYS[keys], precision, device)


class Uneven(Dataset[torch.Tensor]):
    """Ranks have different numbers of batches."""

    def __init__(self) -> None:
        self.words = Words()

    def __len__(self) -> int:
        return 2 * dist.get_rank() + 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.words[index]


def check_evaluation(keys: dict[str, Any]) -> None:
    losses = []
    for live in (10**9, 1):
        run, model = fit({**keys, "stage3_max_live_parameters": live}, steps=1)
        losses.append(run.validate(model, DataLoader(Uneven()), verbose=False)[0]["val_loss"])
        assert run.predict(model, DataLoader(Uneven())) is not None
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("keys", ["everything", *(pytest.param(k, marks=pytest.mark.full) for k in ("near", "copies"))])
def test_ranks_may_have_different_numbers_of_batches(keys: str) -> None:
    run_ranks(check_evaluation, 4, KEYS[keys])


# Error feedback -------------------------------------------------------------------------------------------------------

LOCO = {**GRADIENTS, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 100}}


class Overflows(Model):
    """One loss is too large for fp16 gradients, after which the loss scale is halved."""

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(tokens, index)
        return loss * 1e30 if index == 2 else loss


def check_feedback() -> None:
    run = trainer(strategy(LOCO), "16-mixed", steps=5)
    model = Overflows()
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            assert run.strategy.engine is not None
            feedback = run.strategy.engine.transport.feedback
            assert feedback is not None
            seen.append(feedback.nbytes)

    run.callbacks.append(Watch())
    run.fit(model, loader())
    assert run.strategy.skipped_steps == 1
    assert [bool(nbytes) for nbytes in seen[:4]] == [True, True, False, True]
    assert run.strategy.model_state_bytes() >= seen[-1]
    assert all(value.isfinite().all() for value in full_weights(model).values())


def test_errors_are_dropped_where_a_step_is_skipped() -> None:
    run_ranks(check_feedback, 4)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def save(folder: str, keys: dict[str, Any], kind: str) -> dict[str, torch.Tensor]:
    run, model = fit(keys, checkpoint=kind)
    run.save_checkpoint(f"{folder}/saved.ckpt")
    return full_weights(model)


def resume(folder: str, kind: Any, keys: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    run = trainer(strategy(keys) if kind == "ours" else kind, steps=steps, accumulate_grad_batches=2)
    model = Model()
    run.fit(model, loader(), ckpt_path=f"{folder}/saved.ckpt")
    return full_weights(model)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_one_copy_is_saved_and_loads_anywhere(tmp_path: Path, kind: str) -> None:
    saved = run_ranks(save, 4, str(tmp_path), COPIES, kind)
    assert all(same(other, saved[0]) == [] for other in saved), "copies differ"
    assert same(run_ranks(resume, 2, str(tmp_path), 1, {}, 3)[0], saved[0]) == []
    assert same(run_ranks(resume, 4, str(tmp_path), "ours", {"mics_shard_size": 4}, 3)[0], saved[0]) == []
    if kind == "sharded":
        assert len(list((tmp_path / "saved.ckpt").glob("*.distcp"))) == 2
        return
    go_on = run_ranks(resume, 4, str(tmp_path), "ours", COPIES, 5)
    unbroken = run_ranks(fit_weights, 4, COPIES, 5)
    assert same(go_on[0], unbroken[0]) == []


def fit_weights(keys: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    return full_weights(fit(keys, steps=steps)[1])


@pytest.mark.full
def test_checkpoints_of_quantized_runs_hold_exact_masters(tmp_path: Path) -> None:
    saved = run_ranks(save, 4, str(tmp_path), EVERYTHING, "full")
    assert same(run_ranks(resume, 4, str(tmp_path), 3, {}, 3)[0], saved[0]) == []
    go_on = run_ranks(resume, 4, str(tmp_path), "ours", EVERYTHING, 5)
    assert same(go_on[0], run_ranks(fit_weights, 4, EVERYTHING, 5)[0]) == []


# What is said ---------------------------------------------------------------------------------------------------------


class Unmade(Model):
    """The configuration makes the optimizer."""

    def configure_optimizers(self) -> None:
        return None


def check_words() -> None:
    for keys, words in (
        ({"zero_hpz_partition_size": 3}, r"zero_hpz_partition_size=3 does not divide .* 4: .* one of 1, 2, 4"),
        ({"mics_shard_size": 3}, r"mics_shard_size=3 does not divide"),
        ({"node_size": 3}, r"node_size=3 does not divide"),
    ):
        with pytest.raises(ConfigError, match=words):
            fit(keys)
    for keys, words in (
        ({"zero_hpz_partition_size": 8}, "takes in all 4 ranks"),
        ({"mics_shard_size": 8}, "there is one copy of the model"),
        (
            {"zero_quantized_nontrainable_weights": True, "stage3_param_persistence_threshold": 99},
            "none is kept as int8",
        ),
        ({**GRADIENTS, "node_size": None}, "int4 in one step, because all ranks are on one node"),
        ({**GRADIENTS, "node_size": 1}, "because nodes have one rank"),
    ):
        with listening() as messages:
            fit(keys, steps=1)
        assert dist.get_rank() or any(words in message for message in messages), messages
    lamb = {"optimizer": {"type": "Lamb"}, "zero_optimization": {"node_size": 2, **COPIES}}
    with pytest.raises(ConfigError, match=r"Lamb looks at whole parameters.*mics_shard_size"):
        trainer(dsl.ZeroStrategy(stage=3, config=lamb)).fit(Unmade(), loader())
    with pytest.raises(ConfigError, match="fp64, which is not quantized"):
        fit(WEIGHTS, "64-true")


def test_what_cannot_be_is_said() -> None:
    run_ranks(check_words, 4)


def check_alone() -> None:
    with listening() as messages:
        model = fit({**EVERYTHING, "zero_hpz_partition_size": 1})[1]
    assert any("zero_quantized_weights, zero_quantized_gradients: nothing is sent" in text for text in messages)
    assert same(full_weights(model), full_weights(fit({})[1])) == []


def test_one_rank_sends_nothing() -> None:
    run_ranks(check_alone, 1)


# Construction ---------------------------------------------------------------------------------------------------------


class Late(pl.LightningModule):
    """Built in configure_model, block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.net: ByteGPT | None = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            self.net = ByteGPT(layers=2, width=64, heads=4, block_size=64)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        assert self.net is not None
        return self.net(tokens).float().logsumexp(-1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # AdamW makes steps of gradients that are rounding alone


def check_construction() -> None:
    found = []
    for keys in ({}, COPIES, NEAR):
        run = trainer(strategy(keys), steps=2)
        model = Late()
        run.fit(model, loader())
        found.append(full_weights(model))
    assert close(found[1], found[0]) < 1e-6
    assert same(found[2], found[0]) == []


@pytest.mark.full
def test_models_built_sharded_train_alike() -> None:
    run_ranks(check_construction, 4)


# Quality --------------------------------------------------------------------------------------------------------------


def held_out(keys: dict[str, Any], steps: int, precision: str) -> float:
    torch.manual_seed(1)
    text = StdlibText(batch_size=2, block_size=64, held_out_windows=64, max_megabytes=2.0)
    model = ByteGPT(layers=2, width=64, heads=4, block_size=64, warmup_steps=10, total_steps=steps)
    run = trainer(strategy(keys), precision, steps=steps, gradient_clip_val=1.0)
    run.fit(model, text)
    return float(run.validate(model, text, verbose=False)[0]["val_loss"])


LONG = {"near": NEAR, "weights": WEIGHTS, "gradients": GRADIENTS, "everything": EVERYTHING, "copies": COPIES}
LONG["carried"] = {**EVERYTHING, "zeropp_loco_param": {}}


@pytest.mark.parametrize(
    ("keys", "steps"), [("everything", 12), *(pytest.param(keys, 100, marks=pytest.mark.full) for keys in LONG)]
)
def test_the_held_out_loss_stays_within_one_percent(keys: str, steps: int) -> None:
    plain, loss = (run_ranks(held_out, 4, found, steps, "bf16-mixed", timeout=110)[0] for found in ({}, LONG[keys]))
    print(f"{keys}: {loss:.4f} after {steps} steps, {plain:.4f} without")
    assert loss == pytest.approx(plain, rel=0.01)
