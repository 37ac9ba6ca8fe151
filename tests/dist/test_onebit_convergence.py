"""The 1-bit optimizers learn the demo's text about as fast as Adam does with whole gradients."""

import math

import pytest
import torch
import torch.distributed as dist

import ds_lightning as dsl
from ds_lightning.demo.model import ByteGPT
from ds_lightning.demo.text import read_stdlib
from tests.dist.harness import make_engine
from tests.pool import run_ranks

LENGTH = 32


def learn(kind, steps, batch, size, **options):
    """Train on two ranks with a learning rate that falls linearly to a tenth; the held-out loss in nats per byte."""
    text, held_out = read_stdlib(max_megabytes=1.0)
    torch.manual_seed(0)
    model = ByteGPT(**size, block_size=LENGTH)
    optimizer = getattr(dsl.optim, kind)(model.parameters(), betas=(0.9, 0.99), **options)
    engine = make_engine(model, [optimizer], 0, threshold=100_000)
    top = options["lr"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = top * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps)
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        with engine.passes.step_scope():
            loss = _loss(model, _windows(text, batch, generator))
        with engine.passes.backward_scope():
            loss.backward()
        optimizer.step()
    engine.settle()
    with torch.no_grad():
        windows = _windows(held_out, 512, torch.Generator().manual_seed(1))
        return float(_loss(model, windows))


def _windows(text, count, generator):
    starts = torch.randint(0, len(text) - LENGTH - 1, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(LENGTH + 1)].long()


def _loss(model, windows):
    logits = model(windows[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def compare(kind, whole, steps, batch, size, share, options, **extra):
    """Losses of the optimizer and of the one that it approximates."""
    freeze = max(1, int(share * steps))
    if kind == "ZeroOneAdam":
        phases = {
            "var_freeze_step": freeze,
            "var_update_scaler": 8,
            "local_step_scaler": steps // 4,
            "local_step_clipper": 4,
        }
    else:
        phases = {"freeze_step": freeze}
    if whole == "OneBitLamb":
        reference = learn(whole, steps, batch, size, freeze_step=steps, **options)
    else:
        reference = learn(whole, steps, batch, size, **options)
    return learn(kind, steps, batch, size, **phases, **options, **extra), reference


QUICK = {"steps": 120, "batch": 8, "size": {"layers": 1, "width": 32, "heads": 2}}
LONG = {"steps": 600, "batch": 16, "size": {"layers": 2, "width": 64, "heads": 4}}
CASES = [
    ("OneBitAdam", "Adam", 0.25, {"lr": 3e-3}),
    ("ZeroOneAdam", "Adam", 0.5, {"lr": 3e-3}),
    ("OneBitLamb", "OneBitLamb", 0.25, {"lr": 0.02}),
]


def check(case, run):
    kind, whole, share, options = case
    found, wanted = compare(kind, whole, run["steps"], run["batch"], run["size"], share, options)
    assert wanted < math.log(256) * 0.75, "nothing was learnt"
    assert found < 1.02 * wanted, f"{kind}: {found:.4f}, with whole gradients {wanted:.4f}"
    return found, wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_held_out_loss_is_that_of_whole_gradients(case):
    run_ranks(check, 2, case, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_held_out_loss_is_that_of_whole_gradients_in_a_longer_run(case):
    run_ranks(check, 2, case, LONG, timeout=600)
