"""`load --against`: what goes by is checked against a checkpoint's manifest, and what cannot be is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import loader_service as ls
from loader_service.cli import app
from loader_service.cli.against import Against
from loader_service.cli.checkpoint_manifest import read_checkpoint_manifest
from loader_service.cli.host_rows import pieces
from loader_service.cli.plans import plan_of
from loader_service.filling import tensor_spec
from loader_service.reading.threads import ReadPool
from tests.cli.support import Fault, payload_fault, start_ranks
from tests.support.checkpoints import Checkpoint, write_checkpoint

Capture = pytest.CaptureFixture[str]

TENSORS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "a.safetensors": {
        "rows": ("BF16", (96, 128)),
        "columns": ("BF16", (96, 96)),
        "qkv": ("BF16", (192, 32)),
        "both": ("F32", (48, 48)),
        "uneven": ("F32", (101, 7)),
        "packed": ("F4", (8, 96)),
        "scale": ("F32", ()),
        "nothing": ("F32", (0, 4)),
        "experts": ("BF16", (4, 48, 24)),
    },
    "b.safetensors": {"table": ("F8_E4M3", (96, 12800)), "mtp.0.w": ("U8", (2 << 20,)), "mtp.1.w": ("U8", (9,))},
}
RULES: list[dict[str, object]] = [
    {"match": "rows", "split": {"axis": "tp", "dim": 0}},
    {"match": "columns", "split": {"axis": "tp", "dim": 1}},
    {"match": "packed", "split": {"axis": "tp", "dim": 1}},
    {"match": "experts", "split": {"axis": "tp", "dim": 2}},
    {"match": "qkv", "split": {"axis": "tp", "dim": 0, "sections": [4, 1, 1]}},
    {"match": "table", "host_resident": {"layout": "per_rank"}, "split": {"axis": "tp", "dim": 0}},
]
QUICK = {"timeout_s": 20, "start_timeout_s": 60, "grace_s": 0.5}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "c", TENSORS)


@pytest.fixture
def manifest(tmp_path: Path, checkpoint: Checkpoint, capsys: Capture) -> Path:
    out = tmp_path / "m.json"
    assert app.run(["manifest", str(checkpoint.folder), "--out", str(out)]) == 0
    capsys.readouterr()
    return out


def write_config(folder: Path, *, ranks: int = 1, rules: Sequence[object] = RULES, **load: object) -> Path:
    path = folder / "config.yaml"
    loads = {"all": {"rules": list(rules), **load}, "draft": {"key_prefixes": ["mtp"]}}
    mesh = {"tp": ranks}
    document = {"checkpoint": {"path": str(folder / "c")}, "mesh": mesh, "loads": loads, "agreement": QUICK}
    path.write_text(yaml.safe_dump(document))
    return path


def loaded(
    folder: Path, manifest: Path, capsys: Capture, *options: str, code: int = 0, load: str = "all"
) -> dict[str, Any]:
    config = folder / "config.yaml"
    args = ["load", str(config), "--load", load, "--against", str(manifest), "--json", *options]
    assert app.run(args) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def offset_of(checkpoint: Checkpoint, name: str) -> tuple[Path, int]:
    """The file of a tensor, and where its bytes begin there."""
    path = checkpoint.folder / checkpoint.shard_of[name]
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    start: int = json.loads(data[8:header])[name]["data_offsets"][0]
    return path, header + start


def overwrite(checkpoint: Checkpoint, name: str, at: int, change: Callable[[bytes], bytes], count: int = 1) -> int:
    """Changes bytes of a tensor; returns where in the file."""
    path, start = offset_of(checkpoint, name)
    with path.open("r+b") as file:
        file.seek(start + at)
        before = file.read(count)
        file.seek(start + at)
        file.write(change(before))
    assert change(before) != before
    return start + at


def flipped(before: bytes) -> bytes:
    return bytes([before[0] ^ 4]) + before[1:]


def zeroed(before: bytes) -> bytes:
    return bytes(len(before))


def said_range(message: str) -> tuple[int, int]:
    words = message.split("bytes ", 1)[1].split(" ")
    return int(words[0]), int(words[2])


@pytest.mark.parametrize("checksum", ["crc32", "sha256"])
def test_what_is_right_is_verified_and_all_of_it_counted_at_no_extra_read(
    checksum: str, tmp_path: Path, checkpoint: Checkpoint, manifest: Path, capsys: Capture
) -> None:
    write_config(tmp_path)
    found = loaded(tmp_path, manifest, capsys, "--checksum", checksum)
    assert (found["verified"], found["unchecked_bytes"]) == (True, 0)
    assert found["checked_bytes"] == found["payload_bytes"] == found["read_bytes"] == checkpoint.payload_bytes
    assert found["fallbacks"] == []


def test_without_it_nothing_is_counted(tmp_path: Path, checkpoint: Checkpoint, capsys: Capture) -> None:
    config = write_config(tmp_path)
    assert app.run(["load", str(config), "--load", "draft", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verified"], found["checked_bytes"], found["unchecked_bytes"]) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "checksum"),
    [
        *((name, "crc32") for held in TENSORS.values() for name, (_, shape) in held.items() if 0 not in shape),
        *((name, "sha256") for name in ("rows", "packed", "scale", "table")),
    ],
)
def test_a_flipped_bit_in_any_tensor_is_found_and_named(
    name: str, checksum: str, tmp_path: Path, checkpoint: Checkpoint, manifest: Path, capsys: Capture
) -> None:
    write_config(tmp_path)
    at = overwrite(checkpoint, name, len(checkpoint.tensors[name][2]) // 2, flipped)
    record = loaded(tmp_path, manifest, capsys, "--checksum", checksum, code=3)
    assert (record["error"], record["tensor"]) == ("CheckpointError", name)
    assert record["path"] == str(checkpoint.folder / checkpoint.shard_of[name])
    start, stop = said_range(record["message"])
    assert start <= at < stop
    assert ("SHA-256" if checksum == "sha256" else "CRC-32") in record["message"]


def test_a_page_that_was_zeroed_is_named(
    tmp_path: Path, checkpoint: Checkpoint, manifest: Path, capsys: Capture
) -> None:
    write_config(tmp_path)
    _, start = offset_of(checkpoint, "mtp.0.w")
    page = -start % 4096 + 4096
    at = overwrite(checkpoint, "mtp.0.w", page, zeroed, 4096)
    found = loaded(tmp_path, manifest, capsys, "--checksum", "sha256", code=3, load="draft")
    assert f"1 of its pages of 4096 bytes are zero, the first at byte {at} of the file" in found["message"]
    record = loaded(tmp_path, manifest, capsys, code=3, load="draft")
    first, last = said_range(record["message"])
    assert (record["tensor"], record["phase"]) == ("mtp.0.w", "read")
    assert first <= at < last <= first + (2 << 20) // 48 + 1
    overwrite(checkpoint, "mtp.0.w", 0, zeroed, len(checkpoint.tensors["mtp.0.w"][2]))
    assert "(all of them are zero)" in loaded(tmp_path, manifest, capsys, code=3, load="draft")["message"]


def test_what_is_damaged_on_its_way_is_found_too(
    tmp_path: Path, checkpoint: Checkpoint, manifest: Path, capsys: Capture
) -> None:
    write_config(tmp_path)
    with payload_fault(Fault("flips a bit")):
        assert loaded(tmp_path, manifest, capsys, code=3)["error"] == "CheckpointError"


def test_a_draft_is_checked_against_the_whole_checkpoint_s_manifest(
    tmp_path: Path, checkpoint: Checkpoint, manifest: Path, capsys: Capture
) -> None:
    write_config(tmp_path)
    overwrite(checkpoint, "rows", 0, flipped)  # not of the draft
    found = loaded(tmp_path, manifest, capsys, load="draft")
    assert (found["verified"], found["checked_bytes"], found["unchecked_bytes"]) == (True, (2 << 20) + 9, 0)
    overwrite(checkpoint, "mtp.1.w", 8, flipped)
    assert loaded(tmp_path, manifest, capsys, code=3, load="draft")["tensor"] == "mtp.1.w"


def test_a_truncated_file_is_refused(tmp_path: Path, checkpoint: Checkpoint, manifest: Path, capsys: Capture) -> None:
    write_config(tmp_path)
    path = checkpoint.folder / "b.safetensors"
    os.truncate(path, path.stat().st_size - 4096)
    assert loaded(tmp_path, manifest, capsys, code=3)["path"] == str(path)


def test_rows_that_come_in_pieces_are_checked_across_them(
    tmp_path: Path, checkpoint: Checkpoint, manifest: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path)
    monkeypatch.setattr("loader_service.cli.load.pieces", partial(pieces, piece_bytes=5 * 12800))  # parts have two rows
    assert loaded(tmp_path, manifest, capsys)["verified"] is True
    at = overwrite(checkpoint, "table", 95 * 12800, flipped)
    record = loaded(tmp_path, manifest, capsys, code=3)
    start, stop = said_range(record["message"])
    assert (record["tensor"], start, stop) == ("table", at - 12800, at + 12800)


class TestSlices:
    """What each of several ranks can check of its slices, and what not."""

    def rank(
        self, folder: Path, checkpoint: Checkpoint, manifest: Path, rules: Sequence[object], rank: int, ranks: int
    ) -> Against:
        """The checks of one rank, over tensors cut by hand."""
        config = ls.load_config(write_config(folder, ranks=ranks, rules=rules))
        plan = plan_of(config, "all", ranks).for_rank(rank)
        threads = ReadPool(1, name="loader-crc")
        against = Against(read_checkpoint_manifest(manifest), manifest, plan, threads, checksum="crc32")
        against.check_names()
        for i in range(len(plan)):
            spec = tensor_spec(plan, i)
            whole = checkpoint.tensor(plan.name(i))
            value = torch.empty(spec.shape, dtype=torch.uint8 if whole.itemsize == 1 else spec.dtype)
            for source, own in spec.parts:
                value[own] = (whole.view(torch.uint8) if whole.itemsize == 1 else whole)[source]
            against.begin(plan.name(i), spec)
            against.add(value)
        threads.stop()
        assert against.checked_bytes + against.unchecked_bytes == plan.payload_bytes
        return against

    @pytest.mark.parametrize("ranks", [1, 2, 4, 8])
    def test_slices_along_any_one_dimension_are_checked_whole(
        self, ranks: int, tmp_path: Path, checkpoint: Checkpoint, manifest: Path
    ) -> None:
        for rank in range(ranks):
            found = self.rank(tmp_path, checkpoint, manifest, RULES, rank, ranks)
            assert (found.unchecked_bytes, found.words) == (0, None), rank
            assert found.checked_bytes > 0

    def test_a_section_that_is_not_cut_as_the_parts_are_is_checked_but_for_its_edges(
        self, tmp_path: Path, checkpoint: Checkpoint, manifest: Path
    ) -> None:
        # Rank 0 of 12 has rows 0-10, 128-130 and 160-162 of parts of 4 rows: 8 of these 14 are whole parts.
        found = self.rank(tmp_path, checkpoint, manifest, RULES, 0, 12)
        assert (found.unchecked_bytes, found.words is not None) == (6 * 64, True)

    def test_edges_of_other_slices_are_not_and_are_counted(
        self, tmp_path: Path, checkpoint: Checkpoint, manifest: Path
    ) -> None:
        # 96 rows in 48 parts: 0-32 and 32-96 hold whole parts, 0-33 half of one more, 33-96 the other half.
        cut = {"match": "rows", "split": {"axis": "tp", "dim": 0, "boundaries": [0, 33, 96]}}
        for rank in range(2):
            found = self.rank(tmp_path, checkpoint, manifest, [cut], rank, 2)
            assert found.unchecked_bytes == 256
            assert found.words is not None
            assert "256 bytes could not be checked" in found.words
            assert found.words.endswith("parts of 'rows'")

    def test_slices_along_two_dimensions_are_not_and_are_counted(
        self, tmp_path: Path, checkpoint: Checkpoint, manifest: Path
    ) -> None:
        split = [{"match": "both", "split": {"axis": axis, "dim": dim}} for dim, axis in enumerate(("dp", "tp"))]
        write_config(tmp_path, rules=split)
        path = tmp_path / "config.yaml"
        path.write_text(path.read_text().replace("mesh:\n  tp: 1", "mesh: {dp: 2, tp: 2}"))
        plan = plan_of(ls.load_config(path), "all", 4).for_rank(3)
        idle = ReadPool(1, name="loader-crc")
        against = Against(read_checkpoint_manifest(manifest), manifest, plan, idle, checksum="sha256")
        spec = tensor_spec(plan, plan.index_of("both") or 0)
        against.begin("both", spec)
        against.add(torch.zeros(spec.shape))
        assert (against.checked_bytes, against.unchecked_bytes) == (0, 24 * 24 * 4)


@pytest.mark.processes
def test_what_was_not_checked_is_said_and_never_called_verified(
    tmp_path: Path, checkpoint: Checkpoint, manifest: Path, capsys: Capture
) -> None:
    cut = {"match": "rows", "split": {"axis": "tp", "dim": 0, "boundaries": [0, 33, 96]}}
    args = ["load", str(write_config(tmp_path, ranks=2, rules=[cut])), "--load", "all", "--against", str(manifest)]
    first, second = (rank.end() for rank in start_ranks([[*args, "--json"]] * 2, tmp_path))
    assert (first.code, second.code) == (0, 0), first.err
    for report in first.document["ranks"]:
        assert (report["verified"], report["unchecked_bytes"]) == (None, 256)
        assert report["checked_bytes"] == report["payload_bytes"] - 256
        assert any(line.startswith("against: 256 bytes could not be checked") for line in report["fallbacks"])


@pytest.mark.processes
class TestRanks:
    def test_two_ranks_check_all_of_their_slices_and_rows(
        self, tmp_path: Path, checkpoint: Checkpoint, manifest: Path
    ) -> None:
        config = write_config(tmp_path, ranks=2)
        args = ["load", str(config), "--load", "all", "--against", str(manifest), "--json"]
        first, second = (rank.end() for rank in start_ranks([args] * 2, tmp_path))
        assert (first.code, second.code, second.out) == (0, 0, ""), first.err
        for report in first.document["ranks"]:
            assert (report["verified"], report["unchecked_bytes"]) == (True, 0)
            assert report["checked_bytes"] == report["payload_bytes"]

    def test_a_damaged_column_of_one_rank_ends_both_and_is_named(
        self, tmp_path: Path, checkpoint: Checkpoint, manifest: Path
    ) -> None:
        config = write_config(tmp_path, ranks=2)
        overwrite(checkpoint, "columns", 50 * 192 + 70 * 2, flipped)
        args = ["load", str(config), "--load", "all", "--against", str(manifest), "--json"]
        first, second = (rank.end() for rank in start_ranks([args] * 2, tmp_path))
        assert (first.code, second.code) == (4, 3), first.err
        record = first.document
        assert (record["error"], record["rank"], record["tensor"]) == ("CheckpointError", 1, "columns")
        assert "elements 70 to 72 of dimension 1" in record["message"]


class TestOtherManifests:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda tensors: tensors.pop("columns"), "tensor 'columns' is not in it"),
            (lambda tensors: tensors["columns"].update(dtype="F16"), "is F16 [96, 96] in it and BF16 [96, 96] here"),
            (lambda tensors: tensors.clear(), "(and 11 more tensors are not as in it)"),
        ],
        ids=["a name", "a dtype", "all"],
    )
    def test_of_another_checkpoint(
        self,
        change: Callable[[dict[str, Any]], object],
        words: str,
        tmp_path: Path,
        checkpoint: Checkpoint,
        manifest: Path,
        capsys: Capture,
    ) -> None:
        write_config(tmp_path)
        document = json.loads(manifest.read_text())
        change(document["tensors"])
        manifest.write_text(json.dumps(document))
        record = loaded(tmp_path, manifest, capsys, code=3)
        assert words in record["message"]
        assert f"{manifest} is of another checkpoint" in record["message"]
        if "columns" in words:
            loaded(tmp_path, manifest, capsys, load="draft")

    def test_that_are_none(self, tmp_path: Path, checkpoint: Checkpoint, capsys: Capture) -> None:
        write_config(tmp_path)
        record = loaded(tmp_path, tmp_path / "nowhere.json", capsys, code=2)
        assert (record["error"], record["errno"]) == ("ConfigError", 2)
        (tmp_path / "m.json").write_text("{}")
        assert loaded(tmp_path, tmp_path / "m.json", capsys, code=2)["path"] == str(tmp_path / "m.json")

    def test_a_checksum_without_any_is_a_mistake(self, tmp_path: Path, checkpoint: Checkpoint, capsys: Capture) -> None:
        config = write_config(tmp_path)
        assert app.run(["load", str(config), "--load", "draft", "--checksum", "sha256"]) == 2
        assert "give --against MANIFEST too" in capsys.readouterr().err
