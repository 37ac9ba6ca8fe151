"""Every kernel of reduce_sum equals the reference bit for bit, on awkward sizes and addresses."""

import subprocess
import sys

import pytest
import torch

from ds_lightning.errors import NativeOpError
from ds_lightning.ops import memory, native, status
from ds_lightning.ops.reduce import reduce_sum, reduce_sum_reference

needs_native = pytest.mark.skipif(
    native.find("_native").module is None, reason="the package was installed without native code"
)

SIXTEEN_TO_THIRTY_TWO = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_PAIRS = [(a, b) for a in SIXTEEN_TO_THIRTY_TWO for b in SIXTEEN_TO_THIRTY_TWO]
DTYPE_PAIRS.append((torch.float64, torch.float64))
AS_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 6e-8, -3e-6]
SPECIAL += [65504.0, 65519.9, 65520.0, -65520.0, 3.4e38, 1.0 + 2**-9, 1.0 + 3 * 2**-9, 1 + 2**-11]


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The payload of a NaN is not defined, even within torch; its place is."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = AS_BITS[expected.element_size()]
    assert torch.equal(actual.view(bits)[~nan], expected.view(bits)[~nan])


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of many magnitudes, so that order and rounding show, and some special ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values *= torch.exp2(torch.randint(-8, 8, (numel,), generator=generator).double())
    special = torch.tensor(SPECIAL, dtype=torch.float64)[: max(numel - 1, 0)]
    places = torch.randperm(numel, generator=generator)[: special.numel()]
    values[places] = special
    return values.to(dtype)


def misaligned(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, `offset` bytes after an aligned address."""
    numel, size = tensor.numel(), tensor.element_size()
    raw = torch.empty(numel * size + 64, dtype=torch.uint8)
    storage = raw[offset : offset + numel * size].untyped_storage()
    moved = torch.empty(0, dtype=tensor.dtype)
    moved.set_(storage, offset // size, (numel,))
    moved.copy_(tensor)
    return moved


@needs_native
@pytest.mark.parametrize("numel", [0, 1, 3, 7, 15, 16, 17, 63, 2048, 2049])
@pytest.mark.parametrize(("src_dtype", "dst_dtype"), DTYPE_PAIRS)
def test_kernel_equals_reference_bitwise(src_dtype, dst_dtype, numel):
    for count in (1, 2, 3, 4):
        for scale, accumulate in ((1.0, False), (1 / 3, True), (0.7, False), (1.0, True)):
            srcs = [numbers(numel, src_dtype, seed=k) for k in range(count)]
            expected = numbers(numel, dst_dtype, seed=99)
            actual = misaligned(expected, offset=8)
            srcs = [misaligned(src, offset=8 * k) for k, src in enumerate(srcs)]
            reduce_sum_reference(expected, srcs, scale=scale, accumulate=accumulate)
            reduce_sum(actual, srcs, scale=scale, accumulate=accumulate, backend="native")
            assert_bitwise_equal(actual, expected)


@needs_native
@pytest.mark.parametrize(("src_dtype", "dst_dtype"), DTYPE_PAIRS)
def test_kernel_equals_reference_on_a_million_odd_elements(src_dtype, dst_dtype):
    srcs = [numbers(1_000_003, src_dtype, seed=k) for k in range(3)]
    expected = numbers(1_000_003, dst_dtype, seed=99)
    actual = expected.clone()
    reduce_sum_reference(expected, srcs, scale=1 / 3, accumulate=True)
    reduce_sum(actual, srcs, scale=1 / 3, accumulate=True, backend="native")
    assert_bitwise_equal(actual, expected)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_converts_as_in_torch(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    widened = torch.empty(2**16)
    reduce_sum(widened, [every], backend="native")
    assert_bitwise_equal(widened, every.float())
    narrowed = torch.empty_like(every)
    # Between two neighbours, where rounding decides.
    for nudge in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001):
        wide = (widened.view(torch.int32) + nudge).view(torch.float32)
        reduce_sum(narrowed, [wide], backend="native")
        assert_bitwise_equal(narrowed, wide.to(dtype))


@needs_native
def test_pointers_at_odd_bytes_are_safe():
    module = native.load("_native", "reduce_sum")
    for offset in (1, 2, 3, 5):
        raw = torch.zeros(4 * 100 + 8, dtype=torch.uint8)
        src = torch.arange(100.0)
        raw[offset : offset + 400] = src.view(torch.uint8)
        dst = torch.empty(100)
        pointer = raw.data_ptr() + offset
        module.reduce_sum(dst.data_ptr(), [pointer] * 2, 100, "fp32", "fp32", 0.5, False)
        assert torch.equal(dst, src)


@needs_native
def test_nothing_is_written_past_the_end():
    for numel in (0, 1, 15, 17, 63):
        whole = torch.full((numel + 64,), 7.0, dtype=torch.bfloat16)
        reduce_sum(whole[:numel], [torch.ones(numel)], backend="native")
        assert whole[numel:].eq(7).all()


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])
def test_the_destination_may_be_one_of_the_sources(backend):
    first, second = numbers(5000, torch.float32, 0), numbers(5000, torch.float32, 1)
    expected = (first + second) * 0.5
    reduce_sum(second, [first, second], scale=0.5, backend=backend)
    assert_bitwise_equal(second, expected)


@needs_native
def test_autograd_notices_the_write():
    dst = torch.ones(4)
    before = dst._version
    reduce_sum(dst, [torch.ones(4)], backend="native")
    assert dst._version > before


def test_auto_takes_the_reference_where_no_kernel_fits():
    dst = torch.zeros(4, 6).t()
    reduce_sum(dst, [torch.ones(6, 4), torch.ones(6, 4)], scale=2.0)
    assert dst.eq(4).all()


@pytest.mark.parametrize(
    ("dst", "srcs", "words"),
    [
        (torch.zeros(3), [], "at least one source"),
        (torch.zeros(3), [torch.zeros(4)], r"srcs\[0\] is of torch.Size\(\[4\]\)"),
        (torch.zeros(3), [torch.zeros(3), torch.zeros(3).half()], r"srcs\[1\] is torch.float16"),
        (torch.zeros(3), [torch.zeros(3).double()], "fp64 only to fp64"),
        (torch.zeros(3), [torch.zeros(3, dtype=torch.int32)], "not torch.int32"),
        (torch.zeros(3), [torch.zeros(3, device="meta")], "is on meta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_words(dst, srcs, words):
    with pytest.raises(ValueError, match=words):
        reduce_sum(dst, srcs)


def test_a_missing_module_is_an_error_only_on_use(monkeypatch):
    monkeypatch.setenv("DS_LIGHTNING_NATIVE", "0")
    native.find.cache_clear()
    try:
        dst = torch.zeros(3)
        reduce_sum(dst, [torch.ones(3)])
        assert dst.eq(1).all()
        assert not memory.keep_freed_memory()
        assert not memory.release_free_memory()
        with pytest.raises(NativeOpError, match="DS_LIGHTNING_NATIVE=0") as caught:
            reduce_sum(dst, [torch.ones(3)], backend="native")
        assert "doctor" in str(caught.value)
        assert not any(entry.available for entry in status.status())
        assert all(entry.fix for entry in status.status())
    finally:
        native.find.cache_clear()


def test_status_tells_each_module_and_where_it_lies():
    entries = status.status()
    assert [entry.name for entry in entries] == ["_native", "_aio", "_cuda"]
    assert all(entry.purpose and entry.detail for entry in entries)
    assert all(entry.available or entry.fix for entry in entries)


@needs_native
def test_freed_memory_is_kept_and_given_back():
    # In a process of its own: the setting is for the whole process.
    code = """
import os
from ds_lightning.ops import memory
import torch
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
assert memory.keep_freed_memory()
before = resident()
tensor = torch.ones(64 << 18)  # 64 MiB
del tensor
assert resident() - before > 48 << 20, "kept"
assert memory.release_free_memory()
assert resident() - before < 16 << 20, "given back"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
