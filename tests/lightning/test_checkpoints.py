"""One file for all: what any stage, world size and precision saves, any other loads, bit for bit."""

import os
import resource
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from omegaconf import DictConfig, OmegaConf
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import ds_lightning as dsl
from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
from ds_lightning.checkpoint.loading import load
from ds_lightning.comm import agreement
from ds_lightning.errors import CheckpointError, TopologyError
from tests.lightning.runs import (
    WIDTH,
    AtTrainStart,
    Model,
    close,
    full_weights,
    loader,
    make_optimizer,
    same,
    strategy_of,
    trainer,
)
from tests.pool import fresh_ranks, run_ranks

TRAINING = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "loops")


def read(path) -> dict:
    return torch.load(path, weights_only=True)


# Any to any ---------------------------------------------------------------------------------------------------------


def save_run(path, kind, precision="32-true", optimizer="adamw", steps=3):
    run = trainer(kind, precision, steps=steps)
    run.fit(Model(optimizer), loader())
    run.save_checkpoint(path)
    return run.strategy.loss_scale if hasattr(run.strategy, "loss_scale") else None


def copy_run(source, path, kind, precision="32-true", optimizer="adamw"):
    """Resume from `source` and save again before the first step, from other initial weights."""
    copy = AtTrainStart(lambda run, _: run.save_checkpoint(path))
    run = trainer(kind, precision, steps=4, callbacks=[copy])
    run.fit(Model(optimizer, seed=2), loader(), ckpt_path=source)


def copy_runs(source, folder, targets, optimizer="adamw"):
    for kind, precision in targets:
        copy_run(source, f"{folder}/{dist.get_world_size()}-{kind}-{precision}.ckpt", kind, precision, optimizer)


def compare(first, second, keys=TRAINING, only_weights_from=None):
    one, two = read(first), read(second)
    for values in (one, two):  # what a run that begins notes for itself
        for loop in values["loops"].values():
            loop.pop("state_dict", None)
        values["loops"] = values["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]
    return [line for key in keys for line in same(one[key], two[key], key)]


SAVERS = [(3, 2, "32-true"), (1, 3, "bf16-mixed"), (0, 1, "16-mixed"), ("ddp", 2, "32-true"), (2, 2, "16-mixed")]
LOADERS = {
    1: [(0, "32-true"), (3, "bf16-mixed"), ("single", "32-true")],
    2: [(2, "32-true"), (3, "32-true"), (1, "16-mixed"), (0, "bf16-mixed"), ("ddp", "32-true")],
    3: [(1, "32-true"), (3, "16-mixed")],
}


@pytest.mark.parametrize(("stage", "world", "precision"), SAVERS, ids=str)
def test_what_one_run_saves_every_other_run_holds_bit_for_bit(tmp_path, stage, world, precision):
    source = tmp_path / "source.ckpt"
    run_ranks(save_run, world, str(source), stage, precision)
    for size, targets in LOADERS.items():
        run_ranks(copy_runs, size, str(source), str(tmp_path), targets)
        for kind, other in targets:
            assert compare(source, tmp_path / f"{size}-{kind}-{other}.ckpt") == [], (size, kind, other)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_cell_of_the_matrix_is_loaded_by_every_other(tmp_path, stage, world, precision):
    source = tmp_path / "source.ckpt"
    run_ranks(save_run, world, str(source), stage, precision)
    targets = [(s, p) for s in (0, 1, 2, 3) for p in ("32-true", "bf16-mixed", "16-mixed")] + [("ddp", "32-true")]
    for size in (1, 2, 3):
        run_ranks(copy_runs, size, str(source), str(tmp_path), targets, timeout=100)
        for kind, other in targets:
            assert compare(source, tmp_path / f"{size}-{kind}-{other}.ckpt") == [], (size, kind, other)


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd", "plain-sgd", "odd"])
def test_optimizer_states_of_every_kind_survive_a_change_of_stage_and_world_size(tmp_path, optimizer):
    source = tmp_path / "source.ckpt"
    run_ranks(save_run, 2, str(source), 3, "32-true", optimizer)
    if optimizer == "odd":
        state = next(iter(read(source)["optimizer_states"][0]["state"].values()))
        assert (state["count"], state["nothing"], state["kind"], state["history"]) == (3, None, "odd", [1, 2])
    run_ranks(copy_runs, 3, str(source), str(tmp_path), [(1, "32-true")], optimizer)
    assert compare(source, tmp_path / "3-1-32-true.ckpt") == []
    others = [(0, "bf16-mixed")] + [("ddp", "32-true")] * (optimizer != "odd")  # torch itself mangles a str
    run_ranks(copy_runs, 2, str(source), str(tmp_path), others, optimizer)
    for kind, precision in others:
        assert compare(source, tmp_path / f"2-{kind}-{precision}.ckpt") == []


def loss_scale_after_resume(source, kind):
    seen = AtTrainStart(
        lambda run, _: (run.strategy.loss_scale, run.strategy.precision_plugin.loss_scaler.state_dict())
    )
    run = trainer(kind, "16-mixed", steps=4, callbacks=[seen])
    run.fit(Model(seed=2), loader(), ckpt_path=source)
    return seen.result


def test_the_loss_scale_goes_on_at_another_stage_and_world_size(tmp_path):
    source = str(tmp_path / "source.ckpt")
    (scale, *_) = run_ranks(save_run, 2, source, 2, "16-mixed")
    saved = read(source)["ZeroPrecision"]
    for stage, world in [(3, 1), (0, 3)]:
        for found, state in run_ranks(loss_scale_after_resume, world, source, stage):
            assert found == scale
            assert state == saved


# Unbroken and resumed -----------------------------------------------------------------------------------------------


def unbroken_and_resumed(folder, stage, precision, form="full"):
    def train(epochs, source=None, seed=1):
        model = Model(seed=seed)
        options = {"max_epochs": epochs, "limit_train_batches": 3, "accumulate_grad_batches": 2}
        options["zero"] = {"checkpoint": form}
        run = trainer(stage, precision, steps=-1, gradient_clip_val=0.5, **options)
        run.fit(model, loader(1), ckpt_path=source)
        return run, model

    path = f"{folder}/{stage}-{precision}.ckpt"
    run, model = train(4)
    expected, losses = full_weights(model), model.losses
    half, model = train(2)
    half.save_checkpoint(path)
    run, model = train(4, path, seed=2)
    assert model.losses == losses[6:], "the losses differ"
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == run.global_step == 8
    return same(expected, full_weights(model))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_an_interrupted_run_ends_as_the_unbroken_one_bit_for_bit(tmp_path, precision):
    for stage in (0, 1, 2, 3):
        found = run_ranks(unbroken_and_resumed, 2, str(tmp_path), stage, precision)
        assert found == [[], []], stage


# What is in a file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_file_holds_every_key_of_the_plain_module_in_its_shape(tmp_path, stage):
    path = tmp_path / "a.ckpt"
    run_ranks(save_run, 2, str(path), stage, "bf16-mixed")
    saved, plain = read(path)["state_dict"], Model().state_dict()
    assert list(saved) == list(plain)
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in plain.items()}
    assert {k: v.dtype for k, v in saved.items()} == {k: v.dtype for k, v in plain.items()}
    assert {"head.weight", "embedding.weight", "seen", "mean_loss.mean_value", "unused.weight"} <= set(saved)
    assert torch.equal(saved["frozen.weight"], plain["frozen.weight"])
    assert torch.equal(saved["seen"], torch.full((3,), 3.0))
    # Tied tensors share their memory in the file as they do in the module.
    assert saved["head.weight"].data_ptr() == saved["embedding.weight"].data_ptr()


def perturb_and_save(path, stage):
    model = Model()
    with torch.no_grad():
        model.frozen.weight.fill_(0.25)
    run = trainer(stage)
    run.fit(model, loader())
    run.save_checkpoint(path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_weights_are_restored(tmp_path, stage):
    path = str(tmp_path / "a.ckpt")
    run_ranks(perturb_and_save, 2, path, stage)
    restored = Model.load_from_checkpoint(path, seed=9)
    assert torch.equal(restored.frozen.weight, torch.full((WIDTH, WIDTH), 0.25))
    assert restored.head.weight is restored.embedding.weight
    assert same(dict(restored.state_dict()), read(path)["state_dict"]) == []


class TwoTies(Model):
    """Two pairs of tied weights, one of them frozen."""

    def __init__(self, seed=1):
        super().__init__(seed=seed)
        self.twin = self.frozen

    def forward(self, tokens):
        return super().forward(tokens) + self.twin(self.gain).sum()


def save_ties(folder, stage, precision):
    run = trainer(stage, precision)
    run.fit(TwoTies(), loader())
    for _ in range(2):  # into new folders, and over what is there
        run.save_checkpoint(f"{folder}/some/new/folder/a.ckpt")


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16-mixed"), (3, "32-true"), (3, "bf16-mixed")])
def test_every_name_of_a_tied_weight_is_saved_frozen_or_not(tmp_path, stage, precision):
    run_ranks(save_ties, 2, str(tmp_path), stage, precision)
    saved = read(tmp_path / "some" / "new" / "folder" / "a.ckpt")["state_dict"]
    assert {"twin.weight", "frozen.weight", "head.weight", "embedding.weight"} <= set(saved)
    fresh = TwoTies(seed=2)
    fresh.load_state_dict(saved, strict=True)
    assert fresh.twin.weight is fresh.frozen.weight
    assert same(dict(saved), dict(fresh.state_dict())) == []


class WithConfig(Model):
    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(seed=cfg.seed)
        self.save_hyperparameters("cfg")


def resume_with_omegaconf(path):
    cfg = OmegaConf.create({"seed": 1, "nested": {"rate": 0.5, "names": ["a", "b"]}})
    first = trainer(3)
    first.fit(WithConfig(cfg), loader())
    first.save_checkpoint(path)
    run = trainer(2, steps=3)
    run.fit(WithConfig(cfg), loader(), ckpt_path=path)
    assert run.global_step == 3


def test_hyper_parameters_from_hydra_resume_without_further_ado(tmp_path):
    path = str(tmp_path / "a.ckpt")
    run_ranks(resume_with_omegaconf, 2, path)
    values = ZeroCheckpointIO().load_checkpoint(path)
    assert values["hyper_parameters"]["cfg"]["nested"]["names"] == ["a", "b"]


def two_optimizers(folder, first, second, form):
    class Two(Model):
        def __init__(self, seed=1):
            super().__init__(seed=seed)
            self.automatic_optimization = False

        def configure_optimizers(self):
            body, rest = list(self.blocks.parameters()), [self.gain, self.embedding.weight]
            return [torch.optim.Adam(body, lr=0.01), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

        def training_step(self, tokens, index):
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(self.loss(tokens))
            for optimizer in optimizers:
                optimizer.step()

    run = trainer(first, steps=4, zero={"checkpoint": form} if first != "ddp" else {})
    run.fit(Two(), loader())
    run.save_checkpoint(f"{folder}/two.ckpt")
    copy = AtTrainStart(lambda run, _: run.save_checkpoint(f"{folder}/copy.ckpt"))
    trainer(second, steps=6, callbacks=[copy]).fit(Two(seed=2), loader(), ckpt_path=f"{folder}/two.ckpt")


@pytest.mark.parametrize(("first", "second", "form"), [(3, 1, "sharded"), ("ddp", 3, "full"), (2, "ddp", "full")])
def test_several_optimizers_keep_their_own_states(tmp_path, first, second, form):
    run_ranks(two_optimizers, 2, str(tmp_path), first, second, form)
    one = load(tmp_path / "two.ckpt", ZeroCheckpointIO().load_checkpoint, print)
    two = read(tmp_path / "copy.ckpt")
    assert len(one["optimizer_states"]) == 2
    assert same(one["optimizer_states"], two["optimizer_states"]) == []
    assert same(one["state_dict"], two["state_dict"]) == []


def step_after_loading_weights(path, stage, precision):
    """Weights alone are loaded into a live engine; steps with a learning rate of 0 must keep them."""
    saved = read(path)["state_dict"]

    class Loads(Model):
        def on_train_start(self):
            self.trainer.strategy.load_model_state_dict({"state_dict": saved}, strict=True)
            for group in self.optimizers().param_groups:
                group["lr"] = 0.0

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1.0)

    model = Loads(seed=3)
    trainer(stage, precision, steps=2).fit(model, loader())
    values = full_weights(model)
    return same({k: saved[k] for k in values}, values)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_weights_loaded_without_optimizer_state_survive_the_next_steps(tmp_path, precision):
    path = str(tmp_path / "a.ckpt")
    run_ranks(save_run, 2, path, 2)
    for stage in (0, 1, 2, 3):
        assert run_ranks(step_after_loading_weights, 2, path, stage, precision) == [[], []], stage


def save_without_frozen(path, stage):
    run = trainer(stage, zero={"exclude_frozen": True})
    run.fit(Model(), loader())
    run.save_checkpoint(path)
    run = trainer(stage, zero={"exclude_frozen": True}, steps=3)
    model = Model(seed=2)
    fresh = model.frozen.weight.detach().clone()
    start = AtTrainStart(lambda _, model: full_weights(model))
    run.callbacks.append(start)
    run.fit(model, loader(), ckpt_path=path)
    assert torch.equal(start.result["frozen.weight"], fresh)
    return start.result


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_may_be_left_out_and_only_they_may_be_missing(tmp_path, stage):
    path = tmp_path / "a.ckpt"
    start, *_ = run_ranks(save_without_frozen, 2, str(path), stage)
    saved = read(path)["state_dict"]
    left_out = {"frozen.weight", "frozen.bias"}
    assert set(Model().state_dict()) - set(saved) == left_out
    assert {"seen", "mean_loss.mean_value", "unused.weight"} <= set(saved)
    assert all(torch.equal(start[name], saved[name]) for name in start.keys() - left_out)


# What does not fit --------------------------------------------------------------------------------------------------


def load_misfits(path, stage):
    saved = read(path)

    class Checks(Model):
        def on_train_start(self):
            strategy, before = self.trainer.strategy, full_weights(self)
            weights = saved["state_dict"]
            missing = {k: v + 1 for k, v in weights.items() if k != "gain"}
            surplus = {**{k: v + 1 for k, v in weights.items()}, "ghost.weight": torch.zeros(2)}
            misshapen = {k: v + 1 for k, v in weights.items()} | {"unused.weight": torch.zeros(5, 4)}
            for values, words in [
                (missing, ("gain", "missing")),
                (surplus, ("ghost.weight",)),
                (misshapen, ("unused.weight", "(5, 4)", "(5, 3)")),
            ]:
                with pytest.raises(CheckpointError) as failure:
                    strategy.load_model_state_dict({"state_dict": values}, strict=True)
                assert all(word in str(failure.value) for word in words)
            assert same(before, full_weights(self)) == [], "a refused state changed weights"
            states = saved["optimizer_states"]
            before = strategy.optimizer_state(self.optimizers())
            for wrong in ([*states, *states], [{"state": {}, "param_groups": [{"params": [0], "lr": 5.0}]}]):
                with pytest.raises(CheckpointError, match=r"optimizer"):
                    strategy.load_optimizer_state_dict({"optimizer_states": wrong})
            assert same(before, strategy.optimizer_state(self.optimizers())) == []

    trainer(stage, steps=1).fit(Checks(seed=2), loader())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(tmp_path, stage):
    path = str(tmp_path / "a.ckpt")
    run_ranks(save_run, 2, path, 2)
    run_ranks(load_misfits, 2, path, stage)


def resume_from(path, stage=3):
    with pytest.raises(CheckpointError) as failure:
        trainer(stage).fit(Model(), loader(), ckpt_path=path)
    return str(failure.value)


def make_wrong_paths(folder: Path) -> dict[str, tuple[str, ...]]:
    """Paths that are no checkpoint, and words of the message for each."""
    good = (folder / "good.ckpt").read_bytes()
    (folder / "cut.ckpt").write_bytes(good[: len(good) // 2])
    (folder / "empty.ckpt").write_bytes(b"")
    (folder / "plain").mkdir()
    (folder / "plain" / "last.ckpt").write_bytes(good)
    speed = folder / "speed"
    speed.mkdir()
    (speed / "zero_to_fp32.py").write_text("")
    (speed / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(good)
    sharded = folder / "sharded"
    sharded.mkdir()
    for name in (".metadata", "__0_0.distcp", "meta.pt"):
        (sharded / name).write_bytes(b"x")
    bare = folder / "bare.pt"
    torch.save({"weight": torch.zeros(2)}, bare)
    torch.save([torch.zeros(2)], folder / "list.pt")
    return {
        "cut.ckpt": ("cut.ckpt", "truncated"),
        "empty.ckpt": ("empty.ckpt", "0 bytes"),
        "absent.ckpt": ("absent.ckpt", "does not exist"),
        "plain": ("directory", "last.ckpt"),
        "speed": ("speed has no mp_rank_00_model_states.pt",),
        "speed/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": ("DeepSpeed",),
        "sharded": ("sharded/.metadata", "truncated"),
        "sharded/__0_0.distcp": ("part of a sharded", "sharded."),
        "sharded/.metadata": ("part of a sharded",),
        "bare.pt": ("gain: missing in the checkpoint",),
        "list.pt": ("list.pt", "state_dict"),
    }


def resume_from_all(folder, names):
    return [resume_from(f"{folder}/{name}") for name in names]


def test_a_wrong_path_is_the_same_clear_error_on_every_rank(tmp_path):
    run_ranks(save_run, 2, str(tmp_path / "good.ckpt"), 1)
    paths = make_wrong_paths(tmp_path)
    first, second = run_ranks(resume_from_all, 2, str(tmp_path), list(paths))
    assert first == second
    for message, words in zip(first, paths.values(), strict=True):
        assert all(word in message for word in words), message


def resume_where_one_rank_lacks_the_file(path):
    """Each rank has a disk of its own; the file has not arrived on rank 1's."""
    mine = path if dist.get_rank() == 0 else f"{path}.absent"
    start = time.monotonic()
    with pytest.raises((CheckpointError, TopologyError)) as failure:
        trainer(3, steps=4).fit(Model(), loader(), ckpt_path=mine)
    return str(failure.value), time.monotonic() - start


def test_a_file_that_one_rank_lacks_is_an_error_on_all(tmp_path):
    path = str(tmp_path / "a.ckpt")
    run_ranks(save_run, 2, path, 1)
    results = run_ranks(resume_where_one_rank_lacks_the_file, 2, path, timeout=40)
    assert all("absent" in message for message, _ in results)
    assert max(seconds for _, seconds in results) < 20


def empty_path(stage):
    run = trainer(stage)
    run.fit(Model(), loader())
    for path in ("", None):
        with pytest.raises((CheckpointError, ValueError)):
            run.save_checkpoint(path)


def test_an_empty_path_is_an_error_on_every_rank():
    run_ranks(empty_path, 2, 3)


# Saving that fails --------------------------------------------------------------------------------------------------


def save_on_rank_zero_only(path, stage):
    agreement.RENDEZVOUS_SECONDS = 2.0
    run = trainer(stage)
    run.fit(Model(), loader())
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(TopologyError, match=r"save_checkpoint"):
            run.save_checkpoint(path)
        assert time.monotonic() - start < 20
    else:
        time.sleep(3)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_saving_on_rank_zero_alone_ends_in_an_error_that_says_what_to_do(tmp_path, stage):
    assert agreement.RENDEZVOUS_SECONDS < 20
    for outcome in fresh_ranks(save_on_rank_zero_only, 2, str(tmp_path / "a.ckpt"), stage, timeout=40):
        assert not outcome.error, outcome.error
    assert not list(tmp_path.iterdir())


def save_on_a_full_disk(path):
    run = trainer(3)
    model = Model()
    run.fit(model, loader())
    run.save_checkpoint(path)
    before = Path(path).read_bytes() if dist.get_rank() == 0 else b""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written"):
            run.save_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if dist.get_rank() == 0:
        assert Path(path).read_bytes() == before
        assert os.listdir(Path(path).parent) == [Path(path).name], "something was left behind"
    dist.barrier()
    run.save_checkpoint(path)  # once there is space again


def test_a_full_disk_is_an_error_on_every_rank_and_keeps_the_last_file(tmp_path):
    for outcome in fresh_ranks(save_on_a_full_disk, 2, str(tmp_path / "a.ckpt")):
        assert not outcome.error, outcome.error
    read(tmp_path / "a.ckpt")


def die_while_writing(path, size):
    real = os.fsync

    def fsync(descriptor):
        real(descriptor)
        os.kill(os.getpid(), signal.SIGKILL)  # all bytes are in the partial file, none is in place

    os.fsync = fsync
    ZeroCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(size)}}, path)


def test_a_process_killed_while_writing_leaves_no_file_that_loads(tmp_path):
    path = tmp_path / "a.ckpt"
    (outcome,) = fresh_ranks(die_while_writing, 1, str(path), 1000)
    assert outcome.exitcode == -signal.SIGKILL
    assert not path.exists()
    assert [p for p in tmp_path.glob("*.ckpt") if not p.name.startswith(".")] == []
    ZeroCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(3)}}, path)
    (outcome,) = fresh_ranks(die_while_writing, 1, str(path), 1000)
    assert torch.equal(read(path)["state_dict"]["w"], torch.zeros(3))


# ModelCheckpoint and plugins ----------------------------------------------------------------------------------------


def keep_the_best(folder, stage, save_last):
    keep = ModelCheckpoint(folder, filename="{step}", monitor="val_loss", save_top_k=2, save_last=save_last)
    run = trainer(stage, steps=-1, max_epochs=4, limit_train_batches=2, callbacks=[keep], enable_checkpointing=True)
    model = Model()
    run.fit(model, loader(), loader(seed=6))
    best = run.test(model, loader(seed=7), ckpt_path="best", verbose=False)
    again = trainer(stage, steps=9, callbacks=[])
    again.fit(Model(seed=2), loader(), ckpt_path=f"{folder}/last.ckpt")
    assert again.global_step == 9
    return keep.best_model_path, best


@pytest.mark.parametrize(("stage", "save_last"), [(1, True), (3, "link"), (3, True)])
def test_only_the_best_files_and_the_last_one_are_kept(tmp_path, stage, save_last):
    (best, metrics), other = run_ranks(keep_the_best, 2, str(tmp_path), stage, save_last)
    assert other == (best, metrics)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 4
    assert {"last.ckpt", "latest"} <= set(files)
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
    plain = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    expected = plain.test(Model.load_from_checkpoint(best), loader(seed=7), verbose=False)
    assert metrics[0]["test_loss"] == pytest.approx(expected[0]["test_loss"], rel=1e-6)


def save_asynchronously(folder, stage, reference):
    writer = AsyncCheckpointIO()
    strategy = strategy_of(stage)
    run = trainer(strategy, steps=2, plugins=[writer], enable_checkpointing=True)
    saved = []

    class Saves(Model):
        def on_train_batch_end(self, outputs, batch, index):
            if index == 0:
                values = full_weights(self)
                self.trainer.save_checkpoint(f"{folder}/first.ckpt")
                saved.append(values)

    run.fit(Saves(), loader())
    dist.barrier()
    weights = read(f"{folder}/first.ckpt")["state_dict"]
    return same(saved[0], {name: weights[name] for name in saved[0]})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_written_in_the_background_holds_the_values_of_its_moment(tmp_path, stage):
    assert run_ranks(save_asynchronously, 2, str(tmp_path), stage, None) == [[], []]


# The module's own state_dict ----------------------------------------------------------------------------------------


class Adapters(Model):
    """Saves what it trains, under names of its own."""

    def state_dict(self, *args, **kwargs):
        return {f"net.{k}": v for k, v in super().state_dict(*args, **kwargs).items() if not k.startswith("frozen")}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict({k.removeprefix("net."): v for k, v in state_dict.items()}, strict=False)


def save_adapters(path, stage):
    model = Adapters()
    run = trainer(stage)
    run.fit(model, loader())
    run.save_checkpoint(path)
    restored = Adapters(seed=2)
    start = AtTrainStart(lambda _, model: full_weights(model))
    trainer(3 - stage, steps=3, callbacks=[start]).fit(restored, loader(), ckpt_path=path)
    expected = full_weights(model)
    return {k: v for k, v in expected.items() if "frozen" not in k}, start.result


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_may_save_and_load_its_own_way(tmp_path, stage):
    path = tmp_path / "a.ckpt"
    for expected, found in run_ranks(save_adapters, 2, str(path), stage):
        assert same(expected, {name: found[name] for name in expected}) == []
    names = set(read(path)["state_dict"])
    assert names == {f"net.{name}" for name in Model().state_dict() if not name.startswith("frozen")}


def state_dict_everywhere(path, stage, precision):
    model = Model()
    run = trainer(stage, precision)
    run.fit(model, loader())
    run.save_checkpoint(path)
    direct = {name: value.clone() for name, value in model.state_dict().items()}
    part = {name: value.clone() for name, value in model.blocks.state_dict().items()}
    with dsl.gathered(model):
        inside = {name: value.clone() for name, value in model.state_dict().items()} if dist.get_rank() else direct
    saved = read(path)["state_dict"]
    direct.update({name: value for name, value in saved.items() if name.startswith("mean_loss")})  # each rank's own
    blocks = {k.removeprefix("blocks."): v for k, v in saved.items() if k.startswith("blocks.")}
    return same(saved, direct), same(blocks, part), {name: value.shape for name, value in inside.items()}


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "bf16-mixed"), (1, "bf16-mixed"), (3, "32-true"), (3, "bf16-mixed")]
)
def test_state_dict_called_on_every_rank_is_full_on_every_rank(tmp_path, stage, precision):
    for whole, part, shapes in run_ranks(state_dict_everywhere, 2, str(tmp_path / "a.ckpt"), stage, precision):
        assert part == []
        assert whole == []
        assert shapes == {name: value.shape for name, value in Model().state_dict().items()}


def state_dict_on_one_rank():
    agreement.RENDEZVOUS_SECONDS = 1.0
    model = Model()
    trainer(3).fit(model, loader())
    if dist.get_rank() == 0:
        with pytest.raises(TopologyError, match=r"state_dict.*every rank"):
            model.state_dict()
    else:
        time.sleep(2)


def test_state_dict_on_one_rank_is_a_clear_error():
    for outcome in fresh_ranks(state_dict_on_one_rank, 2, timeout=30):
        assert not outcome.error, outcome.error


# Restoring into a live run ------------------------------------------------------------------------------------------


def train_with_a_search(folder, stage, precision):
    """Lightning's search for a learning rate saves the run, trains it astray, and restores it."""
    weights = []
    for searches in (True, False):
        search = LearningRateFinder(num_training_steps=3, early_stop_threshold=None, update_attr=False)
        model = Model()
        run = trainer(stage, precision, callbacks=[search] if searches else [], default_root_dir=folder)
        run.fit(model, loader())
        weights.append(full_weights(model))
    return same(*weights)


@pytest.mark.parametrize(("stage", "precision"), [(0, "32-true"), (2, "bf16-mixed"), (3, "bf16-mixed"), (3, "32-true")])
def test_a_search_for_the_learning_rate_leaves_no_trace(tmp_path, stage, precision):
    assert run_ranks(train_with_a_search, 2, str(tmp_path), stage, precision) == [[], []]
    assert not list(tmp_path.rglob("*.ckpt"))


def restore_while_training(folder, stage):
    path = f"{folder}/{stage}.ckpt"

    class Restores(Model):
        def on_train_batch_start(self, batch, index):
            if index == 1:
                self.trainer.save_checkpoint(path)
            if index == 3:
                connector = self.trainer._checkpoint_connector
                connector.resume_start(path)
                connector.restore_model()
                connector.restore_optimizers_and_schedulers()
                connector.resume_end()

    model, plain = Restores(), Model()
    trainer(stage, "bf16-mixed", steps=4).fit(model, loader())
    batches = [batch for place, batch in enumerate(loader()) if place in (0, 3)]
    trainer(stage, "bf16-mixed", steps=2).fit(plain, DataLoader(batches, batch_size=None))
    return same(full_weights(plain), full_weights(model))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_restored_in_the_middle_of_a_run_is_where_it_goes_on(tmp_path, stage):
    assert run_ranks(restore_while_training, 2, str(tmp_path), stage) == [[], []]


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze([pl_module.blocks, pl_module.frozen])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks, optimizer, lr=0.02)
        if epoch > 1:  # Lightning restores the groups after a restart, not what is trainable
            self.make_trainable(pl_module.blocks)


class Finetuned(Model):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def finetune(folder, kind, epochs, source=None, seed=1, precision="32-true"):
    model = Finetuned(seed=seed)
    run = trainer(kind, precision, steps=-1, max_epochs=epochs, limit_train_batches=2, callbacks=[Unfreeze()])
    # DDP never reduces what was frozen when it wrapped the module, so one device is what to compare with.
    run.fit(model, loader(4 if kind == "single" else 2), ckpt_path=source)
    return run, full_weights(model)


def finetune_and_resume(folder, kind, precision="32-true"):
    _, expected = finetune(folder, kind, 4, precision=precision)
    run, _ = finetune(folder, kind, 3, precision=precision)
    run.save_checkpoint(f"{folder}/{kind}.ckpt")
    _, found = finetune(folder, kind, 4, f"{folder}/{kind}.ckpt", seed=2, precision=precision)
    return expected, same(expected, found)


def test_a_run_resumes_after_a_finetuning_callback_has_unfrozen_layers(tmp_path):
    ((expected, differences),) = run_ranks(finetune_and_resume, 1, str(tmp_path), "single")
    assert differences == []
    for stage in (0, 2, 3):
        for weights, differences in run_ranks(finetune_and_resume, 2, str(tmp_path), stage):
            assert differences == [], stage
            assert close(expected, weights) < 1e-6


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_resumed_layers_that_had_been_unfrozen_have_their_fp32_masters_back(tmp_path, stage):
    for _, differences in run_ranks(finetune_and_resume, 2, str(tmp_path), stage, "bf16-mixed"):
        assert differences == []


class Thaw(Callback):
    """Blocks are in the optimizer from the beginning, and need gradients from the second epoch on."""

    def setup(self, trainer, pl_module, stage):
        pl_module.blocks.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.blocks.requires_grad_(trainer.current_epoch >= 1)


class InGroups(Model):
    def configure_optimizers(self):
        return make_optimizer(self.hparams["optimizer"], list(self.parameters()), 0.01)


def thaw_and_resume(folder, stage, optimizer):
    def train(epochs, source=None, seed=1):
        model = InGroups(optimizer, seed=seed)
        run = trainer(stage, "bf16-mixed", steps=-1, max_epochs=epochs, limit_train_batches=2, callbacks=[Thaw()])
        run.fit(model, loader(), ckpt_path=source)
        return run, full_weights(model)

    _, expected = train(3)
    run, _ = train(2)
    run.save_checkpoint(f"{folder}/thawed.ckpt")
    return same(expected, train(3, f"{folder}/thawed.ckpt", seed=2)[1])


@pytest.mark.parametrize("optimizer", ["adamw", "plain-sgd"])  # the second has no states that tell who was trained
@pytest.mark.parametrize("stage", [2, 3])
def test_layers_that_were_unfrozen_in_their_group_are_resumed_bit_for_bit(tmp_path, stage, optimizer):
    assert run_ranks(thaw_and_resume, 2, str(tmp_path), stage, optimizer) == [[], []]


class Compiled(Model):
    def __init__(self, seed=1, compiled=True):
        super().__init__(seed=seed)
        if compiled:
            self.frozen = torch.compile(self.frozen, backend="eager")
            self.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in self.blocks)


def save_compiled(path, kind):
    run = trainer(kind)
    model = Compiled()
    run.fit(model, loader())
    run.save_checkpoint(path)
    run = trainer(kind, steps=3)
    run.fit(Compiled(seed=2), loader(), ckpt_path=path)
    plain = Compiled(seed=3, compiled=False)
    start = AtTrainStart(lambda _, model: full_weights(model))
    trainer(kind, steps=3, callbacks=[start]).fit(plain, loader(), ckpt_path=path)
    saved = read(path)["state_dict"]
    return list(saved), same({name: saved[name] for name in start.result}, start.result)


@pytest.mark.parametrize("stage", [1, 3])
def test_names_of_compiled_parts_are_the_plain_ones(tmp_path, stage):
    for names, differences in run_ranks(save_compiled, 2, str(tmp_path / "a.ckpt"), stage):
        assert names == list(Model().state_dict())
        assert differences == []
