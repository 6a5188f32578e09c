"""What a rank's slots hold where ranks of its node share: its part, complete, from blocks and from its own reads."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.planning import shared_units
from loader_service.planning.images import BLOCK_BYTES
from loader_service.planning.rank_plan import RankPlan
from loader_service.planning.shared_units import SharedRanges, Stretch, shared_slot_units
from loader_service.planning.sharing import PRIVATE, NodeBlocks
from loader_service.planning.units import SlotLayout, slot_units
from tests.planning.making import elements
from tests.planning.test_sharing import PAGE, Node, nodes, slot_filled_in_pages


@settings(max_examples=80)
@given(nodes(), st.sampled_from([100, PAGE, 64 << 10]), st.sampled_from([1, 3, 256]), st.sampled_from([1, 2, 4096]))
def test_every_rank_gets_its_part_from_slots_of_both_kinds(
    node: Node, slot_bytes: int, max_pieces: int, at_once: int
) -> None:
    blocks = node.blocks()
    shared_slots = [slot_filled_in_pages(node, blocks, block) for block in range(len(blocks))]
    for plan in node.plans:
        with mock.patch.object(shared_units, "AT_ONCE", at_once):
            layouts = list(shared_slot_units(plan, blocks, slot_bytes=slot_bytes, max_pieces=max_pieces))
        check_order(plan, layouts, max_pieces)
        check_content(node, plan, layouts, shared_slots, slot_bytes)


def check_order(plan: RankPlan, layouts: list[SlotLayout], max_pieces: int) -> None:
    """Blocks come once each at a stretch and in order, pieces in plan order, and no unit is empty."""
    assert all(len(layout.placed) > 0 for layout in layouts)
    assert all(sum(place.fragment >= 0 for place in layout.placed) <= max_pieces for layout in layouts)
    numbers = [layout.block for layout in layouts if layout.block is not None]
    assert numbers == sorted(numbers)
    places = [place for layout in layouts for place in layout.placed]
    assert [place.tensor for place in places] == sorted(place.tensor for place in places)
    assert {place.tensor for place in places} == set(range(len(plan)))


def check_content(
    node: Node, plan: RankPlan, layouts: list[SlotLayout], shared_slots: list[bytes], slot_bytes: int
) -> None:
    tensors = [np.zeros(plan.storage_shape(i), dtype=f"V{plan.itemsize(i)}") for i in range(len(plan))]
    times = [np.zeros(plan.storage_shape(i), dtype=np.int64) for i in range(len(plan))]
    for layout in layouts:
        slot = shared_slots[layout.block] if layout.block is not None else own_slot(node, layout, slot_bytes)
        for place in layout.placed:
            i, itemsize = place.tensor, plan.itemsize(place.tensor)
            assert place.fragment >= 0 or plan.nbytes(i) == 0
            for view in place.views if place.fragment >= 0 else ():
                strides = [stride * itemsize for stride in view.strides]
                at = place.slot_offset + view.offset_bytes
                tensors[i][view.index] = np.ndarray(view.shape, tensors[i].dtype, slot, at, strides)
                times[i][view.index] += 1
    assert all((each == 1).all() for each in times)
    for i, tensor in enumerate(tensors):
        full = elements(node.checkpoint.payload(plan.name(i)), plan.spec(i).full_shape, plan.itemsize(i))
        for source, mine in plan.spec(i).parts:
            assert tensor[mine].tobytes() == full[source].tobytes()


def own_slot(node: Node, layout: SlotLayout, slot_bytes: int) -> bytes:
    """As reads of its images leave it; a range of one element may be larger than the slot."""
    largest = max((place.stop - place.start for place in layout.placed), default=0)
    slot = bytearray(max(slot_bytes, largest) + BLOCK_BYTES)
    for image in layout.images:
        assert image.offset % BLOCK_BYTES == image.start % BLOCK_BYTES
        data = node.contents[image.shard][image.start : image.stop]
        slot[image.offset : image.offset + len(data)] = data
        assert len(slot) <= max(slot_bytes, largest) + BLOCK_BYTES
    return bytes(slot)


@settings(max_examples=60)
@given(nodes())
def test_what_the_node_shares_is_not_read_by_a_rank_itself(node: Node) -> None:
    blocks = node.blocks()
    shared = set(ranges_of(blocks))
    for plan in node.plans:
        for layout in shared_slot_units(plan, blocks, slot_bytes=64 << 10, max_pieces=256):
            assert layout.block is None or not layout.images
            for image in layout.images:
                assert not any(
                    shard == image.shard and start < image.stop and image.start < stop for shard, start, stop in shared
                )


@settings(max_examples=30)
@given(nodes())
def test_without_neighbours_the_units_are_as_ever(node: Node) -> None:
    plan = node.plans[0]
    alone = Node(node.checkpoint, [plan], node.slot_bytes).blocks()
    found = [layout.placed for layout in shared_slot_units(plan, alone, slot_bytes=9000, max_pieces=5)]
    assert found == [layout.placed for layout in slot_units(plan, slot_bytes=9000, max_pieces=5)]


def ranges_of(blocks: NodeBlocks) -> Iterator[tuple[int, int, int]]:
    for block in range(len(blocks)):
        for shard, start, stop, _ in blocks.ranges(block):
            yield shard, start, stop


@settings(max_examples=60)
@given(nodes(), st.data())
def test_any_file_range_is_cut_into_what_is_shared_and_what_is_not(node: Node, data: st.DataObject) -> None:
    blocks = node.blocks()
    ranges = SharedRanges(blocks)
    shard = data.draw(st.integers(0, len(node.contents) - 1))
    size = len(node.contents[shard])
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = list(ranges.within(shard, start, stop))

    reached = start
    for stretch in found:
        assert reached == stretch.start < stretch.stop
        reached = stretch.stop
        assert stretch in expected(blocks, shard, stretch)
    assert reached == stop


def expected(blocks: NodeBlocks, shard: int, stretch: Stretch) -> list[Stretch]:
    """The stretch as the block's own ranges tell it."""
    for block in range(len(blocks)):
        for of, start, stop, offset in blocks.ranges(block):
            if of == shard and start < stretch.stop and stretch.start < stop:
                inside = start <= stretch.start and stretch.stop <= stop
                return [stretch._replace(block=block, offset=offset + stretch.start - start)] if inside else []
    return [stretch._replace(block=PRIVATE, offset=-1)]
