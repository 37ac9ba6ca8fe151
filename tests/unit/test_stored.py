"""Chunks of large tensors are read where they lie; what does not fit is an error, and without notes all is read."""

import json
import shutil

import pytest
import torch

from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
from ds_lightning.checkpoint.loading import load
from ds_lightning.checkpoint.sharded import ShardedWrite
from ds_lightning.checkpoint.snapshot import Snapshot
from ds_lightning.checkpoint.stored import StoredFolder
from ds_lightning.errors import CheckpointError
from ds_lightning.topology import Topology

LARGE = torch.arange(6000.0).reshape(60, 100)


@pytest.fixture
def folder(tmp_path):
    weights = {"large": LARGE, "half": LARGE.bfloat16(), "small": torch.ones(3), "number": torch.tensor(4)}
    ranks = Topology.single()
    ShardedWrite({"state_dict": weights}, tmp_path / "a.ckpt", Snapshot(ranks), ranks, lambda: None).run()
    return tmp_path / "a.ckpt"


def read(folder):
    return {
        key: value.clone()
        for key, value in load(folder, ZeroCheckpointIO().load_checkpoint, print)["state_dict"].items()
    }


def test_large_values_are_read_where_they_lie(folder, monkeypatch):
    assert set(json.loads((folder / "__0_0.json").read_text())) == {"model.large", "model.half"}
    stored = StoredFolder(folder)
    monkeypatch.setattr(stored, "_chunk", None)  # unpickles a chunk
    assert torch.equal(stored.flat("model.large", 150, 5301), LARGE.reshape(-1)[150:5301])
    assert torch.equal(stored.flat("model.half", 0, 6000), LARGE.bfloat16().reshape(-1))
    found = read(folder)
    assert torch.equal(found["large"], LARGE)
    assert found["number"] == 4


@pytest.mark.parametrize("change", ["cut", "name", "place", "text"])
def test_notes_that_do_not_fit_are_refused_and_none_are_no_loss(folder, change):
    path = folder / "__0_0.json"
    noted = json.loads(path.read_text())
    texts = {
        "cut": path.read_text()[:-7],
        "name": json.dumps({"model.other": noted["model.large"]}),
        "place": json.dumps({"model.large": [[[0, 0], 10**9]]}),
        "text": json.dumps({"model.large": [["a", "b"]]}),
    }
    path.write_text(texts[change])
    with pytest.raises(CheckpointError, match="does not fit the chunks beside it"):
        read(folder)
    path.unlink()
    assert torch.equal(read(folder)["large"], LARGE)


def test_a_folder_can_be_copied(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    assert torch.equal(read(tmp_path / "copy")["large"], LARGE)
