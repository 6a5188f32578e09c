"""`manifest`: checksums of whole checkpoints, in one pass, and files of a cache that names them by their hash."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from loader_service.cli import app, hashing, manifest_json
from loader_service.cli.catalogs import read_headers
from loader_service.cli.checkpoint_manifest import read_checkpoint_manifest
from loader_service.cli.checksums import ALL_BELOW_BYTES, Bytes
from loader_service.cli.hashing import hash_checkpoint
from loader_service.config.schema import CheckpointConfig
from loader_service.errors import CheckpointError, ConfigError, ReadError
from tests.cli.support import Fault, payload_fault, write_small_checkpoint
from tests.support.checkpoints import Checkpoint, awkward_checkpoint
from tests.support.shards import pattern_bytes, write_index, write_shard

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def printed(capsys: Capture) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def hub_cache(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The small checkpoint as a cache holds it: a snapshot of links, and blobs by the name of the file."""
    plain = write_small_checkpoint(folder / "plain")
    snapshot, blobs = folder / "models--it" / "snapshots" / "abc", folder / "models--it" / "blobs"
    for made in (snapshot, blobs):
        made.mkdir(parents=True)
    found = {}
    for file in sorted(plain.iterdir()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
        found[file.name] = blob
    return snapshot, found


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def check(found: dict[str, Any], checkpoint: Checkpoint) -> None:
    assert found.keys() == {"version", "files", "tensors"}
    assert found["version"] == 1
    for file in checkpoint.folder.iterdir():
        data = file.read_bytes()
        assert found["files"][file.name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert list(found["tensors"]) == list(checkpoint.tensors)
    for name, (code, shape, data) in checkpoint.tensors.items():
        entry = found["tensors"][name]
        assert (entry["file"], entry["dtype"], entry["shape"]) == (checkpoint.shard_of[name], code, list(shape))
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        if data:
            small = ["all"] if len(data) < ALL_BELOW_BYTES else []
            assert list(entry["crc32"]) == [*small, *map(str, range(len(shape)))]
            assert not small or int(entry["crc32"]["all"], 16) == zlib.crc32(data), name
            if shape:
                first = entry["crc32"]["0"]
                rows = shape[0] // (len(first) // 8)
                assert int(first[:8], 16) == zlib.crc32(data[: rows * (len(data) // shape[0])]), name
        else:
            assert entry["crc32"] == {}


@pytest.mark.parametrize("chunk_bytes", [4096, 65536, 16 << 20])
def test_every_file_and_tensor_has_its_checksums_whatever_the_chunks(
    chunk_bytes: int, tmp_path: Path, no_leaked_descriptors: None
) -> None:
    checkpoint = awkward_checkpoint(tmp_path)
    catalog = read_headers(CheckpointConfig(path=str(tmp_path)), retries=0)
    told: list[int] = []
    made = hash_checkpoint(catalog, retries=0, tick=told.append, chunk_bytes=chunk_bytes)
    check(made.as_dict(), checkpoint)
    assert told == sorted(told)
    assert told[-1] == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_it_is_written_or_printed_and_read_back_the_same(tmp_path: Path, capsys: Capture) -> None:
    checkpoint = awkward_checkpoint(tmp_path / "c")
    assert app.run(["manifest", str(checkpoint.folder), "--json"]) == 0
    document = printed(capsys)
    check(document, checkpoint)
    out = tmp_path / "m.json"
    assert app.run(["manifest", str(checkpoint.folder), "--out", str(out), "--json"]) == 0
    summary = printed(capsys)
    assert (summary["manifest"], summary["files"], summary["tensors"]) == (str(out), 2, len(checkpoint.tensors))
    assert (summary["bytes"], summary["blobs_compared"]) == (sum(f["bytes"] for f in document["files"].values()), 0)
    assert json.loads(out.read_text()) == document == read_checkpoint_manifest(out).as_dict()
    assert app.run(["manifest", str(checkpoint.folder), "--out", str(out)]) == 0
    assert f"{out}: {len(checkpoint.tensors)} tensors in 2 files" in capsys.readouterr().out


def test_a_file_alone_and_an_index_that_leaves_one_out(tmp_path: Path, capsys: Capture) -> None:
    folder = write_small_checkpoint(tmp_path)
    write_shard(folder / "old.safetensors", {"scale": ("F32", (), pattern_bytes(4, 9))})
    write_index(folder, {"scale": "a.safetensors"})
    assert app.run(["manifest", str(folder), "--json"]) == 0
    assert list(printed(capsys)["files"]) == ["a.safetensors", "b.safetensors"]
    assert app.run(["manifest", str(folder), "--ignore-index", "--json"]) == 3
    assert "scale" in printed(capsys)["message"]
    assert app.run(["manifest", str(folder / "old.safetensors"), "--json"]) == 0
    assert list(printed(capsys)["tensors"]) == ["scale"]


def test_a_cache_s_files_are_compared_with_the_names_of_their_blobs(tmp_path: Path, capsys: Capture) -> None:
    snapshot, _ = hub_cache(tmp_path)
    out = tmp_path / "m.json"
    assert app.run(["manifest", str(snapshot), "--out", str(out), "--json"]) == 0
    assert printed(capsys)["blobs_compared"] == 2
    assert app.run(["manifest", str(snapshot), "--out", str(out)]) == 0
    assert "2 of the files are blobs of a cache, and have the SHA-256 of their names" in capsys.readouterr().out
    assert list(json.loads(out.read_text())["files"]) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("damage", ["flipped", "zeroed"])
def test_a_damaged_blob_is_named_and_no_manifest_is_written(damage: str, tmp_path: Path, capsys: Capture) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    out = tmp_path / "m.json"
    blob = blobs["b.safetensors"]
    size = blob.stat().st_size
    if damage == "flipped":
        flip(blob, size - 1)
    else:
        blob.write_bytes(blob.read_bytes()[: size - 20] + bytes(20))
    assert app.run(["manifest", str(snapshot), "--out", str(out), "--json"]) == 3
    record = printed(capsys)
    assert (record["error"], record["path"]) == ("CheckpointError", str(snapshot / "b.safetensors"))
    assert hashlib.sha256(blob.read_bytes()).hexdigest() in record["message"]
    assert blob.name in record["message"]
    assert not out.exists()
    flip(blobs["a.safetensors"], blobs["a.safetensors"].stat().st_size - 1)
    assert app.run(["manifest", str(snapshot), "--json"]) == 3
    assert "so are b.safetensors" in printed(capsys)["message"]


def test_other_links_and_names_are_nobody_s_hash(tmp_path: Path, capsys: Capture) -> None:
    plain = write_small_checkpoint(tmp_path / "plain")
    linked = tmp_path / "linked"
    for folder in (linked, tmp_path / "blobs", tmp_path / "elsewhere"):
        folder.mkdir()
    for name, blob in (("a.safetensors", "blobs/" + "0" * 40), ("b.safetensors", "elsewhere/" + "0" * 64)):
        (plain / name).rename(tmp_path / blob)
        (linked / name).symlink_to(tmp_path / blob)
    assert app.run(["manifest", str(linked), "--out", str(tmp_path / "m.json"), "--json"]) == 0
    assert printed(capsys)["blobs_compared"] == 0


class TestFailures:
    def test_a_truncated_file(self, tmp_path: Path, capsys: Capture) -> None:
        folder = write_small_checkpoint(tmp_path)
        os.truncate(folder / "b.safetensors", (folder / "b.safetensors").stat().st_size - 1)
        assert app.run(["manifest", str(folder), "--json"]) == 3
        assert printed(capsys)["path"] == str(folder / "b.safetensors")

    def test_a_read_that_fails(self, tmp_path: Path) -> None:
        folder = write_small_checkpoint(tmp_path)
        catalog = read_headers(CheckpointConfig(path=str(folder)), retries=0)
        with payload_fault(Fault("input/output error")), pytest.raises(ReadError) as caught:
            hash_checkpoint(catalog, retries=0, chunk_bytes=64)  # so that reads begin behind the header, too
        assert caught.value.errno == 5

    def test_a_file_that_is_replaced_while_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = write_small_checkpoint(tmp_path / "c")
        catalog = read_headers(CheckpointConfig(path=str(folder / "b.safetensors")), retries=0)
        other = write_small_checkpoint(tmp_path / "other") / "b.safetensors"
        hashed = hashing._FileTensors.hash

        def replace_and_hash(self: hashing._FileTensors, at: int, data: Bytes) -> None:
            if other.exists():
                other.replace(folder / "b.safetensors")
            hashed(self, at, data)

        monkeypatch.setattr(hashing._FileTensors, "hash", replace_and_hash)
        with pytest.raises(CheckpointError, match=r"b\.safetensors.*changed"):
            hash_checkpoint(catalog, retries=0)

    def test_a_file_that_is_not_the_one_of_the_headers(self, tmp_path: Path) -> None:
        folder = write_small_checkpoint(tmp_path)
        catalog = read_headers(CheckpointConfig(path=str(folder)), retries=0)
        write_shard(folder / "b.safetensors", {"other": ("U8", (1,), b"x")})
        with pytest.raises(CheckpointError, match=r"b\.safetensors.*changed"):
            hash_checkpoint(catalog, retries=0)

    def test_a_place_that_cannot_be_written_is_said_first(self, tmp_path: Path, capsys: Capture) -> None:
        assert app.run(["manifest", str(tmp_path / "nowhere"), "--out", str(tmp_path / "no" / "m.json"), "--json"]) == 2
        assert printed(capsys)["message"].startswith("--out: the folder ")


def entry(**changed: object) -> dict[str, object]:
    crc32 = {"all": "0" * 8, "0": "0" * 16, "1": "0" * 24}
    made = {"file": "a", "dtype": "F32", "shape": [2, 3], "sha256": "0" * 64, "crc32": crc32} | changed
    return {name: value for name, value in made.items() if value is not None}


def document(tensor: object = None, **changed: object) -> dict[str, object]:
    tensors = {"t": entry() if tensor is None else tensor}
    made = {"version": 1, "files": {"a": {"bytes": 1, "sha256": "0" * 64}}, "tensors": tensors} | changed
    return {name: value for name, value in made.items() if value is not None}


class TestReading:
    def read(self, tmp_path: Path, text: str) -> object:
        (tmp_path / "m.json").write_text(text)
        return read_checkpoint_manifest(tmp_path / "m.json")

    def test_what_is_right_is_read(self, tmp_path: Path) -> None:
        self.read(tmp_path, json.dumps(document()))

    @pytest.mark.parametrize(
        ("made", "words"),
        [
            (document(version=2), "its version is 2, and only 1 is known here"),
            (document(version=True), "its version is True"),
            (document(version=None), "it has no version"),
            ({"t": {"dtype": "F32", "shape": [2], "sha256": "0" * 64}}, "it is of what one rank got"),
            ({}, "it has no version"),
            (document(files=None), "must have version, files and tensors"),
            (document(more=1), "must have version, files and tensors"),
            (document(tensors=[]), "must have version, files and tensors"),
            (document(files={"a": {"bytes": -1, "sha256": "0" * 64}}), "file 'a' must be"),
            (document(files={"a": {"bytes": 1, "sha256": "x"}}), "file 'a' must be"),
            (document([]), "tensor 't': must be an object with file"),
            (document(entry(more=1)), "tensor 't': must be an object with file"),
            (document(entry(file=3)), "its file is no name"),
            (document(entry(dtype="F33")), "its dtype is no code"),
            (document(entry(shape=[2, -3])), "its shape is no list"),
            (document(entry(sha256="0" * 63)), "its sha256 is not"),
            (document(entry(crc32={"all": "0" * 8, "0": "0" * 16})), "its crc32 does not have"),
            (document(entry(crc32={"all": "0" * 8, "0": "0" * 16, "1": "0" * 16})), "its crc32 does not have"),
            (document(entry(crc32={"all": "0" * 8, "0": "0" * 16, "1": "G" * 24})), "its crc32 does not have"),
            (document(entry(crc32=[])), "its crc32 does not have"),
        ],
    )
    def test_what_is_wrong_is_refused(self, made: object, words: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no manifest: ") as caught:
            self.read(tmp_path, json.dumps(made))
        assert words in str(caught.value)
        assert str(caught.value).endswith("give a file that `loader-service manifest` has written")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", "it is not JSON"),
            ('{"version": 1, "version": 1}', "'version' is in it twice"),
            ('{"tensors": {"t": {}, "t": {}}}', "'t' is in it twice"),
            ("[]", "it is no object"),
        ],
    )
    def test_what_is_no_such_json_is_refused(self, text: str, words: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            self.read(tmp_path, text)
        assert words in str(caught.value)


def test_a_manifest_has_a_line_for_each_tensor_and_any_name() -> None:
    made = document(files={}, tensors={'ü"\n': entry(), "b": entry()})
    text = manifest_json.dump(made)
    assert json.loads(text) == made
    assert (text.isascii(), len(text.splitlines())) == (True, 8)


def test_two_of_them_can_be_compared_also_with_what_one_rank_got(tmp_path: Path, capsys: Capture) -> None:
    folder = write_small_checkpoint(tmp_path / "c")
    paths = [str(tmp_path / f"{i}.json") for i in range(3)]
    assert app.run(["manifest", str(folder), "--out", paths[0]]) == 0
    (tmp_path / "one.yaml").write_text("checkpoint: {path: c}\nloads: {all: {}}\n")
    assert app.run(["load", str(tmp_path / "one.yaml"), "--manifest", paths[1]]) == 0
    flip(folder / "b.safetensors", (folder / "b.safetensors").stat().st_size - 1)
    assert app.run(["manifest", str(folder), "--out", paths[2]]) == 0
    capsys.readouterr()
    assert app.run(["compare", paths[0], paths[1]]) == 0
    capsys.readouterr()
    assert app.run(["compare", paths[0], paths[2], "--json"]) == 3
    assert [each["name"] for each in printed(capsys)["differ"]] == ["draft.norm"]
