"""reduce_sum on the GPU gives the bits of the reference on the CPU."""

import pytest
import torch

from ds_lightning.ops.reduce import reduce_sum, reduce_sum_reference
from tests.gpu.device import assert_guards_are_untouched, busy_stream, moved
from tests.native.test_reduce import DTYPE_PAIRS, assert_bitwise_equal, numbers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("numel", [0, 1, 17, 255, 257, 1_000_003])
@pytest.mark.parametrize(("src_dtype", "dst_dtype"), DTYPE_PAIRS[:-1])
def test_kernel_equals_the_reference_on_the_cpu_bitwise(src_dtype, dst_dtype, numel):
    for count, scale, accumulate in ((1, 1.0, False), (3, 1 / 3, True)):
        srcs = [numbers(numel, src_dtype, seed=k) for k in range(count)]
        expected = numbers(numel, dst_dtype, seed=99)
        actual = moved(expected, offset=1)
        on_device = [moved(src, offset=k) for k, src in enumerate(srcs)]
        reduce_sum_reference(expected, srcs, scale=scale, accumulate=accumulate)
        reduce_sum(actual, on_device, scale=scale, accumulate=accumulate, backend="native")
        assert_bitwise_equal(actual.cpu(), expected)
        assert_guards_are_untouched(actual)


def test_as_many_sources_as_a_launch_takes():
    srcs = [torch.full((1000,), float(k)) for k in range(256)]
    dst = torch.empty(1000, device="cuda")
    reduce_sum(dst, [src.cuda() for src in srcs], backend="native")
    assert dst.eq(255 * 256 / 2).all()


def test_the_destination_may_be_one_of_the_sources():
    first, second = numbers(5000, torch.float32, 0), numbers(5000, torch.float32, 1)
    actual = moved(second)
    reduce_sum(actual, [moved(first), actual], scale=0.5, backend="native")
    assert_bitwise_equal(actual.cpu(), (first + second) * 0.5)


def test_it_runs_on_the_current_stream():
    src, dst = torch.zeros(100_000, device="cuda"), torch.zeros(100_000, device="cuda")
    with busy_stream():
        src.fill_(3)
        reduce_sum(dst, [src, src], backend="native")
        dst.add_(1)
    assert dst.eq(7).all()
