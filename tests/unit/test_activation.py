"""Checkpointed calls against plain ones: same bits, whatever goes in and comes out, and less memory."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import random
from collections import Counter, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ds_lightning as dsl
from ds_lightning.activation import checkpointing
from ds_lightning.activation.blocks import CheckpointedBlocks, worth_checkpointing
from ds_lightning.activation.host import HostStore
from ds_lightning.activation.measure import Profile, Row
from ds_lightning.activation.options import ActivationOptions
from ds_lightning.activation.random_states import RandomStateTracker
from ds_lightning.activation.region import Region
from ds_lightning.activation.selective import KeptResults, expensive_operations
from ds_lightning.activation.slots import SlotStore
from ds_lightning.activation.tree import put_back, take_out
from ds_lightning.demo import ByteGPT
from ds_lightning.errors import ConfigError, RecomputationError
from ds_lightning.layout.units import find_scopes

HOWS = {
    "full": lambda: ActivationOptions(),
    "selective": lambda: ActivationOptions(selective=True),
    "offload": lambda: ActivationOptions(HostStore()),
    "slots": lambda: ActivationOptions(SlotStore(8)),
    "profiled": lambda: ActivationOptions(selective=True, synchronize=True, profile=Profile()),
}
WIDTH = 16
ROWS = 64

Pair = namedtuple("Pair", ["left", "right"])


@pytest.fixture(params=HOWS)
def how(request):
    return HOWS[request.param]()


@pytest.fixture(autouse=True)
def _front():
    """Every test begins with what a process begins with."""
    front = checkpointing.front()
    yield
    front.__init__()


def call(how: ActivationOptions, function: Any, *args: Any, **kwargs: Any) -> Any:
    return Region(function, how, "call").forward(args, kwargs)


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)), generator=torch.Generator().manual_seed(3)).requires_grad_()


class Block(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.drop(self.up(self.norm(x))))))


def gradients(function: Any, *modules: nn.Module, x: torch.Tensor | None = None) -> list[torch.Tensor | None]:
    """Of parameters and of the input, after one backward, and what the random generator draws next."""
    x = inputs() if x is None else x
    x.grad = None
    for module in modules:
        module.zero_grad()
    torch.manual_seed(5)
    function(x).square().sum().backward()
    parameters = [p for module in modules for p in module.parameters()]
    return [None if t.grad is None else t.grad.clone() for t in (*parameters, x)] + [torch.rand(3)]


def same(left: list[Any], right: list[Any]) -> bool:
    pairs = zip(left, right, strict=True)
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


class Count(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


# Same numbers ---------------------------------------------------------------------------------------------------------


def test_dropout_is_drawn_again_and_nothing_else_is_disturbed(how):  # AC-04
    block = Block()
    assert same(gradients(lambda x: call(how, block, x), block), gradients(block, block))


def test_any_arguments_and_results(how):  # AC-01, AC-05
    @dataclass
    class Mask:
        keep: torch.Tensor
        note: str

    weight = nn.Parameter(inputs(WIDTH, WIDTH).detach().clone())

    def function(x, nothing, number, text, mask, pair, *, scale=None, flag=False):
        y = (x @ weight).masked_fill(mask.keep, 0.0) * number
        y = y + sum(pair.left) * pair.right["factor"]
        if flag and nothing is None and text == "a" and mask.note == "b":
            y = torch.tanh(y * scale)
        return y, None, {"same": x, "count": 3, "ids": mask.keep.long()}, [y.sum(), "text"]

    mask = Mask(torch.arange(WIDTH) % 3 == 0, "b")
    results = []
    for run in (lambda *a, **k: function(*a, **k), lambda *a, **k: call(how, function, *a, **k)):
        x, other = inputs(), inputs(1, WIDTH)
        scale = torch.tensor(0.7, requires_grad=True)
        pair = Pair([other, 2 * other], {"factor": scale})
        weight.grad = None
        y, nothing, named, rest = run(x, None, 3, "a", mask, pair, scale=scale, flag=True)
        assert (nothing, named["count"], rest[1]) == (None, 3, "text")
        assert named["same"] is x
        assert named["ids"].dtype == torch.int64
        (y.square().sum() + rest[0]).backward()
        results.append([t.grad for t in (x, other, scale, weight)])
    assert same(*results)


def test_no_input_requires_a_gradient(how):  # AC-03
    table = nn.Embedding(11, WIDTH)
    block = Block()
    ids = torch.randint(0, 11, (ROWS,))

    def body(ids, offset):
        return block(table(ids) + offset)

    offset = torch.ones(WIDTH)

    def run(function):
        block.zero_grad(), table.zero_grad()
        torch.manual_seed(5)
        out = function(ids, offset)
        assert out.requires_grad
        out.square().sum().backward()
        return [p.grad.clone() for p in (*table.parameters(), *block.parameters())]

    assert same(run(lambda *a: call(how, body, *a)), run(body))
    assert not ids.requires_grad


@pytest.mark.parametrize("frozen", ["weight", "input", "all but the bias"])
def test_frozen_parts_get_none_and_the_others_all(how, frozen):
    block = Block()
    x = inputs()
    if frozen == "weight":
        block.up.weight.requires_grad_(False)
    elif frozen == "input":
        x = x.detach()
    else:
        block.requires_grad_(False)
        block.down.bias.requires_grad_(True)
    wanted = gradients(block, block, x=x)
    assert same(gradients(lambda x: call(how, block, x), block, x=x), wanted)


def test_nothing_needs_a_gradient(how):
    block = Block().requires_grad_(False)
    out = call(how, block, inputs().detach())
    assert not out.requires_grad


@pytest.mark.parametrize("outside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_it_was(how, dtype, outside):  # AC-10
    block, seen = Block(), []

    def watched(x):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()))
        seen.append(torch.is_autocast_cache_enabled())
        return block(x)

    def run(function, x):
        with torch.autocast("cpu", dtype, cache_enabled=False):
            return function(x)

    wanted = gradients(lambda x: run(block, x), block)
    with (
        torch.autocast("cpu", torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)
        if outside
        else nullcontext()
    ):
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        assert same(gradients(lambda x: run(lambda x: call(how, watched, x), x), block), wanted) or outside
        assert before == (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    assert seen == [(True, dtype, True), False] * 2


def test_a_forward_without_autocast_stays_so_in_a_backward_under_it(how):
    block = Block()

    def run(function):
        x = inputs()
        block.zero_grad()
        torch.manual_seed(5)
        loss = function(x).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return [t.grad.clone() for t in (*block.parameters(), x)]

    assert same(run(lambda x: call(how, block, x)), run(block))


def test_without_gradients_it_is_a_plain_call(how):
    block = Block().eval()
    with torch.no_grad():
        assert torch.equal(call_by_front(how, block), block(inputs()))
    with torch.inference_mode():
        assert torch.equal(call_by_front(how, block), block(inputs()))


def call_by_front(how, block):
    blocks = CheckpointedBlocks({"block": block}, how)
    try:
        return block(inputs())
    finally:
        blocks.remove()


@pytest.mark.parametrize("kind", ["ours in ours", "ours in torch's", "torch's in ours"])
def test_checkpoints_nest(how, kind):
    first, second = Block(), Block()

    def ours(function, x):
        return call(how, function, x)

    def torchs(function, x):
        return torch_checkpoint(function, x, use_reentrant=False)

    outer, inner = {"ours in ours": (ours, ours), "ours in torch's": (torchs, ours), "torch's in ours": (ours, torchs)}[
        kind
    ]

    def both(x):
        return inner(second, inner(first, x).tanh()) * 2

    def plain(x):
        return second(first(x).tanh()) * 2

    assert same(gradients(lambda x: outer(both, x), first, second), gradients(plain, first, second))


def test_called_twice_and_shared(how):
    block = Block()

    def run(f):
        return lambda x: f(f(x) + x) * f(x)

    assert same(gradients(run(lambda x: call(how, block, x)), block), gradients(run(block), block))


def test_several_backwards_over_one_graph(how):
    block = Block()

    def twice(f):
        def run(x):
            y = f(x)
            y.sum().backward(retain_graph=True)
            y.mean().backward(retain_graph=True)
            return y

        return run

    assert same(gradients(twice(lambda x: call(how, block, x)), block), gradients(twice(block), block))


def test_second_derivatives(how):
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def penalty(f):
        def run(x):
            (g,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
            return g

        return run

    assert same(gradients(penalty(lambda x: call(how, block, x)), block), gradients(penalty(block), block))


def test_a_gradient_inside_the_call(how):
    block = Block(0.0)

    def energy(x):
        with torch.enable_grad():
            y = block(x)
            (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + g.tanh()

    got = gradients(lambda x: call(how, energy, x), block)
    assert same(got, gradients(energy, block))


def test_a_custom_function_may_read_what_it_saved_twice(how):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,), (again,) = ctx.saved_tensors, ctx.saved_tensors
            return gradient * (x + again)

    assert same(gradients(lambda x: call(how, Square.apply, x)), gradients(Square.apply))


# In place -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["inside", "after"])
def test_an_input_changed_in_place_is_an_error_that_says_so(how, when):
    if isinstance(how.store, SlotStore):
        pytest.skip("slots hold copies")

    def inside(x, table):
        y = x * table
        table.add_(1)
        return y.tanh()

    def after(x, table):
        return (x * table).tanh()

    table = torch.ones(WIDTH)
    out = call(how, inside if when == "inside" else after, inputs(), table)
    if when == "after":
        table.add_(1)
    with pytest.raises(RecomputationError, match="changed in place between its forward and its backward"):
        out.sum().backward()


def test_copies_of_inputs_may_change_meanwhile():
    how = ActivationOptions(SlotStore(2))
    x, table = inputs(), torch.ones(WIDTH)
    out = call(how, lambda x, table: (x * table).tanh(), x, table)
    table.add_(1)
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.tanh().sum(), x)[0])


def test_results_changed_in_place_are_right(how):
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(x):
        h = F.relu(first(x), inplace=True)
        h = second(h)
        h += x
        return h

    def outside(f):
        def run(x):
            y = f(x)
            y *= 2
            return y

        return run

    plain = gradients(outside(body), first, second)
    assert same(gradients(outside(lambda x: call(how, body, x)), first, second), plain)


def test_lists_that_a_call_fills_are_fresh_the_second_time(how):
    block, seen = Block(), []

    def body(x, box):
        seen.append(len(box))
        box.append(block(x))

    def run(x):
        box = []
        assert call(how, body, x, box) is None
        assert len(box) == 1
        return box[0]

    assert same(gradients(run, block), gradients(block, block))
    assert seen == [0, 0]


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("constant", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.norm(x)) * self.constant.sum())


@pytest.mark.parametrize("by_hand", [False, True])
def test_running_statistics_and_power_iterations_move_once_per_forward(how, by_hand):
    torch.manual_seed(0)
    plain = Statistics()
    checkpointed = copy.deepcopy(plain)
    constant = checkpointed.constant
    blocks = CheckpointedBlocks({"block": checkpointed}, how)
    run = checkpointed
    if by_hand:
        blocks.remove()

        def run(x):
            return dsl.checkpoint(checkpointed, x)

    for _ in range(3):
        assert same(gradients(run, checkpointed), gradients(plain, plain))
        for (name, got), wanted in zip(checkpointed.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(got, wanted), name
    assert checkpointed.constant is constant


# Failures -------------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_forward_leaves_nothing_behind(how):
    block = Block()

    def broken(x):
        block(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        call(how, broken, inputs())
    assert same(gradients(lambda x: call(how, block, x), block), gradients(block, block))


def test_an_exception_in_the_recomputation_restores_everything(how):
    calls = []

    def broken(x):
        calls.append(1)
        y = F.dropout(x)
        if len(calls) > 1:
            raise KeyError("mine")
        return y.tanh()

    with torch.autocast("cpu", torch.bfloat16):
        out = call(how, broken, inputs())
    torch.manual_seed(9)
    with pytest.raises(KeyError, match="mine"):
        out.sum().backward()
    drawn = torch.rand(2)
    assert not torch.is_autocast_enabled("cpu")
    torch.manual_seed(9)
    assert torch.equal(drawn, torch.rand(2))


@pytest.mark.parametrize("change", ["shape", "dtype", "fewer"])
def test_another_computation_the_second_time_is_an_error_that_names_it(how, change):
    calls = []

    def moody(x):
        calls.append(1)
        if len(calls) == 1:
            return x.tanh().sin().sum()
        return {"shape": lambda: x[:3].tanh().sum(), "dtype": lambda: x.bfloat16().tanh(), "fewer": lambda: x.tanh()}[
            change
        ]()

    out = Region(moody, how, "moody").forward((inputs(),), {})
    found = {"shape": r"float32\[64, 16\] on cpu and is float32\[3, 16\]", "dtype": "bfloat16", "fewer": "were saved"}
    with pytest.raises(RecomputationError, match=f"moody gave something else.*{found[change]}"):
        out.backward()


def test_a_cache_that_grows_is_an_error_with_advice(how):
    class Cache:
        def __init__(self):
            self.keys = torch.zeros(0, WIDTH)

        def update(self, keys):
            self.keys = torch.cat([self.keys, keys])
            return self.keys

    out = call(how, lambda x, cache: (x @ cache.update(x).t()).softmax(-1), inputs(), Cache())
    with pytest.raises(RecomputationError, match=r"set config.use_cache = False in models of transformers"):
        out.sum().backward()


def test_code_that_catches_everything_does_not_disturb(how):
    block = Block()

    def catching(x):
        try:
            return block(x)
        except Exception:
            return x

    assert same(gradients(lambda x: call(how, catching, x), block), gradients(block, block))


# Memory and work ------------------------------------------------------------------------------------------------------


def regions() -> list[Region]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is Region]


def test_only_inputs_are_kept():
    block = Block()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block(inputs())
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    weights = {p.untyped_storage()._cdata for p in block.parameters()}
    without = sum(size for storage, size in storages.items() if storage not in weights)

    how = ActivationOptions(profile=Profile())
    out = Region(block, how, "call", block).forward((inputs(),), {})
    row = how.profile.rows["call"]
    assert (row.without, row.kept) == (without, ROWS * WIDTH * 4)
    (region,) = regions()
    holders = [holder() for holder in region._holders if holder() is not None]
    assert len(holders) == len(saved)
    assert not any(holder.values for holder in holders)
    assert not region._would_keep
    out.sum().backward()
    assert not any(holder.values for holder in holders)


class Alive(TorchDispatchMode):
    """Knows the memory of every tensor that was made inside, weights left out, and which of it lives on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._weights:
                storage = tensor.untyped_storage()
                self._made.append((StorageWeakRef(storage), storage.nbytes()))
        return output

    def nbytes(self) -> int:
        return sum({made.cdata: size for made, size in self._made if not made.expired()}.values())


def bytes_per_layer(policy: str) -> int:
    """What one more block adds to the memory that a forward of a GPT leaves for backward."""
    found = []
    for layers in (2, 3):
        model = gpt(layers=layers, width=32, dropout=0.0)
        tokens = torch.randint(0, 256, (2, 8))
        how = HOWS[policy]() if policy != "none" else None
        blocks = CheckpointedBlocks(worth_checkpointing(scopes(model)), how) if how is not None else None
        with Alive(model) as alive:
            loss = model._loss((tokens, tokens))
        found.append(alive.nbytes())
        loss.backward()
        assert blocks is None or blocks.remove() is None
    return found[1] - found[0]


def test_memory_between_forward_and_backward_is_what_theory_says():
    """With s bytes in the stream (2 x 8 x 32 floats) and r rows: what a block adds."""
    s, r = 2 * 8 * 32 * 4, 2 * 8 * 4
    assert bytes_per_layer("full") == s  # its input; the rotation table is shared by all of them
    assert bytes_per_layer("offload") == s
    # Beside the input: qkv, attention with a logarithm per row and head, its projection, the wide product.
    assert bytes_per_layer("selective") == s + 3 * s + s + 2 * r + s + 4 * s
    # Input and sum behind attention; two norms with mean and 1/std; qkv, of which queries and keys twice for rotation;
    # attention with logarithms, and in the order of the projection; the wide product and its activation.
    assert bytes_per_layer("none") > 15 * s


def test_graphs_free_what_they_keep(how):
    """Without the garbage collector: no cycles."""
    block = Block()
    gc.collect()
    gc.disable()
    try:
        call(how, block, inputs()).sum().backward()
        call(how, block, inputs())  # without a backward
        assert not [o for o in gc.get_objects() if type(o) is Region]
    finally:
        gc.enable()


def test_full_runs_the_forward_once_more_and_stops_early():
    block = Block(0.0)
    with Count() as plain:
        gradients(block, block)
    with Count() as full:
        gradients(lambda x: call(ActivationOptions(), block, x), block)
    # Nothing behind the second product saves anything, so it is not computed again.
    assert full.seen["addmm"] - plain.seen["addmm"] == 1
    assert full.seen["native_layer_norm"] == 2 * plain.seen["native_layer_norm"]
    assert full.seen["mm"] == plain.seen["mm"]


def test_selective_computes_no_product_again():
    block = Block()
    with Count() as plain:
        gradients(block, block)
    with Count() as selective:
        gradients(lambda x: call(ActivationOptions(selective=True), block, x), block)
    assert selective.seen["addmm"] == plain.seen["addmm"] == 2
    assert selective.seen["native_layer_norm"] == 2 * plain.seen["native_layer_norm"]


def test_selective_keeps_what_backward_reaches_and_not_the_last_result():
    how = ActivationOptions(selective=True, profile=Profile())
    block = Block(0.0)
    out = call(how, block, inputs())
    # The input, and the first product's result; nothing behind the second product needs its own.
    assert how.profile.rows["call"].kept == ROWS * WIDTH * 4 + ROWS * 4 * WIDTH * 4
    out.sum().backward()


def test_selective_attention_is_kept_and_the_draws_behind_it_are_right():
    def attend(x):
        q = x.view(1, 4, ROWS // 4, WIDTH)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return F.dropout(y, 0.5)

    with Count() as selective:
        got = gradients(lambda x: call(ActivationOptions(selective=True), attend, x))
    assert same(got, gradients(attend))
    assert selective.seen["_scaled_dot_product_flash_attention_for_cpu"] == 1


def test_a_kept_random_operation_leaves_the_generator_as_it_did():
    def body(x):
        return F.dropout(torch.ops.aten.native_dropout.default(x, 0.5, True)[0].tanh(), 0.5).sin()

    x = inputs()
    torch.manual_seed(5)
    body(x).sum().backward()
    wanted, x.grad = x.grad, None
    region = Region(body, ActivationOptions(selective=True), "body")
    torch.manual_seed(5)
    kept = KeptResults(region._facts.__len__, frozenset({torch.ops.aten.native_dropout.default}))
    original = KeptResults.__init__
    KeptResults.__init__ = lambda self, saved, expensive=None: original(self, saved, kept._expensive)
    try:
        out = region.forward((x,), {})
    finally:
        KeptResults.__init__ = original
    out.sum().backward()
    assert torch.equal(x.grad, wanted)


def test_expensive_operations_are_known_by_this_torch():
    names = {operation.overloadpacket.__name__ for operation in expensive_operations()}
    assert {"mm", "bmm", "addmm", "convolution", "_scaled_dot_product_flash_attention"} <= names


# Blocks of a model ----------------------------------------------------------------------------------------------------


def gpt(**arguments: Any) -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(**{"layers": 3, "width": 32, "heads": 2, "block_size": 8, "dropout": 0.5, **arguments})


def scopes(module: nn.Module) -> dict[str, nn.Module]:
    modules = dict(module.named_modules())
    return {name: modules[name] for name in find_scopes(module)}


def test_the_blocks_of_a_gpt_are_found_and_single_layers_are_not():
    model = gpt()
    assert list(worth_checkpointing(scopes(model))) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(worth_checkpointing(scopes(model), every=2)) == ["blocks.0", "blocks.2"]
    assert worth_checkpointing({"head": nn.Linear(2, 2), "words": nn.Embedding(2, 2)}) == {}
    assert list(worth_checkpointing({"lstm": nn.LSTM(2, 2), "mine": Mine()})) == ["lstm", "mine"]


class Mine(nn.Module):
    pass


@pytest.mark.parametrize("every", [1, 2])
def test_a_model_stays_what_it_is(how, every):
    model = gpt()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    tree = [(name, type(module)) for name, module in model.named_modules()]
    signature = inspect.signature(model.blocks[0].forward)
    wanted = losses(model)
    blocks = CheckpointedBlocks(worth_checkpointing(scopes(model), every), how)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [(name, type(module)) for name, module in model.named_modules()] == tree
    assert inspect.signature(model.blocks[0].forward) == signature
    assert same(losses(model), wanted)
    blocks.remove()
    assert all("forward" not in vars(module) for module in model.modules())


def losses(model: ByteGPT) -> list[Any]:
    model.zero_grad()
    tokens = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    loss = model._loss((tokens, tokens))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_hooks_of_the_block_run_once(how):
    block, calls = Block(0.0), []

    def double(_, args):
        calls.append("before")
        return (2 * args[0],)

    block.register_forward_pre_hook(double)
    block.register_forward_hook(lambda *_: calls.append("after"))
    wanted = gradients(block, block)
    calls.clear()
    CheckpointedBlocks({"block": block}, how)
    assert same(gradients(block, block), wanted)
    assert calls == ["before", "after"]


def test_copies_and_pickles_are_plain_modules(how):
    block = Block()
    wanted = gradients(block, block)
    blocks = CheckpointedBlocks({"block": block}, how)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert same(gradients(twin, twin), wanted)
        assert twin.forward.__self__ is twin
    blocks.remove()


def test_a_forward_of_the_instance_is_kept_and_comes_back(how):
    block = Block()
    block.forward = mine = lambda x: Block.forward(block, x) * 3
    wanted = gradients(block, block)
    blocks = CheckpointedBlocks({"block": block}, how)
    assert same(gradients(block, block), wanted)
    blocks.remove()
    assert block.forward is mine


def test_a_call_by_hand_of_a_checkpointed_block_is_checkpointed_once():
    model = gpt()
    block = model.blocks[0]
    blocks = CheckpointedBlocks({"block": block}, ActivationOptions())
    before = len([o for o in gc.get_objects() if type(o) is Region])
    turns = torch.ones(2, 8, 8)
    out = [dsl.checkpoint(function, inputs(1, 8, 32), turns) for function in (block, block.forward)]
    assert len([o for o in gc.get_objects() if type(o) is Region]) - before == len(out)
    blocks.remove()


def test_a_graph_that_is_older_than_the_removal_goes_on(how):
    block = Block()
    wanted = gradients(block, block)
    blocks = CheckpointedBlocks({"block": block}, how)
    x = inputs()
    block.zero_grad()
    torch.manual_seed(5)
    loss = block(x).square().sum()
    blocks.remove()
    loss.backward()
    assert same([p.grad for p in (*block.parameters(), x)], wanted[:-1])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("selective", [False, True], ids=["full", "selective"])
@pytest.mark.parametrize("compiled", ["model", "block", "wrapper"])
def test_compiled_models_are_checkpointed_by_the_compiler(compiled, selective):
    def run(checkpointed):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Block(0.0), Block(0.0))
        if compiled == "block":
            for block in model:
                block.compile()
        elif compiled == "wrapper":
            model = nn.Sequential(*(torch.compile(block) for block in model))
        if checkpointed:
            CheckpointedBlocks(scopes(model), ActivationOptions(selective=selective))
        function = torch.compile(model) if compiled == "model" else model
        return [gradients(function, model) for _ in range(2)]

    for got, wanted in zip(run(True), run(False), strict=True):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_table_of_a_profile_is_readable():
    profile = Profile()
    profile.rows = {
        "blocks.0": Row(2, 2, 0.002, 0.004, 8_000_000, 2_000_000),
        "blocks.10": Row(1, 1, 0.001, 0.002, 4_000_000, 1_000_000),
    }
    assert profile.table().splitlines() == [
        "activation checkpointing, means per call:",
        "unit       calls  forward  recompute  without     kept  saved",
        "blocks.0       2  1.00 ms    2.00 ms  4.00 MB  1.00 MB   75 %",
        "blocks.10      1  1.00 ms    2.00 ms  4.00 MB  1.00 MB   75 %",
        "all units         2.00 ms    4.00 ms  8.00 MB  2.00 MB   75 %",
    ]


# Stores ---------------------------------------------------------------------------------------------------------------


def test_host_keeps_a_shared_tensor_once():
    store = HostStore()
    x, table = inputs(), torch.ones(WIDTH)
    first, second = store.keep([x, table]), store.keep([x, table])
    assert first._travellers[1] is second._travellers[1]
    table.add_(1)
    third = store.keep([x, table])
    assert third._travellers[1] is not first._travellers[1]
    assert torch.equal(third.restore()[1], table)


def test_host_leaves_integers_and_views_with_gaps_where_they_are():
    store = HostStore()
    tensors = [torch.arange(4), torch.ones(3, 4)[:, :2], torch.ones(2, 1).expand(2, 5), torch.ones(3, 4).t()]
    kept = store.keep(tensors)
    assert list(kept._travellers) == [3]
    for got, wanted in zip(kept.restore(), tensors, strict=True):
        assert torch.equal(got, wanted)
        assert got.stride() == wanted.stride()


def test_slots_are_used_again_and_run_out_with_advice():
    store = SlotStore(2)
    kept = [store.keep([torch.full((4,), float(i))]) for i in range(2)]
    with pytest.raises(RecomputationError, match="number_checkpoints=2, but more"):
        store.keep([torch.ones(4)])
    memory = kept[0].restore()[0].untyped_storage().data_ptr()
    assert [k.restore()[0][0].item() for k in kept] == [0.0, 1.0]
    del kept[0]
    with pytest.raises(RecomputationError, match="slots of 4 elements for argument 0, but a call brings 5"):
        store.keep([torch.ones(5)])
    shorter = store.keep([torch.ones(3)])  # a last batch
    assert shorter.restore()[0].untyped_storage().data_ptr() == memory
    del shorter, kept
    assert store.keep([torch.ones(5)]).restore()[0].shape == (5,)


def test_trees():
    value = {"a": (1, torch.ones(2)), "b": Pair([torch.zeros(1)], None), "p": nn.Parameter(torch.ones(1))}
    found: list[torch.Tensor] = []
    rest = take_out(value, found)
    assert [t.numel() for t in found] == [2, 1]
    back = put_back(rest, found)
    assert back["a"][1] is found[0]
    assert back["b"].left[0] is found[1]
    assert back["p"] is value["p"]
    assert back["b"].left is not value["b"].left
    assert type(back["b"]) is Pair


# The front ------------------------------------------------------------------------------------------------------------


def test_the_front_does_what_scripts_for_deepspeed_expect():
    assert not checkpointing.is_configured()
    checkpointing.configure(
        None,
        deepspeed_config={
            "train_micro_batch_size_per_gpu": 1,
            "activation_checkpointing": {"cpu_checkpointing": True, "profile": True},
        },
        synchronize=True,
    )
    assert checkpointing.is_configured()
    how = checkpointing.front().how
    assert isinstance(how.store, HostStore)
    assert how.synchronize
    block = Block()
    wanted = gradients(block, block)
    assert same(gradients(lambda x: checkpointing.checkpoint(block, x), block), wanted)
    assert same(gradients(lambda x: checkpointing.non_reentrant_checkpoint(block, x), block), wanted)
    assert "Block" in checkpointing.profile_table()
    checkpointing.reset()


@pytest.mark.parametrize(
    "arguments",
    [
        {"contiguous_checkpointing": True},
        {"contiguous_checkpointing": True, "partition_activations": True},
        {"contiguous_checkpointing": True, "num_checkpoints": 4},
    ],
    ids=lambda arguments: "+".join(arguments),
)
def test_slots_need_their_number_and_partitioning(arguments):  # AC-08
    with pytest.raises(ConfigError, match="contiguous_memory_optimization needs partition_activations=true and number"):
        checkpointing.configure(None, **arguments)
    assert not checkpointing.is_configured()


@pytest.mark.parametrize("cpu", [False, True])
def test_partitioning_without_model_parallelism_warns_and_changes_nothing(cpu):  # AC-09
    block = Block()
    wanted = gradients(block, block)
    with pytest.warns(UserWarning, match="there is no model parallelism"):
        checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=cpu)
    assert same(gradients(lambda x: checkpointing.checkpoint(block, x), block), wanted)
    checkpointing.partition_activations_in_checkpoint(False)
    assert not checkpointing.front().block.partition_activations
    checkpointing.set_num_layers(12)
    assert checkpointing.front().block.number_checkpoints == 12


def test_named_generators_are_repeated_and_go_on():
    checkpointing.model_parallel_cuda_manual_seed(11)
    tracker = checkpointing.get_cuda_rng_tracker()

    def body(x):
        y = F.dropout(x, 0.5)
        with tracker.fork():
            y = F.dropout(y, 0.5)
        return y.tanh() * F.dropout(x, 0.5)

    def run(function):
        checkpointing.model_parallel_cuda_manual_seed(11)
        x = inputs()
        function(x).sum().backward()
        with tracker.fork():
            named = torch.rand(2)
        return [x.grad, named, torch.rand(2)]

    assert same(run(lambda x: checkpointing.checkpoint(body, x)), run(body))


def test_named_generators_are_independent_and_refuse_doubles():
    tracker = RandomStateTracker()
    tracker.add("one", 1)
    tracker.add("two", 2)
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    with tracker.fork("one"):
        first = torch.rand(2)
    with tracker.fork("two"):
        second = torch.rand(2)
    assert torch.equal(torch.rand(2), wanted)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(2))
    for arguments, text in ((("one", 9), "'one' already"), (("other", 2), "Seed 2 belongs")):
        with pytest.raises(ConfigError, match=text):
            tracker.add(*arguments)
    with pytest.raises(ConfigError, match="no random generator 'three' \\(known: one, two\\)"), tracker.fork("three"):
        pass
    tracker.reset()
    assert tracker.get_states() == {}


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed):
    """Blocks in random order and nesting under every kind of checkpoint."""
    draw = random.Random(seed)
    modules = nn.ModuleList(Block() for _ in range(3))
    hows = [make() for name, make in HOWS.items() if name != "slots"] + [None]
    plan = [(draw.randrange(3), draw.choice(hows), draw.choice(hows), draw.random() < 0.3) for _ in range(5)]

    def run(x, checkpointed):
        for place, outer, inner, detach in plan:
            module = modules[place]

            def body(x, module=module, inner=inner):
                y = call(inner, module, x) if checkpointed and inner is not None else module(x)
                return F.dropout(y, 0.1) + x.mean()

            y = call(outer, body, x) if checkpointed and outer is not None else body(x)
            x = y + x.detach() if detach else y + x
        return x

    got = gradients(lambda x: run(x, True), modules)
    assert same(got, gradients(lambda x: run(x, False), modules))


def test_options_are_values():
    how = ActivationOptions()
    store = HostStore()
    assert replace(how, store=store).store is store
    assert how.store is not store


# On a device ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "selective", "offload"])
def test_a_gpu_gives_the_same_bits_and_the_host_takes_the_inputs(name):
    torch.manual_seed(0)
    model = ByteGPT(layers=6, width=256, heads=4, block_size=256, dropout=0.1).cuda()
    tokens = torch.randint(0, 256, (16, 256), device="cuda")

    def run():
        model.zero_grad()
        torch.manual_seed(1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model._loss((tokens, tokens))
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held, [p.grad.clone() for p in model.parameters()], torch.rand(2, device="cuda")

    run()
    most, gradients_, drawn = run()
    blocks = CheckpointedBlocks(worth_checkpointing(scopes(model)), HOWS[name]())
    for _ in range(2):  # pinned memory is new, and used again
        held, found, next_drawn = run()
        assert same(found, gradients_)
        assert torch.equal(next_drawn, drawn)
    blocks.remove()
    stream = 16 * 256 * 256 * 4
    if name == "offload":  # the last input, and what the rest of the model saves
        assert held < most - 5 * stream
        plain = CheckpointedBlocks(worth_checkpointing(scopes(model)), HOWS["full"]())
        assert run()[0] - held >= 5 * stream
        plain.remove()


@pytest.mark.gpu
def test_host_slots_on_a_gpu_are_pinned():
    store = SlotStore(2, on_host=True)
    kept = store.keep([torch.arange(8.0, device="cuda")])
    assert kept._taken[0][2].is_pinned()
    assert kept.restore()[0].tolist() == list(range(8))
