"""Headers and the index that are kept: no file is opened again while it is the same, and each is when it is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from loader_service.checkpoint.catalog import Catalog
from loader_service.errors import CheckpointError, ReadError
from loader_service.memory.headers import HeaderCache
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.checkpoint.building import bytes_of
from tests.checkpoint.finding import catalog_at, read_with, recording
from tests.support.shards import write_index

NAMES = [f"s{i:03d}.safetensors" for i in range(3)]


def make(folder: Path) -> Path:
    for i, name in enumerate(NAMES):
        (folder / name).write_bytes(bytes_of([f"t{i}.{j}" for j in range(3)]))
    write_index(folder, {f"t{i}.{j}": name for i, name in enumerate(NAMES) for j in range(3)})
    return folder


def read(folder: Path, kept: HeaderCache) -> tuple[Catalog, FakeStorage]:
    """A reading with new handles, as another service does it."""
    with recording() as (storage, handles):
        return read_with(str(folder), handles=handles, storage=storage, kept=kept), storage


def same(catalog: Catalog, other: Catalog) -> bool:
    return (catalog.digest, catalog.names, catalog.shards, catalog.shapes, catalog.starts.tolist()) == (
        other.digest,
        other.names,
        other.shards,
        other.shapes,
        other.starts.tolist(),
    )


def test_the_second_reading_opens_nothing_and_finds_the_same(tmp_path: Path) -> None:
    kept = HeaderCache()
    first, storage = read(make(tmp_path), kept)
    assert (storage.opens(), len(kept)) == (4, 4)
    second, storage = read(tmp_path, kept)
    assert (storage.opens(), storage.reads, storage.lists()) == (0, [], 1)
    assert storage.identifies() == 4
    assert same(first, second)
    assert same(second, catalog_at(tmp_path))


def test_without_one_nothing_is_looked_at_twice(tmp_path: Path) -> None:
    make(tmp_path)
    with recording() as (storage, handles):
        read_with(str(tmp_path), handles=handles, storage=storage)
        assert (storage.opens(), storage.identifies()) == (4, 0)


@pytest.mark.parametrize("name", [NAMES[1], "model.safetensors.index.json"])
def test_a_file_that_was_replaced_or_touched_is_read_again_alone(tmp_path: Path, name: str) -> None:
    kept = HeaderCache()
    read(make(tmp_path), kept)
    (tmp_path / "new").write_bytes((tmp_path / name).read_bytes())
    os.replace(tmp_path / "new", tmp_path / name)
    catalog, storage = read(tmp_path, kept)
    assert (storage.opens(), storage.opens(name)) == (1, 1)
    assert same(catalog, catalog_at(tmp_path))
    os.utime(tmp_path / name, ns=(5, 5))
    catalog, storage = read(tmp_path, kept)
    assert (storage.opens(), storage.opens(name)) == (1, 1)
    assert same(catalog, catalog_at(tmp_path))
    assert read(tmp_path, kept)[1].opens() == 0


def test_what_is_new_in_the_folder_is_seen(tmp_path: Path) -> None:
    kept = HeaderCache()
    read(make(tmp_path), kept)
    (tmp_path / "t.safetensors").write_bytes(bytes_of(["other"]))
    catalog, storage = read(tmp_path, kept)
    assert (storage.opens(), "other" in catalog.names) == (1, True)
    (tmp_path / NAMES[0]).unlink()
    with pytest.raises(CheckpointError, match=r"s000\.safetensors"):
        read(tmp_path, kept)


def test_a_header_that_is_refused_is_not_kept(tmp_path: Path) -> None:
    kept = HeaderCache()
    make(tmp_path)
    os.truncate(tmp_path / NAMES[2], (tmp_path / NAMES[2]).stat().st_size - 1)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="1 bytes are missing"):
            read(tmp_path, kept)
    assert len(kept) == 3
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="weight_map"):
            read(tmp_path, kept)
    index = f"{tmp_path}/model.safetensors.index.json"
    assert kept.get(index, LocalStorage().identify(index).state) is None


def test_a_file_that_cannot_be_looked_at_is_opened_and_says_why(tmp_path: Path) -> None:
    kept = HeaderCache()
    read(make(tmp_path), kept)
    with recording() as (storage, handles):
        storage.fail(NAMES[0], errno.EACCES, operation="identify")
        assert same(read_with(str(tmp_path), handles=handles, storage=storage, kept=kept), catalog_at(tmp_path))
        assert (storage.opens(), storage.opens(NAMES[0])) == (1, 1)
        storage.fail(NAMES[0], errno.EACCES, operation="identify")
        storage.fail(NAMES[0], errno.EACCES, operation="open")
        with pytest.raises(ReadError, match="Permission denied"):
            read_with(str(tmp_path), handles=handles, storage=storage, kept=kept)


def test_what_does_not_fit_is_read_again_each_time(tmp_path: Path) -> None:
    make(tmp_path)
    kept = HeaderCache(1)
    first, _ = read(tmp_path, kept)
    second, storage = read(tmp_path, kept)
    assert (storage.opens(), len(kept)) == (4, 0)
    assert same(first, second)
