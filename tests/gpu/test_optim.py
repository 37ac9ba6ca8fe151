"""The fused optimizer steps against formulas in fp64, the CPU's steps and torch's own fused AdamW."""

import importlib
from collections.abc import Sequence

import pytest
import torch

from tests.gpu.device import DEVICE, assert_guards_are_untouched, busy_stream, module, moved

pytestmark = pytest.mark.gpu

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
EPSILON = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Around the size of a chunk; empty tensors take part.
SIZES = [0, 1, 3, 4, 5, 0, 33, 1023, 8191, 8192, 8195, 30_001]
SCALE = 0.125
DTYPES = [
    (torch.float32, torch.float32, None),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float16, torch.float32, torch.float16),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float16),
]
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "nesterov": True, "weight_decay": 0.1, "first": False}
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1, "decoupled": True}
ADAM |= {"bias_correction1": 1 - 0.9**3, "bias_correction2": 1 - 0.99**3}
LION = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
CASES = {
    "adamw": ("adam", ADAM),
    "adam": ("adam", {**ADAM, "decoupled": False, "bias_correction1": 1.0, "bias_correction2": 1.0}),
    "adam_small_beta1": ("adam", {**ADAM, "beta1": 0.3}),
    "lion": ("lion", LION),
    "adagrad": ("adagrad", {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}),
    "nesterov": ("sgd", SGD),
    "first_momentum": ("sgd", {**SGD, "nesterov": False, "first": True, "weight_decay": 0.0}),
    "sgd": ("sgd", {**SGD, "momentum": 0.0, "nesterov": False}),
}
STATES = {"adam": 2, "lion": 1, "adagrad": 1, "sgd": 1}
cases = pytest.mark.parametrize("case", CASES)
dtypes = pytest.mark.parametrize(
    ("grad_dtype", "moment_dtype", "copy_dtype"), DTYPES, ids=lambda dtype: NAMES.get(dtype, "none")
)


def states_of(case: str) -> int:
    return 0 if case == "sgd" else STATES[CASES[case][0]]


def drawn(case: str, sizes: Sequence[int], grad_dtype, moment_dtype) -> dict[str, list[torch.Tensor]]:
    """Parameters, gradients and states, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    columns = {"params": [torch.randn(n, generator=generator) for n in sizes]}
    columns["grads"] = [torch.randn(n, generator=generator).to(grad_dtype) for n in sizes]
    for k in range(states_of(case)):
        columns[f"state{k}"] = [torch.randn(n, generator=generator).to(moment_dtype) for n in sizes]
    squares = {"adam": "state1", "adagrad": "state0"}.get(CASES[case][0])
    if squares:
        columns[squares] = [tensor.abs() for tensor in columns[squares]]
    return columns


def step(op, case: str, columns: dict[str, list[torch.Tensor]], on: int, **more) -> None:
    """One step of the op of a case on the stream `on`."""
    name, options = CASES[case]
    states = [columns.get(f"state{k}", []) for k in range(STATES[name])]
    copies = columns.get("copies", [])
    numels = [tensor.numel() for tensor in columns["params"]]
    pointers = [[t.data_ptr() for t in column] for column in (columns["params"], columns["grads"], *states, copies)]
    moment = NAMES[states[0][0].dtype] if states[0] else "fp32"
    copy = NAMES[copies[0].dtype] if copies else "bf16"
    scale = more.pop("grad_scale", SCALE)
    grad = NAMES[columns["grads"][0].dtype]
    getattr(op, name)(*pointers, numels, grad, moment, copy, *options.values(), scale, on, **more)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def formula(case: str, p, g, *states):
    """The step in fp64."""
    name, o = CASES[case]
    if name == "adam":
        m, v = states
        p = p * (1 - o["lr"] * o["weight_decay"]) if o["decoupled"] else p
        g = g if o["decoupled"] else g + o["weight_decay"] * p
        m = o["beta1"] * m + (1 - o["beta1"]) * g
        v = o["beta2"] * v + (1 - o["beta2"]) * g * g
        denominator = (v / o["bias_correction2"]).sqrt() + o["eps"]
        return p - o["lr"] * m / o["bias_correction1"] / denominator, m, v
    if name == "lion":
        (m,) = states
        c = o["beta1"] * m + (1 - o["beta1"]) * g
        p = p * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * c.sign()
        return p, o["beta2"] * m + (1 - o["beta2"]) * g
    g = g + o["weight_decay"] * p
    if name == "adagrad":
        total = states[0] + g * g
        return p - o["lr"] * g / (total.sqrt() + o["eps"]), total
    if not states:
        return (p - o["lr"] * g,)
    b = g if o["first"] else o["momentum"] * states[0] + (1 - o["dampening"]) * g
    return p - o["lr"] * (g + o["momentum"] * b if o["nesterov"] else b), b


def on_device(columns, copy_dtype=None, offsets=(0,)) -> dict[str, list[torch.Tensor]]:
    """`offsets` are those of the tensors, in turn, the same in all columns."""
    result = {}
    for name, tensors in columns.items():
        result[name] = [moved(tensor, offsets[k % len(offsets)]) for k, tensor in enumerate(tensors)]
    if copy_dtype is not None:
        result["copies"] = [
            moved(torch.zeros(tensor.numel(), dtype=copy_dtype), offsets[k % len(offsets)])
            for k, tensor in enumerate(columns["params"])
        ]
    return result


@dtypes
@cases
def test_a_step_equals_the_formula_in_fp64(case, grad_dtype, moment_dtype, copy_dtype):
    columns = drawn(case, SIZES, grad_dtype, moment_dtype)
    actual = on_device(columns, copy_dtype, offsets=(0, 1, 2, 3, 4))
    actual["grads"][-1] = moved(columns["grads"][-1], offset=1)  # agrees with no other column
    scale = torch.tensor([0.5], device=DEVICE)
    step(module(), case, actual, stream(), grad_scale=2 * SCALE, grad_scale_ptr=scale.data_ptr())
    for k in range(len(SIZES)):
        before = [columns[name][k].double() for name in columns]
        before[1] *= SCALE
        expected = dict(zip(["params", "state0", "state1"], formula(case, *before), strict=False))
        for name, wanted in expected.items():
            got = actual[name][k]
            bound = EPSILON[got.dtype] * (4 + wanted.abs())
            if CASES[case][0] == "lion" and name == "params":
                # Where rounding decides about a sign, any will do.
                c = LION["beta1"] * before[2] + (1 - LION["beta1"]) * before[1]
                bound += torch.where(c.abs() < 2**-22, 2 * LION["lr"], 0.0)
            assert ((got.cpu().double() - wanted).abs() <= bound).all(), name
        if copy_dtype is not None:
            assert torch.equal(actual["copies"][k], actual["params"][k].to(copy_dtype))
    for name in actual:
        for tensor in actual[name]:
            assert_guards_are_untouched(tensor)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(actual["grads"], columns["grads"], strict=True))


@dtypes
@cases
def test_a_step_equals_the_one_on_the_cpu_bitwise(case, grad_dtype, moment_dtype, copy_dtype):
    optim = importlib.import_module("ds_lightning.ops.optim")
    name, options = CASES[case]
    columns = drawn(case, SIZES, grad_dtype, moment_dtype)
    columns["params"][-1][:3] = torch.tensor([float("nan"), float("inf"), 0.0])
    columns["grads"][-1][3:6] = torch.tensor([float("nan"), float("inf"), 0.0])
    actual = on_device(columns, copy_dtype, offsets=(0, 1, 2, 3, 4))
    if copy_dtype is not None:
        columns["copies"] = [torch.zeros(n, dtype=copy_dtype) for n in SIZES]
    lists = [columns.get(f"state{k}", []) for k in range(STATES[name])]
    lists = [columns["params"], columns["grads"], *lists, columns.get("copies", [])]
    getattr(optim, name)(*lists, **options, grad_scale=SCALE, backend="native")
    step(module(), case, actual, stream())
    for name in columns:
        for got, wanted in zip(actual[name], columns[name], strict=True):
            torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [1, 76, 77, 627, 628, 3000])
def test_lists_of_any_length_are_stepped_on_once_each(count):
    sizes = [(k * 7919) % 300 for k in range(count)]
    sizes[-1] = 20_000
    columns = drawn("adamw", sizes, torch.float32, torch.float32)
    one = {name: [torch.cat(tensors).to(DEVICE)] for name, tensors in columns.items()}
    many = on_device(columns)
    for _ in range(2):
        step(module(), "adamw", one, stream())
        step(module(), "adamw", many, stream())
    for name in columns:
        assert torch.equal(torch.cat(many[name]), one[name][0])


def test_steps_equal_fused_adamw_of_torch():
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator) for n in [5, 1, 8195, 100_003] * 30]
    theirs = [torch.nn.Parameter(value.to(DEVICE)) for value in values]
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(theirs, fused=True, **options)
    params = [value.to(DEVICE) for value in values]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    for number in range(1, 11):
        for p in theirs:
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)
        optimizer.step()
        columns = [params, [p.grad for p in theirs], *moments, []]
        pointers = [[tensor.data_ptr() for tensor in column] for column in columns]
        numels = [p.numel() for p in params]
        corrections = (1 - 0.9**number, 1 - 0.99**number)
        numbers = (1e-2, 0.9, 0.99, 1e-8, 0.1, True, *corrections, 1.0, stream())
        module().adam(*pointers, numels, "fp32", "fp32", "bf16", *numbers)
    for mine, p in zip(params, theirs, strict=True):
        # Ten steps of at most 0.01 each, rounded in another order.
        torch.testing.assert_close(mine, p.detach(), rtol=2e-6, atol=2e-6)
    for k, name in enumerate(("exp_avg", "exp_avg_sq")):
        for mine, p in zip(moments[k], theirs, strict=True):
            torch.testing.assert_close(mine, optimizer.state[p][name], rtol=1e-5, atol=1e-6)


def test_it_runs_on_the_given_stream():
    columns = {"params": [torch.ones(100_003, device=DEVICE)], "grads": [torch.zeros(100_003, device=DEVICE)]}
    with busy_stream():
        columns["grads"][0].fill_(2)
        options = {**SGD, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "lr": 0.25}
        pointers = [[t.data_ptr() for t in columns[c]] for c in ("params", "grads")]
        numbers = (*options.values(), 1.0, stream())
        module().sgd(*pointers, [], [], [100_003], "fp32", "fp32", "bf16", *numbers)
        columns["params"][0].add_(1)
    assert columns["params"][0].eq(1.5).all()


def test_a_captured_step_may_be_replayed():
    columns = drawn("adamw", [100, 5000], torch.float32, torch.float32)
    captured, plain = on_device(columns), on_device(columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(module(), "adamw", captured, stream())
    for _ in range(3):
        graph.replay()
        step(module(), "adamw", plain, stream())
    for name in columns:
        assert all(torch.equal(a, b) for a, b in zip(captured[name], plain[name], strict=True))


def test_lists_that_do_not_fit_are_refused_in_words():
    good = torch.zeros(4, device=DEVICE)
    options = (*LION.values(), 1.0, stream())

    def lion(grads, moment_dtype="fp32", grad_dtype="bf16"):
        pointers = ([good.data_ptr()], grads, [good.data_ptr()], [], [2])
        module().lion(*pointers, grad_dtype, moment_dtype, "bf16", *options)

    for grads, words in (([], "differ in length"), ([0], "null pointer"), ([good.data_ptr() + 1], "multiple")):
        with pytest.raises(ValueError, match=words):
            lion(grads)
    with pytest.raises(ValueError, match="moments in fp32 or bf16"):
        lion([good.data_ptr()], moment_dtype="fp16")
    with pytest.raises(ValueError, match="not fp64"):
        lion([good.data_ptr()], grad_dtype="fp64")
