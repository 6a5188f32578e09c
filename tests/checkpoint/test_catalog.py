"""The catalog: plan order, columns, the digest, lookups, and what ranks compare."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from loader_service.checkpoint import catalog as catalog_module
from loader_service.checkpoint import slices
from loader_service.checkpoint.catalog import build_catalog
from loader_service.errors import CheckpointError
from tests.checkpoint.building import bytes_of, catalog_of, shard_with_header
from tests.checkpoint.vectors import entry, file_of


def test_rows_stand_in_plan_order_whatever_the_order_of_arrival() -> None:
    scrambled = file_of(f'{{"late":{entry("U8", [2], 4, 6)},"early":{entry("F32", [1], 0, 4)}}}', 6)
    pairs = [
        shard_with_header("b.safetensors", scrambled),
        shard_with_header("a.safetensors", bytes_of(["z", "y"])),
        shard_with_header("B.safetensors", bytes_of(["x"])),
    ]
    for arrival in (pairs, pairs[::-1]):
        catalog = build_catalog(arrival, None)
        assert [shard.name for shard in catalog.shards] == ["B.safetensors", "a.safetensors", "b.safetensors"]
        assert catalog.names == ["x", "z", "y", "early", "late"]
        assert catalog.shard_ids.tolist() == [0, 1, 1, 2, 2]
        assert [catalog.dtype(i).code for i in range(5)] == ["U8", "U8", "U8", "F32", "U8"]
        assert catalog.shapes == [(4,), (4,), (4,), (1,), (2,)]
        base = [catalog.shards[i].header_bytes for i in catalog.shard_ids]
        assert (catalog.starts - base).tolist() == [0, 0, 4, 0, 4]
        assert (catalog.stops - base).tolist() == [4, 4, 8, 4, 6]
        assert len(catalog) == 5


def test_columns_have_fixed_types_and_are_read_only() -> None:
    for catalog in (catalog_of({"a.safetensors": ["x"]}), catalog_of({"a.safetensors": []}), build_catalog([], None)):
        columns = (catalog.shard_ids, catalog.dtype_ids, catalog.starts, catalog.stops)
        assert [str(column.dtype) for column in columns] == ["int32", "uint8", "int64", "int64"]
        assert not any(column.flags.writeable for column in columns)


def test_id_of_finds_every_row_and_nothing_else() -> None:
    catalog = catalog_of({"a.safetensors": ["x", "y"], "b.safetensors": ["z"]})
    assert [catalog.id_of(name) for name in ("x", "y", "z", "w", "")] == [0, 1, 2, None, None]
    assert build_catalog([], None).id_of("x") is None


def test_names_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (catalog_module, slices):
        monkeypatch.setattr(module, "hash", lambda name: len(name), raising=False)
    catalog = catalog_of({"a.safetensors": ["x", "long", "y"], "b.safetensors": ["z"]})
    assert [catalog.id_of(name) for name in ("x", "y", "z", "long", "w", "other")] == [0, 2, 3, 1, None, None]


def test_digest_depends_on_names_sizes_headers_and_decisions_only() -> None:
    one = catalog_of({"a.safetensors": ["x"], "b.safetensors": ["y"]})
    assert catalog_of({"b.safetensors": ["y"], "a.safetensors": ["x"]}, folder="/elsewhere").digest == one.digest
    later = build_catalog(
        [shard_with_header(n, bytes_of([t]), mtime_ns=9) for n, t in (("a.safetensors", "x"), ("b.safetensors", "y"))],
        None,
    )
    assert later.digest == one.digest
    others = [
        catalog_of({"a.safetensors": ["x"]}),
        catalog_of({"a.safetensors": ["x"], "c.safetensors": ["y"]}),
        catalog_of({"a.safetensors": ["x"], "b.safetensors": ["z"]}),
        catalog_of({"a.safetensors": ["y"], "b.safetensors": ["x"]}),
        catalog_of({"a.safetensors": ["x", "y"], "b.safetensors": []}),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == len(others) + 1


def test_digest_tells_which_copy_counts() -> None:
    shards = {"a.safetensors": ["x", "p"], "b.safetensors": ["x", "q"]}
    rest = {"p": "a.safetensors", "q": "b.safetensors"}
    first = catalog_of(shards, rest | {"x": "a.safetensors"})
    second = catalog_of(shards, rest | {"x": "b.safetensors"})
    assert first.digest != second.digest


def test_digest_does_not_change_for_an_index_that_decides_nothing() -> None:
    shards = {"a.safetensors": ["x"], "b.safetensors": ["y"]}
    assert catalog_of(shards).digest == catalog_of(shards, {"x": "a.safetensors", "y": "b.safetensors"}).digest


def test_two_files_of_one_name_are_refused() -> None:
    pairs = [
        shard_with_header("a.safetensors", bytes_of([name]), folder) for name, folder in (("x", "/1"), ("y", "/2"))
    ]
    with pytest.raises(CheckpointError, match="same file name"):
        build_catalog(pairs, None)


def test_summaries_are_plain_json_and_name_what_they_hold() -> None:
    catalog = catalog_of({"a.safetensors": ["x", "y"], "b.safetensors": ["z"]})
    summary = json.loads(json.dumps(catalog.summary()))
    assert [row[:3] for row in summary] == [[s.name, s.identity.size_bytes, s.header_sha256] for s in catalog.shards]
    assert summary[0][3] != summary[1][3]
    rows = json.loads(json.dumps(catalog.tensor_summary("a.safetensors")))
    base = catalog.shards[0].header_bytes
    assert rows == [["x", "U8", [4], base, base + 4], ["y", "U8", [4], base + 4, base + 8]]
    assert catalog.tensor_summary("b.safetensors")[0][0] == "z"
    assert catalog.tensor_summary("no-such-file") == []


def test_catalog_and_shards_are_frozen() -> None:
    catalog = catalog_of({"a.safetensors": ["x"]})
    with pytest.raises(dataclasses.FrozenInstanceError):
        catalog.digest = ""  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        catalog.shards[0].name = ""  # type: ignore[misc]


def test_every_byte_of_every_payload_belongs_to_exactly_one_row() -> None:
    catalog = catalog_of({f"{i}.safetensors": [f"{i}.{j}" for j in range(i)] for i in range(5)})
    for shard_id, shard in enumerate(catalog.shards):
        rows = np.flatnonzero(catalog.shard_ids == shard_id)
        edges = [shard.header_bytes, *catalog.stops[rows].tolist()]
        assert catalog.starts[rows].tolist() == edges[:-1]
        assert edges[-1] == shard.identity.size_bytes
