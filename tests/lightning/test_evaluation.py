"""Validation, test and prediction: before, between and after fits, and where ranks have different work to do."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

import ds_lightning as dsl
from tests.lightning.runs import (
    LENGTH,
    SHARD_EVERYTHING,
    AtTrainStart,
    Model,
    Words,
    close,
    full_weights,
    loader,
    same,
    strategy_of,
    trainer,
    zero,
)
from tests.pool import run_ranks

# Whole while it evaluates, or so large (for this limit) that every unit is gathered when it is needed.
FITS = SHARD_EVERYTHING
TOO_LARGE = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 100}}
MID = {"zero_optimization": {"stage3_param_persistence_threshold": 20, "stage3_max_live_parameters": 100}}
DEFAULT = {"zero_optimization": {}}
NAMES = {id(FITS): "fits", id(TOO_LARGE): "too-large", id(MID): "partly-resident", id(DEFAULT): "resident"}

full = pytest.mark.full


def name(value):
    """Of a configuration, for the test's name."""
    return NAMES.get(id(value), str(value) if isinstance(value, int | tuple) else None)


def strategy(kind, config=None):
    return strategy_of(kind) if config is None or kind == "ddp" else dsl.ZeroStrategy(stage=kind, config=config)


# In any order -------------------------------------------------------------------------------------------------------


def every_entry_point(kind, precision, config):
    """All entry points of one Trainer, some twice, around a fit."""
    model, found = Model(), []
    run = trainer(strategy(kind, config), precision, steps=-1, max_epochs=2, limit_train_batches=2)
    data = {"dataloaders": loader(seed=6), "verbose": False}
    found += run.validate(model, **data)
    found += run.test(model, **data)
    run.fit(model, loader(), loader(seed=6))
    found += [{"fit": float(run.callback_metrics["val_loss"])}]
    found += run.test(model, **data)
    predictions = run.predict(model, loader(seed=6))
    found += run.validate(model, **data)
    run.fit_loop.max_epochs = 3
    run.fit(model, loader(), loader(seed=6))
    found += run.test(model, **data)
    return [value for entry in found for value in entry.values()], predictions, full_weights(model)


@pytest.mark.parametrize(
    ("stage", "config"),
    [
        (2, None),
        (3, FITS),
        (3, TOO_LARGE),
        pytest.param(0, None, marks=full),
        pytest.param(1, None, marks=full),
        pytest.param(3, MID, marks=full),
        pytest.param(3, DEFAULT, marks=full),
    ],
    ids=name,
)
def test_every_entry_point_in_any_order_gives_the_numbers_of_ddp(stage, config):
    expected = run_ranks(every_entry_point, 2, "ddp", "32-true", None)
    found = run_ranks(every_entry_point, 2, stage, "32-true", config)
    for (numbers, predictions, weights), (ours, our_predictions, our_weights) in zip(expected, found, strict=True):
        assert ours == pytest.approx(numbers, rel=1e-6)
        assert close(weights, our_weights) < 1e-6
        torch.testing.assert_close(our_predictions, predictions, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("precision", "config"),
    [("bf16-true", TOO_LARGE), ("bf16-mixed", FITS), pytest.param("bf16-mixed", TOO_LARGE, marks=full)],
    ids=name,
)
def test_sixteen_bit_models_are_tested_after_a_fit_as_before_it(precision, config):
    stages = run_ranks(every_entry_point, 2, 2, precision, None)
    found = run_ranks(every_entry_point, 2, 3, precision, config)
    assert same([entry[0] for entry in stages], [entry[0] for entry in found]) == []


def without_optimizers(path, kind, config):
    class Bare(Model):
        def configure_optimizers(self):
            raise AssertionError("an optimizer was built for an evaluation")

    numbers = []
    for call in ("validate", "test"):
        run = trainer(strategy(kind, config))
        numbers += getattr(run, call)(Bare(seed=2), loader(seed=6), ckpt_path=path, verbose=False)
        assert not run.strategy.optimizers
        assert kind == "ddp" or sum(run.strategy.engine.optimizers if run.strategy.engine else []) == 0
    predictions = trainer(strategy(kind, config)).predict(Bare(seed=2), loader(seed=6), ckpt_path=path)
    return [value for entry in numbers for value in entry.values()], predictions


def save(path):
    run = trainer(3)
    run.fit(Model(), loader())
    run.save_checkpoint(path)


@pytest.mark.parametrize(("stage", "config"), [(2, None), (3, TOO_LARGE), pytest.param(3, FITS, marks=full)], ids=name)
def test_evaluation_alone_loads_weights_and_builds_no_optimizer(tmp_path, stage, config):
    path = str(tmp_path / "a.ckpt")
    run_ranks(save, 2, path)
    expected = run_ranks(without_optimizers, 2, path, "ddp", None)
    found = run_ranks(without_optimizers, 2, path, stage, config)
    for (numbers, predictions), (ours, our_predictions) in zip(expected, found, strict=True):
        assert ours == pytest.approx(numbers, rel=1e-6)
        torch.testing.assert_close(our_predictions, predictions, rtol=1e-5, atol=1e-6)


def accumulate_with_validation(kind, config, validates):
    options = {"val_check_interval": 3} if validates else {"limit_val_batches": 0}
    model = Model()
    run = trainer(strategy(kind, config), steps=3, accumulate_grad_batches=4, **options)
    run.fit(model, loader(1), loader(seed=6))
    return full_weights(model)


@pytest.mark.parametrize(
    ("stage", "config"), [(0, None), (2, None), (3, TOO_LARGE), pytest.param(3, FITS, marks=full)], ids=name
)
def test_a_validation_inside_an_accumulation_window_changes_nothing(stage, config):
    with_validation = run_ranks(accumulate_with_validation, 2, stage, config, True)
    assert same(with_validation, run_ranks(accumulate_with_validation, 2, stage, config, False)) == []


# Uneven work --------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Rank `r` has `sizes[r]` samples; nobody knows in advance."""

    def __init__(self, sizes, seed=5):
        self.sizes = sizes
        self.words = Words(24, seed)

    def __iter__(self):
        rank = dist.get_rank()
        first = sum(self.sizes[:rank])
        return iter([self.words[i] for i in range(first, first + self.sizes[rank])])


class Uneven(Model):
    """Metrics of both kinds: reduced by Lightning, and by torchmetrics itself."""

    def __init__(self, seed=1):
        super().__init__(seed=seed)
        self.own = MeanMetric()

    def validation_step(self, tokens, index, dataloader_idx=0):
        loss = self.loss(tokens)
        self.own.update(loss)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(tokens))
        self.log("own", self.own, batch_size=len(tokens))

    def on_validation_epoch_end(self):
        # All ranks meet here once more, some of them much earlier than others.
        total = self.all_gather(torch.tensor(float(dist.get_rank())))
        assert total.tolist() == list(range(dist.get_world_size()))


def uneven_streams(kind, config, sizes, loaders):
    model = Uneven()
    run = trainer(strategy(kind, config), steps=2)
    streams = [DataLoader(Stream(s), batch_size=1) for s in (sizes, sizes[::-1])[:loaders]]
    before = run.validate(model, streams, verbose=False)
    run.fit(model, loader(), streams)
    after = run.validate(model, streams, verbose=False)
    return [value for entry in (*before, *after) for value in entry.values()], full_weights(model)


@pytest.mark.parametrize(
    ("world", "sizes", "config", "loaders"),
    [
        (2, (2, 3), FITS, 1),
        (2, (2, 3), TOO_LARGE, 2),
        (3, (1, 4, 2), TOO_LARGE, 2),
        pytest.param(2, (2, 3), FITS, 2, marks=full),
        pytest.param(2, (2, 3), TOO_LARGE, 1, marks=full),
        pytest.param(2, (1, 4), MID, 2, marks=full),
    ],
    ids=name,
)
def test_ranks_may_have_different_numbers_of_batches(world, sizes, config, loaders):
    expected = run_ranks(uneven_streams, world, "ddp", None, sizes, loaders)
    found = run_ranks(uneven_streams, world, 3, config, sizes, loaders, timeout=40)
    for (numbers, weights), (ours, our_weights) in zip(expected, found, strict=True):
        assert ours == pytest.approx(numbers, rel=1e-6)
        assert close(weights, our_weights) < 1e-6


class Three(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return Words()[index]


def predict_three(kind, config):
    model = Model()
    run = trainer(strategy(kind, config), use_distributed_sampler=True)
    return run.predict(model, DataLoader(Three(), batch_size=1))


@pytest.mark.parametrize("config", [FITS, TOO_LARGE], ids=name)
def test_an_odd_number_of_samples_is_predicted_once_each(config):
    expected = run_ranks(predict_three, 2, "ddp", None)
    found = run_ranks(predict_three, 2, 3, config, timeout=40)
    assert [len(batches) for batches in found] == [2, 1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def predict_stream(kind, config, sizes):
    return trainer(strategy(kind, config)).predict(Model(), DataLoader(Stream(sizes), batch_size=1))


@pytest.mark.parametrize("sizes", [(3, 0), (0, 2)])
def test_a_rank_may_have_nothing_to_predict_at_all(sizes):
    found = run_ranks(predict_stream, 2, 3, TOO_LARGE, sizes, timeout=40)
    assert [len(batches) for batches in found] == list(sizes)
    torch.testing.assert_close(found, run_ranks(predict_stream, 2, "ddp", None, sizes), rtol=1e-5, atol=1e-6)


class Writer(Model):
    """Greedy generation: as many tokens as the rank and the prompt say, so no two ranks run in step."""

    def predict_step(self, tokens, index):
        text = tokens[:, :2]
        for _ in range(2 + 3 * dist.get_rank() + index):
            text = torch.cat([text, self(text)[:, -1:].argmax(-1)], dim=1)
        return text

    validation_step = predict_step
    test_step = predict_step


def generate(kind, config, call):
    model = Writer()
    run = trainer(strategy(kind, config))
    out = []
    original = model.predict_step
    model.predict_step = model.validation_step = lambda *args: out.append(original(*args))
    getattr(run, call)(model, loader(size=8))
    return out


@pytest.mark.parametrize(
    ("world", "config"), [(3, TOO_LARGE), (2, FITS), pytest.param(2, TOO_LARGE, marks=full)], ids=name
)
def test_texts_of_different_lengths_are_generated(world, config):
    expected = run_ranks(generate, world, "ddp", None, "predict")
    assert same(expected, run_ranks(generate, world, 3, config, "predict", timeout=40)) == []
    assert same(expected, run_ranks(generate, world, 3, config, "validate", timeout=40)) == []


def save_during_uneven_validation(folder, kind, config):
    keep = ModelCheckpoint(folder, filename="{val_loss:.6f}", monitor="val_loss", save_top_k=-1)
    run = trainer(
        strategy(kind, config),
        steps=-1,
        max_epochs=2,
        limit_train_batches=1,
        callbacks=[keep],
        enable_checkpointing=True,
    )
    model = Uneven()
    run.fit(model, loader(), DataLoader(Stream((1, 4)), batch_size=1))
    inside = full_weights(model)
    saved = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
    return same(inside, {name: saved[name] for name in inside})


@pytest.mark.parametrize("config", [TOO_LARGE, pytest.param(FITS, marks=full)], ids=name)
def test_a_checkpoint_is_saved_at_the_end_of_an_uneven_validation(tmp_path, config):
    assert run_ranks(save_during_uneven_validation, 2, str(tmp_path), 3, config, timeout=40) == [[], []]


def count_gathers(config):
    """What an evaluation communicates, and what is left gathered after it."""
    model = Model()
    run = trainer(strategy(3, config))
    run.fit(model, loader())
    engine = run.strategy.engine
    largest = [0]

    def watch(*_):
        largest[0] = max(largest[0], engine.residency.live_numel())

    handles = [module.register_forward_hook(watch) for module in model.modules()]
    engine.ledger.clear()
    run.validate(model, loader(1), verbose=False)
    for handle in handles:
        handle.remove()
    return engine.ledger.entries["all_gather"].calls, largest[0], engine.residency.live_numel()


def test_a_model_that_fits_is_gathered_once_and_a_larger_one_a_unit_at_a_time():
    whole = sum(p.numel() for p in Model().parameters())
    for calls, largest, left in run_ranks(count_gathers, 2, FITS):
        assert calls < 8
        assert largest >= whole
        assert left == 0
    for calls, largest, left in run_ranks(count_gathers, 2, TOO_LARGE):
        assert calls > 24
        assert largest < whole
        assert left == 0


# Backward inside an evaluation --------------------------------------------------------------------------------------


class Adversarial(Model):
    """Gradients with respect to the input's embedding, in validation."""

    def __init__(self, seed=1):
        super().__init__(seed=seed)
        self.found = []

    def validation_step(self, tokens, index, dataloader_idx=0):
        with torch.enable_grad():
            noise = torch.zeros(len(tokens), LENGTH, 6, requires_grad=True)
            x = self.embedding(tokens).detach() + noise
            for block in self.blocks:
                x = block(x)
            self.head(x).square().mean().backward()
            self.found.append(noise.grad.clone())


def attack(kind, config):
    model = Adversarial()
    run = trainer(strategy(kind, config), inference_mode=False)
    run.validate(model, loader(size=8), verbose=False)
    before = list(model.found)
    run.fit(model, loader(), loader(size=8))
    return before, model.found, full_weights(model)


@pytest.mark.parametrize(
    ("stage", "config"), [(2, None), (3, FITS), (3, TOO_LARGE), pytest.param(0, None, marks=full)], ids=name
)
def test_backward_works_inside_a_validation(stage, config):
    expected = run_ranks(attack, 2, "ddp", None)
    found = run_ranks(attack, 2, stage, config, timeout=40)
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-6)


# Metrics and hooks --------------------------------------------------------------------------------------------------


def hooks_of_metrics():
    model = Uneven()
    originals = [metric.distributed_available_fn for metric in (model.own, model.mean_loss)]
    run = trainer(zero(3, TOO_LARGE))
    run.fit(model, loader(), DataLoader(Stream((1, 2)), batch_size=1))
    assert [metric.distributed_available_fn for metric in (model.own, model.mean_loss)] == originals


def test_metrics_are_as_before_once_an_evaluation_is_over():
    run_ranks(hooks_of_metrics, 2)


def sanity_check(config):
    seen = AtTrainStart(lambda run, model: full_weights(model))
    model = Model()
    trainer(strategy(3, config), callbacks=[seen], num_sanity_val_steps=2).fit(model, loader(), loader(seed=6))
    fresh = Model()
    return same({name: p.detach() for name, p in fresh.named_parameters(remove_duplicate=False)}, seen.result)


@pytest.mark.parametrize("config", [FITS, TOO_LARGE], ids=name)
def test_the_sanity_check_leaves_the_weights_as_they_were(config):
    assert run_ranks(sanity_check, 2, config) == [[], []]
