"""Muon in a plain loop: its iterations, which parameters it takes, and what it refuses."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from ds_lightning.optim.from_config import build_optimizer
from ds_lightning.optim.newton_schulz import orthogonalize
from ds_lightning.optim.parts import balanced
from tests.dist import reference_optimizers as published


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (5, 9), (9, 5), (7, 7), (64, 200)], ids=str)
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_both_methods_compute_the_iteration(method, shape):
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    scaled = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    wanted = torch.stack([published.newton_schulz(each) for each in matrices])
    bounds = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
    for dtype, bound in bounds.items():
        found = orthogonalize(scaled.to(dtype), method)
        assert found.dtype == dtype
        assert (found.double() - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_singular_values_come_close_to_one(method):
    x = torch.randn(1, 40, 90, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(x / x.norm(), method)[0])
    assert 0.6 < values.min() <= values.max() < 1.25


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.words = nn.Embedding(7, 4)
        self.kernel = nn.Conv2d(3, 8, 3)
        self.hidden = nn.Linear(4, 9)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.words.weight
        self.lm_head = nn.Linear(9, 7)
        self.alias = nn.Linear(9, 7, bias=False)
        self.alias.weight = self.lm_head.weight


def names(module, parameters):
    known = {id(p): name for name, p in module.named_parameters()}
    return [known[id(p)] for p in parameters]


def test_matrices_of_hidden_layers_are_muons():
    net = Net()
    muon, adam = dsl.optim.muon_groups(net)
    assert (muon["name"], adam["name"]) == ("muon-params", "adam-params")
    assert names(net, muon["params"]) == ["kernel.weight", "hidden.weight"]
    others = ["embed_tokens.weight", "words.weight", "kernel.bias", "hidden.bias", "lm_head.weight", "lm_head.bias"]
    assert names(net, adam["params"]) == others
    assert [group["name"] for group in dsl.optim.muon_groups(nn.LayerNorm(3))] == ["adam-params"]


def test_names_alone_decide_where_only_they_are_given():
    net = Net()
    optimizer = dsl.optim.Muon(net.named_parameters(), adam_lr=0.01)
    muon, adam = optimizer.param_groups
    assert names(net, muon["params"]) == ["words.weight", "kernel.weight", "hidden.weight"]
    assert (muon["lr"], adam["lr"]) == (0.02, 0.01)
    both = dsl.optim.Muon(net.named_parameters(), lr=0.1, muon_lr=0.2).param_groups
    assert [group["lr"] for group in both] == [0.2, 0.1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda net: {"params": net.parameters()}, "named_parameters"),
        (lambda net: {"params": [{"params": net.parameters()}]}, "use_muon=True or use_muon=False"),
        (lambda net: {"params": [{"params": [net.hidden.bias], "use_muon": True}]}, "Muon is for matrices"),
        (lambda net: {"params": net.named_parameters(), "ns_method": "grm"}, "gram, standard"),
        (lambda net: {"params": net.named_parameters(), "ns_dtype": "fp8"}, "bf16"),
        (
            lambda net: {"params": [{"params": [net.hidden.weight], "use_muon": True, "ns_method": "x"}]},
            "gram, standard",
        ),
    ],
)
def test_what_is_not_said_is_asked(arguments, words):
    with pytest.raises(ConfigError, match=words):
        dsl.optim.Muon(**arguments(Net()))


def test_numbers_out_of_range_are_refused():
    for arguments in ({"momentum": 1.0}, {"lr": -1.0}, {"betas": (0.9, 1.0)}):
        with pytest.raises(ValueError, match=r"is not|are not"):
            dsl.optim.Muon(Net().named_parameters(), **arguments)


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fifty_steps_of_a_plain_loop_equal_the_published_equations(method, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 9), (9, 5), (8, 3, 3, 2), (6, 6), (0, 4), (7,), ()]
    ours = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().double()) for p in ours]
    muon, adam = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.1}
    groups = [
        {"params": ours[:5], "use_muon": True, **muon, "ns_method": method},
        {"params": ours[5:], "use_muon": False, **adam},
    ]
    optimizer = dsl.optim.Muon(groups)
    reference = published.Reference(
        [
            {"params": theirs[:5], "rule": published.muon, **muon},
            {"params": theirs[5:], "rule": published.adamw, **adam},
        ]
    )
    for _ in range(50):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=dtype)
            q.grad = p.grad.double()
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        assert (p.double() - q).norm() <= (1e-12 if dtype == torch.float64 else 1e-5) * q.norm()


def test_16_bit_parameters_and_momenta_are_updated_in_fp32():
    weight = nn.Parameter(torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).bfloat16())
    wide = nn.Parameter(weight.detach().float())
    ours = dsl.optim.Muon([{"params": [weight], "use_muon": True}], lr=0.1, moment_dtype="param")
    theirs = dsl.optim.Muon([{"params": [wide], "use_muon": True}], lr=0.1)
    weight.grad = torch.randn(6, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide.grad = weight.grad.float()
    ours.step()
    theirs.step()
    assert ours.state[weight]["momentum_buffer"].dtype == torch.bfloat16
    assert torch.equal(weight, wide.bfloat16())


def test_states_are_saved_and_copied_and_groups_join():
    net = Net()
    optimizer = dsl.optim.Muon(net.named_parameters(), lr=0.1, adam_lr=0.3)
    twin = copy.deepcopy(optimizer)
    twin.add_param_group({"params": nn.Parameter(torch.ones(3)), "use_muon": False})
    assert twin.param_groups[2]["lr"] == 0.3
    net.hidden.weight.grad = torch.ones(9, 4)
    net.hidden.bias.grad = torch.ones(9)
    optimizer.step()
    other = dsl.optim.Muon(net.named_parameters())
    other.load_state_dict(optimizer.state_dict())
    assert set(other.state[net.hidden.weight]) == {"momentum_buffer"}
    assert set(other.state[net.hidden.bias]) == {"step", "exp_avg", "exp_avg_sq"}
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.3]
    for each in (optimizer, twin, other):
        assert [("betas" in group, "momentum" in group) for group in each.param_groups[:2]] == [
            (False, True),
            (True, False),
        ]


def test_work_is_shared_evenly():
    owners = balanced([5.0, 1.0, 4.0, 3.0, 3.0], 2)
    assert owners == [0, 1, 1, 1, 0]
    assert balanced([1.0], 3, loads=[2.0, 1.0, 0.5]) == [2]
    assert balanced([], 2) == []


# mup -----------------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(ConfigError, match="'MuAdamW' needs the package mup"):
        build_optimizer("MuAdamW", {}, Net().parameters())


def test_the_groups_of_mup_are_stepped_on_by_ours(monkeypatch):
    def halved(params, impl, lr, **rest):
        params = list(params)
        return impl([{"params": params[:1], "lr": lr / 2}, {"params": params[1:]}], lr=lr, **rest)

    def refuse(params, impl, **rest):
        raise AssertionError("no infshape")

    monkeypatch.setitem(sys.modules, "mup", SimpleNamespace(MuAdam=halved, MuSGD=refuse))
    parameters = [p for p in Net().parameters() if p.requires_grad]
    for kind, cls, decoupled in (("MuAdam", dsl.optim.Adam, False), ("muadamw", dsl.optim.AdamW, True)):
        optimizer = build_optimizer(kind, {"lr": 0.1, "betas": [0.8, 0.9]}, parameters)
        assert type(optimizer) is cls
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is decoupled
    with pytest.raises(ConfigError, match=r"no infshape.*set_base_shapes"):
        build_optimizer("MuSGD", {"lr": 0.1}, parameters)
