"""Every kernel of quantization gives the reference's bits, and nothing is off by more than half a step."""

import pytest
import torch

from ds_lightning.errors import NativeOpError
from ds_lightning.ops import native
from ds_lightning.ops.quantize import (
    dequantize,
    dequantize_reference,
    payload_bytes,
    quantize,
    quantize_reference,
    scale_count,
)
from tests.native.test_reduce import assert_bitwise_equal, misaligned, needs_native, numbers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 2047, 2049, 2**20 + 3]
BLOCKS = [2, 16, 100, 2048, 2050, 5000]
MOST = {8: 127, 4: 7}
NAN, INF = float("nan"), float("inf")
backends = pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])


def quantized(src, block, bits, backend="auto") -> tuple[torch.Tensor, torch.Tensor]:
    payload = torch.full((payload_bytes(src.numel(), bits),), 255, dtype=torch.uint8, device=src.device)
    scales = torch.full((scale_count(src.numel(), block),), 7.0, device=src.device)
    quantize(payload, scales, src, block=block, bits=bits, backend=backend)
    return payload, scales


def finite_numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp2(torch.randint(-12, 12, (numel,), generator=generator).float())
    return (torch.randn(numel, generator=generator) * magnitudes).to(dtype)


@backends
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 15, 17, 5003])
def test_nothing_is_off_by_more_than_half_a_step(numel, dtype, bits, backend):
    src = finite_numbers(numel, dtype, seed=numel)
    for block in (2, 64, 100, 4096):
        payload, scales = quantized(src, block, bits, backend)
        back = torch.empty(numel)
        dequantize(back, payload, scales, block=block, bits=bits, backend=backend)
        exact = src.double()
        steps = scales.double().repeat_interleave(block)[:numel]
        # The quotient, of at most 127, is rounded to fp32 before it is rounded to an integer, and the
        # product with the scale is rounded once more.
        assert ((back.double() - exact).abs() <= steps * (0.5 + 2**-16)).all()
        padded = torch.zeros(scales.numel() * block, dtype=torch.float64)
        padded[:numel] = exact.abs()
        largest = padded.view(-1, block).amax(dim=1)
        assert torch.equal(scales, (largest / MOST[bits]).float())


@needs_native
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_kernels_equal_references_bitwise(numel, dtype, bits):
    for block in BLOCKS if numel < 2**20 else (64, 5000):
        for special in (False, True):
            values = numbers(numel, dtype, seed=1) if special else finite_numbers(numel, dtype, seed=1)
            src = misaligned(values, offset=8)
            payload = torch.full((payload_bytes(numel, bits),), 255, dtype=torch.uint8)
            scales = torch.full((scale_count(numel, block),), 7.0)
            actual_payload, actual_scales = misaligned(payload, offset=3), misaligned(scales, offset=4)
            quantize_reference(payload, scales, src, block=block, bits=bits)
            quantize(actual_payload, actual_scales, src, block=block, bits=bits, backend="native")
            assert torch.equal(actual_payload, payload)
            assert_bitwise_equal(actual_scales, scales)
            for accumulate in (False, True):
                wanted = numbers(numel, dtype, seed=2)
                actual = misaligned(wanted, offset=24)
                dequantize_reference(wanted, payload, scales, block=block, bits=bits, accumulate=accumulate)
                dequantize(actual, payload, scales, block=block, bits=bits, accumulate=accumulate, backend="native")
                assert_bitwise_equal(actual, wanted)


@backends
def test_ties_go_to_the_even_neighbour(backend):
    src = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 125.5])
    payload, scales = quantized(src, 8, 8, backend)
    assert scales.tolist() == [1]
    assert payload.view(torch.int8).tolist() == [127, 0, 2, 2, 0, -2, -126, 126]


@backends
def test_four_bits_lie_two_to_a_byte_the_even_element_low(backend):
    payload, scales = quantized(torch.tensor([7.0, -7.0, -1.0, 3.0, 2.0]), 8, 4, backend)
    assert scales.tolist() == [1]
    assert payload.tolist() == [0x97, 0x3F, 0x02]
    back = torch.empty(5)
    dequantize(back, payload, scales, block=8, bits=4, backend=backend)
    assert back.tolist() == [7, -7, -1, 3, 2]


@backends
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("bits", [8, 4])
def test_only_the_block_with_something_not_finite_is_lost(bits, bad, backend):
    src = torch.ones(12)
    src[6] = bad
    payload, scales = quantized(src, 4, bits, backend)
    back = torch.empty(12)
    dequantize(back, payload, scales, block=4, bits=bits, backend=backend)
    assert back.isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4
    middle = slice(payload_bytes(4, bits), payload_bytes(8, bits))
    assert payload[middle].eq(0).all()


@backends
@pytest.mark.parametrize("x", [0.0, -0.0, 1e-45, 1.4e-36])
def test_zeros_and_what_is_too_small_for_a_scale_become_zeros(x, backend):
    payload, scales = quantized(torch.full((5,), x), 4, 8, backend)
    assert scales.eq(0).all()
    assert payload.eq(0).all()
    payload, scales = quantized(torch.full((5,), 1.6e-36), 4, 8, backend)
    assert payload.view(torch.int8).eq(127).all()


@backends
@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 3.4e38), (torch.bfloat16, 3.38e38), (torch.float16, 65504.0)]
)
def test_the_largest_numbers_come_back_finite(dtype, largest, backend):
    src = torch.tensor([largest, -largest], dtype=dtype)
    payload, scales = quantized(src, 2, 8, backend)
    back = torch.empty_like(src)
    dequantize(back, payload, scales, block=2, bits=8, backend=backend)
    assert torch.allclose(back, src, rtol=2**-22, atol=0)


@needs_native
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", [0, 1, 7, 17, 2049])
def test_nothing_is_written_past_the_end(numel, bits):
    count, blocks = payload_bytes(numel, bits), scale_count(numel, 16)
    payload, scales = torch.full((count + 64,), 7, dtype=torch.uint8), torch.full((blocks + 16,), 7.0)
    quantize(payload[:count], scales[:blocks], torch.ones(numel), block=16, bits=bits, backend="native")
    assert payload[count:].eq(7).all()
    assert scales[blocks:].eq(7).all()
    values = torch.full((numel + 64,), 7.0, dtype=torch.float16)
    dequantize(values[:numel], payload[:count], scales[:blocks], block=16, bits=bits, backend="native")
    assert values[numel:].eq(7).all()
    assert values[:numel].eq(1).all()


@needs_native
def test_autograd_notices_the_writes():
    payload, scales, values = torch.empty(4, dtype=torch.uint8), torch.empty(1), torch.ones(4)
    before = payload._version, scales._version, values._version
    quantize(payload, scales, values, block=4, bits=8, backend="native")
    dequantize(values, payload, scales, block=4, bits=8, backend="native")
    after = payload._version, scales._version, values._version
    assert all(a > b for a, b in zip(after, before, strict=True))


def test_auto_takes_the_reference_where_no_kernel_fits():
    src = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).t()
    payload, scales = quantized(src, 6, 4)
    expected = quantized(src.contiguous(), 6, 4)
    assert torch.equal(payload, expected[0])
    assert torch.equal(scales, expected[1])
    dst = torch.empty(4, 6).t()
    dequantize(dst, payload, scales, block=6, bits=4)
    assert (dst - src).abs().max() <= scales.max()


BYTES = torch.uint8


@pytest.mark.parametrize(
    ("numel", "payload", "scales", "block", "bits", "words"),
    [
        (5, torch.zeros(4, dtype=BYTES), torch.zeros(1), 8, 8, r"for 5 elements the payload must be torch.uint8"),
        (5, torch.zeros(5, dtype=torch.int8), torch.zeros(1), 8, 8, "not torch.int8"),
        (5, torch.zeros(3, dtype=BYTES), torch.zeros(2), 8, 4, r"scales must be torch.float32 of shape \(1,\)"),
        (5, torch.zeros(3, dtype=BYTES), torch.zeros(2), 3, 4, "block=3 is not a positive number"),
        (5, torch.zeros(5, dtype=BYTES), torch.zeros(1), 0, 8, "block=0"),
        (5, torch.zeros(5, dtype=BYTES), torch.zeros(1), 8, 6, "8 and 4 bits, not 6"),
        (5, torch.zeros(5, dtype=BYTES, device="meta"), torch.zeros(1), 8, 8, "the payload is on meta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_words(numel, payload, scales, block, bits, words):
    with pytest.raises(ValueError, match=words):
        quantize(payload, scales, torch.zeros(numel), block=block, bits=bits)
    with pytest.raises(ValueError, match=words):
        dequantize(torch.zeros(numel), payload, scales, block=block, bits=bits)


def test_fp64_is_refused():
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        quantize(torch.zeros(1, dtype=BYTES), torch.zeros(1), torch.zeros(1).double(), block=8, bits=8)


def test_without_native_code_the_reference_runs(monkeypatch):
    monkeypatch.setenv("DS_LIGHTNING_NATIVE", "0")
    native.find.cache_clear()
    try:
        assert quantized(torch.ones(2), 2, 8)[0].tolist() == [127, 127]
        with pytest.raises(NativeOpError, match="quantize"):
            quantized(torch.ones(2), 2, 8, "native")
    finally:
        native.find.cache_clear()
