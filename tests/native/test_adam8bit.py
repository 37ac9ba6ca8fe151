"""Moments of 8 bits: the map against the published one, kernels against the reference, the optimizer against fp64."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import ds_lightning as dsl
from ds_lightning.demo import ByteGPT, StdlibText
from ds_lightning.errors import ConfigError, NativeOpError
from ds_lightning.ops.adam8bit import adam8bit
from ds_lightning.ops.blocks import Blocks, dequantize_blocks, quantize_blocks
from ds_lightning.ops.optim import instruction_sets
from ds_lightning.optim.from_config import build_optimizer
from tests.native.test_optim import BF16, COPIES, FP32, GRADS, needs_native, placed, same_bits

SETS = instruction_sets() or ["auto"]
NAN, INF = float("nan"), float("inf")
signs = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def numbers(numel, seed=0, spread=4.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp2(torch.randn(numel, generator=generator) * spread)


def published(signed):
    """The positive half of the map of 8-bit optimizers, with 0 and 1, as the authors' code makes it, in fp64."""
    values = [0.0]
    for i in range(7):
        borders = torch.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1, dtype=torch.float64)
        values += (10.0 ** (i - 6) * (borders[:-1] + borders[1:]) / 2).tolist()
    return torch.tensor([*values, 1.0], dtype=torch.float64)


def every_code(signed):
    return torch.arange(-127, 128).to(torch.int8) if signed else torch.arange(256).to(torch.uint8)


@signs
def test_codes_stand_for_what_is_published_but_for_the_largest_of_each_sign(signed):
    codes = every_code(signed)
    found = dequantize_blocks(codes, torch.ones(1), Blocks.whole(len(codes), 256)).double()
    if signed:
        assert torch.equal(found, -found.flip(0))
        found = found[127:]
        wanted = torch.cat([published(True)[:127], torch.ones(1)])
    else:
        wanted = published(False)
    torch.testing.assert_close(found, wanted, rtol=2**-20, atol=0)
    assert found[0] == 0
    assert found[-1] == 1


@signs
def test_what_was_dequantized_is_quantized_to_the_same_bits_at_every_scale(signed):
    codes = every_code(signed)
    blocks = Blocks.whole(len(codes), 256)
    for exponent, fraction in itertools.product(range(-126, 128), (1.0, 1 + 2**-23, 1.7, 2 - 2**-23)):
        scales = torch.tensor([fraction * 2.0**exponent], dtype=torch.float64).float()
        again, kept = quantize_blocks(dequantize_blocks(codes, scales, blocks), blocks, signed=signed)
        assert torch.equal(again, codes)
        assert torch.equal(kept, scales)


@signs
def test_nothing_is_off_by_more_than_half_a_bin(signed):
    values = numbers(100_003) if signed else numbers(100_003).square()
    blocks = Blocks.whole(len(values), 256)
    codes, scales = quantize_blocks(values, blocks, signed=signed)
    back = dequantize_blocks(codes, scales, blocks)
    scale = scales.double().repeat_interleave(blocks.starts().diff())
    x, y = values.double().abs() / scale, back.double().abs() / scale
    decade = (x.log10().floor() + 1).clamp(-6, 0)
    bins = 2 ** (decade + 6) * (1 if signed else 2)
    bound = 0.45 * 10**decade / bins
    bound[x >= 1 - 0.9 / 64] *= 2 if signed else 1  # the last signed bin stands for 1
    tiny = x < 1e-7
    bound[tiny] = 1e-7 if signed else 3.25e-7
    assert ((x - y).abs() <= bound + 2**-22 * x).all()
    assert torch.equal(values.sign()[back != 0], back.sign()[back != 0])
    largest = torch.zeros(blocks.count * 256).scatter_(0, torch.arange(len(values)), values.abs()).view(-1, 256).amax(1)
    assert torch.equal(scales, largest)


def test_only_zero_becomes_zero_without_a_sign():
    values = torch.tensor([1.0, 1e-30, 0.0, 1e-7, 2e-6])
    blocks = Blocks.whole(5, 8)
    codes, scales = quantize_blocks(values, blocks, signed=False)
    assert (codes == 0).tolist() == [False, False, True, False, False]
    assert quantize_blocks(values, blocks, signed=True)[0][1] == 0
    back = dequantize_blocks(codes, scales, blocks)
    assert back[1] >= values[1]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_spoils_its_block_alone_and_what_is_no_normal_number_is_zero(bad):
    values = torch.ones(24)
    values[11] = bad
    values[16:] = 1e-39
    blocks = Blocks.whole(24, 8)
    codes, scales = quantize_blocks(values, blocks, signed=True)
    back = dequantize_blocks(codes, scales, blocks)
    assert back[:8].eq(1).all()
    assert back[8:16].isnan().all()
    assert back[16:].eq(0).all()
    assert scales[2] == 0


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 3), (5, 31), (8, 40), (39, 40), (0, 40)])
def test_a_part_is_dequantized_alone(start, stop):
    blocks = Blocks(8, torch.tensor([0, 3, 17, 40]))
    codes, scales = quantize_blocks(numbers(40), blocks, signed=True)
    whole = dequantize_blocks(codes, scales, blocks)
    assert torch.equal(dequantize_blocks(codes[start:stop], scales, blocks, start, stop), whole[start:stop])
    assert blocks.count == 1 + 2 + 3
    assert blocks.starts().tolist() == [0, 3, 11, 17, 25, 33, 40]


ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "bias_correction1": 0.3, "bias_correction2": 0.2}
RULES = {
    "adamw": {**ADAM, "weight_decay": 0.1, "decoupled": True},
    "adam": {**ADAM, "weight_decay": 0.1, "decoupled": False},
    "a low beta": {**ADAM, "beta1": 0.1, "weight_decay": 0.0, "decoupled": False},
}
SIZES = [1, 7, 8, 15, 16, 17, 33, 67, 255, 257]


def cut(numel, size, pieces):
    if not pieces or numel < 16:
        return Blocks.whole(numel, size)
    return Blocks(size, torch.tensor([0, 8, numel // 2 + 3, numel]))


def example(sizes, size, grad=FP32, copy_dtype=None, pieces=True, offset=0):
    """Lists of everything, with a block of zeros and one with an overflow."""
    blocks = [cut(n, size, pieces) for n in sizes]
    params = [placed(numbers(n, n), FP32, offset) for n in sizes]
    grads = [placed(numbers(n, n + 1), grad, offset) for n in sizes]
    first = [quantize_blocks(numbers(n, n + 2), b, signed=True) for n, b in zip(sizes, blocks, strict=True)]
    second = [quantize_blocks(numbers(n, n + 3).square(), b, signed=False) for n, b in zip(sizes, blocks, strict=True)]
    for codes, scales in (first[-2], second[-2]):
        codes.zero_(), scales.zero_()
    grads[-2].zero_()
    grads[-1][-1] = INF
    codes = [[placed(each[0], each[0].dtype, offset) for each in moments] for moments in (first, second)]
    copies = [] if copy_dtype is None else [placed(torch.zeros(n), copy_dtype, offset) for n in sizes]
    return [params, grads, *codes, [s for _, s in first], [s for _, s in second], blocks], copies


def assert_equal(found, wanted):
    for left, right in zip(found, wanted, strict=True):
        for a, b in zip(left, right, strict=True):
            if torch.is_tensor(a):
                assert torch.equal(a, b) if a.dtype in (torch.int8, torch.uint8) else same_bits(a, b)


def call(lists, copies, rule, backend, **rest):
    adam8bit(*lists, copies, **{**RULES[rule], "grad_scale": 1 / 3, **rest}, backend=backend)


@needs_native
@pytest.mark.parametrize("rule", RULES)
def test_kernels_equal_the_reference_bitwise(rule):
    cases = [(SIZES, 16, grad, to, True, 1) for grad in GRADS for to in COPIES] if rule == "adamw" else []
    cases += [(SIZES, 256, FP32, None, False, 0), ([*SIZES, 2**17 + 3], 2048, BF16, BF16, True, 3)]
    for sizes, size, grad, to, pieces, offset in cases:
        lists, copies = example(sizes, size, grad, to, pieces, offset)
        wanted = copy.deepcopy((lists, copies))
        call(*wanted, rule, "reference")
        for name in SETS:
            found = copy.deepcopy((lists, copies))
            call(*found, rule, "native", instruction_set=name)
            assert_equal([*found[0][:6], found[1]], [*wanted[0][:6], wanted[1]])


@needs_native
def test_the_number_of_threads_changes_nothing():
    lists, _ = example([300_000, 5, 17], 256)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            mine = copy.deepcopy(lists)
            call(mine, [], "adamw", "native")
            found.append(mine[:6])
        finally:
            torch.set_num_threads(before)
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


def test_mixed_dtypes_take_the_reference_where_there_is_no_kernel():
    lists, _ = example([40, 33], 8)
    lists[0][1] = lists[0][1].double()
    wanted = copy.deepcopy(lists)
    call(wanted, [], "adamw", "reference")
    call(lists, [], "adamw", "auto")
    assert_equal(lists[:6], wanted[:6])
    with pytest.raises(NativeOpError, match="no kernel"):
        call(lists, [], "adamw", "native")


@needs_native
def test_parts_that_do_not_fit_are_refused():
    lists, _ = example([40, 33], 8)
    lists[4] = lists[5] = [s[:-1] for s in lists[4]]
    with pytest.raises(ValueError, match=r"40 elements .* scales for"):
        call(lists, [], "adamw", "auto")
    with pytest.raises(ValueError, match="codes and"):
        call([each[:1] for each in lists], [], "adamw", "reference")
    with pytest.raises(ValueError, match="must be equal"):
        call([each[:1] for each in lists[:6]] + [lists[6]], [], "adamw", "auto")


def transcription(values, gradients, lr, betas, eps, decay, size):
    """8-bit AdamW in fp64, written down without looking at the ops: the nearest code of a bin, by search."""
    p, state = values.double(), None
    borders = {}
    for signed in (True, False):
        edges = [torch.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)[:-1].double() * 10.0 ** (i - 6) for i in range(7)]
        borders[signed] = torch.cat([*edges, torch.tensor([1.0 if signed else 0.9982421875])])

    def quantize(x, signed):
        codes, scales = torch.zeros(len(x), dtype=torch.long), torch.zeros(len(x)).double()
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            scale = x[part].abs().max()
            scales[part] = scale
            code = torch.bucketize(x[part].abs() / scale.clamp_min(1e-300), borders[signed].clone(), right=True)
            codes[part] = code.clamp(max=127) if signed else torch.where(x[part] > 0, code.clamp(min=1), 0)
        return codes, scales, x.sign()

    def value(codes, scales, sign, signed):
        known = torch.cat([published(True)[:127], torch.ones(1)]) if signed else published(False)
        return known[codes] * scales * sign

    for t, g in enumerate(gradients, 1):
        g = g.double()
        m = v = torch.zeros_like(p)
        if state is not None:
            m, v = value(*state[0], True), value(*state[1], False)
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        p = p * (1 - lr * decay)
        p = p - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        state = quantize(m, True), quantize(v, False)
    return p, state


def test_fifty_steps_equal_a_transcription_in_fp64_code_by_code():
    values, size = numbers(1003, spread=1.0), 64
    gradients = [numbers(1003, seed, spread=1.0) for seed in range(1, 51)]
    parameter = nn.Parameter(values.clone())
    optimizer = dsl.optim.AdamW8bit([parameter], lr=0.01, weight_decay=0.1, block_size=size)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    wanted, (first, second) = transcription(values, gradients, 0.01, (0.9, 0.999), 1e-8, 0.1, size)
    state = optimizer.state[parameter]
    for codes, (code, _, sign) in ((state["exp_avg"], first), (state["exp_avg_sq"], second)):
        assert torch.equal(codes.long(), code * sign.long())
    torch.testing.assert_close(parameter.detach().double(), wanted, rtol=1e-5, atol=1e-7)


def loss_of(optimizer, parameters, steps):
    """Steps on a badly scaled least-squares problem; the last loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 60, generator=generator) * torch.logspace(-2, 1, 60)
    target = torch.randn(2000, 1, generator=generator)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (torch.tanh(x @ parameters[0]) @ parameters[1] - target).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def fresh():
    generator = torch.Generator().manual_seed(1)
    shapes = ((60, 40), (40, 1))
    return [nn.Parameter(torch.randn(*shape, generator=generator) / math.sqrt(shape[0])) for shape in shapes]


def held_out_loss(cls, steps=60):
    torch.manual_seed(0)
    model = ByteGPT(layers=2, width=64, heads=2, block_size=32)
    model.log = lambda *args, **rest: None
    data = StdlibText(batch_size=16, block_size=32, held_out_windows=64, max_megabytes=1)
    optimizer = cls(model.parameters(), lr=2e-3, weight_decay=0.1)
    for _, batch in zip(range(steps), data.train_dataloader(), strict=False):
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [model.training_step(batch, 0).item() for batch in data.val_dataloader()]
    return sum(losses) / len(losses)


def test_the_demo_model_learns_as_with_moments_of_32_bits():
    wanted = held_out_loss(torch.optim.AdamW)
    assert wanted < 3.0
    assert held_out_loss(dsl.optim.AdamW8bit) == pytest.approx(wanted, rel=0.01)


def test_a_state_is_exchanged_with_torch_and_comes_back_with_the_same_bits():
    parameters = fresh()
    optimizer = dsl.optim.AdamW8bit([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}])
    loss_of(optimizer, parameters, 3)
    saved = optimizer.state_dict()
    assert saved["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert saved["state"][0]["exp_avg"].shape == parameters[0].shape
    assert {value.dtype for value in saved["state"][0].values()} == {FP32}

    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    theirs = torch.optim.AdamW([{"params": twins[:1]}, {"params": twins[1:], "lr": 0.02}])
    theirs.load_state_dict(copy.deepcopy(saved))
    loss_of(theirs, twins, 1)
    assert theirs.state[twins[0]]["step"] == 4

    again = dsl.optim.AdamW8bit([{"params": twins[:1]}, {"params": twins[1:]}])
    again.load_state_dict(copy.deepcopy(saved))
    for parameter, twin in zip(parameters, twins, strict=True):
        for key, value in optimizer.state[parameter].items():
            if torch.is_tensor(value):
                assert torch.equal(again.state[twin][key], value), key
    with torch.no_grad():
        for parameter, twin in zip(parameters, twins, strict=True):
            twin.copy_(parameter)
    assert loss_of(again, twins, 5) == loss_of(optimizer, parameters, 5)


def test_a_state_of_torch_loads_and_16_bit_parameters_keep_moments_of_their_own():
    parameters = [nn.Parameter(p.detach().bfloat16()) for p in fresh()]
    theirs = torch.optim.AdamW(parameters, lr=0.01)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.3)
    theirs.step()
    ours = dsl.optim.AdamW8bit(parameters, lr=0.01)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[parameters[0]]["exp_avg"].dtype == torch.int8
    ours.step()
    assert torch.isfinite(parameters[0]).all()


def test_a_state_keeps_the_size_of_its_blocks():
    parameters = fresh()
    optimizer = dsl.optim.Adam8bit(parameters, block_size=64)
    loss_of(optimizer, parameters, 1)
    optimizer.param_groups[0]["block_size"] = 2048
    loss_of(optimizer, parameters, 1)
    assert optimizer.state[parameters[0]]["blocks"].size == 64
    twin = copy.deepcopy(optimizer)
    assert twin.state[twin.param_groups[0]["params"][0]]["exp_avg_scale"].numel() == math.ceil(2400 / 64)


def test_the_gradient_scale_and_copies_are_done_on_the_way():
    plain, fused = fresh(), fresh()
    optimizers = [dsl.optim.AdamW8bit(parameters, lr=0.1) for parameters in (plain, fused)]
    gradients = [torch.randn_like(p) for p in plain]
    for parameter, gradient in zip(plain, gradients, strict=True):
        parameter.grad = gradient * 0.25
    copies = {p: torch.empty(p.shape, dtype=BF16) for p in fused}
    optimizers[0].step()
    optimizers[1].prepare_step(grad_scale=0.25, copies=copies, gradients=dict(zip(fused, gradients, strict=True)))
    optimizers[1].step()
    for left, right in zip(plain, fused, strict=True):
        assert torch.equal(left, right)
        assert torch.equal(copies[right], left.detach().bfloat16())


@pytest.mark.parametrize("size", [0, 100, 8192, 2.0])
def test_an_unusual_block_size_is_refused(size):
    with pytest.raises(ConfigError, match="power of two from 8 to 4096"):
        dsl.optim.Adam8bit(fresh(), block_size=size)


def test_adam_means_decoupled_decay_unless_told_otherwise_and_adamw_always_does():
    built = [
        build_optimizer("adam8bit", {"lr": 1e-3}, fresh()),
        build_optimizer("Adam8bit", {"lr": 1e-3, "adam_w_mode": False}, fresh()),
        build_optimizer("AdamW8bit", {"lr": 1e-3, "adam_w_mode": False, "block_size": 2048}, fresh()),
    ]
    assert [type(each) for each in built] == [dsl.optim.Adam8bit, dsl.optim.Adam8bit, dsl.optim.AdamW8bit]
    assert [each.defaults["decoupled_weight_decay"] for each in built] == [True, False, True]
    assert built[2].defaults["block_size"] == 2048
