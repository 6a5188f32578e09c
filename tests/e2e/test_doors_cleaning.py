"""What goes wrong while a rank cleans up, and services one after another on the same ranks."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

import loader_service as ls
from loader_service.errors import FailureRecord
from loader_service.reading.local import LocalStorage
from tests.e2e import forty
from tests.e2e.doors import (
    AHEAD,
    QUICK,
    Left,
    Oops,
    check_failed,
    located,
    use,
)
from tests.e2e.forty import LAST, fail_payload, payload_of
from tests.e2e.seats import Seat, all_of, header_reads, make_seats, values
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_tasks", "nothing_is_left_of_all")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("doors"))


class StickyStorage(LocalStorage):
    """Files whose closing fails, with this."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def open(self, path: str, *, direct: bool = False) -> Any:
        inner, error = super().open(path, direct=direct), self._error

        class Sticky:
            identity = inner.identity
            read_into = inner.read_into
            read_only_what_is_asked = inner.read_only_what_is_asked

            def close(self) -> None:
                inner.close()
                raise error

        return Sticky()


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), RuntimeError("a bug in a storage")])
@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
async def test_files_that_cannot_be_closed_change_nothing(
    checkpoint: Checkpoint, error: Exception, fails: bool
) -> None:
    raised = Oops(2, wanted="anything")

    async def work(seat: Seat) -> Left:
        storage = StickyStorage(error) if seat.rank == 1 else seat.storage

        def body(taken: int) -> None:
            if fails and seat.rank == 1 and taken == 30:
                raise raised

        async with ls.LoaderService(checkpoint.config(**QUICK), seat.group, storage=storage) as service:
            return await use(service, checkpoint, body=body)

    results = values(await all_of(make_seats(2), work))
    if fails:
        check_failed(results, 1, raised, located(FailureRecord("Oops", str(raised)), 1))
    else:
        assert all(result.complete and result.error is None for result in results)


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "member"])
async def test_an_error_while_cleaning_up_hides_nothing(
    checkpoint: Checkpoint, who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler cannot be stopped: the rank's own error comes out and reaches the others; the load is over."""
    raised = Oops(4, wanted="order")

    async def work(seat: Seat) -> Left:
        async with seat.service(checkpoint.config(**QUICK)) as service:

            def body(taken: int) -> None:
                if seat.rank == who and taken == 2:
                    scheduler = service._engine.open_load._reading._scheduler  # type: ignore[union-attr]
                    stop = scheduler.stop

                    async def stopping(grace_s: float) -> list[str]:
                        await stop(grace_s)
                        raise ZeroDivisionError("while stopping")

                    monkeypatch.setattr(scheduler, "stop", stopping)
                    raise raised

            result = await use(service, checkpoint, body=body)
            assert (await use(service, checkpoint)).complete
            return result

    results = values(await all_of(make_seats(2), work))
    check_failed(results, who, raised, located(FailureRecord("Oops", str(raised)), who))


@pytest.mark.parametrize("door", ["break", "error"])
async def test_a_read_that_never_returns_delays_leaving_by_the_grace_only(checkpoint: Checkpoint, door: str) -> None:
    seats = make_seats(2)
    config = checkpoint.config(**{**QUICK, "agreement": {"timeout_s": 20, "grace_s": 2}})
    gate = seats[1].storage.block(f"*{LAST}", within=payload_of(checkpoint, LAST))
    raised = Oops(5, wanted="time")

    async def work(seat: Seat) -> Left:
        async with seat.service(config) as service:

            def body(taken: int) -> bool | None:
                if seat.rank == 0 or taken < AHEAD:
                    return None
                assert gate.reached.wait(30)
                if door == "error":
                    raise raised
                return True

            result = await use(service, checkpoint, body=body)
            assert service._engine is not None
            assert len(service._engine.threads.stuck()) == seat.rank, "its thread is left behind"
            assert (await use(service, checkpoint)).complete, "with another thread"
            return result

    results = values(await all_of(seats, work))
    gate.release()
    if door == "error":
        check_failed(results, 1, raised, located(FailureRecord("Oops", str(raised)), 1))
    else:
        assert [(result.error, result.complete) for result in results] == [(None, True), (None, False)]


async def test_a_read_that_never_returns_is_named_on_all_ranks(checkpoint: Checkpoint) -> None:
    seats = make_seats(3)
    sections = {**QUICK, "reads": {**QUICK["reads"], "stuck_after_s": 2}, "agreement": {"grace_s": 2}}
    config = checkpoint.config(**sections)
    gate = seats[2].storage.block(f"*{LAST}", within=payload_of(checkpoint, LAST))

    async def work(seat: Seat) -> Left:
        async with seat.service(config) as service:
            result = await use(service, checkpoint)
        async with seat.service(config) as service:
            assert (await use(service, checkpoint)).complete
        return result

    results = values(await all_of(seats, work))
    gate.release()
    own = results[2].error
    assert isinstance(own, ls.ReadError)
    assert "has not returned" in str(own)
    assert own.tensor is not None
    for rank in (0, 1):
        failure = results[rank].error
        assert isinstance(failure, ls.RankFailure)
        where = (failure.rank, failure.phase, failure.path, failure.tensor)
        assert where == (2, "read", str(checkpoint.folder / LAST), own.tensor)
        assert type(failure.__cause__) is ls.ReadError


async def test_batches_that_are_never_given_back_keep_nobody(checkpoint: Checkpoint) -> None:
    """One rank keeps its batches beyond the load and the service; their memory goes when they do."""
    kept: list[ls.Batch] = []

    async def work(seat: Seat) -> ls.LoadReport:
        async with seat.service(checkpoint.config(**QUICK)) as service:
            async with service.open("target") as load:
                async for batch in load.batches():
                    if seat.rank == 1 and len(kept) < 2:
                        kept.append(batch)
                    else:
                        batch.release()
            assert service._engine is not None
            assert service._engine._pool is not None
            assert service._engine._pool.statistics().leases_out == 2 * seat.rank
        return load.report

    assert all(report.complete for report in values(await all_of(make_seats(2), work)))
    first = next(iter(kept[0]))
    assert first.tensor.shape == checkpoint.tensor(first.name)[first.index].shape
    for batch in kept:
        batch.release()


# One after another ----------------------------------------------------------------------------------------------------


async def test_services_one_after_another_on_the_same_ranks(checkpoint: Checkpoint) -> None:
    """Three services, left by three doors, each by another rank; then one that loads twice."""
    seats = make_seats(3)
    config = checkpoint.config(**QUICK)
    raised = Oops(0, wanted="the first")

    async def work(seat: Seat) -> list[Left]:
        def fail(taken: int) -> None:
            if seat.rank == 0:
                raise raised

        async with seat.service(config) as service:
            found = [await use(service, checkpoint, body=fail)]
        async with seat.service(config) as service:
            found.append(await use(service, checkpoint, body=lambda _: seat.rank == 1))
        if seat.rank == 2:
            fail_payload(seat.storage, checkpoint, errno.EIO)
        async with seat.service(config) as service:
            found.append(await use(service, checkpoint, "batches"))
        seat.storage.clear()
        async with seat.service(config) as service:
            return [*found, await use(service, checkpoint, "into"), await use(service, checkpoint)]

    by_rank = values(await all_of(seats, work))
    check_failed([found[0] for found in by_rank], 0, raised, located(FailureRecord("Oops", str(raised)), 0))
    assert [(found[1].error, found[1].complete) for found in by_rank] == [(None, True), (None, False), (None, True)]
    assert [type(found[2].error) for found in by_rank] == [ls.RankFailure, ls.RankFailure, ls.ReadError]
    assert {found[2].verdict.rank for found in by_rank if found[2].verdict} == {2}
    assert all(result.error is None and result.complete for found in by_rank for result in found[3:])


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "member"])
async def test_a_rank_that_has_the_headers_already_waits_for_one_that_reads_them(
    checkpoint: Checkpoint, who: int
) -> None:
    seats = make_seats(2)

    async def work(seat: Seat) -> tuple[int, int]:
        async with seat.service(checkpoint.config(**QUICK)) as service:
            if seat.rank == who:
                await service.plan("target")
            before = header_reads(seat.storage, str(checkpoint.folder / LAST))
            found = [await use(service, checkpoint) for _ in range(2)]
            assert all(result.complete for result in found)
            return before, header_reads(seat.storage, str(checkpoint.folder / LAST))

    results = values(await all_of(seats, work))
    assert results[who] == (1, 1), "its own are good enough"
    assert results[1 - who] == (0, 1)


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "member"])
async def test_an_error_beside_a_rank_that_is_far_ahead(checkpoint: Checkpoint, who: int) -> None:
    """One has its headers and everything read, and waits at the end; the other one's headers cannot be read."""
    seats = make_seats(2)
    seats[1 - who].storage.fail(f"*{LAST}", errno.EACCES, times=None)

    async def work(seat: Seat) -> Left:
        async with seat.service(checkpoint.config(**QUICK)) as service:
            if seat.rank == who:
                await service.plan("target")
            result = await use(service, checkpoint)
            seat.storage.clear()
            assert (await use(service, checkpoint)).complete
            return result

    results = values(await all_of(seats, work))
    assert isinstance(results[1 - who].error, ls.ReadError)
    failure = results[who].error
    assert isinstance(failure, ls.RankFailure)
    where = (failure.rank, failure.phase, failure.path, failure.errno)
    assert where == (1 - who, "catalog", str(checkpoint.folder / LAST), errno.EACCES)
