"""Frozen parameters: what they cost, what they compute, and what becomes of them when they are unfrozen."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from tests.dist import models
from tests.dist.harness import (
    OPTIMIZERS,
    Recipe,
    Trained,
    build,
    difference,
    forward_backward,
    full_values,
    make_engine,
    micro_loss,

    train,
)
from tests.dist.test_offload import policy
from tests.pool import run_ranks

STAGES = (0, 1, 2, 3)
BF16 = Recipe(steps=3, precision="bf16", optimizer="adamw")


# Memory --------------------------------------------------------------------------------------------------------------


class Adapted(models.Model):
    """A frozen matrix and a small trainable one; both fill their units without a rest."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(96, 48, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(96, 16, bias=False)

    def forward(self, x):
        return (self.base(x)[:, :16] + self.adapter(x)).square().mean()

    def inputs(self, generator):
        return torch.randn(4, 96, generator=generator)


def state_bytes(stage, precision, in_group, **rest):
    module = Adapted()
    parameters = module.parameters() if in_group else module.adapter.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    engine = make_engine(module, [optimizer], stage, precision=precision, **rest)
    for step in range(2):
        forward_backward(engine, Recipe(precision=precision), step, 0)
        optimizer.step()
    return engine.model_state_bytes()


def check_bytes(stage, in_group):
    frozen, trained, ranks = 96 * 48, 96 * 16, dist.get_world_size()
    shard = lambda count: count // ranks  # noqa: E731
    states = 4 + 4 + 4 + 4  # master, gradient, two moments
    step = 4
    mixed = 2 * trained + states * trained if stage == 0 else states * shard(trained) + 2 * trained * (stage < 3)
    assert state_bytes(stage, "bf16", in_group) == (2 * shard(frozen) if stage == 3 else 2 * frozen) + mixed + step
    plain = 4 * shard(frozen) if stage == 3 else 4 * frozen
    kept = 12 * trained if stage == 0 else 12 * shard(trained)  # gradient, moments
    assert state_bytes(stage, "fp32", in_group) == plain + 4 * (trained if stage < 3 else shard(trained)) + kept + step
    with_masters = 4 * (frozen if stage == 0 else shard(frozen)) + 2 * frozen * (stage < 3)
    assert state_bytes(stage, "bf16", in_group, frozen_masters=True) == with_masters + mixed + step


@pytest.mark.parametrize("in_group", [False, True], ids=["outside", "in_group"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_element_costs_its_16_bits_and_nothing_else(stage, in_group):
    run_ranks(check_bytes, 2, stage, in_group)


def check_offloaded(folder):
    module = Adapted()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine = make_engine(module, [optimizer], 3, precision="bf16", offload=policy(folder, "none", "nvme"))
    frozen = next(buffers for buffers in engine.units.values() if not buffers.unit.trainable)
    assert frozen.home.swap.layout.nbytes == -(-2 * 96 * 48 // 2 // 4096) * 4096
    assert frozen.state_nbytes == 0
    before = full_values(engine)["base.weight"]
    forward_backward(engine, BF16, 0, 0)
    optimizer.step()
    assert torch.equal(full_values(engine)["base.weight"], before)
    with dsl.gathered(module.base, modifier_rank=1), torch.no_grad():
        module.base.weight.fill_(1.0 + dist.get_rank())
    assert torch.equal(full_values(engine)["base.weight"], torch.full((48, 96), 2.0, dtype=torch.bfloat16))
    engine.dissolve()


def test_frozen_values_on_disk_are_there_once_in_16_bits(tmp_path):
    run_ranks(check_offloaded, 2, str(tmp_path))


# Values --------------------------------------------------------------------------------------------------------------


def check_same_training():
    for stage in STAGES:
        with_masters = train(models.FrozenHalf, stage, BF16, frozen_masters=True)
        without = train(models.FrozenHalf, stage, BF16)
        assert with_masters.losses == without.losses
        for name, value in without.values.items():
            wanted = with_masters.values[name]
            assert torch.equal(value, wanted if value.dtype == wanted.dtype else wanted.bfloat16()), (stage, name)
        assert {n for n, v in without.values.items() if v.dtype == torch.bfloat16} == {
            "emb.weight",
            *(f"blocks.{i}.{part}.weight" for i, part in ((0, "up"), (0, "down"), (2, "up"), (2, "down"), (3, "up"))),
        }


def test_training_has_the_same_bits_with_masters_of_frozen_matrices_and_without():
    run_ranks(check_same_training, 2)


def check_shown(stage):
    told = []
    module, optimizer = build(models.FrozenHalf, BF16, 0)
    given = {name: value.clone() for name, value in module.state_dict().items()}
    wanted = {
        n: p.detach().bfloat16().float() if p.ndim > 1 and not p.requires_grad else p.detach().clone()
        for n, p in module.named_parameters()
    }
    engine = make_engine(module, [optimizer], stage, precision="bf16", tell=told.append)
    (message,) = told
    assert "6 frozen parameters" in message
    assert "frozen_masters=True" in message
    for found in (module.state_dict(), {n: dsl.full_param(p) for n, p in module.named_parameters()}):
        assert {name: value.dtype for name, value in found.items()} == {name: torch.float32 for name in given}
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    with engine.state_dicts.loading():
        module.load_state_dict({name: value + 1 for name, value in given.items()})
    assert torch.equal(dsl.full_param(module.emb.weight), (given["emb.weight"] + 1).bfloat16().float())
    assert torch.equal(dsl.full_param(module.head.weight), given["head.weight"] + 1)
    engine.dissolve()
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert torch.equal(module.emb.weight, (given["emb.weight"] + 1).bfloat16().float())


@pytest.mark.parametrize("stage", STAGES)
def test_states_of_the_module_are_in_the_dtype_that_the_user_gave(stage):
    run_ranks(check_shown, 2, stage)


def check_evaluation():
    """An evaluation before training: nothing is in an optimizer yet, and only what is frozen loses its fp32 values."""
    torch.manual_seed(0)
    module = models.FrozenHalf()
    given = {name: value.clone() for name, value in module.state_dict().items()}
    frozen = {name for name, p in module.named_parameters() if p.ndim > 1 and not p.requires_grad}
    engine = make_engine(module, [], 3, precision="bf16")
    assert engine.rounded() == frozen
    with torch.no_grad(), engine.passes.step_scope():
        micro_loss(module, BF16, 0, 0, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine.set_optimizers([optimizer])
    assert engine.rounded() == frozen
    forward_backward(engine, BF16, 0, 0)
    optimizer.step()
    for name, value in module.state_dict().items():
        assert torch.equal(value, given[name].bfloat16().float() if name in frozen else given[name]), name


def test_an_evaluation_before_training_rounds_nothing_that_is_to_be_trained():
    run_ranks(check_evaluation, 2)


# Freezing and unfreezing ----------------------------------------------------------------------------------------------


class Schedule:
    """What happens before each step, to our model and to the plain one."""

    def __init__(self, in_group):
        self.in_group = in_group

    def frozen_at_first(self, module):
        return (module.emb, module.blocks[0], module.blocks[1])

    def build(self, module):
        for part in self.frozen_at_first(module):
            part.requires_grad_(False)
        parameters = [p for p in module.parameters() if self.in_group or p.requires_grad]
        return torch.optim.AdamW(parameters, lr=0.01)

    def before(self, step, module, optimizer):
        """Returns what has left the optimizer."""
        if step == 1:
            self.unfreeze(module.blocks[1], optimizer)
        if step == 2:
            module.head.requires_grad_(False)  # in its group
            return self.leave(module.blocks[2], optimizer)
        if step == 3:
            self.unfreeze(module.blocks[0], optimizer)
            self.unfreeze(module.emb, optimizer)
        if step == 4:
            module.head.requires_grad_(True)
            self.join(module.blocks[2], optimizer)
        return []

    def unfreeze(self, part, optimizer):
        part.requires_grad_(True)
        if not self.in_group:
            optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.02})

    def leave(self, part, optimizer):
        part.requires_grad_(False)
        gone = {id(p) for p in part.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        return list(part.parameters())

    def join(self, part, optimizer):
        part.requires_grad_(True)
        optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.005})


class Plain:
    """The same with masters and casts by hand; nothing of ours."""

    def __init__(self, schedule):
        torch.manual_seed(0)
        self.schedule = schedule
        self.masters = models.Toy()
        self.optimizer = schedule.build(self.masters)
        self.module = copy.deepcopy(self.masters)
        for master, parameter in self.pairs():
            if not master.requires_grad:
                self.round(master)
            parameter.data = master.data.bfloat16() if master.ndim > 1 else master.data.clone()

    def pairs(self):
        return list(zip(self.masters.parameters(), self.module.parameters(), strict=True))

    @staticmethod
    def round(master):
        if master.ndim > 1:
            master.data = master.data.bfloat16().float()

    def step(self, step):
        for master in self.schedule.before(step, self.masters, self.optimizer):
            self.round(master)
            self.optimizer.state.pop(master)
        self.optimizer.zero_grad()
        ranks = range(dist.get_world_size())
        for _, parameter in self.pairs():
            parameter.requires_grad_(True)
        for rank in ranks:
            self.module.zero_grad()
            micro_loss(self.module, BF16, step, 0, rank).backward()
            for master, parameter in self.pairs():
                if master.requires_grad:
                    gradient = parameter.grad.float() / len(ranks)
                    master.grad = gradient if master.grad is None else master.grad + gradient
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in self.pairs():
                parameter.copy_(master)


def check_schedule(stage, in_group):
    schedule = Schedule(in_group)
    plain = Plain(schedule)
    torch.manual_seed(0)
    module = models.Toy()
    optimizer = schedule.build(module)
    engine = make_engine(module, [optimizer], stage, precision="bf16")
    for step in range(6):
        plain.step(step)
        schedule.before(step, module, optimizer)
        optimizer.zero_grad()
        forward_backward(engine, BF16, step, 0)
        optimizer.step()
        wanted = Trained({name: value.detach().clone() for name, value in plain.masters.named_parameters()}, {})
        found = Trained(full_values(engine), {})
        assert difference(found, wanted) <= 1e-6, f"step {step}"
        masters = {
            slot.name: buffers.unit.master_dtype for buffers in engine.units.values() for slot in buffers.unit.slots
        }
        trained = {
            name
            for name, p in plain.masters.named_parameters()
            if p.requires_grad or p.ndim < 2 or name.startswith("head")  # frozen in its group after training
        }
        assert {name for name, dtype in masters.items() if dtype == torch.float32} == trained, f"step {step}"
        for name, master in plain.masters.named_parameters():
            held = dsl.full_optimizer_state(dict(module.named_parameters())[name], "exp_avg")
            assert (held is None) == (not plain.optimizer.state.get(master)), (step, name)


@pytest.mark.parametrize("in_group", [False, True], ids=["outside", "in_group"])
@pytest.mark.parametrize("stage", STAGES)
def test_freezing_and_unfreezing_in_mid_run_trains_as_masters_by_hand(stage, in_group):
    run_ranks(check_schedule, 2, stage, in_group)


def check_states_of_frozen(stage):
    """A state is loaded for parameters that are frozen in their group: it is there, and serves once they go on."""
    recipe = Recipe()  # torch itself rounds what it loads to the dtype of the user's parameter

    def train(steps, frozen, state=None, weights=None):
        module = models.Toy()
        if weights is not None:
            module.load_state_dict(weights)
        module.blocks[1].requires_grad_(not frozen)
        optimizer = OPTIMIZERS["adamw"](module.parameters())
        engine = make_engine(module, [optimizer], stage)
        if state is not None:
            optimizer.load_state_dict(state)
            assert not engine.resting.unfrozen
            assert same(optimizer.state_dict()["state"], state["state"])
        for step in steps:
            if step == 2:
                module.blocks[1].requires_grad_(True)
            optimizer.zero_grad()
            forward_backward(engine, recipe, step, 0)
            optimizer.step()
        return module.state_dict(), optimizer.state_dict()

    def same(left, right):
        return left.keys() == right.keys() and all(
            torch.equal(left[key][name], right[key][name]) for key in left for name in left[key]
        )

    torch.manual_seed(0)
    weights, state = train((0, 1), frozen=False)
    onwards = train((2, 3), frozen=True, state=state, weights=weights)
    wanted = train((2, 3), frozen=False, state=state, weights=weights)
    assert all(torch.equal(value, wanted[0][name]) for name, value in onwards[0].items())
    assert same(onwards[1]["state"], wanted[1]["state"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_parameter_of_a_group_has_the_states_that_are_loaded_for_it(stage):
    run_ranks(check_states_of_frozen, 2, stage)


class Late(models.Toy):
    def forward(self, x):
        self.blocks[0].requires_grad_(True)
        return super().forward(x)


def unfreeze_within_a_step():
    module = Late()
    module.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = make_engine(module, [optimizer], 2)
    with pytest.raises(ConfigError, match=r"blocks\.0\..* was frozen when this step began"):
        forward_backward(engine, Recipe(), 0, 0)


def test_a_parameter_that_is_unfrozen_within_a_step_is_an_error():
    run_ranks(unfreeze_within_a_step, 2)
