"""What users read of a sharded model by torch's own means: answered as under DDP, or refused in words."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ds_lightning.errors import ConfigError, ReleasedParameterError
from ds_lightning.zero import access
from ds_lightning.zero.engine import ZeroEngine
from tests.dist import harness
from tests.pool import run_ranks


class Net(nn.Module):
    """Two blocks, a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def made(stage: int, precision: str = "fp32") -> tuple[Net, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return net, optimizer, harness.make_engine(net, [optimizer], stage, precision=precision)


def backward(net: nn.Module, engine: ZeroEngine, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    with engine.passes.step_scope():
        loss = F.mse_loss(net(torch.randn(4, 7, generator=generator)), torch.zeros(4, 3))
    with engine.passes.backward_scope():
        loss.backward()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, engine: ZeroEngine, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, engine, step)
        optimizer.step()


def read_gradients(stage: int) -> None:
    net, optimizer, engine = made(stage)
    backward(net, engine, 0)
    whole = {name: access.full_grad(p) for name, p in net.named_parameters()}
    if stage:
        with pytest.raises(ReleasedParameterError, match="clip_gradients"):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with pytest.raises(ReleasedParameterError, match="full_grad"):
            _ = net.head.weight.grad
    else:
        assert all(torch.equal(p.grad, whole[name]) for name, p in net.named_parameters())
    net.zero_grad(set_to_none=False)  # asks every parameter, and may
    optimizer.zero_grad()
    assert net.head.weight.grad is None
    backward(net, engine, 1)
    with engine.passes.step_scope():  # the next step begins: parameters are ordinary while they compute
        net(torch.zeros(1, 7))
        assert {type(p) for p in net.head.parameters()} == {nn.Parameter}
    backward(net, engine, 2)
    with access.gathered(net):
        assert {type(p) for p in copy.deepcopy(net.head).parameters()} == {nn.Parameter}


@pytest.mark.parametrize("stage", harness.STAGES)
def test_reading_a_reduced_gradient_is_refused_rather_than_answered_with_none(stage):
    run_ranks(read_gradients, 2, stage, timeout=60)


def whole_states(stage: int) -> None:
    net, optimizer, engine = made(stage)
    train(net, optimizer, engine, range(2))
    saved = optimizer.state_dict()
    wanted = {name: access.full_optimizer_state(p, "exp_avg") for name, p in net.named_parameters()}
    names = [name for name, _ in net.named_parameters()]
    assert saved["param_groups"][0]["params"] == list(range(len(names)))
    for number, name in enumerate(names):
        assert torch.equal(saved["state"][number]["exp_avg"], wanted[name])
        assert saved["state"][number]["step"] == 2
    plain = copy.deepcopy(Net())
    torch.optim.AdamW(plain.parameters()).load_state_dict(saved)  # torch's own format

    file = io.BytesIO()
    torch.save(saved, file)
    weights = {name: access.full_param(p) for name, p in net.named_parameters()}
    train(net, optimizer, engine, range(2, 4))
    unbroken = {name: access.full_param(p) for name, p in net.named_parameters()}
    with engine.state_dicts.loading():
        net.load_state_dict(weights)
    if not engine.units[0].sharded:
        engine.residency.republish(engine.units)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    train(net, optimizer, engine, range(2, 4))
    for name, parameter in net.named_parameters():
        assert torch.equal(access.full_param(parameter), unbroken[name])


@pytest.mark.parametrize("stage", harness.STAGES)
def test_an_optimizers_own_state_dict_is_whole_and_loads_again(stage):
    run_ranks(whole_states, 2, stage, timeout=60)


def writes_through_data() -> None:
    net, _, _ = made(3)
    with pytest.raises(ReleasedParameterError, match="modifier_rank"), access.gathered(net):
        net.head.weight.data.fill_(3.0)


def test_a_write_through_data_inside_gathered_is_noticed():
    run_ranks(writes_through_data, 2, timeout=60)


def call_outside_a_step(stage: int) -> None:
    net, optimizer, engine = made(stage, "bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(net, optimizer, engine, range(1))
    with torch.no_grad():
        assert net(torch.ones(2, 7)).isfinite().all()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("stage", harness.STAGES)
def test_a_mixed_precision_model_can_be_called_outside_of_steps(stage):
    run_ranks(call_outside_a_step, 2, stage, timeout=60)


def stand_in() -> None:
    class _MockOptimizer(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([torch.zeros(1)], {})

    with pytest.raises(ConfigError, match="returned None"):
        harness.make_engine(Net(), [_MockOptimizer()], 1)


def test_a_stand_in_optimizer_is_explained():
    run_ranks(stand_in, 1, timeout=60)
