"""What ranks compare: it follows what decides the plan, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from loader_service.config.normalised import describe_config_difference, normalised
from loader_service.config.yaml_file import config_from_dict
from loader_service.errors import ConfigError
from tests.config.making import accepted, minimal

Data = dict[str, object]


def base() -> Data:
    rules = [
        {"match": "*.experts.*", "assign": {"axis": "tp", "index": r"experts\.(\d+)\."}},
        {"match": "*.q.weight", "split": {"axis": "tp", "dim": 0, "sections": [2, 1], "units": [8, 4]}},
    ]
    draft = {"key_prefixes": ["mtp.0.", "mtp.1"]}
    return minimal(mesh={"pp": 2, "tp": 4}, loads={"target": {"skip": ["mtp.*"], "rules": rules}, "draft": draft})


def of(data: Data, load: str = "target") -> dict[str, object]:
    return normalised(accepted(data), load)


def changed(change: Callable[[Data], object]) -> Data:
    data: Data = json.loads(json.dumps(base()))
    change(data)
    return data


def _set(*path: object) -> Callable[[Data], object]:
    """A change of the value at a key path, given last."""
    *keys, last, value = path

    def change(data: Data) -> None:
        place: object = data
        for key in keys:
            if isinstance(place, dict):
                place = place.setdefault(key, {})
            elif isinstance(place, list) and isinstance(key, int):
                place = place[key]
        assert isinstance(place, dict)
        place[last] = value

    return change


RULES = ("loads", "target", "rules")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (_set("checkpoint", "index", "ignore"), 'checkpoint.index is "advisory" on one rank and "ignore" on another'),
        (
            _set("mesh", {"tp": 4, "pp": 2}),
            'mesh is [["pp", 2], ["tp", 4]] on one rank and [["tp", 4], ["pp", 2]] on another',
        ),
        (_set("mesh", {"tp": 4}), 'mesh is [["pp", 2], ["tp", 4]] on one rank and [["tp", 4]] on another'),
        (_set("loads", "target", "skip", []), 'loads.target.skip is ["mtp.*"] on one rank and [] on another'),
        (
            _set("loads", "target", "on_no_match", "read_all"),
            'loads.target.on_no_match is "error" on one rank and "read_all" on another',
        ),
        (
            _set("loads", "target", "raw_dtypes", True),
            "loads.target.raw_dtypes is false on one rank and true on another",
        ),
        (
            _set("loads", "target", "key_prefixes", ["a"]),
            'loads.target.key_prefixes is not set on one rank and ["a."] on another',
        ),
        (_set(*RULES, 0, "match", "*"), 'loads.target.rules[0].match is "*.experts.*" on one rank and "*" on another'),
        (
            _set(*RULES, 0, "assign", "how", "round_robin"),
            'loads.target.rules[0].assign.how is "block" on one rank and "round_robin" on another',
        ),
        (
            _set(*RULES, 0, "assign", "count", 8),
            "loads.target.rules[0].assign.count is not set on one rank and 8 on another",
        ),
        (_set(*RULES, 1, "split", "dim", 1), "loads.target.rules[1].split.dim is 0 on one rank and 1 on another"),
        (
            _set(*RULES, 1, "split", "units", [8, 8]),
            "loads.target.rules[1].split.units is [8, 4] on one rank and [8, 8] on another",
        ),
        (_set("loads", "target", "rules", base()["loads"]["target"]["rules"][:1]), "rules[1] is {"),  # type: ignore[index]
        (_set("reads", "coalesce_gap_bytes", 0), "reads.coalesce_gap_bytes is 262144 on one rank and 0 on another"),
        (_set("reads", "sharing", "none"), 'reads.sharing is "auto" on one rank and "none" on another'),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else None,
)
def test_what_decides_the_plan_is_compared_and_named(change: Callable[[Data], object], difference: str) -> None:
    found = describe_config_difference(of(base()), of(changed(change)))
    assert found is not None
    assert difference in found


@pytest.mark.parametrize(
    "change",
    [
        _set("checkpoint", "path", "/elsewhere"),
        _set("loads", "target", "checkpoint", {"path": "/a/local/copy"}),
        _set("loads", "draft", "key_prefixes", ["other."]),
        _set("loads", "third", {}),
        _set("reads", "threads", 3),
        _set("reads", "threads_per_node", 3),
        _set("reads", "chunk_bytes", "1MiB"),
        _set("reads", "access", "buffered"),
        _set("reads", "drop_page_cache", "never"),
        _set("reads", "retries", 9),
        _set("reads", "stuck_after_s", 9),
        _set("staging", "capacity_bytes", 4096),
        _set("staging", "pin", "never"),
        _set("agreement", "timeout_s", 1),
        _set("reads", "coalesce_gap_bytes", "256KiB"),
        _set("loads", "target", "on_no_match", "error"),
        _set(*RULES, 0, "assign", "how", "block"),
        _set(*RULES, 0, "assign", "axis", ["tp"]),
    ],
)
def test_what_may_differ_by_rank_or_means_the_same_is_not_a_difference(change: Callable[[Data], object]) -> None:
    ours, theirs = of(base()), of(changed(change))
    assert json.dumps(ours) == json.dumps(theirs)
    assert describe_config_difference(ours, theirs) is None


def test_prefixes_with_and_without_a_final_dot_are_the_same() -> None:
    assert of(base(), "draft") == of(changed(_set("loads", "draft", "key_prefixes", ["mtp.0", "mtp.1."])), "draft")


def test_the_result_goes_through_json_unchanged() -> None:
    facts = of(base())
    assert json.loads(json.dumps(facts)) == facts
    assert describe_config_difference(facts, json.loads(json.dumps(facts))) is None


def test_differences_are_found_from_either_side() -> None:
    more, less = {"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}
    assert describe_config_difference(more, less) == "a.c is 2 on one rank and not set on another"
    assert describe_config_difference(less, more) == "a.c is not set on one rank and 2 on another"
    assert describe_config_difference({"a": True}, {"a": 1}) == "a is true on one rank and 1 on another"


def test_an_unknown_load_has_no_normal_form() -> None:
    with pytest.raises(ConfigError, match="no load is named 'other'"):
        normalised(config_from_dict(base()), "other")
