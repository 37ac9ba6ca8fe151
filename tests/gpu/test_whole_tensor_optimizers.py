"""LAMB and Muon on the device against the published equations in fp64."""

import pytest
import torch
from torch import nn

import ds_lightning as dsl
from tests.dist import reference_optimizers as published
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu

SHAPES = [(64, 200), (200, 64), (128, 128), (16, 3, 3, 3), (33,), ()]
LAMB = {"lr": 0.01, "weight_decay": 0.1}
MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
ADAM = {"lr": 0.01, "weight_decay": 0.1}


def far(make, groups_of_reference, steps=10):
    """The largest distance of a parameter from the reference's, relative to its norm."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    ours = [nn.Parameter(value.to(DEVICE)) for value in values]
    theirs = [nn.Parameter(value.double()) for value in values]
    optimizer, reference = make(ours), published.Reference(groups_of_reference(theirs))
    for _ in range(steps):
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.randn(p.shape, generator=generator).double()
            p.grad = q.grad.float().to(DEVICE)
        optimizer.step()
        reference.step()
    pairs = [(p.detach().cpu().double(), q.detach()) for p, q in zip(ours, theirs, strict=True)]
    return max(float((p - q).norm() / q.norm()) for p, q in pairs)


def test_lamb():
    def reference(theirs):
        return [{"params": theirs, "rule": published.lamb, **LAMB}]

    assert far(lambda ours: dsl.optim.Lamb(ours, **LAMB), reference) < 1e-5


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize(("ns_dtype", "bound"), [("fp32", 1e-5), ("auto", 1e-2)])
def test_muon(method, ns_dtype, bound):
    def make(ours):
        groups = [
            {"params": ours[:4], "use_muon": True, **MUON, "ns_method": method, "ns_dtype": ns_dtype},
            {"params": ours[4:], "use_muon": False, **ADAM},
        ]
        return dsl.optim.Muon(groups)

    def reference(theirs):
        return [
            {"params": theirs[:4], "rule": published.muon, **MUON},
            {"params": theirs[4:], "rule": published.adamw, **ADAM},
        ]

    assert far(make, reference) < bound
