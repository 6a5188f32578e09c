"""Prefixes and skip: which tensors a load takes."""

from __future__ import annotations

import pytest

from loader_service.errors import CheckpointError
from tests.planning.making import named, names_of, plan_of

NAMES = ("lm_head.weight", "model.layers.0.w", "mtp.0.w", "mtp.1", "mtp.1.a", "mtp.10.x", "mtp.1x")


def taken(load: dict[str, object], names: tuple[str, ...] = NAMES) -> list[str]:
    return names_of(plan_of(named(*names), load).for_rank(0))


def test_without_prefixes_everything_is_taken_in_file_order() -> None:
    assert taken({}) == list(NAMES)


@pytest.mark.parametrize("prefix", ["mtp.1", "mtp.1."])
def test_a_prefix_is_whole_dotted_segments(prefix: str) -> None:
    assert taken({"key_prefixes": [prefix]}) == ["mtp.1", "mtp.1.a"]


def test_prefixes_that_overlap_take_each_name_once() -> None:
    assert taken({"key_prefixes": ["mtp.1", "mtp", "mtp.1."]}) == ["mtp.0.w", "mtp.1", "mtp.1.a", "mtp.10.x", "mtp.1x"]


@pytest.mark.parametrize("on_no_match", ["error", "read_all"])
def test_one_of_several_prefixes_without_a_key_is_an_error_that_names_what_is_there(on_no_match: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        taken({"key_prefixes": ["mtp.0", "mtp.2", "draft"], "on_no_match": on_no_match})
    message = caught.value.message
    assert "loads.target.key_prefixes: no key of the checkpoint lies under 'mtp.2', 'draft'" in message
    assert "'mtp.0' (1), 'mtp.1' (2), 'mtp.10' (1)" in message


def test_no_prefix_with_a_key_is_an_error_by_default() -> None:
    with pytest.raises(CheckpointError, match=r"'draft'; it has 'lm_head.weight' \(1\), 'model.layers' \(1\)"):
        taken({"key_prefixes": ["draft"]})


def test_read_all_does_the_load_as_if_no_prefix_were_declared_and_says_so() -> None:
    plan = plan_of(named(*NAMES), {"key_prefixes": ["draft", "d"], "on_no_match": "read_all", "skip": ["mtp.*"]})
    assert names_of(plan.for_rank(0)) == ["lm_head.weight", "model.layers.0.w"]
    assert plan.read_all
    assert "no key of the checkpoint lies under draft, d" in plan.warnings[0]


def test_read_all_stays_false_when_prefixes_match() -> None:
    plan = plan_of(named(*NAMES), {"key_prefixes": ["mtp.0"], "on_no_match": "read_all"})
    assert not plan.read_all
    assert plan.warnings == ()


def test_skip_applies_under_prefixes_too() -> None:
    assert taken({"key_prefixes": ["mtp"], "skip": ["*.w", "mtp.10.*"]}) == ["mtp.1", "mtp.1.a", "mtp.1x"]


def test_a_skip_that_matches_nothing_is_a_warning() -> None:
    plan = plan_of(named(*NAMES), {"skip": ["nope.*", "*.w", "*.layers.*"]})
    assert plan.warnings == ("loads.target.skip[0]: 'nope.*' matches no name of the checkpoint",)


def test_a_skip_that_matches_only_outside_the_prefixes_is_no_warning() -> None:
    assert plan_of(named(*NAMES), {"key_prefixes": ["mtp"], "skip": ["lm_head.*"]}).warnings == ()


def test_the_list_of_namespaces_is_bounded() -> None:
    deep = [f"model.layers{i}.w" for i in range(50)] + ["other.w"]
    with pytest.raises(CheckpointError, match=r"it has 'model' \(50\), 'other' \(1\)\. Correct"):
        taken({"key_prefixes": ["draft"]}, tuple(deep))
    with pytest.raises(CheckpointError, match=r"'b' \(2\).* and 35 more") as caught:
        taken({"key_prefixes": ["draft"]}, tuple([f"{i}.w" for i in range(50)] + ["b.v", "b.w"]))
    assert caught.value.message.count("(1)") == 15


def test_an_empty_checkpoint_is_loaded_and_has_no_prefix() -> None:
    assert taken({}, ()) == []
    with pytest.raises(CheckpointError, match="it has no tensor at all"):
        taken({"key_prefixes": ["mtp"]}, ())
