"""Where units live and how they lie in files: arithmetic, without files and processes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lightning.layout.flat import LayoutOptions, build_layout
from ds_lightning.layout.units import ParamSpec
from ds_lightning.offload.policy import Home, OffloadPolicy, Placement
from ds_lightning.offload.stored import Stored, present
from ds_lightning.offload.tiles import GRADIENT, MASTER, SECTOR, SHARD, TileLayout, choose_tile

REGIONS = {GRADIENT: torch.float32, MASTER: torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}


def units(count, numel=4096, world=2):
    specs = [
        ParamSpec(f"b{i}.w", (), torch.Size((numel,)), torch.float32, torch.float32, 0, f"b{i}", True)
        for i in range(count)
    ]
    return build_layout(specs, world, LayoutOptions(param_persistence_threshold=0)).units


@pytest.mark.parametrize("tenths", range(11))
def test_ratio_is_the_share_of_units_that_are_offloaded(tenths):
    places = OffloadPolicy(optimizer=Home.HOST, ratio=tenths / 10).place(units(10), sharded=True)
    apart = [place.master is Home.HOST for place in places.values()]
    assert apart == [False] * (10 - tenths) + [True] * tenths


def test_small_units_and_those_within_max_in_cpu_are_not_on_disk():
    policy = OffloadPolicy(optimizer=Home.DISK, param=Home.DISK, max_in_cpu=3 * 2048, smallest=4 * 2048)
    places = policy.place(units(5), sharded=True)
    assert [place.shard for place in places.values()] == [Home.HOST] * 3 + [Home.DISK] * 2
    assert {place.master for place in places.values()} == {Home.DISK}
    larger = OffloadPolicy(optimizer=Home.DISK, smallest=4 * 2048 + 1)
    assert {place.master for place in larger.place(units(5), sharded=True).values()} == {Home.HOST}
    assert set(OffloadPolicy(param=Home.DISK).place(units(2), sharded=False).values()) == {Placement()}


@given(
    numel=st.integers(1, 50_000),
    largest=st.integers(1024, 60_000),
    buffers=st.integers(1, 8),
    slots=st.integers(1, 3),
    with_shard=st.booleans(),
)
def test_every_element_of_every_region_has_a_place_of_its_own(numel, largest, buffers, slots, with_shard):
    tile = choose_tile(numel, largest, REGIONS, buffers, slots)
    layout = TileLayout(numel, tile, REGIONS, torch.bfloat16 if with_shard else None)
    taken = []
    for key in [*REGIONS, *([SHARD] if with_shard else [])]:
        extents = list(layout.extents(key, 0, numel))
        assert [first for _, first, _ in extents] == [0, *(stop for _, _, stop in extents[:-1])]
        assert extents[-1][2] == numel
        size = layout.dtype(key).itemsize
        taken += [(offset, offset + (stop - first) * size) for offset, first, stop in extents]
        if key != SHARD:
            assert all(offset % SECTOR == 0 for offset, _, _ in extents)
    taken.sort()
    assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
    assert taken[-1][1] <= layout.nbytes
    assert layout.record % SECTOR == 0


@given(
    chunk=st.integers(1, 10**7), largest=st.integers(4096, 10**7), buffers=st.integers(1, 8), slots=st.integers(1, 3)
)
def test_tiles_stay_within_the_buffers(chunk, largest, buffers, slots):
    tile = choose_tile(chunk, largest, REGIONS, buffers, slots)
    needed = slots * tile * sum(dtype.itemsize for dtype in REGIONS.values())
    assert tile % 1024 == 0
    assert tile == 1024 or needed <= buffers * 4 * largest
    assert tile <= max(1024, largest)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_part_of_what_is_stored_is_read_alone(a, b, c, d):
    values = torch.arange(20.0)
    reads = []

    def read(start, stop):
        reads.append((start, stop))
        return values[start:stop].clone()

    part = Stored(torch.float32, 20, read)[a:b][c:d]
    assert part.numel() == values[a:b][c:d].numel()
    assert torch.equal(present(part), values[a:b][c:d])
    assert sum(stop - start for start, stop in reads) == part.numel()
