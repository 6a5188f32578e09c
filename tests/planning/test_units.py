"""Units: everything once, in plan order, within the slot, aligned as in the file."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.planning.plan import RankPlan
from loader_service.planning.units import (
    ALIGNMENT_BYTES,
    Placed,
    TensorUnit,
    fragments_of_tensors,
    gaps_before,
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


@pytest.mark.parametrize("slot_bytes", [1024, 1500, 4096, 1 << 20])
@pytest.mark.parametrize("form", list(SPLITS))
def test_slot_units_place_everything_once_in_plan_order(form: str, slot_bytes: int) -> None:
    plan = rank_plan(form)
    units = list(slot_units(plan, slot_bytes=slot_bytes))
    places = [place for unit in units for place in unit]
    assert [place.tensor for place in places] == sorted(place.tensor for place in places)
    assert {place.tensor for place in places} == set(range(len(plan))), "empty tensors and parts too"
    elements = dict.fromkeys(range(len(plan)), 0)
    for place in places:
        elements[place.tensor] += sum(math.prod(view.shape) for view in place.views)
    assert elements == {i: math.prod(plan.storage_shape(i)) for i in range(len(plan))}
    for unit in units:
        assert unit, "no unit is empty"
        assert_fits(unit, slot_bytes)


def assert_fits(unit: list[Placed], slot_bytes: int) -> None:
    held = [place for place in unit if place.fragment >= 0]
    end = 0
    for place in held:
        assert place.slot_offset >= end, "places do not overlap"
        end = place.slot_offset + place.stop - place.start
        assert (place.slot_offset - place.start) % ALIGNMENT_BYTES == 0, "aligned in memory as in the file"
    assert end <= slot_bytes


@pytest.mark.parametrize("slot_bytes", [1024, 1 << 20])
@pytest.mark.parametrize("form", list(SPLITS))
def test_places_and_their_gaps_are_exactly_the_extents(form: str, slot_bytes: int) -> None:
    """What is read, wanted bytes and gaps, is what the plan says, byte for byte."""
    plan = rank_plan(form)
    ranges: list[list[int]] = []
    for unit in slot_units(plan, slot_bytes=slot_bytes):
        for place in unit:
            if place.fragment < 0:
                continue
            shard, start = int(plan.fragment_shard[place.fragment]), place.start - place.gap_bytes
            if ranges and ranges[-1][0] == shard and ranges[-1][2] == start and not starts_extent(plan, place):
                ranges[-1][2] = place.stop
            else:
                ranges.append([shard, start, place.stop])
    assert ranges == [[extent.shard_id, extent.start, extent.stop] for extent in plan.extents]


def starts_extent(plan: RankPlan, place: Placed) -> bool:
    return place.start in set(plan.extent_start.tolist()) and place.gap_bytes == 0


def test_gaps_count_only_within_an_extent() -> None:
    plan = rank_plan("inner")
    gaps = gaps_before(plan)
    covered = int((plan.fragment_stop - plan.fragment_start).sum() + gaps.sum())
    assert covered == plan.read_bytes
    assert all(gaps[plan.extent_first_fragment[:-1]] == 0)


def test_fragments_of_tensors_skips_empty_ones() -> None:
    plan = rank_plan("whole")
    bounds = fragments_of_tensors(plan)
    counts = dict(zip([plan.name(i) for i in range(len(plan))], np.diff(bounds).tolist(), strict=True))
    assert counts["none"] == 0
    assert counts["big"] == counts["scalar"] == 1
