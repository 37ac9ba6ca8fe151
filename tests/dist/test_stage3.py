"""Full values for users, released parameters, and what is held between and during steps."""

import copy
import gc
import pickle
import time
import tracemalloc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn

from ds_lightning.errors import ReleasedParameterError, TopologyError
from ds_lightning.zero.access import full_grad, full_optimizer_state, full_param, gathered, grad_norms
from ds_lightning.zero.watch import ReducedParameter
from tests.dist import models
from tests.dist.harness import (
    STAGES,
    USUAL,
    Recipe,
    build,
    forward_backward,
    full_values,
    groups_of,
    make_engine,
    micro_loss,
    train,
)
from tests.pool import run_ranks
from tests.resources import tensors_alive

ADAMW = Recipe(optimizer="adamw")


def made(stage=3, make=models.Toy, recipe=ADAMW, **rest):
    module, optimizer = build(make, recipe, dist.get_rank())
    return module, optimizer, make_engine(module, [optimizer], stage, precision=recipe.precision, **rest)


def step(engine, number, recipe=USUAL):
    for sharded in engine.optimizers:
        sharded.optimizer.zero_grad()
    forward_backward(engine, recipe, number, 0)
    for sharded in engine.optimizers:
        sharded.optimizer.step()


# Access --------------------------------------------------------------------------------------------------------------


def check_access(stage, threshold):
    module, optimizer, engine = made(stage, models.Everything, threshold=threshold)
    twin, other = build(models.Everything, Recipe(optimizer="adamw"), 0)
    net = nn.parallel.DistributedDataParallel(twin, find_unused_parameters=True)
    close = {"rtol": 1e-4, "atol": 1e-6}
    for number in range(2):
        optimizer.zero_grad()
        other.zero_grad()
        forward_backward(engine, Recipe(), number, 0)
        micro_loss(twin, Recipe(), number, 0, dist.get_rank(), net).backward()
        for (name, mine), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
            gradient = full_grad(mine)
            assert (gradient is None) == (theirs.grad is None), name
            if gradient is not None:
                assert gradient.shape == mine.shape
                torch.testing.assert_close(gradient, theirs.grad, **close)
        for kind in (1, 2, float("inf")):
            ours, wanted = grad_norms(module, kind), grad_norm(twin, kind)
            assert list(ours) == list(wanted)
            assert ours == pytest.approx({key: float(value) for key, value in wanted.items()}, rel=1e-4, abs=1e-6)
        optimizer.step()
        other.step()
        for (name, mine), theirs in zip(module.named_parameters(), twin.named_parameters(), strict=True):
            theirs = theirs[1]
            assert full_param(mine).dtype is torch.float32
            torch.testing.assert_close(full_param(mine), theirs.detach(), **close)
            for key in ("exp_avg", "exp_avg_sq", "step"):
                state, wanted = full_optimizer_state(mine, key), other.state.get(theirs, {}).get(key)
                assert (state is None) == (wanted is None), (name, key)
                if wanted is not None:
                    torch.testing.assert_close(torch.as_tensor(state), wanted, **close)
            assert full_optimizer_state(mine, "nonsense") is None
    optimizer.zero_grad()
    assert all(full_grad(parameter) is None for parameter in module.parameters())
    assert grad_norms(module) == {}
    engine.dissolve()


@pytest.mark.parametrize(("stage", "threshold"), [(0, 0), (1, 40), (2, 10**6), (3, 0), (3, 40), (3, 10**6)])
def test_full_values_gradients_states_and_norms_are_those_of_ddp(stage, threshold):
    run_ranks(check_access, 2, stage, threshold)


def test_a_parameter_of_no_engine_is_itself():
    parameter = nn.Parameter(torch.arange(3.0))
    parameter.sum().backward()
    assert torch.equal(full_param(parameter), parameter.detach())
    assert torch.equal(full_grad(parameter), torch.ones(3))
    assert full_optimizer_state(parameter, "exp_avg") is None
    with gathered(parameter), torch.no_grad():
        parameter.add_(1)
    assert torch.equal(parameter.detach(), torch.arange(3.0) + 1)


def check_gathered(stage, precision):
    recipe = Recipe(optimizer="adamw", precision=precision)
    module, _, engine = made(stage, models.TiedAcrossBlocks, recipe)
    wanted = full_values(engine)

    def shown():
        rounded = {n: v.bfloat16().float() if precision == "bf16" and v.ndim >= 2 else v for n, v in wanted.items()}
        for name, parameter in module.named_parameters():
            assert type(parameter) in (nn.Parameter, ReducedParameter)
            assert torch.equal(parameter.detach().float(), rounded[name]), name

    with gathered(module):
        shown()
        with gathered(module.blocks[0]), gathered([module.emb.weight, module.head.bias]):
            shown()
        shown()  # the inner ones did not take it away
        assert module.state_dict().keys() == wanted.keys() | {"head.weight", "blocks.2.up.weight"}
    if stage == 3:
        assert engine.residency.live_numel() == 0
    step(engine, 0, recipe)
    wanted = full_values(engine)
    with gathered(module):
        shown()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gathered_shows_all_values_and_nests(stage, precision):
    run_ranks(check_gathered, 2, stage, precision)


def check_modifier(stage, modifier, precision):
    recipe = Recipe(optimizer="sgd", precision=precision)
    module, _, engine = made(stage, models.Everything, recipe)
    before = full_values(engine)
    rank = dist.get_rank()
    with gathered(module, modifier_rank=modifier), torch.no_grad():
        module.blocks[1].up.weight.fill_(3.0 + rank)
        module.blocks[0].norm.bias.copy_(torch.arange(float(models.WIDTH)) + rank)
        module.frozen.weight[0, 1] = 7.0 + rank
        module.scale.fill_(0.5 + rank)
    after = full_values(engine)
    wanted = {name: value.clone() for name, value in before.items()}
    wanted["blocks.1.up.weight"].fill_(3.0 + modifier)
    wanted["blocks.0.norm.bias"].copy_(torch.arange(float(models.WIDTH)) + modifier)
    wanted["frozen.weight"][0, 1] = 7.0 + modifier
    wanted["scale"].fill_(0.5 + modifier)
    for name, value in after.items():
        # Under bf16-mixed what was not touched keeps the bits of its master that bf16 cannot show.
        assert torch.equal(value, wanted[name]), name
    with gathered(module):
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.detach(), wanted[name].to(parameter.dtype)), name
    step(engine, 0, recipe)  # the optimizer goes on from there
    moved = full_values(engine)["blocks.1.up.weight"] - (3.0 + modifier)
    assert 0 < float(moved.abs().max()) < 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("modifier", [pytest.param(0, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("stage", STAGES)
def test_changes_of_the_modifier_rank_are_kept_everywhere(stage, modifier, precision):
    run_ranks(check_modifier, 2, stage, modifier, precision)


def check_modifier_of_three():
    for modifier in range(3):
        check_modifier(3, modifier, "fp32")


def test_any_of_three_ranks_may_be_the_modifier():
    run_ranks(check_modifier_of_three, 3)


def check_unkept_change(stage):
    module, _, engine = made(stage)
    words = r"blocks\.0\.up\.weight.*modifier_rank"
    with pytest.raises(ReleasedParameterError, match=words), gathered(module), torch.no_grad():
        module.blocks[0].up.weight.zero_()
    with pytest.raises(ZeroDivisionError), gathered(module):
        _ = 1 / 0
    assert engine.residency.live_numel() == 0
    with gathered(module):  # goes on working
        pass


@pytest.mark.parametrize("stage", STAGES)
def test_a_change_that_would_be_lost_raises(stage):
    run_ranks(check_unkept_change, 2, stage)


# Released parameters -------------------------------------------------------------------------------------------------


def refusal(touch):
    try:
        with torch.no_grad():
            touch()
    except ReleasedParameterError as error:
        return str(error)
    return "nothing was raised"


def check_released():
    module, _, engine = made()
    weight, name = module.blocks[0].up.weight, "blocks.0.up.weight"
    plain = models.Block().up.weight
    assert isinstance(weight, nn.Parameter)
    for question in (
        lambda p: p.shape,
        lambda p: p.ndim,
        lambda p: p.dim(),
        lambda p: p.numel(),
        lambda p: p.nelement(),
        lambda p: torch.numel(p),
        lambda p: p.dtype,
        lambda p: p.device,
        lambda p: p.size(0),
        lambda p: p.stride(),
        lambda p: p.is_contiguous(),
        lambda p: p.requires_grad,
        lambda p: p.is_leaf,
        lambda p: p.grad,
        lambda p: p.element_size(),
        lambda p: p.nbytes,
        lambda p: p.is_floating_point(),
        lambda p: torch.is_floating_point(p),
        lambda p: torch.is_tensor(p),
        lambda p: len(p),
        lambda p: p.layout,
        lambda p: torch.zeros_like(p).sum(),
        lambda p: torch.empty_like(p).shape,
        lambda p: torch.ones_like(p).sum(),
    ):
        assert question(weight) == question(plain)
    assert "shape=(19, 9)" in repr(weight)
    assert "shape=(19, 9)" in str(weight)
    assert hash(weight) == id(weight)
    assert weight in {weight: 1}
    assert "Linear" in repr(module)
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in models.Toy().parameters())
    touches = {
        "sum": lambda: weight.sum(),
        "add": lambda: weight + 1,
        "radd": lambda: 1 + weight,
        "matmul": lambda: torch.ones(2, 19) @ weight,
        "linear": lambda: F.linear(torch.ones(1, 9), weight),
        "item": lambda: weight[0, 0].item(),
        "numpy": lambda: weight.detach().numpy(),
        "tolist": lambda: weight.tolist(),
        "clone": lambda: weight.clone(),
        "detach": lambda: weight.detach().sum(),
        "data": lambda: weight.data.sum(),
        "equal": lambda: torch.equal(weight, torch.zeros(19, 9)),
        "norm": lambda: torch.nn.utils.clip_grad_norm_([weight], 1.0) if weight.grad is not None else weight.norm(),
        "stack": lambda: torch.stack([weight, weight]),
        "vector": lambda: nn.utils.parameters_to_vector(module.blocks.parameters()),
        "copy_": lambda: torch.empty(19, 9).copy_(weight),
        "fill_": lambda: nn.init.constant_(weight, 1.0),
        "setitem": lambda: weight.__setitem__(0, 1.0),
        "iter": lambda: list(weight),
        "bool": lambda: bool(weight[0, 0]),
        "foreach": lambda: torch._foreach_norm([weight]),
        "deepcopy": lambda: copy.deepcopy(module),
        "deepcopy of a parameter": lambda: copy.deepcopy(weight),
        "pickle": lambda: pickle.dumps(module),
        "half": lambda: weight.half(),
        "to": lambda: weight.to(torch.float64),
        "numpy_": lambda: __import__("numpy").asarray(weight),
        "format": lambda: f"{weight[0, 0]:.2f}",
    }
    for what, touch in touches.items():
        text = refusal(touch)
        assert "ds_lightning.gathered" in text, f"{what}: {text}"
        assert name in text or what in ("vector", "deepcopy", "pickle"), f"{what}: {text}"
    assert engine.residency.live_numel() == 0
    wanted = full_values(engine)["blocks.0.up.weight"]
    with torch.no_grad(), engine.passes.step_scope():  # all ranks are here, so it comes by itself
        assert torch.equal(weight.clone(), wanted)
        assert float(weight.sum()) == float(wanted.sum())
        assert torch.equal(torch.stack([weight, weight])[1], wanted)
    assert engine.residency.live_numel() == 0
    with gathered(module):
        copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for twin in copies:  # plain modules, which need no other rank
        assert torch.equal(twin.blocks[0].up.weight, wanted)
        if dist.get_rank() == 0:
            assert torch.equal(twin.state_dict()["blocks.0.up.weight"], wanted)
            micro_loss(twin, Recipe(), 0, 0, 0).backward()
            assert twin.blocks[0].up.weight.grad.isfinite().all()
    engine.dissolve()
    assert torch.equal(copy.deepcopy(module).blocks[0].up.weight, wanted)


def test_a_released_parameter_answers_questions_and_refuses_its_values_in_words():
    run_ranks(check_released, 2)


def check_state_dict():
    module, _, engine = made(3, models.Everything)
    wanted = full_values(engine)
    shown = module.state_dict()
    assert list(shown) == list(models.Everything().state_dict())
    for name, value in wanted.items():
        assert torch.equal(shown[name], value)
        assert shown[name].untyped_storage().nbytes() >= value.nbytes
    part = module.blocks[1].state_dict(prefix="x.")
    assert torch.equal(part["x.up.weight"], wanted["blocks.1.up.weight"])
    assert engine.residency.live_numel() == 0


def test_state_dict_on_all_ranks_is_whole():
    run_ranks(check_state_dict, 2)


def check_lonely_state_dict():
    module, _, _ = made(seconds=2)
    if dist.get_rank() == 0:
        with pytest.raises(TopologyError, match=r"state_dict\(\).*rank|every rank"):
            module.state_dict()
    dist.barrier()


def test_state_dict_on_one_rank_alone_is_an_error_in_words():
    run_ranks(check_lonely_state_dict, 2)


# Residency -----------------------------------------------------------------------------------------------------------


class Boom(models.Toy):
    """Fails in the middle of its forward on all ranks, when told to."""

    fail = False

    def body(self, h):
        h = self.blocks[0](h)
        if self.fail:
            self.blocks[1](h[..., :2])
        return super().body(h)


def check_idle(precision):
    recipe = Recipe(precision=precision)
    module, optimizer, engine = made(3, Boom, recipe)
    alive = engine.residency.live_numel
    assert alive() == 0
    step(engine, 0, recipe)
    assert alive() == 0
    module.eval()
    with torch.no_grad():
        for number in range(3):
            with engine.passes.step_scope():
                micro_loss(module, recipe, number, 0, 0)
            assert alive() == 0
        with engine.passes.evaluation():
            for _ in range(dist.get_rank() * 3):
                with engine.passes.step_scope():
                    micro_loss(module, recipe, 1, 0, 0)
        assert alive() == 0
        micro_loss(module, recipe, 1, 0, 0)  # outside a step, on all ranks
        assert alive() == 0
    with engine.passes.step_scope():  # a training forward of which nobody uses the output
        micro_loss(module, recipe, 1, 0, 0)
    module.fail = True
    for grad in (False, True):
        with (
            pytest.raises(RuntimeError, match="normalized_shape"),
            torch.set_grad_enabled(grad),
            engine.passes.step_scope(),
        ):
            micro_loss(module, recipe, 1, 0, 0)
        # What was being fetched ahead is let go in the next step: no failing rank waits for others.
        assert alive() <= max(b.unit.numel for b in engine.units.values())
    module.fail = False
    module.train()
    step(engine, 2, recipe)
    assert alive() == 0
    # After all of this it still trains as one that saw nothing of it.
    wanted = train(models.Toy, 3, Recipe(steps=0))
    assert wanted.values.keys() == full_values(engine).keys()
    optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_parameters_are_let_go_after_training_evaluation_and_failures(precision):
    run_ranks(check_idle, 2, precision)


def check_peak():
    """At most two blocks and the root are whole at a time, in forward and in backward."""
    _, _, engine = made(3, Long)
    block = max(b.unit.numel for b in engine.units.values() if b.unit.scope)
    root = sum(b.unit.numel for b in engine.units.values() if not b.unit.scope)
    seen = []
    allocate = type(next(iter(engine.units.values()))).allocate

    def watched(self):
        allocate(self)
        seen.append(sum(b.full.untyped_storage().nbytes() for b in engine.units.values() if b.sharded) // 4)

    type(next(iter(engine.units.values()))).allocate = watched
    try:
        for number in range(3):
            step(engine, number)
    finally:
        type(next(iter(engine.units.values()))).allocate = allocate
    assert max(seen) <= root + 3 * block
    assert seen


class Long(models.Toy):
    depth = 8


def test_only_a_few_blocks_are_whole_at_a_time():
    run_ranks(check_peak, 2)


def settled():
    """Tensors alive. Gloo's thread may hold what it has just sent for a moment longer."""
    time.sleep(0.01)
    return tensors_alive()[0]


def check_flat(stage, name):
    module, _, engine = made(stage, getattr(models, name))
    counts, sizes = [], []
    for number in range(8):
        step(engine, number % 4)
        counts.append(min(settled() for _ in range(3)))
        sizes.append(engine.model_state_bytes() + engine.pool.nbytes)
        if number == 3:
            tracemalloc.start()
            first = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - first
    tracemalloc.stop()
    assert max(counts[4:]) <= max(counts[:4]), counts
    assert max(sizes[4:]) <= max(sizes[:4]), sizes
    assert grown < 100_000, f"{grown} bytes of Python objects in four steps"
    with torch._C.DisableTorchFunctionSubclass():  # users are told that `p.grad` is not the gradient
        assert stage == 0 or all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", ["Everything", "CheckpointedReentrant", "ChangedOrder"])
@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 3])
def test_tensors_and_memory_do_not_grow_from_step_to_step(stage, name):
    run_ranks(check_flat, 2, stage, name)


def check_shares(stage):
    """What ranks keep between steps, in bytes: 16 a parameter, divided as arXiv:1910.02054 says."""
    _, _, engine = made(stage, Long)
    for number in range(2):
        step(engine, number)
    world, numel = dist.get_world_size(), sum(b.unit.numel for b in engine.units.values())
    counters = 4 * sum(len(sharded.runs) for sharded in engine.optimizers)
    shares = {0: (1, 1, 1), 1: (1, 1 / world, 1 / world), 2: (1, 1 / world, 1 / world), 3: (1 / world,) * 3}[stage]
    wanted = 4 * numel * (shares[0] + shares[1] + 2 * shares[2])
    held = engine.model_state_bytes() - counters
    assert 0.8 * wanted <= held <= 1.001 * wanted, (held, wanted)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_keeps_its_share(stage, world):
    run_ranks(check_shares, world, stage)


def check_fresh(threshold):
    """After a step, and after a load, forward sees the new weights: resident ones too."""
    module, _, engine = made(3, models.Toy, Recipe(), threshold=threshold)
    for number in range(3):
        step(engine, number)
        values = full_values(engine)
        plain = models.Toy()
        plain.load_state_dict(values)
        with torch.no_grad(), engine.passes.step_scope():
            assert torch.equal(micro_loss(module, Recipe(), 9, 0, 0), micro_loss(plain, Recipe(), 9, 0, 0))
        if number == 1:
            torch.manual_seed(7)
            other = models.Toy()
            with engine.state_dicts.loading():
                module.load_state_dict(other.state_dict())
            with torch.no_grad(), engine.passes.step_scope():
                assert torch.equal(micro_loss(module, Recipe(), 9, 0, 0), micro_loss(other, Recipe(), 9, 0, 0))


@pytest.mark.parametrize("threshold", [0, 40, 10**6])
def test_forward_sees_new_weights_after_a_step_and_after_a_load(threshold):
    run_ranks(check_fresh, 2, threshold)


# Sharded construction ------------------------------------------------------------------------------------------------


class Wide(models.Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(65, 65) for _ in range(3))

    def inputs(self, generator):
        return torch.randn(2, 65, generator=generator)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def check_construction():
    from ds_lightning.zero.engine import ZeroEngine
    from ds_lightning.zero.init import ShardedConstruction
    from ds_lightning.zero.plan import StagePlan
    from tests.dist.harness import options, topology

    holder = nn.Module()
    ranks = topology()
    construction = ShardedConstruction(holder, ranks)
    with construction.building(), construction.building():
        torch.manual_seed(dist.get_rank())
        module = holder.net = Wide()
        module.apply(lambda child: nn.init.constant_(child.weight, 3.0) if isinstance(child, nn.Linear) else None)
    with pytest.raises(ReleasedParameterError, match=r"net\.blocks\.0\.weight"):
        module.blocks[0].weight.sum()
    with pytest.raises(ZeroDivisionError), construction.building():
        _ = 1 / 0
    plain = nn.ModuleList([nn.Linear(65, 65)])
    assert plain[0].weight.sum().isfinite()
    assert type(plain[0].weight) is nn.Parameter
    engine = ZeroEngine(module, [], ranks, StagePlan.of(3), options(), construction.read)
    construction.finish()
    for name, value in full_values(engine).items():
        if name.endswith("weight"):
            assert torch.equal(value, torch.full((65, 65), 3.0)), name
    torch.manual_seed(0)
    assert torch.equal(full_values(engine)["blocks.0.bias"], Wide().blocks[0].bias.detach())
    with torch.no_grad(), engine.passes.step_scope():
        micro_loss(module, Recipe(), 0, 0, 0)
    assert engine.residency.live_numel() == 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_initialisation_after_sharded_construction_takes_effect(world):
    run_ranks(check_construction, world)


def check_groups_survive():
    """The optimizer, its groups and its parameters stay the user's."""
    module, optimizer, engine = made()
    groups, parameters = optimizer.param_groups, [list(group["params"]) for group in optimizer.param_groups]
    step(engine, 0)
    assert optimizer.param_groups is groups
    for group, before in zip(optimizer.param_groups, parameters, strict=True):
        assert all(a is b for a, b in zip(group["params"], before, strict=True))
    assert {id(p) for group in parameters for p in group} == {id(p) for p in module.parameters()}
    optimizer.param_groups[0]["lr"] = 0.0  # what a scheduler does
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = full_values(engine)
    step(engine, 1)
    for name, value in full_values(engine).items():
        assert torch.equal(value, before[name]) == (value.ndim >= 2), name
    assert groups_of(module)


def test_the_optimizer_keeps_its_groups_and_follows_their_settings():
    run_ranks(check_groups_survive, 2)
