"""Quantization on the GPU gives the bits of the reference on the CPU."""

import pytest
import torch

from ds_lightning.ops.quantize import (
    dequantize,
    dequantize_reference,
    payload_bytes,
    quantize,
    quantize_reference,
    scale_count,
)
from tests.gpu.device import assert_guards_are_untouched, busy_stream, moved
from tests.native.test_quantize import finite_numbers
from tests.native.test_reduce import assert_bitwise_equal, numbers

pytestmark = pytest.mark.gpu

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 2047, 2049, 2**20 + 3]
# Around the size at which a whole thread block takes one, and of no multiple of four.
BLOCKS = [2, 64, 98, 2048, 2050, 5000]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", SIZES)
def test_kernels_equal_the_references_on_the_cpu_bitwise(numel, dtype, bits):
    for block in BLOCKS if numel < 2**20 else (256, 4096):
        for special, offset in ((False, 0), (False, 1), (True, 4)):
            src = numbers(numel, dtype, seed=1) if special else finite_numbers(numel, dtype, seed=1)
            payload = torch.zeros(payload_bytes(numel, bits), dtype=torch.uint8)
            scales = torch.zeros(scale_count(numel, block))
            actual_payload, actual_scales = moved(payload, offset), moved(scales, offset)
            quantize_reference(payload, scales, src, block=block, bits=bits)
            quantize(actual_payload, actual_scales, moved(src, offset), block=block, bits=bits, backend="native")
            assert torch.equal(actual_payload.cpu(), payload)
            assert_bitwise_equal(actual_scales.cpu(), scales)
            assert_guards_are_untouched(actual_payload)
            assert_guards_are_untouched(actual_scales)
            for accumulate in (False, True):
                wanted = numbers(numel, dtype, seed=2)
                actual = moved(wanted, offset)
                same = {"block": block, "bits": bits, "accumulate": accumulate}
                dequantize_reference(wanted, payload, scales, **same)
                dequantize(actual, actual_payload, actual_scales, backend="native", **same)
                assert_bitwise_equal(actual.cpu(), wanted)
                assert_guards_are_untouched(actual)


@pytest.mark.parametrize("bits", [8, 4])
def test_references_run_on_the_gpu_too(bits):
    src = finite_numbers(1003, torch.float32, seed=1)
    payload = torch.empty(payload_bytes(1003, bits), dtype=torch.uint8)
    scales, back = torch.empty(scale_count(1003, 64)), torch.empty(1003)
    on_device = [tensor.cuda() for tensor in (payload, scales, back)]
    quantize_reference(payload, scales, src, block=64, bits=bits)
    quantize(*on_device[:2], src.cuda(), block=64, bits=bits, backend="reference")
    assert torch.equal(on_device[0].cpu(), payload)
    assert torch.equal(on_device[1].cpu(), scales)
    dequantize_reference(back, payload, scales, block=64, bits=bits)
    dequantize(on_device[2], *on_device[:2], block=64, bits=bits, backend="reference")
    assert torch.equal(on_device[2].cpu(), back)


def test_they_run_on_the_current_stream():
    src, dst = torch.zeros(100_003, device="cuda"), torch.zeros(100_003, device="cuda")
    payload = torch.empty(100_003, dtype=torch.uint8, device="cuda")
    scales = torch.empty(scale_count(100_003, 256), device="cuda")
    with busy_stream():
        src.fill_(127)
        quantize(payload, scales, src, block=256, bits=8, backend="native")
        dequantize(dst, payload, scales, block=256, bits=8, backend="native")
        dst.add_(1)
    assert dst.eq(128).all()
