"""The sharded exponential moving average: torch's numbers, nothing sent, and nothing of the training changed."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
)
from torch import distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

import ds_lightning as dsl
from ds_lightning.callbacks import EMA
from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
from ds_lightning.checkpoint.loading import load
from ds_lightning.optim.ema import warmed_up
from tests.lightning import common
from tests.lightning.runs import Model, close, full_weights, loader, same, trainer, zero
from tests.pool import run_ranks

STAGES = (0, 1, 2, 3)
TOO_LARGE = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1}}
full = pytest.mark.full


def averages(ema: EMA, model: nn.Module) -> dict[str, torch.Tensor]:
    """Full averages by name, on every rank."""
    return {name: ema.full_param(p) for name, p in model.named_parameters(remove_duplicate=False)}


# Against torch ------------------------------------------------------------------------------------------------------


class Torch(Callback):
    """torch's own average of a module that every rank holds whole."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.steps = 0

    def setup(self, trainer, pl_module, stage) -> None:
        self.model = AveragedModel(pl_module, multi_avg_fn=get_ema_multi_avg_fn(self.decay))

    def on_train_start(self, trainer, pl_module) -> None:
        self.model.to(pl_module.gain.dtype)

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.model.update_parameters(pl_module)

    def averages(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.module.named_parameters(remove_duplicate=False)}


def average(kind, precision="32-true", decay=0.8, **options):
    torchs, ours = Torch(decay), EMA(decay)
    model = Model()
    reference = kind in ("ddp", "single")
    settings = {"max_epochs": 3, "limit_train_batches": 4, "steps": -1, "callbacks": [torchs if reference else ours]}
    run = trainer(kind, precision, **{**settings, **options})
    run.fit(model, loader(1))
    if reference:
        return torchs.averages(), torchs.model.n_averaged.item()
    found = averages(ours, model)
    assert {value.dtype for value in found.values()} == {torch.float32}
    return found, ours.updates


REST = [pytest.param(*cell, marks=full) for cell in [(1, 1), (1, 3), (2, 1), (3, 3)]]


@pytest.mark.parametrize(("world", "accumulate"), [(2, 3), (3, 1), *REST])  # the last window of an epoch is short
def test_the_averages_are_torchs_and_those_of_every_stage_the_same(world, accumulate):
    options = {"accumulate_grad_batches": accumulate}
    expected, updates = run_ranks(average, world, "ddp", **options)[0]
    assert updates == (12 if accumulate == 1 else 6)
    found = {stage: run_ranks(average, world, stage, **options) for stage in STAGES}
    for stage in STAGES:
        for values, made in found[stage]:
            assert made == updates
            assert close(values, expected) < 1e-6, stage
    # Within accumulation windows stages 2 and 3 reduce each batch, 0 and 1 the sum.
    pairs = [(0, 1), (2, 3)] if accumulate > 1 else [(0, 1), (0, 2), (0, 3)]
    for one, other in pairs:
        assert same(found[one][0][0], found[other][0][0]) == []


def average_in_float64(kind):
    model = Model()
    ema, reference = EMA(0.8), Torch(0.8)
    trainer(kind, "64-true", callbacks=[reference if kind == "ddp" else ema]).fit(model, loader())
    return reference.averages() if kind == "ddp" else averages(ema, model)


def test_fp64_weights_have_fp64_averages():
    expected = run_ranks(average_in_float64, 2, "ddp")[0]
    found = run_ranks(average_in_float64, 2, 3)[0]
    assert {value.dtype for value in found.values()} == {torch.float64}
    assert close(found, expected) < 1e-14


class Recording(Callback):
    """The weights after each real step, whole, in the averages' dtype."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.skipped = 0
        self.global_step = 0

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        skipped = trainer.strategy.skipped_steps
        if trainer.global_step - self.global_step > skipped - self.skipped:
            self.steps.append(full_weights(pl_module))
        self.skipped, self.global_step = skipped, trainer.global_step


def expected_average(steps, decay_of, after=0, every=1):
    """The definition, step by step."""
    average, updates = None, 0
    for step, values in enumerate(steps, 1):
        if step <= after or (step - 1) % every:
            continue
        if average is None:
            average = {name: value.clone() for name, value in values.items()}
        else:
            decay = decay_of(step, updates)
            average = {name: average[name].lerp(value, 1 - decay) for name, value in values.items()}
        updates += 1
    return average, updates


class Overflowing(Model):
    """A gradient that is not finite now and then, on one rank."""

    def training_step(self, tokens, index):
        loss = super().training_step(tokens, index)
        if index % 4 == 1 and self.global_rank == 0:
            loss = loss * torch.tensor(float("inf"))
        return loss


def average_by_definition(stage, precision, options, decay_of, skipping):
    model = Overflowing() if skipping else Model()
    recording, ema = Recording(), EMA(**options)
    run = trainer(stage, precision, steps=9, callbacks=[recording, ema], zero={"config": None})
    run.fit(model, loader(1))
    assert (run.strategy.skipped_steps > 0) == skipping
    assert len(recording.steps) == 9 - run.strategy.skipped_steps
    rule = {"after": options.get("update_after_step", 0), "every": options.get("update_every", 1)}
    expected, updates = expected_average(recording.steps, decay_of, **rule)
    assert ema.updates == updates
    return same(averages(ema, model), expected)


def schedule(step):
    return 0.5 + step / 100


def fixed(step, updates):
    return 0.7


def warm(step, updates):
    return warmed_up(0.6, updates)


def scheduled(step, updates):
    return schedule(step)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=full), 1, pytest.param(2, marks=full), 3])
@pytest.mark.parametrize(
    ("precision", "options", "decay_of", "skipping"),
    [
        ("32-true", {"decay": 0.6, "warmup": True}, warm, False),
        ("32-true", {"decay": schedule, "update_after_step": 3, "update_every": 2}, scheduled, False),
        ("bf16-mixed", {"decay": 0.7}, fixed, False),
        ("bf16-true", {"decay": 0.7}, fixed, False),
        ("16-mixed", {"decay": 0.7}, fixed, True),
        ("16-mixed", {"decay": schedule}, scheduled, True),
    ],
    ids=["warm-up", "schedule", "bf16-mixed", "bf16-true", "16-mixed", "16-mixed with a schedule"],
)
def test_an_update_is_what_it_is_by_definition_and_only_after_real_steps(stage, precision, options, decay_of, skipping):
    assert run_ranks(average_by_definition, 2, stage, precision, options, decay_of, skipping) == [[], []]


class TwoOptimizers(Model):
    """Steps both optimizers in a batch, one, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, tokens, index):
        first, second = self.optimizers()
        self.manual_backward(self.loss(tokens))
        if index % 3 != 2:
            first.step()
        if index % 3 == 0:
            second.optimizer.step()  # past Lightning
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self):
        blocks = list(self.blocks.parameters())
        known = {id(p) for p in blocks}
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        return torch.optim.SGD(blocks, lr=0.1), torch.optim.SGD(others, lr=0.1)


def average_of_two_optimizers(stage):
    model, ema = TwoOptimizers(), EMA(0.5)
    weights = []

    class Batches(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, index) -> None:
            if index % 3 != 2:
                weights.append(full_weights(pl_module))

    trainer(stage, steps=-1, max_epochs=1, limit_train_batches=6, callbacks=[Batches(), ema]).fit(model, loader(1))
    expected, updates = expected_average(weights, lambda *_: 0.5)
    assert ema.updates == updates == 4
    return same(averages(ema, model), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_with_several_optimizers_a_batch_in_which_any_stepped_counts_once(stage):
    assert run_ranks(average_of_two_optimizers, 2, stage) == [[], []]


# Cost ---------------------------------------------------------------------------------------------------------------


def cost(stage, precision):
    model, ema = Model(), EMA(0.9)
    calls = []

    class Update(Callback):
        """Around the update alone."""

        def __init__(self, first):
            self.first = first

        def on_train_batch_end(self, trainer, pl_module, *_) -> None:
            ledger = trainer.strategy.engine.ledger
            if self.first:
                calls.append(-ledger.calls)
                self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                calls.append(self.profile)
                self.profile.__enter__()
            else:
                calls[-1].__exit__(None, None, None)
                names = {event.key for event in calls.pop().key_averages()}
                assert not [name for name in names if "c10d" in name or "gloo" in name], names
                calls[-1] += ledger.calls

    run = trainer(stage, precision, steps=3, callbacks=[Update(True), ema, Update(False)])
    run.fit(model, loader())
    units = run.strategy.engine.units
    trained = [b.unit for b in units.values() if b.unit.trainable]
    assert len(trained) < len(units)  # one of them is frozen
    assert calls == [0, 0, 0]
    assert ema.nbytes == sum(4 * unit.numel for unit in trained) // dist.get_world_size()
    return ema.nbytes, 4 * sum(unit.numel for unit in trained)


@pytest.mark.parametrize(("stage", "precision"), [(0, "32-true"), (1, "bf16-mixed"), (2, "32-true"), (3, "bf16-mixed")])
def test_an_update_sends_nothing_and_the_averages_take_4_bytes_a_parameter_over_all_ranks(stage, precision):
    found = run_ranks(cost, 3, stage, precision)
    assert sum(own for own, _ in found) == found[0][1]


# Evaluation ---------------------------------------------------------------------------------------------------------


class Watching(Model):
    """Notes the weights that validation sees."""

    def __init__(self, raising: bool = False) -> None:
        super().__init__()
        self.raising = raising
        self.evaluated: list[float] = []

    def validation_step(self, tokens, index, dataloader_idx=0):
        loss = self.loss(tokens)
        self.evaluated.append(loss.item())
        if self.raising and not self.trainer.sanity_checking:
            raise RuntimeError("on purpose")
        self.log("val_loss", loss, sync_dist=True)


def train(stage, precision, callbacks, config=None, **options):
    model = Watching()
    settings = {"max_epochs": 2, "limit_train_batches": 5, "accumulate_grad_batches": 2, "num_sanity_val_steps": 2}
    settings |= {"val_check_interval": 2, "limit_val_batches": 2, "steps": -1, "gradient_clip_val": 0.5}
    strategy = zero(stage, config, **options)
    run = trainer(strategy, precision, callbacks=callbacks, **settings)
    run.fit(model, loader(1), loader(2))
    return run, model


def with_and_without(stage, precision, config=None):
    _, plain = train(stage, precision, [], config)
    ema = EMA(0.5)
    _, model = train(stage, precision, [ema], config)
    assert model.losses == plain.losses
    assert model.evaluated[:2] == plain.evaluated[:2], "before the first update there is nothing to see"
    assert model.evaluated[2] == plain.evaluated[2], "the first update copies the weights"
    assert all(one != other for one, other in zip(model.evaluated[4:], plain.evaluated[4:], strict=True))
    different = same(full_weights(plain), full_weights(model))
    return different + same(_states(plain), _states(model))


def _states(model):
    return {
        f"{name}.{key}": dsl.full_optimizer_state(p, key)
        for name, p in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq", "step")
    }


def cells(*usual):
    """Each precision at one stage, and in the long version at all."""
    every = [(stage, p) for stage in STAGES for p in ("32-true", "bf16-mixed", "16-mixed", "bf16-true")]
    return [*usual, *(pytest.param(*cell, marks=full) for cell in every if cell not in usual)]


@pytest.mark.parametrize(
    ("stage", "precision"),
    cells((0, "32-true"), (0, "16-mixed"), (1, "bf16-mixed"), (2, "bf16-true"), (3, "32-true"), (3, "16-mixed")),
)
def test_training_goes_on_bit_for_bit_around_evaluations_that_see_the_averages(stage, precision):
    assert run_ranks(with_and_without, 2, stage, precision) == [[], []]


def test_also_where_the_model_is_never_gathered_whole():
    assert run_ranks(with_and_without, 3, 3, "32-true", TOO_LARGE) == [[], [], []]


def metric(stage, precision, config=None):
    ema = EMA(0.5)
    run, model = train(stage, precision, [ema], config)
    logged = run.callback_metrics["val_loss"].item()  # the last validation is after the last step but one
    found = averages(ema, model)
    after = run.validate(model, loader(2), verbose=False)[0]["val_loss"]
    training = same(full_weights(model), full_weights(model))
    plain = Model()
    plain.load_state_dict({**plain.state_dict(), **found})
    reference = trainer("ddp", precision, limit_val_batches=2).validate(plain, loader(2), verbose=False)[0]["val_loss"]
    with ema.swapped():
        by_hand = run.validate(model, loader(2), verbose=False)[0]["val_loss"]
        inside = full_weights(model)
    assert not training
    assert not same(inside, found)
    return logged, after, by_hand, reference


@pytest.mark.parametrize(
    ("stage", "precision", "config"),
    [
        (0, "bf16-mixed", None),
        (1, "32-true", None),
        (2, "bf16-mixed", None),
        (3, "32-true", None),
        (3, "bf16-mixed", TOO_LARGE),
    ],
)
def test_a_metric_is_that_of_a_plain_model_with_the_averages(stage, precision, config):
    for _, after, by_hand, reference in run_ranks(metric, 2, stage, precision, config):
        assert after == by_hand
        assert after == pytest.approx(reference, rel=1e-6)


class Stream(IterableDataset):
    """Rank 0 has fewer batches than rank 1."""

    def __iter__(self):
        for index in range(1 + 2 * dist.get_rank()):
            yield torch.full((5,), index)


class Uneven(Model):
    def validation_step(self, tokens, index):
        self.log("val_loss", self.loss(tokens), sync_dist=True, on_epoch=True)


def uneven(config):
    ema, model = EMA(0.5), Uneven()
    run = trainer(zero(3, config), steps=-1, max_epochs=2, limit_train_batches=3, callbacks=[ema])
    run.fit(model, loader(2), DataLoader(Stream(), batch_size=1))
    found, before = averages(ema, model), full_weights(model)
    after = run.validate(model, DataLoader(Stream(), batch_size=1), verbose=False)[0]["val_loss"]
    plain = Uneven()
    plain.load_state_dict({**plain.state_dict(), **found})
    reference = trainer("ddp").validate(plain, DataLoader(Stream(), batch_size=1), verbose=False)[0]["val_loss"]
    assert after == pytest.approx(reference, rel=1e-6)
    return same(before, full_weights(model))


@pytest.mark.parametrize("config", [None, TOO_LARGE], ids=["whole", "in rounds"])
def test_ranks_may_have_different_numbers_of_batches(config):
    assert run_ranks(uneven, 2, config) == [[], []]


def raising(stage, precision, folder):
    """All ranks raise in the second validation; the weights are those before it."""
    ema, model = EMA(0.5), Watching()
    before = {}

    class Note(Callback):
        def on_validation_start(self, trainer, pl_module) -> None:
            if not trainer.sanity_checking:
                before.update(full_weights(pl_module))

    run = trainer(
        stage,
        precision,
        steps=-1,
        max_epochs=1,
        limit_train_batches=4,
        callbacks=[Note(), ema, ModelCheckpoint(folder, save_on_exception=True)],
        enable_checkpointing=True,
    )
    model.raising = True
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(model, loader(1), loader(2))
    assert ema.updates == 4
    after = full_weights(model)
    saved = [torch.load(path, weights_only=True) for path in Path(folder).glob("*.ckpt")]
    files = [line for one in saved for line in same({k: one["state_dict"][k].to(v) for k, v in before.items()}, before)]
    return same(before, after) + files, len(saved)


@pytest.mark.parametrize(("stage", "precision"), [(0, "32-true"), (1, "bf16-mixed"), (2, "32-true"), (3, "bf16-mixed")])
def test_the_weights_come_back_when_validation_raises(tmp_path, stage, precision):
    for found, saved in run_ranks(raising, 2, stage, precision, str(tmp_path)):
        assert found == []
        assert saved == 1


def by_hand(stage, precision, folder):
    """What is inside of `swapped`, what is refused there, and what is saved."""
    ema, model = EMA(0.5), Model()
    with ema.swapped():
        pass  # nothing yet
    run = trainer(stage, precision, steps=4, callbacks=[ema])
    run.fit(model, loader())
    before, found = full_weights(model), averages(ema, model)
    cast = {
        name: value.to(torch.bfloat16).float() if precision == "bf16-true" else value for name, value in found.items()
    }
    with ema.swapped(), ema.swapped():
        assert same(full_weights(model), cast) == []
        assert same({name: model.state_dict()[name].float() for name in cast}, cast) == []
        with dsl.gathered(model):
            shown = {name: p.detach().clone() for name, p in model.named_parameters()}
        run.save_checkpoint(f"{folder}/inside.ckpt")
        with pytest.raises(dsl.errors.ConfigError, match="swapped"):
            run.optimizers[0].step()
    for name, value in shown.items():
        assert torch.equal(value, found[name].to(value.dtype)), name
    with dsl.gathered(model), pytest.raises(dsl.errors.ConfigError, match="gathered"), ema.swapped():
        pass
    with pytest.raises(ZeroDivisionError), ema.swapped():
        raise ZeroDivisionError
    run.save_checkpoint(f"{folder}/outside.ckpt")
    inside, outside = (torch.load(f"{folder}/{name}.ckpt", weights_only=True) for name in ("inside", "outside"))
    return same(before, full_weights(model)) + [
        line for key in ("state_dict", "optimizer_states", "ema") for line in same(inside[key], outside[key], key)
    ]


@pytest.mark.parametrize(
    ("stage", "precision"),
    cells((0, "bf16-mixed"), (1, "32-true"), (2, "bf16-true"), (3, "bf16-mixed"), (3, "32-true")),
)
def test_by_hand_the_averages_are_shown_and_the_trained_weights_are_saved(tmp_path, stage, precision):
    assert run_ranks(by_hand, 2, stage, precision, str(tmp_path)) == [[], []]


# Layout -------------------------------------------------------------------------------------------------------------


class Backbone(common.Net):
    def __init__(self) -> None:
        super().__init__(common.adamw)
        self.backbone = nn.Sequential(self.embed, self.blocks[0])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


def finetuning(kind):
    """torch averages the frozen weights too: nothing is lost when they join."""
    callback = Torch(0.8) if kind == "ddp" else EMA(0.8)
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.005, verbose=False)
    module = Backbone()
    strategy = "ddp_find_unused_parameters_true" if kind == "ddp" else common.zero(kind)
    # DDP never reduces what was frozen when it began, so every sample goes to every rank.
    options = {"max_epochs": 3, "use_distributed_sampler": False}
    common.fit(module, strategy, common.data(10), callbacks=[unfreeze, callback], **options)
    return callback.averages() if kind == "ddp" else averages(callback, module)


def test_the_averages_follow_when_a_backbone_is_unfrozen():
    expected = run_ranks(finetuning, 2, "ddp")[0]
    for stage in STAGES:
        assert close(run_ranks(finetuning, 2, stage)[0], expected) < 1e-6, stage


def finetuning_resumed(stage, folder):
    """The group of the backbone is put back when training begins; its averages are those that were saved."""

    def run(epochs, source=None):
        unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.005, verbose=False)
        ema, module = EMA(0.8), Backbone()
        start = AtStart(ema)
        made = common.make_trainer(common.zero(stage), max_epochs=epochs, callbacks=[unfreeze, ema, start])
        made.fit(module, common.data(12), ckpt_path=source)
        return made, averages(ema, module), start

    half, saved, _ = run(3)
    half.save_checkpoint(f"{folder}/half.ckpt")
    *_, start = run(4, f"{folder}/half.ckpt")
    found, updates = start.found
    assert updates == 9
    return same(found, saved)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_averages_of_a_backbone_that_was_unfrozen_are_resumed(tmp_path, stage):
    assert run_ranks(finetuning_resumed, 2, stage, str(tmp_path)) == [[], []]


class Tuned(common.Net):
    lr = 0.01

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def two_fits(stage, folder):
    """The learning-rate finder makes new optimizers, and so does a second fit: the averages go on."""
    import os

    os.chdir(folder)
    finder = LearningRateFinder(min_lr=1e-4, max_lr=0.01, num_training_steps=5, early_stop_threshold=None)
    recording, ema, module = Recording(), EMA(0.5), Tuned()
    run = common.make_trainer(
        common.zero(stage), max_epochs=1, callbacks=[finder, recording, ema], enable_checkpointing=True
    )
    run.fit(module, common.data())
    run.callbacks.remove(finder)
    run.fit_loop.max_epochs = 2
    run.fit(module, common.data())
    expected, updates = expected_average(recording.steps, lambda *_: 0.5)
    assert ema.updates == updates == 10
    return same(averages(ema, module), expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_averages_go_on_when_optimizers_are_made_anew(tmp_path, stage):
    assert run_ranks(two_fits, 2, stage, str(tmp_path)) == [[], []]


# Checkpoints --------------------------------------------------------------------------------------------------------


def read(path):
    return load(Path(path), ZeroCheckpointIO().load_checkpoint, print)


def plain(item):
    """Ordinary tensors in the place of logical ones."""
    if torch.is_tensor(item):
        return item.clone()
    return {key: plain(value) for key, value in item.items()} if isinstance(item, dict) else item


def save(folder, stage, precision, form, steps=4, **options):
    ema, model = EMA(0.5), Model()
    run = trainer(stage, precision, steps=steps, callbacks=[ema], zero={"checkpoint": form, **options})
    run.fit(model, loader())
    run.save_checkpoint(f"{folder}/source.ckpt")
    return averages(ema, model), full_weights(model)


class AtStart(Callback):
    def __init__(self, ema, path=None) -> None:
        self.ema, self.path = ema, path
        self.found = {}

    def on_train_start(self, trainer, pl_module) -> None:
        self.found = averages(self.ema, pl_module), self.ema.updates
        if self.path:
            trainer.save_checkpoint(self.path)


def resume(folder, stage, precision, copy=None, ema=True):
    averaging = EMA(0.5)
    start = AtStart(averaging, copy)
    model = Model(seed=2)
    callbacks = [averaging, start] if ema else []
    trainer(stage, precision, steps=5, callbacks=callbacks).fit(model, loader(), ckpt_path=f"{folder}/source.ckpt")
    return start.found


CELLS = [(3, 2, "32-true"), (1, 3, "bf16-mixed"), (0, 2, "16-mixed")]
TARGETS = [(1, 3, "32-true"), (3, 2, "bf16-mixed"), (0, 1, "32-true")]


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize(("stage", "world", "precision"), CELLS, ids=str)
def test_averages_are_saved_whole_and_resumed_anywhere_bit_for_bit(tmp_path, stage, world, precision, form):
    found, weights = run_ranks(save, world, str(tmp_path), stage, precision, form)[0]
    checkpoint = plain(read(tmp_path / "source.ckpt"))
    saved = checkpoint["ema"]
    assert (saved["updates"], saved["steps"], saved["decay"]) == (4, 4, 0.5)
    assert saved["state_dict"].keys() == checkpoint["state_dict"].keys() == Model().state_dict().keys()
    fresh = Model(seed=3)
    fresh.load_state_dict(saved["state_dict"], strict=True)
    assert same(dict(fresh.named_parameters(remove_duplicate=False)) | {}, found) == []
    assert torch.equal(saved["state_dict"]["seen"], checkpoint["state_dict"]["seen"])
    assert same({name: checkpoint["state_dict"][name] for name in weights}, weights) == []
    for target, size, other in TARGETS:
        copy = tmp_path / f"{target}-{size}.ckpt"
        for start, updates in run_ranks(resume, size, str(tmp_path), target, other, str(copy)):
            assert updates == 4
            assert same(start, found) == [], (target, size, other)
        assert same(plain(read(copy)["ema"]), saved, "ema") == []


def unbroken_and_resumed(folder, stage, precision, form):
    def run(epochs, source=None, seed=1):
        ema, model = EMA(0.9, warmup=True, update_after_step=1, update_every=2), Model(seed=seed)
        options = {"max_epochs": epochs, "limit_train_batches": 3, "limit_val_batches": 1, "steps": -1}
        made = trainer(stage, precision, callbacks=[ema], zero={"checkpoint": form}, **options)
        made.fit(model, loader(1), loader(1), ckpt_path=source)
        return made, model, averages(ema, model), ema.updates

    path = f"{folder}/{stage}.ckpt"
    _, model, expected, updates = run(4)
    half, *_ = run(2)
    half.save_checkpoint(path)
    _, again, found, made = run(4, path, seed=2)
    assert updates == made == 5
    assert again.losses == model.losses[6:]
    return same(found, expected) + same(full_weights(again), full_weights(model))


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize(
    ("stage", "precision"), cells((0, "32-true"), (1, "bf16-true"), (2, "16-mixed"), (3, "bf16-mixed"))
)
def test_resumed_averages_go_on_as_the_unbroken_ones(tmp_path, stage, precision, form):
    assert run_ranks(unbroken_and_resumed, 2, str(tmp_path), stage, precision, form) == [[], []]


def without_averages(folder, stage):
    run = trainer(stage, steps=3)
    run.fit(Model(), loader())
    run.save_checkpoint(f"{folder}/source.ckpt")


def test_a_checkpoint_without_averages_begins_them_with_its_weights(tmp_path):
    run_ranks(without_averages, 2, str(tmp_path), 2)
    weights = read(tmp_path / "source.ckpt")["state_dict"]
    for found, updates in run_ranks(resume, 2, str(tmp_path), 3, "32-true"):
        assert updates == 1
        assert same(found, {name: weights[name].clone() for name in found}) == []


def test_a_checkpoint_with_averages_resumes_without_the_callback(tmp_path):
    run_ranks(save, 2, str(tmp_path), 3, "32-true", "sharded")
    run_ranks(resume, 2, str(tmp_path), 2, "32-true", None, False)


def before_the_first_update(folder, stage):
    ema, model = EMA(0.5, update_after_step=3), Model()
    run = trainer(stage, steps=2, callbacks=[ema], zero={"checkpoint": "sharded"})
    run.fit(model, loader())
    assert (ema.updates, ema.nbytes) == (0, 0)
    run.save_checkpoint(f"{folder}/source.ckpt")
    again = EMA(0.5, update_after_step=3)
    more = trainer(stage, steps=4, callbacks=[again])
    more.fit(model := Model(seed=2), loader(), ckpt_path=f"{folder}/source.ckpt")
    assert again.updates == 1
    return same(averages(again, model), full_weights(model))


def test_before_the_first_update_the_weights_are_saved_as_averages(tmp_path):
    assert run_ranks(before_the_first_update, 2, str(tmp_path), 3) == [[], []]
    checkpoint = plain(read(tmp_path / "source.ckpt"))
    assert checkpoint["ema"]["updates"] == 0
    assert same(checkpoint["ema"]["state_dict"], dict(checkpoint["state_dict"])) == []
    # and are there only once
    names = [p.name for p in (tmp_path / "source.ckpt").iterdir()]
    assert len([name for name in names if name.endswith(".distcp")]) == 2
    from ds_lightning.checkpoint.stored import StoredFolder

    assert not [name for name in StoredFolder(tmp_path / "source.ckpt").tensors() if name.startswith("ema")]


def evaluate_checkpoint(folder, stage, live):
    """`test(ckpt_path=...)` evaluates the averages in it, and leaves its weights."""
    checkpoint = read(f"{folder}/source.ckpt")
    plain_model = Model(seed=4)
    plain_model.load_state_dict(plain(checkpoint["ema"]["state_dict"]))
    expected = trainer("ddp").test(plain_model, loader(), verbose=False)[0]["test_loss"]
    ema, model = EMA(0.5), Model(seed=5)
    run = trainer(stage, steps=2, callbacks=[ema])
    if live:
        run.fit(model, loader())
        before = averages(ema, model)
    found = run.test(model, loader(), ckpt_path=f"{folder}/source.ckpt", verbose=False)[0]["test_loss"]
    assert found == pytest.approx(expected, rel=1e-6)
    if live:
        after = averages(ema, model)
        assert (
            same(
                {k: v for k, v in after.items() if "frozen" not in k},
                {k: before[k] for k in before if "frozen" not in k},
            )
            == []
        )
    weights = full_weights(model)
    return same(weights, {name: checkpoint["state_dict"][name].clone() for name in weights})


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("live", [False, True])
def test_an_evaluation_of_a_checkpoint_sees_its_averages(tmp_path, form, live):
    run_ranks(save, 2, str(tmp_path), 2, "32-true", form)
    for stage in (0, 2, 3):
        assert run_ranks(evaluate_checkpoint, 2, str(tmp_path), stage, live) == [[], []], stage


def in_the_background(folder, stage, form):
    """The averages in a checkpoint are those of its step, however long writing takes."""
    ema, model = EMA(0.5), Model()
    seen = {}

    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_) -> None:
            if trainer.global_step == 2:
                seen.update(averages(ema, pl_module))
                trainer.save_checkpoint(f"{folder}/source.ckpt")

    trainer(stage, steps=6, callbacks=[ema, Save()], zero={"checkpoint": form, "async_save": True}).fit(model, loader())
    dist.barrier()
    saved = plain(read(f"{folder}/source.ckpt")["ema"]["state_dict"])
    return same({name: saved[name] for name in seen}, seen)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_averages_are_saved_beside_training(tmp_path, form):
    assert run_ranks(in_the_background, 2, str(tmp_path), 3, form) == [[], []]


# Refusals -----------------------------------------------------------------------------------------------------------


def refused():
    said = []
    for kind, callbacks in [("ddp", [EMA()]), (2, [EMA(), EMA(0.5)])]:
        with pytest.raises(dsl.errors.ConfigError) as caught:
            trainer(kind, callbacks=callbacks).fit(Model(), loader())
        said.append(str(caught.value))
    return said


def test_what_cannot_work_is_refused_in_words():
    ((ddp, several), _) = run_ranks(refused, 2)
    assert "DDPStrategy" in ddp
    assert "EMAWeightAveraging" in ddp
    assert "several" in several


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"decay": 1.5}, "1.5"),
        ({"update_every": 0}, "update_every"),
        ({"update_after_step": -1}, "update_after_step"),
        ({"dtype": "int8"}, "int8"),
        ({"swap": ["validation"]}, "validate"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, word):
    with pytest.raises(dsl.errors.ConfigError, match=word):
        EMA(**options)


def test_the_dtype_may_be_a_word_and_swap_one_name():
    assert EMA(dtype="bfloat16", swap="test")._dtype == torch.bfloat16
    assert dsl.callbacks.EMA is EMA
    deepcopy(EMA())
