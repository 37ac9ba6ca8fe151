"""Sign packing on the GPU gives the bits of the reference on the CPU."""

import pytest
import torch

from ds_lightning.ops.signs import (
    pack_signs,
    pack_signs_reference,
    packed_bytes,
    unpack_signs,
    unpack_signs_reference,
)
from tests.gpu.device import assert_guards_are_untouched, busy_stream, has_free, moved
from tests.native.test_reduce import assert_bitwise_equal, numbers

pytestmark = pytest.mark.gpu

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 2047, 2049, 2**20 + 3]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_equal_the_references_on_the_cpu_bitwise(dtype, numel):
    for offset in (0, 1, 4):
        src = numbers(numel, dtype, seed=1)
        expected = torch.empty(packed_bytes(numel), dtype=torch.uint8)
        pack_signs_reference(expected, src)
        bits = moved(torch.zeros_like(expected), offset=3)
        pack_signs(bits, moved(src, offset), backend="native")
        assert torch.equal(bits.cpu(), expected)
        assert_guards_are_untouched(bits)
        for scale, accumulate in ((1 / 3, False), (0.7, True)):
            wanted = numbers(numel, dtype, seed=2)
            unpack_signs_reference(wanted, expected, scale=scale, accumulate=accumulate)
            for on_device in (False, True):
                actual = moved(numbers(numel, dtype, seed=2), offset)
                given = torch.tensor([scale], device=actual.device) if on_device else scale
                unpack_signs(actual, bits, scale=given, accumulate=accumulate, backend="native")
                assert_bitwise_equal(actual.cpu(), wanted)
                assert_guards_are_untouched(actual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_references_run_on_the_gpu_too(dtype):
    src = numbers(1003, dtype, seed=1)
    bits = torch.empty(packed_bytes(1003), dtype=torch.uint8)
    pack_signs_reference(bits, src)
    on_device = torch.empty_like(bits, device="cuda")
    pack_signs(on_device, src.cuda(), backend="reference")
    assert torch.equal(on_device.cpu(), bits)
    back, expected = torch.empty(1003, dtype=dtype, device="cuda"), torch.empty(1003, dtype=dtype)
    unpack_signs(back, on_device, scale=0.1, backend="reference")
    unpack_signs_reference(expected, bits, scale=0.1)
    assert_bitwise_equal(back.cpu(), expected)


def test_they_run_on_the_current_stream():
    src, dst = torch.zeros(100_003, device="cuda"), torch.zeros(100_003, device="cuda")
    bits = torch.empty(packed_bytes(100_003), dtype=torch.uint8, device="cuda")
    scale = torch.zeros(1, device="cuda")
    with busy_stream():
        src.fill_(-1)
        scale.fill_(2)
        pack_signs(bits, src, backend="native")
        unpack_signs(dst, bits, scale=scale, backend="native")
        dst.add_(1)
    assert dst.eq(-1).all()


def test_more_elements_than_32_bits_count():
    if not has_free(20):
        pytest.skip("needs 20 GiB of free GPU memory")
    numel = 2**32 + 9
    src = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    src[-2] = -1
    bits = torch.empty(packed_bytes(numel), dtype=torch.uint8, device="cuda")
    pack_signs(bits, src, backend="native")
    assert bits[:-2].eq(255).all()
    assert bits[-2:].tolist() == [0b01111111, 1]
    unpack_signs(src, bits, scale=2.0, backend="native")
    assert src[-3:].tolist() == [2, -2, 2]
