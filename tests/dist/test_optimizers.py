"""Optimizers on shards: torch's, users' own, and those that are refused in words."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_lightning.errors import ConfigError
from tests.dist import models
from tests.dist.harness import (
    STAGES,
    Recipe,
    Trained,
    check_against,
    difference,
    forward_backward,
    full_values,
    groups_of,
    make_engine,
    train,
)
from tests.pool import run_ranks

SHARDED = (1, 2, 3)

# lr and whatever else makes the class show all of its state.
ELEMENTWISE = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.001, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.001},
    "ASGD": {"lr": 0.05},
}


class Sign(torch.optim.Optimizer):
    """A user's own element-wise optimizer, with state."""

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                    state["count"] = 0
                state["count"] += 1
                state["average"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.add_(state["average"] / (state["average"].abs() + 0.1), alpha=-group["lr"])


class Trust(Sign):
    """Looks at whole tensors, as LAMB does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] * parameter.norm() / (parameter.grad.norm() + 1)))


class Demanding(Sign):
    """Cannot be built from its defaults alone."""

    def __init__(self, params, model, lr=0.01):
        assert model is not None
        super().__init__(params, lr)


def builder(name, **arguments):
    cls = globals().get(name) or getattr(torch.optim, name)
    return lambda groups: cls([{"params": group["params"]} for group in groups], **arguments)


def check_class(name, arguments, stages, **rest):
    recipe = Recipe(optimizer=builder(name, **arguments), clip="norm" if name == "AdamW" else None, steps=4)
    make = models.UnusedEverywhere
    wanted = train(make, "alone", recipe)
    if name == "Rprop":
        # The sign of a gradient of nearly nothing decides on whole steps: compare where it is more than rounding.
        for stage in stages:
            assert difference(train(make, stage, recipe, **rest), wanted) <= 1e-4
        return
    check_against(wanted, make, recipe, stages, **rest)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_class_of_torch_trains_as_plain_torch(name):
    run_ranks(check_class, 2, name, ELEMENTWISE[name], SHARDED)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_classes_that_need_whole_tensors_work_at_stage_0(name):
    run_ranks(check_whole, 2, name)


class Matrices(models.Model):
    """Muon takes matrices only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(9, 9, bias=False) for _ in range(3))

    def inputs(self, generator):
        return torch.randn(4, 9, generator=generator)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def check_whole(name):
    recipe = Recipe(optimizer=builder(name, lr=0.01))
    # Muon works in bf16: its result jumps with the last bit of its input.
    check_against(train(Matrices, "alone", recipe), Matrices, recipe, (0,), 1e-3 if name == "Muon" else 1e-6)


def refusal(optimizers_of, stage, make=models.Toy, **rest):
    module = make()
    lazy = nn.parameter.UninitializedParameter
    hooks = [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()]
    before = {n: p.detach().clone() for n, p in module.named_parameters() if not isinstance(p, lazy)}
    with pytest.raises(ConfigError) as caught:
        make_engine(module, optimizers_of(module), stage, **rest)
    for name, parameter in module.named_parameters():
        assert type(parameter) in (nn.Parameter, lazy), "a refused module is left as it was"
        if name in before and not parameter.is_meta and parameter.layout is torch.strided:
            assert torch.equal(parameter.detach(), before[name])
    assert hooks == [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()]
    return str(caught.value)


def check_refused(name, stages, words):
    make = Matrices if name == "Muon" else models.Toy
    for stage in stages:
        text = refusal(lambda module: [builder(name, lr=0.01)(groups_of(module))], stage, make)
        for word in (name, *words):
            assert word in text, text


@pytest.mark.parametrize(
    ("name", "stages", "words"),
    [
        ("Adafactor", SHARDED, ["stage", "Use stage 0"]),
        ("Muon", SHARDED, ["stage", "Use stage 0"]),
        ("SparseAdam", STAGES, ["sparse"]),
        ("Trust", SHARDED, ["slices", "zero_allow_untested_optimizer"]),
    ],
)
def test_what_cannot_step_on_slices_is_refused_by_name(name, stages, words):
    run_ranks(check_refused, 1, name, stages, words)


def check_lbfgs():
    for stage in STAGES:
        assert "LBFGS" in refusal(lambda module: [torch.optim.LBFGS(module.parameters())], stage)


def test_lbfgs_is_refused():
    run_ranks(check_lbfgs, 1)


def test_a_users_elementwise_class_is_recognised():
    run_ranks(check_class, 2, "Sign", {"lr": 0.01}, STAGES)


def test_a_users_class_that_looks_at_whole_tensors_works_at_stage_0():
    run_ranks(check_class, 2, "Trust", {"lr": 0.01}, (0,))


def check_untested():
    def demanding(groups):
        return Demanding(next(group["params"] for group in groups), model=object())

    assert "Demanding" in refusal(lambda module: [demanding(groups_of(module))], 2)
    recipe = Recipe(optimizer=demanding)
    wanted = train(models.Toy, "alone", recipe)
    for stage in SHARDED:
        found = train(models.Toy, stage, recipe, allow_untested_optimizer=True)
        assert difference(found, wanted) <= 1e-6


def test_a_class_that_cannot_be_tried_is_taken_on_the_users_word():
    run_ranks(check_untested, 2)


@pytest.mark.parametrize("tile", [1 << 20, 64, 10])
def test_sub_group_size_changes_nothing(tile):
    run_ranks(check_class, 2, "AdamW", ELEMENTWISE["AdamW"], SHARDED, tile=tile)


# Groups that come later ----------------------------------------------------------------------------------------------


class Thawing(models.Toy):
    """The embedding and the first blocks are frozen and in no optimizer, at first."""

    depth = 4

    def __init__(self):
        super().__init__()
        for part in (self.emb, self.blocks[0], self.blocks[1]):
            part.requires_grad_(False)


def thaw(module, optimizer, step):
    parts = {1: [module.blocks[1]], 3: [module.blocks[0], module.emb]}.get(step, [])
    added = [parameter for part in parts for parameter in part.parameters()]
    for parameter in added:
        parameter.requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": added, "lr": 0.02})


def check_added_groups(stage, cls):
    build = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    torch.manual_seed(0)
    module, plain = Thawing(), Thawing()
    plain.load_state_dict(module.state_dict())
    ours = build[cls](p for p in module.parameters() if p.requires_grad)
    theirs = build[cls](p for p in plain.parameters() if p.requires_grad)
    engine = make_engine(module, [ours], stage)
    for step in range(5):
        for model, optimizer in ((module, ours), (plain, theirs)):
            thaw(model, optimizer, step)
            optimizer.zero_grad()
        forward_backward(engine, Recipe(), step, 0)
        net = nn.parallel.DistributedDataParallel(plain)  # which parameters are trained is fixed in it
        plain.rank = dist.get_rank()
        x = plain.inputs(torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        net(x).backward()
        ours.step()
        theirs.step()
        wanted = Trained({name: value.detach() for name, value in plain.named_parameters()}, {})
        assert difference(Trained(full_values(engine), {}), wanted) <= 1e-6, f"step {step}"
    assert [len(group["params"]) for group in ours.param_groups] == [len(g["params"]) for g in theirs.param_groups]


@pytest.mark.parametrize("cls", ["SGD", "AdamW"])
@pytest.mark.parametrize("stage", STAGES)
def test_param_groups_added_later_train_as_ddp(stage, cls):
    run_ranks(check_added_groups, 2, stage, cls)


class Toggled(models.Toy):
    """All parameters are in the optimizer; which of them require gradients changes."""

    def forward(self, x):
        self.blocks[0].requires_grad_(self.step >= 2)
        self.blocks[1].requires_grad_(self.step != 2)
        return super().forward(x)


def check_toggled():
    recipe = Recipe(steps=5)
    check_against(train(Toggled, "alone", recipe), Toggled, recipe)


def test_requires_grad_may_be_toggled_between_steps():
    run_ranks(check_toggled, 2)


def check_two_optimizers(stage):
    """Two optimizers step in turns, as those of a GAN."""

    def optimizers(module):
        half = [p for n, p in module.named_parameters() if n.startswith(("emb", "blocks.0"))]
        rest = [p for n, p in module.named_parameters() if not n.startswith(("emb", "blocks.0"))]
        return torch.optim.AdamW(half, lr=0.01), torch.optim.SGD(rest, lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    module, plain = models.Toy(), models.Toy()
    plain.load_state_dict(module.state_dict())
    ours, theirs = optimizers(module), optimizers(plain)
    engine = make_engine(module, list(ours), stage)
    net = nn.parallel.DistributedDataParallel(plain)
    for step in range(4):
        for place in (0, 1):
            ours[place].zero_grad()
            theirs[place].zero_grad()
            x = plain.inputs(torch.Generator().manual_seed(1000 * step + 100 * place + dist.get_rank()))
            forward_backward(engine, Recipe(), step, place)
            net(x).backward()
            ours[place].step()
            theirs[place].step()
    wanted = Trained({name: value.detach() for name, value in plain.named_parameters()}, {})
    assert difference(Trained(full_values(engine), {}), wanted) <= 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_train_as_ddp(stage):
    run_ranks(check_two_optimizers, 2, stage)


# What cannot work ----------------------------------------------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Complex(models.Toy):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))


class Sparse(models.Toy):
    def __init__(self):
        super().__init__()
        self.mask = nn.Parameter(torch.eye(3).to_sparse())


class Meta(models.Toy):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(3, 3, device="meta")


class Lazy(models.Toy):
    def __init__(self):
        super().__init__()
        self.later = nn.LazyLinear(3)


class SparseGradients(models.Toy):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(models.WORDS, models.WIDTH, sparse=True)


def one_group(module):
    return [sgd([p for p in module.parameters() if not isinstance(p, nn.parameter.UninitializedParameter)])]


def empty_one(module):
    optimizer = sgd(module.parameters())
    optimizer.param_groups[0]["params"] = []
    return [optimizer]


def foreign(module):
    return [sgd([*module.parameters(), nn.Parameter(torch.zeros(2, 5))])]


def overlapping(module):
    return [sgd(module.parameters()), sgd(module.head.parameters())]


REFUSALS = {
    "a parameter of complex numbers": (one_group, Complex, ["phase", "complex", "view_as_real"]),
    "a sparse parameter": (one_group, Sparse, ["mask", "sparse"]),
    "a parameter on the meta device": (one_group, Meta, ["extra.weight", "meta", "to_empty"]),
    "a lazy parameter": (one_group, Lazy, ["later.weight", "lazy"]),
    "an embedding with sparse gradients": (one_group, SparseGradients, ["emb", "sparse=False"]),
    "an optimizer without parameters": (empty_one, models.Toy, ["no parameters", "SGD"]),
    "a tensor that is not the module's": (foreign, models.Toy, ["(2, 5)", "register it"]),
    "a parameter in two optimizers": (overlapping, models.Toy, ["head.weight", "one optimizer"]),
}


def check_refusals(what):
    optimizers, make, words = REFUSALS[what]
    for stage in STAGES:
        text = refusal(optimizers, stage, make)
        for word in words:
            assert word in text, text


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_sharded_is_refused_in_words(what):
    run_ranks(check_refusals, 1, what)


def check_closure(stage):
    module = models.Toy()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, [optimizer], stage)
    forward_backward(engine, Recipe(), 0, 0)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: None)
    optimizer.step()


def test_a_closure_given_to_step_is_refused():
    run_ranks(check_closure, 1, 2)
