"""Which ranks take which tensors, and what rules are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest

from loader_service.errors import ConfigError
from loader_service.planning.plan import LoadPlan
from tests.planning.making import named, names_of, one_shard, plan_of

EXPERT = r"experts\.(\d+)\."
LAYER = r"layers\.(\d+)\."


def ranks_of(plan: LoadPlan) -> dict[str, list[int]]:
    """For each tensor of the load, in file order, the ranks that take it."""
    found: dict[str, list[int]] = {plan.catalog.names[i]: [] for i in plan.tensor_ids}
    for rank in range(plan.world_size):
        for name in names_of(plan.for_rank(rank)):
            found[name].append(rank)
    return found


def rule(match: str, **decision: object) -> dict[str, object]:
    return {"match": match, **decision}


def by_number(match: str, axis: object, index: str, **how: object) -> dict[str, object]:
    return rule(match, assign={"axis": axis, "index": index, **how})


EXPERTS = [f"m.layers.{layer}.experts.{expert}.w" for layer in range(2) for expert in range(5)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param({}, [[0], [0], [1], [1], [1]], id="block is the default"),
        pytest.param({"how": "block", "count": 8}, [[0], [0], [0], [0], [1]], id="block of a given count"),
        pytest.param({"how": "round_robin"}, [[0], [1], [0], [1], [0]], id="in turn"),
        pytest.param({"boundaries": [0, 1, 5]}, [[0], [1], [1], [1], [1]], id="boundaries"),
        pytest.param({"boundaries": [0, 0, 5]}, [[1], [1], [1], [1], [1]], id="a rank without items"),
    ],
)
def test_experts_go_to_ranks_by_number(how: dict[str, object], expected: list[list[int]]) -> None:
    plan = plan_of(named(*EXPERTS), {"rules": [by_number("*.experts.*", "ep", EXPERT, **how)]}, {"ep": 2})
    assert list(ranks_of(plan).values()) == expected * 2


@pytest.mark.parametrize(("boundaries", "edge"), [((0, 15, 30, 46, 61), 15), ((0, 16, 31, 46, 61), 16)])
def test_layers_go_to_stages_by_boundaries(boundaries: tuple[int, ...], edge: int) -> None:
    layers = named(*sorted(f"m.layers.{layer}.w" for layer in range(61)))
    plan = plan_of(layers, {"rules": [by_number("*.layers.*", "pp", LAYER, boundaries=list(boundaries))]}, {"pp": 4})
    assert [len(plan.for_rank(rank)) for rank in range(4)] == [stop - start for start, stop in pairwise(boundaries)]
    ranks = ranks_of(plan)
    assert ranks[f"m.layers.{edge - 1}.w"] == [0]
    assert ranks[f"m.layers.{edge}.w"] == [1]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7, 64])
@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_blocks_are_the_default_cut_of_the_count(parts: int, count: int) -> None:
    experts = named(*(f"experts.{i:02d}.w" for i in range(count)))
    plan = plan_of(experts, {"rules": [by_number("experts.*", "ep", EXPERT)]}, {"ep": parts})
    expected = [list(range(count * r // parts, count * (r + 1) // parts)) for r in range(parts)]
    taken = [[int(name[8:10]) for name in names_of(plan.for_rank(r))] for r in range(parts)]
    assert taken == expected


def test_numbers_of_eighteen_digits_do_not_overflow() -> None:
    names = named("experts.0.w", f"experts.{10**18 - 1}.w")
    plan = plan_of(names, {"rules": [by_number("*", "ep", EXPERT)]}, {"ep": 1000})
    assert list(ranks_of(plan).values()) == [[0], [999]]


def test_the_count_of_a_block_includes_skipped_names() -> None:
    names = [f"m.layers.{layer}.w" for layer in range(4)]
    load = {"skip": ["*.2.*", "*.3.*"], "rules": [by_number("*.layers.*", "pp", LAYER)]}
    assert ranks_of(plan_of(named(*names), load, {"pp": 2})) == {names[0]: [0], names[1]: [0]}


def test_the_count_of_a_block_includes_names_outside_the_prefixes() -> None:
    load = {"key_prefixes": ["mtp"], "rules": [by_number("*.experts.*", "ep", EXPERT)]}
    names = ["m.experts.0.w", "m.experts.3.w", "mtp.experts.0.w", "mtp.experts.1.w"]
    assert ranks_of(plan_of(named(*names), load, {"ep": 2})) == {names[2]: [0], names[3]: [0]}


@pytest.mark.parametrize(
    ("to", "expected"),
    [([-1], [3]), ([0], [0]), ([0, -1], [0, 3]), ([1, -3], [1]), ("all", [0, 1, 2, 3])],
    ids=["last", "first", "tied embeddings on first and last", "one place named twice", "all"],
)
def test_assign_to_places(to: object, expected: list[int]) -> None:
    plan = plan_of(named("embed.w"), {"rules": [rule("embed.*", assign={"axis": "pp", "to": to})]}, {"pp": 4})
    assert ranks_of(plan) == {"embed.w": expected}


def test_what_no_rule_decides_is_taken_whole_by_every_rank() -> None:
    load = {"rules": [by_number("*.layers.*", "pp", LAYER)]}
    assert ranks_of(plan_of(named("norm.w"), load, {"pp": 2, "tp": 2})) == {"norm.w": [0, 1, 2, 3]}


def test_a_rank_takes_a_tensor_if_every_assign_picks_it() -> None:
    load = {"rules": [by_number("*.layers.*", "pp", LAYER), by_number("*.experts.*", "ep", EXPERT)]}
    plan = plan_of(named(*EXPERTS), load, {"pp": 2, "ep": 5})
    assert list(ranks_of(plan).values()) == [[rank] for rank in range(10)]


def test_the_first_matching_rule_decides_an_axis_and_later_ones_others() -> None:
    load = {
        "rules": [
            rule("*.router.*", assign={"axis": "tp", "to": "all"}),
            rule("*.w", split={"axis": "tp", "dim": 0}),
            by_number("*.layers.*", "tp", LAYER),
            by_number("*.layers.*", "pp", LAYER, count=2),
        ]
    }
    checkpoint = one_shard(("m.layers.0.router.w", "U8", (4,)), ("m.layers.0.up.w", "U8", (4,)))
    plan = plan_of(checkpoint, load, {"pp": 2, "tp": 2})
    assert ranks_of(plan) == {"m.layers.0.router.w": [0, 1], "m.layers.0.up.w": [0, 1]}
    part = plan.for_rank(1)
    assert [part.storage_shape(i) for i in range(2)] == [(4,), (2,)]


def test_an_axis_list_is_one_flattened_row_major_axis() -> None:
    load = {"rules": [by_number("*", ["ep", "moe_tp"], EXPERT, count=4)]}
    plan = plan_of(named(*(f"experts.{i}.w" for i in range(4))), load, {"moe_tp": 2, "ep": 2})
    assert list(ranks_of(plan).values()) == [[0], [2], [1], [3]]  # ranks are (moe_tp, ep) row-major


def test_an_axis_list_that_earlier_rules_decided_whole_is_decided() -> None:
    load = {
        "rules": [
            rule("a.*", assign={"axis": "tp", "to": [0]}),
            rule("a.*", assign={"axis": "ep", "to": [1]}),
            rule("*", assign={"axis": ["tp", "ep"], "to": [0]}),
        ]
    }
    assert ranks_of(plan_of(named("a.w", "b.w"), load, {"tp": 2, "ep": 2})) == {"b.w": [0], "a.w": [1]}


def test_an_axis_of_one_rank_is_cut_into_nothing() -> None:
    load = {"rules": [by_number("*", "ep", EXPERT), rule("*", split={"axis": "tp", "dim": 0, "units": 2})]}
    plan = plan_of(named("experts.0.w"), load, {"ep": 1, "tp": 1})
    assert plan.for_rank(0).storage_shape(0) == (4,)


def test_a_rule_that_comes_too_late_is_a_warning_and_one_that_decides_the_rest_is_none() -> None:
    tensors = one_shard(("l.q.weight", "U8", (4, 6)), ("l.o.weight", "U8", (4, 6)), ("l.o.bias", "U8", (4,)))

    def warnings(*rules: dict[str, object]) -> tuple[str, ...]:
        return plan_of(tensors, {"rules": list(rules)}, {"tp": 2}).warnings

    first = rule("*.weight", split={"axis": "tp", "dim": 0})
    (late,) = warnings(first, rule("*.o.weight", split={"axis": "tp", "dim": 1}))
    assert late.startswith("loads.target.rules[1].split: decides nothing: for all 1 names that '*.o.weight' matches")
    (late,) = warnings(first, rule("*.o.weight", assign={"axis": "tp", "to": [0]}))
    assert late.startswith("loads.target.rules[1].assign: decides nothing")
    assert warnings(first, rule("*.o.*", split={"axis": "tp", "dim": 0})) == ()


@pytest.mark.parametrize(("pattern", "dim", "warns"), [("*", 1, False), ("*.bias", 1, True), ("*", 2, True)], ids=str)
def test_a_dimension_that_no_tensor_has_is_a_warning(pattern: str, dim: int, warns: bool) -> None:
    tensors = one_shard(("l.weight", "U8", (4, 6)), ("l.bias", "U8", (4,)))
    found = plan_of(tensors, {"rules": [rule(pattern, split={"axis": "tp", "dim": dim})]}, {"tp": 2}).warnings
    assert [f"has a dimension {dim}" in each for each in found] == [True] * warns


def test_a_rule_that_matches_nothing_is_a_warning() -> None:
    load = {
        "skip": ["mtp.*"],
        "rules": [
            rule("*.nothing.*", split={"axis": "tp", "dim": 0}),
            rule("mtp.*", split={"axis": "tp", "dim": 0}),
        ],
    }
    plan = plan_of(named("a.w", "mtp.0.w"), load, {"tp": 1})
    assert plan.warnings == ("loads.target.rules[0]: '*.nothing.*' matches no name of the checkpoint",)


@pytest.mark.parametrize(
    ("rules", "words", "tensor"),
    [
        pytest.param(
            [by_number("*", "cp", LAYER)],
            r"rules\[0\]\.assign\.axis: the mesh has no axis 'cp', only pp, tp",
            None,
            id="axis",
        ),
        pytest.param(
            [rule("*", split={"axis": ["tp", "ep"], "dim": 0})],
            r"rules\[0\]\.split\.axis: the mesh has no axis 'ep'",
            None,
            id="axis of a list",
        ),
        pytest.param(
            [by_number("*", "pp", LAYER)],
            r"rules\[0\]\.assign: tensor 'norm.w': index .* does not occur in the name \(1 such",
            "norm.w",
            id="a name without the number",
        ),
        pytest.param(
            [by_number("*", "pp", r"(\w+)$")],
            r"tensor 'm.layers.0.w': index .* captures no number",
            "m.layers.0.w",
            id="a capture that is no number",
        ),
        pytest.param(
            [by_number("*.layers.*", "pp", LAYER, boundaries=[0, 1, 3])],
            r"tensor 'm.layers.7.w': its number 7 is outside `boundaries`, which ends before 3",
            "m.layers.7.w",
            id="a number outside boundaries",
        ),
        pytest.param(
            [by_number("*.layers.*", "pp", LAYER, count=7)],
            r"its number 7 is outside `count`, which ends before 7",
            "m.layers.7.w",
            id="a number outside the count",
        ),
        pytest.param(
            [by_number("*.layers.*", "pp", LAYER, how="round_robin", count=2)],
            r"its number 7 is outside `count`",
            "m.layers.7.w",
            id="a number outside the count, in turn",
        ),
        pytest.param(
            [by_number("*.layers.*", "pp", LAYER, boundaries=[0, 1, 2, 9])],
            r"boundaries has 4 numbers, but the axis has 2 ranks",
            None,
            id="boundaries for other ranks",
        ),
        pytest.param([rule("*", assign={"axis": "pp", "to": [2]})], r"assign\.to: 2 is outside", None, id="place"),
        pytest.param(
            [rule("*", assign={"axis": "pp", "to": [-3]})], r"assign\.to: -3 is outside", None, id="negative place"
        ),
        pytest.param(
            [rule("*.0.*", assign={"axis": "tp", "to": "all"}), rule("*", assign={"axis": ["pp", "tp"], "to": [0]})],
            r"rules\[1\]\.assign: tensor 'm.layers.0.w': .* already decided tp but not pp",
            "m.layers.0.w",
            id="an axis list that is decided in part",
        ),
        pytest.param(
            [rule("*.w", split={"axis": "tp", "dim": 0}), rule("*.0.*", split={"axis": "pp", "dim": 0})],
            r"rules\[1\]\.split: tensor 'm.layers.0.w' of shape \[4\]: .* also split by loads.target.rules.0..split",
            "m.layers.0.w",
            id="two splits of one dimension",
        ),
        pytest.param(
            [rule("norm.w", split={"axis": "tp", "dim": 0, "sections": [1, 2]})],
            r"rules\[0\]\.split: tensor 'norm.w' of shape \[4\]: dimension 0: sections \[1, 2\] do not divide 4",
            "norm.w",
            id="sections",
        ),
        pytest.param(
            [rule("norm.w", split={"axis": "tp", "dim": 0, "boundaries": [0, 3, 5]})],
            r"boundaries go from 0 to 5; they must start at 0 and end at 4",
            "norm.w",
            id="split boundaries",
        ),
    ],
)
def test_a_rule_that_does_not_fit_is_refused_with_its_place_and_the_tensor(
    rules: list[object], words: str, tensor: str | None
) -> None:
    checkpoint = named("m.layers.0.w", "m.layers.7.w", "norm.w")
    with pytest.raises(ConfigError, match=words) as caught:
        plan_of(checkpoint, {"rules": rules}, {"pp": 2, "tp": 2})
    assert caught.value.tensor == tensor
    assert caught.value.message.startswith("loads.target.rules[")


def test_a_skipped_or_already_decided_name_needs_no_number() -> None:
    load = {
        "skip": ["norm.*"],
        "rules": [rule("head.*", assign={"axis": "pp", "to": [-1]}), by_number("*", "pp", LAYER, count=2)],
    }
    plan = plan_of(named("head.w", "m.layers.0.w", "norm.w"), load, {"pp": 2})
    assert ranks_of(plan) == {"head.w": [1], "m.layers.0.w": [0]}


@pytest.mark.parametrize("shape", [(), (4,), (4, 1)], ids=["no dimension", "one less", "of size 1"])
def test_a_dimension_that_the_tensor_lacks_or_of_size_1_is_taken_whole(shape: tuple[int, ...]) -> None:
    load = {"rules": [rule("*", split={"axis": "tp", "dim": 1, "units": 8, "sections": [3, 1]})]}
    plan = plan_of(one_shard(("a", "F32", shape)), load, {"tp": 2})
    assert [plan.for_rank(rank).storage_shape(0) for rank in range(2)] == [shape, shape]


def test_each_section_may_have_its_own_value() -> None:
    split = {"axis": "tp", "dim": 0, "sections": [2, 1], "units": [4, 1]}
    plan = plan_of(one_shard(("qkv", "U8", (12, 2))), {"rules": [rule("qkv", split=split)]}, {"tp": 2})
    assert [plan.for_rank(rank).spec(0).parts for rank in range(2)] == [
        (
            ((slice(0, 4), slice(0, 2)), (slice(0, 4), slice(0, 2))),
            ((slice(8, 12), slice(0, 2)), (slice(4, 8), slice(0, 2))),
        ),
        (((slice(4, 12), slice(0, 2)), (slice(0, 8), slice(0, 2))),),
    ]


def test_each_section_may_have_its_own_boundaries() -> None:
    split = {"axis": "tp", "dim": 0, "sections": [2, 1], "boundaries": [[0, 3, 4], [0, 0, 2]]}
    plan = plan_of(one_shard(("a", "U8", (6,))), {"rules": [rule("a", split=split)]}, {"tp": 2})
    assert [plan.for_rank(rank).spec(0).parts[0][0] for rank in range(2)] == [(slice(0, 3),), (slice(3, 6),)]
