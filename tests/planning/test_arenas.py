"""Owned tensors in memory: small ones as in the file, in small arenas; nothing twice, nothing in another's blocks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.planning.arenas import ARENA_BYTES, OwnedLayout, needs_copies, owned_units
from loader_service.planning.images import BLOCK_BYTES, block_ceil, block_floor
from loader_service.planning.plan import RankPlan
from tests.planning.making import Tensor, make_checkpoint, plan_of

MIB = 1 << 20
CODES = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}
ROWS: dict[str, object] = {"rules": [{"match": "*", "split": {"axis": ["tp"], "dim": 0}}]}
COLUMNS: dict[str, object] = {"rules": [{"match": "*", "split": {"axis": ["tp"], "dim": 1}}]}


def layouts(plan: RankPlan, unit_bytes: int = MIB, max_tensors: int = 256) -> list[OwnedLayout]:
    found = list(owned_units(plan, unit_bytes=unit_bytes, max_tensors=max_tensors))
    assert [i for unit in found for i in range(unit.first, unit.stop)] == list(range(len(plan)))
    for unit in found:
        check(plan, unit, max(unit_bytes, BLOCK_BYTES), max_tensors)
    return found


def place_of(unit: OwnedLayout, tensor: int) -> tuple[int, int]:
    return unit.buffer_of[tensor - unit.first], unit.offset_of[tensor - unit.first]


def check(plan: RankPlan, unit: OwnedLayout, most_bytes: int, max_tensors: int) -> None:
    held = [i for i in range(unit.first, unit.stop) if plan.nbytes(i)]
    assert unit.stop - unit.first <= max_tensors
    assert unit.nbytes == sum(map(block_ceil, unit.buffers))
    assert unit.nbytes <= most_bytes or unit.stop == unit.first + 1, "only a tensor alone is larger"
    assert len(unit.buffer_of) == len(unit.offset_of) == unit.stop - unit.first
    assert sorted(unit.in_parts + [i for image in unit.images for i in image.tensors]) == held, "each is filled once"
    of_buffer: dict[int, list[tuple[int, int]]] = {}
    for i in held:
        buffer, offset = place_of(unit, i)
        of_buffer.setdefault(buffer, []).append((offset, offset + plan.nbytes(i)))
    for buffer, spans in of_buffer.items():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "no two overlap"
        assert spans[-1][1] <= unit.buffers[buffer]
        assert len(spans) == 1 or unit.buffers[buffer] <= ARENA_BYTES
        assert len(spans) == 1 or all(stop - start < ARENA_BYTES for start, stop in spans)
    assert sorted(of_buffer) == list(range(len(unit.buffers))), "no memory for nothing"
    check_images(plan, unit)


def check_images(plan: RankPlan, unit: OwnedLayout) -> None:
    assert len({image.memory for image in unit.images}) == len(unit.images), "each has memory of its own"
    extents = [(extent.shard_id, extent.start, extent.stop) for extent in plan.extents]
    for image in unit.images:
        assert image.offset == image.start % BLOCK_BYTES
        assert unit.buffers[image.memory] == block_ceil(image.stop) - block_floor(image.start), "whole blocks, no more"
        assert any(image.shard == s and a <= image.start < image.stop <= b for s, a, b in extents)
        for i in image.tensors:
            start = int(plan.catalog.starts[plan.catalog_id(i)])
            if plan.nbytes(i) == plan.catalog.stops[plan.catalog_id(i)] - start:  # a whole one: its place is known
                assert place_of(unit, i) == (image.memory, image.offset + start - image.start)
    for i in unit.in_parts:
        assert place_of(unit, i)[1] % plan.itemsize(i) == 0, "filled in place, so it must be aligned"


@settings(max_examples=40)
@given(data=st.data())
def test_any_tensors_have_their_memory(data: st.DataObject) -> None:
    sizes = st.one_of(st.integers(0, 3000), st.sampled_from([MIB - 8, MIB, MIB + 8]))
    tensors = []
    for number in range(data.draw(st.integers(1, 10))):
        itemsize = data.draw(st.sampled_from(list(CODES)))
        shape = (data.draw(sizes) // itemsize,) if data.draw(st.booleans()) else (6, data.draw(sizes) // itemsize // 6)
        kind = data.draw(st.sampled_from(["take", "take", "leave"]))
        tensors.append((f"{kind}.{number}", CODES[itemsize], shape))
    shards: dict[str, list[Tensor]] = {
        "a.safetensors": [*tensors, ("take.a", "U8", (3,))],
        "b.safetensors": [("take.b", "F32", (1,))],
    }
    load = data.draw(st.sampled_from([{}, ROWS, COLUMNS])) | {"skip": ["leave.*"]}
    gap_bytes = data.draw(st.sampled_from([0, 100, 256 << 10]))
    plan = plan_of(make_checkpoint(shards), load, {"tp": 2}, gap_bytes=gap_bytes).for_rank(data.draw(st.integers(0, 1)))
    layouts(plan, data.draw(st.sampled_from([64, 5000, MIB, 16 * MIB])), data.draw(st.integers(1, 20)))


def whole(*tensors: tuple[str, str, tuple[int, ...]], **load: object) -> RankPlan:
    return plan_of(make_checkpoint({"a.safetensors": list(tensors)}), load, {"tp": 1}).for_rank(0)


def test_small_neighbours_lie_in_one_arena_as_in_the_file() -> None:
    (unit,) = layouts(whole(*((f"t{i:03}", "BF16", (300,)) for i in range(200))))
    assert len(unit.images) == len(unit.buffers) == 1
    assert [b - a for a, b in itertools.pairwise(unit.offset_of)] == [600] * 199


def test_an_arena_ends_where_it_would_keep_too_much_alive() -> None:
    (unit,) = layouts(whole(*((f"t{i:03}", "U8", (100_000,)) for i in range(40))), unit_bytes=16 * MIB)
    assert [len(image.tensors) for image in unit.images] == [10, 10, 10, 10]


def test_a_large_tensor_ends_an_arena_and_has_memory_alone() -> None:
    (unit,) = layouts(
        whole(("a", "U8", (9,)), ("b", "U8", (MIB,)), ("c", "U8", (9,)), ("d", "U8", (9,))), unit_bytes=16 * MIB
    )
    assert [list(image.tensors) for image in unit.images] == [[0], [1], [2, 3]]


def test_a_small_gap_lies_in_the_arena_and_another_extent_does_not() -> None:
    tensors = [
        ("a", "U8", (90_000,)),
        ("x", "U8", (50,)),
        ("b", "U8", (90_000,)),
        ("y", "U8", (900_000,)),
        ("c", "U8", (5,)),
    ]
    (unit,) = layouts(whole(*tensors, skip=["x", "y"]))
    assert [list(image.tensors) for image in unit.images] == [[0, 1], [2]]
    assert unit.offset_of[1] - unit.offset_of[0] == 90_050


@pytest.mark.parametrize(("nbytes", "in_parts"), [(100, []), (4 * MIB, [1])])
def test_a_small_unaligned_tensor_is_read_with_its_neighbours_and_a_large_one_where_it_is_aligned(
    nbytes: int, in_parts: list[int]
) -> None:
    plan = whole(("a", "U8", (1,)), ("b", "F32", (nbytes // 4,)), ("c", "U8", (1,)))
    assert [i for unit in layouts(plan) for i in unit.in_parts] == in_parts
    assert not needs_copies(plan), "it is read in place, through the page cache"


def test_slices_that_lie_in_parts_are_copied_if_small_or_with_gaps() -> None:
    tensors = [("small", "U8", (4, 600_000)), ("large", "U8", (4, 4 * MIB))]
    shards = {"a.safetensors": tensors}
    for name, copied in (("small", True), ("large", False)):
        load = COLUMNS | {"skip": [other for other, *_ in tensors if other != name]}
        plan = plan_of(make_checkpoint(shards), load, {"tp": 8}, gap_bytes=0).for_rank(1)
        (unit,) = layouts(plan)
        assert unit.in_parts == [0]
        assert needs_copies(plan) == copied
    plan = plan_of(make_checkpoint(shards), COLUMNS, {"tp": 8}, gap_bytes=1 << 40).for_rank(1)
    assert needs_copies(plan)
    assert not needs_copies(plan_of(make_checkpoint(shards), ROWS, {"tp": 2}).for_rank(1))


def test_a_large_slice_lies_where_it_can_be_read_past_the_page_cache() -> None:
    plan = plan_of(make_checkpoint({"a.safetensors": [("t", "BF16", (3000, 501))]}), ROWS, {"tp": 2}).for_rank(1)
    (unit,) = layouts(plan)
    assert place_of(unit, 0) == (0, int(plan.fragment_start[0]) % BLOCK_BYTES)
