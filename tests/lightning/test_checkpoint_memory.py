"""How much memory saving and loading take: a unit more than the shards, not the model."""

import ctypes
import threading
from importlib import import_module
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.lightning.runs import AtTrainStart, trainer
from tests.pool import fresh_ranks

WIDTH = 1024
LAYERS = 20
MODEL = LAYERS * (WIDTH + 1) * WIDTH * 4  # bytes of fp32 parameters
UNIT = (WIDTH + 1) * WIDTH * 4
SLACK = 12 << 20  # buffers of libraries, and pages that the allocator keeps


class Wide(pl.LightningModule):
    """Built in `configure_model`, layer by layer."""

    def __init__(self):
        super().__init__()
        self.layers = None

    def configure_model(self):
        if self.layers is None:
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def training_step(self, x, index):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Peak:
    """The most anonymous memory while it is open; mapped files are the kernel's to drop."""

    def __enter__(self):
        ctypes.CDLL(None).malloc_trim(0)
        self.before = self.most = anonymous()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        while not self.over.wait(0.001):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    @property
    def grown(self):
        return self.most - self.before


def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def batches():
    return DataLoader(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())), batch_size=2)


def save(folder, form, stage):
    run = trainer(stage, zero={"checkpoint": form})
    run.fit(Wide(), batches())
    for name in ("first", "a"):  # the first imports what saving needs
        with Peak() as peak:
            run.save_checkpoint(f"{folder}/{name}.ckpt")
    return peak.grown


def start(path, stage):
    """Growth until training may begin, and bytes of optimizer states."""
    import_module("ds_lightning.checkpoint.sharded")  # what it imports is no part of the model
    result = []

    def restored(run, model):
        peak.__exit__()
        result.append(peak.grown)
        state = model.optimizers().optimizer.state.values()
        result.append(sum(value.nbytes for entry in state for value in entry.values()))

    run = trainer(stage, steps=3, callbacks=[AtTrainStart(restored)])
    model = Wide()
    peak = Peak().__enter__()
    run.fit(model, batches(), ckpt_path=path)
    return result


@pytest.mark.parametrize(("form", "stage"), [("full", 3), ("full", 1), ("sharded", 3)])
def test_saving_takes_a_unit_and_loading_what_a_rank_owns(tmp_path, form, stage):
    for outcome in fresh_ranks(save, 2, str(tmp_path), form, stage, timeout=120):
        assert outcome.result < 3 * UNIT + SLACK < MODEL / 2, outcome.result / 2**20
    if stage == 3:
        afresh = [outcome.result[0] for outcome in fresh_ranks(start, 2, None, stage, timeout=120)]
        resumed = fresh_ranks(start, 2, str(tmp_path / "a.ckpt"), stage, timeout=120)
        for outcome, alone in zip(resumed, afresh, strict=True):
            grown, states = outcome.result
            assert states == pytest.approx(MODEL, rel=0.01)  # two moments, half of each
            assert grown < alone + states + 3 * UNIT + SLACK, (grown / 2**20, alone / 2**20)
