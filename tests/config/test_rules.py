"""Rules: what belongs together, what excludes each other, and what the mesh must have."""

from __future__ import annotations

import pytest

from tests.config.making import accepted, minimal, problems, with_rules

LAYER = r"layers\.(\d+)\."
AT = "loads.target.rules[0]"


def assign(**keys: object) -> dict[str, object]:
    return {"match": "*", "assign": {"axis": "tp", **keys}}


def split(**keys: object) -> dict[str, object]:
    return {"match": "*", "split": {"axis": "tp", "dim": 0, **keys}}


@pytest.mark.parametrize(
    "rule",
    [
        assign(index=LAYER),
        assign(index=LAYER, how="block"),
        assign(index=LAYER, how="block", count=12),
        assign(index=LAYER, how="round_robin", count=1),
        assign(index=LAYER, boundaries=[0, 1, 2, 3, 4]),
        assign(index=LAYER, how="boundaries", boundaries=[0, 0, 0, 0, 4]),
        assign(index=r"(?P<number>\d+)"),
        assign(index=r"(?:layers|blocks)\.(\d+)"),
        assign(to=[0]),
        assign(to=[-1, 0, 3, -4]),
        assign(to="all"),
        split(),
        split(dim=7),
        split(align=128),
        split(pad_to=64),
        split(units=4),
        split(units=1),
        split(units=2),
        split(units=32),
        split(boundaries=[0, 1, 2, 3, 4]),
        split(sections=[4, 1, 1]),
        split(sections=[4, 1, 1], units=8),
        split(sections=[4, 1, 1], units=[32, 8, 2]),
        split(sections=[1, 1], align=[128, 64]),
        split(sections=[1, 1], pad_to=[128, 64]),
        split(sections=[1, 1], boundaries=[0, 1, 2, 3, 4]),
        split(sections=[1, 1], boundaries=[[0, 1, 2, 3, 4], [0, 0, 0, 0, 9]]),
        {"match": "*", "assign": {"axis": "pp", "to": [0]}, "split": {"axis": "tp", "dim": 0}},
        {"match": "*", "split": {"axis": ["pp", "tp"], "dim": 0, "units": 8}},
    ],
    ids=lambda rule: str({**rule.get("assign", {}), **rule.get("split", {})})[:60],
)
def test_a_right_rule_is_accepted(rule: dict[str, object]) -> None:
    accepted(with_rules(rule, mesh={"pp": 2, "tp": 4}))


def resident(split: dict[str, object] | None = None, **keys: object) -> dict[str, object]:
    rule: dict[str, object] = {"match": "*", "host_resident": {"layout": "per_rank", **keys}}
    return rule if split is None else {**rule, "split": split}


@pytest.mark.parametrize("layout", ["per_rank", "shared"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"split": {"axis": "tp", "dim": 0}},
        {"split": {"axis": "tp", "dim": 0, "align": 16}},
        {"split": {"axis": "tp", "dim": 0, "boundaries": [0, 4, 9, 16, 37]}},
        {"assign": {"axis": "pp", "to": [0]}, "split": {"axis": "tp", "dim": 0}},
    ],
    ids=["whole", "equal", "align", "boundaries", "assigned"],
)
def test_a_host_resident_rule_goes_with_what_cuts_rows(layout: str, more: dict[str, object]) -> None:
    rule = {"match": "*.engram.*", "host_resident": {"layout": layout}, **more}
    found = accepted(with_rules(rule, mesh={"pp": 2, "tp": 4})).loads["target"].rules[0]
    assert found.host_resident is not None
    assert found.host_resident.layout == layout


@pytest.mark.parametrize(
    ("rule", "where", "hint"),
    [
        ({}, "match", "is missing; add it: Glob"),
        ({"match": "*"}, "", "decides nothing; add `assign`, `split` or `host_resident`"),
        ({"match": "", "split": {"axis": "tp", "dim": 0}}, "match", "is empty text"),
        ({"match": ["*"], "split": {"axis": "tp", "dim": 0}}, "match", "must be text, found a list"),
        ({"match": "*", "split": "tp"}, "split", "must be a mapping with keys of axis, dim, "),
        ({"match": "*", "split": {"dim": 0}}, "split.axis", "is missing; add it: An axis of the mesh"),
        ({"match": "*", "split": {"axis": "tp"}}, "split.dim", "is missing; add it: The dimension that is cut"),
        ({"match": "*", "assign": {"to": [0]}}, "assign.axis", "is missing"),
        (split(axis=[]), "split.axis", "is an empty list; write tp, or [moe_tp, ep]"),
        (split(axis=""), "split.axis", "is empty text"),
        (split(axis=5), "split.axis", "must be a list of axis names, found the number 5"),
        (split(axis=["tp", ""]), "split.axis[1]", "is empty text"),
        (split(axis=["tp", "pp", "tp"]), "split.axis[2]", "axis 'tp' is named twice"),
        (split(dim=-1), "split.dim", "dimensions count from the front"),
        (split(dim="0"), "split.dim", "write 0 without quotes"),
        (split(dim=True), "split.dim", "found true"),
        (split(dim=0.0), "split.dim", "found the number 0.0"),
        (split(align=0), "split.align", "at least 1"),
        (split(units="8"), "split.units", "write 8 without quotes"),
        (split(units=[]), "split.units", "is an empty list"),
        (split(sections=2), "split.sections", "must be a list of whole numbers"),
        (split(sections=[1, 0]), "split.sections[1]", "at least 1"),
        (split(align=128, pad_to=64), "split.pad_to", "only one of `align`, `pad_to` may be given"),
        (split(units=4, boundaries=[0, 1, 2, 3, 4]), "split.boundaries", "only one of `units`, `boundaries`"),
        (split(units=4, align=1, pad_to=2), "split.pad_to", "only one of `align`, `pad_to`, `units` may be given"),
        (split(units=[4, 4]), "split.units", "needs `sections`"),
        (split(align=[4]), "split.align", "needs `sections`"),
        (split(boundaries=[[0, 1, 2, 3, 4]]), "split.boundaries", "needs `sections`"),
        (split(sections=[4, 1, 1], units=[32, 8]), "split.units", "has 2 values for 3 `sections`"),
        (split(sections=[1, 1], boundaries=[[0, 1, 2, 3, 4]]), "split.boundaries", "has 1 values for 2 `sections`"),
        (split(sections=[1, 1], units=[8, "8"]), "split.units[1]", "write 8 without quotes"),
        (split(boundaries=[0]), "split.boundaries", "at least two numbers"),
        (split(boundaries=[1, 2, 3, 4, 5]), "split.boundaries[0]", "must start at 0"),
        (split(boundaries=[0, 2, 1, 3, 4]), "split.boundaries[2]", "must not be smaller than the number before it, 2"),
        (split(boundaries=[0, 1, 2, -3, 4]), "split.boundaries[3]", "at least 0"),
        (split(boundaries=[0, 1]), "split.boundaries", "has 2 numbers, but the axis has 4 ranks; write 5 numbers"),
        (split(boundaries=[0, 1, 2, 3, 4, 5]), "split.boundaries", "has 6 numbers, but the axis has 4 ranks"),
        (split(boundaries=[[0, 1], 5], sections=[1, 1]), "split.boundaries[1]", "must be a list of whole numbers"),
        (
            split(boundaries=[[0, 1, 2, 3, 4], [0, 9]], sections=[1, 1]),
            "split.boundaries[1]",
            "has 2 numbers, but the axis has 4 ranks",
        ),
        (split(units=6), "split.units", "6 units do not fit 4 ranks"),
        (split(units=3), "split.units", "3 units do not fit 4 ranks"),
        (split(units=[8, 6], sections=[1, 1]), "split.units[1]", "6 units do not fit 4 ranks"),
        (assign(), "assign", "needs `index`"),
        (assign(how="block"), "assign", "needs `index`"),
        (assign(index=""), "assign.index", "is empty text"),
        (assign(index=5), "assign.index", "must be text"),
        (assign(index="layers("), "assign.index", "is not a regular expression"),
        (assign(index=r"layers\.\d+"), "assign.index", "must have exactly one group, it has 0"),
        (assign(index=r"(layers)\.(\d+)"), "assign.index", "must have exactly one group, it has 2"),
        (assign(index=LAYER, how="blocks"), "assign.how", "did you mean 'block'?"),
        (assign(index=LAYER, how="boundaries"), "assign.how", "needs `boundaries`"),
        (assign(index=LAYER, how="block", boundaries=[0, 1, 2, 3, 4]), "assign.boundaries", "exclude each other"),
        (assign(index=LAYER, count=4, boundaries=[0, 1, 2, 3, 4]), "assign.count", "exclude each other"),
        (assign(index=LAYER, count=0), "assign.count", "at least 1"),
        (assign(index=LAYER, count="auto"), "assign.count", "must be a whole number"),
        (assign(index=LAYER, boundaries=[0, 31, 61]), "assign.boundaries", "has 3 numbers, but the axis has 4 ranks"),
        (assign(index=LAYER, boundaries=[0, 5, 3, 7, 9]), "assign.boundaries[2]", "must not be smaller"),
        (assign(index=LAYER, boundaries=[1, 2, 3, 4, 5]), "assign.boundaries[0]", "must start at 0"),
        (assign(index=LAYER, boundaries="0, 31"), "assign.boundaries", "must be a list of whole numbers"),
        (assign(to=[0], index=LAYER), "assign.index", "`index` and `to` exclude each other"),
        (assign(to=[0], how="block"), "assign.how", "`how` and `to` exclude each other"),
        (assign(to="all", count=4), "assign.count", "`count` and `to` exclude each other"),
        (assign(to="all", boundaries=[0, 1, 2, 3, 4]), "assign.boundaries", "`boundaries` and `to` exclude each other"),
        (assign(to=[]), "assign.to", "is an empty list; write [0], [-1] or all"),
        (assign(to=-1), "assign.to", "must be a list of numbers along the axis, found the number -1"),
        (assign(to="first"), "assign.to", "must be a list of numbers along the axis, found the text 'first'"),
        (assign(to=[0, True]), "assign.to[1]", "found true"),
        (assign(to=[0, 0]), "assign.to[1]", "0 is named twice"),
        (assign(to=[0, 4]), "assign.to[1]", "4 is outside the axis, which has 4 ranks; write a number from -4 to 3"),
        (assign(to=[-5]), "assign.to[0]", "-5 is outside the axis"),
        (
            {"match": "a.*", "assign": {"axis": ["pp", "tp"], "to": [0]}, "split": {"axis": "tp", "dim": 0}},
            "split.axis",
            "the rule for 'a.*' both assigns and splits over axis 'tp'",
        ),
        (
            {"match": "*", "host_resident": {}},
            "host_resident.layout",
            "is missing; add it: `per_rank`: each rank holds",
        ),
        ({"match": "*", "host_resident": "shared"}, "host_resident", "must be a mapping with keys of layout"),
        (resident(layout="sharde"), "host_resident.layout", "did you mean 'shared'?"),
        (resident(layout=True), "host_resident.layout", "found true"),
        (resident(layout=["shared"]), "host_resident.layout", "must be one of per_rank, shared"),
        (resident(layout="shared", pin=True), "host_resident.pin", "belongs under `staging`"),
        (resident(split={"axis": "tp", "dim": 1}), "split", "cut by contiguous rows: write dim: 0 and no sections"),
        (resident(split={"axis": "tp", "dim": 0, "sections": [1, 1]}), "split", "write dim: 0 and no sections"),
        (
            split(axis="tpp"),
            "split.axis",
            "the mesh has no axis 'tpp', only pp, tp; correct it or add the axis to `mesh`; did you mean 'tp'?",
        ),
        (split(axis=["tp", "ep"]), "split.axis", "the mesh has no axis 'ep', only pp, tp"),
        (split(axis="world"), "split.axis", "the mesh has no axis 'world'"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else None,
)
def test_a_wrong_rule_is_refused_with_its_number_and_key(rule: dict[str, object], where: str, hint: str) -> None:
    (line,) = problems(with_rules(rule, mesh={"pp": 2, "tp": 4}))
    assert line.startswith(f"{AT}.{where}: " if where else f"{AT}: ")
    assert hint in line


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"to": [0], "index": LAYER, "how": "block"}, ["index", "how"]),
        ({"index": LAYER, "how": "boundaries", "count": 4}, ["how", "count"]),
        ({"index": LAYER, "how": "block", "count": 4, "boundaries": [0, 1, 2, 3, 4]}, ["boundaries", "count"]),
    ],
    ids=["to", "count", "block"],
)
def test_two_conflicts_in_one_assign_are_both_named(keys: dict[str, object], named: list[str]) -> None:
    lines = problems(with_rules(assign(**keys), mesh={"tp": 4}))
    assert [line.split(": ")[0] for line in lines] == [f"{AT}.assign.{key}" for key in named]


def test_without_a_mesh_the_only_axis_is_world() -> None:
    accepted(with_rules({"match": "*", "split": {"axis": "world", "dim": 0, "boundaries": [0, 1, 2, 3, 4, 5]}}))
    (line,) = problems(with_rules(split()))
    assert line.startswith(
        f"{AT}.split.axis: axis 'tp' is unknown: without `mesh` the only axis is 'world'; add `mesh: "
    )


def test_a_list_of_axes_has_the_product_of_their_ranks() -> None:
    rule = {"match": "*", "assign": {"axis": ["pp", "tp"], "to": [7]}}
    accepted(with_rules(rule, mesh={"pp": 2, "tp": 4}))
    (line,) = problems(with_rules(rule, mesh={"pp": 2, "tp": 3}))
    assert "7 is outside the axis, which has 6 ranks" in line


@pytest.mark.parametrize(
    ("keys", "how"),
    [
        ({"index": LAYER}, "block"),
        ({"index": LAYER, "boundaries": [0, 1, 2, 3, 4]}, "boundaries"),
        ({"index": LAYER, "how": "round_robin"}, "round_robin"),
        ({"to": [0]}, None),
    ],
    ids=["default", "boundaries", "given", "to"],
)
def test_how_follows_from_the_other_keys(keys: dict[str, object], how: str | None) -> None:
    rule = accepted(with_rules(assign(**keys), mesh={"tp": 4})).loads["target"].rules[0]
    assert rule.assign is not None
    assert rule.assign.effective_how == how


def test_one_axis_is_stored_like_a_list_of_one() -> None:
    config = accepted(with_rules(split(), split(axis=["tp"]), mesh={"tp": 4}))
    assert config.loads["target"].rules[0] == config.loads["target"].rules[1]


def test_a_load_without_any_checkpoint_is_refused() -> None:
    own = {"checkpoint": {"path": "/models/draft"}}
    assert list(accepted({"loads": {"a": own, "b": own}}).loads) == ["a", "b"]
    assert problems({"loads": {"a": own, "b": {}, "c": {}}}) == [
        f"loads.{name}: has no checkpoint; add `checkpoint: {{path: ...}}` at the top, or to this load" for name in "bc"
    ]


def test_the_checkpoint_of_a_load_is_its_own_or_the_common_one() -> None:
    config = accepted(minimal(loads={"target": {}, "draft": {"checkpoint": {"path": "/models/d", "index": "ignore"}}}))
    assert config.checkpoint_of("target").path == "/models/m"
    assert config.checkpoint_of("draft").path == "/models/d"
