"""Which files make a checkpoint: folders, lists, single files, snapshots of links; and the index beside them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from loader_service.checkpoint.discovery import discover
from loader_service.errors import CheckpointError, ReadError
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.checkpoint.building import bytes_of
from tests.checkpoint.finding import catalog_at, discovered_at
from tests.support.shards import write_index

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def put(folder: Path, **names_by_file: list[str]) -> None:
    """Shards by short name: A, B, or any other word for that word's `.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    for short, names in names_by_file.items():
        (folder / {"A": A, "B": B}.get(short, f"{short}.safetensors")).write_bytes(bytes_of(names))


def refused(path: Path | tuple[str, ...], index: str = "advisory") -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        discovered_at(path, "ignore" if index == "ignore" else "advisory")
    assert type(caught.value) is CheckpointError
    return caught.value


def test_a_folders_shards_are_found_sorted_with_their_paths(tmp_path: Path) -> None:
    put(tmp_path, b=["y"], a=["x"])
    found = discovered_at(tmp_path)
    assert [(shard.name, shard.path) for shard in found.shards] == [
        ("a.safetensors", f"{tmp_path}/a.safetensors"),
        ("b.safetensors", f"{tmp_path}/b.safetensors"),
    ]
    assert found.index is None
    assert found.notes == ()


def test_stray_entries_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, a=["x"])
    (tmp_path / "._a.safetensors").write_bytes(b"resource fork")
    (tmp_path / ".hidden.safetensors").write_bytes(b"")
    (tmp_path / ".dangling.safetensors").symlink_to("nowhere")
    (tmp_path / "a.safetensors.incomplete").write_bytes(b"")
    (tmp_path / "a.SAFETENSORS").write_bytes(b"")
    (tmp_path / "a.safetensors.lock").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    put(tmp_path / "folder.safetensors", inner=["y"])
    put(tmp_path / "subfolder", inner=["z"])
    os.mkfifo(tmp_path / "pipe.safetensors")
    found = discovered_at(tmp_path)
    assert [shard.name for shard in found.shards] == ["a.safetensors"]
    assert "folder.safetensors: passed over: it is a folder" in found.notes
    assert "pipe.safetensors: passed over: it is no file" in found.notes
    assert catalog_at(tmp_path).names == ["x"]


def test_a_list_of_files_may_come_from_several_folders_and_has_no_index(tmp_path: Path) -> None:
    put(tmp_path / "1", b=["y"])
    put(tmp_path / "2", a=["x"])
    write_index(tmp_path / "1", {"y": "absent.safetensors"})
    files = (str(tmp_path / "1/b.safetensors"), str(tmp_path / "2/a.safetensors"))
    found = discovered_at(files)
    assert [(shard.name, shard.path) for shard in found.shards] == [
        ("a.safetensors", files[1]),
        ("b.safetensors", files[0]),
    ]
    assert found.index is None
    assert catalog_at(files).names == ["x", "y"]


def test_a_list_with_one_file_name_twice_is_refused(tmp_path: Path) -> None:
    files = (str(tmp_path / "1/a.safetensors"), str(tmp_path / "2/a.safetensors"))
    assert "same file name" in refused(files).message
    assert "same file name" in refused((files[0], files[0])).message
    assert "empty list" in refused(()).message


def test_a_single_file_is_a_checkpoint_whatever_lies_beside_it(tmp_path: Path) -> None:
    put(tmp_path, a=["x"], b=["x"])
    write_index(tmp_path, {"x": "absent.safetensors"})
    assert catalog_at(tmp_path / "a.safetensors").names == ["x"]
    (tmp_path / "a.bin").write_bytes(b"")
    assert "neither a folder nor a file named *.safetensors" in refused(tmp_path / "a.bin").message


def test_a_folder_whose_name_ends_like_a_shard_is_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", a=["x"])
    assert catalog_at(tmp_path / "model.safetensors").names == ["x"]


def test_a_hub_snapshot_of_links_has_the_targets_identity_and_the_links_path(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--demo" / "snapshots" / "abc123"
    blobs = tmp_path / "models--org--demo" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00d").write_bytes(bytes_of(["x"]))
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    (shard,) = catalog_at(snapshot).shards
    status = (blobs / "f00d").stat()
    assert shard.name == "model.safetensors"
    assert shard.path == f"{snapshot}/model.safetensors"
    assert (shard.identity.device, shard.identity.inode) == (status.st_dev, status.st_ino)
    assert (shard.identity.size_bytes, shard.identity.mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert catalog_at((str(blobs / "f00d"),)).names == ["x"]


@pytest.mark.parametrize("above", ["", "snapshots", ".."])
def test_a_hub_cache_folder_leads_to_its_snapshot(tmp_path: Path, above: str) -> None:
    root = tmp_path / "models--org--demo"
    put(root / "snapshots" / "abc123", model=["x"])
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    message = refused(Path(os.path.normpath(root / above))).message
    assert "no safetensors files here; did you mean" in message
    assert f"{root}/snapshots/{'<rev>' if above == '..' else 'abc123'}" in message


def test_a_hub_cache_with_several_revisions_or_none_says_so(tmp_path: Path) -> None:
    for revision in "abcde":
        (tmp_path / "snapshots" / revision).mkdir(parents=True)
    message = refused(tmp_path).message
    assert f"{tmp_path}/snapshots/a or {tmp_path}/snapshots/b" in message
    assert "or another revision" in message
    (tmp_path / "empty" / "snapshots").mkdir(parents=True)
    assert "holds no revision yet" in refused(tmp_path / "empty").message


def test_a_missing_path_names_the_first_folder_that_is_missing(tmp_path: Path) -> None:
    error = refused(tmp_path / "none")
    assert error.message.startswith(f"{tmp_path}/none: does not exist; only local paths are read")
    assert error.errno == errno.ENOENT
    assert error.path == f"{tmp_path}/none"
    assert f"its folder {tmp_path}/none is missing too" in refused(tmp_path / "none" / "deeper" / "still").message


def test_a_misspelt_path_gets_the_name_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    assert refused(tmp_path / "chekpoint").message == f"{tmp_path}/chekpoint: does not exist; did you mean checkpoint?"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "the folder is empty"),
        (["pytorch_model-1.bin", "pytorch_model-2.bin", "config.json"], "2 PyTorch pickles (.bin), 1 other files"),
        (["model.gguf"], "1 GGUF files"),
        (["a.safetensors.incomplete"], "1 unfinished downloads"),
        (["sub/a.safetensors"], "folders, which are not searched ('sub')"),
        ([".a.safetensors"], "1 hidden entries"),
    ],
)
def test_a_folder_without_shards_says_what_is_there(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    message = refused(tmp_path).message
    assert message.startswith(f"{tmp_path}: no safetensors files here")
    assert words in message


def test_dangling_links_are_named_with_their_targets(tmp_path: Path) -> None:
    put(tmp_path, a=["x"])
    (tmp_path / "b.safetensors").symlink_to("../../blobs/gone")
    (tmp_path / "c.safetensors").symlink_to("/nowhere/else")
    message = refused(tmp_path).message
    assert "b.safetensors -> ../../blobs/gone" in message
    assert "c.safetensors -> /nowhere/else" in message
    single = refused(tmp_path / "b.safetensors")
    assert "dangling link to ../../blobs/gone" in single.message
    with pytest.raises(CheckpointError, match="dangling link to /nowhere/else"):
        catalog_at((str(tmp_path / "a.safetensors"), str(tmp_path / "c.safetensors")))


def test_a_file_name_that_is_no_text_is_refused_in_printable_words(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.safetensors")
    (tmp_path / name).write_bytes(b"")
    error = refused(tmp_path)
    assert "not UTF-8" in error.message
    assert error.message.isprintable()


def test_a_path_with_a_nul_character_is_refused() -> None:
    for path in (Path("/a\0b"), ("/c/a.safetensors", "/c\0/b.safetensors")):
        assert "NUL character" in refused(path).message


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_listing_that_fails_is_a_read_error_never_an_empty_folder(tmp_path: Path, code: int) -> None:
    storage = FakeStorage(LocalStorage())
    storage.fail(str(tmp_path), code, operation="list")
    with pytest.raises(ReadError) as caught:
        discover(str(tmp_path), storage, index="advisory")
    assert caught.value.errno == code
    assert caught.value.path == str(tmp_path)


def test_a_listing_without_a_descriptor_says_which_limit_to_raise(tmp_path: Path) -> None:
    storage = FakeStorage(LocalStorage())
    storage.fail(str(tmp_path), errno.EMFILE, operation="list")
    with pytest.raises(ReadError, match=r"cannot be listed: Too many open files; .*ulimit -n"):
        discover(str(tmp_path), storage, index="advisory")


# The index.


def test_the_index_that_is_used_decides_between_copies(tmp_path: Path) -> None:
    put(tmp_path, A=["x"], B=["y"], consolidated=["x", "y"])
    with pytest.raises(CheckpointError, match="Weight sets that overlap"):
        catalog_at(tmp_path)
    write_index(tmp_path, {"x": A, "y": B})
    catalog = catalog_at(tmp_path)
    assert [shard.name for shard in catalog.shards] == [A, B]
    assert any("consolidated.safetensors: left out" in note for note in catalog.notes)
    with pytest.raises(CheckpointError, match="Weight sets that overlap"):
        catalog_at(tmp_path, "ignore")


@pytest.mark.parametrize("present", [[], ["A"]], ids=["all-absent", "one-present"])
def test_absent_shards_are_all_listed(tmp_path: Path, present: list[str]) -> None:
    put(tmp_path, **{short: ["x"] for short in present})
    absent = [f"model-{i:05d}-of-00030.safetensors" for i in range(1, 31)]
    write_index(tmp_path, {f"t{i}": name for i, name in enumerate(absent)})
    error = refused(tmp_path)
    for name in absent:
        assert name in error.message
    assert "30 shards" in error.message
    assert "index: ignore" in error.message
    assert error.path == f"{tmp_path}/model.safetensors.index.json"


def test_ignoring_the_index_loads_what_is_there(tmp_path: Path) -> None:
    put(tmp_path, A=["x"])
    write_index(tmp_path, {"x": A, "y": "absent.safetensors"})
    found = discovered_at(tmp_path, "ignore")
    assert found.index is None
    assert catalog_at(tmp_path, "ignore").names == ["x"]
    (tmp_path / "model.safetensors.index.json").write_text("nonsense")
    assert catalog_at(tmp_path, "ignore").names == ["x"]


def test_an_index_entry_is_a_name_and_never_a_path(tmp_path: Path) -> None:
    put(tmp_path, a=["x"])
    put(tmp_path / "inner", a=["y"])
    write_index(tmp_path / "inner", {"x": "../a.safetensors", "y": "a.safetensors"})
    assert "'../a.safetensors'" in refused(tmp_path / "inner").message


def test_one_index_of_another_name_is_used_and_the_default_name_goes_first(tmp_path: Path) -> None:
    put(tmp_path, A=["x"])
    write_index(tmp_path, {"x": A}, "consolidated.safetensors.index.json")
    found = discovered_at(tmp_path)
    assert found.index is not None
    assert found.index.path == f"{tmp_path}/consolidated.safetensors.index.json"
    write_index(tmp_path, {"x": A})
    found = discovered_at(tmp_path)
    assert found.index is not None
    assert found.index.path == f"{tmp_path}/model.safetensors.index.json"
    assert "passed over: 'consolidated.safetensors.index.json'" in found.notes[0]


def test_several_indexes_without_the_default_name_are_refused(tmp_path: Path) -> None:
    put(tmp_path, A=["x"])
    for name in ("a", "b"):
        write_index(tmp_path, {"x": A}, f"{name}.safetensors.index.json")
    write_index(tmp_path, {"x": A}, "._c.safetensors.index.json")
    message = refused(tmp_path).message
    assert "'a.safetensors.index.json', 'b.safetensors.index.json'" in message
    assert "index: ignore" in message
    assert discovered_at(tmp_path, "ignore").index is None


def test_a_malformed_or_dangling_index_is_named(tmp_path: Path) -> None:
    put(tmp_path, A=["x"])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": ')
    assert refused(tmp_path).path == str(index)
    index.unlink()
    index.symlink_to("../blobs/index")
    assert "dangling link to ../blobs/index" in refused(tmp_path).message


@pytest.mark.parametrize("step", [1, 7, 100])
def test_the_index_survives_short_reads(tmp_path: Path, step: int) -> None:
    put(tmp_path, A=["x"], B=["y"])
    write_index(tmp_path, {"x": A, "y": B})
    storage = FakeStorage(LocalStorage())
    storage.shorten("*.json", step)
    found = discover(str(tmp_path), storage, index="advisory")
    assert found.index is not None
    assert found.index.weight_map == {"x": A, "y": B}
    assert storage.open_now == 0


def test_an_index_that_cannot_be_read_is_a_read_error_and_is_closed(tmp_path: Path) -> None:
    put(tmp_path, A=["x"])
    write_index(tmp_path, {"x": A})
    storage = FakeStorage(LocalStorage())
    storage.fail("*.json", errno.EACCES)
    with pytest.raises(ReadError) as caught:
        discover(str(tmp_path), storage, index="advisory")
    assert (caught.value.errno, caught.value.path) == (errno.EACCES, f"{tmp_path}/model.safetensors.index.json")
    assert storage.open_now == 0
    storage.clear()
    storage.truncate("*.json", 10)
    with pytest.raises(CheckpointError, match="ended at byte 10"):
        discover(str(tmp_path), storage, index="advisory")


def test_a_monstrous_index_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    put(tmp_path, A=["x"])
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "more than 1073741824 are not read" in refused(tmp_path).message
