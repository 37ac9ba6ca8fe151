"""ZeRO++ and MiCS on four ranks that count as two nodes of two."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from ds_lightning.comm.collectives import Collectives
from ds_lightning.comm.feedback import ErrorFeedback, FeedbackOptions
from ds_lightning.comm.hierarchical import HierarchicalGather
from ds_lightning.comm.ledger import Ledger
from ds_lightning.comm.quantized import BLOCK, Gathers, QuantizedReduce, gather_quantized
from ds_lightning.errors import ConfigError
from ds_lightning.ops.quantize import dequantize
from ds_lightning.teams import Grouping
from ds_lightning.zero.access import full_grad, gathered, grad_norms
from ds_lightning.zero.buffers import ScratchPool
from ds_lightning.zero.transport import TransportOptions
from tests.dist import models
from tests.dist.harness import (
    Recipe,
    build,
    difference,
    forward_backward,
    full_values,
    make_engine,
    micro_loss,
    same_bits,
    topology,
    train,
)
from tests.pool import run_ranks

NODES = {"node_size": 2}
RECIPES = {
    "plain": Recipe(),
    "accumulated": Recipe(accumulate=3, clip="norm", optimizer="adamw"),
    "bf16": Recipe(precision="bf16", clip="norm", optimizer="adamw"),
    "evaluated": Recipe(interlude="eval", accumulate=2),
    "no_grad": Recipe(interlude="no_grad", accumulate=2),
    "retain": Recipe(backward="retain"),
    "several": Recipe(backward="several"),
}


# hpZ -----------------------------------------------------------------------------------------------------------------


def check_secondary(name, recipe):
    make = getattr(models, name)
    wanted = train(make, 3, RECIPES[recipe])
    got = train(make, 3, RECIPES[recipe], grouping=Grouping(secondary_size=2, **NODES))
    assert same_bits(got, wanted)
    assert got.losses == wanted.losses
    assert got.norms == wanted.norms


SOME = ["Everything", "CheckpointedReentrant", "CheckpointedInside", "ForeignWeights", "UnusedOnOneRank", "FrozenHalf"]


QUICK = [("Everything", "accumulated"), ("CheckpointedReentrant", "evaluated")]
REST = [*(("Toy", recipe) for recipe in RECIPES), *((name, "accumulated") for name in SOME[1:])]


@pytest.mark.parametrize(("name", "recipe"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.full) for row in REST)])
def test_second_shards_change_no_bit(name, recipe):
    run_ranks(check_secondary, 4, name, recipe)


def check_second_shards_follow():
    """They are dropped by whatever changes values, kept by a skipped step, and counted."""
    module, optimizer = build(models.Toy, Recipe(), dist.get_rank())
    plain = make_engine(*build_again(), 3).model_state_bytes()
    engine = make_engine(module, [optimizer], 3, grouping=Grouping(secondary_size=2, **NODES))
    near = engine.transport.near
    sharded = [index for index, buffers in engine.units.items() if buffers.sharded]
    extra = sum(engine.units[index].unit.numel * 4 // 2 for index in sharded)
    assert engine.model_state_bytes() == plain
    forward_backward(engine, Recipe(), 0, 0)
    assert all(map(near, sharded))
    assert engine.transport.state_nbytes == extra
    optimizer.zero_grad()  # no step: as after an overflow
    before = engine.ledger.bytes_across
    with torch.no_grad(), engine.passes.step_scope():
        models_loss(module)
    assert engine.ledger.bytes_across == before, "weights crossed nodes though they had not changed"
    forward_backward(engine, Recipe(), 0, 0)
    optimizer.step()
    assert not any(map(near, sharded))
    with torch.no_grad(), engine.passes.step_scope():
        fresh = models_loss(module)
    assert all(map(near, sharded))
    with engine.state_dicts.loading():
        module.load_state_dict({name: value * 2 for name, value in full_values(engine).items()})
    assert not any(map(near, sharded))
    with torch.no_grad(), engine.passes.step_scope():
        assert models_loss(module) != fresh
    with gathered(module, modifier_rank=3), torch.no_grad():
        module.head.weight.zero_()
    with gathered(module):
        assert not module.head.weight.any()
    assert engine.transport.state_nbytes == extra


def build_again():
    module, optimizer = build(models.Toy, Recipe(), dist.get_rank())
    return module, [optimizer]


def models_loss(module):
    return float(micro_loss(module, Recipe(), 0, 0, 0))


def test_second_shards_last_until_values_change():
    run_ranks(check_second_shards_follow, 4)


# Bytes ---------------------------------------------------------------------------------------------------------------


def traffic(transport, grouping):
    """(bytes, bytes across nodes) per fp32 element of forward's gathers, of backward's gathers, and of reductions."""
    module, optimizer = build(models.Toy, Recipe(), dist.get_rank())
    engine = make_engine(module, [optimizer], 3, grouping=Grouping(**grouping, **NODES), transport=transport)
    forward_backward(engine, Recipe(), 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    numel = sum(buffers.unit.numel for buffers in engine.units.values())
    assert all(buffers.sharded for buffers in engine.units.values())
    gathers, seen = [], []
    original = engine.transport.gather

    def gather(buffers, *args, **kwargs):
        gathers[-1] += buffers.unit.numel
        return original(buffers, *args, **kwargs)

    engine.transport.gather = gather

    def measured(run):
        gathers.append(0)
        engine.ledger.clear()
        result = run()
        reductions = ("reduce_scatter", "all_to_all")
        found = engine.ledger.entries
        seen.append((found.get("all_gather"), [found[name] for name in reductions if name in found]))
        return result

    def forward():
        with engine.passes.step_scope():
            return micro_loss(module, Recipe(), 1, 0, dist.get_rank())

    def backward(loss):
        with engine.passes.backward_scope():
            loss.backward()

    loss = measured(forward)
    measured(lambda: backward(loss))
    (first, nothing), (second, reduced) = seen
    assert not nothing
    assert gathers[0] == numel
    result = {
        "numel": numel,
        "forward": (first.bytes_sent / numel, first.bytes_across / numel),
        "backward": (second.bytes_sent, second.bytes_across, gathers[1]),
        "reduce": (sum(e.bytes_sent for e in reduced) / numel, sum(e.bytes_across for e in reduced) / numel),
    }
    engine.dissolve()
    return result


def check_traffic():
    int8, int4 = 1 + 4 / BLOCK, 1 / 2 + 4 / BLOCK
    # Four ranks: to 3/4 of them a chunk of 1/4 each, two of the three on the other node. fp32 is 4 bytes.
    plain = traffic(TransportOptions(), {})
    assert plain["forward"] == plain["reduce"] == (3, 2)
    sent, across, numel = plain["backward"]
    assert (sent, across) == (3 * numel, 2 * numel)

    near = traffic(TransportOptions(), {"secondary_size": 2})
    assert near["forward"] == near["reduce"] == (3, 2)
    assert near["backward"] == (2 * numel, 0, numel)

    weights = traffic(TransportOptions(quantized_weights=True), {})
    assert weights["forward"] == (3 / 4 * int8, 2 / 4 * int8)
    assert weights["reduce"] == (3, 2)
    sent, across, numel = weights["backward"]
    assert (sent, across) == (3 / 4 * int8 * numel, 2 / 4 * int8 * numel)

    # To the neighbour the halves of two targets, then to the other node a quarter.
    gradients = traffic(TransportOptions(quantized_gradients=True), {"levels": True})
    assert gradients["forward"] == (3, 2)
    assert gradients["reduce"] == (3 / 4 * int4, 1 / 4 * int4)
    one_step = traffic(TransportOptions(quantized_gradients=True), {})
    assert one_step["reduce"] == (3 / 4 * int4, 2 / 4 * int4)

    both = traffic(
        TransportOptions(quantized_weights=True, quantized_gradients=True), {"secondary_size": 2, "levels": True}
    )
    assert both["forward"] == (3 / 4 * int8, 2 / 4 * int8)
    assert both["backward"][:2] == (2 * both["backward"][2], 0)
    assert both["reduce"] == (3 / 4 * int4, 1 / 4 * int4)

    steps = traffic(TransportOptions(hierarchical_gather=True), {"levels": True})
    assert steps["forward"] == (3, 1)
    assert steps["reduce"] == (3, 2)

    # Half of the model each: gathers stay inside; the half is reduced, and the reduced quarter sent back, across.
    copies = traffic(TransportOptions(), {"shard_size": 2})
    assert copies["forward"] == (2, 0)
    sent, across, numel = copies["backward"]
    assert (sent, across) == (2 * numel + copies["numel"], copies["numel"])
    assert copies["reduce"] == (2 + 1, 1)


def test_bytes_on_the_wire_are_those_of_the_papers():
    run_ranks(check_traffic, 4)


# Quantized ------------------------------------------------------------------------------------------------------------

CHUNK = 6 * BLOCK


def awkward(rank, dtype):
    """What a rank has: for each of four chunks a block of each kind, the kinds in another order on each rank."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(4, 6, BLOCK, generator=generator)
    for chunk in range(4):
        values[chunk, (rank + 1) % 6] = 0
        values[chunk, (rank + 2) % 6] *= 1e-3
        values[chunk, (rank + 2) % 6, 7] = 3e4  # one outlier
        values[chunk, (rank + 3) % 6] *= 1e-41  # subnormal
        values[chunk, 5] = torch.randn(BLOCK, generator=generator)
    return values.view(-1).to(dtype)


def largest(values):
    """The largest magnitude of the block of each element."""
    return values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)


TINY = 1.5e-36  # a block of less becomes zeros


def check_gather(dtype, levels):
    ranks = topology(grouping=Grouping(levels=levels, **NODES))
    pool = ScratchPool(ranks.device)
    gathers: Gathers = Collectives.create(ranks, Ledger())
    if levels:
        inside, across = (
            Collectives.create(ranks, Ledger(), team) for team in (ranks.teams.inside, ranks.teams.across)
        )
        gathers = HierarchicalGather(gathers, across, inside, pool)
    everything = awkward(0, dtype)
    full = torch.full_like(everything, torch.nan)
    own = slice(dist.get_rank() * CHUNK, (dist.get_rank() + 1) * CHUNK)
    full[own] = everything[own]
    gather_quantized(gathers, full, "test", 0, 10**9, pool).wait()
    exact, got = everything.double(), full.double()
    bound = largest(exact) / 254 * (1 + 1e-6) + torch.finfo(dtype).eps / 2 * exact.abs() + TINY
    assert bool(((got - exact).abs() <= bound).all())
    assert not got[exact == 0].any() or dtype != torch.float32
    everyone = [torch.empty_like(full) for _ in range(4)]
    dist.all_gather(everyone, full)
    assert all(torch.equal(full, other) for other in everyone), "ranks compute with different weights"

    for bad in (torch.inf, -torch.inf, torch.nan):
        broken = everything.clone()
        broken[CHUNK + 3] = bad
        full = torch.zeros_like(broken)
        full[own] = broken[own]
        gather_quantized(gathers, full, "test", 0, 10**9, pool).wait()
        assert full[CHUNK : CHUNK + BLOCK].isnan().all()
        assert full[:CHUNK].isfinite().all()
        assert full[CHUNK + BLOCK :].isfinite().all()


def check_gathers():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for levels in (False, True):
            check_gather(dtype, levels)


def check_reduce(dtype, levels):
    rank, ranks = dist.get_rank(), topology(grouping=Grouping(levels=levels, **NODES))
    pool = ScratchPool(ranks.device)
    teams = (ranks.teams.inside, ranks.teams.across) if levels else (None,)
    steps = [Collectives.create(ranks, Ledger(), team) for team in teams]
    every = [awkward(number, dtype) for number in range(4)]
    own = slice(rank * CHUNK, (rank + 1) * CHUNK)

    def mean(values, before=None):
        out = torch.zeros(CHUNK) if before is None else before.clone()
        pending = QuantizedReduce(steps, values, "test", 1, pool)
        if rank % 2:
            pending.advance()
        pending.finish(out, 1 / 4, before is not None)
        return out

    exact = sum(values.double() for values in every)[own]
    if levels:
        # The neighbour's gradient, the gradient of the other node's rank that does not send to this one, and their sum.
        partner = (rank + 2) % 4
        there = largest(every[partner ^ 1].double()[own])
        partial = largest((every[partner].double() + every[partner ^ 1].double())[own]) + there / 14
        error = largest(every[rank ^ 1].double()[own]) + there + partial
    else:
        error = sum(largest(every[number].double()[own]) for number in range(4) if number != rank)
    rounding = 8 * 2**-24 * sum(values.double()[own].abs() for values in every)
    got = mean(every[rank]).double()
    assert bool(((4 * got - exact).abs() <= error / 14 * (1 + 1e-6) + rounding + 4 * TINY).all())

    same = torch.full((4 * CHUNK,), 0.75, dtype=dtype)  # equal everywhere: the mean is the value itself
    torch.testing.assert_close(mean(same), torch.full((CHUNK,), 0.75), rtol=2e-7, atol=0)
    before = torch.arange(float(CHUNK))
    torch.testing.assert_close(mean(same, before), before + 0.75)

    for bad in (torch.inf, torch.nan):
        broken = every[rank].clone()
        if rank == 2:
            broken[CHUNK + 3] = bad  # in the chunk of rank 1, on the other node
        out = mean(broken)
        assert bool(out[:BLOCK].isfinite().all()) == (rank != 1)
        assert out[BLOCK:].isfinite().all()


def check_reduces():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for levels in (False, True):
            check_reduce(dtype, levels)


def test_gathered_int8_weights_are_within_half_a_step_and_alike_on_all_ranks():
    run_ranks(check_gathers, 4)


def test_int4_gradients_give_the_mean_within_half_a_step_of_each_contribution():
    run_ranks(check_reduces, 4)


# Training with quantized weights and gradients ------------------------------------------------------------------------

ALL = TransportOptions(quantized_weights=True, quantized_gradients=True)


def check_gradients(name):
    """At equal weights, gradients differ from those of plain stage 3 by no more than what was sent may be off."""
    make, found = getattr(models, name), []
    for transport, levels in ((TransportOptions(), False), (TransportOptions(quantized_gradients=True), True)):
        module, optimizer = build(make, Recipe(), dist.get_rank())
        grouping = Grouping(levels=levels, **NODES)
        engine = make_engine(module, [optimizer], 3, grouping=grouping, transport=transport)
        forward_backward(engine, Recipe(), 0, 0)
        forward_backward(engine, Recipe(), 0, 1)  # accumulates
        found.append({n: full_grad(p) for n, p in module.named_parameters()})
        norms = grad_norms(module)
        torch.testing.assert_close(
            norms["grad_2.0_norm_total"],
            math.sqrt(sum(float(g.double().square().sum()) for g in found[-1].values() if g is not None)),
        )
        engine.dissolve()
    plain, quantized = found
    for key, gradient in plain.items():
        if gradient is None:
            assert quantized[key] is None
            continue
        scale = max(float(g.abs().max()) for g in plain.values() if g is not None)
        assert float((quantized[key] - gradient).abs().max()) < 2 * 4 / 14 * scale
    together = [torch.cat([g.flatten() for g in found.values() if g is not None]) for found in (plain, quantized)]
    assert torch.cosine_similarity(*together, dim=0) > 0.99
    assert together[1].norm() == pytest.approx(float(together[0].norm()), rel=0.05)  # no multiple of the mean


@pytest.mark.parametrize("name", ["Toy", pytest.param("UnusedOnOneRank", marks=pytest.mark.full)])
def test_quantized_gradients_are_the_mean_of_all_ranks(name):
    run_ranks(check_gradients, 4, name)


def check_ranks_agree(recipe):
    """Losses on equal batches are equal to the bit: every rank computes with the same weights, and steps alike."""
    module, optimizer = build(models.Toy, recipe, dist.get_rank())
    grouping = Grouping(secondary_size=2, levels=True, **NODES)
    engine = make_engine(module, [optimizer], 3, grouping=grouping, transport=ALL, precision=recipe.precision)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(engine, recipe, step, 0)
        optimizer.step()
        module.eval()
        with torch.no_grad(), engine.passes.step_scope():
            losses = engine.agreement.everyone(float(micro_loss(module, recipe, 9, 0, 0)))
        module.train()
        assert len(set(losses)) == 1, losses
        with torch.no_grad(), engine.passes.evaluation(), engine.passes.step_scope():
            assert float(micro_loss(module, recipe, 9, 0, 0)) == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_compute_with_the_same_quantized_weights(precision):
    run_ranks(check_ranks_agree, 4, Recipe(precision=precision, optimizer="adamw"))


def check_exact_values():
    """What users read and save are the owners' values, never what was sent."""
    module, optimizer = build(models.Toy, Recipe(), dist.get_rank())
    engine = make_engine(module, [optimizer], 3, transport=ALL, grouping=Grouping(**NODES))
    wanted = dict(build(models.Toy, Recipe(), 0)[0].named_parameters())
    with gathered(module):
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.detach(), wanted[name].detach()), name
    for name, value in full_values(engine).items():
        assert torch.equal(value, wanted[name].detach()), name
    for name, value in module.state_dict().items():
        assert torch.equal(value, wanted[name].detach()), name
    with torch.no_grad(), engine.passes.step_scope():
        with gathered(module):
            shown = module.head.weight.detach().clone()
            assert not torch.equal(shown, wanted["head.weight"])
            assert torch.equal(module.state_dict()["head.weight"], wanted["head.weight"].detach())
        most = max(float(wanted[name].abs().max()) for name in ("emb.weight", "head.weight", "head.bias"))  # one unit
        assert float((shown - wanted["head.weight"]).abs().max()) <= most / 254
        with pytest.raises(ConfigError, match="zero_quantized_weights"), gathered(module, modifier_rank=0):
            pass
    with gathered(module, modifier_rank=1), torch.no_grad():
        module.head.weight.mul_(3)
    torch.testing.assert_close(full_values(engine)["head.weight"], wanted["head.weight"].detach() * 3)
    engine.dissolve()


def test_users_see_the_owners_values():
    run_ranks(check_exact_values, 4)


def check_trains(name, recipe):
    wanted = train(getattr(models, name), 3, recipe)
    grouping = Grouping(secondary_size=2, levels=True, **NODES)
    got = train(getattr(models, name), 3, recipe, transport=ALL, grouping=grouping)
    assert got.losses == pytest.approx(wanted.losses, rel=0.1)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("Everything", Recipe(accumulate=2, clip="norm", optimizer="adamw", precision="bf16", interlude="eval")),
        *(
            pytest.param(name, recipe, marks=pytest.mark.full)
            for name, recipe in [
                ("CheckpointedReentrant", Recipe(accumulate=2)),
                ("CheckpointedInside", Recipe()),
                ("UnusedOnOneRank", Recipe()),
                ("ForeignWeights", Recipe(backward="several")),
                ("Experts", Recipe(interlude="eval")),
                ("FrozenHalf", Recipe(backward="retain")),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_together_trains_close_to_stage_3(name, recipe):
    run_ranks(check_trains, 4, name, recipe)


# MiCS -----------------------------------------------------------------------------------------------------------------


def check_copies(name, recipe, size):
    make = getattr(models, name)
    wanted = train(make, 3, recipe)
    for levels in (False, True) if size == 4 else (False,):
        transport = TransportOptions(hierarchical_gather=levels)
        got = train(make, 3, recipe, grouping=Grouping(shard_size=size, levels=levels, **NODES), transport=transport)
        if size == 4:
            assert same_bits(got, wanted)
        assert difference(got, wanted) <= 1e-6
        assert got.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert got.norms == pytest.approx(wanted.norms, rel=1e-5)  # each element once


@pytest.mark.parametrize("size", [1, 2, 4])
def test_copies_of_a_sharded_model_train_as_one(size):
    run_ranks(check_copies, 4, "Everything", RECIPES["accumulated"], size)


@pytest.mark.full
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_of_a_sharded_model_train_as_one_in_all_ways(name, recipe):
    run_ranks(check_copies, 4, name, RECIPES[recipe], 2)


# Frozen weights -------------------------------------------------------------------------------------------------------

FROZEN = TransportOptions(quantized_frozen=True)


def check_frozen(recipe, rest):
    """Training is that of plain stage 3 whose frozen weights are those that int8 can show."""
    module, optimizer = build(models.FrozenHalf, recipe, dist.get_rank())
    engine = make_engine(module, [optimizer], 3, transport=FROZEN, precision=recipe.precision, **rest)
    packed = [buffers for buffers in engine.units.values() if buffers.quantized is not None]
    assert {slot.name for b in packed for slot in b.unit.slots} == {
        name for name, parameter in module.named_parameters() if not parameter.requires_grad
    }
    for buffers in packed:
        assert buffers.state_nbytes == buffers.unit.chunk * (1 + 4 / BLOCK)
    shown, exact = full_values(engine), dict(build(models.FrozenHalf, recipe, 0)[0].named_parameters())
    for buffers in packed:
        largest = max(float(exact[slot.name].abs().max()) for slot in buffers.unit.slots)
        for slot in buffers.unit.slots:
            wanted, eps = exact[slot.name].detach(), torch.finfo(buffers.unit.dtype).eps
            error = (shown[slot.name].float() - wanted).abs()
            assert bool((error <= largest / 254 * (1 + 1e-6) + 2 * eps * largest).all())
    with engine.state_dicts.loading():  # as a checkpoint is read: what int8 showed once, it shows again
        module.load_state_dict({name: value.clone() for name, value in shown.items()})
    again = full_values(engine)
    assert all(torch.equal(value, again[name]) for name, value in shown.items())
    with gathered(module, modifier_rank=0), torch.no_grad():
        for buffers in packed:
            buffers.parameters[0].mul_(2)
    doubled = full_values(engine)
    for buffers in packed:
        name = buffers.unit.slots[0].name
        assert float((doubled[name].float() - 2 * shown[name].float()).abs().max()) <= float(largest) / 100
    with engine.state_dicts.loading():
        module.load_state_dict(shown)
    engine.dissolve()

    def make():
        module = models.FrozenHalf()
        module.load_state_dict({name: value.float() for name, value in shown.items()})
        return module

    wanted = train(make, 3, recipe)
    got = train(models.FrozenHalf, 3, recipe, transport=FROZEN, **rest)
    if recipe.precision == "fp32":
        assert got.losses == wanted.losses
        assert same_bits(got, wanted)
    else:
        assert got.losses == pytest.approx(wanted.losses, rel=1e-3)


@pytest.mark.parametrize(
    ("world", "secondary"), [(2, 1), *(pytest.param(*row, marks=pytest.mark.full) for row in ((1, 1), (4, 2)))]
)
def test_frozen_weights_are_int8_between_and_on_the_wire(world, secondary):
    rest = {"grouping": Grouping(secondary_size=secondary)} if secondary > 1 else {}
    for recipe in (Recipe(accumulate=2), Recipe(precision="bf16")):
        run_ranks(check_frozen, world, recipe, rest)


# Error feedback -------------------------------------------------------------------------------------------------------


def carried(feedback, key):
    payload, scales = feedback._errors[key]
    error = torch.empty(payload.numel())
    dequantize(error, payload, scales, block=BLOCK, bits=8)
    return error


def test_what_is_not_sent_is_carried():
    generator = torch.Generator().manual_seed(0)
    pool, key, numel = ScratchPool(torch.device("cpu")), (3, 1), 8 * BLOCK
    for beta in (0.0, 0.8):
        feedback, before = ErrorFeedback(FeedbackOptions(beta, reset=5), BLOCK), torch.zeros(numel)
        for _ in range(4):
            values = torch.randn(numel, generator=generator)
            payload, scales = torch.empty(numel // 2, dtype=torch.uint8), torch.empty(numel // BLOCK)
            feedback.quantize(key, payload, scales, values, pool.take, pool.give)
            sent = torch.empty(numel)
            dequantize(sent, payload, scales, block=BLOCK, bits=4)
            wanted = beta * before + (1 - beta) * (values + before - sent)
            after = carried(feedback, key)
            assert bool(((after - wanted).abs() <= largest(wanted) / 254 * (1 + 1e-5) + 1e-6).all())
            before = after
        feedback.rescale(4.0)
        assert torch.equal(carried(feedback, key), 4 * before)
        assert feedback.nbytes == numel * (1 + 4 / BLOCK)
        values[3] = torch.inf
        feedback.quantize(key, payload, scales, values, pool.take, pool.give)
        assert scales[0].isnan()  # the receiver sees it
        assert scales[1:].isfinite().all()
        assert carried(feedback, key).isfinite().all()  # the next gradient is not spoilt by it
        for _ in range(5):
            assert feedback.nbytes
            feedback.stepped()
        assert not feedback.nbytes
        feedback.quantize(key, payload, scales, torch.ones(numel), pool.take, pool.give)
        feedback.drop(2)
        assert feedback.nbytes
        feedback.drop(3)
        assert not feedback.nbytes


def check_carrying(levels):
    """Of equal gradients the mean over rounds comes ever closer to what was sent: nothing is lost, only late."""
    ranks, rank = topology(grouping=Grouping(levels=levels, **NODES)), dist.get_rank()
    pool, feedback = ScratchPool(ranks.device), ErrorFeedback(FeedbackOptions(beta=0.0), BLOCK)
    teams = (ranks.teams.inside, ranks.teams.across) if levels else (None,)
    steps = [Collectives.create(ranks, Ledger(), team) for team in teams]
    every = [torch.randn(4 * CHUNK, generator=torch.Generator().manual_seed(number)) for number in range(4)]
    exact = sum(every)[rank * CHUNK : (rank + 1) * CHUNK] / 4
    total, errors = torch.zeros(CHUNK), []
    for number in range(1, 17):
        out = torch.empty(CHUNK)
        QuantizedReduce(steps, every[rank], "test", 1, pool, feedback, 0).finish(out, 1 / 4, False)
        total += out
        errors.append(float((total / number - exact).norm() / exact.norm()))
    assert errors[0] > 0.05
    assert errors[-1] < errors[0] / 8


def check_carryings():
    for levels in (False, True):
        check_carrying(levels)


def test_carried_errors_arrive_later():
    run_ranks(check_carryings, 4)


def look(engine):
    return {name: full_grad(parameter) for name, parameter in engine.module.named_parameters()}, grad_norms(
        engine.module
    )


def window(grouping, looks):
    """What is seen in a window and after it, the bytes that each backward sends across nodes, and the engine."""
    recipe, seen, crossed = Recipe(accumulate=3), [], []
    module, optimizer = build(models.UnusedOnOneRank, recipe, dist.get_rank())
    engine = make_engine(module, [optimizer], 3, grouping=Grouping(**grouping, **NODES))
    for step, micro, sync in ((0, 0, False), (0, 1, False), (0, 2, True), (1, 0, True), (1, 1, False)):
        before = engine.ledger.bytes_across
        with nullcontext() if sync else engine.passes.no_sync():
            forward_backward(engine, recipe, step, micro)
        crossed.append(engine.ledger.bytes_across - before)
        if looks:
            seen.append(look(engine))
    seen.append(look(engine))
    optimizer.step()
    return seen, crossed, engine


def check_windows():
    """Copies are summed once in a window, or when someone looks; gradients are those of plain stage 3."""
    wanted = window({}, looks=True)[0]
    for looks in (False, True):
        seen, crossed, engine = window({"shard_size": 2}, looks)
        if not looks:
            whole = 4 * sum(buffers.unit.chunk for buffers in engine.units.values())
            assert crossed == [0, 0, whole, whole, 0]
        for (gradients, norms), (plain, others) in zip(seen, wanted if looks else wanted[-1:], strict=True):
            for name, gradient in plain.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)
            assert norms == pytest.approx(others, rel=1e-5, abs=1e-6)


def test_copies_are_summed_once_in_a_window():
    run_ranks(check_windows, 4)


# Failures, compilers --------------------------------------------------------------------------------------------------


class Trips(models.Toy):
    """Fails in the middle of backward on all ranks, when told to."""

    depth = 5
    trip = False

    def body(self, h):
        for place, block in enumerate(self.blocks):
            h = block(h)
            if place == 1 and self.trip:
                h.register_hook(lambda _: 1 / 0)
        return h


def check_failed(transport, grouping):
    found = []
    for fails in (False, True):
        module, optimizer = build(Trips, Recipe(), dist.get_rank())
        engine = make_engine(module, [optimizer], 3, grouping=Grouping(**grouping, **NODES), transport=transport)
        forward_backward(engine, Recipe(), 0, 0)
        optimizer.step()
        optimizer.zero_grad()
        if fails:  # a reduction is under way, of which the second step has not begun
            module.trip = True
            with pytest.raises(ZeroDivisionError):
                forward_backward(engine, Recipe(), 1, 0)
            module.trip = False
            optimizer.zero_grad()
        for step in (1, 2):
            optimizer.zero_grad()
            forward_backward(engine, Recipe(), step, 0)
            optimizer.step()
        assert engine.residency.live_numel() == 0
        found.append(full_values(engine))
        engine.dissolve()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_backward_that_fails_leaves_nothing_under_way():
    run_ranks(check_failed, 4, ALL, {"secondary_size": 2, "levels": True})
    run_ranks(check_failed, 4, TransportOptions(), {"shard_size": 2})


def check_compiled(transport, grouping):
    losses = []
    for compiled in (False, True):
        module, optimizer = build(models.Toy, Recipe(), dist.get_rank())
        if compiled:
            for block in module.blocks:
                block.compile(backend="aot_eager")
        engine = make_engine(module, [optimizer], 3, grouping=Grouping(**grouping, **NODES), transport=transport)
        for step in range(2):
            optimizer.zero_grad()
            losses.append(forward_backward(engine, Recipe(), step, 0))
            optimizer.step()
        engine.dissolve()
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.full
def test_compiled_blocks_see_what_others_see():
    run_ranks(check_compiled, 4, ALL, {"secondary_size": 2, "levels": True}, timeout=110)
    run_ranks(check_compiled, 4, FROZEN, {"shard_size": 2}, timeout=110)
