"""What ranks of one node share: each byte in one block, each rank's part complete from blocks and its own reads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.errors import ConfigError
from loader_service.planning.boxes import views_within
from loader_service.planning.rank_plan import RankPlan
from loader_service.planning.sharing import PRIVATE, BlockRange, NodeBlocks, blocks_used, node_blocks, portions
from loader_service.planning.stripes import Stripe, stripes
from tests.planning.making import KIB, Checkpoint, Tensor, elements, make_checkpoint, one_shard, plan_of

PAGE = 4096
Rule = dict[str, Any]
ROWS: Rule = {"match": "*.rows", "split": {"axis": "tp", "dim": 0}}
COLUMNS: Rule = {"match": "*.columns", "split": {"axis": "tp", "dim": 1}}
SECTIONS: Rule = {"match": "*.sections", "split": {"axis": "tp", "dim": 0, "sections": [2, 1, 1]}}
INNER_SECTIONS: Rule = {"match": "*.inner", "split": {"axis": "tp", "dim": 1, "sections": [1, 1]}}
EXPERTS: Rule = {"match": "*.expert", "assign": {"axis": "tp", "index": r"layers\.(\d+)\.", "how": "round_robin"}}
FIRST_HALF: Rule = {"match": "*.half", "assign": {"axis": "ep", "to": [0]}}
RULES = [ROWS, COLUMNS, SECTIONS, INNER_SECTIONS, EXPERTS, FIRST_HALF]
KINDS = ["rows", "columns", "sections", "inner", "expert", "half", "replicated", "replicated", "left_out"]


@dataclass(frozen=True)
class Node:
    checkpoint: Checkpoint
    plans: list[RankPlan]
    slot_bytes: int

    def blocks(self) -> NodeBlocks:
        return node_blocks(self.plans, slot_bytes=self.slot_bytes)

    @property
    def contents(self) -> list[bytes]:
        return [self.checkpoint.files[shard.path] for shard in self.checkpoint.catalog.shards]


def node_of(
    checkpoint: Checkpoint, rules: list[Rule], tp: int, *, ep: int = 1, slot_bytes: int = 64 * KIB, gap_bytes: int = 0
) -> Node:
    load = {"rules": rules, "skip": ["*.left_out"]}
    plan = plan_of(checkpoint, load, {"ep": ep, "tp": tp}, gap_bytes=gap_bytes)
    return Node(checkpoint, [plan.for_rank(rank).streamed for rank in range(plan.world_size)], slot_bytes)


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    shards: dict[str, list[Tensor]] = {"a.safetensors": [], "b.safetensors": []}
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(KINDS))
        shape = draw(st.sampled_from([(4, 6), (8, 40), (16, 12, 5), (400, 8), (8, 4000), (4, 20_000), (12, 1)]))
        if kind in ("rows", "columns"):
            shape = draw(st.sampled_from([shape, (3, 5, 700), (2, 30_000), (7, 9)]))
        if kind == "replicated":
            shape = draw(st.sampled_from([shape, (), (1,), (0, 3), (9000,)]))
        halves = kind in ("replicated", "expert", "half") and shape and shape[-1] % 2 == 0
        code = draw(st.sampled_from(["U8", "BF16", "F32", *(["F4"] if halves else [])]))
        name = f"layers.{draw(st.integers(0, 3))}.{number}.{kind}"
        shards[draw(st.sampled_from(sorted(shards)))].append((name, code, shape))
    slot_bytes = draw(st.sampled_from([2 * PAGE, 2 * PAGE, 3 * PAGE, 33_000, 64 * KIB, 1024 * KIB]))
    gap_bytes = draw(st.sampled_from([0, 50, 2000, 256 * KIB]))
    tp, ep = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    return node_of(make_checkpoint(shards), RULES, tp, ep=ep, slot_bytes=slot_bytes, gap_bytes=gap_bytes)


def wanted_by(node: Node, shard: int) -> npt.NDArray[np.uint64]:
    """For each byte of a shard, a bit for each rank that has a fragment over it."""
    found = np.zeros(len(node.contents[shard]), dtype=np.uint64)
    for place, plan in enumerate(node.plans):
        for f in np.flatnonzero(plan.fragment_shard == shard).tolist():
            found[plan.fragment_start[f] : plan.fragment_stop[f]] |= np.uint64(1 << place)
    return found


def read_over_by_a_plan(node: Node, shard: int, position: int) -> bool:
    return any(
        extent.shard_id == shard and extent.start <= position < extent.stop
        for plan in node.plans
        for extent in plan.extents
    )


def expected_shared(node: Node, shard: int) -> npt.NDArray[np.bool_]:
    """Which bytes of a shard are to be in blocks, found run by run."""
    wants = wanted_by(node, shard)
    edges = [0, *(np.flatnonzero(np.diff(wants)) + 1).tolist(), len(wants)]
    runs = list(itertools.pairwise(edges))
    several = [int(wants[start]).bit_count() > 1 for start, _ in runs]
    taken = list(several)
    for i, (start, stop) in enumerate(runs):
        beside = any(several[j] for j in (i - 1, i + 1) if 0 <= j < len(runs))
        if int(wants[start]).bit_count() == 1 and stop - start <= node.slot_bytes // 256 and beside:
            taken[i] = True
    found = np.zeros(len(wants), dtype=np.bool_)
    for i, (start, stop) in enumerate(runs):
        bridge = wants[start] == 0 and 0 < i < len(runs) - 1 and taken[i - 1] and taken[i + 1]
        found[start:stop] = taken[i] or (bridge and read_over_by_a_plan(node, shard, start))
    return found


@settings(max_examples=60)
@given(nodes())
def test_every_shared_byte_is_in_one_range_of_one_block_and_nothing_else_is(node: Node) -> None:
    blocks = node.blocks()
    times = [np.zeros(len(content), dtype=np.int64) for content in node.contents]
    for shard, start, stop in zip(blocks.range_shard, blocks.range_start, blocks.range_stop, strict=True):
        times[shard][start:stop] += 1
    for shard, counted in enumerate(times):
        assert (counted == expected_shared(node, shard)).all()
    wants = [wanted_by(node, shard) for shard in range(len(times))]
    assert blocks.shared_bytes == sum(int(counted.sum()) for counted in times)
    assert blocks.union_bytes == sum(np.count_nonzero(each) for each in wants)
    assert blocks.wanted_bytes == sum(
        np.count_nonzero(each >> np.uint64(place) & np.uint64(1)) for each in wants for place in range(8)
    )


@settings(max_examples=60)
@given(nodes())
def test_blocks_fit_their_slots_and_lie_as_in_the_file_a_page_apart(node: Node) -> None:
    blocks = node.blocks()
    order = list(zip(blocks.range_shard.tolist(), blocks.range_start.tolist(), strict=True))
    assert order == sorted(set(order))
    assert blocks.owner.tolist() == [b % len(node.plans) for b in range(len(blocks))]
    assert blocks.first_range[0] == 0
    assert blocks.first_range[-1] == len(order)
    for b in range(len(blocks)):
        ranges = list(blocks.ranges(b))
        assert ranges
        free_page = 0
        for shard, start, stop, offset in ranges:
            assert offset % PAGE == start % PAGE
            assert offset // PAGE >= free_page
            free_page = -(-(offset + stop - start) // PAGE)
            check_cuts(node, shard, start, stop)
        assert free_page * PAGE <= node.slot_bytes


def check_cuts(node: Node, shard: int, *cuts: int) -> None:
    """Within a tensor they lie between elements."""
    catalog = node.checkpoint.catalog
    for tensor in np.flatnonzero(catalog.shard_ids == shard).tolist():
        start, stop = int(catalog.starts[tensor]), int(catalog.stops[tensor])
        itemsize = max(1, catalog.dtype(tensor).bits // 8)
        assert all((cut - start) % itemsize == 0 for cut in cuts if start < cut < stop)


@settings(max_examples=60)
@given(nodes())
def test_every_rank_fills_its_part_from_the_blocks_and_its_own_reads(node: Node) -> None:
    blocks = node.blocks()
    slots = [slot_filled_in_pages(node, blocks, b) for b in range(len(blocks))]
    wants = [0] * len(blocks)
    for place, plan in enumerate(node.plans):
        for b in fill_from(node, plan, blocks, slots):
            wants[b] |= 1 << place
    assert wants == blocks.wants.tolist()


def slot_filled_in_pages(node: Node, blocks: NodeBlocks, block: int) -> bytes:
    """As a direct read leaves it: each range with the rest of its first and last page."""
    slot = bytearray(b"\xee" * node.slot_bytes)
    for shard, start, stop, offset in blocks.ranges(block):
        first, last = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        data = node.contents[shard][first:last]
        place = offset - (start - first)
        slot[place : place + len(data)] = data
    assert len(slot) == node.slot_bytes
    return bytes(slot)


def fill_from(node: Node, plan: RankPlan, blocks: NodeBlocks, slots: list[bytes]) -> list[int]:
    """Checks the rank's tensors; the blocks that it took anything from."""
    parts = portions(plan, blocks)
    tensors = [np.zeros(plan.storage_shape(i), dtype=f"V{plan.itemsize(i)}") for i in range(len(plan))]
    times = [np.zeros(plan.storage_shape(i), dtype=np.int64) for i in range(len(plan))]
    reached, used = plan.fragment_start.copy(), set()
    columns = (parts.fragment, parts.start, parts.stop, parts.block, parts.offset)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert rows == sorted(rows, key=lambda row: row[:2])
    for fragment, start, stop, block, offset in rows:
        assert start == reached[fragment] < stop
        reached[fragment] = stop
        shard = int(plan.fragment_shard[fragment])
        check_cuts(node, shard, start, stop)
        if block == PRIVATE:
            assert offset == -1
            data = node.contents[shard][start:stop]
        else:
            used.add(block)
            data = slots[block][offset : offset + stop - start]
            assert data == node.contents[shard][start:stop]
        geometry, _, first_byte = plan.origin(fragment)
        i = int(plan.fragment_tensor[fragment])
        for view in views_within(geometry, start - first_byte, stop - first_byte):
            strides = [stride * plan.itemsize(i) for stride in view.strides]
            tensors[i][view.index] = np.ndarray(view.shape, tensors[i].dtype, data, view.offset_bytes, strides)
            times[i][view.index] += 1
        if (dst := int(plan.fragment_dst[fragment])) >= 0:
            place = dst + start - int(plan.fragment_start[fragment])
            assert tensors[i].tobytes()[place : place + stop - start] == data
    assert (reached == plan.fragment_stop).all()
    assert all((each == 1).all() for each in times)
    assert blocks_used(parts).tolist() == sorted(used)
    for i, tensor in enumerate(tensors):
        full = elements(node.checkpoint.payload(plan.name(i)), plan.spec(i).full_shape, plan.itemsize(i))
        for source, place in plan.spec(i).parts:
            assert tensor[place].tobytes() == full[source].tobytes()
    return sorted(used)


def relative(node: Node, blocks: NodeBlocks) -> list[list[tuple[int, int]]]:
    """Ranges of each block, counted from the first shard's payload."""
    head = node.checkpoint.catalog.shards[0].header_bytes
    return [[(r.start - head, r.stop - head) for r in blocks.ranges(b)] for b in range(len(blocks))]


def test_what_one_rank_wants_is_in_no_block() -> None:
    node = node_of(one_shard(("a.rows", "U8", (400, 100))), [ROWS], 4)
    blocks = node.blocks()
    assert (len(blocks), blocks.shared_bytes, blocks.union_bytes, blocks.wanted_bytes) == (0, 0, 40_000, 40_000)
    parts = portions(node.plans[1], blocks)
    assert (parts.block.tolist(), parts.offset.tolist(), blocks_used(parts).tolist()) == ([PRIVATE], [-1], [])


def test_a_rank_alone_shares_nothing() -> None:
    assert len(node_of(one_shard(("a", "U8", (400,))), [], 1).blocks()) == 0


def test_small_ranges_lie_in_one_block_in_pages_of_their_own() -> None:
    shared, private = ("U8", (100,)), ("U8", (2, 2000))
    node = node_of(
        one_shard(("0", *shared), ("1.rows", *private), ("2", *shared), ("3.rows", *private), ("4", *shared)), [ROWS], 2
    )
    blocks = node.blocks()
    assert relative(node, blocks) == [[(0, 100), (4100, 4200), (8200, 8300)]]
    head = node.checkpoint.catalog.shards[0].header_bytes
    assert [r.offset for r in blocks.ranges(0)] == [
        head,
        2 * PAGE * ((head + 100) // PAGE) + PAGE + (head + 4100) % PAGE,
        2 * PAGE + (head + 8200) % PAGE,
    ]
    assert blocks.wants.tolist() == [3]


def test_a_range_of_one_byte_is_taken_from_its_block() -> None:
    node = node_of(one_shard(("0", "U8", ()), ("1.rows", "U8", (2, 2000))), [ROWS], 2)
    assert [portions(plan, node.blocks()).block.tolist() for plan in node.plans] == [[0, PRIVATE]] * 2


def test_a_rest_that_is_small_against_the_slot_stays_empty() -> None:
    tensors: list[Tensor] = [("0", "U8", (245_000,)), ("1.rows", "U8", (2, 5000)), ("2", "U8", (300_000,))]
    node = node_of(one_shard(*tensors), [ROWS], 2, slot_bytes=256 * KIB)
    first, second, _ = relative(node, node.blocks())
    assert (first, second[0][0]) == ([(0, 245_000)], 255_000)


def test_a_large_tensor_is_cut_at_whole_rows_and_fills_the_room_that_is_left() -> None:
    node = node_of(one_shard(("a", "U8", (5000,)), ("b", "F32", (500, 256))), [], 2, slot_bytes=64 * KIB)
    blocks = node.blocks()
    cuts = [ranges[-1][1] for ranges in relative(node, blocks)]
    assert all((cut - 5000) % 1024 == 0 for cut in cuts)
    assert cuts[-1] == 5000 + 500 * 1024
    assert len(blocks) == 9
    assert relative(node, blocks)[0][0][0] == 0


def test_rows_that_are_large_against_a_slot_are_cut_at_rows_of_the_next_dimension() -> None:
    node = node_of(one_shard(("a", "BF16", (3, 50, 1000))), [], 2, slot_bytes=64 * KIB)
    cuts = [ranges[-1][1] for ranges in relative(node, node.blocks())]
    assert len(cuts) == 5
    assert all(cut % 2000 == 0 for cut in cuts)
    assert any(cut % 100_000 for cut in cuts)


def test_a_tensor_that_is_small_against_the_slot_is_not_cut() -> None:
    sizes = [40_000, 3000, 3000, 3000, 3000, 3000, 3000, 3000, 3000, 3000]
    node = node_of(one_shard(*((f"{i}", "U8", (size,)) for i, size in enumerate(sizes))), [], 2, slot_bytes=64 * KIB)
    ((first, second),) = zip(*relative(node, node.blocks()), strict=True)
    assert (first[0], first[1] - 40_000, second[1] - first[1]) == (0, 24_000, 3000)


def test_the_outer_rows_of_a_column_slice_are_read_with_the_rest() -> None:
    checkpoint = one_shard(("a.columns", "U8", (64, 512)))
    node = node_of(checkpoint, [COLUMNS], 4, slot_bytes=64 * KIB, gap_bytes=1000)
    assert relative(node, node.blocks()) == [[(0, 64 * 512)]]  # 128 bytes at both ends are one rank's
    tight = node_of(checkpoint, [COLUMNS], 4, slot_bytes=32 * KIB - PAGE, gap_bytes=1000)  # 112 bytes would be taken
    assert relative(tight, tight.blocks())[0][0][0] == 128
    assert [portions(plan, tight.blocks()).block.tolist()[0] for plan in tight.plans] == [PRIVATE, 0, 0, 0]


@pytest.mark.parametrize(
    ("gap_bytes", "expected"), [(200, [[(0, 10_100)]]), (0, [[(0, 5000), (5100, 10_100)]])], ids=["near", "none"]
)
def test_a_gap_that_plans_read_over_is_in_the_range(gap_bytes: int, expected: list[list[tuple[int, int]]]) -> None:
    checkpoint = one_shard(("a", "U8", (5000,)), ("b.left_out", "U8", (100,)), ("c", "U8", (5000,)))
    node = node_of(checkpoint, [], 2, gap_bytes=gap_bytes)
    blocks = node.blocks()
    assert relative(node, blocks) == expected
    assert (blocks.union_bytes, blocks.wanted_bytes) == (10_000, 20_000)
    assert [len(portions(plan, blocks)) for plan in node.plans] == [2, 2]


def test_a_rank_whose_plan_reads_over_bytes_in_a_gap_does_not_want_them() -> None:
    tensors: list[Tensor] = [(f"layers.{i}.expert", "U8", (100 if i == 1 else 9000,)) for i in range(3)]
    node = node_of(one_shard(*tensors), [EXPERTS], 2, gap_bytes=200)
    assert len(node.plans[0].extents) == 1
    assert len(node.blocks()) == 0


def test_tables_that_stay_in_host_memory_are_not_shared() -> None:
    table: Rule = {"match": "*.table", "host_resident": {"layout": "shared"}}
    node = node_of(one_shard(("a", "U8", (50,)), ("b.table", "U8", (50, 2))), [table], 2)
    assert relative(node, node.blocks()) == [[(0, 50)]]


def test_ranges_of_two_shards_are_two_ranges() -> None:
    checkpoint = make_checkpoint({"a": [("x", "U8", (50,))], "b": [("y", "U8", (70,))]})
    blocks = node_of(checkpoint, [], 2).blocks()
    first, second = (shard.header_bytes for shard in checkpoint.catalog.shards)
    assert list(blocks.ranges(0)) == [
        BlockRange(0, first, first + 50, first),
        BlockRange(1, second, second + 70, PAGE + second),
    ]


def test_blocks_are_cut_alike_on_every_rank_and_the_digest_tells() -> None:
    checkpoint = one_shard(("a", "U8", (70_000,)), ("b.columns", "F32", (64, 64)))
    digests = {node_of(checkpoint, [COLUMNS], 2).blocks().digest for _ in range(2)}
    assert len(digests) == 1
    others = {node_of(checkpoint, [COLUMNS], 4).blocks().digest, node_of(checkpoint, [], 2).blocks().digest}
    others.add(node_of(checkpoint, [COLUMNS], 2, slot_bytes=32 * KIB).blocks().digest)
    assert len(digests | others) == 4
    small = one_shard(("a", "U8", (50,)))
    assert node_of(small, [], 2).blocks().digest != node_of(small, [], 2, slot_bytes=32 * KIB).blocks().digest


def test_a_node_has_at_most_64_ranks() -> None:
    checkpoint = one_shard(("a", "U8", (50,)))
    blocks = node_of(checkpoint, [], 64).blocks()
    assert blocks.wants.tolist() == [2**64 - 1]
    with pytest.raises(ConfigError, match="65 ranks of one node cannot share staging"):
        node_of(checkpoint, [], 65).blocks()


def test_slots_below_two_pages_are_refused() -> None:
    node = node_of(one_shard(("a", "U8", (50,))), [], 2, slot_bytes=2 * PAGE - 1)
    with pytest.raises(ConfigError, match="slots of 8191 bytes are too small"):
        node.blocks()


@settings(max_examples=60)
@given(nodes(), st.integers(1, 5), st.sampled_from([100, 4096, 50_000, 256 << 20]))
def test_stripes_of_all_places_are_disjoint_and_complete(node: Node, ranks: int, stripe_bytes: int) -> None:
    found = stripes(node.plans, ranks=ranks, stripe_bytes=stripe_bytes)
    assert len(found) == ranks
    times = [np.zeros(len(content), dtype=np.int64) for content in node.contents]
    for stripe in itertools.chain(*found):
        assert 0 < stripe.stop - stripe.start <= stripe_bytes
        times[stripe.shard][stripe.start : stripe.stop] += 1
    for shard, counted in enumerate(times):
        expected = np.zeros(len(counted), dtype=np.int64)
        for extent in itertools.chain(*(plan.extents for plan in node.plans)):
            if extent.shard_id == shard:
                expected[extent.start : extent.stop] = 1
        assert (counted == expected).all()
    dealt = [stripe for turn in itertools.zip_longest(*found) for stripe in turn if stripe is not None]
    assert dealt == sorted(dealt)


def test_a_stripe_ends_at_the_files_multiples_and_goes_to_the_next_place() -> None:
    node = node_of(one_shard(("a", "U8", (10_000,))), [], 3)
    head = node.checkpoint.catalog.shards[0].header_bytes
    assert stripes(node.plans, ranks=2, stripe_bytes=PAGE) == (
        (Stripe(0, head, PAGE), Stripe(0, 2 * PAGE, head + 10_000)),
        (Stripe(0, PAGE, 2 * PAGE),),
    )
