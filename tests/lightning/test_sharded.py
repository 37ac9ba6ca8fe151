"""Sharded folders: written from shards, read by anyone at any stage, world size and precision."""

import pickle
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ds_lightning as dsl
from ds_lightning.checkpoint import stored
from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
from ds_lightning.checkpoint.loading import load
from ds_lightning.errors import CheckpointError
from tests.lightning.runs import WIDTH, AtTrainStart, Model, full_weights, listening, loader, same, trainer
from tests.lightning.test_checkpoints import compare, copy_runs, unbroken_and_resumed
from tests.pool import run_ranks
from tests.warm import run_python

SHARDED = {"checkpoint": "sharded"}


def read(path):
    return load(Path(path), ZeroCheckpointIO().load_checkpoint, print)


def save_both(folder, stage, precision="32-true", optimizer="adamw", config=None):
    """The same state as one file and as a folder."""
    run = trainer(stage, precision, steps=3, zero={**SHARDED, "config": config})
    run.fit(Model(optimizer), loader())
    run.save_checkpoint(f"{folder}/sharded.ckpt")
    run.strategy._saver.sharded = False
    run.save_checkpoint(f"{folder}/full.ckpt")


CELLS = [(3, 2, "32-true"), (0, 3, "bf16-mixed"), (2, 1, "16-mixed"), (1, 4, "32-true")]
TARGETS = {
    1: [(0, "32-true"), (3, "bf16-mixed"), ("single", "32-true")],
    2: [(3, "32-true"), (1, "16-mixed"), (2, "bf16-mixed"), ("ddp", "32-true")],
    3: [(3, "16-mixed"), (0, "32-true")],
    4: [(2, "32-true")],
}


@pytest.mark.parametrize(("stage", "world", "precision"), CELLS, ids=str)
def test_a_folder_holds_what_a_file_holds_and_loads_everywhere(tmp_path, stage, world, precision):
    run_ranks(save_both, world, str(tmp_path), stage, precision)
    full = torch.load(tmp_path / "full.ckpt", weights_only=True)
    for key, value in read(tmp_path / "sharded.ckpt").items():
        if key != "ds_lightning":
            assert same(_plain(value), full[key], key) == []
    for size, targets in TARGETS.items():
        ours = [target for target in targets if not isinstance(target[0], str)]
        run_ranks(copy_runs, size, str(tmp_path / "sharded.ckpt"), str(tmp_path), ours)
        for kind, other in ours:
            assert compare(tmp_path / "full.ckpt", tmp_path / f"{size}-{kind}-{other}.ckpt") == [], (size, kind, other)


def _plain(item):
    if torch.is_tensor(item):
        return item.clone()
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    return [_plain(value) for value in item] if isinstance(item, list) else item


def test_stock_tools_read_the_weights(tmp_path):
    run_ranks(save_both, 2, str(tmp_path), 3)
    expected = torch.load(tmp_path / "full.ckpt", weights_only=True)["state_dict"]
    dcp_to_torch_save(tmp_path / "sharded.ckpt", tmp_path / "torch.pt")
    assert same(torch.load(tmp_path / "torch.pt", weights_only=True)["model"], dict(expected)) == []
    command = ["-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    done = run_python([*command, "sharded.ckpt", "--output_file", "one.ckpt"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert same(one["state_dict"], dict(expected)) == []
    restored = Model.load_from_checkpoint(tmp_path / "one.ckpt", seed=9)
    assert same(dict(restored.state_dict()), dict(expected)) == []


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd", "plain-sgd", "odd"])
def test_every_kind_of_optimizer_state_is_in_a_folder(tmp_path, optimizer):
    tile = {"zero_optimization": {"sub_group_size": 32, "stage3_param_persistence_threshold": 0}}
    run_ranks(save_both, 2, str(tmp_path), 3, "32-true", optimizer, tile)
    full = torch.load(tmp_path / "full.ckpt", weights_only=True)
    found = _plain(read(tmp_path / "sharded.ckpt")["optimizer_states"])
    assert same(found, full["optimizer_states"]) == []
    run_ranks(copy_runs, 3, str(tmp_path / "sharded.ckpt"), str(tmp_path), [(1, "32-true")], optimizer)
    assert compare(tmp_path / "full.ckpt", tmp_path / "3-1-32-true.ckpt") == []


@pytest.mark.parametrize(("stage", "precision"), [(3, "32-true"), (1, "16-mixed"), (2, "bf16-true")])
def test_a_run_resumed_from_a_folder_ends_as_the_unbroken_one_bit_for_bit(tmp_path, stage, precision):
    assert run_ranks(unbroken_and_resumed, 2, str(tmp_path), stage, precision, "sharded") == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_folder_is_loaded_by_every_run(tmp_path, stage, world, precision):
    run_ranks(save_both, world, str(tmp_path), stage, precision)
    targets = [(s, p) for s in (0, 1, 2, 3) for p in ("32-true", "bf16-mixed", "16-mixed")]
    for size in (1, 2, 3, 4):
        run_ranks(copy_runs, size, str(tmp_path / "sharded.ckpt"), str(tmp_path), targets, timeout=100)
        for kind, other in targets:
            assert compare(tmp_path / "full.ckpt", tmp_path / f"{size}-{kind}-{other}.ckpt") == [], (size, kind, other)


def bytes_read(folder, stage):
    """Of chunks, by this rank, while a run resumes."""
    counted = []
    original = stored.StoredFolder._bytes

    def count(self, index):
        found = original(self, index)
        counted.append(len(found))
        return found

    stored.StoredFolder._bytes = count
    try:
        trainer(stage, steps=4).fit(Model(seed=2), loader(), ckpt_path=f"{folder}/sharded.ckpt")
    finally:
        stored.StoredFolder._bytes = original
    return sum(counted)


def test_a_rank_reads_its_own_shards_where_the_world_size_is_unchanged(tmp_path):
    run_ranks(save_both, 2, str(tmp_path), 3)
    sizes = [(tmp_path / "sharded.ckpt" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    buffers = 30_000  # of the model, which rank 0 writes and every rank needs; every chunk has a header
    for own, read_by in zip(sizes, run_ranks(bytes_read, 2, str(tmp_path), 3), strict=True):
        assert read_by <= own + buffers < sum(sizes), (own, read_by, sizes)


def save_and_load_without_frozen(folder, stage):
    zero = {**SHARDED, "exclude_frozen": True}
    run = trainer(stage, zero=zero)
    run.fit(Model(), loader())
    run.save_checkpoint(f"{folder}/sharded.ckpt")
    model = Model(seed=2)
    fresh = model.frozen.weight.detach().clone()
    start = AtTrainStart(lambda _, model: full_weights(model))
    run = trainer(stage, zero=zero, steps=3, callbacks=[start])
    run.fit(model, loader(), ckpt_path=f"{folder}/sharded.ckpt")
    assert torch.equal(start.result["frozen.weight"], fresh)
    return start.result


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_weights_can_be_left_out_of_a_folder(tmp_path, stage):
    found, _ = run_ranks(save_and_load_without_frozen, 2, str(tmp_path), stage)
    saved = _plain(read(tmp_path / "sharded.ckpt"))["state_dict"]
    plain = Model().state_dict()
    assert set(plain) - set(saved) == {"frozen.weight", "frozen.bias"}
    assert all(torch.equal(saved[name], found[name]) for name in found if name in saved)


# What hooks see and do ----------------------------------------------------------------------------------------------


class Edits(Model):
    """Hooks that look at tensors and change what is saved: on all ranks, on one, by name, by value, in place."""

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        found["twice"] = found["gain"] * 2
        return found

    def on_save_checkpoint(self, checkpoint):
        weights = checkpoint["state_dict"]
        assert {name: tuple(value.shape) for name, value in weights.items() if name != "twice"} == {
            name: tuple(value.shape) for name, value in Model().state_dict().items()
        }
        weights["renamed"] = weights.pop("unused.weight")
        weights["blocks.0.up.bias"] += 1  # in place, on every rank
        if self.global_rank == 0:
            checkpoint["norms"] = {name: float(value.norm()) for name, value in list(weights.items())[:3]}
            weights["blocks.1.up.bias"].mul_(3)
            checkpoint["copies"] = [weights["head.bias"]]
        else:
            weights["blocks.2.up.bias"].zero_()  # not rank 0's, so it is not saved
        state = checkpoint["optimizer_states"][0]["state"]
        first = next(iter(state))
        state[first]["exp_avg"].fill_(0.5)

    def on_load_checkpoint(self, checkpoint):
        weights = checkpoint["state_dict"]
        weights["unused.weight"] = weights.pop("renamed")
        weights.pop("twice")
        weights["blocks.0.up.bias"] = weights["blocks.0.up.bias"] - 1


def save_edited(folder, form, stage):
    run = trainer(stage, steps=3, zero={"checkpoint": form} if stage != "ddp" else {})
    run.fit(Edits(), loader())
    run.save_checkpoint(f"{folder}/{stage}-{form}.ckpt")


def load_edited(path, stage, out):
    copy = AtTrainStart(lambda run, _: run.save_checkpoint(out))
    trainer(stage, steps=4, callbacks=[copy]).fit(Edits(seed=2), loader(), ckpt_path=path)


@pytest.mark.parametrize(("form", "stage"), [("full", 3), ("sharded", 3), ("sharded", 1)])
def test_hooks_see_and_change_what_they_would_under_ddp(tmp_path, form, stage):
    run_ranks(save_edited, 2, str(tmp_path), form, stage)
    run_ranks(save_edited, 2, str(tmp_path), "full", "ddp")
    path = tmp_path / f"{stage}-{form}.ckpt"
    found, expected = _plain(read(path)), torch.load(tmp_path / "ddp-full.ckpt", weights_only=True)
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        assert torch.allclose(found["state_dict"][name], value, rtol=1e-6, atol=1e-7), name
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    assert torch.equal(found["copies"][0], found["state_dict"]["head.bias"])
    assert torch.equal(found["optimizer_states"][0]["state"][0]["exp_avg"], torch.full((13, 6), 0.5))
    run_ranks(load_edited, 3, str(path), 3, str(tmp_path / "again.ckpt"))
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)["state_dict"]
    assert torch.allclose(again["blocks.0.up.bias"], found["state_dict"]["blocks.0.up.bias"], atol=1e-6)
    assert torch.equal(again["blocks.1.up.bias"], found["state_dict"]["blocks.1.up.bias"] * 3)


# Weights of others --------------------------------------------------------------------------------------------------


def save_with_lightnings_own(folder):
    """What Lightning's FSDP and ModelParallel strategies write: DTensors, one name per parameter, beside `meta.pt`."""
    from torch import distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(4)
    model = Model(seed=4)
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save({"epoch": 3, "global_step": 9, "callbacks": {}}, Path(folder) / "meta.pt")


def take_weights(path, stage):
    run = trainer(stage, steps=1, callbacks=[start := AtTrainStart(lambda _, model: full_weights(model))])
    run.fit(Model(seed=2), loader(), ckpt_path=path)
    assert run.global_step == 1
    return start.result


@pytest.mark.parametrize(("stage", "world"), [(3, 3), (2, 2)])
def test_weights_of_other_strategies_and_bare_files_start_a_run(tmp_path, stage, world):
    expected = {name: value.detach() for name, value in Model(seed=4).named_parameters(remove_duplicate=False)}
    run_ranks(save_with_lightnings_own, 2, str(tmp_path / "fsdp"))
    torch.save(Model(seed=4).state_dict(), tmp_path / "bare.pt")
    for name in ("fsdp", "bare.pt"):
        for found in run_ranks(take_weights, world, str(tmp_path / name), stage):
            assert same(found, expected) == [], name


# Bad folders --------------------------------------------------------------------------------------------------------


class Evil:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("pwned"),)


def test_nothing_in_a_folder_runs_code_or_leads_outside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(save_both, 1, str(tmp_path), 1)
    folder = tmp_path / "sharded.ckpt"
    table = (folder / ".metadata").read_bytes()

    def refused(words):
        with pytest.raises(CheckpointError, match=words):
            _plain(read(folder))
        assert not (tmp_path / "pwned").exists()

    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    refused("safely")
    outside = pickle.loads(table)
    (tmp_path / "other.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    for info in outside.storage_data.values():
        info.relative_path = "../other.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(outside))
    refused("outside")
    (folder / ".metadata").write_bytes(table[: len(table) // 2])
    refused("truncated")
    (folder / ".metadata").write_bytes(table)
    chunks = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(chunks[:-100])
    refused("not complete: __0_0.distcp")
    (folder / "__0_0.distcp").unlink()
    refused("__0_0.distcp is missing")
    (folder / "__0_0.distcp").write_bytes(b"\0" * len(chunks))
    refused("damaged")
    (folder / "__0_0.distcp").write_bytes(chunks)
    meta = (folder / "meta.pt").read_bytes()
    torch.save({"state_dict": {}, "ds_lightning": {"tensors": [(("state_dict", "x"), "model.x")]}}, folder / "meta.pt")
    refused("lacks model.x")
    torch.save(Evil(), folder / "meta.pt")
    refused("not plain data")
    (folder / "meta.pt").write_bytes(meta)
    _plain(read(folder))


def load_misfit(path):
    class Other(Model):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, 4)

    model = Other()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"head\.weight: \(13, 6\) in the checkpoint, \(4, 6\) in the model"):
        trainer(3).fit(model, loader(), ckpt_path=path)
    assert same(dict(model.state_dict()), before) == []

    class Partial(Model):
        def __init__(self):
            super().__init__(seed=2)
            self.strict_loading = False
            self.extra = nn.Linear(2, 2)
            del self.unused

    start = AtTrainStart(lambda _, model: (full_weights(model)["gain"], moments(model)))
    run = trainer(3, steps=4, callbacks=[start])
    with listening() as messages:
        run.fit(Partial(), loader(), ckpt_path=path)
    assert run.global_step == 4
    return "\n".join(messages), *start.result


def moments(model):
    return {
        name: dsl.full_optimizer_state(parameter, "exp_avg")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def load_stranger(path):
    class Stranger(pl.LightningModule):
        def __init__(self, strict):
            super().__init__()
            self.strict_loading = strict
            self.layer = nn.Linear(2, 2)

        training_step = configure_optimizers = None

    class Holder(Stranger):
        def __init__(self, strict):
            super().__init__(strict)
            del self.layer
            self.inner = Model()

    for kind, words in ((Stranger, "no name is in both"), (Holder, "All names fit with 'inner.' in front")):
        for strict in (True, False):
            strategy = trainer(3).strategy
            strategy._lightning_module = kind(strict)
            with pytest.raises(CheckpointError, match=words):
                strategy.load_model_state_dict({"state_dict": read(path)["state_dict"]}, strict)


def test_names_that_do_not_meet_at_all_are_an_error_even_where_little_is_asked(tmp_path):
    run_ranks(save_both, 1, str(tmp_path), 1)
    run_ranks(load_stranger, 1, str(tmp_path / "sharded.ckpt"))


def test_a_folder_of_another_model_changes_nothing_and_a_partial_load_says_what_differs(tmp_path):
    run_ranks(save_both, 2, str(tmp_path), 3)
    saved = torch.load(tmp_path / "full.ckpt", weights_only=True)
    names = saved["ds_lightning"]["optimizer_parameter_names"][0]
    states = saved["optimizer_states"][0]["state"]
    (said, gain, averages), _ = run_ranks(load_misfit, 2, str(tmp_path / "sharded.ckpt"))
    assert torch.equal(gain, saved["state_dict"]["gain"])
    assert "lacks 2 of the names of Partial: extra." in said
    assert "also holds 2 of the names of Partial: unused." in said
    assert "AdamW begins without a state for extra.weight, extra.bias" in said
    for name, value in averages.items():
        known = names.index(name) if name in names else None
        assert value is None if known not in states else torch.equal(value, states[known]["exp_avg"]), name
