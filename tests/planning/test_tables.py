"""Host-resident tables: which rows of each a rank holds, and which ranks of a node fill which rows of a shared one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.errors import ConfigError
from loader_service.planning.tables import Rows, filled_by, shares
from tests.planning.making import Checkpoint, names_of, one_shard, plan_of

TABLE = ("t.weight", "F8_E4M3", (37, 8))
RESIDENT: dict[str, Any] = {"match": "t.*", "host_resident": {"layout": "per_rank"}}
TP = {"axis": "tp", "dim": 0}


def plan_with(*rules: Mapping[str, object], mesh: Mapping[str, int] | None = None, tensors: Any = (TABLE,)) -> Any:
    return plan_of(one_shard(*tensors), {"rules": [dict(rule) for rule in rules]}, mesh)


def rows_of(plan: Any, name: str = "t.weight") -> list[Rows]:
    return [plan.table(name, rank).rows for rank in range(plan.world_size)]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        pytest.param({}, [(0, 9), (9, 18), (18, 27), (27, 37)], id="equal"),
        pytest.param({"align": 5}, [(0, 10), (10, 20), (20, 30), (30, 37)], id="align"),
        pytest.param({"align": 16}, [(0, 0), (0, 16), (16, 32), (32, 37)], id="align leaves one without rows"),
        pytest.param({"pad_to": 4}, [(0, 10), (10, 20), (20, 30), (30, 37)], id="pad_to"),
        pytest.param({"pad_to": 64}, [(0, 16), (16, 32), (32, 37), (37, 37)], id="pad_to leaves one without rows"),
        pytest.param({"boundaries": [0, 5, 5, 30, 37]}, [(0, 5), (5, 5), (5, 30), (30, 37)], id="boundaries"),
        pytest.param({"units": 1}, [(0, 37)] * 4, id="one unit for all"),
    ],
)
def test_the_rows_of_each_rank(split: dict[str, object], expected: list[Rows]) -> None:
    plan = plan_with({**RESIDENT, "split": {**TP, **split}}, mesh={"tp": 4})
    assert rows_of(plan) == expected


def test_units_are_whole_groups_of_rows_for_each_rank() -> None:
    tensors = [("t.weight", "BF16", (36, 4))]
    plan = plan_with({**RESIDENT, "split": {**TP, "units": 2}}, mesh={"tp": 4}, tensors=tensors)
    assert rows_of(plan) == [(0, 18), (0, 18), (18, 36), (18, 36)]


def test_fewer_rows_than_ranks_leave_some_without(tmp_path: object) -> None:
    plan = plan_with({**RESIDENT, "split": TP}, mesh={"tp": 5}, tensors=[("t.weight", "F32", (3, 2))])
    assert rows_of(plan) == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 3)]


def test_columns_of_a_table_are_cut_where_they_end_and_the_scales_with_them() -> None:
    columns = [0, 7, 20, 37]
    tensors = [TABLE, ("t.scale", "F8_E8M0", (37, 1))]
    plan = plan_with({**RESIDENT, "split": {**TP, "boundaries": columns}}, mesh={"tp": 3}, tensors=tensors)
    assert rows_of(plan) == rows_of(plan, "t.scale") == [(0, 7), (7, 20), (20, 37)]


def test_without_a_split_every_rank_holds_all_rows() -> None:
    assert rows_of(plan_with(RESIDENT, mesh={"tp": 3})) == [(0, 37)] * 3


def test_a_split_over_one_rank_and_a_single_row_are_whole() -> None:
    assert rows_of(plan_with({**RESIDENT, "split": TP}, mesh={"tp": 1})) == [(0, 37)]
    one_row = [("t.weight", "U8", (1, 9))]
    assert rows_of(plan_with({**RESIDENT, "split": TP}, mesh={"tp": 3}, tensors=one_row)) == [(0, 1)] * 3


def test_ranks_that_differ_in_other_axes_are_replicas() -> None:
    plan = plan_with({**RESIDENT, "split": TP}, mesh={"dp": 2, "tp": 2})
    assert rows_of(plan) == [(0, 18), (18, 37)] * 2


def test_a_list_of_axes_cuts_over_their_product() -> None:
    plan = plan_with({**RESIDENT, "split": {"axis": ["tp", "ep"], "dim": 0}}, mesh={"tp": 2, "ep": 2})
    assert rows_of(plan) == [(0, 9), (9, 18), (18, 27), (27, 37)]


def test_a_rank_that_is_assigned_no_part_of_it_has_no_rows() -> None:
    assign = {"match": "t.*", "assign": {"axis": "pp", "to": [-1]}}
    plan = plan_with(assign, {**RESIDENT, "split": TP}, mesh={"pp": 2, "tp": 2})
    assert rows_of(plan) == [(0, 0), (0, 0), (0, 18), (18, 37)]
    assert [len(plan.for_rank(rank).tables) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("how", ["block", "round_robin"])
def test_tables_that_are_assigned_by_number_are_their_owners(how: str) -> None:
    tensors = [(f"t.{number}", "U8", (6, 2)) for number in range(4)]
    assign = {"match": "t.*", "assign": {"axis": "pp", "index": r"t\.(\d)", "how": how}}
    plan = plan_with(assign, RESIDENT, mesh={"pp": 2}, tensors=tensors)
    owners = {"block": [0, 0, 1, 1], "round_robin": [0, 1, 0, 1]}[how]
    for number, owner in enumerate(owners):
        expected = [(0, 6) if rank == owner else (0, 0) for rank in range(2)]
        assert rows_of(plan, f"t.{number}") == expected


def test_what_a_part_says_of_its_table() -> None:
    checkpoint = one_shard(("a", "U8", (3,)), ("t.weight", "F4", (10, 3, 8)), ("b", "U8", (5,)))
    plan = plan_of(checkpoint, {"rules": [{**RESIDENT, "split": TP}]}, {"tp": 4})
    part = plan.table("t.weight", 1)
    assert part is not None
    assert (part.name, part.layout, part.dtype_code) == ("t.weight", "per_rank", "F4")
    assert (part.shape, part.itemsize, part.row_bytes, part.nbytes) == ((10, 3, 4), 1, 12, 120)
    assert part.rows == (2, 5)
    shard = checkpoint.catalog.shards[part.shard_id]
    held = checkpoint.files[shard.path][part.start : part.start + part.nbytes]
    assert held == checkpoint.payload("t.weight")


def test_a_rank_without_rows_still_knows_the_table() -> None:
    plan = plan_with(
        {"match": "t.*", "assign": {"axis": "pp", "to": [0]}},
        {**RESIDENT, "host_resident": {"layout": "shared"}},
        mesh={"pp": 2},
    )
    first, second = plan.table("t.weight", 0), plan.table("t.weight", 1)
    assert (second.layout, second.start, second.nbytes) == (first.layout, first.start, first.nbytes)
    assert (first.rows, second.rows) == ((0, 37), (0, 0))


def test_other_names_are_no_tables_and_other_ranks_do_not_exist() -> None:
    plan = plan_with(RESIDENT, mesh={"tp": 2}, tensors=[TABLE, ("a", "U8", (3,)), ("z", "U8", (3,))])
    assert [plan.table(name, 0) for name in ("a", "z", "gone", "t.", "")] == [None] * 5
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"no rank {rank}"):
            plan.table("t.weight", rank)


def test_a_table_that_the_load_leaves_out_is_none() -> None:
    plan = plan_of(one_shard(TABLE, ("z", "U8", (3,))), {"skip": ["t.*"], "rules": [RESIDENT]})
    assert plan.table("t.weight", 0) is None
    assert plan.for_rank(0).tables == {}


def test_of_several_rules_the_first_that_matches_decides() -> None:
    shared = {"match": "*", "host_resident": {"layout": "shared"}}
    plan = plan_with(RESIDENT, shared, tensors=[TABLE, ("u", "U8", (4, 2))])
    assert plan.table("t.weight", 0).layout == "per_rank"
    assert plan.table("u", 0).layout == "shared"


def test_another_layout_is_another_plan() -> None:
    shared = {"match": "t.*", "host_resident": {"layout": "shared"}}
    digests = {
        plan_with(*rules).digest
        for rules in ([RESIDENT], [shared], [{"match": "t.*", "split": {"axis": "world", "dim": 0}}])
    }
    assert len(digests) == 3


def test_a_rule_that_matches_nothing_is_a_warning() -> None:
    plan = plan_with({"match": "nothing.*", "host_resident": {"layout": "shared"}})
    assert "loads.target.rules[0]: nothing.* matches no name" in plan.warnings[0].replace("'", "")


# -- the streamed part


def test_tables_count_in_a_ranks_sums_but_are_not_streamed() -> None:
    tensors = [("a", "U8", (10,)), TABLE, ("u.b", "U8", (20,)), ("t.scale", "F8_E8M0", (37, 1))]
    plan = plan_with({**RESIDENT, "split": TP}, mesh={"tp": 2}, tensors=tensors)
    for rank, rows in enumerate((18, 19)):
        part = plan.for_rank(rank)
        assert [part.tables[i].name for i in sorted(part.tables)] == ["t.weight", "t.scale"]
        assert [part.name(i) for i in part.tables] == ["t.weight", "t.scale"]
        assert part.payload_bytes == 30 + rows * 9
        streamed = part.streamed
        assert names_of(streamed) == ["a", "u.b"]
        assert (streamed.payload_bytes, streamed.tables) == (30, {})
        assert streamed is part.streamed
        for extent in streamed.extents:
            for table in part.tables.values():
                assert not (extent.start < table.start + table.nbytes and table.start < extent.stop)


def test_a_plan_without_tables_streams_itself() -> None:
    part = plan_with(mesh={"tp": 2}).for_rank(0)
    assert part.streamed is part


def test_a_named_table_can_still_be_taken_as_an_ordinary_tensor() -> None:
    part = plan_with({**RESIDENT, "split": TP}, mesh={"tp": 2}).for_rank(1)
    one = part.restrict([part.index_of("t.weight") or 0])
    assert (names_of(one), one.tables, one.payload_bytes) == (["t.weight"], {}, 19 * 8)
    assert one.streamed is one


# -- what has no rows


@pytest.mark.parametrize(
    ("tensor", "rules", "load", "problem"),
    [
        (
            ("t.w", "F32", ()),
            [RESIDENT],
            {},
            r"rules\[0\].host_resident: tensor 't.w' of shape \[\]: a scalar has no rows",
        ),
        (("t.w", "F4", (8,)), [RESIDENT], {}, "its rows are no whole bytes"),
        (("t.w", "F4", (4, 3)), [RESIDENT], {"raw_dtypes": True}, "its rows are no whole bytes"),
        (("t.w", "F6_E2M3", (4, 2)), [RESIDENT], {"raw_dtypes": True}, "its rows are no whole bytes"),
        (("t.w", "F6_E2M3", (4,)), [RESIDENT], {"raw_dtypes": True}, "its rows are no whole bytes"),
        (("t.w", "F4", (4, 3)), [RESIDENT], {}, "torch cannot hold"),
        (("t.w", "F6_E3M2", (4, 4)), [RESIDENT], {}, "torch cannot hold"),
        (
            ("t.w", "U8", (4, 4)),
            [{"match": "*", "split": {"axis": "tp", "dim": 1}}, RESIDENT],
            {},
            r"rules\[1\].host_resident: tensor 't.w' .*: loads.target.rules\[0\].split cuts it along dimension 1",
        ),
        (
            ("t.w", "U8", (4, 4)),
            [RESIDENT, {"match": "*", "split": {"axis": "tp", "dim": 0, "sections": [1, 1]}}],
            {},
            r"loads.target.rules\[1\].split cuts it in sections, but tables are cut by contiguous rows",
        ),
    ],
    ids=["scalar", "F4 1-D", "F4 odd", "F6 flat", "F6 1-D", "F4 unholdable", "F6 unholdable", "dim 1", "sections"],
)
def test_what_has_no_rows_of_its_own_is_refused_with_rule_and_tensor(
    tensor: Any, rules: list[Any], load: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        plan_of(one_shard(tensor), {"rules": rules, **load}, {"tp": 2})
    assert caught.value.tensor == "t.w"


def test_rows_of_a_type_that_torch_lacks_are_bytes_where_they_are_whole() -> None:
    plan = plan_of(
        one_shard(("t.w", "F6_E2M3", (6, 4))), {"rules": [{**RESIDENT, "split": TP}], "raw_dtypes": True}, {"tp": 2}
    )
    part = plan.table("t.w", 1)
    assert part is not None
    assert (part.dtype_code, part.shape, part.rows, part.row_bytes) == ("U8", (6, 3), (3, 6), 3)


def test_a_cut_that_does_not_fit_the_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="must start at 0 and end at 37"):
        plan_with({**RESIDENT, "split": {**TP, "boundaries": [0, 5, 36]}}, mesh={"tp": 2})


# -- who fills what


@pytest.mark.parametrize(
    ("total", "rows", "expected"),
    [
        pytest.param(37, {0: (0, 18), 1: (18, 37)}, {0: ((0, 18),), 1: ((18, 37),)}, id="each its own"),
        pytest.param(10, {0: (0, 10), 1: (0, 10)}, {0: ((0, 5),), 1: ((5, 10),)}, id="replicas divide"),
        pytest.param(10, {3: (0, 10)}, {3: ((0, 10),)}, id="one alone"),
        pytest.param(10, {0: (0, 5), 1: (0, 5)}, {0: ((0, 2), (5, 7)), 1: ((2, 5), (7, 10))}, id="others' rows too"),
        pytest.param(10, {0: (0, 0), 1: (0, 10)}, {0: (), 1: ((0, 10),)}, id="one without rows"),
        pytest.param(10, {0: (0, 0), 1: (4, 4)}, {0: ((0, 2), (4, 7)), 1: ((2, 4), (7, 10))}, id="none with rows"),
        pytest.param(10, {0: (0, 5), 2: (5, 8)}, {0: ((0, 5), (8, 9)), 2: ((5, 8), (9, 10))}, id="a gap"),
        pytest.param(0, {0: (0, 0), 1: (0, 0)}, {0: (), 1: ()}, id="no rows"),
        pytest.param(1, {0: (0, 1), 1: (0, 1), 2: (0, 1)}, {0: (), 1: (), 2: ((0, 1),)}, id="fewer rows than ranks"),
        pytest.param(
            12,
            {0: (0, 8), 1: (4, 12)},
            {0: ((0, 6),), 1: ((6, 12),)},
            id="an overlap is divided, and joined with the rest",
        ),
    ],
)
def test_shares(total: int, rows: dict[int, Rows], expected: dict[int, tuple[Rows, ...]]) -> None:
    assert shares(total, rows) == expected


@st.composite
def holdings(draw: st.DrawFn) -> tuple[int, dict[int, Rows]]:
    total = draw(st.integers(0, 40))
    edges = st.tuples(st.integers(0, total), st.integers(0, total)).map(lambda pair: (min(pair), max(pair)))
    return total, draw(st.dictionaries(st.integers(0, 9), edges, min_size=1, max_size=6))


@given(holdings())
def test_each_row_is_filled_once_and_by_those_who_hold_it(held: tuple[int, dict[int, Rows]]) -> None:
    total, rows = held
    found = shares(total, rows)
    assert set(found) == set(rows)
    filled = sorted(row for ranges in found.values() for start, stop in ranges for row in range(start, stop))
    assert filled == list(range(total))
    for rank, ranges in found.items():
        assert all(start < stop for start, stop in ranges)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "touching ranges are one"
        for start, stop in ranges:
            for row in range(start, stop):
                holders = [r for r, (first, last) in rows.items() if first <= row < last]
                assert not holders or rank in holders, "another rank's rows"


@given(holdings())
def test_the_shares_do_not_depend_on_the_order_of_the_ranks(held: tuple[int, dict[int, Rows]]) -> None:
    total, rows = held
    assert shares(total, dict(reversed(rows.items()))) == shares(total, rows)


@given(st.integers(0, 100), st.integers(1, 8))
def test_ranks_with_the_same_rows_fill_nearly_equal_parts(total: int, ranks: int) -> None:
    sizes = [
        sum(stop - start for start, stop in ranges)
        for ranges in shares(total, dict.fromkeys(range(ranks), (0, total))).values()
    ]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("layout", "hosts", "expected"),
    [
        pytest.param("per_rank", [0, 1, 2, 3], [((0, 18),), ((18, 37),)] * 2, id="each its own"),
        pytest.param("shared", [0] * 4, [((0, 9),), ((18, 27),), ((9, 18),), ((27, 37),)], id="one node"),
        pytest.param("shared", [0, 0, 2, 2], [((0, 18),), ((18, 37),)] * 2, id="two nodes"),
        pytest.param("shared", [0, 1, 0, 0], [((0, 9),), ((0, 37),), ((9, 18),), ((18, 37),)], id="one by itself"),
        pytest.param("shared", [0, 1, 2, 3], [((0, 37),)] * 4, id="nobody shares"),
    ],
)
def test_who_fills_which_rows_in_each_layout(layout: str, hosts: list[int], expected: list[tuple[Rows, ...]]) -> None:
    """Two replicas of two ranks: whoever shares memory with others fills all of it together with them."""
    rule = {"match": "t.*", "host_resident": {"layout": layout}, "split": TP}
    plan = plan_with(rule, mesh={"replica": 2, "tp": 2})
    assert filled_by([plan.table("t.weight", rank) for rank in range(4)], hosts) == expected


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, dict[str, int], list[dict[str, object]]]:
    total = draw(st.integers(0, 50))
    mesh = {"pp": draw(st.integers(1, 2)), "tp": draw(st.integers(1, 5))}
    split: dict[str, object] = {"axis": draw(st.sampled_from(["tp", ["pp", "tp"]])), "dim": 0}
    way = draw(st.sampled_from(["equal", "align", "pad_to", "boundaries"]))
    parts = mesh["tp"] * (mesh["pp"] if isinstance(split["axis"], list) else 1)
    if way == "boundaries":
        inner = draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1))
        split[way] = [0, *sorted(inner), total]
    elif way != "equal":
        split[way] = draw(st.integers(1, 16))
    rules = [{**RESIDENT, "split": split}]
    if split["axis"] == "tp" and draw(st.booleans()):
        rules.insert(0, {"match": "*", "assign": {"axis": "pp", "to": [0]}})
    return total, mesh, rules


@settings(max_examples=60)
@given(splits())
def test_the_rows_are_those_that_an_ordinary_load_of_the_rank_has(
    case: tuple[int, dict[str, int], list[dict[str, object]]],
) -> None:
    total, mesh, rules = case
    checkpoint: Checkpoint = one_shard(("t.weight", "BF16", (total, 3)), ("z", "U8", (2,)))
    plan = plan_of(checkpoint, {"rules": rules}, mesh)
    held = []
    for rank in range(plan.world_size):
        part = plan.table("t.weight", rank)
        assert part is not None
        start, stop = part.rows
        own = plan.for_rank(rank)
        i = own.index_of("t.weight")
        assert (stop - start) * part.row_bytes == (0 if i is None else own.nbytes(i))
        if i is not None and start < stop:
            (wanted,) = own.spec(i).parts
            assert wanted[0][0] == slice(start, stop)
        assert (i in own.tables) == (i is not None)
        held += list(range(start, stop))
    assert set(held) == set(range(total)), "every row is held by some rank"
