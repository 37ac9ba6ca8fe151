"""The rest of an epoch, for any number of ranks."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, TensorDataset

from ds_lightning.checkpoint.data_order import (
    ResumedSampler,
    batches_of,
    fingerprint,
    order_of_all_ranks,
    remainder,
)

WORLDS = st.integers(1, 7)


def samplers(size, world, **options):
    data = TensorDataset(torch.arange(size))
    return [DistributedSampler(data, world, rank, **options) for rank in range(world)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), WORLDS, WORLDS, st.integers(0, 60), st.booleans(), st.booleans(), st.integers(0, 3))
def test_what_some_ranks_have_left_others_take_up(size, before, after, each, shuffle, drop_last, epoch):
    first = samplers(size, before, shuffle=shuffle, seed=5)
    for sampler in first:
        sampler.set_epoch(epoch)
    order = order_of_all_ranks(first[0], epoch)
    assert sorted(order) == list(range(size))
    consumed = min(each * before, size)
    used = Counter(index for sampler in first for index in list(sampler)[: consumed // before])
    left = [remainder(order, consumed // before * before, after, rank, drop_last) for rank in range(after)]
    assert len({len(part) for part in left}) == 1
    found = used + Counter(index for part in left for index in part)
    assert abs(found.total() - size) < after or size < after
    assert set(found) == set(range(size)) or drop_last
    assert not drop_last or set(found.values()) <= {1}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), WORLDS, st.integers(0, 20), st.booleans())
def test_at_the_same_number_of_ranks_the_rest_is_the_samplers_own(size, world, each, drop_last):
    for sampler in samplers(size, world, drop_last=drop_last):
        whole = list(sampler)
        if each * world <= size:
            rest = remainder(order_of_all_ranks(sampler, 0), each * world, world, sampler.rank, drop_last)
            assert rest == whole[each:]


def test_one_rest_then_whole_epochs_at_a_shift():
    (original,) = samplers(10, 1, seed=3)
    resumed = ResumedSampler(original, [7, 8], first_epoch=4, shift=1)
    assert len(resumed) == 10
    assert list(resumed) == [7, 8]
    third = list(resumed)  # again within the epoch: all of it
    resumed.set_epoch(5)
    fourth = list(resumed)
    for epoch, found in ((3, third), (4, fourth)):
        original.set_epoch(epoch)
        assert found == list(original)


def test_the_rest_belongs_to_its_epoch_alone():
    (original,) = samplers(10, 1, shuffle=False)
    resumed = ResumedSampler(original, [9], first_epoch=0, shift=0)
    resumed.set_epoch(1)
    assert list(resumed) == list(range(10))


def test_batches_and_fingerprints():
    assert [batches_of(7, 3, drop_last) for drop_last in (False, True)] == [3, 2]
    assert fingerprint([1, 2]) == fingerprint(iter([1, 2])) != fingerprint([2, 1])
    assert fingerprint(["a"]) != fingerprint(["b"])
