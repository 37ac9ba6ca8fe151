"""The kernel of LAMB against its reference, and the class in a plain loop."""

import copy

import pytest
import torch
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import ConfigError, NativeOpError
from ds_lightning.ops import lamb, native
from ds_lightning.ops.optim import instruction_sets
from tests.dist.reference_optimizers import Reference
from tests.dist.reference_optimizers import lamb as published

needs_native = pytest.mark.skipif(native.find("_native").module is None, reason="without native code")
# Whole blocks of the kernel and parts of them; gaps between parameters; an empty one.
SEGMENTS = lamb.Segments([0, 0, 0, 1, 2], [0, 5000, 9001, 0, 3], [4990, 4001, 0, 77, 4096])
NUMELS = (9016, 80, 4099)
FORM = {"eps": 1e-6, "weight_decay": 0.1}


def tensors(dtype, positive=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(numel, generator=generator) for numel in NUMELS]
    return [(value.abs() if positive else value).to(dtype) for value in made]


def two_passes(grad, moment, copy_dtype, inside, backend, instruction_set="auto", threads=None):
    params, exp_avgs, exp_avg_sqs = tensors(torch.float32, seed=1), tensors(moment, seed=2), tensors(moment, True, 3)
    copies = [torch.zeros(numel, dtype=copy_dtype) for numel in NUMELS] if copy_dtype else []
    how = {**FORM, "eps_inside_sqrt": inside, "backend": backend, "instruction_set": instruction_set}
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        squares = lamb.lamb_moments(
            params, tensors(grad), exp_avgs, exp_avg_sqs, SEGMENTS, beta1=0.9, beta2=0.99, grad_scale=0.5, **how
        )
        lamb.lamb_apply(params, exp_avgs, exp_avg_sqs, copies, SEGMENTS, [0.1, 0.2, 0.3, 0.4, 0.5], **how)
    finally:
        torch.set_num_threads(before)
    return squares, inside_segments([params, exp_avgs, exp_avg_sqs, *([copies] if copies else [])])


def inside_segments(lists):
    return [each[of][start : start + n] for each in lists for of, start, n in zip(*SEGMENTS, strict=True)]


@needs_native
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16, torch.float16])
def test_the_kernel_equals_the_reference_bit_for_bit(grad, moment, copy_dtype, inside):
    wanted, values = two_passes(grad, moment, copy_dtype, inside, "reference")
    for name in instruction_sets():
        squares, found = two_passes(grad, moment, copy_dtype, inside, "native", name)
        assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True)), name
        torch.testing.assert_close(squares, wanted, rtol=1e-14, atol=0)


@needs_native
def test_sums_do_not_depend_on_threads():
    one, *others = (two_passes(torch.float32, torch.float32, None, False, "native", threads=n) for n in (1, 2, 3))
    assert all(torch.equal(one[0], other[0]) for other in others)
    assert all(torch.equal(a, b) for other in others for a, b in zip(one[1], other[1], strict=True))


@needs_native
def test_the_kernel_refuses_what_it_does_not_take():
    wide = [torch.zeros(3, dtype=torch.float64)]
    with pytest.raises(NativeOpError, match="fp32 parameters"):
        lamb.lamb_apply(wide, wide, wide, [], lamb.Segments([0], [0], [3]), [0.1], eps=1e-6, backend="native")


@pytest.mark.parametrize("flags", [{}, {"eps_inside_sqrt": True}, {"bias_correction": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fifty_steps_of_a_plain_loop_equal_the_published_equations(flags, dtype):
    arguments = {"lr": 0.01, "weight_decay": 0.1, "max_coeff": 5.0, "min_coeff": 0.1, **flags}
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (4097,), (0, 3), (9,), ()]
    ours = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    ours[3].data.zero_()
    theirs = [nn.Parameter(p.detach().double()) for p in ours]
    unused = nn.Parameter(torch.ones(3))
    optimizer = dsl.optim.Lamb([*ours[:1], unused, *ours[1:]], **arguments)
    reference = Reference([{"params": theirs, "rule": published, **arguments}])
    for _ in range(50):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=dtype)
            q.grad = p.grad.double()
        optimizer.step()
        reference.step()
    bound = 1e-13 if dtype == torch.float64 else 1e-5
    for p, q in zip(ours, theirs, strict=True):
        assert (p.double() - q).norm() <= bound * q.norm()
    assert torch.equal(unused, torch.ones(3))
    coefficients = optimizer.get_lamb_coeffs()
    assert coefficients == pytest.approx([reference.state[q]["coefficient"] for q in theirs], rel=bound * 10)
    coefficients.clear()
    assert len(optimizer.get_lamb_coeffs()) == len(ours), "it is a copy"


@pytest.mark.parametrize("moment_dtype", ["fp32", "param"])
def test_16_bit_parameters_are_updated_in_fp32(moment_dtype):
    weight = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16())
    wide = nn.Parameter(weight.detach().float())
    weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide.grad = weight.grad.float()
    dsl.optim.Lamb([weight], lr=0.1, weight_decay=0.1, moment_dtype=moment_dtype).step()
    dsl.optim.Lamb([wide], lr=0.1, weight_decay=0.1, moment_dtype="bf16" if moment_dtype == "param" else "fp32").step()
    assert torch.equal(weight, wide.bfloat16())


def test_arguments_out_of_range_are_refused():
    weights = [nn.Parameter(torch.zeros(2))]
    for arguments, error in (
        ({"min_coeff": 2.0, "max_coeff": 1.0}, ValueError),
        ({"eps": -1.0}, ValueError),
        ({"amsgrad": True}, ConfigError),
        ({"set_grad_none": False}, ConfigError),
    ):
        with pytest.raises(error):
            dsl.optim.FusedLamb(weights, **arguments)


def test_states_are_saved_and_copied():
    weights = [nn.Parameter(torch.ones(3))]
    optimizer = dsl.optim.Lamb(weights, lr=0.1)
    weights[0].grad = torch.ones(3)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    assert twin.get_lamb_coeffs() == []
    other = dsl.optim.Lamb([nn.Parameter(weights[0].detach().clone())])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    assert set(other.state[other.param_groups[0]["params"][0]]) == {"step", "exp_avg", "exp_avg_sq"}
