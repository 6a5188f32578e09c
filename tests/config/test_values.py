"""Every key: what it takes, what it refuses, and its default."""

from __future__ import annotations

import enum
import math

import numpy as np
import pytest

from loader_service.config.schema import (
    AgreementConfig,
    CacheConfig,
    MemoryConfig,
    ReadsConfig,
    ServiceConfig,
    StagingConfig,
)
from tests.config.making import accepted, minimal, problems


def test_defaults_are_those_of_the_contract() -> None:
    config = accepted(minimal())
    assert config.checkpoint is not None
    assert config.checkpoint.index == "advisory"
    assert config.mesh is None
    assert config.loads["target"].model_dump() == {
        "checkpoint": None,
        "skip": (),
        "key_prefixes": None,
        "on_no_match": "error",
        "rules": (),
        "raw_dtypes": False,
    }
    assert config.reads == ReadsConfig(
        threads="auto",
        threads_per_node=16,
        chunk_bytes=16 << 20,
        coalesce_gap_bytes=256 << 10,
        access="auto",
        sharing="auto",
        drop_page_cache="auto",
        retries=3,
        stuck_after_s=300.0,
    )
    assert config.staging == StagingConfig(capacity_bytes=1 << 30, pin="auto")
    assert config.agreement == AgreementConfig(timeout_s=60.0, start_timeout_s=600.0, grace_s=10.0)
    assert config.cache == CacheConfig(capacity_bytes=0)
    assert config.memory == MemoryConfig(reserve_bytes="auto")


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("reads", "threads", 1, 1),
        ("reads", "threads", 1024, 1024),
        ("reads", "threads", "auto", "auto"),
        ("reads", "threads_per_node", 4, 4),
        ("reads", "drop_page_cache", "always", "always"),
        ("memory", "reserve_bytes", 0, 0),
        ("memory", "reserve_bytes", "2GiB", 2 << 30),
        ("memory", "reserve_bytes", "auto", "auto"),
        ("reads", "chunk_bytes", "64B", 64),
        ("reads", "chunk_bytes", "64MB", 64_000_000),
        ("reads", "coalesce_gap_bytes", 0, 0),
        ("reads", "access", "buffered", "buffered"),
        ("reads", "access", "direct", "direct"),
        ("reads", "sharing", "none", "none"),
        ("reads", "sharing", "page_cache", "page_cache"),
        ("reads", "sharing", "staging", "staging"),
        ("cache", "capacity_bytes", "8GiB", 8 << 30),
        ("reads", "drop_page_cache", "never", "never"),
        ("reads", "retries", 0, 0),
        ("reads", "stuck_after_s", 1, 1.0),
        ("staging", "capacity_bytes", 4096, 4096),
        ("staging", "capacity_bytes", "4KiB", 4096),
        ("staging", "pin", "required", "required"),
        ("staging", "pin", "never", "never"),
        ("agreement", "timeout_s", 0.5, 0.5),
        ("agreement", "grace_s", 31_536_000, 31_536_000.0),
        ("cache", "capacity_bytes", 0, 0),
        ("cache", "capacity_bytes", "0B", 0),
    ],
)
def test_a_right_value_arrives_as_it_is_meant(section: str, key: str, value: object, expected: object) -> None:
    found = getattr(getattr(accepted(minimal(**{section: {key: value}})), section), key)
    assert found == expected
    assert type(found) is type(expected)


NOT_WHOLE = ["6", True, False, 1.0, 1.5, [], {}, "", 2**63, 10**30]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        *(("reads", "threads", value) for value in [*NOT_WHOLE, 0, -1, 1025, "Auto", "all"]),
        *(("reads", "threads_per_node", value) for value in [*NOT_WHOLE, 0, -1, 1025, "auto"]),
        *(("reads", "retries", value) for value in [*NOT_WHOLE, -1, 101]),
        *(
            ("reads", "chunk_bytes", value)
            for value in [0, 63, "63B", -1, True, 1e9, "1e9", "16 MiB", "16mib", "auto", []]
        ),
        *(("reads", "coalesce_gap_bytes", value) for value in [-1, False, "256K", 0.5]),
        *(("staging", "capacity_bytes", value) for value in [0, 4095, "1KiB", True, 1.0, "1Gib", "auto"]),
        *(("reads", "stuck_after_s", value) for value in [0, 0.0, -1, True, "300", "5min", [], 31_536_001]),
        *(("agreement", "timeout_s", value) for value in [0, -0.5, False, "60", math.inf, math.nan]),
        *(("agreement", "start_timeout_s", value) for value in [0, True, "auto"]),
        *(("agreement", "grace_s", value) for value in [0, "10"]),
        *(("reads", "access", value) for value in ["AUTO", "mmap", "", True, 1, ["auto"]]),
        *(("reads", "sharing", value) for value in ["nothing", False]),
        *(("reads", "drop_page_cache", value) for value in [True, "yes", "everything"]),
        *(("staging", "pin", value) for value in [True, "always"]),
        *(("cache", "capacity_bytes", value) for value in [True, "off", -1, 0.0]),
        *(("memory", "reserve_bytes", value) for value in ["10%", "none", True, -1, 0.5, None, "-1GiB"]),
    ],
)
def test_a_wrong_value_is_refused_at_its_key(section: str, key: str, value: object) -> None:
    (line,) = problems(minimal(**{section: {key: value}}))
    assert line.startswith(f"{section}.{key}")


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ({"reads": 5}, "reads: must be a mapping with keys of threads, threads_per_node, "),
        ({"staging": ["1GiB"]}, "staging: must be a mapping with keys of capacity_bytes, pin, found a list"),
        (
            {"checkpoint": "/models/m"},
            "checkpoint: must be a mapping with keys of path, index, found the text '/models/m'",
        ),
        ({"checkpoint": {}}, "checkpoint.path: is missing; add it: A folder, one file, or a list of safetensors files"),
        ({"checkpoint": {"path": ""}}, "checkpoint.path: is empty text"),
        ({"checkpoint": {"path": 5}}, "checkpoint.path: must be text, found the number 5"),
        ({"checkpoint": {"path": []}}, "checkpoint.path: is an empty list"),
        ({"checkpoint": {"path": ["/a", 5]}}, "checkpoint.path[1]: must be text"),
        ({"checkpoint": {"path": ["/a/b", "/a/c/../b"]}}, "checkpoint.path[1]: the file /a/b is listed twice"),
        ({"checkpoint": {"path": "/a\0b"}}, "checkpoint.path: the path '/a\\x00b' contains a zero byte"),
        ({"checkpoint": {"path": "/m", "index": "off"}}, "checkpoint.index: must be one of advisory, ignore"),
        ({"mesh": {}}, "mesh: is an empty mapping"),
        ({"mesh": ["tp"]}, "mesh: must be a mapping of axis names to sizes, found a list"),
        ({"mesh": 8}, "mesh: must be a mapping of axis names to sizes, found the number 8"),
        ({"mesh": {"tp": 0}}, "mesh.tp: must be a whole number of at least 1, found the number 0"),
        ({"mesh": {"tp": -2}}, "mesh.tp: must be a whole number of at least 1"),
        (
            {"mesh": {"tp": "8"}},
            "mesh.tp: must be a whole number of at least 1, found the text '8'; write 8 without quotes",
        ),
        ({"mesh": {"tp": True}}, "mesh.tp: must be a whole number of at least 1, found true"),
        ({"mesh": {"": 2}}, "mesh.: is empty text"),
        ({"loads": {}}, "loads: has no load"),
        ({"loads": ["target"]}, "loads: must be a mapping of names to loads, found a list"),
        ({"loads": {"target": "all"}}, "loads.target: must be a mapping with keys of checkpoint, skip, "),
        ({"loads": {"": {}}}, "loads.: a load needs a name"),
        (
            {"loads": {"t": {"skip": "mtp.*"}}},
            "loads.t.skip: must be a list of globs, found the text 'mtp.*'; write ['mtp.*']",
        ),
        ({"loads": {"t": {"skip": {"a": 1}}}}, "loads.t.skip: must be a list of globs, found a mapping"),
        ({"loads": {"t": {"skip": ["a", ""]}}}, "loads.t.skip[1]: is empty text"),
        ({"loads": {"t": {"skip": [7]}}}, "loads.t.skip[0]: must be text, found the number 7"),
        (
            {"loads": {"t": {"key_prefixes": "mtp.0."}}},
            "loads.t.key_prefixes: must be a list of key prefixes, found the text 'mtp.0.'; write ['mtp.0.']",
        ),
        ({"loads": {"t": {"key_prefixes": []}}}, "loads.t.key_prefixes: is an empty list"),
        ({"loads": {"t": {"key_prefixes": ["mtp.0", ""]}}}, "loads.t.key_prefixes[1]: is empty text"),
        ({"loads": {"t": {"key_prefixes": ["."]}}}, "loads.t.key_prefixes[0]: must name at least one segment"),
        ({"loads": {"t": {"key_prefixes": ["mtp.*"]}}}, "loads.t.key_prefixes[0]: is a prefix, not a glob"),
        ({"loads": {"t": {"key_prefixes": True}}}, "loads.t.key_prefixes: must be a list of key prefixes, found true"),
        ({"loads": {"t": {"on_no_match": "read-all"}}}, "loads.t.on_no_match: must be one of error, read_all"),
        ({"loads": {"t": {"raw_dtypes": 1}}}, "loads.t.raw_dtypes: must be true or false, found the number 1"),
        ({"loads": {"t": {"raw_dtypes": "true"}}}, "loads.t.raw_dtypes: must be true or false"),
        ({"loads": {"t": {"rules": {"match": "*"}}}}, "loads.t.rules: must be a list of rules, found a mapping"),
        ({"loads": {"t": {"rules": ["*"]}}}, "loads.t.rules[0]: must be a mapping with keys of match, assign, "),
    ],
    ids=lambda value: value.split(": must")[0][:40] if isinstance(value, str) else None,
)
def test_a_wrong_shape_is_refused_at_its_key_path(top: dict[str, object], expected: str) -> None:
    (line,) = problems({**minimal(), **top})
    assert line.startswith(expected)


@pytest.mark.parametrize("top", [{}, {"checkpoint": {"path": "/m"}}], ids=["nothing", "checkpoint"])
def test_loads_are_required(top: dict[str, object]) -> None:
    assert problems(top) == ["loads: is missing; add it: The loads by their names, which are free. At least one."]


class _Text(str):
    pass


class _Number(enum.IntEnum):
    SIX = 6


@pytest.mark.parametrize(
    "value",
    [
        np.int64(6),
        np.float64(6.0),
        np.bool_(True),
        np.array([6]),
        _Text("auto"),
        _Number.SIX,
        b"auto",
        6j,
        {6},
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_dictionary_takes_plain_python_values_only(value: object) -> None:
    (line,) = problems(minimal(reads={"threads": value}))
    assert line.startswith("reads.threads: must be str, int, float, bool, list, tuple or dict, found ")


def test_none_in_a_dictionary_is_refused() -> None:
    assert problems(minimal(mesh=None)) == ["mesh: has no value (None); remove the key, or write a value"]


@pytest.mark.parametrize("key", [1, None, True, ("a",), _Text("retries")], ids=repr)
def test_keys_of_a_dictionary_are_text(key: object) -> None:
    (line,) = problems(minimal(reads={key: 1}))
    assert line.startswith(f"reads: has the key {key!r}, which is no text")


@pytest.mark.parametrize("data", [None, [], "text", 5], ids=repr)
def test_a_dictionary_is_wanted(data: object) -> None:
    assert len(problems(data)) == 1


def test_a_dictionary_that_contains_itself_ends_in_an_error() -> None:
    data = minimal()
    data["loads"] = data
    assert any("is nested deeper than" in line for line in problems(data))


def test_tuples_and_lists_mean_the_same() -> None:
    rule = {"match": "a", "split": {"axis": ["x", "y"], "dim": 0, "boundaries": [0, 1, 2, 3, 4]}}
    tupled = {"match": "a", "split": {"axis": ("x", "y"), "dim": 0, "boundaries": (0, 1, 2, 3, 4)}}
    lists = accepted(minimal(mesh={"x": 2, "y": 2}, loads={"t": {"skip": ["a"], "rules": [rule]}}))
    assert lists == accepted(minimal(mesh={"x": 2, "y": 2}, loads={"t": {"skip": ("a",), "rules": (tupled,)}}))


def test_a_configuration_is_frozen() -> None:
    config = accepted(minimal())
    with pytest.raises(ValueError, match="frozen"):
        config.reads = ReadsConfig()  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.reads.retries = 1  # type: ignore[misc]


def test_a_configuration_survives_its_own_dump() -> None:
    rules = [{"match": "*", "assign": {"axis": "tp", "to": [0, -1]}}, {"match": "*", "split": {"axis": "pp", "dim": 1}}]
    config = accepted(minimal(mesh={"tp": 2, "pp": 2}, loads={"t": {"rules": rules, "key_prefixes": ["mtp.0"]}}))
    assert ServiceConfig.model_validate_json(config.model_dump_json(exclude_none=True)) == config
