"""Flat ranges as boxes: exhaustive for small shapes, with hypothesis for others."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lightning.layout.boxes import Box, boxes, overlap

SHAPES = [(), (1,), (7,), (0,), (3, 4), (4, 1), (1, 5), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2)]


def check(shape, start, stop):
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    cut = boxes(shape, start, stop)
    assert len(cut) <= max(2 * len(shape) - 1, 1)
    found = []
    for box in cut:
        part = numbers
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert part.numel() == box.numel
        assert int(part.reshape(-1)[0]) == box.start
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_range_of_a_small_tensor_is_a_few_boxes_in_order(shape):
    for start, stop in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
        check(shape, start, stop)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_any_range_of_any_tensor_is_covered_once(shape, data):
    start = data.draw(st.integers(0, math.prod(shape)))
    check(tuple(shape), start, data.draw(st.integers(start, math.prod(shape))))


def test_a_range_outside_of_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 7\)"):
        boxes((2, 3), 3, 7)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_overlaps_are_what_both_boxes_hold(shape, data):
    def draw():
        low = [data.draw(st.integers(0, n - 1)) for n in shape]
        return low, [data.draw(st.integers(1, n - a)) for n, a in zip(shape, low, strict=True)]

    def cells(offsets, sizes):
        return set(itertools.product(*(range(a, a + n) for a, n in zip(offsets, sizes, strict=True))))

    (a, m), (b, n) = draw(), draw()
    shared = overlap(Box(tuple(a), tuple(m), 0), b, n)
    expected = cells(a, m) & cells(b, n)
    assert (set() if shared is None else cells(*shared)) == expected
