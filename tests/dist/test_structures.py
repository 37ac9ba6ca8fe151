"""Models of awkward structure train at every stage as plain torch does on all ranks' batches together."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_lightning.errors import ConfigError
from ds_lightning.layout.units import LeafModules
from ds_lightning.zero.reduce import ReduceOptions
from tests.dist import models
from tests.dist.harness import (
    STAGES,
    USUAL,
    Recipe,
    check_against,
    forward_backward,
    full_values,
    groups_of,
    make_engine,
    train,
)
from tests.pool import run_ranks


def check_model(name, recipe=USUAL, stages=STAGES, bound=1e-6, **rest):
    make = getattr(models, name)
    reference = getattr(models, f"{name}Reference", make)
    check_against(train(reference, "alone", recipe), make, recipe, stages, bound, **rest)


STRUCTURES = [
    "EmptyParameters",
    "Sizes",
    "Strided",
    "TiedAcrossBlocks",
    "CalledTwice",
    "CalledTwiceReentrant",
    "CalledTwiceNonReentrant",
    "Checkpointed",
    "CheckpointedReentrant",
    "CheckpointedPairs",
    "CheckpointedPairsReentrant",
    "CheckpointedInside",
    "UnusedEverywhere",
    "ForeignWeights",
    "WeightNormInLoss",
    "Attention",
    "AttentionAtRoot",
    "AuxLoss",
    "DictOutput",
    "DataclassOutput",
    "NamedTupleOutput",
    "NoneOutput",
    "OwnParameterOutput",
    "InputOutput",
    "PartlyUsedOutput",
    "DetachedBetween",
    "Wrapped",
    "FrozenHalf",
]


@pytest.mark.parametrize("name", STRUCTURES)
def test_trains_as_plain_torch_on_all_batches(name):
    run_ranks(check_model, 2, name, timeout=40)


@pytest.mark.parametrize("name", ["LayerDrop", "ChangedOrder", "SometimesNothing"])
def test_a_course_that_changes_from_step_to_step_trains_as_plain_torch(name):
    run_ranks(check_model, 2, name, Recipe(steps=5), timeout=40)


@pytest.mark.parametrize("name", ["UnusedOnOneRank", "LastBlockUnusedOnOneRank", "Experts"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_use_different_parameters_train_as_plain_torch(name, world):
    run_ranks(check_model, world, name, timeout=40)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["UsedInOneMicroBatch", "SometimesNothing"])
def test_parameters_used_in_one_micro_batch_only_train_as_plain_torch(name, accumulate):
    run_ranks(check_model, 2, name, Recipe(accumulate=accumulate, steps=4, clip="norm"), timeout=40)


@pytest.mark.parametrize("name", ["Experts", "UnusedEverywhere", "CheckpointedReentrant", "ForeignWeights"])
def test_bf16_with_fp32_masters_trains_awkward_structures(name):
    # Two steps without accumulation are bitwise equal; later a routing may flip with the last bit of a sum.
    run_ranks(check_model, 2, name, Recipe(precision="bf16", steps=2), timeout=40)


@pytest.mark.parametrize("leaves", [{"names": ("moe",)}, {"classes": ("block",)}, {"name_suffixes": ("oe",)}], ids=str)
def test_experts_outside_a_repeated_block_train_when_they_are_named_as_a_leaf(leaves):
    run_ranks(check_model, 2, "ExpertsLeaf", leaves=LeafModules(**leaves), timeout=40)


# Ways to call backward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backward"),
    [
        (name, backward)
        for name in ("Toy", "CheckpointedReentrant", "CalledTwiceNonReentrant", "UnusedEverywhere")
        for backward in ("plain", "retain", "several")
        if (name, backward) != ("CheckpointedReentrant", "retain")  # torch itself cannot do that
    ],
)
def test_backward_may_be_called_as_in_plain_torch(name, backward):
    run_ranks(check_model, 2, name, Recipe(backward=backward), timeout=40)


@pytest.mark.parametrize("name", ["SometimesNothing", "UnusedOnOneRank"])
@pytest.mark.parametrize("backward", ["plain", "several"])
def test_backward_without_brackets_may_leave_parameters_out(name, backward):
    run_ranks(check_model, 2, name, Recipe(backward=backward, steps=4), timeout=40)


@pytest.mark.parametrize("interlude", ["eval", "no_grad"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_forwards_without_gradients_in_between_change_nothing(interlude, accumulate):
    run_ranks(check_model, 2, "Toy", Recipe(interlude=interlude, accumulate=accumulate), timeout=40)


def test_forwards_without_gradients_in_another_order_in_between_change_nothing():
    run_ranks(check_model, 2, "ChangedOrder", Recipe(interlude="no_grad", steps=4), timeout=40)


# Few elements, many ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["OneNumber", "Sizes"])
def test_ranks_that_own_nothing_take_part(name):
    run_ranks(check_model, 4, name, Recipe(optimizer="adamw", steps=2, clip="norm"), timeout=60)


def poison():
    """Fresh memory holds NaN from now on."""
    original = torch.empty

    def empty(*args, **kwargs):
        out = original(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() and not out.is_meta else out

    torch.empty = empty
    return original


def check_poisoned(name, recipe):
    from ds_lightning.zero.buffers import UnitBuffers

    make = getattr(models, name)
    wanted = train(make, "alone", recipe)
    allocate = UnitBuffers.allocate

    def dirty(self):
        allocate(self)
        self.full.fill_(float("nan"))

    original = poison()
    UnitBuffers.allocate = dirty
    try:
        check_against(wanted, make, recipe)
    finally:
        torch.empty, UnitBuffers.allocate = original, allocate


@pytest.mark.parametrize("name", ["Sizes", "EmptyParameters", "UnusedOnOneRank"])
def test_what_lies_in_fresh_memory_reaches_no_result(name):
    run_ranks(check_poisoned, 3, name, Recipe(optimizer="adamw", clip="norm"), timeout=40)


# After set-up --------------------------------------------------------------------------------------------------------


def check_rank_zero_wins(name, stage):
    torch.manual_seed(0)
    wanted = getattr(models, name)()
    values = {key: value.clone() for key, value in wanted.state_dict().items()}
    torch.manual_seed(dist.get_rank())
    module = getattr(models, name)()
    if dist.get_rank():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data + 1
    engine = make_engine(module, [torch.optim.SGD(groups_of(module), lr=0.1)], stage)
    for key, value in full_values(engine).items():
        assert torch.equal(value, values[key]), key
    for key, buffer in module.named_buffers():
        assert torch.equal(buffer, values[key]), key
    shown = module.state_dict()
    assert list(shown) == list(values)
    for key, value in values.items():
        assert torch.equal(shown[key], value), f"state_dict: {key}"


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_frozen_ones_and_buffers_are_those_of_rank_zero(stage):
    for name in ("Everything", "FrozenHalf", "StridedReference"):
        run_ranks(check_rank_zero_wins, 2, name, stage)


def check_ties(stage):
    module = models.TiedAcrossBlocks()
    engine = make_engine(module, [torch.optim.SGD(groups_of(module), lr=0.1, momentum=0.9)], stage)
    for step in range(2):
        forward_backward(engine, Recipe(), step, 0)
        engine.optimizers[0].optimizer.step()
        assert module.blocks[2].up.weight is module.blocks[0].up.weight
        assert module.head.weight is module.emb.weight
    engine.dissolve()
    assert module.blocks[2].up.weight is module.blocks[0].up.weight


@pytest.mark.parametrize("stage", STAGES)
def test_tied_weights_stay_the_same_object(stage):
    run_ranks(check_ties, 2, stage)


def check_unused_is_refused(stage):
    module = models.UnusedEverywhere()
    strict = ReduceOptions(ignore_unused=False)
    engine = make_engine(module, [torch.optim.SGD(groups_of(module), lr=0.1)], stage, reduce=strict)
    with pytest.raises(ConfigError, match="received no gradient") as caught:
        forward_backward(engine, Recipe(), 0, 0)
    for name in ("left_out", "blocks.0.spare.weight", "blocks.2.up.weight"):
        assert name in str(caught.value) or "..." in str(caught.value)
    assert "left_out" in str(caught.value) or "blocks" in str(caught.value)
    assert "ignore_unused_parameters" in str(caught.value)
    check_model("Toy", Recipe(steps=2), (stage,), reduce=strict)  # where all are used it changes nothing


@pytest.mark.parametrize("stage", STAGES)
def test_unused_parameters_are_named_when_they_are_not_to_be_ignored(stage):
    run_ranks(check_unused_is_refused, 2, stage)


def check_aligned(dtype):
    module = models.Sizes().to(dtype)
    engine = make_engine(module, [torch.optim.SGD(groups_of(module), lr=0.1)], 1)
    for name, parameter in module.named_parameters():
        assert parameter.data_ptr() % 16 == 0, name
        assert not parameter.detach()._base.requires_grad if parameter.detach()._base is not None else True
    engine.dissolve()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_lie_on_sixteen_bytes(dtype):
    run_ranks(check_aligned, 2, dtype)


def check_nothing_is_left(stage):
    module = models.Everything()
    optimizer = torch.optim.SGD(groups_of(module), lr=0.1, momentum=0.9)
    engine = make_engine(module, [optimizer], stage)
    for step in range(2):
        forward_backward(engine, Recipe(), step, 0)
        optimizer.step()
    flats = [weakref.ref(buffers.full) for buffers in engine.units.values()]
    watch = weakref.ref(engine)
    engine.dissolve()
    del engine
    gc.collect()
    assert watch() is None
    assert not [flat for flat in flats if flat() is not None]
    for child in module.modules():
        assert not child._forward_hooks
        assert not child._forward_pre_hooks
        assert not child._state_dict_hooks
        assert not child._state_dict_pre_hooks
    for parameter in module.parameters():
        assert type(parameter) is nn.Parameter
        assert not vars(parameter)
        assert not getattr(parameter, "_post_accumulate_grad_hooks", None)
    assert "zero_grad" not in vars(optimizer)
    module.inputs(torch.Generator())
    module(torch.zeros(3, 5, dtype=torch.long)).backward()  # alone again, on one rank or all


@pytest.mark.parametrize("stage", STAGES)
def test_a_dissolved_engine_leaves_a_plain_module(stage):
    run_ranks(check_nothing_is_left, 2, stage)
