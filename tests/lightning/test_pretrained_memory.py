"""Loading a large model into one that is built in `configure_model`: a rank holds its shard and a few units."""

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import ds_lightning as dsl
from ds_lightning.checkpoint.sharded import ShardedWrite
from ds_lightning.checkpoint.snapshot import Snapshot
from ds_lightning.topology import Topology
from tests.lightning.runs import SHARD_EVERYTHING, full_weights, trainer
from tests.lightning.test_checkpoint_memory import SLACK, UNIT, WIDTH, Peak
from tests.pool import fresh_ranks, run_ranks
from tests.unit.test_pretrained import index

LAYERS = 32
RANKS = 4
MODEL = LAYERS * UNIT
BOUND = MODEL // RANKS + 3 * UNIT + SLACK


class Wide(pl.LightningModule):
    """Built and filled in `configure_model`, layer by layer."""

    def __init__(self, source, layers=LAYERS, inputs=WIDTH, outputs=WIDTH):
        super().__init__()
        self.source = source
        self.sizes = layers, inputs, outputs
        self.layers = None

    def configure_model(self):
        if self.layers is not None:
            return
        count, inputs, outputs = self.sizes
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for _ in range(count))
        dsl.load_pretrained(self, self.source)

    def training_step(self, x, index):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def values_of(layers, inputs, outputs):
    generator = torch.Generator().manual_seed(3)
    shapes = {"weight": (outputs, inputs), "bias": (outputs,)}
    return {
        f"layers.{i}.{name}": torch.randn(shape, generator=generator)
        for i in range(layers)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One model in all forms."""
    folder = tmp_path_factory.mktemp("wide")
    values = values_of(LAYERS, WIDTH, WIDTH)
    files = {name: f"model-{i // 10}.safetensors" for i, name in enumerate(values)}
    (folder / "shards").mkdir()
    for file in set(files.values()):
        save_file({name: values[name] for name in values if files[name] == file}, folder / "shards" / file)
    index(folder / "shards", files)
    torch.save({"state_dict": values}, folder / "full.ckpt")
    ranks = Topology.single()
    ShardedWrite({"state_dict": values}, folder / "sharded.ckpt", Snapshot(ranks), ranks, lambda: None).run()
    return folder


def start(folder, zero=None):
    """Growth until the model is set up, for each source; the first run imports what runs need."""
    grown = {}
    for name in ("shards", "sharded.ckpt", "full.ckpt", "shards"):
        run = trainer(3, steps=0, zero=zero or {})
        model = Wide(f"{folder}/{name}")
        with Peak() as peak:
            run.fit(model, DataLoader(torch.zeros(4, WIDTH)))
        grown[name] = peak.grown
        last = dsl.full_param(model.layers[LAYERS - 1].weight)
        if dist.get_rank() == dist.get_world_size() - 1:
            expected = load_file(f"{folder}/shards/model-6.safetensors")
            assert torch.equal(last, expected[f"layers.{LAYERS - 1}.weight"])
        del run, model, last
    return grown


def test_a_rank_holds_its_shard_and_a_few_units(sources):
    assert 2 * BOUND < MODEL
    for outcome in fresh_ranks(start, RANKS, str(sources), timeout=120):
        assert outcome.result is not None, outcome.error
        for name in ("sharded.ckpt", "full.ckpt", "shards"):
            assert outcome.result[name] < BOUND, (name, outcome.result[name] / 2**20)


def test_with_offload_to_disk_one_rank_holds_a_few_units_of_the_whole_model(sources, tmp_path):
    """Built on the disk, filled there, and laid out from there: a model may be larger than memory."""
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    blocks = {"offload_optimizer": offload, "offload_param": {**offload, "max_in_cpu": 0}}
    zero = {"config": {"zero_optimization": {**SHARD_EVERYTHING["zero_optimization"], **blocks}}}
    [outcome] = fresh_ranks(start, 1, str(sources), zero, timeout=120)
    assert outcome.result is not None, outcome.error
    grown = {name: outcome.result[name] for name in ("sharded.ckpt", "full.ckpt", "shards")}
    assert max(grown.values()) < MODEL // 8 + SLACK, {name: value / 2**20 for name, value in grown.items()}


def parts(path, sizes):
    model = Wide(path, *sizes)
    trainer(3, steps=0).fit(model, DataLoader(torch.zeros(4, sizes[1])))
    return all(torch.equal(full_weights(model)[name], value) for name, value in load_file(path).items())


@pytest.mark.parametrize("sizes", [(2, 65, 67), (1, 2, 4099)], ids=["odd", "flat"])
def test_parts_that_do_not_divide(tmp_path, sizes):
    path = str(tmp_path / "model.safetensors")
    save_file(values_of(*sizes), path)
    assert run_ranks(parts, 3, path, sizes) == [True] * 3
    assert run_ranks(parts, 1, path, sizes) == [True]
