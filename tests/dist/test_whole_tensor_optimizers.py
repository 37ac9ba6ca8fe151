"""LAMB and Muon on shards: the published equations at every stage, the same bits at all of them."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from ds_lightning.offload.host import HostMemory
from ds_lightning.offload.policy import Home, OffloadPolicy
from ds_lightning.optim import routes
from ds_lightning.zero.reduce import ReduceOptions
from tests.dist import models
from tests.dist import reference_optimizers as published
from tests.dist.harness import (
    STAGES,
    Recipe,
    Trained,
    check_against,
    difference,
    forward_backward,
    full_values,
    make_engine,
    micro_loss,
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


def as_reference(group):
    muon = group.pop("use_muon", None)
    group.pop("ns_method", None)
    group["rule"] = published.lamb if muon is None else published.muon if muon else published.adamw
    return group


def reference(groups):
    return published.Reference([as_reference(group) for group in groups])


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
def test_steps_equal_the_published_equations(kind, world_size):
    run_ranks(check_published, world_size, kind, 6, "fp64", 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fifty_steps_equal_the_published_equations(kind, world_size):
    run_ranks(check_published, world_size, kind, 50, "fp64", 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_rounds_and_no_more(kind):
    run_ranks(check_published, 2, kind, 6, "fp32", 1e-6)


def check_same_bits(kind, recipe, **rest):
    found = [train(model(kind), stage, recipe, **rest) for stage in STAGES]
    assert all(same_bits(found[0], other) for other in found[1:])
    return found[0]


@pytest.mark.parametrize(("kind", "clip"), [("Lamb", "norm"), ("Muon", "value")])
def test_windows_and_clipping_work_as_for_others(kind, clip):
    run_ranks(check_windows, 2, kind, clip)


def check_windows(kind, clip):
    make = model(kind)
    wanted = train(make, "alone", Recipe(optimizer=reference, clip=clip, accumulate=2, precision="fp64"))
    recipe = Recipe(optimizer=ours(kind), clip=clip, accumulate=2, precision="fp64")
    check_against(wanted, make, recipe, bound=1e-12, tile=64)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_compute_keeps_fp32_masters_and_the_same_bits(kind):
    run_ranks(check_same_bits, 2, kind, Recipe(optimizer=ours(kind), precision="bf16"), tile=80)


@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_gradients_are_taken_as_they_are(kind):
    run_ranks(check_same_bits, 2, kind, Recipe(optimizer=ours(kind)), reduce=ReduceOptions(accumulate=torch.bfloat16))


# What travels --------------------------------------------------------------------------------------------------------


def check_bytes(stage, kind, **arguments):
    recipe = Recipe()
    torch.manual_seed(0)
    module = model(kind)()
    optimizer = ours(kind)(module.groups(), **arguments)
    engine = make_engine(module, [optimizer], stage)
    forward_backward(engine, recipe, 0, 0)
    reduced = engine.ledger.entries["reduce_scatter"].bytes_sent
    engine.ledger.clear()
    optimizer.step()
    sent = engine.ledger.entries.get("exchange")
    coefficients = optimizer.get_lamb_coeffs() if kind == "Lamb" else []
    return reduced, sent and (sent.calls, sent.bytes_sent), coefficients


def test_lamb_sums_once_and_exchanges_nothing():
    first, second = run_ranks(check_bytes, 2, 2, "Lamb")
    assert first[1] is None
    assert first[2] == second[2]
    coefficients = first[2]
    module = Awkward()
    used = [p for n, p in module.named_parameters() if p.requires_grad and not n.startswith("unused")]
    assert len(coefficients) == len(used)
    assert coefficients.count(1.0) >= 2  # of zeros, and without elements
    assert all(0.01 <= value <= 10 for value in coefficients)


@pytest.mark.parametrize("stage", STAGES)
def test_muon_moves_each_matrix_to_its_owner_and_back(stage):
    numel = sum(p.numel() for g in muon_groups(Awkward())[:2] for p in g["params"])
    unused = 15
    found = run_ranks(check_bytes, 2, stage, "Muon")
    ways = 2 if stage else 1  # at stage 0 everybody has everything, so only results travel
    assert [calls for _, (calls, _), _ in found] == [ways, ways]
    sent = sum(sent for _, (_, sent), _ in found)
    assert 0 < sent <= ways * 4 * (numel - unused)  # less by what lies with its owner


@pytest.mark.parametrize("ns_dtype", ["bf16", "fp16"])
def test_matrices_travel_in_16_bits_where_they_are_computed_in(ns_dtype):
    wide = run_ranks(check_bytes, 2, 2, "Muon")
    narrow = run_ranks(check_bytes, 2, 2, "Muon", ns_dtype=ns_dtype)
    assert [2 * sent for _, (_, sent), _ in narrow] == [sent for _, (_, sent), _ in wide]
    recipe = Recipe(optimizer=partial(dsl.optim.Muon, ns_dtype=ns_dtype))
    run_ranks(check_same_bits, 2, "Muon", recipe)


# Where values live ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stage", "param", "ratio"), [(1, "none", 1.0), (2, "none", 0.5), (3, "cpu", 1.0)])
def test_states_on_the_host_change_nothing(kind, stage, param, ratio):
    run_ranks(check_host, 2, kind, stage, OffloadPolicy(optimizer=Home.HOST, param=Home(param), ratio=ratio))


def check_host(kind, stage, policy):
    original = HostMemory.__init__

    def separate(self, device, pin):  # as it is for a GPU
        original(self, device, pin)
        self.separate = True

    for precision in ("fp32", "bf16"):
        recipe = Recipe(optimizer=ours(kind), precision=precision)
        wanted = train(model(kind), stage, recipe)
        assert same_bits(train(model(kind), stage, recipe, offload=policy), wanted)
        with mock.patch.object(HostMemory, "__init__", separate):
            assert same_bits(train(model(kind), stage, recipe, offload=policy), wanted)


def check_disk(kind, folder):
    module = model(kind)()
    policy = OffloadPolicy(optimizer=Home.DISK, optimizer_path=Path(folder))
    with pytest.raises(ConfigError, match=f"{kind} looks at whole tensors.*device: cpu"):
        make_engine(module, [ours(kind)(module.groups())], 2, offload=policy)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_states_on_disk_are_refused(kind, tmp_path):
    run_ranks(check_disk, 1, kind, str(tmp_path))


# Parameters that come and go -----------------------------------------------------------------------------------------


class Coming(models.Toy):
    """Parameters that have a gradient in some steps only, so that runs are cut; one that no group has at first."""

    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)

    def forward(self, x):
        self.blocks[0].up.requires_grad_(self.step != 1)
        self.blocks[2].norm.requires_grad_(self.step >= 2)
        return super().forward(x)


def check_coming(kind, stage):
    torch.manual_seed(0)
    module, plain = Coming().double(), Coming().double()
    plain.load_state_dict(module.state_dict())
    groups = KINDS[kind]

    def all_groups(model):
        model.blocks[2].norm.requires_grad_(True)
        return groups(model)

    optimizers = ours(kind)(all_groups(module)), reference(all_groups(plain))
    engine = make_engine(module, [optimizers[0]], stage)
    for step in range(4):
        if step == 3:
            for part, optimizer in zip((module, plain), optimizers, strict=True):
                part.head.requires_grad_(True)
                later = [dict(group) for group in groups(part)]
                kept = {id(p) for p in part.head.parameters()}
                for group in later:
                    group["params"] = [p for p in group["params"] if id(p) in kept]
                    if optimizer is optimizers[1]:
                        group = as_reference(group)
                    if group["params"]:
                        optimizer.add_param_group(group)
        for optimizer in optimizers:
            optimizer.zero_grad()
        forward_backward(engine, Recipe(precision="fp64"), step, 0)
        gradients = [torch.zeros_like(p) for p in plain.parameters()]
        present = [False] * len(gradients)
        for rank in range(dist.get_world_size()):
            plain.zero_grad()
            micro_loss(plain, Recipe(precision="fp64"), step, 0, rank).backward()
            for k, p in enumerate(plain.parameters()):
                if p.grad is not None:
                    gradients[k] += p.grad / dist.get_world_size()
                    present[k] = True
        for k, p in enumerate(plain.parameters()):
            p.grad = gradients[k] if present[k] else None
        for optimizer in optimizers:
            optimizer.step()
        wanted = Trained({name: value.detach() for name, value in plain.named_parameters()}, {})
        assert difference(Trained(full_values(engine), {}), wanted) <= 1e-12, f"step {step}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_without_a_gradient_are_left_alone_and_new_ones_join(kind, stage):
    run_ranks(check_coming, 2, kind, stage)


def check_rounds(kind):
    """Many small exchanges instead of one."""
    recipe = Recipe(optimizer=ours(kind))
    wanted = train(model(kind), 2, recipe)
    routes.ROUND_NUMEL, routes.BATCH_NUMEL, kept = 200, 200, (routes.ROUND_NUMEL, routes.BATCH_NUMEL)
    try:
        assert difference(train(model(kind), 2, recipe), wanted) <= 1e-6
        assert same_bits(train(model(kind), 2, recipe), train(model(kind), 0, recipe))
    finally:
        routes.ROUND_NUMEL, routes.BATCH_NUMEL = kept


def test_muon_in_many_rounds():
    run_ranks(check_rounds, 3, "Muon")
