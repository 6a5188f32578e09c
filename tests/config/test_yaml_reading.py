"""What YAML text may contain, and how each refusal is placed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from loader_service.config.yaml_file import load_config
from loader_service.errors import ConfigError
from tests.config.making import file_problems, write

HEAD = "checkpoint: {path: /m}\nloads: {target: {}}\n"


@pytest.mark.parametrize(
    "scalar",
    [
        *("010", "0x10", "0o7", "0b1", "1_000", "1:30", "+5", "5.0", "5.", "1e3", "1.0e+3", ".inf", "-.inf", ".nan"),
        *("2024-01-01", "true", "false", "on", "off", "yes", "no", "True", "null", "~", '"5"', "'5'", "[5]", "{a: 5}"),
        *("=", "five", "99999999999999999999"),
        *("", "!!int 5", "!!str 5", "! 5", "9" * 5000),
    ],
    ids=lambda text: text[:12] or "nothing",
)
def test_a_whole_number_is_written_in_plain_decimals_and_nothing_else(tmp_path: Path, scalar: str) -> None:
    (line,) = file_problems(tmp_path, f"{HEAD}reads:\n  retries: {scalar}\n")
    assert line.startswith("4: reads.retries: ")


@pytest.mark.parametrize(
    ("scalar", "hint"),
    [
        ("010", "010 is not a plain decimal number"),
        ("1:30", "1:30 is not a plain decimal number"),
        ("on", "write true"),
        ("No", "write false"),
        ("null", "remove the key"),
        ("", "has no value"),
        ("2024-01-01", "is a date to YAML"),
        ("!!int 5", "the tag !!int"),
        ("!python/object:os.system 5", "the tag !python/object:os.system"),
        ('"5"', "write 5 without quotes"),
        ("1e3", "found the text '1e3'"),
        ("99999999999999999999", "larger than 64 bits"),
    ],
)
def test_a_refused_scalar_says_what_to_write(tmp_path: Path, scalar: str, hint: str) -> None:
    (line,) = file_problems(tmp_path, f"{HEAD}reads: {{retries: {scalar}}}\n".replace("{retries: }", "\n  retries:"))
    assert hint in line


@pytest.mark.parametrize(
    "scalar", ["1e3", ".5", ".inf", ".nan", "1_0", "1:30", '"60"', "true", "-1", "0", "0.0", "60s", "31536001"]
)
def test_seconds_are_plain_positive_decimals(tmp_path: Path, scalar: str) -> None:
    (line,) = file_problems(tmp_path, f"{HEAD}agreement: {{timeout_s: {scalar}}}\n")
    assert line.startswith("3: agreement.timeout_s: ")


@pytest.mark.parametrize("scalar", ["yes", "no", "on", "off", "True", "FALSE", "1", "0", '"true"', "null", "y"])
def test_booleans_are_true_and_false_only(tmp_path: Path, scalar: str) -> None:
    (line,) = file_problems(tmp_path, f"checkpoint: {{path: /m}}\nloads: {{target: {{raw_dtypes: {scalar}}}}}\n")
    assert line.startswith("2: loads.target.raw_dtypes: ")


@pytest.mark.parametrize("scalar", ["010", "5", "1.5", "on", "2024-01-01", "true", "null", "[a]"])
def test_text_that_yaml_reads_as_something_else_needs_quotes(tmp_path: Path, scalar: str) -> None:
    (line,) = file_problems(
        tmp_path, f"checkpoint: {{path: {scalar}}}\nloads: {{target: {{}}}}\n".replace("[a]", "[[a]]")
    )
    assert line.startswith("1: checkpoint.path")


def test_plain_values_are_read_as_written(tmp_path: Path) -> None:
    text = """
checkpoint: {path: "/m/010", index: ignore}
mesh: {"on": 2, "1": 3}
loads:
  "010": {raw_dtypes: true, skip: ['1', "a\\u00e9", plain.*]}
reads: {retries: 0, stuck_after_s: 0.5, threads: auto, chunk_bytes: 1.5MiB}
agreement: {timeout_s: 7}
"""
    config = load_config(write(tmp_path, text))
    assert config.checkpoint is not None
    assert (config.checkpoint.path, config.checkpoint.index) == ("/m/010", "ignore")
    assert list((config.mesh or {}).items()) == [("on", 2), ("1", 3)]
    assert config.loads["010"].raw_dtypes is True
    assert config.loads["010"].skip == ("1", "aé", "plain.*")
    assert (config.reads.retries, config.reads.stuck_after_s, config.reads.chunk_bytes) == (0, 0.5, 3 << 19)
    assert config.agreement.timeout_s == 7.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reads: {retries: 1}\nreads: {retries: 2}\n", "4: reads: the key is given twice, first in line 3"),
        (
            "reads:\n  retries: 1\n  threads: 2\n  retries: 1\n",
            "6: reads.retries: the key is given twice, first in line 4",
        ),
        ("reads: {retries: 1, 'retries': 2}\n", "3: reads.retries: the key is given twice"),
        ("reads:\n  <<: {retries: 1}\n", "4: reads: has a merge key (<<)"),
        ("reads:\n  1: 2\n", "4: reads: has the key 1, which YAML does not read as text; put it in quotes"),
        ("reads:\n  on: 2\n", "4: reads: has the key on, "),
        ("reads:\n  null: 2\n", "4: reads: has the key null, "),
        ("reads:\n  ?\n  : 2\n", "4: reads: has the key (nothing), "),
        ("reads:\n  2024-01-01: 2\n", "4: reads: has the key 2024-01-01, "),
        ("reads:\n  ? [a]\n  : 2\n", "4: reads: has a list as a key"),
        ("reads:\n  ? {a: 1}\n  : 2\n", "4: reads: has a mapping as a key"),
        ("reads:\n  !!str retries: 2\n", "4: reads: has a key with a tag"),
        ("reads: !custom {retries: 2}\n", "3: reads: carries the tag !custom"),
        (
            "reads: !!python/object/apply:os.system ['true']\n",
            "3: reads: carries the tag !!python/object/apply:os.system",
        ),
    ],
    ids=lambda value: value.split(": ", 1)[1][:40] if value[0].isdigit() else None,
)
def test_keys_are_text_given_once_and_untagged(tmp_path: Path, text: str, expected: str) -> None:
    (line,) = file_problems(tmp_path, HEAD + text)
    assert line.startswith(expected)


def test_aliases_repeat_what_their_anchor_holds(tmp_path: Path) -> None:
    text = """
checkpoint: {path: /m}
mesh: {tp: 2}
loads:
  target:
    rules: &common
      - {match: "*.q.weight", split: {axis: tp, dim: 0}}
  draft: {key_prefixes: [mtp.0.], rules: *common}
"""
    config = load_config(write(tmp_path, text))
    assert config.loads["draft"].rules == config.loads["target"].rules
    assert len(config.loads["draft"].rules) == 1


def test_a_problem_under_an_alias_is_placed_where_the_text_stands(tmp_path: Path) -> None:
    text = "checkpoint: {path: /m}\nloads:\n  a:\n    skip: &s\n      - 5\n  b: {skip: *s}\n"
    assert [line.split(": ")[:2] for line in file_problems(tmp_path, text)] == [
        ["5", "loads.a.skip[0]"],
        ["5", "loads.b.skip[0]"],
    ]


@pytest.mark.parametrize("text", ["a: &a [*a, *a]\n", "a: &a {b: *a, c: *a}\n", "a: &a [[*a], {c: *a}]\n"])
def test_an_alias_within_its_own_anchor_is_refused_once_for_each_place(tmp_path: Path, text: str) -> None:
    lines = file_problems(tmp_path, HEAD + text)
    assert sum("is an alias of something that it is a part of" in line for line in lines) == 2


def test_aliases_of_aliases_end_in_a_bounded_error(tmp_path: Path) -> None:
    names = "abcdefghijklmnopqrst"
    doubling = [f"{name}: &{name} [*{last}, *{last}]\n" for last, name in pairwise(names)]
    lines = file_problems(tmp_path, HEAD + "a: &a [1]\n" + "".join(doubling))
    assert any("aliases multiply" in line for line in lines)
    assert len(lines) == 1 + len(names)  # each name is also an unknown key


def test_no_more_than_a_hundred_problems_are_written_out(tmp_path: Path) -> None:
    wrong = "".join(f"wrong{number}: 1\n" for number in range(150))
    lines = file_problems(tmp_path, HEAD + wrong)
    assert lines[:2] == [f"{3 + n}: wrong{n}: {lines[n].split(': ', 2)[2]}" for n in range(2)]
    assert lines[100:] == ["and 50 more problems"]


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("loads: {t: {rules: [{match: *.experts.*}]}}\n", 1, "write what begins with * or & in quotes"),
        ("loads: {target: {}\nreads: {}\n", 2, "check the indentation, brackets and quotes"),
        ("loads:\n  target: {}\n reads: {}\n", 3, "check the indentation"),
        ("loads:\n\ttarget: {}\n", 2, "indent with spaces"),
        ('loads: {t: {rules: [{match: "*", assign: {axis: w, index: "a\\.(\\d+)"}}]}}\n', 1, "in single quotes"),
        ("loads: {t: {}}\n---\nloads: {t: {}}\n", 2, "write one document"),
        ("loads: *nowhere\n", 1, "undefined alias"),
        ("loads: {t: {}}\nreads: '\n", 3, "check the indentation, brackets and quotes"),
        ("loads: {}\nreads: \x00\n", 2, "control character"),
        ("loads: {}\nreads: %5\n", 2, "check"),
    ],
    ids=["glob", "bracket", "indentation", "tab", "backslash", "documents", "alias", "quote", "zero-byte", "percent"],
)
def test_text_that_is_no_yaml_is_refused_with_line_and_hint(tmp_path: Path, text: str, line: int, hint: str) -> None:
    (problem,) = file_problems(tmp_path, text)
    assert problem.startswith(f"{line}: is not valid YAML: ")
    assert hint in problem


@pytest.mark.parametrize(
    "text", ["[" * 3000, "a: " + "{b: " * 3000, "a: " + "[" * 200 + "]" * 200], ids=["lists", "maps", "200"]
)
def test_deep_nesting_is_an_error_and_no_crash(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=r"nested|valid YAML") as caught:
        load_config(file)
    assert caught.value.path == str(file)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing here\n", "\ufeff"], ids=["empty", "blank", "comment", "bom"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match="is empty; write at least"):
        load_config(file)


@pytest.mark.parametrize("text", ["just text", "- a\n- b\n", "5"], ids=["text", "list", "number"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (line,) = file_problems(tmp_path, text)
    assert line.startswith("1: must be a mapping with keys of checkpoint, mesh, loads, ")


def test_a_byte_order_mark_before_the_text_does_no_harm(tmp_path: Path) -> None:
    assert list(load_config(write(tmp_path, "\ufeff" + HEAD)).loads) == ["target"]
