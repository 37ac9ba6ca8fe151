"""One training loop for the engine at any stage and for the references it is compared with.

`train(make, "alone")` plays all ranks in one process with plain torch, `train(make, "ddp")` is DistributedDataParallel,
`train(make, stage)` is the engine. All of them run in every rank and see the same batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_lightning.layout.flat import LayoutOptions
from ds_lightning.optim import clip as clipping
from ds_lightning.precision.dtypes import DtypePolicy
from ds_lightning.teams import Grouping
from ds_lightning.topology import Topology
from ds_lightning.zero import access
from ds_lightning.zero.engine import ZeroEngine
from ds_lightning.zero.options import EngineOptions
from ds_lightning.zero.plan import StagePlan

STAGES = (0, 1, 2, 3)
MAX_NORM = 0.05  # below the gradients' norms, so it binds
MAX_VALUE = 0.002

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
}


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    steps: int = 3
    accumulate: int = 1
    clip: str | None = None
    """`"norm"` or `"value"`."""
    precision: str = "fp32"
    """`"fp32"`, `"fp64"` or `"bf16"` (16-bit compute, fp32 masters)."""
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "sgd"
    backward: str = "scoped"
    """`"scoped"`, `"plain"` (no `backward_scope`), `"retain"` (twice over one graph), `"several"` (two losses) or
    `"manual"` (two losses in one step, as with manual optimization)."""
    interlude: str = ""
    """What happens between micro-batches: `"eval"`, `"no_grad"`."""


USUAL = Recipe()


@dataclass
class Trained:
    """What came out, equal on all ranks."""

    values: dict[str, torch.Tensor] = field(repr=False)
    buffers: dict[str, torch.Tensor] = field(repr=False)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def flat(self) -> torch.Tensor:
        return torch.cat([value.double().flatten() for value in self.values.values()])


def topology(seconds: float = 30, grouping: Grouping | None = None) -> Topology:
    if dist.get_world_size() == 1:
        return Topology.single()
    return Topology.create(torch.device("cpu"), timedelta(seconds=seconds), grouping=grouping)


def options(
    threshold: int = 0,
    precision: str = "fp32",
    frozen_masters: bool = False,
    narrow_masters: bool = False,
    narrow_states: bool = False,
    **rest: Any,
) -> EngineOptions:
    compute = torch.bfloat16 if precision == "bf16" else None
    dtypes = DtypePolicy(compute, frozen_masters, narrow_masters, narrow_states)
    return EngineOptions(layout=LayoutOptions(param_persistence_threshold=threshold), dtypes=dtypes, **rest)


def make_engine(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    stage: int,
    seconds: float = 30,
    grouping: Grouping | None = None,
    tell: Callable[[str], None] | None = None,
    **rest: Any,
) -> ZeroEngine:
    ranks = topology(seconds, grouping)
    engine = ZeroEngine(module, optimizers, ranks, StagePlan.of(stage), options(**rest), tell=tell)
    access.remember(engine)
    return engine


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Three groups: matrices, vectors, scalars; or the model's own."""
    if hasattr(module, "groups"):
        return module.groups()
    parameters = [p for p in module.parameters() if p.requires_grad]
    found = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for p in parameters if p.ndim == 0]},
    ]
    return [group for group in found if group["params"]]


def build(make: Callable[[], nn.Module], recipe: Recipe, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Rank 0's model has the reference's values, the others' are off in everything that must follow rank 0."""
    torch.manual_seed(0)
    module = make()
    if recipe.precision == "fp64":
        module.double()
    if rank:
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data + rank
    builder = OPTIMIZERS[recipe.optimizer] if isinstance(recipe.optimizer, str) else recipe.optimizer
    return module, builder(groups_of(module))


def micro_loss(
    module: nn.Module, recipe: Recipe, step: int, micro: int, rank: int, net: nn.Module | None = None
) -> Any:
    """The loss of one micro-batch, divided by the window."""
    module.rank, module.step, module.micro = rank, step, micro
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    x = module.inputs(generator)
    if x.is_floating_point() and recipe.precision == "fp64":
        x = x.double()
    torch.manual_seed(step)  # random branches are the same on all ranks
    cast = torch.autocast("cpu", torch.bfloat16) if recipe.precision == "bf16" else nullcontext()
    with cast:
        return (net or module)(x) / recipe.accumulate


def train(make: Callable[[], nn.Module], kind: str | int, recipe: Recipe = USUAL, **rest: Any) -> Trained:
    if kind == "alone":
        return _train_alone(make, recipe)
    if kind == "ddp":
        return _train_ddp(make, recipe)
    return _train_sharded(make, int(kind), recipe, **rest)


def _train_alone(make: Callable[[], nn.Module], recipe: Recipe) -> Trained:
    """Gradients of every rank's batches one after the other, summed by hand: nothing of ours, nothing of DDP's.

    Under bf16-mixed the matrices of a second copy are rounded to bf16 and compute; their gradients go to fp32 masters,
    which the frozen ones do not have.
    """
    world = dist.get_world_size()
    masters, optimizer = build(make, recipe, 0)
    module = masters
    if recipe.precision == "bf16":
        module = build(make, recipe, 0)[0]
        for parameter, master in zip(module.parameters(), masters.parameters(), strict=True):
            if parameter.ndim >= 2:
                parameter.data = parameter.data.bfloat16()
                if not master.requires_grad:  # nothing trains it: there is no other copy
                    master.data = parameter.data
    parameters, targets = list(module.parameters()), list(masters.parameters())
    result = Trained({}, {})
    for step in range(recipe.steps):
        total: list[torch.Tensor | None] = [None] * len(parameters)
        for micro in range(recipe.accumulate):
            for rank in range(world):
                module.zero_grad()
                loss = micro_loss(module, recipe, step, micro, rank)
                loss.backward(retain_graph=recipe.backward == "retain")
                if recipe.backward == "retain":
                    loss.backward()
                if recipe.backward in ("several", "manual"):
                    micro_loss(module, recipe, step, micro + 50, rank).backward()
                if rank == dist.get_rank():
                    result.losses.append(loss.item())
                for place, parameter in enumerate(parameters):
                    if parameter.grad is not None:
                        seen, gradient = total[place], parameter.grad.to(targets[place].dtype)
                        total[place] = gradient.clone() if seen is None else seen + gradient
        for target, gradient in zip(targets, total, strict=True):
            target.grad = None if gradient is None else gradient / world
        _clip_plain(masters, recipe, result)
        optimizer.step()
        with torch.no_grad():
            for parameter, target in zip(parameters, targets, strict=True):
                if parameter is not target:
                    parameter.copy_(target)
    return _collect(masters, result)


def _train_ddp(make: Callable[[], nn.Module], recipe: Recipe) -> Trained:
    module, optimizer = build(make, recipe, 0)
    net = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    result = Trained({}, {})
    for step in range(recipe.steps):
        optimizer.zero_grad()
        for micro in range(recipe.accumulate):
            last = micro == recipe.accumulate - 1
            with nullcontext() if last else net.no_sync():
                loss = micro_loss(module, recipe, step, micro, dist.get_rank(), net)
                loss.backward()
            result.losses.append(loss.item())
        _clip_plain(module, recipe, result)
        optimizer.step()
    return _collect(module, result)


def _clip_plain(module: nn.Module, recipe: Recipe, result: Trained) -> None:
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM if recipe.clip == "norm" else float("inf"))
    result.norms.append(float(norm))
    if recipe.clip == "value":
        torch.nn.utils.clip_grad_value_(module.parameters(), MAX_VALUE)


def _train_sharded(
    make: Callable[[], nn.Module],
    stage: int,
    recipe: Recipe,
    prepare: Callable[[ZeroEngine], None] = lambda engine: None,
    **rest: Any,
) -> Trained:
    module, optimizer = build(make, recipe, dist.get_rank())
    engine = make_engine(module, [optimizer], stage, precision=recipe.precision, **rest)
    prepare(engine)
    result = Trained({}, {})
    for step in range(recipe.steps):
        optimizer.zero_grad()
        for micro in range(recipe.accumulate):
            if recipe.interlude:
                _interlude(engine, recipe, step, micro)
            last = micro == recipe.accumulate - 1
            with nullcontext() if last else engine.passes.no_sync():
                result.losses.append(forward_backward(engine, recipe, step, micro))
            assert engine.residency.live_numel() == 0, "gathered parameters are left after backward"
        clip_sharded(engine, recipe, result)
        optimizer.step()
    found = _collect(module, result, engine)
    names = list(found.values)
    engine.dissolve()
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter.detach(), found.values[name]), name
    assert names == [name for name, _ in module.named_parameters()]
    return found


def forward_backward(engine: ZeroEngine, recipe: Recipe, step: int, micro: int) -> float:
    """One micro-batch; the loss."""
    module, rank = engine.module, dist.get_rank()

    def loss_of(micro: int) -> torch.Tensor:
        with engine.passes.step_scope():
            return micro_loss(module, recipe, step, micro, rank)

    losses: list[torch.Tensor] = []

    def backward(loss: torch.Tensor, **how: Any) -> None:
        with nullcontext() if recipe.backward == "plain" else engine.passes.backward_scope():
            loss.backward(**how)

    if recipe.backward == "manual":
        with engine.passes.step_scope():
            for place in (micro, micro + 50):
                losses.append(loss_of(place))
                backward(losses[-1])
        return losses[0].item()
    loss = loss_of(micro)
    backward(loss, retain_graph=recipe.backward == "retain")
    if recipe.backward == "retain":
        backward(loss)
    if recipe.backward == "several":
        backward(loss_of(micro + 50))
    return loss.item()


def _interlude(engine: ZeroEngine, recipe: Recipe, step: int, micro: int) -> None:
    module = engine.module
    if recipe.interlude == "eval":
        module.eval()
        with torch.no_grad(), engine.passes.evaluation():
            for _ in range(1 + dist.get_rank()):  # ranks have different numbers of batches
                with engine.passes.step_scope():
                    micro_loss(module, recipe, step + 7, micro, dist.get_rank())
        module.train()
    else:
        with torch.no_grad(), engine.passes.step_scope():
            micro_loss(module, recipe, step + 7, micro, dist.get_rank())
    assert engine.residency.live_numel() == 0, "gathered parameters are left after an evaluation"


def clip_sharded(engine: ZeroEngine, recipe: Recipe, result: Trained) -> None:
    sharded = engine.optimizers[0]
    norm = clipping.total_norm(sharded.reduced_gradients(owned=True), 2.0, engine.agreement)
    result.norms.append(norm)
    if recipe.clip == "norm":
        clipping.clip_by_norm(sharded.reduced_gradients(), MAX_NORM, norm)
    elif recipe.clip == "value":
        clipping.clip_by_value(sharded.reduced_gradients(), MAX_VALUE)


def full_values(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    """Every parameter's master values, by name. Collective."""
    found = {}
    for index, buffers in engine.units.items():
        full = engine.values.full_values(index)
        for slot in buffers.unit.slots:
            found[slot.name] = full[slot.start : slot.stop].view(slot.shape).clone()
    return {name: found[name] for name, _ in engine.module.named_parameters()}


def _collect(module: nn.Module, result: Trained, engine: ZeroEngine | None = None) -> Trained:
    with torch.no_grad():
        if engine is not None:
            result.values = full_values(engine)
        else:
            result.values = {name: p.detach().clone() for name, p in module.named_parameters()}
        result.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return result


def difference(got: Trained, wanted: Trained) -> float:
    """Norm of the difference of all weights, relative to their norm."""
    assert list(got.values) == list(wanted.values)
    for name, value in wanted.values.items():
        assert got.values[name].shape == value.shape, name
        # Under bf16-mixed a frozen matrix has no fp32 master.
        assert got.values[name].dtype in (value.dtype, torch.bfloat16), name
    return float((got.flat() - wanted.flat()).norm() / wanted.flat().norm())


def same_bits(left: Trained, right: Trained) -> bool:
    return all(torch.equal(value, right.values[name]) for name, value in left.values.items())


def check_against(
    wanted: Trained,
    make: Callable[[], nn.Module],
    recipe: Recipe,
    stages: Any = STAGES,
    bound: float = 1e-6,
    **rest: Any,
) -> dict[int, Trained]:
    """Train at each stage and compare weights, losses and norms with the reference."""
    found = {}
    for stage in stages:
        found[stage] = train(make, stage, recipe, **rest)
        far = difference(found[stage], wanted)
        assert far <= bound, f"stage {stage}: the weights are {far:.2e} of their norm away"
        compare_numbers(found[stage].losses, wanted.losses, 10 * bound, f"stage {stage}: losses")
        compare_numbers(found[stage].norms, wanted.norms, 100 * bound, f"stage {stage}: gradient norms")
    return found


def compare_numbers(got: list[float], wanted: list[float], relative: float, what: str) -> None:
    left, right = torch.tensor(got, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    assert left.shape == right.shape, what
    far = ((left - right).abs() / right.abs().clamp_min(1e-3)).max()
    assert far <= relative, f"{what} {got} differ from {wanted}"


def late(engine: ZeroEngine, rank: int, seconds: float = 0.01) -> None:
    """Make a rank slow to join every collective, so that those of the others stay in flight."""
    if dist.get_rank() != rank:
        return
    for name in ("reduce_scatter", "all_gather"):
        original = getattr(engine.collectives, name)

        def delayed(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return original(*args, **kwargs)

        setattr(engine.collectives, name, delayed)
