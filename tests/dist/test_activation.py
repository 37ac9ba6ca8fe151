"""Checkpointed blocks of sharded models against the same models without: the same bits at every stage."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_lightning.activation import checkpointing
from ds_lightning.activation.blocks import CheckpointedBlocks, worth_checkpointing
from ds_lightning.activation.host import HostStore
from ds_lightning.activation.options import ActivationOptions
from ds_lightning.activation.region import Region
from ds_lightning.activation.slices import SlicedStore
from ds_lightning.activation.slots import SlotStore
from ds_lightning.config.schema.activation import ActivationCheckpointingConfig
from ds_lightning.errors import RecomputationError
from tests.dist import models
from tests.dist.harness import STAGES, USUAL, Recipe, same_bits, train
from tests.pool import run_ranks


class Dropping(models.Toy):
    """Dropout 0.5 twice in each block, whose input the embedding, a frozen one, gives."""

    depth = 4

    class block(models.Block):
        def forward(self, h):
            return h + F.dropout(self.down(F.dropout(torch.tanh(self.up(self.norm(h))), 0.5)), 0.5)

    def __init__(self):
        super().__init__()
        self.emb.requires_grad_(False)


class ByHand(Dropping):
    """Calls by hand, of blocks and of functions that use weights of two of them."""

    def pair(self, h, first):
        return self.blocks[first + 1](self.blocks[first](h))

    def body(self, h):
        h = checkpointing.checkpoint(self.pair, h, 0)
        return self.blocks[3](checkpointing.checkpoint(self.blocks[2], h))


class Once(ByHand):
    """What `ByHand` computes."""

    def body(self, h):
        for block in self.blocks:
            h = block(h)
        return h


class Mixed(models.Toy):
    """Blocks under the user's own checkpoints, of both kinds, which ours come on top of."""

    depth = 4

    def body(self, h):
        for place, block in enumerate(self.blocks):
            h = models.checkpoint(block, h, use_reentrant=place % 2 == 0)
        return h


def checkpointed(policy: str) -> Any:
    """Hooks for the harness."""

    def prepare(engine):
        how = {
            "full": ActivationOptions,
            "selective": lambda: ActivationOptions(selective=True),
            "offload": lambda: ActivationOptions(HostStore()),
        }[policy]()
        CheckpointedBlocks(worth_checkpointing(engine.scopes), how, engine.passes.before_scope)

    return prepare


RECIPES = {
    "fp32": USUAL,
    "bf16": replace(USUAL, precision="bf16"),
    "accumulating": replace(USUAL, accumulate=2, clip="norm", optimizer="adamw", steps=2),
    "validating": replace(USUAL, interlude="eval", steps=2),
    "plain backward": replace(USUAL, backward="plain", steps=2),
    "retained": replace(USUAL, backward="retain", steps=2),
    "several": replace(USUAL, backward="several", steps=2),
}


def stages_agree(recipe: Recipe, policies: tuple[str, ...], stages: tuple[int, ...] = STAGES) -> None:
    for stage in stages:
        wanted = train(Dropping, stage, recipe)
        for policy in policies:
            got = train(Dropping, stage, recipe, prepare=checkpointed(policy))
            assert same_bits(got, wanted), (stage, policy)
            assert (got.losses, got.norms) == (wanted.losses, wanted.norms), (stage, policy)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_every_stage_gives_the_same_bits(name):
    policies = ("full", "selective", "offload") if name == "fp32" else ("full", "selective")
    run_ranks(stages_agree, 2, RECIPES[name], policies)


@pytest.mark.parametrize(
    "stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.full)], ids=lambda stages: "-".join(map(str, stages))
)
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("fp32", "bf16")])
def test_ways_to_train_give_the_same_bits(name, stages):
    run_ranks(stages_agree, 2, RECIPES[name], ("full", "selective"), stages)


def models_agree(names: tuple[str, ...], policy: str, stages: tuple[int, ...]) -> None:
    for name in names:
        make = getattr(models, name, None) or globals()[name]
        for stage in stages:
            wanted = train(make, stage, replace(USUAL, steps=2))
            got = train(make, stage, replace(USUAL, steps=2), prepare=checkpointed(policy))
            assert same_bits(got, wanted), (name, stage)


ODD = (
    *("Everything", "CalledTwice", "CheckpointedPairs", "CheckpointedPairsReentrant", "CheckpointedInside", "Mixed"),
    *("UnusedEverywhere", "Experts", "ForeignWeights", "Attention", "DictOutput", "DataclassOutput", "NoneOutput"),
    *("OwnParameterOutput", "PartlyUsedOutput", "DetachedBetween", "FrozenHalf", "ChangedOrder", "LayerDrop", "AuxLoss"),
)


@pytest.mark.parametrize(
    ("policy", "stages"),
    [("full", (3,)), *(pytest.param(policy, (1, 2, 3), marks=pytest.mark.full) for policy in ("full", "selective"))],
    ids=["full at stage 3", "full", "selective"],
)
def test_awkward_models_give_the_same_bits(policy, stages):
    run_ranks(models_agree, 2, ODD, policy, stages)


def by_hand() -> None:
    for stage in STAGES:
        assert same_bits(train(ByHand, stage), train(Once, stage)), stage


def test_calls_by_hand_give_the_same_bits():
    run_ranks(by_hand, 2)


def weights_leave() -> None:
    """Between forward and backward of a sharded model nothing of it is gathered, and recomputation fetches it again."""
    seen = []

    class Watched(Dropping):
        def forward(self, x):
            loss = super().forward(x)
            gc.collect()
            seen.append(engine_of[0].residency.live_numel())
            return loss

    engine_of, sizes = [], {}

    def prepare(engine):
        engine_of.append(engine)
        for buffers in engine.units.values():
            sizes[buffers.unit.scope] = sizes.get(buffers.unit.scope, 0) + buffers.unit.numel
        checkpointed("full")(engine)

    train(Watched, 3, prepare=prepare)
    # The last block stays, because backward begins with it.
    assert max(seen) <= sizes[""] + sizes["blocks.3"], (seen, sizes)


def test_saved_tensors_do_not_keep_gathered_weights():
    run_ranks(weights_leave, 2)


# Model parallelism ----------------------------------------------------------------------------------------------------


class Mpu:
    """Both ranks compute on the same inputs."""

    @staticmethod
    def get_model_parallel_group():
        return dist.group.WORLD

    @staticmethod
    def get_model_parallel_rank():
        return dist.get_rank()

    @staticmethod
    def get_model_parallel_world_size():
        return dist.get_world_size()


def stores(group: dist.ProcessGroup) -> dict[str, Any]:
    return {
        "slices": SlicedStore(group, ActivationOptions().store),
        "slices on the host": SlicedStore(group, HostStore()),
        "slots": SlicedStore(group, SlotStore(3)),
        "slots on the host": SlicedStore(group, SlotStore(3, on_host=True)),
    }


def slices() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Tanh(), nn.Linear(7, 5))
    group = dist.group.WORLD
    x = torch.randn(3, 5)  # 15 elements: two slices of 8
    mask, small, flagged = torch.arange(15).view(3, 5) % 2 == 0, torch.ones(1), torch.ones(3, 5)
    flagged.no_checkpointing = True

    def body(x, mask, small, flagged):
        return block(x.masked_fill(mask, 0)) * small + flagged

    def run(function):
        leaf = x.clone().requires_grad_()
        block.zero_grad()
        torch.manual_seed(1)
        y = leaf
        for _ in range(3):
            y = function(y, mask, small, flagged)
        y.square().sum().backward()
        return [t.grad.clone() for t in (*block.parameters(), leaf)]

    wanted = run(body)
    for name, store in stores(group).items():
        how = ActivationOptions(store)
        for _ in range(2):
            got = run(lambda *a, how=how: Region(body, how, "body").forward(a, {}))
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), name
        kept = store.keep([x, mask, small, flagged])
        assert kept.nbytes == 8 * 4 + 15 + 4 + 15 * 4, (name, kept.nbytes)
        assert all(torch.equal(a, b) for a, b in zip(kept.restore(), (x, mask, small, flagged), strict=True))


def test_ranks_of_a_model_parallel_group_share_inputs_out():
    run_ranks(slices, 2)


def configured() -> None:
    front = checkpointing.front()
    try:
        checkpointing.configure(
            Mpu, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2, checkpoint_in_cpu=True
        )
        assert type(front.how.store) is SlicedStore
        checkpointing.model_parallel_cuda_manual_seed(3)
        tracker = checkpointing.get_cuda_rng_tracker()
        with tracker.fork():
            mine = torch.rand(4)
        both = [torch.empty(4) for _ in range(2)]
        dist.all_gather(both, mine)
        assert not torch.equal(*both)
        dist.all_gather(both, torch.rand(4))
        assert torch.equal(*both)

        def body(x):
            with tracker.fork():
                return F.dropout(x, 0.5).tanh()

        def run(function):
            checkpointing.model_parallel_cuda_manual_seed(3)
            x = torch.linspace(0, 1, 24).requires_grad_()
            (function(x) * function(x)).sum().backward()  # inputs are equal on all ranks, results need not be
            return x.grad

        assert torch.equal(run(lambda x: checkpointing.checkpoint(body, x)), run(body))
        left = [checkpointing.checkpoint(body, torch.ones(4, requires_grad=True)) for _ in range(2)]
        with pytest.raises(RecomputationError, match="number_checkpoints=2, but more"):
            checkpointing.checkpoint(body, torch.ones(4, requires_grad=True))
        checkpointing.reset()
        checkpointing.checkpoint(body, torch.ones(4, requires_grad=True)).sum().backward()
        del left
    finally:
        front.__init__()


def test_the_front_partitions_with_an_mpu():
    run_ranks(configured, 2)


def from_block() -> None:
    block = ActivationCheckpointingConfig(partition_activations=True)
    assert type(ActivationOptions.from_config(block, dist.group.WORLD).store) is SlicedStore
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert type(ActivationOptions.from_config(block, alone).store) is not SlicedStore
    assert type(ActivationOptions.from_config(ActivationCheckpointingConfig(), dist.group.WORLD).store) is not SlicedStore


def test_a_group_of_one_partitions_nothing():  # AC-09
    run_ranks(from_block, 2)
