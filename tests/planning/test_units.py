"""Units: everything once, in plan order, within the slot, as in the file and in blocks of its own."""

from __future__ import annotations

import itertools
import math
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.planning.images import BLOCK_BYTES, block_ceil, block_floor
from loader_service.planning.plan import RankPlan
from loader_service.planning.units import (
    SlotLayout,
    TensorUnit,
    fragments_of_tensors,
    slot_units,
    tensor_units,
)
from tests.planning.making import make_checkpoint, plan_of

SHARDS = {
    "a.safetensors": [
        ("big", "F32", (100, 40)),
        ("none", "BF16", (0, 3)),
        ("scalar", "F64", ()),
        ("bytes", "U8", (77,)),
        *((f"norm.{i}", "BF16", (33,)) for i in range(20)),
    ],
    "b.safetensors": [("wide", "BF16", (3, 5000)), ("stacked", "F32", (4, 9, 11)), ("last", "U8", (5,))],
}
SPLITS: dict[str, tuple[dict[str, object], int]] = {
    "whole": ({}, 1),
    "rows": ({"rules": [{"match": "*", "split": {"axis": ["tp"], "dim": 0}}]}, 3),
    "columns": ({"rules": [{"match": "*", "split": {"axis": ["tp"], "dim": 1}}]}, 3),
    "inner": ({"rules": [{"match": "stacked", "split": {"axis": ["tp"], "dim": 2}}], "skip": ["norm.1*"]}, 2),
}


def rank_plan(form: str, rank: int = -1) -> RankPlan:
    load, ranks = SPLITS[form]
    plan = plan_of(make_checkpoint(SHARDS), load, {"tp": ranks})
    return plan.for_rank(ranks - 1 if rank < 0 else rank)


@given(
    sizes=st.lists(st.integers(0, 500), max_size=60),
    unit_bytes=st.integers(0, 900),
    max_tensors=st.integers(1, 20),
)
def test_tensor_units_take_every_tensor_once_in_order(sizes: list[int], unit_bytes: int, max_tensors: int) -> None:
    units = list(tensor_units(np.array(sizes, dtype=np.int64), unit_bytes=unit_bytes, max_tensors=max_tensors))
    assert [i for unit in units for i in range(unit.first, unit.stop)] == list(range(len(sizes)))
    for unit in units:
        assert unit.nbytes == sum(sizes[unit.first : unit.stop])
        assert 1 <= unit.stop - unit.first <= max_tensors
        assert unit.nbytes <= unit_bytes or unit.stop == unit.first + 1, "only a tensor alone is larger"


def test_a_tensor_larger_than_a_unit_is_alone() -> None:
    units = list(tensor_units(np.array([10, 10, 500, 10]), unit_bytes=100, max_tensors=9))
    assert units == [TensorUnit(0, 2, 20), TensorUnit(2, 3, 500), TensorUnit(3, 4, 10)]


@pytest.mark.parametrize("slot_bytes", [1024, 1500, 4096, 9999, 1 << 20])
@pytest.mark.parametrize("form", list(SPLITS))
def test_slot_units_place_everything_once_in_plan_order(form: str, slot_bytes: int) -> None:
    plan = rank_plan(form)
    slots = list(slot_units(plan, slot_bytes=slot_bytes))
    places = [place for slot in slots for place in slot.placed]
    assert [place.tensor for place in places] == sorted(place.tensor for place in places)
    assert {place.tensor for place in places} == set(range(len(plan))), "empty tensors and parts too"
    elements = dict.fromkeys(range(len(plan)), 0)
    for place in places:
        elements[place.tensor] += sum(math.prod(view.shape) for view in place.views)
    assert elements == {i: math.prod(plan.storage_shape(i)) for i in range(len(plan))}
    for slot in slots:
        assert slot.placed, "no slot is empty"
        assert_fits(plan, slot, slot_bytes)


def assert_fits(plan: RankPlan, slot: SlotLayout, slot_bytes: int) -> None:
    """Every place lies in its extent's image, as in the file; images lie in the slot, in blocks of their own."""
    end = 0
    for image in slot.images:
        assert block_floor(image.offset) >= end, "images share no block"
        assert (image.offset - image.start) % BLOCK_BYTES == 0, "congruent with the file"
        end = block_ceil(image.offset + image.stop - image.start)
        assert image.offset + image.stop - image.start <= slot_bytes + BLOCK_BYTES
    for place in slot.placed:
        if place.fragment < 0:
            continue
        shard = int(plan.fragment_shard[place.fragment])
        images = [each for each in slot.images if each.shard == shard and each.start <= place.start < each.stop]
        assert [place.slot_offset - image.offset for image in images] == [place.start - images[0].start]
        assert place.stop <= images[0].stop
        assert images[0].tensor_at(place.start) == place.tensor
    filled = {place.fragment for place in slot.placed} - {-1}
    assert bool(filled) == bool(slot.images)


@pytest.mark.parametrize("slot_bytes", [1024, 1 << 20])
@pytest.mark.parametrize("form", list(SPLITS))
def test_images_are_the_extents_but_for_gaps_between_slots(form: str, slot_bytes: int) -> None:
    plan = rank_plan(form)
    wanted = wanted_bytes(plan)
    read = [
        (image.shard, image.start, image.stop)
        for slot in slot_units(plan, slot_bytes=slot_bytes)
        for image in slot.images
    ]
    assert_ranges_in_extents(plan, read)
    assert wanted <= {(shard, byte) for shard, start, stop in read for byte in range(start, stop)}
    if slot_bytes > plan.read_bytes + 2 * BLOCK_BYTES * len(plan.extents):
        assert read == [(extent.shard_id, extent.start, extent.stop) for extent in plan.extents]


def wanted_bytes(plan: RankPlan) -> set[tuple[int, int]]:
    """(shard, byte) of all that a view takes."""
    found = set()
    for fragment in range(len(plan.fragment_start)):
        shard, itemsize = int(plan.fragment_shard[fragment]), plan.itemsize(int(plan.fragment_tensor[fragment]))
        block = plan.block(fragment)
        for view in block.views:
            for index in itertools.product(*map(range, view.shape)):
                at = block.start + view.offset_bytes + itemsize * sum(map(operator.mul, index, view.strides))
                found |= {(shard, byte) for byte in range(at, at + itemsize)}
    return found


def assert_ranges_in_extents(plan: RankPlan, ranges: list[tuple[int, int, int]]) -> None:
    """In plan order, without overlaps, each within one extent."""
    extents = [(extent.shard_id, extent.start, extent.stop) for extent in plan.extents]
    for shard, start, stop in ranges:
        assert any(shard == s and a <= start < stop <= b for s, a, b in extents)
    for (shard_a, _, stop_a), (shard_b, start_b, _) in itertools.pairwise(ranges):
        assert (shard_a, stop_a) <= (shard_b, start_b)


@given(data=st.data(), slot_bytes=st.integers(64, 20_000), max_pieces=st.integers(1, 9))
def test_any_extents_are_placed_in_slots_without_sharing_a_block(
    data: st.DataObject, slot_bytes: int, max_pieces: int
) -> None:
    plan = scattered_plan(data)
    for slot in slot_units(plan, slot_bytes=slot_bytes, max_pieces=max_pieces):
        assert len([place for place in slot.placed if place.fragment >= 0]) <= max_pieces
        assert_fits(plan, slot, slot_bytes)


def scattered_plan(data: st.DataObject) -> RankPlan:
    """Tensors with others between them that are left out: extents with gaps, and extents far from each other."""
    sizes = data.draw(st.lists(st.integers(0, 9000), min_size=1, max_size=25))
    kinds = data.draw(st.lists(st.sampled_from(["take", "leave"]), min_size=len(sizes), max_size=len(sizes)))
    tensors = [(f"{kind}.{n}", "U8", (size,)) for n, (kind, size) in enumerate(zip(kinds, sizes, strict=True))]
    checkpoint = make_checkpoint({"a.safetensors": tensors, "b.safetensors": [("take.last", "F32", (3,))]})
    gap_bytes = data.draw(st.sampled_from([0, 100, 10_000]))
    return plan_of(checkpoint, {"skip": ["leave.*"]}, {"tp": 1}, gap_bytes=gap_bytes).for_rank(0)


def test_fragments_of_tensors_skips_empty_ones() -> None:
    plan = rank_plan("whole")
    bounds = fragments_of_tensors(plan)
    counts = dict(zip([plan.name(i) for i in range(len(plan))], np.diff(bounds).tolist(), strict=True))
    assert counts["none"] == 0
    assert counts["big"] == counts["scalar"] == 1
