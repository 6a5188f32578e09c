"""Tables on the command line: rows are read, compared and hashed like everything else, and planned with it."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import loader_service as ls
from loader_service.cli import app, host_rows
from loader_service.cli.host_rows import pieces
from loader_service.cli.plans import plan_of
from loader_service.filling import TensorSpec
from loader_service.planning.tables import HostMemory
from loader_service.sizes import format_size
from tests.cli.support import Fault, payload_fault, start_ranks
from tests.e2e.seats import make_seats
from tests.support.checkpoints import Checkpoint
from tests.tables.making import (
    DEEP,
    EMPTY,
    LAYOUTS,
    ROWS,
    SCALE,
    TABLES,
    WEIGHT,
    assert_rows,
    bytes_of,
    config_of,
    place_of,
    rows_range,
    rules,
    service_of,
    shares,
)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def write_config(folder: Path, checkpoint: Checkpoint, layout: str, ranks: int) -> Path:
    path = folder / "config.yaml"
    document = {
        "checkpoint": {"path": str(checkpoint.folder)},
        "mesh": {"tp": ranks},
        "loads": {"target": rules(layout)},
        "agreement": {"timeout_s": 20, "start_timeout_s": 60, "grace_s": 5},
    }
    path.write_text(yaml.safe_dump(document))
    return path


def check_manifest(found: dict[str, Any], checkpoint: Checkpoint, rows: tuple[int, int]) -> None:
    assert found.keys() == checkpoint.tensors.keys()
    for name, (code, shape, _) in checkpoint.tensors.items():
        whole = checkpoint.tensor(name)
        own = whole[rows[0] : rows[1]] if name in TABLES and name != EMPTY else whole
        held = [own.shape[0], *shape[1:]] if shape else []
        expected = {"dtype": code, "shape": held, "sha256": hashlib.sha256(bytes_of(own)).hexdigest()}
        assert found[name] == expected, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_verifies_hashes_and_counts_rows_like_the_rest(
    checkpoint: Checkpoint,
    tmp_path: Path,
    layout: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loader_service.cli.load.pieces", partial(pieces, piece_bytes=500))
    config, out = write_config(tmp_path, checkpoint, layout, 1), tmp_path / "manifest.json"
    assert app.run(["load", str(config), "--load", "target", "--verify", "--manifest", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"] is True
    assert report["tensors"] == len(checkpoint.tensors)
    assert report["payload_bytes"] == report["read_bytes"] == checkpoint.payload_bytes
    assert report["files_read"] == sorted(set(checkpoint.shard_of.values()))
    assert report["policies"][f"tables_{layout}"]["requested"] == "auto"
    check_manifest(json.loads(out.read_text()), checkpoint, (0, ROWS))


@pytest.mark.processes
def test_each_rank_verifies_and_hashes_its_own_rows(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config, out = write_config(tmp_path, checkpoint, "shared", 2), tmp_path / "m.json"
    command = ["load", str(config), "--load", "target", "--verify", "--json", "--manifest", str(out)]
    ended = [rank.end() for rank in start_ranks([command] * 2, tmp_path)]
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    reports = ended[0].document["ranks"]
    for rank, report in enumerate(reports):
        assert report["verified"] is True
        check_manifest(json.loads((tmp_path / f"m.rank{rank}.json").read_text()), checkpoint, shares("equal", 2)[rank])


def test_rows_that_differ_from_safetensors_own_reading_are_found(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, checkpoint, "per_rank", 1)
    with payload_fault(Fault("flips a bit")):
        assert app.run(["load", str(config), "--load", "target", "--verify", "--json"]) == 3
    record = json.loads(capsys.readouterr().out)
    assert (record["error"], record["tensor"]) == ("CheckpointError", WEIGHT)
    assert "is not what safetensors reads" in record["message"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_counts_each_ranks_rows(
    checkpoint: Checkpoint, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, checkpoint, layout, 3)
    assert app.run(["plan", str(config), "--load", "target", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    rest = sum(len(data) for name, (_, _, data) in checkpoint.tensors.items() if name not in TABLES)
    for rank, planned in enumerate(plan["ranks"]):
        start, stop = shares("equal", 3)[rank]
        assert planned["payload_bytes"] == (stop - start) * (96 + 3 + 40) + rest
        ranges = {file["path"]: file["ranges"] for file in planned["files"]}
        assert sum(last - first for own in ranges.values() for first, last in own) == planned["read_bytes"]
        assert planned["read_bytes"] == planned["payload_bytes"]
        for name in (WEIGHT, SCALE, DEEP):
            first, last = rows_range(checkpoint, name, (start, stop))
            path = place_of(checkpoint, name)[0]
            assert any(a <= first and last <= b for a, b in ranges[path]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_shows_each_ranks_tables_and_the_host_memory_that_they_take(
    checkpoint: Checkpoint, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, checkpoint, layout, 3)
    assert app.run(["plan", str(config), "--load", "target", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    row_bytes = {WEIGHT: 96, SCALE: 3, DEEP: 40}
    for rank, planned in enumerate(plan["ranks"]):
        start, stop = shares("equal", 3)[rank]
        expected = {name: {"rows": [start, stop], "bytes": (stop - start) * row_bytes[name]} for name in row_bytes}
        expected[EMPTY] = {"rows": [0, 0], "bytes": 0}
        found = {table.pop("name"): table for table in planned["tables"]}
        assert list(found) == [WEIGHT, SCALE, EMPTY, DEEP]
        assert found == {name: {**facts, "layout": layout} for name, facts in expected.items()}
    whole = ROWS * 139
    shared = layout == "shared"
    assert plan["host_memory"] == {
        "rank_bytes": 0 if shared else 13 * 139,
        "shared_bytes": whole if shared else 0,
        "one_node_bytes": whole,
    }
    assert app.run(["plan", str(config), "--load", "target"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [" ".join(line.split()[1:]) for line in lines if line.split()[:1] == ["2"] and "engram" in line]
    rows = {name: f"24:37 {format_size(13 * row_bytes[name])}" for name in row_bytes} | {EMPTY: f"0:0 {format_size(0)}"}
    assert shown == [f"{name} {layout} {rows[name]}" for name in (WEIGHT, SCALE, EMPTY, DEEP)]
    own, node = (format_size(number) for number in ((0, whole) if shared else (13 * 139, 0)))
    assert (
        f"Host memory of tables: at most {own} a rank for its own rows (per_rank), {node} a node for whole tables "
        f"(shared); {format_size(whole)} with all ranks on one node." in lines
    )


def test_tables_that_replicas_hold_are_counted_for_each_or_once(checkpoint: Checkpoint) -> None:
    both = {
        "rules": [
            {"match": WEIGHT, "host_resident": {"layout": "per_rank"}, "split": {"axis": "tp", "dim": 0}},
            {"match": DEEP, "host_resident": {"layout": "shared"}, "assign": {"axis": "tp", "to": [1]}},
        ]
    }
    plan = plan_of(config_of(checkpoint, both, 4, mesh={"dp": 2, "tp": 2}), "target", None)
    assert [[part.name for part in plan.tables_of(rank)] for rank in range(4)] == [[WEIGHT], [WEIGHT, DEEP]] * 2
    weight, deep = ROWS * 96, ROWS * 40
    assert plan.host_memory == HostMemory(19 * 96, deep, 2 * weight + deep)


def test_inspect_shows_tables_as_the_tensors_that_they_are(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["inspect", str(checkpoint.folder), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["tensors"] == len(checkpoint.tensors)
    assert described["dtypes"]["F8_E8M0"] == {"tensors": 1, "bytes": ROWS * 3}
    assert described["namespaces"]["engram"]["tensors"] == len(TABLES)


async def test_no_rows_of_any_size_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise AssertionError

    monkeypatch.setattr(host_rows, "allocate_host", refuse)
    shape = (0, 1 << 40)
    spec = TensorSpec(
        shape, shape, torch.uint8, (((slice(0, 0), slice(0, 1 << 40)), (slice(0, 0), slice(0, 1 << 40))),)
    )
    with ls.RowSource(tmp_path / "none", 0, shape, "U8") as source:
        ((rows, own),) = [piece async for piece in pieces("t", source, spec)]
    assert (rows.shape, own) == (shape, spec)


@pytest.mark.parametrize("piece_bytes", [1, 96, 100, 500, 1 << 20])
async def test_rows_come_in_pieces_that_one_memory_holds(checkpoint: Checkpoint, piece_bytes: int) -> None:
    (seat,) = make_seats(1)
    async with service_of(seat, config_of(checkpoint, rules("per_rank"), 1)) as service, service.open("target") as load:
        for name in TABLES:
            source, spec = load.tables[name], load.spec(name)
            row_bytes = max(1, checkpoint.tensor(name).nbytes // max(1, len(checkpoint.tensor(name))))
            at, addresses = 0, set()
            async for rows, own in pieces(name, source, spec, piece_bytes=piece_bytes):
                ((source_index, mine),) = own.parts
                assert (source_index[0], mine[0]) == (slice(at, at + len(rows)), slice(0, len(rows)))
                assert len(rows) * row_bytes <= max(piece_bytes, row_bytes)
                assert_rows(rows, checkpoint, name, (at, at + len(rows)))
                addresses.add(rows.data_ptr() // 8192)
                at += len(rows)
            assert at == len(checkpoint.tensor(name))
            assert len(addresses) <= 2
    assert isinstance(source, ls.RowSource)
