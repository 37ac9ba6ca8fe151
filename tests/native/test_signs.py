"""Every kernel of sign packing gives the reference's bits, and the reference one sign per element."""

import pytest
import torch

from ds_lightning.errors import NativeOpError
from ds_lightning.ops import native
from ds_lightning.ops.signs import (
    pack_signs,
    pack_signs_reference,
    packed_bytes,
    unpack_signs,
    unpack_signs_reference,
)
from tests.native.test_reduce import assert_bitwise_equal, misaligned, needs_native, numbers

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 2047, 2049, 4101, 2**20 + 3]
backends = pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])


def packed(src: torch.Tensor, backend="auto") -> torch.Tensor:
    dst = torch.full((packed_bytes(src.numel()),), 255, dtype=torch.uint8, device=src.device)
    pack_signs(dst, src, backend=backend)
    return dst


@backends
def test_bits_are_signs_the_lowest_first(backend):
    src = torch.tensor([1.0, -1.0, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), -1e-45, 3.0])
    assert packed(src, backend).tolist() == [0b00101101, 0b00000001]


@backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1003])
def test_unpacked_signs_are_those_of_the_source(numel, dtype, backend):
    src = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    back = torch.empty_like(src)
    unpack_signs(back, packed(src, backend), scale=0.25, backend=backend)
    assert torch.equal(back, torch.where(src >= 0, 0.25, -0.25).to(dtype))
    unpack_signs(back, packed(-src, backend), scale=0.25, accumulate=True, backend=backend)
    assert back.eq(0).all() or (src == 0).any()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_kernels_equal_references_bitwise(numel, dtype):
    src = misaligned(numbers(numel, dtype, seed=1), offset=8)
    expected = torch.empty(packed_bytes(numel), dtype=torch.uint8)
    pack_signs_reference(expected, src)
    bits = misaligned(torch.full_like(expected, 255), offset=3)
    pack_signs(bits, src, backend="native")
    assert torch.equal(bits, expected)
    for scale, accumulate in ((1 / 3, False), (0.7, True), (0.0, True)):
        wanted = numbers(numel, dtype, seed=2)
        actual = misaligned(wanted, offset=24)
        unpack_signs_reference(wanted, bits, scale=scale, accumulate=accumulate)
        unpack_signs(actual, bits, scale=scale, accumulate=accumulate, backend="native")
        assert_bitwise_equal(actual, wanted)


@needs_native
def test_pointers_at_odd_bytes_are_safe():
    module = native.load("_native", "pack_signs")
    src = torch.arange(100.0) - 50
    for offset in (1, 2, 3, 5):
        raw = torch.zeros(4 * 100 + 8, dtype=torch.uint8)
        raw[offset : offset + 400] = src.view(torch.uint8)
        bits = torch.empty(13, dtype=torch.uint8)
        module.pack_signs(raw.data_ptr() + offset, bits.data_ptr(), 100, "fp32")
        assert torch.equal(bits, packed(src, "reference"))
        module.unpack_signs(bits.data_ptr(), raw.data_ptr() + offset, 100, 2.0, "fp32", False)
        assert torch.equal(raw[offset : offset + 400].view(100, 4).clone().view(torch.float32)[:, 0] > 0, src >= 0)


@needs_native
@pytest.mark.parametrize("numel", [0, 1, 7, 9, 17, 2049])
def test_nothing_is_written_past_the_end(numel):
    count = packed_bytes(numel)
    bits = torch.full((count + 64,), 7, dtype=torch.uint8)
    pack_signs(bits[:count], torch.ones(numel), backend="native")
    assert bits[count:].eq(7).all()
    values = torch.full((numel + 64,), 7.0, dtype=torch.bfloat16)
    unpack_signs(values[:numel], bits[:count], backend="native")
    assert values[numel:].eq(7).all()
    assert values[:numel].eq(1).all()


@backends
def test_the_scale_may_be_a_tensor(backend):
    src = torch.tensor([1.0, -2.0, 3.0])
    dst = torch.empty(3)
    unpack_signs(dst, packed(src), scale=torch.tensor([0.1]), backend=backend)
    assert torch.equal(dst, torch.tensor([0.1, -0.1, 0.1]))
    with pytest.raises(ValueError, match=r"one torch.float32 on cpu, not torch.float64"):
        unpack_signs(dst, packed(src), scale=torch.tensor([0.1]).double(), backend=backend)


@backends
def test_any_shape_is_read_in_order(backend):
    src = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    dst = torch.empty(2, 2)
    unpack_signs(dst, packed(src, backend), backend=backend)
    assert torch.equal(dst, src)


def test_auto_takes_the_reference_where_no_kernel_fits():
    src = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).t()
    bits = packed(src)
    assert torch.equal(bits, packed(src.contiguous()))
    dst = torch.empty(4, 6).t()
    unpack_signs(dst, bits)
    assert torch.equal(dst, torch.where(src >= 0, 1.0, -1.0))


@needs_native
def test_autograd_notices_the_writes():
    bits, values = torch.empty(1, dtype=torch.uint8), torch.ones(4)
    before = bits._version, values._version
    pack_signs(bits, values, backend="native")
    unpack_signs(values, bits, backend="native")
    assert bits._version > before[0]
    assert values._version > before[1]


@pytest.mark.parametrize(
    ("dst", "src", "words"),
    [
        (torch.zeros(1, dtype=torch.uint8), torch.zeros(9), r"9 signs are packed in shape \(2,\), not \(1,\)"),
        (torch.zeros(1, dtype=torch.int8), torch.zeros(3), "into torch.uint8, not torch.int8"),
        (torch.zeros(1, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32), "not torch.int32"),
        (torch.zeros(1, dtype=torch.uint8), torch.zeros(3, device="meta"), "values are on meta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_words(dst, src, words):
    with pytest.raises(ValueError, match=words):
        pack_signs(dst, src)
    with pytest.raises(ValueError, match=words):
        unpack_signs(src, dst)


def test_without_native_code_the_reference_runs(monkeypatch):
    monkeypatch.setenv("DS_LIGHTNING_NATIVE", "0")
    native.find.cache_clear()
    try:
        assert packed(torch.tensor([1.0, -1.0])).tolist() == [1]
        with pytest.raises(NativeOpError, match="pack_signs"):
            packed(torch.tensor([1.0, -1.0]), "native")
    finally:
        native.find.cache_clear()
