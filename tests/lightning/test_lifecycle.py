"""From the first Trainer to the last: modules are reused, nothing is left behind, memory does not grow."""

import copy
import gc
import pickle
import weakref

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import CheckpointError, ConfigError
from ds_lightning.zero.access import engine_of
from tests.lightning.runs import Model, close, full_weights, loader, same, trainer, zero
from tests.pool import run_ranks
from tests.resources import tensors_alive

# One module, many runs ----------------------------------------------------------------------------------------------


def fit_twice(kind, again):
    """The same module: fit, fit again with the same Trainer, then with a new one, perhaps of another kind."""
    model = Model("sgd")
    run = trainer(kind, steps=-1, max_epochs=1, limit_train_batches=2)
    run.fit(model, loader())
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    other = trainer(again, steps=-1, max_epochs=1, limit_train_batches=2)
    other.fit(model, loader())
    other.validate(model, loader(seed=6), verbose=False)
    return full_weights(model)


@pytest.mark.parametrize(("kind", "again"), [(0, 3), (3, 3), (3, 1), (3, "ddp"), ("ddp", 3), (2, "ddp")])
def test_one_module_is_trained_by_several_trainers_of_any_kind(kind, again):
    expected, _ = run_ranks(fit_twice, 2, "ddp", "ddp")
    for weights in run_ranks(fit_twice, 2, kind, again):
        assert close(expected, weights) < 1e-6


def mixed_then_plain(stage):
    model = Model("sgd")
    trainer(stage, "bf16-mixed").fit(model, loader())
    masters = full_weights(model)
    other = trainer(3 - stage, "32-true", steps=1)
    other.fit(model, loader())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    dissolved = trainer("ddp", steps=1)
    dissolved.fit(model, loader())
    return masters, full_weights(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_leaves_sixteen_bit_training_in_its_own_dtype(stage):
    for masters, later in run_ranks(mixed_then_plain, 2, stage):
        assert {name: v.dtype for name, v in masters.items()} == {name: v.dtype for name, v in later.items()}


def use_after_fit(stage):
    """A trained module computes, once its values are there."""
    model = Model()
    run = trainer(stage)
    run.fit(model, loader())
    tokens = next(iter(loader()))
    plain = Model()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in plain.state_dict()})
    expected = plain(tokens)
    with dsl.gathered(model):
        assert torch.equal(model(tokens), expected)
    assert torch.equal(model(tokens), expected)  # all ranks call it
    model(tokens).sum().backward()
    assert model.embedding.weight.shape == (13, 6)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_module_is_used_after_the_fit(stage):
    run_ranks(use_after_fit, 2, stage)


def move(kind):
    """`cpu()` makes a module plain, on every rank, and its copies are plain anyway."""
    model = Model()
    run = trainer(kind)
    run.fit(model, loader())
    expected = full_weights(model)
    if kind < 3:
        twin = copy.deepcopy(model)
        twin.cpu()
        assert engine_of(model.gain) is not None
        assert engine_of(twin.gain) is None
    assert model.cpu() is model
    assert engine_of(model.gain) is None
    assert run.strategy.engine is None
    assert same(expected, {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}) == []
    pickle.loads(pickle.dumps(model.blocks))
    with pytest.raises(CheckpointError, match=r"optimizer states are gone"):
        run.save_checkpoint("a.ckpt")
    return model.half().gain.dtype


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_module_that_is_moved_as_a_whole_becomes_a_plain_one(stage):
    assert run_ranks(move, 2, stage) == [torch.float16] * 2


def dissolve(stage, precision):
    model = Model()
    run = trainer(stage, precision)
    run.fit(model, loader())
    expected = full_weights(model)
    run.strategy.engine.dissolve()
    hooks = [
        (name, kind)
        for name, module in model.named_modules()
        if not hasattr(module, "_computed")  # torchmetrics brings its own
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
        if getattr(module, kind)
    ]
    assert hooks == []
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(not p._post_accumulate_grad_hooks and not p._backward_hooks for p in model.parameters())
    (optimizer,) = run.strategy.optimizers
    assert "zero_grad" not in vars(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    found = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    assert model.head.weight is model.embedding.weight
    model(next(iter(loader()))).sum().backward()
    return {n: (expected[n] - v.float()).abs().max().item() for n, v in found.items()}


@pytest.mark.parametrize(("stage", "precision"), [(0, "32-true"), (2, "bf16-mixed"), (3, "32-true"), (3, "bf16-mixed")])
def test_a_dissolved_module_is_a_plain_one_with_the_same_weights(stage, precision):
    for differences in run_ranks(dissolve, 2, stage, precision):
        assert max(differences.values()) == 0


# Nothing is left ----------------------------------------------------------------------------------------------------


def forget(stage):
    model = Model()
    run = trainer(stage)
    run.fit(model, loader(), loader(seed=6))
    engine = run.strategy.engine
    parameters = list(model.parameters())
    buffers = next(iter(engine.units.values()))
    watched = {
        "engine": weakref.ref(engine),
        "optimizer": weakref.ref(run.strategy.optimizers[0]),
        "storage": weakref.ref(buffers.full),
        "master": weakref.ref(buffers.master),
        "module": weakref.ref(model),
        "parameter": weakref.ref(parameters[0]),
    }
    extra = [set(vars(p)) for p in parameters]
    del run, engine, buffers, model, parameters
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None], extra


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_everything_dies_with_the_trainer_and_the_module(stage):
    for alive, extra in run_ranks(forget, 2, stage):
        assert alive == []
        assert all(not names for names in extra)


def forget_the_trainer():
    """The module outlives its Trainer: its engine goes only with the last of the two."""
    model = Model()
    run = trainer(3)
    run.fit(model, loader())
    expected = full_weights(model)
    other = trainer(1, steps=1)
    engine = weakref.ref(run.strategy.engine)
    other.fit(model, loader())
    del run
    gc.collect()
    assert engine() is None, "the engine of the first Trainer lives on"
    assert engine_of(model.gain) is other.strategy.engine
    return expected


def test_the_engine_of_a_former_trainer_is_forgotten():
    run_ranks(forget_the_trainer, 2)


def five_fits(stage, precision):
    model, counts = Model(), []
    for _ in range(5):
        run = trainer(stage, precision)
        run.fit(model, loader(), loader(seed=6))
        del run
        counts.append(tensors_alive())
    return counts


@pytest.mark.parametrize(("stage", "precision"), [(0, "32-true"), (1, "bf16-mixed"), (3, "32-true"), (3, "bf16-mixed")])
def test_memory_is_flat_over_five_fits(stage, precision):
    for counts in run_ranks(five_fits, 2, stage, precision):
        assert counts[1:] == counts[1:2] * 4


class Counts(Model):
    def on_train_batch_end(self, outputs, batch, index):
        super().on_train_batch_end(outputs, batch, index)
        self.counts.append(tensors_alive())


def tensors_per_step(stage):
    model = Counts()
    model.counts = []
    trainer(stage, steps=8).fit(model, loader(1))
    return model.counts


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_no_step_leaves_tensors_behind(stage):
    for counts in run_ranks(tensors_per_step, 2, stage):
        assert len(set(counts[2:])) == 1


# Objects before and between runs ------------------------------------------------------------------------------------


def test_a_strategy_is_pickled_before_its_first_run():
    strategy = zero(3, precision_plugin=MixedPrecision("bf16-mixed", "cpu"))
    copied = pickle.loads(pickle.dumps(strategy))
    assert copied.config.zero_optimization.stage == 3
    assert copied.config == strategy.config
    assert copied.engine is None


def pickle_after_fit(stage):
    model = Model()
    run = trainer(stage)
    run.fit(model, loader())
    copied = pickle.loads(pickle.dumps(run.strategy.__getstate__()["_parsed"]))
    assert copied is not None
    assert run.strategy.__getstate__()["_engine"] is None


def test_what_belongs_to_a_process_is_not_pickled():
    run_ranks(pickle_after_fit, 1, 3)


def test_a_strategy_serves_one_trainer_only():
    strategy = dsl.ZeroStrategy(stage=1)
    options = {"devices": 1, "logger": False, "enable_checkpointing": False}
    pl.Trainer(strategy=strategy, **options)
    with pytest.raises((ConfigError, MisconfigurationException), match=r"another Trainer|choose one"):
        pl.Trainer(strategy=strategy, **options)


def copy_before_fit():
    model = Model()
    twin = copy.deepcopy(model)
    trainer(3).fit(model, loader())
    trainer(3).fit(twin, loader())
    return same(full_weights(model), full_weights(twin))


def test_a_copy_made_before_the_fit_trains_alike():
    assert run_ranks(copy_before_fit, 2) == [[], []]


class BuiltLate(pl.LightningModule):
    """Layers, and weights from elsewhere, in `configure_model`."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70), nn.Linear(70, 70))
            self.net.load_state_dict(self.weights)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build_late(kind, path):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        weights = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70), nn.Linear(70, 70)).state_dict()
    data = torch.utils.data.DataLoader(torch.rand(8, 70, generator=torch.Generator().manual_seed(3)), batch_size=2)
    first = trainer(kind, steps=3)
    first.validate(BuiltLate(weights), data, verbose=False)
    start = {"initial": float(first.callback_metrics["val_loss"])}
    model = BuiltLate(weights)
    run = trainer(kind, steps=4)  # a whole epoch: within one, DDP would begin its data anew
    run.fit(model, data)
    run.save_checkpoint(path)
    run = trainer(kind, steps=5)
    again = BuiltLate({key: value * 0 for key, value in weights.items()})
    run.fit(again, data, ckpt_path=path)
    return start, full_weights(model), full_weights(again)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_built_and_loaded_in_configure_model_trains_and_resumes(tmp_path, stage):
    expected = run_ranks(build_late, 2, "ddp", str(tmp_path / "ddp.ckpt"))
    found = run_ranks(build_late, 2, stage, str(tmp_path / "ours.ckpt"))
    for (start, *weights), (our_start, *ours) in zip(expected, found, strict=True):
        assert our_start["initial"] == pytest.approx(start["initial"], rel=1e-6)
        assert [close(a, b) < 1e-6 for a, b in zip(weights, ours, strict=True)] == [True, True]
