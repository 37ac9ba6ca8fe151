"""Ranks that fail or go other ways: the others end within the timeout, with an error that says who, what and where."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from ds_lightning.errors import TopologyError
from tests.dist import models
from tests.dist.harness import STAGES, Recipe, forward_backward, full_values, groups_of, make_engine
from tests.pool import fresh_ranks, run_ranks

SECONDS = 3  # the timeout given
BOUND = 3 * SECONDS + 4  # a rank may wait for a gather, then for a reduction; and this machine is busy


def made(stage, make=models.Toy):
    torch.manual_seed(0)
    module = make()
    optimizer = torch.optim.SGD(groups_of(module), lr=0.1)
    return make_engine(module, [optimizer], stage, seconds=SECONDS), optimizer


def story(action):
    """How an action ended, how long it took."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def leave_out_a_step(stage):
    engine, optimizer = made(stage)
    forward_backward(engine, Recipe(), 0, 0)
    optimizer.step()
    found = story(lambda: forward_backward(engine, Recipe(), 1, 0)) if dist.get_rank() == 0 else None
    dist.barrier()  # rank 1 is alive, but elsewhere
    return found


ENDS = [0, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 3]


@pytest.mark.parametrize("stage", ENDS)
def test_a_rank_that_does_not_take_part_is_an_error_within_the_timeout(stage):
    kind, text, seconds = fresh_ranks(leave_out_a_step, 2, stage, timeout=50)[0].result
    assert kind == "TopologyError"
    assert text.startswith("rank 0: ")
    assert f"waited for up to {SECONDS} s" in text
    if stage == 3:
        assert "all-gather of unit" in text
        assert "emb.weight" in text or "blocks.0" in text
    assert seconds <= BOUND


def die_in_backward(stage):
    engine, optimizer = made(stage)
    forward_backward(engine, Recipe(), 0, 0)
    optimizer.step()
    if dist.get_rank() == 1:
        engine.module.blocks[1].down.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return story(lambda: forward_backward(engine, Recipe(), 1, 0))


@pytest.mark.parametrize("stage", ENDS)
def test_a_killed_rank_is_an_error_within_the_timeout(stage):
    outcomes = fresh_ranks(die_in_backward, 3, stage, timeout=50)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.timed_out, outcome.output
        kind, text, seconds = outcome.result
        assert kind == "TopologyError"
        assert f"rank {outcome.rank}: " in text
        assert "Another rank has failed" in text or "did not answer" in text or "nothing arrived" in text
        assert seconds <= BOUND


class Apart(models.Toy):
    """Rank 1 runs another block than rank 0: at stage 3 neither can give the other what it needs."""

    def body(self, h):
        return self.blocks[1 + self.rank % 2](self.blocks[0](h))


def go_apart(make):
    engine, _ = made(3, make)
    return story(lambda: forward_backward(engine, Recipe(), 0, 0))


def test_a_branch_that_depends_on_the_rank_is_an_error_that_names_the_blocks():
    outcomes = fresh_ranks(go_apart, 2, Apart, timeout=50)
    for outcome, block in zip(outcomes, ("blocks.1", "blocks.2"), strict=True):
        kind, text, seconds = outcome.result
        assert kind == "TopologyError"
        assert f"rank {outcome.rank}: all-gather of unit" in text
        assert block in text
        assert "other modules" in text
        assert seconds <= BOUND


def test_experts_that_are_not_gathered_as_one_are_an_error_where_ranks_route_differently():
    outcomes = fresh_ranks(go_apart, 2, models.ExpertsLeaf, timeout=50)
    for outcome in outcomes:
        kind, text, seconds = outcome.result
        assert kind == "TopologyError"
        assert "moe.experts" in text
        assert seconds <= BOUND


def check_lonely_forward():
    """A forward outside any step on one rank."""
    engine, _ = made(3)
    if dist.get_rank() == 0:
        x = engine.module.inputs(torch.Generator())
        with pytest.raises(TopologyError, match=r"outside a training.*ds_lightning\.gathered"):
            engine.module(x)
        with pytest.raises(TopologyError, match=r"blocks\.1 outside a training"):
            engine.module.blocks[1](torch.zeros(1, models.WIDTH))
    dist.barrier()


def test_a_forward_outside_a_step_on_one_rank_is_an_error_in_words():
    run_ranks(check_lonely_forward, 2)


def check_failure_in_backward(stage):
    """All ranks fail alike in the middle of backward; the next step is as if nothing had been."""
    engine, optimizer = made(stage)
    twin, other = made(stage)
    handle = engine.module.blocks[1].down.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward_backward(engine, Recipe(), 0, 0)
    handle.remove()
    for _ in range(2):
        for one, its in ((engine, optimizer), (twin, other)):
            its.zero_grad()
            forward_backward(one, Recipe(), 1, 0)
            its.step()
    wanted = full_values(twin)
    for name, value in full_values(engine).items():
        assert torch.equal(value, wanted[name]), name
    assert engine.residency.live_numel() == 0


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_after_a_backward_that_failed_everywhere(stage):
    run_ranks(check_failure_in_backward, 2, stage, timeout=40)
