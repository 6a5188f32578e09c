"""Calls that are under way at the same time: none keeps another's ranks waiting, and what fails is that call alone."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

import loader_service as ls
from loader_service import neighbours
from loader_service.agreement import node_connect
from loader_service.agreement.store_clients import Meeting
from loader_service.config.schema import ServiceConfig
from loader_service.tables import TableRun
from tests.e2e.seats import WATCHDOG_S, Seat, all_of, make_seats, values
from tests.support.checkpoints import Checkpoint
from tests.tables.making import DEEP, LAYOUTS, QUICK, SCALE, WEIGHT, config_of, rules, service_of

Result = tuple[ls.HostTable | BaseException]  # what came out, wrapped: it is no failure of the test's own rank


@pytest.fixture
def settings(checkpoint: Checkpoint) -> ServiceConfig:
    return config_of(checkpoint, rules("per_rank"), 3, agreement=QUICK)


async def fill(service: ls.LoaderService, name: str = WEIGHT, *, within_s: float | None = None) -> Result:
    try:
        async with asyncio.timeout(within_s):
            return (await service.host_table("target", name),)
    except BaseException as error:
        return (error,)


def engine_of(service: ls.LoaderService) -> Any:
    assert service._engine is not None
    return service._engine


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_rank_that_is_busy_with_other_work_meets_its_node_all_the_same(
    checkpoint: Checkpoint, layout: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pinning a table takes its time, and each of two meetings could wait for the other on one thread."""
    met = threading.Semaphore(0)
    connect = node_connect.connect

    def meet(*args: Any) -> Any:
        mesh = connect(*args)
        met.release()
        return mesh

    monkeypatch.setattr(neighbours, "connect", meet)
    settings = config_of(checkpoint, rules(layout), 2, agreement={**QUICK, "timeout_s": 4})

    def until_all_have_met() -> bool:
        return met.acquire(timeout=WATCHDOG_S) and met.acquire(timeout=WATCHDOG_S)

    async def work(seat: Seat) -> ls.HostTable:
        async with service_of(seat, settings) as service:
            busy = engine_of(service)._workers.submit(until_all_have_met) if seat.rank == 1 else None
            table = await service.host_table("target", WEIGHT)
            assert busy is None or busy.result()
            return table

    with caplog.at_level(logging.WARNING, "loader_service"):
        values(await all_of(make_seats(2), work))
    assert "did not come" not in caplog.text


async def test_a_rank_that_does_not_come_to_its_node_is_told(
    settings: ServiceConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = node_connect.connect

    def meet(door: Any, cards: Any, stopped: Any, wait_s: float) -> Any:
        own = door.card.rank
        return connect(door, [card for card in cards if own != 2 and card.rank != 2], stopped, 0.2)

    monkeypatch.setattr(neighbours, "connect", meet)

    async def work(seat: Seat) -> ls.HostTable:
        async with service_of(seat, settings) as service:
            return await service.host_table("target", WEIGHT)

    with caplog.at_level(logging.WARNING, "loader_service"):
        values(await all_of(make_seats(3), work))
    said = sorted(record.getMessage() for record in caplog.records if "did not come" in record.getMessage())
    whom = [each.partition(" of this node did not")[0] for each in said]
    assert whom == ["ranks 0, 1", "ranks 2", "ranks 2"]


async def test_a_call_that_a_rank_gives_up_before_another_rank_has_come_fails_alone(
    settings: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes late meets the others in the call in which they have waited, not in the next one, though that one has
    begun."""
    begun: list[int] = []
    next_has_begun = asyncio.Event()
    here = asyncio.get_running_loop()
    take_number = Meeting._next

    def number(meeting: Meeting, client: Any) -> int:
        found = take_number(meeting, client)
        if meeting._rank == 2:
            begun.append(found)
            if len(begun) == 2:
                here.call_soon_threadsafe(next_has_begun.set)
        return found

    monkeypatch.setattr(Meeting, "_next", number)

    async def work(seat: Seat) -> list[Result]:
        async with service_of(seat, settings) as service:
            if seat.rank == 1:
                await next_has_begun.wait()
            first = fill(service, within_s=0.1 if seat.rank == 2 else None)
            return [*await asyncio.gather(first, fill(service, SCALE)), await fill(service, DEEP)]

    found = values(await all_of(make_seats(3), work))
    for rank, ((gave_up,), *later) in enumerate(found):
        assert [type(result) for (result,) in later] == [ls.HostTable, ls.HostTable], found
        if rank == 2:
            assert isinstance(gave_up, TimeoutError)
        else:
            assert isinstance(gave_up, ls.RankFailure)
            assert gave_up.rank == 2


async def test_a_service_that_closes_while_a_table_has_failed_changes_nothing(
    settings: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaning, cleaned = threading.Event(), threading.Event()
    let_go = TableRun._let_go

    async def slow(run: TableRun) -> None:
        if run._engine.group.rank == 0:
            cleaning.set()
            await asyncio.to_thread(cleaned.wait, WATCHDOG_S)
        await let_go(run)

    def refuse(run: TableRun, *_: object) -> bool:
        raise OSError("made up")

    monkeypatch.setattr(TableRun, "_let_go", slow)
    monkeypatch.setattr(TableRun, "_pin", refuse)

    async def work(seat: Seat) -> Result:
        service = await service_of(seat, settings).__aenter__()
        filling = asyncio.ensure_future(fill(service))
        if seat.rank == 0:
            await asyncio.to_thread(cleaning.wait, WATCHDOG_S)
            (task,) = engine_of(service).collective_tasks
            closing = asyncio.ensure_future(service.__aexit__(None, None, None))
            async with asyncio.timeout(WATCHDOG_S):
                while not task.cancelling():  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
            cleaned.set()
            await closing
        found = await filling
        if seat.rank:
            await service.__aexit__(None, None, None)
        return found

    for (error,) in values(await all_of(make_seats(3), work)):
        assert isinstance(error, OSError | ls.RankFailure), error
