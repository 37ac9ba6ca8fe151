"""The step of Adam with moments of 8 bits on the GPU against the reference on the CPU, bit for bit."""

import copy

import pytest
import torch

from ds_lightning.ops.adam8bit import adam8bit
from ds_lightning.ops.blocks import Blocks
from tests.gpu.device import DEVICE, assert_guards_are_untouched, busy_stream, moved
from tests.native.test_adam8bit import RULES, SIZES, assert_equal, example

pytestmark = pytest.mark.gpu


def on_gpu(lists, copies, offset):
    tensors = [[moved(t, offset) for t in each] for each in lists[:6]]
    return [*tensors, lists[6]], [moved(t, offset) for t in copies]


@pytest.mark.parametrize(("size", "offset"), [(8, 0), (64, 1), (256, 0), (2048, 0), (4096, 4)])
@pytest.mark.parametrize(
    ("grad", "to"),
    [(torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
    ids=["fp32", "bf16", "fp16"],
)
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_equals_the_reference_bitwise(rule, grad, to, size, offset):
    lists, copies = example([*SIZES, 30_001], size, grad, to)
    found, found_copies = on_gpu(lists, copies, offset)
    adam8bit(*found, found_copies, **RULES[rule], grad_scale=0.3, backend="native")
    adam8bit(*lists, copies, **RULES[rule], grad_scale=0.3, backend="reference")
    for tensor in [*found[0], *found[2], *found[3], *found_copies]:
        assert_guards_are_untouched(tensor)
    on_cpu = [[t.cpu() for t in each] for each in (*found[:6], found_copies)]
    assert_equal(on_cpu, [*lists[:6], copies])


def test_many_tensors_take_several_launches_on_the_stream_of_the_caller():
    lists, _ = example([33] * 200, 8)
    wanted = copy.deepcopy(lists)
    adam8bit(*wanted, (), **RULES["adamw"], backend="reference")
    found, _ = on_gpu(lists, [], 0)
    with busy_stream():
        adam8bit(*found, (), **RULES["adamw"], backend="native")
    torch.cuda.synchronize()
    assert_equal([[t.cpu() for t in each] for each in found[:6]], wanted[:6])


def test_a_tensor_without_elements_is_left_alone():
    empty = [torch.empty(0, device=DEVICE)]
    codes = [[torch.empty(0, dtype=d, device=DEVICE)] for d in (torch.int8, torch.uint8)]
    adam8bit(empty, empty, *codes, empty, empty, [Blocks.whole(0, 256)], **RULES["adamw"])
