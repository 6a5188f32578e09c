"""A checkpoint that changes under the reader: between header and payload, or while payload is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import loader_service as ls
from tests.e2e.seats import Seat, all_of, errors, make_seats, payload_reads
from tests.support.checkpoints import Checkpoint, assert_same, write_checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_descriptors", "no_leaked_tasks")

# Far less memory than the checkpoint has bytes: when the first tensor is there, most of it cannot have been read yet.
SMALL = {"staging": {"capacity_bytes": "16KiB"}, "reads": {"chunk_bytes": "4KiB"}}
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    return write_checkpoint(
        tmp_path / "checkpoint",
        {shard: {f"{shard[10]}.w{k:02}": ("BF16", (50, 41)) for k in range(20)} for shard in shards},
    )


def replaced(path: Path) -> None:
    """The same bytes, time and name: another file."""
    copy = path.with_name(".copy")
    shutil.copy2(path, copy)
    copy.replace(path)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def overwritten(path: Path) -> None:
    """In place, at the same length, as a writer that knows of no reader does."""
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def touched(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def removed(path: Path) -> None:
    path.unlink()


CHANGES = [replaced, truncated, appended, overwritten, touched, removed]


@pytest.mark.parametrize("when", ["after the headers", "while reading"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_shard_that_changes_is_an_error_that_names_it(
    checkpoint: Checkpoint, change: Callable[[Path], None], when: str
) -> None:
    path = checkpoint.folder / SHARD
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        with pytest.raises(ls.CheckpointError, match="changed under the reader") as caught:
            async with service.open("target") as load:
                if when == "after the headers":
                    change(path)
                async for name, _ in load:
                    if when == "while reading" and name == "1.w00":
                        change(path)
    assert (caught.value.path, caught.value.phase, caught.value.exit_code) == (str(path), "read", 3)


@pytest.mark.parametrize("form", ["batches", "into"])
@pytest.mark.parametrize("change", [truncated, touched])
async def test_every_form_notices(checkpoint: Checkpoint, change: Callable[[Path], None], form: str) -> None:
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        with pytest.raises(ls.CheckpointError, match="changed under the reader"):
            async with service.open("target") as load:
                change(checkpoint.folder / SHARD)
                if form == "batches":
                    async for batch in load.batches():
                        batch.release()
                else:
                    await load.into({"2.w19": torch.zeros((50, 41), dtype=torch.bfloat16)})


async def test_a_clean_break_notices_too(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        with pytest.raises(ls.CheckpointError, match="changed under the reader"):
            async with service.open("target") as load:
                async for name, _ in load:
                    if name == "2.w03":
                        touched(checkpoint.folder / SHARD)
                        break


async def test_a_shard_whose_payload_was_not_read_may_change(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config({"skip": ["2.*"]}, **SMALL), "solo") as service:
        async with service.open("target") as load:
            touched(checkpoint.folder / SHARD)
            assert len([name async for name, _ in load]) == 20


async def test_the_same_service_loads_the_new_files_after_the_failure(checkpoint: Checkpoint) -> None:
    path = checkpoint.folder / SHARD
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        with pytest.raises(ls.CheckpointError):
            async with service.open("target") as load:
                replaced(path)
                async for _ in load:
                    pass
        async with service.open("target") as load:
            async for name, tensor in load:
                assert_same(tensor, checkpoint.tensor(name), name)
    assert load.report.complete


async def test_a_file_that_changes_for_one_rank_fails_all(checkpoint: Checkpoint, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint.folder, copy)
    folders = [checkpoint.folder, copy]

    async def work(seat: Seat) -> None:
        folder = Checkpoint(folders[seat.rank], checkpoint.tensors, checkpoint.shard_of)
        async with seat.service(folder.config(**SMALL)) as service, service.open("target") as load:
            async for name, _ in load:
                if seat.rank == 1 and name == "1.w00":
                    truncated(copy / SHARD)

    other, own = errors(await all_of(make_seats(2), work))
    assert isinstance(own, ls.CheckpointError)
    assert isinstance(other, ls.RankFailure)
    assert isinstance(other.__cause__, ls.CheckpointError)
    assert (other.rank, other.phase, other.path) == (1, "read", str(copy / SHARD))


@pytest.mark.parametrize(
    ("difference", "words"),
    [pytest.param(-7, "7 bytes", id="shorter"), pytest.param(7, "7 extra bytes", id="longer")],
)
async def test_a_file_of_the_wrong_length_stops_all_ranks_before_any_payload(
    checkpoint: Checkpoint, tmp_path: Path, difference: int, words: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint.folder, copy)
    os.truncate(copy / SHARD, (copy / SHARD).stat().st_size + difference)
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        folder = Checkpoint([checkpoint.folder, copy][seat.rank], checkpoint.tensors, checkpoint.shard_of)
        async with seat.service(folder.config(**SMALL)) as service, service.open("target") as load:
            async for _ in load:
                pass

    other, own = errors(await all_of(seats, work))
    assert isinstance(own, ls.CheckpointError)
    assert isinstance(other, ls.RankFailure)
    assert own.exit_code == 3
    for error in (own, other):
        assert words in str(error)
        assert error.path == str(copy / SHARD)
    assert not any(payload_reads(seat.storage) for seat in seats)
