"""Numbers in names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.planning.captured import NO_MATCH, NO_NUMBER, captured_numbers


@pytest.mark.parametrize(
    ("index", "names", "expected"),
    [
        pytest.param(r"experts\.(\d+)\.", ["l.3.experts.12.w", "l.0.experts.0.w"], [12, 0], id="plain"),
        pytest.param(r"layers\.(\d+)\.", ["layers.1.layers.2.w"], [1], id="the first occurrence"),
        pytest.param(r"(\d+)", ["a1b22"], [1], id="a bare group"),
        pytest.param(
            r"experts\.(\d+)\.", ["experts.1.w", "norm.w", "experts.2.w"], [1, NO_MATCH, 2], id="a name without"
        ),
        pytest.param(r"e\.(\d+)\.", ["norm.w", "e.1.e.2.w"], [NO_MATCH, 1], id="one name with two, one with none"),
        pytest.param(r"e\.(\w+)\.", ["e.one.w", "e.2.w"], [NO_NUMBER, 2], id="letters"),
        pytest.param(r"e(\d+)?", ["e.w", "e7"], [NO_NUMBER, 7], id="an optional group"),
        pytest.param(r"^(\d+)\.", ["7.w", "x.7.w"], [7, NO_MATCH], id="anchored"),
        pytest.param(r"e\.(\d+)", ["e.007"], [7], id="leading zeros"),
        pytest.param(
            r"e\.(\d+)",
            ["e." + "9" * 18, "e." + "9" * 19, "e." + "9" * 5000],
            [10**18 - 1, NO_NUMBER, NO_NUMBER],
            id="too long",
        ),
        pytest.param(r"e\.(\d+)", ["x\ne.1", "e.2"], [1, 2], id="a name of two lines"),
        pytest.param(r"(?i)E\.(\d+)", ["e.3"], [3], id="flags"),
        pytest.param(r"e\.(\d+)", [], [], id="no names"),
    ],
)
def test_captures(index: str, names: list[str], expected: list[int]) -> None:
    assert captured_numbers(index, names).tolist() == expected


@given(
    st.sampled_from([r"a(\d+)b", r"(\d+)", r"a.(\d+)", r"\.(\d+)\.", r"a([0-9]+)"]),
    st.lists(st.text(alphabet="ab.019\n\r", max_size=8), min_size=1, max_size=12),
)
def test_one_search_over_all_names_finds_what_single_searches_find(index: str, names: list[str]) -> None:
    singly = [re.search(index, name) for name in names]
    expected = [NO_MATCH if found is None else int(found.group(1)) for found in singly]
    assert captured_numbers(index, names).tolist() == expected


@pytest.mark.parametrize("index", [r"x\.(\d+)\.", r"x\.(\d+|[a-z])\."])
def test_many_names_give_the_same_numbers_as_each_alone(index: str) -> None:
    names = [f"x.{i}.w" for i in range(9_000)]
    names[5_000] = "y"
    names[6_000] = "x.q.w"
    found = captured_numbers(index, names).tolist()
    assert found == [int(captured_numbers(index, [name])[0]) for name in names]
    assert found[4_999:5_002] == [4_999, NO_MATCH, 5_001]
