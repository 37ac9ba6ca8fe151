"""Gradients of embeddings that travel as rows, against DDP with dense ones; and what they cost."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ds_lightning.errors import ConfigError
from ds_lightning.zero.rows import rows_of
from tests.dist.harness import STAGES, Recipe, difference, full_values, make_engine, same_bits, train
from tests.pool import run_ranks

WORDS = 240


class Words(nn.Module):
    """Two embeddings and a bag; how many words a rank has depends on rank, step and micro-batch, also none.

    Args:
        sparse: gradients of the modules are sparse.
        width: of a word, odd so that slots are not aligned to rows.
        words: how many there are.
    """

    rank = step = micro = 0

    def __init__(self, sparse: bool = False, width: int = 5, words: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, sparse=sparse)
        self.bag = nn.EmbeddingBag(words, width, mode="sum", sparse=sparse)
        self.unused = nn.Embedding(7, width, sparse=sparse)
        self.sometimes = nn.Embedding(words, width, sparse=sparse)
        self.head = nn.Linear(width, 3)

    def inputs(self, generator: torch.Generator) -> torch.Tensor:
        # None, or some of few words, so that they repeat on a rank, once, and meet on others. A dense EmbeddingBag adds
        # what repeats more often in an order that torch does not tell.
        count = (0, 6, 9)[(self.rank + self.step + self.micro) % 3]
        drawn = torch.randperm(24, generator=generator)[: 2 * count].view(count, 2) % 12
        return drawn * (self.words.num_embeddings // 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x).sum(1) + self.bag(x)
        if self.step == 1:
            h = h + self.sometimes(x if self.rank == 0 else x[:0]).mean(1).sum(0)
        out = torch.tanh(self.head(h.to(self.head.weight.dtype)))
        return out.float().square().sum() + 0.01 * self.head.bias.square().sum()


def against_ddp(recipe: Recipe, bound: float) -> None:
    wanted = train(functools.partial(Words, False), "ddp" if recipe.precision == "fp32" else "alone", recipe)
    first = None
    for stage in STAGES:
        for sparse in (True, False):
            found = train(functools.partial(Words, sparse), stage, recipe, sparse=True)
            assert difference(found, wanted) <= bound, (stage, sparse)
            if recipe.accumulate == 1:  # a window is summed before the ranks are, or after: once, or in every backward
                first = first or found
                assert same_bits(found, first), "every stage and both kinds of modules give the same bits"


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(steps=4),
        Recipe(steps=3, accumulate=3, clip="norm"),
        Recipe(steps=3, accumulate=2, optimizer="adamw"),
        Recipe(steps=3, precision="bf16", accumulate=2),
    ],
    ids=["plain", "windows", "adamw", "bf16"],
)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_rows_train_as_dense_gradients_do_under_ddp(recipe, world):
    run_ranks(against_ddp, world, recipe, 1e-6 if recipe.precision == "fp32" else 2e-3)


def bytes_of_one_step(stage: int, words: int, used: int, sparse: bool) -> tuple[int, int, torch.Tensor]:
    """Bytes sent by rows and by dense reductions for one embedding, and its values after a step."""
    torch.manual_seed(0)
    module = nn.Embedding(words, 16, sparse=sparse)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    engine = make_engine(module, [optimizer], stage, sparse=True)
    engine.ledger.clear()
    here = (torch.arange(used) * (words // used) + dist.get_rank()) % words
    with engine.passes.step_scope():
        loss = module(torch.cat([here, here])).square().sum()
    with engine.passes.backward_scope():
        loss.backward()
    entries = dict(engine.ledger.entries)
    optimizer.step()
    value = full_values(engine)["weight"]
    engine.dissolve()
    rows = entries["exchange"].bytes_sent if "exchange" in entries else 0
    return rows, entries["reduce_scatter"].bytes_sent if "reduce_scatter" in entries else 0, value


def costs() -> None:
    words, used, one = 960, 24, 16 * 4 + 4
    torch.manual_seed(0)
    expected = nn.Embedding(words, 16).weight.detach()
    for rank in range(2):
        here = torch.arange(used) * (words // used) + rank
        expected[here] -= 0.5 * (2 * 2 * expected[here]) / 2
    for stage in STAGES:
        for sparse in (True, False):
            rows, dense, value = bytes_of_one_step(stage, words, used, sparse)
            # At stage 0 a rank sends all of its rows, later the half that the other rank owns.
            assert (rows, dense) == (one * (used if stage == 0 else used // 2), 0), stage
            assert torch.allclose(value, expected, rtol=1e-6, atol=0)
        rows, dense, _ = bytes_of_one_step(stage, 48, 48, True)
        assert (rows, dense) == (0, 24 * 16 * 4), "all words are used: the dense reduction is smaller"


def test_only_rows_that_are_used_are_sent_and_never_more_bytes_than_the_whole():
    run_ranks(costs, 2)


def half_precision_overflow() -> None:
    for stage in STAGES:
        module = nn.Embedding(640, 8, sparse=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        engine = make_engine(module, [optimizer], stage, sparse=True)
        with engine.passes.step_scope():
            loss = (module(torch.tensor([3, 600])) * (float("inf") if dist.get_rank() else 1.0)).sum()
        with engine.passes.backward_scope():
            loss.backward()
        gradients = engine.optimizers[0].reduced_gradients(owned=True)
        # Row 600 is owned by rank 1, row 3 by rank 0: rank 1's loss overflows in both.
        assert gradients.unscale_(1.0)
        engine.dissolve()


def test_an_overflow_in_a_row_reaches_its_owner():
    run_ranks(half_precision_overflow, 2)


class Tied(Words):
    """An embedding whose weight is the head's too has dense gradients."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__(sparse)
        self.head = nn.Linear(5, WORDS, bias=True)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.head(self.words(x).sum(1)), x[:, 0], reduction="sum")
        return loss + 0.01 * self.head.bias.square().sum()


def tied() -> None:
    wanted = train(Tied, "ddp", Recipe(steps=3))
    for stage in STAGES:
        for sparse in (False, True):
            found = train(functools.partial(Tied, sparse), stage, Recipe(steps=3), sparse=True)
            assert difference(found, wanted) <= 1e-6, (stage, sparse)


def test_a_weight_that_is_tied_to_a_layer_trains_as_under_ddp():
    run_ranks(tied, 2)


def refused() -> None:
    module = Words(True)
    with pytest.raises(ConfigError, match="sparse_gradients=true"):
        make_engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], 1)
    with pytest.raises(ConfigError, match="SparseAdam steps on sparse gradients"):
        make_engine(module, [torch.optim.SparseAdam(list(module.parameters()), lr=0.1)], 0, sparse=True)


def test_without_the_key_sparse_modules_are_refused_with_its_name():
    run_ranks(refused, 1)


def test_words_that_repeat_often_add_up_as_in_a_dense_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    words, upstream = torch.randint(0, 12, (90,), generator=generator), torch.randn(90, 5, generator=generator)
    found = []
    for sparse in (True, False):
        module = nn.Embedding(40, 5, sparse=sparse)
        module(words).backward(upstream)
        assert module.weight.grad is not None
        rows, values = rows_of(module.weight.grad, torch.float32)
        found.append(torch.zeros(40, 5).index_copy_(0, rows, values))
    assert torch.equal(*found)
