"""Reading headers: exactly their bytes, in parallel, whatever the storage does meanwhile."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loader_service.errors import CheckpointError, EndOfFileError, ReadError
from tests.checkpoint.building import bytes_of
from tests.checkpoint.finding import catalog_at, read_with, recording
from tests.checkpoint.vectors import entry, file_of
from tests.reading.disk import disk_folder, held, uncache


def make(folder: Path, count: int = 3) -> list[str]:
    names = [f"s{i:03d}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(bytes_of([f"t{i}.{j}" for j in range(3)]))
    return names


def test_only_header_bytes_are_read_and_each_file_is_opened_once(tmp_path: Path) -> None:
    make(tmp_path)
    with recording() as (storage, handles):
        catalog = read_with(str(tmp_path), "advisory", handles=handles, storage=storage)
        for shard in catalog.shards:
            assert storage.bytes_read(shard.path) == shard.header_bytes
            assert all(read.offset + read.wanted_bytes <= shard.header_bytes for read in storage.reads_of(shard.path))
            assert storage.opens(shard.path) == 1
        assert storage.lists() == 1


def test_nothing_is_read_ahead_behind_a_header_but_what_comes_after_it_is(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        path = folder / "s.safetensors"
        path.write_bytes(bytes_of(["t"], size=8 << 20))
        uncache(str(path))
        with recording() as (storage, handles):
            (shard,) = read_with(str(folder), "advisory", handles=handles, storage=storage).shards
            assert 0 < held(str(path)) <= 4096, "the page of the header"
            with handles.borrow(str(path), shard.identity) as file:
                for offset in (1 << 20, (1 << 20) + 4096, (1 << 20) + 8192):
                    file.read_into([memoryview(bytearray(4096))], offset)
            assert held(str(path)) > 4 * 4096, "the same descriptor reads ahead again"


@pytest.mark.parametrize("text_bytes", [4088, 4096, 4104, 65528, 65536, 65544], ids=str)
@pytest.mark.parametrize("short_by", [0, 1, 8], ids=lambda n: f"reads-short-by-{n}")
def test_headers_around_round_sizes_and_reads_that_end_8_bytes_early(
    tmp_path: Path, text_bytes: int, short_by: int
) -> None:
    """A loader that takes N bytes for 8 + N fails here."""
    text = f'{{"a":{entry("U8", [4], 0, 4)}}}'.ljust(text_bytes)
    (tmp_path / "m.safetensors").write_bytes(file_of(text, 4))
    with recording() as (storage, handles):
        storage.shorten("*", text_bytes - short_by)
        catalog = read_with(str(tmp_path), "advisory", handles=handles, storage=storage, threads=1)
    assert catalog.shards[0].header_bytes == 8 + text_bytes
    assert catalog.starts.tolist() == [8 + text_bytes]


@pytest.mark.parametrize("step", [1, 7, 9])
def test_short_reads_change_nothing(tmp_path: Path, step: int) -> None:
    make(tmp_path)
    plain = catalog_at(tmp_path)
    with recording() as (storage, handles):
        storage.shorten("*", step)
        catalog = read_with(str(tmp_path), "advisory", handles=handles, storage=storage)
    assert (catalog.digest, catalog.names) == (plain.digest, plain.names)


def test_the_identity_is_that_of_the_open_file(tmp_path: Path) -> None:
    make(tmp_path)
    for shard in catalog_at(tmp_path).shards:
        status = os.stat(shard.path)
        assert (shard.identity.inode, shard.identity.size_bytes) == (status.st_ino, status.st_size)
        assert (shard.identity.device, shard.identity.mtime_ns) == (status.st_dev, status.st_mtime_ns)


def test_a_second_reading_sees_a_file_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    (name, *_) = make(tmp_path)
    with recording() as (storage, handles):
        first = read_with(str(tmp_path), "advisory", handles=handles, storage=storage)
        (tmp_path / "new").write_bytes(bytes_of(["other"]))
        os.replace(tmp_path / "new", tmp_path / name)
        second = read_with(str(tmp_path), "advisory", handles=handles, storage=storage)
    assert "other" not in first.names
    assert "other" in second.names


def test_a_file_replaced_between_two_reads_of_its_header_is_noticed(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with recording() as (storage, handles):
        storage.fail("s000*", errno.ESTALE, nth=1)
        storage.replace("s000*", inode=1, operations=("open",), nth=1)
        with pytest.raises(CheckpointError, match="changed under the reader"):
            read_with(str(tmp_path), "advisory", handles=handles, storage=storage, threads=1)


@pytest.mark.parametrize("operation", ["open", "read"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ENODEV])
def test_a_header_that_cannot_be_read_is_a_read_error_with_its_errno(tmp_path: Path, operation: str, code: int) -> None:
    make(tmp_path)
    with recording() as (storage, handles):
        storage.fail("s001*", code, operation="open" if operation == "open" else "read", times=None)
        with pytest.raises(ReadError) as caught:
            read_with(str(tmp_path), "advisory", handles=handles, storage=storage, retries=1)
        assert (caught.value.errno, caught.value.path) == (code, f"{tmp_path}/s001.safetensors")
        assert caught.value.exit_code == 5
        storage.clear()
        again = read_with(str(tmp_path), "advisory", handles=handles, storage=storage)
    assert again.digest == catalog_at(tmp_path).digest


@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_shard_that_vanished_after_the_listing_is_a_checkpoint_error(tmp_path: Path, operation: str) -> None:
    make(tmp_path)
    with recording() as (storage, handles):
        storage.fail("s001*", errno.ENOENT, operation="open" if operation == "open" else "read", times=None)
        with pytest.raises(CheckpointError) as caught:
            read_with(str(tmp_path), "advisory", handles=handles, storage=storage)
    assert caught.value.exit_code == 3
    assert caught.value.path == f"{tmp_path}/s001.safetensors"


@pytest.mark.parametrize("operation", ["open", "read"])
@pytest.mark.parametrize(("retries", "failures"), [(0, 0), (1, 1), (3, 3)])
def test_eio_is_tried_again_as_often_as_configured(tmp_path: Path, operation: str, retries: int, failures: int) -> None:
    make(tmp_path, 1)
    for extra in (0, 1):
        with recording() as (storage, handles):
            storage.fail(
                "s000*", errno.EIO, operation="open" if operation == "open" else "read", times=failures + extra
            )

            def read() -> list[str]:
                return read_with(
                    str(tmp_path), "advisory", handles=handles, storage=storage, threads=1, retries=retries
                ).names

            if extra:
                with pytest.raises(ReadError):
                    read()
            else:
                assert len(read()) == 3


def test_a_file_that_ends_inside_its_header_while_its_size_says_otherwise(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with recording() as (storage, handles):
        storage.truncate("s000*", 20)
        with pytest.raises(EndOfFileError):
            read_with(str(tmp_path), "advisory", handles=handles, storage=storage, threads=1)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_truncated_files_say_so(tmp_path: Path, size: int) -> None:
    (tmp_path / "m.safetensors").write_bytes(bytes_of(["x"])[:size])
    with pytest.raises(CheckpointError, match=r"too small|are missing") as caught:
        catalog_at(tmp_path)
    assert caught.value.path == f"{tmp_path}/m.safetensors"


@pytest.mark.parametrize(
    ("change", "words"), [(-1, "1 bytes are missing"), (-12, "12 bytes are missing"), (3, "3 extra")]
)
def test_files_of_another_length_than_their_header_says_report_the_difference(
    tmp_path: Path, change: int, words: str
) -> None:
    (name,) = make(tmp_path, 1)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size + change)
    with pytest.raises(CheckpointError, match=words):
        catalog_at(tmp_path)


def test_the_first_failure_in_the_order_of_names_is_raised_and_the_others_are_named(tmp_path: Path) -> None:
    make(tmp_path, 5)
    (tmp_path / "s003.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with recording() as (storage, handles):
        storage.fail("s001*", errno.EACCES, times=None)
        with pytest.raises(ReadError) as caught:
            read_with(str(tmp_path), "advisory", handles=handles, storage=storage)
    assert (caught.value.path, caught.value.errno) == (f"{tmp_path}/s001.safetensors", errno.EACCES)
    assert "2 of 5 headers failed; the others: 's003.safetensors'" in caught.value.message
    assert isinstance(caught.value.__cause__, ReadError)


def test_a_folder_in_a_list_of_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        catalog_at((str(tmp_path / "d.safetensors"),))


def test_headers_are_read_in_parallel(tmp_path: Path) -> None:
    make(tmp_path, 2)
    with recording() as (storage, handles), ThreadPoolExecutor(1) as caller:
        gates = [storage.block(f"s00{i}*") for i in range(2)]
        reading = caller.submit(read_with, str(tmp_path), handles=handles, storage=storage, threads=2)
        for gate in gates:
            assert gate.reached.wait(30)  # both are inside a read at once
        assert storage.in_flight == 2
        storage.clear()
        catalog = reading.result()
    assert len(catalog) == 6


_MANY_SHARDS_FEW_DESCRIPTORS = """
    import json, os, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    from loader_service.reading.handles import HandleCache
    from loader_service.reading.local import LocalStorage
    from tests.checkpoint.finding import read_with
    storage = LocalStorage()
    handles = HandleCache(storage)
    before = len(os.listdir("/proc/self/fd"))
    catalog = read_with(sys.argv[1], "advisory", handles=handles, storage=storage)
    held = len(os.listdir("/proc/self/fd")) - before
    handles.close()
    left = len(os.listdir("/proc/self/fd")) - before
    print(json.dumps([len(catalog.shards), len(catalog), held <= handles.limit < 64, left]))
"""


def test_150_shards_are_read_with_64_file_descriptors(tmp_path: Path) -> None:
    make(tmp_path, 150)
    script = textwrap.dedent(_MANY_SHARDS_FEW_DESCRIPTORS)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [150, 450, True, 0]
