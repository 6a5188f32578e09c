"""Everything that is wrong is said at once, each with its line and key path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loader_service.config.schema import check_world_size
from loader_service.errors import ConfigError
from tests.config.making import accepted, file_problems, minimal, problems, with_rules

WRONG_EVERYWHERE = r"""
checkpoint:
  path: ../x
  index: advisry
mesh: {pp: 2, tp: 4}
threads: 4
loads:
  target:
    skip: "mtp.*"
    rules:
      - {match: "*", split: {axis: tq, dim: 010, align: 1}}
      - match: "*"
        split:
          axis: pt
          dim: 1
          align: 1
          pad_to: 3
      - {match: "a", assign: {axis: tp, to: [4]}}
      - match: "b"
        host_resident: {layout: sharde}
  draft:
    key_prefixes: []
    checkpoint:
  third: {skipp: []}
reads:
  threads: "6"
  acess: auto
  access: mapped
  threads: 5
staging: {capacity_bytes: 1e9, pin: true}
agreement: {timeout_s: .inf, <<: {}, 1: 2, grace_s: null}
"""


def test_all_problems_of_a_file_are_reported_in_its_order(tmp_path: Path) -> None:
    lines = file_problems(tmp_path, WRONG_EVERYWHERE)
    assert [tuple(line.split(": ")[:2]) for line in lines] == [
        ("4", "checkpoint.index"),
        ("6", "threads"),
        ("9", "loads.target.skip"),
        ("11", "loads.target.rules[0].split.dim"),
        ("11", "loads.target.rules[0].split.axis"),
        ("14", "loads.target.rules[1].split.axis"),
        ("17", "loads.target.rules[1].split.pad_to"),
        ("18", "loads.target.rules[2].assign.to[0]"),
        ("20", "loads.target.rules[3].host_resident.layout"),
        ("22", "loads.draft.key_prefixes"),
        ("23", "loads.draft.checkpoint"),
        ("24", "loads.third.skipp"),
        ("26", "reads.threads"),
        ("27", "reads.acess"),
        ("28", "reads.access"),
        ("29", "reads.threads"),
        ("30", "staging.capacity_bytes"),
        ("30", "staging.pin"),
        ("31", "agreement.timeout_s"),
        ("31", "agreement"),
        ("31", "agreement"),
        ("31", "agreement.grace_s"),
    ]


def test_each_line_says_what_to_write_instead(tmp_path: Path) -> None:
    for line in file_problems(tmp_path, WRONG_EVERYWHERE):
        assert re.search(
            r"; (write|remove|did you mean|keep|correct|put|`threads` belongs)|must be (one of|true)", line
        ), line


def test_a_dictionary_reports_the_same_without_file_and_line(tmp_path: Path) -> None:
    text = "checkpoint: {path: /m}\nmesh: {tp: 2}\nloads: {t: {skip: a}}\nreads: {threads: '6'}\ncache: 5\n"
    data = {
        "checkpoint": {"path": "/m"},
        "mesh": {"tp": 2},
        "loads": {"t": {"skip": "a"}},
        "reads": {"threads": "6"},
        "cache": 5,
    }
    assert [line.split(": ", 1)[1] for line in file_problems(tmp_path, text)] == problems(data)


def test_a_missing_key_is_reported_where_its_mapping_stands(tmp_path: Path) -> None:
    text = "loads:\n  target:\n    rules:\n      - split:\n          dim: 0\ncheckpoint:\n  index: ignore\n"
    assert [tuple(line.split(": ")[:2]) for line in file_problems(tmp_path, text)] == [
        ("4", "loads.target.rules[0].match"),
        ("4", "loads.target.rules[0].split.axis"),
        ("6", "checkpoint.path"),
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (minimal(threads=4), "threads: is unknown here; `threads` belongs under `reads`"),
        (minimal(capacity_bytes=4), "`capacity_bytes` belongs under `staging` or `cache`"),
        (minimal(timeout_s=4), "`timeout_s` belongs under `agreement`"),
        (minimal(reads={"pin": "auto"}), "reads.pin: is unknown here; `pin` belongs under `staging`"),
        (minimal(reads={"grace_s": 1}), "`grace_s` belongs under `agreement`"),
        (minimal(rules=[]), "rules: is unknown here; `rules` belongs under `loads.<name>`"),
        (minimal(path="/m"), "`path` belongs under `checkpoint` or `loads.<name>.checkpoint`"),
        (minimal(loads={"t": {"path": "/m"}}), "loads.t.path: is unknown here; `path` belongs under `checkpoint` or "),
        (minimal(loads={"t": {"mesh": {"tp": 2}}}), "loads.t.mesh: is unknown here; `mesh` belongs under `the top`"),
        (
            with_rules({"match": "*", "dim": 0}),
            "rules[0].dim: is unknown here; `dim` belongs under `loads.<name>.rules[N].split`",
        ),
        (minimal(lods={}), "lods: is an unknown key; did you mean 'loads'?"),
        (minimal(reads={"chunk-bytes": 1}), "reads.chunk-bytes: is an unknown key; did you mean 'chunk_bytes'?"),
        (minimal(reads={"Threads": 1}), "reads.Threads: is an unknown key; did you mean 'threads'?"),
        (minimal(chunk_byte=1), "chunk_byte: is an unknown key; did you mean 'reads.chunk_bytes'?"),
        (
            minimal(loads={"t": {"key_prefix": ["a"]}}),
            "loads.t.key_prefix: is an unknown key; did you mean 'key_prefixes'?",
        ),
        (minimal(staging={"zzz": 1}), "staging.zzz: is an unknown key; remove it, or write one of capacity_bytes, pin"),
        (minimal(coords={"tp": 0}), "coords: is no key of the file: each rank gives its own coordinates"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else None,
)
def test_an_unknown_key_is_named_with_what_was_probably_meant(data: dict[str, object], expected: str) -> None:
    lines = problems(data)
    assert any(expected in line for line in lines), lines


def test_a_misspelt_mesh_or_checkpoint_does_not_make_everything_else_wrong(tmp_path: Path) -> None:
    text = "chekpoint: {path: /m}\nmehs: {tp: 2}\nloads:\n  t:\n    rules: [{match: '*', split: {axis: tp, dim: 0}}]\n"
    assert file_problems(tmp_path, text) == [
        "1: chekpoint: is an unknown key; did you mean 'checkpoint'?",
        "2: mehs: is an unknown key; did you mean 'mesh'?",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("checkpoint: {path: /m}\nlods: {t: {}}\n", ["2: lods: is an unknown key; did you mean 'loads'?"]),
        (
            "checkpoint: {pth: /m}\nloads: {t: {}}\n",
            ["1: checkpoint.pth: is an unknown key; did you mean 'path'?"],
        ),
        (
            "loads:\n  t:\n    chekpoint: {path: /m}\n",
            ["3: loads.t.chekpoint: is an unknown key; did you mean 'checkpoint'?"],
        ),
        (
            "checkpoint: {path: /m}\nloads:\n  t:\n    rules:\n      - {mach: '*', assign: {axs: tp, to: all}}\n",
            [
                "5: loads.t.rules[0].assign.axs: is an unknown key; did you mean 'axis'?",
                "5: loads.t.rules[0].mach: is an unknown key; did you mean 'match'?",
            ],
        ),
    ],
    ids=["loads", "path", "a load's own checkpoint", "in a rule"],
)
def test_a_misspelt_key_is_not_missing_too(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert file_problems(tmp_path, text) == expected


def test_a_key_that_nothing_stands_for_is_missing_beside_one_that_is_misspelt(tmp_path: Path) -> None:
    text = "checkpoint: {indx: ignore, threads: 4}\nloads: {t: {}}\n"
    keys = [line.split(": ")[1] for line in file_problems(tmp_path, text)]
    assert sorted(keys) == ["checkpoint.indx", "checkpoint.path", "checkpoint.threads"]


def test_a_wrong_mesh_hides_no_other_problem_and_invents_none() -> None:
    lines = problems({**with_rules({"match": "*", "split": {"axis": "zz", "dim": 0}}), "mesh": {"tp": 0}, "cache": 5})
    assert [line.split(":")[0] for line in lines] == ["mesh.tp", "cache"]


def test_conflicts_with_the_mesh_are_reported_beside_other_errors() -> None:
    rule = {"match": "*", "split": {"axis": "zz", "dim": 0}}
    lines = problems(
        minimal(mesh={"tp": 2}, loads={"a": {"rules": [rule]}, "b": {"rules": [rule]}}, reads={"threads": 0})
    )
    assert [line.split(":")[0] for line in lines] == [
        "reads.threads",
        "loads.a.rules[0].split.axis",
        "loads.b.rules[0].split.axis",
    ]


def test_an_unknown_load_is_answered_with_those_that_exist() -> None:
    config = accepted(minimal(loads={"target": {}, "draft": {}}))
    for ask in (config.load, config.checkpoint_of):
        with pytest.raises(
            ConfigError, match="no load is named 'drafft'; the configuration has target, draft; did you mean 'draft'"
        ):
            ask("drafft")


@pytest.mark.parametrize(
    ("mesh", "world_size", "coords_given"),
    [(None, 7, False), ({"tp": 4}, 4, False), ({"pp": 2, "tp": 4}, 8, False), ({"tp": 4}, 3, True)],
)
def test_a_mesh_for_the_number_of_ranks_is_right(mesh: object, world_size: int, coords_given: bool) -> None:
    config = accepted(minimal() if mesh is None else minimal(mesh=mesh))
    check_world_size(config, world_size, coords_given)


@pytest.mark.parametrize("world_size", [1, 4, 7, 9, 16])
def test_a_mesh_for_another_number_of_ranks_is_refused(world_size: int) -> None:
    config = accepted(minimal(mesh={"pp": 2, "tp": 4}))
    expected = re.escape(
        f"mesh: {{pp: 2, tp: 4}} is for 8 ranks, but there are {world_size}; start (or plan for) 8 ranks, or change"
    )
    with pytest.raises(ConfigError, match=expected):
        check_world_size(config, world_size, coords_given=False)
