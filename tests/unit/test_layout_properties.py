"""The layout for any list of parameters and any world size: pure arithmetic, so hypothesis may try what it likes."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lightning.layout.flat import ALIGNMENT, RESIDENT_UNIT_NUMEL, LayoutOptions, build_layout
from ds_lightning.layout.units import ROOT, ParamSpec, scope_of

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from([(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2])
SCOPES = st.sampled_from([ROOT, "blocks.0", "blocks.1", "head"])
WORLDS = st.integers(1, 9) | st.sampled_from([64, 512])


@st.composite
def specs(draw, most=12):
    found = []
    for place in range(draw(st.integers(0, most))):
        dtype, master = draw(DTYPES)
        found.append(
            ParamSpec(
                name=f"p{place}",
                aliases=(f"tied{place}",) if draw(st.booleans()) else (),
                shape=torch.Size(draw(SHAPES)),
                dtype=dtype,
                master_dtype=master,
                group=draw(st.integers(-1, 3)),
                scope=draw(SCOPES),
                active=draw(st.booleans()),
            )
        )
    return found


OPTIONS = st.builds(
    LayoutOptions,
    param_persistence_threshold=st.sampled_from([0, 1, 20, 10**6]),
    model_persistence_threshold=st.sampled_from([0, 30, 2**63 - 1]),
    round_robin=st.booleans(),
)


@given(specs(), WORLDS, OPTIONS)
def test_every_parameter_has_one_place_of_its_size_and_no_two_overlap(parameters, world, options):
    layout = build_layout(parameters, world, options)
    by_name = {spec.name: spec for spec in parameters}
    seen = [slot.name for _, slot in layout.slots()]
    assert sorted(seen) == sorted(by_name)
    assert layout.numel == sum(spec.numel for spec in parameters)
    for unit, slot in layout.slots():
        spec = by_name[slot.name]
        assert (slot.shape, slot.aliases, slot.group) == (spec.shape, spec.aliases, spec.group)
        assert slot.numel == spec.shape.numel()
        assert slot.start % ALIGNMENT == 0
        assert slot.stop <= unit.numel
    for unit in layout.units:
        for left, right in pairwise(unit.slots):
            assert left.stop <= right.start


@given(specs(), WORLDS, OPTIONS)
def test_shards_cover_a_unit_once_and_are_aligned(parameters, world, options):
    for unit in build_layout(parameters, world, options).units:
        assert unit.numel > 0
        assert unit.numel % (world * ALIGNMENT) == 0
        edges = [unit.owned(rank) for rank in range(world)]
        assert edges[0][0] == 0
        assert edges[-1][1] == unit.numel
        assert all(left[1] == right[0] for left, right in pairwise(edges))
        assert len({stop - start for start, stop in edges}) == 1
        last = unit.slots[-1].stop if unit.slots else 0
        assert unit.numel - last < ALIGNMENT * (world + 1), "more padding than alignment asks for"


@given(specs(), WORLDS, OPTIONS)
def test_slots_and_holes_fill_a_unit_without_a_gap(parameters, world, options):
    for unit in build_layout(parameters, world, options).units:
        ranges = sorted([(slot.start, slot.stop) for slot in unit.slots if slot.numel] + unit.holes())
        position = 0
        for start, stop in ranges:
            assert start == position
            assert stop > start
            position = stop
        assert position == unit.numel


@given(specs(), WORLDS, OPTIONS)
def test_what_differs_in_kind_shares_no_unit(parameters, world, options):
    by_name = {spec.name: spec for spec in parameters}
    for unit in build_layout(parameters, world, options).units:
        members = [by_name[slot.name] for slot in unit.slots]
        assert {(spec.dtype, spec.master_dtype) for spec in members} == {(unit.dtype, unit.master_dtype)}
        assert {spec.trainable for spec in members} == {unit.trainable}
        if unit.trainable:
            assert len({spec.active for spec in members}) == 1
        if unit.resident:
            assert all(spec.numel <= options.param_persistence_threshold for spec in members)
        else:
            assert {spec.scope for spec in members} == {unit.scope}
        groups = [slot.group for slot in unit.slots]
        assert groups == sorted(groups), "a group is one range"


@given(specs(), WORLDS, OPTIONS)
def test_resident_parameters_keep_within_both_thresholds(parameters, world, options):
    layout = build_layout(parameters, world, options)
    resident = sum(slot.numel for unit, slot in layout.slots() if unit.resident)
    assert resident <= max(0, options.model_persistence_threshold)
    for unit in layout.units:
        if unit.resident and len(unit.slots) > 1:
            assert sum(slot.numel for slot in unit.slots) <= RESIDENT_UNIT_NUMEL


@given(specs(), WORLDS, OPTIONS, st.data())
def test_pieces_of_a_range_hold_each_element_of_a_group_once(parameters, world, options, data):
    for unit in build_layout(parameters, world, options).units:
        start = data.draw(st.integers(0, unit.numel))
        stop = data.draw(st.integers(start, unit.numel))
        pieces = unit.pieces(start, stop)
        owner = {}
        for piece in pieces:
            assert start <= piece.start < piece.stop <= stop
            assert piece.group >= 0
            for element in range(piece.start, piece.stop):
                assert element not in owner
                owner[element] = piece.group
            for index in piece.slots:
                assert unit.slots[index].group == piece.group
        for slot in unit.slots:
            for element in range(max(slot.start, start), min(slot.stop, stop)):
                assert owner.get(element, -1) == slot.group
        assert len({piece.group for piece in pieces}) == len(pieces), "one piece per group"
        if start % ALIGNMENT == stop % ALIGNMENT == 0:
            assert all(piece.stop % ALIGNMENT == 0 for piece in pieces), "an odd tail"


@given(specs(), WORLDS, OPTIONS)
@settings(max_examples=50)
def test_the_pieces_of_all_ranks_are_the_trainable_elements(parameters, world, options):
    for unit in build_layout(parameters, world, options).units:
        count = {}
        for rank in range(world):
            for piece in unit.pieces(*unit.owned(rank)):
                count[piece.group] = count.get(piece.group, 0) + piece.stop - piece.start
        for group, elements in count.items():
            wanted = [slot for slot in unit.slots if slot.group == group]
            # A piece spans the alignment behind its slots, which holds zeros.
            assert sum(slot.numel for slot in wanted) <= elements <= wanted[-1].end - wanted[0].start


@given(specs(), WORLDS, OPTIONS, st.integers(0, 100))
def test_a_layout_depends_on_nothing_but_its_input(parameters, world, options, first):
    once, again = (build_layout(parameters, world, options, first) for _ in range(2))
    assert once == again
    assert [unit.index for unit in once.units] == list(range(first, first + len(once.units)))
    assert len({unit.name for unit in once.units}) == len(once.units)


@given(specs(), WORLDS, OPTIONS)
def test_the_world_size_changes_padding_alone(parameters, world, options):
    here, alone = build_layout(parameters, world, options), build_layout(parameters, 1, options)
    assert len(here.units) == len(alone.units)
    for left, right in zip(here.units, alone.units, strict=True):
        assert {slot.name for slot in left.slots} == {slot.name for slot in right.slots}
        if not options.round_robin:
            assert left.slots == right.slots


@given(st.lists(st.sampled_from(["emb.w", "blocks.0.w", "blocks.0.up.w", "blocks.1.w", "blocks.10.w"]), min_size=1))
def test_a_tensor_tied_across_scopes_belongs_to_the_root(names):
    scopes = ["blocks.0", "blocks.1"]
    holders = {name.rsplit(".", name.count("up") + 1)[0] for name in names}
    found = scope_of(names, scopes)
    if found == ROOT:
        assert len(holders) > 1 or not holders <= set(scopes)
    else:
        assert all(name.startswith(found + ".") for name in names)


def blocks_of(unit, start, stop, size):
    """First and last element of every block in a range, in the unit."""
    borders = [start + border for border in unit.block_borders(start, stop, size)]
    assert borders == sorted(set(borders))
    return [(at, min(at + size, right)) for left, right in pairwise(borders) for at in range(left, right, size)]


@settings(max_examples=20, deadline=None)
@given(specs(), st.integers(1, 9), OPTIONS, st.sampled_from([8, 16, 256]), st.integers(1, 20))
def test_blocks_of_states_are_the_same_however_a_unit_is_cut(parameters, world, options, size, tile):
    for unit in build_layout(parameters, world, options).units:
        ends = {slot.name: (slot.start, slot.end) for slot in unit.slots}
        for piece in unit.pieces(0, unit.numel):
            whole = blocks_of(unit, piece.start, piece.stop, size)
            assert whole[0][0] == piece.start
            assert whole[-1][1] == piece.stop
            for left, right in whole:  # within one parameter and one rank
                assert 0 < right - left <= size
                assert left // unit.chunk == (right - 1) // unit.chunk
                assert any(start <= left and right <= end for start, end in ends.values())
            parts, at = [], piece.start
            while at < piece.stop:  # runs of at most a tile, or a block
                stop = min(at + tile * ALIGNMENT, piece.stop)
                stop = unit.block_cut(at, stop, size) if stop < piece.stop else stop
                assert at < stop <= piece.stop
                parts += blocks_of(unit, at, stop, size)
                at = stop
            assert parts == whole
        sharded = [
            block
            for rank in range(world)
            for piece in unit.pieces(*unit.owned(rank))
            for block in blocks_of(unit, piece.start, piece.stop, size)
        ]
        pieces = unit.pieces(0, unit.numel)
        assert sharded == [b for piece in pieces for b in blocks_of(unit, piece.start, piece.stop, size)]
