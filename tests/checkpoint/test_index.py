"""Reading the index: lenient about what does not matter, strict about what it decides."""

from __future__ import annotations

import json

import pytest

from loader_service.checkpoint.index import parse_index
from loader_service.errors import CheckpointError

MAP = {"a": "model-00001-of-00002.safetensors", "b\u00e9": "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"metadata": {"total_size": 12}, "weight_map": MAP}, indent=2, sort_keys=True) + "\n",
        json.dumps({"weight_map": MAP}),
        json.dumps({"weight_map": MAP}, separators=(",", ":"), ensure_ascii=False),
        json.dumps({"weight_map": MAP, "metadata": None, "other": [1.5e300, {"x": 1e-5}]}),
        json.dumps({"metadata": {"total_size": 5.0e11}, "weight_map": MAP}, indent=4),
        '{"metadata":{"a":1,"a":2},"weight_map":' + json.dumps(MAP) + "}",
        '{"n":' + "1" * 6000 + ',"weight_map":' + json.dumps(MAP) + "}",
    ],
    ids=["hub", "dumps", "compact", "other-keys", "indent-4", "double-key-elsewhere", "huge-integer-elsewhere"],
)
def test_indexes_as_writers_write_them(text: str) -> None:
    index = parse_index(text.encode(), "/c/model.safetensors.index.json")
    assert index.weight_map == MAP
    assert index.path == "/c/model.safetensors.index.json"


def test_an_empty_map_is_an_index() -> None:
    assert parse_index(b'{"weight_map":{}}', "x").weight_map == {}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b"{", "not JSON", id="cut-off"),
        pytest.param(b"\xff{}", "not JSON", id="not-utf-8"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", id="git-lfs-pointer"),
        pytest.param(b"<!DOCTYPE html><html>", "HTML", id="html"),
        pytest.param(bytes(100), "zero bytes", id="zeros"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep"),
        pytest.param(b"[]", "one object `weight_map`", id="list"),
        pytest.param(b"{}", "one object `weight_map`", id="no-map"),
        pytest.param(b'{"weight_map":null}', "one object `weight_map`", id="map-null"),
        pytest.param(b'{"weight_map":["a"]}', "one object `weight_map`", id="map-list"),
        pytest.param(b'{"weight_map":{},"weight_map":{}}', "one object `weight_map`", id="two-maps"),
        pytest.param(b'{"weight_map":{"a":1}}', "no file name", id="value-int"),
        pytest.param(b'{"weight_map":{"a":null}}', "no file name", id="value-null"),
        pytest.param(b'{"weight_map":{"a":""}}', "without a name", id="value-empty"),
        pytest.param(b'{"weight_map":{"a":"x","a":"y"}}', "twice, to 'x' and 'y'", id="key-twice"),
        pytest.param(b'{"weight_map":{"a":"x","a":"x"}}', "twice", id="key-twice-alike"),
    ],
)
def test_malformed_indexes_are_refused_by_name(raw: bytes, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_index(raw, "/c/model.safetensors.index.json")
    assert words in caught.value.message
    assert caught.value.path == "/c/model.safetensors.index.json"
    assert caught.value.message.startswith("/c/model.safetensors.index.json")
    assert "index: ignore" in caught.value.message
