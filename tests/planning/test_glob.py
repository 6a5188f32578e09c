"""Globs over tensor names."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loader_service.planning.glob import compile_glob


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*.layers.*", "model.layers.0.x", True),
        ("*.layers.*", "layers.0.x", False),
        ("mtp.*", "mtp.0.a.b", True),
        ("mtp.*", "mtp", False),
        ("*.weight", "a.b.weight", True),
        ("*.weight", "a.b.Weight", False),
        ("lm_head.weight", "lm_head.weight", True),
        ("lm_head.weight", "x.lm_head.weight", False),
        ("*.layers.*.weight", "m.layers.0.weight", True),
        ("*.layers.*.weight", "m.layers.weight", False),
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("*.[qkv]_proj.*", "l.k_proj.weight", True),
        ("*.[!qkv]_proj.*", "l.k_proj.weight", False),
        ("layer.?.w", "layer.3.w", True),
        ("layer.?.w", "layer.12.w", False),
        ("[abc", "[abc", True),
        ("*", "", True),
        ("**", "a.b", True),
        ("a.b", "axb", False),
        ("*.w*.w", "a.w.w", True),
        ("*\n*", "a\nb", True),
        ("a*", "a\nb", True),
    ],
)
def test_matches_the_whole_name(pattern: str, name: str, expected: bool) -> None:
    assert compile_glob(pattern).matches(name) is expected


texts = st.text(alphabet="ab.*?[]!-\n", max_size=8)


@given(texts, st.lists(st.text(alphabet="ab.[!-\n", max_size=8), max_size=20))
@example("[]", ["[]", "", "]"])
@example("[]a]*", ["]", "a.b", "[]a]"])
@example("*a*b*", ["ba", "ab", "xaxbx"])
def test_agrees_with_the_standard_library_on_any_text(pattern: str, names: list[str]) -> None:
    expected = [i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)]
    assert compile_glob(pattern).positions(names).tolist() == expected


@pytest.mark.parametrize("pattern", ["*", "a.*", "*.8", "*.1*.w", "a.?7*", "a.4097.w"])
def test_many_names_are_looked_through_like_few(pattern: str) -> None:
    names = [f"{'ab'[i % 2]}.{i}{'.w' * (i % 3 == 0)}" for i in range(9_000)] + ["a.4097.w"]
    found = compile_glob(pattern).positions(names).tolist()
    assert found == [i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)]
    assert found
