"""Stochastic rounding: kernels give the reference's bits, results are neighbours, and the mean is exact."""

import pytest
import torch

from ds_lightning.ops.rounding import round_stochastic
from tests.native.test_reduce import assert_bitwise_equal, needs_native

DTYPES = [torch.bfloat16, torch.float16]
backends = pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])


def patterns(count=30_000):
    """Every kind of fp32 number, as random bits, and the borders."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    ordinary = torch.randn(count, generator=generator) * 10 ** torch.linspace(-9, 6, count)
    borders = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 65504.0, 65519.0, 65536.0]
    borders += [2.0**-14, 2.0**-24, 2.0**-25, 2.0**-40, 2.0**-126, 1e-45, 6.1e-5, 5.9e-8]
    return torch.cat([bits.view(torch.float32), ordinary, torch.tensor(borders)])


def rounded(src, dtype, seed=0, backend="auto"):
    dst = torch.empty_like(src, dtype=dtype)
    round_stochastic(dst, src, seed=seed, backend=backend)
    return dst


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1, 123456789, 2**32 + 5, -1])
def test_kernels_equal_the_reference_bitwise(dtype, seed):
    src = patterns()
    assert_bitwise_equal(rounded(src, dtype, seed, "native"), rounded(src, dtype, seed, "reference"))


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_result_is_one_of_the_two_neighbours(dtype, backend):
    src = patterns(10_000)
    src = src[src.isfinite() & (src.abs() < torch.finfo(dtype).max)]
    for seed in range(3):
        found = rounded(src, dtype, seed, backend).double()
        spacing = (src.double().abs().log2().floor().clamp(min=-126 if dtype is torch.bfloat16 else -14)).exp2()
        spacing *= torch.finfo(dtype).eps
        assert ((found - src.double()).abs() < spacing).all()
        assert (found.sign() * src.double().sign() >= 0).all()
    exact = torch.randn(10_000).to(dtype)
    assert torch.equal(rounded(exact.float(), dtype, 7, backend), exact)


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so_and_bf16_stays_finite(dtype, backend):
    src = torch.tensor([float("inf"), -float("inf"), float("nan"), -float("nan"), 3.39e38, -3.4e38, 1e6])
    for seed in range(20):
        found = rounded(src, dtype, seed, backend)
        assert found[0] == float("inf")
        assert found[1] == -float("inf")
        assert found[2:4].isnan().all()
        assert found[4:].isfinite().all() if dtype is torch.bfloat16 else found[4:].isinf().all()


@backends
@pytest.mark.parametrize("value", [1.001, -1.001, 3.0e-6, 4.1e-8, -7.3e4, 1234.567])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_over_seeds_is_the_number(dtype, value, backend):
    if dtype is torch.float16 and abs(value) > 65504:
        return
    src = torch.tensor([value], dtype=torch.float32)
    seeds = 400
    found = torch.stack([rounded(src, dtype, seed, backend).double() for seed in range(seeds)])
    low, high = found.min(), found.max()
    deviation = (high - low) / 2 / seeds**0.5  # at most, of the mean
    assert low < high
    assert abs(found.mean() - src.double()).item() < 4 * deviation


@backends
def test_the_mean_over_elements_is_the_number(backend):
    """Neighbouring numbers throw different dice."""
    src = 1 + torch.arange(1 << 16) * 2.0**-23  # all that bf16 rounds to 1 or to 1 + 2^-7
    found = rounded(src, torch.bfloat16, 3, backend).double()
    assert abs(found.mean() - src.double().mean()).item() < 4 * 2.0**-8 / 256


def test_a_small_step_is_taken_in_the_mean():
    """A thousand steps of a tenth of the last digit: nearest rounding never moves."""
    weight = torch.ones(4096, dtype=torch.bfloat16)
    start = weight.clone()
    for step in range(1000):
        wide = weight.float() - 2.0**-8 / 10
        round_stochastic(weight, wide, seed=step)
        start = (start.float() - 2.0**-8 / 10).to(torch.bfloat16)
    assert (start == 1).all()
    moved = 1 - weight.double().mean().item()
    # Equal elements throw the same dice in a step, so there are few independent walks.
    assert moved == pytest.approx(1000 * 2.0**-8 / 10, rel=0.2)


def test_the_cut_changes_nothing():
    src = torch.randn(1001)
    whole = rounded(src, torch.bfloat16, 5)
    parts = torch.cat([rounded(part.contiguous(), torch.bfloat16, 5) for part in src.split(97)])
    assert torch.equal(whole, parts)


def test_what_does_not_fit_is_refused():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="bf16 or fp16 of fp32"):
        round_stochastic(torch.zeros(3), x, seed=0)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        round_stochastic(torch.zeros(2, dtype=torch.bfloat16), x, seed=0)
    with pytest.raises(ValueError, match="backend"):
        round_stochastic(torch.zeros(3, dtype=torch.bfloat16), x, seed=0, backend="fast")
