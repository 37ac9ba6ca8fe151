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
BATCH = 8


def learn(kind, steps, **options):
    """Train on two ranks with a learning rate that falls linearly to a tenth; the held-out loss in nats per byte."""
    text, held_out = read_stdlib(max_megabytes=1.0)
    torch.manual_seed(0)
    model = ByteGPT(layers=1, width=32, heads=2, block_size=LENGTH)
    optimizer = getattr(dsl.optim, kind)(model.parameters(), betas=(0.9, 0.99), **options)
    engine = make_engine(model, [optimizer], 0, threshold=100_000)
    top = options["lr"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = top * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps)
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        with engine.passes.step_scope():
            loss = _loss(model, _windows(text, BATCH, generator))
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


QUICK, LONG = 120, 400
CASES = {
    "OneBitAdam": ("Adam", {"lr": 3e-3}),
    # Adam corrects its moments; with a variance that is updated rarely that matters longer.
    "ZeroOneAdam": ("Adam", {"lr": 3e-3, "bias_correction": True}),
    "OneBitLamb": ("OneBitLamb", {"lr": 0.02}),  # against LAMB: a warm-up that does not end
}


def check(kind, steps):
    whole, options = CASES[kind]
    reference = {"freeze_step": steps} if whole == "OneBitLamb" else {}
    wanted = learn(whole, steps, **options, **reference)
    phases = {"freeze_step": steps // 4}
    if kind == "ZeroOneAdam":
        phases = {"var_freeze_step": steps // 2, "var_update_scaler": steps // 4, "local_step_scaler": steps // 8}
        phases["local_step_clipper"] = 4
    found = learn(kind, steps, **phases, **options)
    assert wanted < math.log(256) / 2, "nothing was learnt"
    assert found < 1.02 * wanted, f"{kind}: {found:.4f}, with whole gradients {wanted:.4f}"
    return found, wanted


def test_the_held_out_loss_is_that_of_whole_gradients():
    run_ranks(check, 2, "OneBitAdam", QUICK)


@pytest.mark.full
@pytest.mark.parametrize("kind", CASES)
def test_the_held_out_loss_is_that_of_whole_gradients_in_a_longer_run(kind):
    run_ranks(check, 2, kind, LONG, timeout=300)
