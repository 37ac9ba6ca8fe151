"""Moments of 8 bits on shards: blocks are the same at every stage, and loading gives back the same bits."""

import pytest
import torch
import torch.distributed as dist

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from ds_lightning.offload.policy import Home, OffloadPolicy
from tests.dist import models
from tests.dist.harness import Recipe, build, forward_backward, full_values, make_engine, train
from tests.pool import run_ranks

BLOCK = 16  # a few blocks in every parameter of the models


def adamw8bit(groups):
    return dsl.optim.AdamW8bit(groups, lr=0.01, block_size=BLOCK)


RECIPE = Recipe(optimizer=adamw8bit, steps=4)


def same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def check_stages(make, alone):
    wanted = train(make, "alone" if alone else 0, RECIPE).values
    for stage in (0, 1, 2, 3):
        for tile in (2**62, 40):
            same(train(make, stage, RECIPE, tile=tile).values, wanted)
    same(train(make, 2, RECIPE, offload=OffloadPolicy(optimizer=Home.HOST)).values, wanted)


# One parameter never has a gradient: runs are cut. In `Sizes` parameters have all kinds of sizes.
@pytest.mark.parametrize("make", [models.UnusedEverywhere, models.Sizes], ids=lambda make: make.__name__)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_stages_and_tiles_train_to_the_same_bits_and_one_rank_as_a_plain_loop(world, make):
    run_ranks(check_stages, world, make, world == 1)


def steps(engine, optimizer, places):
    for step in places:
        optimizer.zero_grad()
        forward_backward(engine, RECIPE, step, 0)
        optimizer.step()


def encoded(engine):
    """Codes and scales of all runs."""
    found = {}
    for run in engine.optimizers[0].runs:
        for key, value in engine.optimizers[0].optimizer.state[run.parameter].items():
            if torch.is_tensor(value):
                found[run.gradients.unit.index, run.start, key] = value.clone()
    return found


def start(make, stage):
    module, optimizer = build(make, RECIPE, dist.get_rank())
    return module, optimizer, make_engine(module, [optimizer], stage)


def check_resuming(make, before, after):
    module, optimizer, engine = start(make, before)
    steps(engine, optimizer, range(2))
    state, codes = optimizer.state_dict(), encoded(engine)
    weights = full_values(engine)
    full = dsl.full_optimizer_state(optimizer.param_groups[0]["params"][0], "exp_avg_sq")
    steps(engine, optimizer, range(2, 4))
    wanted = full_values(engine)
    engine.dissolve()

    assert {key: value.dtype for key, value in state["state"][0].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), torch.float32
    )
    torch.testing.assert_close(full, state["state"][0]["exp_avg_sq"], rtol=0, atol=0)

    module, optimizer, engine = start(make, after)
    with dsl.gathered(module, modifier_rank=0), torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    optimizer.load_state_dict(state)
    if before == after:
        same(encoded(engine), codes)
    steps(engine, optimizer, range(2, 4))
    same(full_values(engine), wanted)
    engine.dissolve()



@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 0)])
def test_a_loaded_state_has_the_same_bits_and_training_goes_on_with_them(before, after):
    run_ranks(check_resuming, 2, models.UnusedEverywhere, before, after)


def check_memory():
    module, optimizer, engine = start(models.Toy, 2)
    steps(engine, optimizer, range(1))
    sharded = engine.optimizers[0]
    elements = sum(run.stop - run.start for run in sharded.runs)
    blocks = sum(run.blocks.count for run in sharded.runs)
    assert sharded.state_nbytes == 2 * elements + 8 * blocks + 4 * len(sharded.runs)
    engine.dissolve()


def test_states_take_two_bytes_per_element_and_eight_per_block():
    run_ranks(check_memory, 2)


def check_refused_on_disk(folder):
    module, optimizer = build(models.Toy, RECIPE, dist.get_rank())
    policy = OffloadPolicy(optimizer=Home.DISK, optimizer_path=folder, smallest=0)
    with pytest.raises(ConfigError, match="AdamW8bit keeps encoded states.*offload_optimizer.device: cpu"):
        make_engine(module, [optimizer], 2, offload=policy)


def test_states_on_disk_are_refused_in_words(tmp_path):
    run_ranks(check_refused_on_disk, 1, tmp_path)
