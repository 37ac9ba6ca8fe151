"""Steps that begin during backward change no bit, and nobody sees what does not hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ds_lightning as dsl
from ds_lightning.errors import DsLightningError, TopologyError
from ds_lightning.offload.host import HostMemory
from ds_lightning.optim import clip
from ds_lightning.optim.adam import Adam
from tests.dist import models
from tests.dist.harness import Recipe, build, forward_backward, full_values, make_engine
from tests.dist.test_offload import policy
from tests.lightning import runs
from tests.pool import run_ranks

OPTIMIZERS = {
    "adamw": lambda groups: dsl.optim.AdamW(groups, lr=0.01),
    "bf16": lambda groups: dsl.optim.AdamW(groups, lr=0.01, moment_dtype="bf16"),
    "lion": lambda groups: dsl.optim.Lion(groups, lr=0.001),
    "adagrad": lambda groups: dsl.optim.Adagrad(groups, lr=0.01),
    "sgd": lambda groups: dsl.optim.SGD(groups, lr=0.05, momentum=0.9),
}
ROWS = [
    (1, 1, "fp32", "adamw"),
    (2, 2, "bf16", "adamw"),
    (3, 2, "fp32", "lion"),
    (3, 1, "bf16", "bf16"),
    (1, 2, "bf16", "adagrad"),
    (2, 1, "fp32", "sgd"),
    (3, 2, "fp64", "adamw"),
]


@contextmanager
def host() -> Iterator[None]:
    """Host memory that is not the device's, as it is for a GPU."""
    original = HostMemory.__init__

    def separate(self: HostMemory, device: torch.device, pin: bool) -> None:
        original(self, device, pin)
        self.separate = True

    with mock.patch.object(HostMemory, "__init__", separate):
        yield


class Sometimes(models.Everything):
    """A model whose middle block rests in every third step."""

    alike = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = list(self.blocks)
        kept = self.blocks
        rests = self.step % 3 == 1 and (self.alike or self.step % 2 or self.rank)
        self.blocks = torch.nn.ModuleList(blocks[:1] + blocks[2:]) if rests else kept
        try:
            return super().forward(x)
        finally:
            self.blocks = kept


class Apart(Sometimes):
    """There on one rank only, in every other of these steps. At stage 3 all ranks must run the same blocks."""

    alike = False


def threads() -> int:
    return sum(thread.name.startswith("ds_lightning.speculation") for thread in threading.enumerate())


def train(stage: int, recipe: Recipe, speculative: bool, make: Any = Sometimes, **rest: Any) -> tuple[Any, ...]:
    """Values and states of every step, with a schedule and clipping that binds in every other step."""
    module, optimizer = build(make, recipe, dist.get_rank())
    offload = policy("", "cpu", speculative=speculative, **{"buffer_count": 99, **rest})
    with host():
        engine = make_engine(module, [optimizer], stage, precision=recipe.precision, offload=offload)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = []
    for step in range(recipe.steps):
        optimizer.zero_grad()
        for micro in range(recipe.accumulate):
            if micro < recipe.accumulate - 1:
                with engine.passes.no_sync():
                    forward_backward(engine, recipe, step, micro)
            else:
                forward_backward(engine, recipe, step, micro)
        if step % 3 == 2:
            seen.append(full_values(engine))  # between backward and step
        sharded = engine.optimizers[0]
        norm = engine.norms.start(sharded).value()
        clip.clip_by_norm(sharded.reduced_gradients(), norm * (0.5 if step % 2 else 2.0), norm)
        engine.norms.clipped(sharded)
        if step != 4:  # as with an overflow
            optimizer.step()
            schedule.step()
        seen.append(full_values(engine))
    for index in sorted(engine.reducer.units):
        for name, state in engine.values.full_unit_state(sharded, index).items():
            seen.append({f"{name}.{key}": torch.as_tensor(value).clone() for key, value in state.items()})
    counts = (0, 0) if engine.speculation is None else (engine.speculation.stood, engine.speculation.undone)
    bytes_held = engine.model_state_bytes()
    engine.dissolve()
    assert threads() == 0
    return seen, counts, bytes_held


def equal(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> bool:
    assert len(left) == len(right)
    return all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(left, right, strict=True))


@contextmanager
def eager() -> Iterator[None]:
    """Every guess is done before backward goes on, so that whether it stands does not depend on the machine."""
    from ds_lightning.optim.speculation import Speculation

    original = Speculation.landed

    def landed(self: Speculation, gradients: Any) -> None:
        original(self, gradients)
        guess = self._guesses.get(gradients.unit.index)
        if guess is not None:
            guess.done.exception(30)

    with mock.patch.object(Speculation, "landed", landed):
        yield


def finished(engine: Any) -> None:
    """Every guess of an engine that exists already is done."""
    for guess in list(engine.speculation._guesses.values()):
        guess.done.exception(30)


def check_bits(stage: int, precision: str, name: str) -> None:
    recipe = Recipe(steps=7, accumulate=2, precision=precision, optimizer=OPTIMIZERS[name])
    make = Sometimes if stage == 3 else Apart
    wanted, _, plain = train(stage, recipe, False, make)
    with eager():
        found, (stood, undone), held = train(stage, recipe, True, make)
    assert equal(found, wanted)
    assert stood > 5
    assert undone > 5
    assert held > plain
    raced, _, _ = train(stage, recipe, True, make)
    assert equal(raced, wanted)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_no_bit_changes(row):
    stage, world, precision, name = row
    run_ranks(check_bits, world, stage, precision, name)


def check_bound() -> None:
    recipe = Recipe(steps=4, optimizer=OPTIMIZERS["adamw"])
    wanted, _, plain = train(3, recipe, False, models.Everything)
    with eager():
        found, (stood, _), held = train(3, recipe, True, models.Everything, buffer_count=1)
    assert equal(found, wanted)
    assert 0 < stood <= 3
    with eager():
        _, (more, _), most = train(3, recipe, True, models.Everything)
    assert more > stood
    assert plain < held < most


def test_buffer_count_bounds_the_spare_memory():
    run_ranks(check_bound, 1)


def ready(stage: int = 3, **rest: Any) -> tuple[Any, Any, Recipe]:
    """An engine after its first step and a backward, with a guess for every unit."""
    recipe = Recipe(optimizer=OPTIMIZERS["adamw"], **rest)
    module, optimizer = build(models.Feed, recipe, dist.get_rank())
    with host():
        engine = make_engine(
            module, [optimizer], stage, precision=recipe.precision, offload=policy("", "cpu", speculative=True)
        )
    for step in range(2):
        optimizer.zero_grad()
        with eager():
            forward_backward(engine, recipe, step, 0)
        if not step:
            optimizer.step()
    assert engine.speculation._guesses
    return engine, optimizer, recipe


def change_gradient(engine: Any, optimizer: Any) -> None:
    engine.optimizers[0].reduced_gradients().scale_(0.5)


def clamp_gradient(engine: Any, optimizer: Any) -> None:
    engine.optimizers[0].reduced_gradients().clamp_(1e-6)


def unscale_gradient(engine: Any, optimizer: Any) -> None:
    clip.unscale(engine.optimizers[0].reduced_gradients(), 0.5, engine.agreement)


def change_rate(engine: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def change_value(engine: Any, optimizer: Any) -> None:
    with dsl.gathered(engine.module.head.weight, modifier_rank=0), torch.no_grad():
        engine.module.head.weight.mul_(2)


def change_state(engine: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


CHANGES = (change_gradient, clamp_gradient, unscale_gradient, change_rate, change_value, change_state)


def check_changes() -> None:
    for change in CHANGES:
        found = []
        for speculative in (True, False):
            engine, optimizer, _ = ready()
            before = full_values(engine)
            change(engine, optimizer)
            if change is not change_value:
                assert equal([full_values(engine)], [before])
            if not speculative:
                engine.speculation.drop()
            stood = engine.speculation.stood
            optimizer.step()
            found.append(full_values(engine))
            assert equal(found[:1], found[-1:]), change.__name__
            if change in (change_gradient, clamp_gradient, unscale_gradient):
                assert engine.speculation.stood == stood, change.__name__
            engine.dissolve()


def test_what_changes_between_backward_and_step_counts():
    run_ranks(check_changes, 1)


def check_again() -> None:
    """A second backward adds to the gradients that were speculated on."""
    found = []
    for speculative in (True, False):
        engine, optimizer, recipe = ready()
        forward_backward(engine, recipe, 7, 0)
        finished(engine)
        if not speculative:
            engine.speculation.drop()
        optimizer.step()
        assert bool(engine.speculation.stood) is speculative
        found.append(full_values(engine))
        engine.abort()
        for _ in range(100):
            time.sleep(0.05 if threads() else 0)
        assert threads() == 0
    assert equal(found[:1], found[1:])


def test_a_second_backward_is_speculated_on_anew():
    run_ranks(check_again, 1)


def check_failures() -> None:
    engine, optimizer, recipe = ready()
    before = full_values(engine)
    optimizer.zero_grad()
    with mock.patch.object(Adam, "_step", side_effect=ValueError("broken")):
        forward_backward(engine, recipe, 2, 0)
        finished(engine)
        with pytest.raises(DsLightningError, match=r"early step on .*broken"):
            optimizer.step()
    engine.give_up_step()
    assert equal([full_values(engine)], [before])
    optimizer.zero_grad()
    gate = threading.Event()
    with mock.patch.object(Adam, "_step", side_effect=lambda *_: gate.wait(20)):
        engine.speculation._timeout = 0.05
        forward_backward(engine, recipe, 3, 0)
        with pytest.raises(TopologyError, match=r"early step on .* within 0\.05 s"):
            for guess in list(engine.speculation._guesses.values()):
                engine.speculation._wait(guess)
        gate.set()
        engine.dissolve()
    assert threads() == 0


def test_errors_and_waits_name_the_unit():
    run_ranks(check_failures, 1)


def check_notes() -> None:
    for make, stage, separate in (
        (lambda groups: torch.optim.AdamW(groups), 2, True),
        (lambda groups: dsl.optim.Lamb(groups), 2, True),
        (lambda groups: dsl.optim.AdamW8bit(groups), 2, True),
        (lambda groups: dsl.optim.AdamW(groups), 2, False),
    ):
        told: list[str] = []
        module, optimizer = build(models.Feed, Recipe(optimizer=make), 0)
        offload = policy("", "cpu", speculative=True)
        if separate:
            with host():
                engine = make_engine(module, [optimizer], stage, offload=offload, tell=told.append)
        else:
            engine = make_engine(module, [optimizer], stage, offload=offload, tell=told.append)
        assert engine.speculation is None
        assert len(told) == 1
        assert "super_offload changes nothing" in told[0]
        engine.dissolve()


def test_what_cannot_step_early_says_so_once():
    run_ranks(check_notes, 1)


# Under a Trainer -----------------------------------------------------------------------------------------------------


class Overflowing(runs.Model):
    """Its loss overflows now and then, and a layer is used in every other step only."""

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(tokens, index)
        if index % 3 == 0:
            loss = loss + self.unused(torch.ones(3)).pow(2).mean()
        return loss * (float("inf") if index in (5, 6, 11) else 1.0)

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        optimizer = dsl.optim.AdamW(found["optimizer"].param_groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(stage: int, speculative: bool, folder: str, accumulate: int) -> tuple[Any, ...]:
    block = {"device": "cpu", "super_offload": speculative, "buffer_count": 99}
    config = {"zero_optimization": {**runs.SHARD_EVERYTHING["zero_optimization"], "offload_optimizer": block}}
    result: list[Any] = []
    for steps, path in ((4, None), (9, f"{folder}/{stage}-{speculative}.ckpt")):
        model = Overflowing()
        with host():
            trainer = runs.trainer(
                runs.zero(stage, config),
                "16-mixed",
                steps=steps,
                accumulate_grad_batches=accumulate,
                gradient_clip_val=6.0,
            )
            trainer.fit(model, runs.loader(), ckpt_path=path)
        if path is None:
            trainer.save_checkpoint(f"{folder}/{stage}-{speculative}.ckpt")
        skipped = trainer.precision_plugin.skipped_steps
        speculation = trainer.strategy.engine.speculation
        counts = None if speculation is None else (speculation.stood, speculation.undone)
        result.append((runs.full_weights(model), model.losses, skipped, counts))
        trainer.strategy.engine.dissolve()
        assert threads() == 0
    return tuple(result)


def check_trainer(stage: int, folder: str, accumulate: int) -> None:
    wanted = fit(stage, False, folder, accumulate)
    with eager():
        found = fit(stage, True, folder, accumulate)
    for (weights, losses, skipped, _), (expected, same_losses, same_skipped, _) in zip(found, wanted, strict=True):
        assert not runs.same(weights, expected)
        assert losses == same_losses or torch.tensor(losses).isnan().any()
        assert skipped == same_skipped
    assert found[-1][2] > 0
    assert found[-1][3][0] > 0
    assert found[-1][3][1] > 0


@pytest.mark.parametrize(("stage", "world", "accumulate"), [(1, 2, 2), (2, 1, 1), (3, 2, 1)])
def test_overflows_clipping_and_resuming(stage, world, accumulate, tmp_path):
    run_ranks(check_trainer, world, stage, str(tmp_path), accumulate)
