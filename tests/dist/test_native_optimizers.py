"""The optimizers of ds_lightning on shards: as plain torch at every stage, and the same bits at all of them."""

import pytest
import torch

import ds_lightning as dsl
from tests.dist import models
from tests.dist import reference_optimizers as published
from tests.dist.harness import STAGES, Recipe, check_against, train
from tests.pool import run_ranks

SHARDED = (1, 2, 3)

OURS = {
    "AdamW": {"lr": 0.01},
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}


def builder(module, name, **arguments):
    return lambda groups: getattr(module, name)([{"params": group["params"]} for group in groups], **arguments)


def assert_same_bits(found):
    first, *others = (trained.values for trained in found)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def check_as_torch(name):
    arguments = OURS[name]
    theirs = {key: value for key, value in arguments.items() if key != "adam_w_mode"}
    make = models.UnusedEverywhere  # runs are cut where parameters have no gradient
    clip = "norm" if name == "AdamW" else None
    wanted = train(make, "alone", Recipe(optimizer=builder(torch.optim, name, **theirs), clip=clip, steps=4))
    recipe = Recipe(optimizer=builder(dsl.optim, name, **arguments), clip=clip, steps=4)
    assert_same_bits(check_against(wanted, make, recipe, SHARDED).values())


@pytest.mark.parametrize("name", OURS)
def test_each_class_trains_as_its_counterpart_in_torch_at_every_stage(name):
    run_ranks(check_as_torch, 2, name)


def check_stages(name, arguments):
    recipe = Recipe(optimizer=builder(dsl.optim, name, **arguments), steps=4)
    assert_same_bits([train(models.UnusedEverywhere, stage, recipe) for stage in SHARDED])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("Lion", {"lr": 0.003, "weight_decay": 0.1}), ("AdamW", {"lr": 0.01, "moment_dtype": "bf16"})],
    ids=["Lion", "AdamW with bf16 moments"],
)
def test_all_stages_train_to_the_same_bits(name, arguments):
    run_ranks(check_stages, 2, name, arguments)


PUBLISHED = {
    "AdamW": (published.adamw, {"lr": 0.003, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}, {}),
    "Adam": (published.adam, {"lr": 0.003, "eps": 1e-6, "weight_decay": 0.1}, {"adam_w_mode": False}),
    "Lion": (published.lion, {"lr": 0.001, "betas": (0.9, 0.99), "weight_decay": 0.1}, {}),
    "Adagrad": (published.adagrad, {"lr": 0.02, "eps": 1e-6, "weight_decay": 0.1}, {}),
    "SGD": (published.sgd, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}, {}),
}


def check_published(name, steps):
    rule, arguments, switches = PUBLISHED[name]

    def reference(groups):
        return published.Reference([{"params": group["params"], "rule": rule, **arguments} for group in groups])

    wanted = train(models.Everything, "alone", Recipe(optimizer=reference, steps=steps, precision="fp64"))
    ours = builder(dsl.optim, name, **arguments, **switches)
    check_against(
        wanted, models.Everything, Recipe(optimizer=ours, steps=steps, precision="fp64"), STAGES, bound=1e-11
    )


FIFTY = [pytest.param(world, 50, marks=pytest.mark.full) for world in (1, 2, 3)]


@pytest.mark.parametrize(("world", "steps"), [(2, 6), *FIFTY])
@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_are_those_of_the_published_equations(name, world, steps):
    run_ranks(check_published, world, name, steps)
