"""The JSON schema accepts what the loader accepts, and points at the common mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from loader_service.config.json_schema import json_schema
from tests.config.making import accepted, minimal, problems, with_rules

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def fits(value: object, schema: object, root: dict[str, object]) -> bool:
    """A small validator of the keywords that the schema uses; an unknown keyword fails the test."""
    assert isinstance(schema, dict)
    return all(_KEYWORDS[keyword](value, wanted, schema, root) for keyword, wanted in schema.items())


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": _number,
}


def _properties(value: Any, wanted: Any, schema: Any, root: Any) -> bool:
    return not isinstance(value, dict) or all(fits(value[k], s, root) for k, s in wanted.items() if k in value)


def _additional(value: Any, wanted: Any, schema: Any, root: Any) -> bool:
    others = (
        {k: v for k, v in value.items() if k not in schema.get("properties", {})} if isinstance(value, dict) else {}
    )
    return not others if wanted is False else all(fits(v, wanted, root) for v in others.values())


def _reference(value: Any, wanted: Any, schema: Any, root: Any) -> bool:
    return fits(value, root["$defs"][wanted.removeprefix("#/$defs/")], root)


_KEYWORDS: dict[str, Callable[[Any, Any, Any, Any], bool]] = {
    **dict.fromkeys(("$schema", "$defs", "title", "description", "default"), lambda v, w, s, r: True),
    "$ref": _reference,
    "type": lambda v, w, s, r: _TYPES[w](v),
    "properties": _properties,
    "additionalProperties": _additional,
    "required": lambda v, w, s, r: not isinstance(v, dict) or all(k in v for k in w),
    "minProperties": lambda v, w, s, r: not isinstance(v, dict) or len(v) >= w,
    "items": lambda v, w, s, r: not isinstance(v, list) or all(fits(i, w, r) for i in v),
    "minItems": lambda v, w, s, r: not isinstance(v, list) or len(v) >= w,
    "uniqueItems": lambda v, w, s, r: not isinstance(v, list) or len(set(map(repr, v))) == len(v),
    "minLength": lambda v, w, s, r: not isinstance(v, str) or len(v) >= w,
    "pattern": lambda v, w, s, r: not isinstance(v, str) or re.search(w, v) is not None,
    "minimum": lambda v, w, s, r: not _number(v) or v >= w,
    "maximum": lambda v, w, s, r: not _number(v) or v <= w,
    "exclusiveMinimum": lambda v, w, s, r: not _number(v) or v > w,
    "enum": lambda v, w, s, r: v in w,
    "const": lambda v, w, s, r: v == w and type(v) is type(w),
    "anyOf": lambda v, w, s, r: any(fits(v, each, r) for each in w),
    "not": lambda v, w, s, r: not fits(v, w, r),
}


def schema_accepts(data: object) -> bool:
    root = json_schema()
    return fits(data, root, root)


def test_it_is_a_draft_2020_12_schema_that_goes_through_json() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(schema)) == schema


def test_it_never_offers_null() -> None:
    assert "null" not in json.dumps(json_schema())


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_it_accepts_the_examples(file: Path) -> None:
    assert schema_accepts(yaml.safe_load(file.read_text(encoding="utf-8")))


SPLIT = {"match": "*", "split": {"axis": "world", "dim": 0}}


@pytest.mark.parametrize(
    "data",
    [
        minimal(),
        minimal(reads={"threads": 4, "chunk_bytes": "1.5MiB", "coalesce_gap_bytes": 0, "stuck_after_s": 0.5}),
        minimal(reads={"threads": "auto", "access": "direct", "sharing": "none", "drop_page_cache": "never"}),
        minimal(staging={"capacity_bytes": 4096, "pin": "required"}, cache={"capacity_bytes": 0}),
        minimal(memory={"reserve_bytes": "auto"}, agreement={"grace_s": 1}),
        minimal(memory={"reserve_bytes": 0}, reads={"drop_page_cache": "always"}),
        minimal(memory={"reserve_bytes": "2GiB"}),
        with_rules(
            {**SPLIT, "host_resident": {"layout": "shared"}}, {"match": "*", "host_resident": {"layout": "per_rank"}}
        ),
        minimal(checkpoint={"path": ["a", "b"], "index": "ignore"}),
        with_rules(SPLIT, {"match": "*", "split": {"axis": ["world"], "dim": 1, "sections": [2, 1], "units": [4, 4]}}),
        with_rules({"match": "*", "assign": {"axis": "world", "to": "all"}}),
        with_rules({"match": "*", "assign": {"axis": "world", "to": [0, -1]}}),
        with_rules({"match": "*", "split": {"axis": "world", "dim": 0, "sections": [1], "boundaries": [[0, 1]]}}),
    ],
)
def test_it_accepts_what_the_loader_accepts(data: dict[str, object]) -> None:
    accepted(data)
    assert schema_accepts(data)


@pytest.mark.parametrize(
    "data",
    [
        {},
        minimal(loads={}),
        minimal(mesh={}),
        minimal(mesh={"tp": 0}),
        minimal(threads=4),
        minimal(reads={"threads": "6"}),
        minimal(reads={"threads": 0}),
        minimal(reads={"threads": True}),
        minimal(reads={"chunk_bytes": "16 MiB"}),
        minimal(reads={"chunk_bytes": "1e9"}),
        minimal(reads={"chunk_bytes": 63}),
        minimal(reads={"chunk_bytes": 1.5}),
        minimal(reads={"access": "mapped"}),
        minimal(reads={"sharing": "node"}),
        minimal(reads={"drop_page_cache": "everything"}),
        minimal(reads={"drop_page_cache": True}),
        minimal(reads={"stuck_after_s": 0}),
        minimal(cache={"capacity_bytes": -1}),
        minimal(memory={"reserve_bytes": -5}),
        minimal(memory={"reserve_bytes": "none"}),
        minimal(memory={"reserve_bytes": 1.5}),
        minimal(loads={"t": {"skip": "a"}}),
        minimal(loads={"t": {"key_prefixes": []}}),
        minimal(loads={"t": {"raw_dtypes": "true"}}),
        with_rules({"split": {"axis": "world", "dim": 0}}),
        with_rules({"match": "*", "split": {"axis": "world"}}),
        with_rules({"match": "*", "split": {"axis": [], "dim": 0}}),
        with_rules({"match": "*", "split": {"axis": "world", "dim": -1}}),
        with_rules({"match": "*", "host_resident": {}}),
        with_rules({"match": "*", "host_resident": "shared"}),
        with_rules({"match": "*", "host_resident": {"layout": "sharde"}}),
        with_rules({"match": "*", "host_resident": {"layout": "shared", "pin": "auto"}}),
        with_rules({"match": "*", "assign": {"axis": "world", "to": -1}}),
        with_rules({"match": "*", "assign": {"axis": "world", "index": r"(\d+)", "how": "blocks"}}),
    ],
    ids=lambda data: str({k: v for k, v in data.items() if k != "checkpoint"})[:60],
)
def test_it_refuses_what_the_loader_refuses(data: dict[str, object]) -> None:
    assert problems(data)
    assert not schema_accepts(data)
