"""What goes wrong on one rank while payload is read ends the load on every rank, with its cause, and leaves no rest."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import pytest

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.reading.fake import FakeStorage
from loader_service.reading.faults import Gate
from loader_service.reading.local import LocalStorage
from tests.e2e import forty
from tests.e2e.forty import LAST, SMALL, consume, fail_payload, payload_of
from tests.e2e.seats import Seat, all_of, errors, make_seats, payload_reads, values
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("forty"))


@pytest.mark.parametrize("who", [0, 2], ids=["leader", "member"])
async def test_a_rank_that_cannot_read_fails_all_and_all_can_load_again(checkpoint: Checkpoint, who: int) -> None:
    seats = make_seats(3)

    async def work(seat: Seat) -> list[ls.LoaderError]:
        async with seat.service(checkpoint.config(**SMALL)) as service:
            if seat.rank == who:
                fail_payload(seat.storage, checkpoint, errno.EIO)
            with pytest.raises(ls.LoaderError) as caught:
                await consume(service, checkpoint)
            seat.storage.clear()
            assert (await consume(service, checkpoint)).complete, "the same services load once the cause is gone"
        return [caught.value]

    for rank, (error,) in enumerate(values(await all_of(seats, work))):
        assert isinstance(error, ls.ReadError if rank == who else ls.RankFailure)
        assert error.exit_code == (5 if rank == who else 4)
        if rank != who:
            assert isinstance(error.__cause__, ls.ReadError)
        record = error.record()
        assert (record.error, record.rank, record.phase, record.errno) == ("ReadError", who, "read", errno.EIO)
        assert record.path == str(checkpoint.folder / LAST)
        assert (record.tensor or "").startswith("s2.w")


async def test_ranks_whose_own_reads_stand_still_learn_of_a_failure_at_once(checkpoint: Checkpoint) -> None:
    """Ranks 0 and 2 wait for reads that do not return: they end nevertheless, and leave the stuck reads behind."""
    seats = make_seats(3)
    config = checkpoint.config(**{**SMALL, "agreement": {"grace_s": 0.2}})
    gates: dict[int, Gate] = {}

    async def work(seat: Seat) -> ls.LoadReport:
        async with seat.service(config) as service:
            load = service.open("target")
            with pytest.raises(ls.ReadError if seat.rank == 1 else ls.RankFailure) as caught:
                async with load:
                    if seat.rank != 1:
                        gates[seat.rank] = seat.storage.block("*", times=None)
                    else:
                        fail_payload(seat.storage, checkpoint, errno.EACCES)
                    async for _ in load:
                        pass
            assert caught.value.record().rank == 1
            report = load.report
            if seat.rank != 1:
                gates[seat.rank].release()
            return report

    reports = values(await all_of(seats, work))
    for rank, report in enumerate(reports):
        assert not report.complete
        left_behind = [line for line in report.fallbacks if "never returned" in line]
        assert bool(left_behind) == (rank != 1)


async def test_a_failing_rank_tells_the_others_before_it_waits_for_its_own_reads(checkpoint: Checkpoint) -> None:
    """One of its reads stands still: the others hear of the failure meanwhile, and their news lets the read go on.

    The leader is the one that fails, for a leader that hears of a failure waits until the others have left.
    """
    seats = make_seats(2)
    storage = seats[0].storage
    first = f"*{next(iter(checkpoint.shard_of.values()))}"
    within = payload_of(checkpoint, first.removeprefix("*"))
    gate = storage.block(first, within=within)
    storage.fail(first, errno.EACCES, within=within, nth=1)
    loads: list[ls.LoadReport] = []

    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**SMALL)) as service:
            load = service.open("target")
            try:
                async with load:
                    async for _ in load:
                        pass
            except ls.RankFailure:
                gate.release()
                raise
            finally:
                loads.append(load.report)

    assert [type(error) for error in errors(await all_of(seats, work))] == [ls.ReadError, ls.RankFailure]
    assert not any("never returned" in line for report in loads for line in report.fallbacks)


ONE_RANK_ONLY = {"rules": [{"match": "*", "assign": {"axis": "world", "to": [0]}}]}


async def test_a_rank_without_bytes_takes_part(checkpoint: Checkpoint) -> None:
    seats = make_seats(3)

    async def work(seat: Seat) -> ls.LoadReport:
        async with seat.service(checkpoint.config(ONE_RANK_ONLY, **SMALL)) as service:
            async with service.open("target") as load:
                names = [name async for name, _ in load]
            assert names == (list(checkpoint.tensors) if seat.rank == 0 else [])
            async with service.open("target") as load:
                async for batch in load.batches():
                    batch.release()
        return load.report

    for seat, report in zip(seats, values(await all_of(seats, work)), strict=True):
        assert report.complete
        if seat.rank:
            assert (report.tensors, report.payload_bytes, report.read_bytes, report.files_read) == (0, 0, 0, ())
            assert not payload_reads(seat.storage)


async def test_a_rank_without_bytes_hears_of_another_ranks_failure(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)
    fail_payload(seats[0].storage, checkpoint, errno.EIO)

    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(ONE_RANK_ONLY, **SMALL)) as service, service.open("target") as load:
            async for _ in load:
                pass

    own, other = errors(await all_of(seats, work))
    assert isinstance(own, ls.ReadError)
    assert isinstance(other, ls.RankFailure)
    assert other.rank == 0


@pytest.mark.parametrize("kind", [MemoryError, SystemExit, KeyboardInterrupt, ZeroDivisionError])
async def test_whatever_a_reading_thread_raises_reaches_all_ranks(
    checkpoint: Checkpoint, kind: type[BaseException]
) -> None:
    seats = make_seats(2)
    fail_payload(seats[1].storage, checkpoint, lambda: kind("in a thread"))

    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**SMALL)) as service:
            await consume(service, checkpoint)

    other, own = errors(await all_of(seats, work))
    assert type(own.__cause__) is kind
    assert own.path == str(checkpoint.folder / LAST)
    assert isinstance(other, ls.RankFailure)
    for error in (own, other):
        assert kind.__name__ in str(error)
        assert error.record().rank == 1


async def test_several_failing_ranks_keep_their_own_errors_and_the_lowest_is_named(checkpoint: Checkpoint) -> None:
    """Both fail at the same moment, within the time in which causes are collected."""
    seats = make_seats(4)
    together = threading.Barrier(2)

    def error(code: int) -> Callable[[], BaseException]:
        def make() -> BaseException:
            together.wait(30)
            return OSError(code, os.strerror(code))

        return make

    for rank, code in ((1, errno.EACCES), (3, errno.ENXIO)):
        fail_payload(seats[rank].storage, checkpoint, error(code), times=1)

    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**SMALL)) as service:
            await consume(service, checkpoint)

    found = errors(await all_of(seats, work))
    assert [type(error) for error in found] == [ls.RankFailure, ls.ReadError, ls.RankFailure, ls.ReadError]
    assert [error.errno for error in found] == [errno.EACCES, errno.EACCES, errno.EACCES, errno.ENXIO]
    assert [error.record().rank for error in found] == [1, 1, 1, 3]
    assert any("EACCES" in note for note in found[3].__notes__), "the common verdict is attached"


async def test_nothing_of_a_failed_load_is_left_in_the_next(checkpoint: Checkpoint) -> None:
    """Solo, with the pool in sight: memory is back, and the next load through it is whole."""
    storage = FakeStorage(LocalStorage())
    config: ServiceConfig = checkpoint.config(**SMALL)
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        for code in (errno.EIO, errno.EACCES, errno.ESTALE):
            fail_payload(storage, checkpoint, code)
            with pytest.raises(ls.ReadError) as caught:
                await consume(service, checkpoint)
            assert caught.value.errno == code
            storage.clear()
            assert service._engine is not None
            assert service._engine._pool is not None
            assert service._engine._pool.statistics().out_bytes == 0
            assert (await consume(service, checkpoint)).complete
    assert storage.open_now == 0


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "member"])
async def test_a_rank_that_never_comes_is_named(checkpoint: Checkpoint, who: int) -> None:
    seats = make_seats(2)
    config = checkpoint.config(**{**SMALL, "agreement": {"start_timeout_s": 0.5, "timeout_s": 1, "grace_s": 0.1}})
    seat = seats[1 - who]
    async with seat.service(config) as service:
        with pytest.raises(ls.RankFailure) as caught:
            await consume(service, checkpoint)
    assert (caught.value.rank, caught.value.phase) == (who, "config")
    assert not seat.storage.reads, "not even a header is read before all ranks are there"
