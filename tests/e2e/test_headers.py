"""Headers that cannot be read, on some ranks or all: all ranks read all headers again together, once."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.agreement.session import Session
from loader_service.reading.fake import FakeStorage
from loader_service.reading.faults import Operation
from loader_service.reading.local import LocalStorage
from tests.e2e.seats import Seat, all_of, errors, header_reads, make_seats, payload_reads, values
from tests.support.checkpoints import Checkpoint, assert_same, write_checkpoint

BAD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(
        tmp_path_factory.mktemp("headers"),
        {f"model-0000{i}-of-00003.safetensors": {f"w{i}": ("F32", (100, i)), f"b{i}": ("U8", (i,))} for i in (1, 2, 3)},
    )


async def load_all(seat: Seat, checkpoint: Checkpoint, **sections: Any) -> ls.LoadReport:
    async with seat.service(checkpoint.config(**sections)) as service, service.open("target") as load:
        names = []
        async for name, tensor in load:
            assert_same(tensor, checkpoint.tensor(name), name)
            names.append(name)
    assert names == list(checkpoint.tensors)
    return load.report


def times_read(seat: Seat, checkpoint: Checkpoint) -> list[int]:
    """How often this rank read the first bytes of each shard; a call that failed is not among them."""
    return [
        header_reads(seat.storage, str(checkpoint.folder / f"model-0000{i}-of-00003.safetensors")) for i in (1, 2, 3)
    ]


@pytest.mark.parametrize("operation", ["open", "read"])
@pytest.mark.parametrize("who", [{0}, {2}, {1, 2}, {0, 1, 2}], ids=["leader", "one", "several", "all"])
async def test_a_header_that_fails_once_makes_all_ranks_read_all_again_once(
    checkpoint: Checkpoint, who: set[int], operation: Operation
) -> None:
    seats = make_seats(3)
    for rank in who:
        seats[rank].storage.fail(f"*{BAD}", errno.ETIMEDOUT, operation=operation)
    reports = values(await all_of(seats, lambda seat: load_all(seat, checkpoint)))
    for seat, report in zip(seats, reports, strict=True):
        assert report.complete
        assert any("headers" in fallback for fallback in report.fallbacks), "the report says so on every rank"
        failed_once = 1 if seat.rank in who else 0
        assert times_read(seat, checkpoint) == [2, 2 - failed_once, 2]
        assert seat.storage.lists() == 2, "the folder is looked at again too"
        assert report.read_bytes == checkpoint.payload_bytes, "and the payload was read once"


async def test_a_folder_that_cannot_be_listed_once_is_listed_again_by_all(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)
    seats[1].storage.fail("*", errno.ETIMEDOUT, operation="list")
    assert all(report.complete for report in values(await all_of(seats, lambda seat: load_all(seat, checkpoint))))
    assert [times_read(seat, checkpoint) for seat in seats] == [[2, 2, 2], [1, 1, 1]]


async def test_a_rank_alone_reads_its_headers_again_too(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    storage.fail(f"*{BAD}", errno.EACCES)
    async with ls.LoaderService(checkpoint.config(), "solo", storage=storage) as service:
        async with service.open("target") as load:
            assert [name async for name, _ in load] == list(checkpoint.tensors)
    assert len(load.report.fallbacks) == 1


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [
        pytest.param(errno.EACCES, ls.ReadError, 5, id="EACCES"),
        pytest.param(errno.EIO, ls.ReadError, 5, id="EIO"),
        pytest.param(errno.ENOENT, ls.CheckpointError, 3, id="ENOENT"),
    ],
)
@pytest.mark.parametrize("who", [0, 1])
async def test_a_header_that_fails_twice_ends_the_load_everywhere_with_its_cause(
    checkpoint: Checkpoint, code: int, kind: type[ls.LoaderError], exit_code: int, who: int
) -> None:
    seats = make_seats(3)
    seats[who].storage.fail(f"*{BAD}", code, times=None)
    path = str(checkpoint.folder / BAD)
    results = await all_of(seats, lambda seat: load_all(seat, checkpoint, reads={"retries": 1}))
    for seat, error in zip(seats, errors(results), strict=True):
        if seat.rank == who:
            assert type(error) is kind, "the failing rank keeps its own exception"
            assert error.exit_code == exit_code
        else:
            assert isinstance(error, ls.RankFailure)
            assert type(error.__cause__) is kind
            assert f"rank {who} failed in phase catalog" in str(error)
            assert path in str(error)
            assert error.exit_code == 4
        record = error.record()
        assert (record.error, record.rank, record.phase, record.path) == (kind.__name__, who, "catalog", path)
        assert record.errno == (code if code != errno.ENOENT else record.errno)
        assert not payload_reads(seat.storage)
        assert times_read(seat, checkpoint) == [2, 0 if seat.rank == who else 2, 2], "again once, and not more often"


async def test_the_lowest_of_several_failing_ranks_is_the_cause_for_the_others(checkpoint: Checkpoint) -> None:
    seats = make_seats(3)
    for rank in (1, 2):
        seats[rank].storage.fail(f"*{BAD}", errno.EACCES, times=None)
    found = errors(await all_of(seats, lambda seat: load_all(seat, checkpoint)))
    assert [type(error) for error in found] == [ls.RankFailure, ls.ReadError, ls.ReadError]
    assert [error.rank for error in found] == [1, 1, 2]


async def test_a_malformed_header_on_one_rank_ends_the_load_everywhere(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """One rank has a damaged copy of the checkpoint: nobody loads."""
    for path in checkpoint.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / BAD).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    seats = make_seats(2)
    copies = [checkpoint, Checkpoint(tmp_path, checkpoint.tensors, checkpoint.shard_of)]
    own, other = reversed(errors(await all_of(seats, lambda seat: load_all(seat, copies[seat.rank]))))
    assert isinstance(own, ls.CheckpointError)
    assert isinstance(other, ls.RankFailure)
    assert "LFS pointer" in str(own)
    assert "LFS pointer" in str(other)
    assert not any(payload_reads(seat.storage) for seat in seats)


async def test_ranks_that_planned_before_agree_again_after_another_rank_failed(checkpoint: Checkpoint) -> None:
    """Rank 0 has a plan from before; rank 1's header fails once, so that all read anew: rank 0 loads by the new one."""
    seats = make_seats(2)
    seats[1].storage.fail(f"*{BAD}", errno.ETIMEDOUT)

    async def work(seat: Seat) -> bool:
        async with seat.service(checkpoint.config()) as service:
            before = await service.plan("target") if seat.rank == 0 else None
            async with service.open("target") as load:
                assert [name async for name, _ in load] == list(checkpoint.tensors)
                assert load.plan is not before
            return load.report.complete

    assert values(await all_of(seats, work)) == [True, True]
    assert times_read(seats[0], checkpoint) == [2, 2, 2]


async def test_after_a_failed_load_the_same_services_read_headers_anew(checkpoint: Checkpoint) -> None:
    """The same service can load once the cause is gone; headers of before the failure are not trusted."""
    seats = make_seats(2)

    async def work(seat: Seat) -> list[int]:
        async with seat.service(checkpoint.config(reads={"retries": 0})) as service:
            await service.plan("target")
            if seat.rank == 1:
                seat.storage.fail(f"*{BAD}", errno.EIO)
            with pytest.raises(ls.LoaderError):
                async with service.open("target") as load:
                    async for _ in load:
                        pass
            async with service.open("target") as load:
                assert [name async for name, _ in load] == list(checkpoint.tensors)
        return times_read(seat, checkpoint)

    assert values(await all_of(seats, work)) == [[2, 2, 2], [2, 2, 2]]


async def test_a_rank_whose_headers_come_slowly_reports_progress(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would count as late after `agreement.timeout_s`, however many files it still opens."""
    seats = make_seats(2)
    gate = seats[1].storage.block(f"*{BAD}")
    heard = threading.Event()
    report_progress = Session.report_progress

    def listen(session: Session, progress: str | int) -> None:
        report_progress(session, progress)
        if session.rank == 1 and gate.reached.is_set() and "3 files opened" in str(progress):
            heard.set()

    monkeypatch.setattr(Session, "report_progress", listen)
    loading = asyncio.ensure_future(
        all_of(seats, lambda seat: load_all(seat, checkpoint, reads={"stuck_after_s": 200, "threads": 1}))
    )
    assert await asyncio.to_thread(heard.wait, 30)
    gate.release()
    assert all(report.complete for report in values(await loading))
