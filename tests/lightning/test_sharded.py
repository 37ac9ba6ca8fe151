"""Sharded folders: written from shards, read by anyone at any stage, world size and precision."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
from ds_lightning.checkpoint.loading import load
from tests.lightning.runs import AtTrainStart, Model, loader, same, trainer
from tests.lightning.test_checkpoints import compare, copy_runs
from tests.pool import run_ranks

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
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    subprocess.run([*command, str(tmp_path / "sharded.ckpt"), "--output_file", str(tmp_path / "one.ckpt")], check=True)
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
