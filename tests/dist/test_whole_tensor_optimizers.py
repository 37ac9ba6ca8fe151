"""LAMB and Muon on shards: the published equations at every stage, the same bits at all of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from tests.dist import models
from tests.dist import reference_optimizers as published
from tests.dist.harness import (
    STAGES,
    Recipe,
    check_against,
    difference,
    forward_backward,
    full_values,
    make_engine,
    same_bits,
    train,
)
from tests.pool import run_ranks

LAMB = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}
MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
ADAM = {"lr": 0.003, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01}


class Awkward(models.Everything):
    """Also a parameter of zeros, one whose gradient is zero, and two without elements."""

    def __init__(self):
        super().__init__()
        self.zeros = nn.Parameter(torch.zeros(models.WIDTH))
        self.still = nn.Parameter(torch.ones(5, 3))
        self.nothing = nn.Parameter(torch.empty(0, 8))
        self.kernel = nn.Conv1d(models.WIDTH, 4, 3, padding=1)

    def forward(self, x):
        h = self.kernel(self.emb(x).mT).mean() * self.zeros.sum() + self.nothing.sum() + 0 * self.still.sum()
        return super().forward(x) + h + 0.1 * self.kernel.weight.square().mean()


def lamb_groups(module):
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], **LAMB},
        {"params": [p for p in parameters if p.ndim == 1], **LAMB, "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for p in parameters if p.ndim == 0], **LAMB, "max_coeff": 1.5, "bias_correction": False},
    ]


def muon_groups(module):
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if p.ndim >= 2 and not n.startswith("emb")]
    return [
        {"params": matrices[::2], "use_muon": True, **MUON},
        {"params": matrices[1::2], "use_muon": True, **MUON, "lr": 0.01, "ns_method": "standard"},
        {"params": [p for n, p in named if p.ndim < 2 or n.startswith("emb")], "use_muon": False, **ADAM},
    ]


def reference(groups):
    for group in groups:
        muon = group.pop("use_muon", None)
        group.pop("ns_method", None)
        group["rule"] = published.lamb if muon is None else published.muon if muon else published.adamw
    return published.Reference(groups)


KINDS = {"Lamb": lamb_groups, "Muon": muon_groups}


def model(kind):
    """`Awkward`, with groups for the optimizer."""
    return type(f"Awkward{kind}", (Awkward,), {"groups": KINDS[kind]})


def ours(kind):
    return getattr(dsl.optim, kind)


def check_published(kind, steps, precision, bound):
    make = model(kind)
    wanted = train(make, "alone", Recipe(steps=steps, optimizer=reference, precision=precision))
    recipe = Recipe(steps=steps, optimizer=ours(kind), precision=precision)
    first, *others = check_against(wanted, make, recipe, bound=bound).values()
    assert all(same_bits(first, other) for other in others), "stages differ"
    return difference(first, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fifty_steps_equal_the_published_equations(kind, world_size):
    run_ranks(check_published, world_size, kind, 50, "fp64", 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_too(kind):
    print(run_ranks(check_published, 2, kind, 10, "fp32", 1e-5))
