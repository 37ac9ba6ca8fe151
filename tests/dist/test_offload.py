"""Offload changes where values live and nothing else: every result is bitwise what it is without."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from ds_lightning.offload.host import HostMemory
from ds_lightning.offload.policy import Home, OffloadPolicy
from ds_lightning.offload.swap import BufferPool
from ds_lightning.offload.tiles import GRADIENT, MASTER, SHARD
from ds_lightning.optim.ema import Averages
from ds_lightning.zero import access
from tests.dist import models
from tests.dist.harness import (
    Recipe,
    build,
    clip_sharded,
    forward_backward,
    full_values,
    make_engine,
    same_bits,
    train,
    Trained,
)
from tests.dist.test_parity import pairwise
from tests.pool import run_ranks

# (stage, optimizer, parameters)
PLACES = (
    (1, "cpu", "none"),
    (1, "nvme", "none"),
    (2, "cpu", "none"),
    (2, "nvme", "none"),
    (3, "none", "cpu"),
    (3, "none", "nvme"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "cpu", "nvme"),
    (3, "nvme", "none"),
    (3, "nvme", "cpu"),
    (3, "nvme", "nvme"),
)
AXES = {
    "world": (1, 2, 3),
    "place": PLACES,
    "precision": ("fp32", "bf16", "fp64"),
    "accumulate": (1, 3),
    "clip": (None, "norm", "value"),
    "optimizer": ("sgd", "adamw", "fused"),
}
MATRIX = list(product(*AXES.values()))
THIN = pairwise(MATRIX)
REST = [row for row in MATRIX if row not in THIN]


def name_of(row):
    return "-".join("_".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in row)


def policy(folder: str | Path, optimizer: str = "nvme", param: str = "none", **rest: Any) -> OffloadPolicy:
    """Everything goes to disk, however small, in small buffers."""
    settings = {"smallest": 0, "max_in_cpu": 0, "param_buffer_size": 300, "pipeline_read": True, "pipeline_write": True}
    return OffloadPolicy(
        optimizer=Home(optimizer),
        param=Home(param),
        optimizer_path=Path(folder),
        param_path=Path(folder),
        **{**settings, **rest},
    )


class Wide(models.Toy):
    """Units of several tiles, in three groups."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(models.WIDTH)
            self.up = nn.Linear(models.WIDTH, 301)
            self.down = nn.Linear(301, models.WIDTH)

        def forward(self, h):
            return h + self.down(torch.tanh(self.up(self.norm(h))))


def check_row(folder, place, precision, accumulate, clip, optimizer, make=models.Everything, **rest):
    stage, *homes = place
    recipe = Recipe(accumulate=accumulate, clip=clip, precision=precision, optimizer=optimizer)
    wanted = train(make, stage, recipe)
    found = train(make, stage, recipe, offload=policy(folder, *homes, **rest))
    assert same_bits(found, wanted)
    assert found.losses == wanted.losses
    assert found.norms == wanted.norms
    assert os.listdir(folder) == []


@pytest.mark.parametrize("row", THIN, ids=name_of)
def test_training_is_bitwise_the_same(row, tmp_path):
    world, *rest = row
    run_ranks(check_row, world, str(tmp_path), *rest)


@pytest.mark.full
@pytest.mark.parametrize("row", REST, ids=name_of)
def test_training_is_bitwise_the_same_in_the_rest_of_the_matrix(row, tmp_path):
    world, *rest = row
    run_ranks(check_row, world, str(tmp_path), *rest)


@pytest.mark.parametrize(
    ("world", "pipelines"), [(2, (False, False)), (1, (True, False)), (2, (False, True)), (2, (True, True))]
)
def test_tiles_smaller_than_units_change_nothing(world, pipelines, tmp_path):
    read, write = pipelines
    more = {"make": Wide, "pipeline_read": read, "pipeline_write": write, "buffer_count": 3, "fast_init": read}
    run_ranks(check_row, world, str(tmp_path), (3, "nvme", "nvme"), "bf16", 3, "norm", "adamw", **more)


def check_separate(folder, place, precision):
    """Host memory that is not the device's: values are copied to and fro, as they are for a GPU."""
    original = HostMemory.__init__

    def separate(self, device, pin):
        original(self, device, pin)
        self.separate = True

    recipe = Recipe(accumulate=2, clip="norm", precision=precision, optimizer="adamw")
    stage, *homes = place
    copies = []
    wanted = train(models.Everything, stage, recipe)
    with mock.patch.object(HostMemory, "__init__", separate):
        found = train(
            models.Everything,
            stage,
            recipe,
            offload=policy(folder, *homes),
            prepare=lambda engine: copies.extend(not b.aliased for b in engine.units.values() if b.home is not None),
        )
    assert same_bits(found, wanted)
    assert found.norms == wanted.norms
    assert copies
    assert all(copies)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", [p for p in PLACES if p[1] != "none"], ids=lambda p: "-".join(map(str, p)))
def test_host_memory_of_its_own(place, precision, tmp_path):
    run_ranks(check_separate, 2, str(tmp_path), place, precision)


def check_shape(folder):
    """Of the file of a large unit under bf16-mixed."""
    module, optimizer = build(Wide, Recipe(optimizer="adamw", precision="bf16"), dist.get_rank())
    offload = policy(folder, "nvme", "nvme", buffer_count=3)
    engine = make_engine(module, [optimizer], 3, precision="bf16", offload=offload, tile=2048)
    swaps = [b.home.swap for b in engine.units.values() if b.home is not None and b.home.swap is not None]
    wide = max(swaps, key=lambda swap: swap.layout.numel)
    assert list(wide.layout.regions) == [GRADIENT, MASTER, "exp_avg", "exp_avg_sq"]
    assert wide.layout.dtype(SHARD) == torch.bfloat16
    assert wide.layout.tiles > 1
    assert wide.file.nbytes == wide.layout.nbytes
    for _ in range(2):
        forward_backward(engine, Recipe(precision="bf16"), 0, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.homes.space.records.nbytes <= 3 * 4 * 2048 + 3 * 5 * 4096  # buffers, and what aligns regions
    assert all(b.master.numel() == 0 for b in engine.units.values() if b.on_disk)
    assert all(g.grad is None for g in engine.reducer.units.values() if g.on_disk is not None)
    assert engine.model_state_bytes() < engine.homes.disk_bytes
    engine.dissolve()
    assert engine.homes.disk_bytes == 0


def test_what_lies_on_disk_is_not_in_memory(tmp_path):
    run_ranks(check_shape, 2, str(tmp_path))


def check_thresholds(folder):
    module, optimizer = build(models.Everything, Recipe(), dist.get_rank())
    engine = make_engine(module, [optimizer], 3, offload=policy(folder, "nvme", "nvme", smallest=1 << 20))
    assert engine.homes.disk_bytes == 0
    assert not engine.swaps
    engine.dissolve()
    everything = [b for b in make(folder, max_in_cpu=10**9).units.values() if b.sharded]
    assert {b.home.placement.shard for b in everything} == {Home.HOST}
    kept = make(folder, max_in_cpu=everything[0].unit.chunk + everything[1].unit.chunk)
    places = [b.home.placement.shard for b in kept.units.values() if b.sharded]
    assert places == [Home.HOST, Home.HOST] + [Home.DISK] * (len(places) - 2)
    assert [b.shard is not None for b in kept.units.values() if b.sharded] == [True, True] + [False] * (len(places) - 2)


def make(folder, **rest):
    module, optimizer = build(models.Everything, Recipe(), dist.get_rank())
    return make_engine(module, [optimizer], 3, offload=policy(folder, "nvme", "nvme", **rest))


def test_small_units_and_max_in_cpu_stay_in_memory(tmp_path):
    run_ranks(check_thresholds, 2, str(tmp_path))


def check_ratio(folder):
    recipe = Recipe(optimizer="adamw")
    wanted = train(models.Everything, 3, recipe)
    homes = {}

    def look(engine):
        homes[ratio] = sum(b.home is not None and b.home.steps_apart for b in engine.units.values())
        homes["all"] = sum(b.unit.trainable for b in engine.units.values())

    for ratio in (0.0, 0.5, 1.0):
        found = train(models.Everything, 3, recipe, offload=policy(folder, ratio=ratio), prepare=look)
        assert same_bits(found, wanted)
    assert homes[0.0] == 0
    assert 0 < homes[0.5] < homes["all"]
    assert homes[1.0] == homes["all"]


def test_ratio_offloads_a_part_of_the_units(tmp_path):
    run_ranks(check_ratio, 2, str(tmp_path))


# Optimizers ----------------------------------------------------------------------------------------------------------


class StepsTwice(torch.optim.AdamW):
    """A class whose step goes through the hooks of the class above as well."""

    def step(self, closure=None):
        return super().step(closure)


OTHERS = {
    "native": lambda groups: dsl.optim.AdamW(groups, lr=0.01),
    "native16": lambda groups: dsl.optim.AdamW(groups, lr=0.01, moment_dtype="bf16"),
    "lion": lambda groups: dsl.optim.Lion(groups, lr=0.001),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, foreach=False),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.01),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "subclass": lambda groups: StepsTwice(groups, lr=0.01),
}


def check_optimizer(folder, name, places):
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # hooks its class
    for stage, precision, param in places:
        recipe = Recipe(optimizer=OTHERS[name], clip="norm", precision=precision, accumulate=2)
        wanted = train(models.Everything, stage, recipe)
        found = train(models.Everything, stage, recipe, offload=policy(folder, "nvme", param))
        assert same_bits(found, wanted), (stage, precision)


@pytest.mark.parametrize(
    "places",
    [
        [(2, "fp32", "none"), (3, "bf16", "nvme")],
        pytest.param([(2, "bf16", "none"), (3, "fp32", "nvme")], marks=pytest.mark.full),
    ],
    ids=["thin", "rest"],
)
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_any_elementwise_optimizer_steps_from_disk(name, places, tmp_path):
    run_ranks(check_optimizer, 2, str(tmp_path), name, places)


class Untried(torch.optim.SGD):
    def __init__(self, parameters, schedule):
        super().__init__(parameters, lr=schedule[0])


def check_untried(folder):
    module, _ = build(models.Toy, Recipe(), dist.get_rank())
    optimizer = Untried(module.parameters(), [0.1])
    with pytest.raises(ConfigError, match="could not be tried"):
        make_engine(module, [optimizer], 3, offload=policy(folder), allow_untested_optimizer=True)


def test_states_of_unknown_size_are_refused(tmp_path):
    run_ranks(check_untried, 2, str(tmp_path))


def two_optimizers(folder, offload):
    """In turns, on the same units."""
    torch.manual_seed(0)
    module = models.Toy()
    parameters = list(module.parameters())
    optimizers = [torch.optim.AdamW(parameters[0::2], lr=0.01), torch.optim.SGD(parameters[1::2], 0.05, momentum=0.9)]
    engine = make_engine(module, optimizers, 2, offload=offload)
    for step in range(5):
        forward_backward(engine, Recipe(), step, 0)
        optimizer = optimizers[step % 2]
        optimizer.step()
        optimizer.zero_grad()  # the other's gradients go on adding up
    result = full_values(engine)
    engine.dissolve()
    return result


def check_two_optimizers(folder):
    wanted = two_optimizers(folder, None)
    found = two_optimizers(folder, policy(folder))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_two_optimizers_share_units(tmp_path):
    run_ranks(check_two_optimizers, 2, str(tmp_path))


# What users see and change -------------------------------------------------------------------------------------------


def look_and_touch(stage, offload, precision="fp32"):
    """Uses everything that reads or writes values between steps; returns what it saw."""
    recipe = Recipe(optimizer="adamw", clip="norm", precision=precision)
    module, optimizer = build(models.Everything, recipe, dist.get_rank())
    engine = make_engine(module, [optimizer], stage, offload=offload, precision=precision)
    averages = Averages(engine)
    seen: list[Any] = []
    result = Trained({}, {})
    for step in range(3):
        for micro in range(2):
            forward_backward(engine, recipe, step, micro)
        weight = module.blocks[1].up.weight
        seen += [access.full_grad(weight), access.grad_norms(module), access.grad_norms(module, float("inf"))]
        clip_sharded(engine, recipe, result)
        seen += [access.full_grad(weight), access.grad_norms(module)]
        optimizer.step()
        averages.update(0.5)
        optimizer.zero_grad()
        seen += [access.full_param(weight), access.full_optimizer_state(weight, "exp_avg"), averages.full_param(weight)]
        with access.gathered(module.blocks[0], modifier_rank=1), torch.no_grad():
            module.blocks[0].up.weight.mul_(1.5 + dist.get_rank())
        engine.values.show(averages.vectors)
        seen.append(access.full_param(weight))
        engine.values.hide()
        if step == 1:
            whole = module.state_dict()
            seen.append(dict(whole))
            states = optimizer.state_dict()
            seen.append(states)
            with engine.state_dicts.loading():
                module.load_state_dict({key: value * 0.75 for key, value in whole.items()})
            optimizer.load_state_dict(states)
    seen += [result.norms, full_values(engine)]
    engine.dissolve()
    return seen


def equal(left, right):
    if torch.is_tensor(left):
        return torch.equal(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(equal(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return left == right


def check_looks(folder, stage, optimizer, param, precision):
    wanted = look_and_touch(stage, None, precision)
    found = look_and_touch(stage, policy(folder, optimizer, param), precision)
    different = [place for place, pair in enumerate(zip(wanted, found, strict=True)) if not equal(*pair)]
    assert not different, (len(wanted), different, [(wanted[p], found[p]) for p in different[:1]])


@pytest.mark.parametrize(
    "place", [(2, "nvme", "none"), (3, "nvme", "nvme"), (3, "cpu", "cpu")], ids=lambda p: "-".join(map(str, p))
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_are_read_and_written_wherever_they_are(place, precision, tmp_path):
    run_ranks(check_looks, 2, str(tmp_path), *place, precision)


def unfreeze(offload):
    module, optimizer = build(models.Everything, Recipe(), dist.get_rank())
    engine = make_engine(module, [optimizer], 3, offload=offload)
    for step in range(2):
        forward_backward(engine, Recipe(), step, 0)
        optimizer.step()
        optimizer.zero_grad()
    module.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": list(module.frozen.parameters()), "lr": 0.01})
    for step in range(2, 4):
        forward_backward(engine, Recipe(), step, 0)
        optimizer.step()
        optimizer.zero_grad()
    other = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    engine.set_optimizers([other])
    for step in range(4, 6):
        forward_backward(engine, Recipe(), step, 0)
        other.step()
        other.zero_grad()
    result = full_values(engine)
    engine.dissolve()
    return result


def check_unfreeze(folder):
    wanted = unfreeze(None)
    found = unfreeze(policy(folder, "nvme", "nvme"))
    assert equal(found, wanted)


def test_units_are_laid_out_anew(tmp_path):
    run_ranks(check_unfreeze, 2, str(tmp_path))


def check_evaluation(folder):
    for interlude in ("eval", "no_grad"):
        recipe = Recipe(interlude=interlude, optimizer="adamw")
        wanted = train(models.Everything, 3, recipe)
        assert same_bits(train(models.Everything, 3, recipe, offload=policy(folder, "nvme", "nvme")), wanted)
    torch.manual_seed(0)
    plain = models.Everything().eval()
    module = models.Everything().eval()
    module.load_state_dict(plain.state_dict())
    engine = make_engine(module, [], 3, offload=policy(folder, "none", "nvme"))
    assert all(b.on_disk for b in engine.units.values())
    x = torch.randint(0, models.WORDS, (3, 5))
    with torch.no_grad(), engine.passes.step_scope():
        assert torch.equal(module(x), plain(x))


def test_evaluation_reads_parameters_from_disk(tmp_path):
    run_ranks(check_evaluation, 2, str(tmp_path))


# What goes wrong -----------------------------------------------------------------------------------------------------


def check_read_ahead(folder, precision):
    """Values that change while the old ones are being read."""
    module, optimizer = build(models.Everything, Recipe(precision=precision), dist.get_rank())
    engine = make_engine(module, [optimizer], 3, precision=precision, offload=policy(folder, "nvme", "nvme"))
    units = [b for b in engine.units.values() if b.sharded and b.home is not None]
    assert units
    for buffers in units:
        buffers.home.expect()
        buffers.write_master(buffers.start, torch.full((buffers.numel,), 3.0))
        engine.residency.gather(buffers.unit.index)
        assert buffers.full.eq(3.0).all(), buffers.unit.name
    engine.dissolve()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_read_ahead_does_not_outlive_a_change(precision, tmp_path):
    run_ranks(check_read_ahead, 2, str(tmp_path), precision)


def check_failed_steps(folder, offload, pipelines):
    """Steps raise on all ranks, each a little later, and their user goes on as if nothing had been."""
    more = {"pipeline_read": pipelines, "pipeline_write": pipelines}
    home = policy(folder, "nvme", "nvme", **more) if offload else None
    module, optimizer = build(models.Everything, Recipe(), dist.get_rank())
    engine = make_engine(module, [optimizer], 3, offload=home)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    module_of_sgd = sys.modules[torch.optim.SGD.__module__]  # torch.optim hides it
    plain = module_of_sgd.sgd
    for step in range(6):
        forward_backward(engine, Recipe(), step, 0)
        left = iter(range(step))

        def sgd(*args, left=left, **kwargs):
            if next(left, None) is None:
                raise RuntimeError("as asked")
            plain(*args, **kwargs)

        with mock.patch.object(module_of_sgd, "sgd", sgd), pytest.raises(RuntimeError, match="as asked"):
            for _ in range(100):
                optimizer.step()
        engine.give_up_step()
        assert [list(group["params"]) for group in optimizer.param_groups] == groups
        optimizer.zero_grad()
    before = full_values(engine)
    forward_backward(engine, Recipe(), 6, 0)
    optimizer.step()
    after = full_values(engine)
    assert all(not torch.equal(after[name], value) for name, value in before.items() if name.endswith("up.weight"))
    engine.dissolve()


@pytest.mark.parametrize(("offload", "pipelines"), [(False, False), (True, False), (True, True)])
def test_after_steps_that_failed_training_goes_on(offload, pipelines, tmp_path):
    run_ranks(check_failed_steps, 2, str(tmp_path), offload, pipelines)


class Lost:
    """A transfer that did not succeed."""

    done = True

    def join(self):
        pass

    def wait(self):
        raise OSError("lost")


def test_a_transfer_that_failed_costs_no_staging_buffer():
    pool = BufferPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), 1)
    pool.fit(8)
    for _ in range(3):
        pool.give(pool.take(), [Lost()])
    pool.take()
    pool.lose()
    pool.give(pool.take())
    pool.clear()
    assert pool.nbytes == 0
