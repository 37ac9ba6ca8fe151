"""Native optimizer steps against fp64 and against torch, on awkward sizes, addresses, dtypes and numbers."""

import copy
import itertools
import math
import pickle
import types
import warnings

import pytest
import torch
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import ConfigError, NativeOpError
from ds_lightning.ops import native, status
from ds_lightning.ops import optim as ops
from ds_lightning.optim.from_config import build_optimizer

needs_native = pytest.mark.skipif(
    native.find("_native").module is None, reason="the package was installed without native code"
)
SETS = ops.instruction_sets() or ["auto"]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GRADS, MOMENTS, COPIES = (FP32, BF16, FP16), (FP32, BF16), (None, BF16, FP16)
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}

# Op, numbers, and how many moments it has.
ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "bias_correction1": 0.3, "bias_correction2": 0.2}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": False, "weight_decay": 0.1, "first": False}
RULES = {
    "adamw": ("adam", {**ADAM, "weight_decay": 0.1, "decoupled": True}, 2),
    "adam": ("adam", {**ADAM, "weight_decay": 0.1, "decoupled": False}, 2),
    "adam without decay": ("adam", {**ADAM, "weight_decay": 0.0, "decoupled": False}, 2),
    "adam with a low beta": ("adam", {**ADAM, "beta1": 0.1, "weight_decay": 0.0, "decoupled": True}, 2),
    "lion": ("lion", {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}, 1),
    "adagrad": ("adagrad", {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.1}, 1),
    "adagrad without decay": ("adagrad", {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.0}, 1),
    "sgd": ("sgd", SGD, 1),
    "sgd without momentum": ("sgd", {**SGD, "momentum": 0.0}, 0),
    "sgd at first": ("sgd", {**SGD, "first": True}, 1),
    "sgd with nesterov": ("sgd", {**SGD, "nesterov": True, "dampening": 0.0, "weight_decay": 0.0}, 1),
}
SIZES = [0, 1, 15, 16, 17, 33, 67]


def bits(tensor):
    return tensor.view({4: torch.int32, 2: torch.int16, 8: torch.int64}[tensor.element_size()])


def same_bits(left, right):
    """NaNs in the same places, and all else bit for bit."""
    nan = left.isnan()
    return torch.equal(nan, right.isnan()) and torch.equal(bits(left)[~nan], bits(right)[~nan])


def placed(values, dtype, offset=0):
    """A tensor with these values that begins `offset` elements into its memory."""
    return torch.zeros(values.numel() + offset, dtype=dtype)[offset:].copy_(values)


def example(sizes, moments, grad=FP32, moment=FP32, copy_dtype=None, seed=0, offset=0):
    """Lists of parameters, gradients, moments (all above zero, as second moments are) and copies."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(numel):
        return torch.randn(numel, generator=generator) * torch.exp2(torch.randn(numel, generator=generator))

    params = [placed(numbers(n), FP32, offset) for n in sizes]
    grads = [placed(numbers(n), grad, offset) for n in sizes]
    states = [[placed(numbers(n).abs(), moment, offset) for n in sizes] for _ in range(moments)]
    copies = [] if copy_dtype is None else [placed(torch.zeros(n), copy_dtype, offset) for n in sizes]
    return params, grads, states, copies


def call(rule, lists, backend, **rest):
    op, numbers, moments = RULES[rule]
    params, grads, states, copies = lists
    states = states or [()] * (moments == 0)
    getattr(ops, op)(params, grads, *states, copies, **{**numbers, **rest}, backend=backend)


def flat(lists):
    params, _, states, copies = lists
    return [*params, *itertools.chain(*states), *copies]


@needs_native
@pytest.mark.parametrize("rule", RULES)
def test_kernels_equal_the_reference_bitwise_for_all_dtypes_and_instruction_sets(rule):
    for grad, moment, copy_dtype in itertools.product(GRADS, MOMENTS, COPIES):
        lists = example(SIZES, RULES[rule][2], grad, moment, copy_dtype)
        expected = copy.deepcopy(lists)
        call(rule, expected, "reference", grad_scale=1 / 3, seed=12_345)
        for name in SETS:
            found = copy.deepcopy(lists)
            call(rule, found, "native", grad_scale=1 / 3, seed=12_345, instruction_set=name)
            for left, right in zip(flat(found), flat(expected), strict=True):
                assert same_bits(left, right), (grad, moment, copy_dtype, name, left.numel())


@needs_native
@pytest.mark.parametrize("rule", RULES)
def test_kernels_serve_every_small_size_and_a_large_odd_one(rule):
    lists = example([*range(68), 2**20 + 3], RULES[rule][2], BF16, FP32, BF16, offset=1)
    expected = copy.deepcopy(lists)
    call(rule, expected, "reference")
    for name in SETS:
        found = copy.deepcopy(lists)
        call(rule, found, "native", instruction_set=name)
        for left, right in zip(flat(found), flat(expected), strict=True):
            assert same_bits(left, right)


def fp64(rule, p, g, states, grad_scale):
    """The formulas of the papers, in fp64, written down without looking at the ops."""
    op, o, _ = RULES[rule]
    o = types.SimpleNamespace(**o)
    p, g = p.double(), g.double() * grad_scale
    states = [s.double() for s in states]
    if op == "adam":
        if not o.decoupled:
            g = g + o.weight_decay * p
        m = o.beta1 * states[0] + (1 - o.beta1) * g
        v = o.beta2 * states[1] + (1 - o.beta2) * g**2
        update = (m / o.bias_correction1) / ((v / o.bias_correction2).sqrt() + o.eps)
        return [p - o.lr * update - (o.lr * o.weight_decay * p if o.decoupled else 0), m, v]
    if op == "lion":
        m = states[0]
        update = (o.beta1 * m + (1 - o.beta1) * g).sign() + o.weight_decay * p
        return [p - o.lr * update, o.beta2 * m + (1 - o.beta2) * g]
    g = g + o.weight_decay * p
    if op == "adagrad":
        s = states[0] + g**2
        return [p - o.lr * g / (s.sqrt() + o.eps), s]
    if not states:
        return [p - o.lr * g]
    b = g if o.first else o.momentum * states[0] + (1 - o.dampening) * g
    return [p - o.lr * (g + o.momentum * b if o.nesterov else b), b]


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("rule", RULES)
def test_steps_equal_fp64(rule, backend):
    lists = example([10_007], RULES[rule][2])
    (p,), (g,), states, _ = copy.deepcopy(lists)
    expected = fp64(rule, p, g, [s for (s,) in states], 0.7)
    call(rule, lists, backend, grad_scale=0.7)
    for found, wanted in zip(flat(lists), expected, strict=True):
        scale = wanted.abs().clamp(min=p.abs().max().item() * 0.1)
        assert ((found.double() - wanted).abs() / scale).max() < 4e-7


@needs_native
@pytest.mark.parametrize("rule", RULES)
def test_the_number_of_threads_and_the_cut_into_slices_change_no_bit(rule):
    moments = RULES[rule][2]
    whole = example([3 * 2**16 + 41], moments, FP16, BF16, FP16)
    results = []
    before = torch.get_num_threads()
    try:
        for threads, sizes in ((1, None), (2, None), (3, None), (1, 1), (3, 7), (2, 1000)):
            lists = copy.deepcopy(whole)
            kept = flat(lists)
            if sizes is not None:
                cut = [sizes, 0, 5 * sizes]
                cut.append(whole[0][0].numel() - sum(cut))
                params, grads, states, copies = lists
                split = [[t for (t,) in [each] for t in t.split(cut)] for each in (params, grads, *states, copies)]
                lists = (split[0], split[1], split[2:-1], split[-1])
            torch.set_num_threads(threads)
            call(rule, lists, "native")
            results.append(kept)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


@needs_native
def test_pointers_at_odd_bytes_are_safe_and_nothing_is_written_past_the_end():
    module = native.load("_native", "adam")
    for numel, offset, name in itertools.product((0, 1, 17, 100), (1, 2, 3, 5), SETS):
        values = [torch.randn(numel), torch.randn(numel), torch.randn(numel), torch.rand(numel), torch.zeros(numel)]
        dtypes = [FP32, FP16, BF16, BF16, BF16]
        values = [v.to(d) for v, d in zip(values, dtypes, strict=True)]
        raw = [torch.full((v.nbytes + 16,), 77, dtype=torch.uint8) for v in values]
        for memory, value in zip(raw, values, strict=True):
            memory[offset : offset + value.nbytes] = value.view(torch.uint8)
        pointers = [[memory.data_ptr() + offset] for memory in raw]
        module.adam(
            *pointers, [numel], "fp16", "bf16", "bf16",
            0.1, 0.9, 0.99, 1e-8, 0.1, True, 0.5, 0.5, 2.0, 2, name,
        )  # fmt: skip
        p, g, m, v, c = ([each] for each in values)
        ops.adam(p, g, m, v, c, **{**RULES["adamw"][1], "lr": 0.1, "bias_correction1": 0.5, "bias_correction2": 0.5},
                 grad_scale=2.0, backend="reference")  # fmt: skip
        for memory, value in zip(raw, values, strict=True):
            assert memory[:offset].eq(77).all()
            assert memory[offset + value.nbytes :].eq(77).all()
            assert torch.equal(memory[offset : offset + value.nbytes], value.view(torch.uint8))


EXTREMES = {
    "lr": [0.0, 1e-30, 1e30, math.inf],
    "eps": [0.0, 1e-45, 1e30],
    "beta1": [0.0, 0.5, 1 - 2**-24, 1.0],
    "beta2": [0.0, 0.5, 1 - 2**-24, 1.0],
    "weight_decay": [0.0, 1e-30, 1e30],
    "momentum": [0.5, 1.0],
    "grad_scale": [0.0, 1e-38, 1e30, math.nan, math.inf],
}


@needs_native
@pytest.mark.parametrize("rule", RULES)
def test_extreme_numbers_give_the_same_as_the_reference_and_nans_spread(rule):
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3e38, -3e38, 1.0])
    for grad, moment in ((FP32, FP32), (FP16, BF16)):
        # Every special value as a parameter, a gradient and a moment, beside each other one.
        lists = example([100], RULES[rule][2], grad, moment, BF16)
        lists[0][0].copy_(special.repeat(10))
        lists[1][0].copy_(special.repeat_interleave(10))
        for (state,) in lists[2]:
            state.copy_(special[torch.arange(100) * 7 % 10].abs())
        changes = [{}, *({key: v} for key, values in EXTREMES.items() for v in values)]
        for change in changes:
            if not change.keys() <= {*RULES[rule][1], "grad_scale"}:
                continue
            expected = copy.deepcopy(lists)
            call(rule, expected, "reference", **change)
            for name in SETS:
                found = copy.deepcopy(lists)
                call(rule, found, "native", instruction_set=name, **change)
                for left, right in zip(flat(found), flat(expected), strict=True):
                    assert same_bits(left, right), (change, name)
            if not change:
                bad = lists[1][0].isnan() | lists[0][0].isnan()
                assert expected[0][0][bad].isnan().all()


@needs_native
def test_calls_that_do_not_fit_are_refused():
    p, g, (m, v), _ = example([3], 2)
    with pytest.raises(ValueError, match=r"lists of \[1, 2, 1, 1\]"):
        call("adam", (p, g * 2, [m, v], []), "auto")
    with pytest.raises(ValueError, match="3 elements has a gradient, moment or copy of 4"):
        call("adam", (p, [torch.zeros(4)], [m, v], []), "auto")
    with pytest.raises(ValueError, match="not one of auto"):
        call("adam", (p, g, [m, v], []), "gpu")
    with pytest.raises(NativeOpError, match="fp32 parameters"):
        call("adam", ([p[0].double()], g, [m, v], []), "native")
    with pytest.raises(ValueError, match=r"instruction set 'mmx'.*baseline"):
        call("adam", (p, g, [m, v], []), "native", instruction_set="mmx")
    with pytest.raises(ValueError, match="layout"):
        call("adam", (p, [g[0].to_sparse()], [m, v], []), "auto")
    module = native.load("_native", "lion")
    with pytest.raises(ValueError, match="grads has 0 entries, not 1"):
        module.lion([0], [], [0], [], [0], "fp32", "fp32", "bf16", 0.1, 0.9, 0.9, 0.0, 1.0, 1)
    with pytest.raises(ValueError, match="moments are"):
        module.lion([0], [0], [0], [], [0], "fp32", "fp16", "bf16", 0.1, 0.9, 0.9, 0.0, 1.0, 1)


def test_the_reference_serves_what_no_kernel_does():
    p, g, (m, v), _ = example([12], 2)
    expected = copy.deepcopy((p, g, [m, v], []))
    call("adam", expected, "reference")
    turned = [torch.zeros(3, 4).t().copy_(t[0].view(4, 3)) for t in (p, g, m, v)]
    call("adam", ([turned[0]], [turned[1]], [[turned[2]], [turned[3]]], []), "auto")
    assert torch.equal(turned[0].reshape(-1), expected[0][0])
    mixed = ([*p, p[0].double()], [*g, g[0].double()], [[*m, m[0].double()], [*v, v[0].double()]], [])
    call("adam", mixed, "auto")
    assert torch.equal(mixed[0][0], expected[0][0])
    assert (mixed[0][1] - expected[0][0]).abs().max() < 1e-6


@needs_native
def test_copies_may_be_asked_for_by_some_only():
    lists = example([5, 6, 7], 1)
    half = torch.zeros(6, dtype=FP16)
    ops.lion(*lists[:2], *lists[2], [None, half, None], **RULES["lion"][1])
    assert torch.equal(half, lists[0][1].half())


@needs_native
def test_autograd_notices_a_step():
    weight = nn.Parameter(torch.randn(4))
    loss = (weight**2).sum()
    weight.grad = torch.ones(4)
    dsl.optim.AdamW([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_doctor_tells_instruction_sets():
    entry = next(entry for entry in status.status() if entry.name == "_native")
    assert not entry.available or f"instruction sets: {', '.join(SETS)}" in entry.detail


# Classes -------------------------------------------------------------------------------------------------------------

PAIRS = {
    "Adam": (lambda p: dsl.optim.Adam(p, 0.01, adam_w_mode=False, weight_decay=0.1),
             lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
    "AdamW": (lambda p: dsl.optim.AdamW(p, 0.01), lambda p: torch.optim.AdamW(p, 0.01)),
    "FusedAdam": (lambda p: dsl.optim.FusedAdam(p, 0.01, weight_decay=0.1),
                  lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    "Adagrad": (lambda p: dsl.optim.Adagrad(p, 0.1, 0.1, 0.1, 0.1),
                lambda p: torch.optim.Adagrad(p, 0.1, 0.1, 0.1, 0.1)),
    "SGD": (lambda p: dsl.optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "SGD with momentum": (lambda p: dsl.optim.SGD(p, 0.1, 0.9, 0.1, 0.1),
                          lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.1, 0.1)),
    "SGD with nesterov": (lambda p: dsl.optim.SGD(p, 0.1, 0.9, nesterov=True),
                          lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
}  # fmt: skip


def weights(dtype=FP32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (17,), (0,), (), (40, 7), (2, 3, 4, 5)]
    made = [nn.Parameter(torch.randn(shape, generator=generator, dtype=FP32).to(dtype)) for shape in shapes]
    made.append(nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype).t()))
    return made


def give_gradients(*lists, step=0):
    """The same gradients for all; the second parameter has one in odd steps only, the last one never."""
    generator = torch.Generator().manual_seed(step)
    for k, group in enumerate(zip(*lists, strict=True)):
        gradient = torch.randn(group[0].shape, generator=generator)
        for parameter in group:
            parameter.grad = None if (k == 1 and step % 2 == 0) else gradient.to(parameter.dtype).clone()


def apart(left, right):
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(left, right, strict=True) if a.numel())


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", PAIRS)
def test_classes_train_as_those_of_torch_and_exchange_checkpoints_with_them(name, dtype):
    make_ours, make_theirs = PAIRS[name]
    ours, theirs = weights(dtype), weights(dtype)
    optimizer, reference = make_ours(ours), make_theirs(theirs)
    for step in range(12):
        if step == 4:  # each goes on from the other's state
            from_torch, from_us = make_ours(ours), make_theirs(theirs)
            from_torch.load_state_dict(copy.deepcopy(reference.state_dict()))
            from_us.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer, reference = from_torch, from_us
        if step == 8:
            loaded = make_ours(ours)
            loaded.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
            optimizer = loaded
        give_gradients(ours, theirs, step=step)
        optimizer.step()
        reference.step()
        assert apart(ours, theirs) < (1e-6 if dtype == FP32 else 1e-13), step
    for mine, other in zip(ours, theirs, strict=True):
        left, right = optimizer.state[mine], reference.state[other]
        assert left.keys() == right.keys() or not any(v is not None for v in right.values())
        for key in left:
            assert left[key].dtype == right[key].dtype
            assert left[key].shape == right[key].shape
            torch.testing.assert_close(left[key], right[key], rtol=1e-5, atol=1e-6)


def test_lion_trains_as_written_in_the_paper():
    (weight,) = [nn.Parameter(torch.randn(50))]
    optimizer = dsl.optim.Lion([weight], 0.01, (0.9, 0.99), weight_decay=0.1)
    p, m = weight.detach().double(), torch.zeros(50, dtype=torch.float64)
    for _ in range(6):
        weight.grad = torch.randn(50)
        p = p - 0.01 * ((0.9 * m + 0.1 * weight.grad).sign() + 0.1 * p)
        m = 0.99 * m + 0.01 * weight.grad
        optimizer.step()
        assert (weight - p).abs().max() < 1e-6
    assert list(optimizer.state[weight]) == ["exp_avg"]


@pytest.mark.parametrize("bias_correction", [True, False])
def test_bias_correction_may_be_off(bias_correction):
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    weight.grad = torch.tensor([0.5, 4.0])
    dsl.optim.Adam([weight], 0.1, bias_correction=bias_correction).step()
    factor = 1.0 if bias_correction else 0.1 / math.sqrt(0.001)
    assert torch.allclose(weight, torch.tensor([1.0, -2.0]) - 0.1 * factor, rtol=1e-5)


def test_a_prepared_step_scales_and_copies_once():
    for moment_dtype in ("fp32", "bf16"):
        ours, expected = weights(), weights()
        optimizer = dsl.optim.AdamW(ours, 0.01, moment_dtype=moment_dtype)
        reference = dsl.optim.AdamW(expected, 0.01, moment_dtype=moment_dtype)
        copies = {p: torch.zeros(p.shape, dtype=BF16) for p in ours[:-2]}
        for step in range(3):
            give_gradients(ours, expected, step=2 * step + 1)
            given = {p: p.grad.bfloat16() for p in ours}
            for parameter, other in zip(ours, expected, strict=True):
                other.grad = given[parameter].float() * 0.25
                if step < 2:
                    parameter.grad = None
                else:
                    parameter.grad = other.grad.clone()
            if step < 2:
                optimizer.prepare_step(grad_scale=0.25, copies=copies, gradients=given)
            optimizer.step()
            reference.step()
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
            if step < 2:
                assert all(torch.equal(copies[p], p.bfloat16()) for p in copies)
                for parameter, other in zip(ours, expected, strict=True):
                    assert torch.equal(given[parameter], (other.grad * 4).bfloat16())


def test_moments_may_be_bf16_and_stay_so():
    ours = weights()
    optimizer = dsl.optim.AdamW(ours, moment_dtype="bf16")
    give_gradients(ours, step=1)
    optimizer.step()
    loaded = dsl.optim.AdamW(ours, moment_dtype=torch.bfloat16)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    give_gradients(ours, step=3)
    loaded.step()
    for parameter in ours:
        assert loaded.state[parameter]["exp_avg"].dtype == BF16
        assert loaded.state[parameter]["step"].dtype == FP32
        assert loaded.state[parameter]["step"] == 2


MOMENTS_OF_16_BITS = {
    "Adam": lambda p, dtype="bf16": dsl.optim.Adam(p, 1e-3, betas=(0.9, 0.999), moment_dtype=dtype),
    "Lion": lambda p, dtype="bf16": dsl.optim.Lion(p, 1e-3, betas=(0.9, 0.999), moment_dtype=dtype),
    "SGD": lambda p, dtype="bf16": dsl.optim.SGD(p, 1e-3, momentum=0.999, dampening=0.999, moment_dtype=dtype),
    "Adagrad": lambda p, dtype="bf16": dsl.optim.Adagrad(p, 1e-3, moment_dtype=dtype),
}


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("name", MOMENTS_OF_16_BITS)
def test_moments_of_16_bits_take_steps_below_their_last_digit(name, backend, monkeypatch):
    if backend == "reference":
        monkeypatch.setattr(ops, "_function", lambda op, device: None)
    generator = torch.Generator().manual_seed(0)
    key = {"Adam": "exp_avg_sq", "Lion": "exp_avg", "SGD": "momentum_buffer", "Adagrad": "sum"}[name]
    means = []
    parameters = [nn.Parameter(torch.ones(20_000)) for _ in range(2)]
    optimizers = [MOMENTS_OF_16_BITS[name]([p], d) for p, d in zip(parameters, ("bf16", "fp32"), strict=True)]
    for step in range(100):
        gradient = torch.randn(20_000, generator=generator) / 20
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = gradient
            optimizer.step()
            if step == 0:
                optimizer.state[parameter][key].fill_(1.0)
    means = [float(o.state[p][key].double().mean()) for p, o in zip(parameters, optimizers, strict=True)]
    assert optimizers[0].state[parameters[0]][key].dtype == BF16
    # An element's standard deviation is that of 99 roundings, at most 2^-8 each: 0.04, that of the mean 3e-4.
    assert means[0] == pytest.approx(means[1], abs=1.5e-3)
    assert abs(means[1] - 1) > 0.09


def test_rounded_moments_are_the_same_when_a_step_is_made_again():
    for make in MOMENTS_OF_16_BITS.values():
        whole = weights()
        optimizer = make(whole)
        for step in range(4):
            give_gradients(whole, step=step)
            optimizer.step()
            if step == 1:
                half = [nn.Parameter(p.detach().clone()) for p in whole]
                state = copy.deepcopy(optimizer.state_dict())
        again = make(half)
        again.load_state_dict(state)
        for step in (2, 3):
            give_gradients(half, step=step)
            again.step()
        assert all(torch.equal(a, b) for a, b in zip(whole, half, strict=True))
        for a, b in zip(whole, half, strict=True):
            left, right = optimizer.state[a], again.state[b]
            assert all(torch.equal(value, right[key]) for key, value in left.items())


@pytest.mark.parametrize(("fp32_states", "dtype"), [(True, FP32), (False, BF16)])
def test_16_bit_parameters_have_the_moments_that_are_asked_for(fp32_states, dtype):
    ours, wide = weights(BF16), weights()
    optimizer = dsl.optim.CPUAdam(ours, 0.01, fp32_optimizer_states=fp32_states)
    reference = dsl.optim.CPUAdam(wide, 0.01)
    give_gradients(ours, wide, step=1)
    optimizer.step()
    reference.step()
    assert apart(ours, wide) < 0.05
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(state))
    for number, parameter in enumerate(ours):
        assert optimizer.state[parameter]["exp_avg"].dtype == dtype
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state["state"][number]["exp_avg"])


def test_an_optimizer_works_as_any_other():
    ours = weights()
    optimizer = dsl.optim.Adam([{"params": ours[:3], "lr": 0.1}, {"params": ours[3:]}], lr=torch.tensor(0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in ours)
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses == sorted(losses, reverse=True)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    twin, again = copy.deepcopy((ours, optimizer))[1], pickle.loads(pickle.dumps(optimizer))
    for other in (twin, again):
        assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
        other.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient


def test_switches_of_torch_are_refused_in_words():
    with pytest.raises(ConfigError, match="amsgrad=True"):
        dsl.optim.AdamW(weights(), amsgrad=True)
    with pytest.raises(ConfigError, match="maximize=True"):
        dsl.optim.SGD(weights(), maximize=True)
    with pytest.raises(TypeError, match="momentun"):
        dsl.optim.SGD(weights(), momentun=0.9)
    with pytest.raises(ConfigError, match="moment_dtype='fp8'"):
        dsl.optim.Lion(weights(), moment_dtype="fp8")
    with pytest.raises(ConfigError, match="exclude"):
        dsl.optim.Adam(weights(), moment_dtype="bf16", fp32_optimizer_states=False)
    with pytest.raises(ConfigError, match="set_grad_none"):
        dsl.optim.Adam(weights(), set_grad_none=False)
    with pytest.raises(ValueError, match="betas"):
        dsl.optim.Adam(weights(), betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="lr="):
        dsl.optim.Adagrad(weights(), lr=-1)
    saved = torch.optim.Adam(weights(), amsgrad=True).state_dict()
    with pytest.raises(ConfigError, match="amsgrad"):
        dsl.optim.Adam(weights()).load_state_dict(saved)


def test_names_that_are_not_ours_are_those_of_torch():
    assert dsl.optim.RMSprop is torch.optim.RMSprop
    assert dsl.optim.lr_scheduler is torch.optim.lr_scheduler
    assert {"AdamW", "CPUAdam"} <= set(dir(dsl.optim))
    with pytest.raises(AttributeError, match="Nadamw"):
        _ = dsl.optim.Nadamw


OURS, THEIRS = "ds_lightning", "torch"


@needs_native
@pytest.mark.parametrize(
    ("kind", "params", "where", "name"),
    [
        ("Adam", {}, OURS, "Adam"),
        ("adamw", {"adam_w_mode": False}, OURS, "AdamW"),
        ("FusedAdam", {"bias_correction": False, "fused": False}, OURS, "FusedAdam"),
        ("CPUAdam", {"fp32_optimizer_states": True, "moment_dtype": "bf16"}, OURS, "CPUAdam"),
        ("CPUAdam", {"amsgrad": True, "bias_correction": True}, THEIRS, "AdamW"),
        ("Adam", {"maximize": True, "adam_w_mode": False}, THEIRS, "Adam"),
        ("Adam", {"torch_adam": True}, THEIRS, "AdamW"),
        ("Lion", {"betas": [0.9, 0.99]}, OURS, "Lion"),
        ("CPULion", {}, OURS, "CPULion"),
        ("FusedLion", {}, OURS, "FusedLion"),
        ("Adagrad", {"lr_decay": 0.1}, OURS, "Adagrad"),
        ("CPUAdagrad", {"amsgrad": False}, OURS, "CPUAdagrad"),
        ("SGD", {"lr": 0.1, "foreach": True}, THEIRS, "SGD"),
        ("Rprop", {}, THEIRS, "Rprop"),
    ],
)
def test_the_optimizer_block_picks_a_class(kind, params, where, name):
    optimizer = build_optimizer(kind, params, weights())
    assert type(optimizer).__name__ == name
    assert type(optimizer).__module__.startswith(where)


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("Lyon", {}, "Lion"),
        ("Lion", {"maximize": True}, "maximize"),
        ("Adam", {"amsgrad": True, "bias_correction": False}, "bias_correction"),
        ("CPUAdagrad", {"amsgrad": True}, "amsgrad"),
    ],
)
def test_an_optimizer_block_that_does_not_fit_is_refused(kind, params, words):
    with pytest.raises(ConfigError, match=words):
        build_optimizer(kind, params, weights())


def test_without_native_code_torch_serves(monkeypatch):
    monkeypatch.setenv("DS_LIGHTNING_NATIVE", "0")
    native.find.cache_clear()
    try:
        assert type(build_optimizer("CPUAdam", {}, weights())) is torch.optim.AdamW
        assert type(build_optimizer("CPUAdam", {"bias_correction": False}, weights())) is dsl.optim.CPUAdam
        assert ops.instruction_sets() == []
        ours, theirs = weights(), weights()
        optimizer, reference = dsl.optim.AdamW(ours, 0.01), torch.optim.AdamW(theirs, 0.01)
        for step in range(3):
            give_gradients(ours, theirs, step=step)
            optimizer.step()
            reference.step()
        assert apart(ours, theirs) < 1e-6
        with pytest.raises(NativeOpError, match="DS_LIGHTNING_NATIVE=0"):
            call("lion", example([3], 1), "native")
    finally:
        native.find.cache_clear()
