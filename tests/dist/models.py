"""Small models that are awkward in one way each. `model(x)` is the loss of one micro-batch."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS = 13
WIDTH = 9  # odd, and no multiple of any world size


class Model(nn.Module):
    """What the harness expects.

    Attributes:
        rank: whose batch this is; the harness sets it before each forward, also where one process plays all ranks.
        step: number of the optimizer step.
        micro: number of the micro-batch in its window.
    """

    rank = 0
    step = 0
    micro = 0

    def inputs(self, generator):
        return torch.randint(0, WORDS, (3, 5), generator=generator)


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, h):
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class Toy(Model):
    """Embedding, blocks, head; the others change one part of it."""

    block = Block
    depth = 3

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.depth))
        self.head = nn.Linear(WIDTH, WORDS)

    def body(self, h):
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x):
        return F.cross_entropy(self.head(self.body(self.emb(x))).flatten(0, 1), x.flatten())


class Everything(Model):
    """The model of the parity matrix: three groups, a frozen layer, a tied pair, an unused parameter, buffers."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        h = self.emb(x) + self.shift
        for block in self.blocks:
            h = block(h)
        # Beside the batch norm, not behind it: it would leave biases gradients of pure noise, which Adam blows up.
        h = self.frozen(h).flatten(0, 1) + self.batch_norm(h.flatten(0, 1)) * self.scale
        return F.cross_entropy(self.head(h).to(self.shift.dtype), x.flatten())


class Feed(Model):
    """Linear layers alone: under bf16-mixed each gradient is a bf16 number, for DDP as for us."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, WORDS)

    def inputs(self, generator):
        return torch.randn(6, WIDTH, generator=generator)

    def forward(self, x):
        target = torch.arange(len(x), device=x.device) % WORDS
        return F.cross_entropy(self.head(torch.tanh(self.blocks(x))).float(), target)


# Shapes --------------------------------------------------------------------------------------------------------------


class EmptyParameters(Toy):
    """Trainable parameters without elements: first, in the middle of a block, last."""

    class block(Block):
        def __init__(self):
            super().__init__()
            self.middle = nn.Linear(WIDTH, 0, bias=False)
            self.tail = nn.Linear(WIDTH, WIDTH)

        def forward(self, h):
            return self.tail(super().forward(h)) + self.middle(h).sum()

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.empty(0, 8))
        self.last = nn.Linear(8, 0, bias=False)

    def forward(self, x):
        return super().forward(x) + self.first.sum() + self.last(torch.ones(2, 8)).sum()


class Sizes(Model):
    """Blocks of parameters of 1, 2, 4, 7 and 10 elements, and of 0-dim ones."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(torch.randn(n) for n in (1, 2, 4, 7, 10))
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, h):
            for part in self.parts:
                h = h + torch.tanh(h * part.mean() + part.square().sum()) * self.scale
            return h

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def inputs(self, generator):
        return torch.randn(4, generator=generator)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).square().mean()


class OneNumber(Toy):
    """A group that holds fewer elements than there are ranks."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(1))
        self.three = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.bias.sum() + self.three.square().sum()

    def groups(self):
        rest = [p for p in self.parameters() if p is not self.bias and p is not self.three]
        return [{"params": [self.bias]}, {"params": rest}, {"params": [self.three], "weight_decay": 0.1}]


class Strided(Model):
    """Weights that are not contiguous: channels_last, transposed, expanded."""

    class block(nn.Module):
        dense = False

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(8, 4).t())
            self.spread = nn.Parameter(torch.randn(3, 1, 1).expand(3, 4, 4))
            if self.dense:
                self.spread.data = self.spread.data.contiguous()

        def forward(self, h):
            return h + torch.tanh(self.conv(h) + self.spread) * torch.einsum("ij->", self.turned.sin())

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def inputs(self, generator):
        return torch.randn(2, 3, 4, 4, generator=generator)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class StridedReference(Strided):
    """torch's optimizers refuse expanded parameters."""

    class block(Strided.block):
        dense = True


class Blocks(Model):
    """Parameters of a quarter, a half and all of 64 elements and one beside: around bucket sizes."""

    def __init__(self):
        super().__init__()
        sizes = (15, 16, 17, 31, 32, 33, 63, 64, 65, 192)
        self.blocks = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.randn(n))]) for n in sizes)

    def inputs(self, generator):
        return torch.randn(2, generator=generator)

    def forward(self, x):
        return sum((x.sum() * part[0] + part[0].square()).sin().mean() for part in self.blocks)


# Tied and shared -----------------------------------------------------------------------------------------------------


class TiedAcrossBlocks(Toy):
    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.head.weight = self.emb.weight


class CalledTwice(Toy):
    """A shared module: its first gradient is not its last."""

    how: str | None = None

    def body(self, h):
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2], self.blocks[0]):
            h = block(h) if self.how is None else checkpoint(block, h, use_reentrant=self.how == "reentrant")
        return h


class CalledTwiceReentrant(CalledTwice):
    how = "reentrant"


class CalledTwiceNonReentrant(CalledTwice):
    how = "non-reentrant"


class Checkpointed(Toy):
    depth = 4

    def body(self, h):
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h


class CheckpointedReentrant(Toy):
    depth = 4

    def body(self, h):
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return h


class CheckpointedPairs(Toy):
    """Checkpoints around two blocks, and one block checkpointed again inside."""

    depth = 4
    reentrant = False

    def pair(self, h, first):
        h = checkpoint(self.blocks[first], h, use_reentrant=self.reentrant)
        return self.blocks[first + 1](h)

    def body(self, h):
        for first in (0, 2):
            h = checkpoint(self.pair, h, first, use_reentrant=self.reentrant)
        return h


class CheckpointedPairsReentrant(CheckpointedPairs):
    reentrant = True


class CheckpointedInside(Toy):
    """The checkpoint lies inside the block."""

    class block(Block):
        def forward(self, h):
            inner = super().forward
            return checkpoint(inner, h, use_reentrant=False) + 0.1 * self.norm(h)


# Unused --------------------------------------------------------------------------------------------------------------


class UnusedEverywhere(Toy):
    """A whole block, a parameter inside a block, and a root parameter that no one uses."""

    class block(Block):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(WIDTH, 3)

    depth = 4

    def __init__(self):
        super().__init__()
        self.left_out = nn.Parameter(torch.ones(5))

    def body(self, h):
        for place, block in enumerate(self.blocks):
            if place != 2:
                h = block(h)
        return h


class UnusedOnOneRank(Toy):
    """Deep enough that reductions queue up while the other rank goes on gathering."""

    depth = 7

    class block(Block):
        def __init__(self):
            super().__init__()
            self.branch = nn.Linear(WIDTH, WIDTH)
            self.take = False

        def forward(self, h):
            h = super().forward(h)
            return h + self.branch(h) if self.take else h

    def body(self, h):
        for block in self.blocks:
            block.take = self.rank == 0
            h = block(h)
        return h


class LastBlockUnusedOnOneRank(UnusedOnOneRank):
    def body(self, h):
        for place, block in enumerate(self.blocks):
            block.take = self.rank == 0 or place < self.depth - 1
            h = block(h)
        return h


class UsedInOneMicroBatch(UnusedOnOneRank):
    depth = 3

    def body(self, h):
        for block in self.blocks:
            block.take = self.micro == 1
            h = block(h)
        return h


class UnusedInChangedOrder(UnusedOnOneRank):
    """What the step before leads to expect is wrong: blocks run once or twice, in another order or not at all."""

    depth = 6

    def body(self, h):
        order = [(0, 1, 2, 3, 4, 5, 4, 3, 2), (5, 4, 3, 2, 1, 0), (2, 0, 3, 1, 5, 4, 2), (1, 1, 2, 3, 4, 5)]
        for place in order[self.step % 4]:
            self.blocks[place].take = self.rank == 0
            h = self.blocks[place](h)
        return h


class UnusedAndRecomputedTwice(UnusedOnOneRank):
    """Blocks are complete, and may be released, before backward enters them again; on one rank they never are."""

    depth = 5

    def body(self, h):
        for place in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0):
            self.blocks[place].take = self.rank == 0
            h = checkpoint(self.blocks[place], h, use_reentrant=True)
        return h


class SometimesNothing(Toy):
    """In some steps a rank, in some all ranks, leave the extra parameter out."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def body(self, h):
        h = super().body(h)
        use = (True, self.rank == 0, False, self.rank == 1)[self.step % 4]
        return h + self.extra(h) if use else h


# Control flow --------------------------------------------------------------------------------------------------------


class LayerDrop(Toy):
    """Which layers run is drawn from a seed that ranks share."""

    depth = 5

    def body(self, h):
        keep = torch.rand(self.depth, generator=torch.Generator().manual_seed(self.step)) < 0.6
        for block, kept in zip(self.blocks, keep.tolist(), strict=True):
            if kept:
                h = block(h)
        return h


class ChangedOrder(Toy):
    depth = 4

    def body(self, h):
        order = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 1, 2)][self.step % 4]
        for place in order:
            h = self.blocks[place](h)
        return h


class Experts(Toy):
    """A mixture of experts: which of them a rank uses depends on its tokens."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, h):
            flat = h.flatten(0, 1)[:4]
            weight, choice = self.gate(flat).softmax(-1).max(-1)
            out = torch.zeros_like(flat)
            for place, expert in enumerate(self.experts):
                chosen = (choice == place).nonzero().flatten()
                if len(chosen):
                    out = out.index_add(0, chosen, expert(flat[chosen]) * weight[chosen, None])
            return h + out.mean()

    depth = 4


class ExpertsLeaf(Model):
    """One mixture of experts that lies in no repeated block: to be named as a leaf."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.moe = Experts.block()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return F.cross_entropy(self.head(self.moe(self.emb(x))).flatten(0, 1), x.flatten())


# Weights used elsewhere ----------------------------------------------------------------------------------------------


class ForeignWeights(Toy):
    """The embedding's and a block's weights used by the root, a bare top-level parameter."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        h = self.body(self.emb(x)) * self.gain
        h = h + torch.tanh(F.linear(h, self.blocks[1].up.weight)).mean()
        return F.cross_entropy(F.linear(h, self.emb.weight).flatten(0, 1), x.flatten())


class WeightNormInLoss(Toy):
    """A penalty on weights, computed outside their modules."""

    def forward(self, x):
        penalty = sum(p.square().sum() for name, p in self.named_parameters() if "blocks" in name)
        return super().forward(x) + 0.01 * penalty


class Attention(Toy):
    """nn.MultiheadAttention reads its children's weights without calling them."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
            self.feed = Block()

        def forward(self, h):
            return self.feed(h + self.attention(h, h, h, need_weights=False)[0])


class AttentionAtRoot(Toy):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def body(self, h):
        return super().body(h + self.attention(h, h, h)[0])


class AuxLoss(Toy):
    """A loss kept in an attribute of the block and read by the root."""

    class block(Block):
        def forward(self, h):
            out = super().forward(h)
            self.aux = self.up(self.norm(out)).square().mean()
            return out

    def forward(self, x):
        loss = super().forward(x)
        return loss + 0.1 * sum(block.aux for block in self.blocks)


# Outputs -------------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    state: torch.Tensor
    extra: tuple[dict[str, torch.Tensor], None]


class DictOutput(Toy):
    class block(Block):
        def forward(self, h):
            return {"state": super().forward(h), "note": "text", "nothing": None}

    def body(self, h):
        for block in self.blocks:
            h = block(h)["state"]
        return h


class DataclassOutput(Toy):
    class block(Block):
        def forward(self, h):
            return Output(super().forward(h), ({"twice": 2 * h}, None))

    def body(self, h):
        for block in self.blocks:
            out = block(h)
            h = out.state + 0.1 * out.extra[0]["twice"]
        return h


class NamedTupleOutput(Toy):
    class block(Block):
        def forward(self, h):
            return Pair(super().forward(h), self.up(h).mean())

    def body(self, h):
        for block in self.blocks:
            out = block(h)
            h = out.first * out.second.sigmoid()
        return h


class NoneOutput(Toy):
    """A block that puts its result into a box it was given."""

    class block(Block):
        def forward(self, h, box):
            box.append(super().forward(h))

    def body(self, h):
        for block in self.blocks:
            box = []
            assert block(h, box) is None
            h = box[0]
        return h


class OwnParameterOutput(Toy):
    class block(Block):
        def forward(self, h):
            return super().forward(h), self.up.bias

    def body(self, h):
        for block in self.blocks:
            h, bias = block(h)
            h = h + bias.mean()
        return h


class InputOutput(Toy):
    """Blocks that give their input back unchanged, one of them with a frozen input."""

    class block(Block):
        def forward(self, h, skip=False):
            return h if skip else super().forward(h)

    def body(self, h):
        for place, block in enumerate(self.blocks):
            h = block(h, skip=place == 1)
        return h


class PartlyUsedOutput(Toy):
    """Four outputs, the gradient of each comes at another time, of one never."""

    class block(Block):
        def forward(self, h):
            out = super().forward(h)
            return out, self.up(out), self.norm(out), self.up(2 * out)

    def body(self, h):
        early = 0.0
        for block in self.blocks:
            h, up, norm, _ = block(h)
            early = early + up.mean() + norm.square().mean()
        return h + early


class DetachedBetween(Toy):
    """Two losses in one: the graph is cut between blocks."""

    def body(self, h):
        h = self.blocks[0](h)
        h = h + self.blocks[1](h.detach())
        with torch.no_grad():
            g = self.blocks[2](h)
        return h + g


class Delegating(nn.Module):
    """Forwards unknown attributes to the module it wraps, as adapters do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args):
        return self.inner(*args)


class Wrapped(Toy):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Delegating(block) for block in self.blocks)
        self.head = Delegating(self.head)


class FrozenHalf(Toy):
    """Frozen blocks before trainable ones, and the reverse."""

    depth = 4

    def __init__(self):
        super().__init__()
        self.emb.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        self.blocks[3].up.requires_grad_(False)
