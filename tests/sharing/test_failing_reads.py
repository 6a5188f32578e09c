"""Reads that stand still, consumers and devices that take their time, files that change, while ranks share reads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.errors import FailureRecord
from loader_service.memory import caretaker
from loader_service.sharing import readahead
from tests.e2e import forty
from tests.e2e.doors import FORMS, Left, Oops, check_failed, check_logs, located, use
from tests.e2e.forty import LAST, payload_of
from tests.e2e.seats import Seat, all_of, make_seats, payload_reads, values
from tests.sharing.failing import (
    FIRST,
    SLOT_BYTES,
    WAYS,
    config_of,
    go_through,
    load_all,
    mappings,
    progress_of,
    run_of,
    sharing_of,
    take_all,
    until,
    write,
)
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_tasks", "nothing_is_left", "nothing_is_left_of_all")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("failures"))


# Who takes time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
async def test_a_consumer_that_stops_is_waited_for_and_named_and_nothing_fails(
    checkpoint: Checkpoint, form: str
) -> None:
    config = config_of(checkpoint, "staging")
    services: dict[int, ls.LoaderService] = {}
    named = False

    async def stop_once(load: ls.Load) -> None:
        nonlocal named
        async for batch in load.batches():
            with batch:
                if not named:
                    await until(lambda: all("waiting for rank 2" in progress_of(services[rank]) for rank in (0, 1)))
                    named = True

    async def work(seat: Seat) -> Left:
        async with seat.service(config) as service:
            services[seat.rank] = service
            return await (use(service, checkpoint, form) if seat.rank < 2 else go_through(service, stop_once))

    for result in values(await all_of(make_seats(3), work)):
        assert (result.error, result.complete) == (None, True)


async def test_a_read_for_the_node_that_never_returns_is_named_by_all_and_left_behind(checkpoint: Checkpoint) -> None:
    """Its thread keeps the memory, and the next load has other memory."""
    sections: dict[str, dict[str, Any]] = {"agreement": {"grace_s": 2}, "reads": {"stuck_after_s": 2}}
    config = config_of(checkpoint, "staging", **sections)
    seats = make_seats(3)
    gate = seats[1].storage.block(f"*{FIRST}", within=(SLOT_BYTES, SLOT_BYTES + 1))
    fallbacks: dict[int, tuple[str, ...]] = {}

    async def work(seat: Seat) -> Left:
        async def take(load: ls.Load) -> None:
            try:
                await take_all(load)
            finally:
                loads.append(load)

        loads: list[ls.Load] = []
        async with seat.service(config) as service:
            found = await go_through(service, take)
            fallbacks[seat.rank] = loads[0].report.fallbacks
            assert (await use(service, checkpoint)).complete
            return found

    results = values(await all_of(seats, work))
    gate.release()
    verdict = results[1].verdict
    assert verdict is not None
    assert (verdict.error, verdict.rank, verdict.tensor) == ("ReadError", 1, None)
    assert "which ranks of this node share has not returned for" in verdict.message
    check_failed(results, 1, None, verdict)
    for rank, lines in fallbacks.items():
        assert any("left behind" in line for line in lines) == (rank == 1), lines


async def test_a_rank_that_fails_does_not_wait_for_anothers_read_that_stands_still(checkpoint: Checkpoint) -> None:
    config = config_of(checkpoint, "staging", agreement={"grace_s": 2})
    seats = make_seats(2)
    gate = seats[1].storage.block(f"*{FIRST}", within=(SLOT_BYTES, SLOT_BYTES + 1))
    raised = Oops(6, wanted="time")

    async def fail(_load: ls.Load) -> None:
        await until(gate.reached.is_set)
        raise raised

    async def work(seat: Seat) -> Left:
        async with seat.service(config) as service:
            found = await go_through(service, fail if seat.rank == 0 else take_all)
            assert (await use(service, checkpoint)).complete
            return found

    results = values(await all_of(seats, work))
    gate.release()
    check_failed(results, 0, raised, located(FailureRecord("Oops", str(raised)), 0))


class Reading:
    """What a device does that has not read a batch yet."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        raise AssertionError("nobody may wait for a device")


@pytest.mark.parametrize("who", [1, 0], ids=["its own rank fails", "another rank fails"])
async def test_a_device_that_still_reads_delays_no_failure_and_keeps_its_memory(
    checkpoint: Checkpoint, who: int
) -> None:
    """The other rank fails while the device's own rank already leaves, and waits for the device."""
    config = config_of(checkpoint, "staging", agreement={"grace_s": 2})
    raised, device = Oops(8, wanted="nothing"), Reading()
    services: dict[int, ls.LoaderService] = {}

    async def take_one(rank: int, load: ls.Load) -> None:
        async for batch in load.batches():
            with batch:
                if rank == 1:
                    batch.hold_until(device)
            break
        if rank == 0 and who == 0:
            await until(lambda: run_of(services[1])._leaving)
        if rank == who:
            raise raised

    async def work(seat: Seat) -> Left:
        async with seat.service(config) as service:
            services[seat.rank] = service
            return await go_through(service, partial(take_one, seat.rank))

    results = values(await all_of(make_seats(2), work))
    check_failed(results, who, raised, located(FailureRecord("Oops", str(raised)), who))
    del results  # whose tracebacks keep what was in use
    gc.collect()
    assert len(mappings()) == 1, "what the device still reads"
    device.passed.set()
    await until(lambda: not mappings())


async def test_a_device_of_which_nobody_knows_whether_it_still_reads_fails_all(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Reading):
        def query(self) -> bool:
            raise RuntimeError("the device is gone")

    async def work(seat: Seat) -> Left:
        async def take(load: ls.Load) -> None:
            async for batch in load.batches():
                with batch:
                    if seat.rank == 1:
                        batch.hold_until(Broken())

        async with seat.service(config_of(checkpoint, "staging")) as service:
            return await go_through(service, take)

    monkeypatch.setattr(caretaker._log.logger, "disabled", True)
    results = values(await all_of(make_seats(2), work))
    verdict = results[1].verdict
    assert verdict is not None
    assert (verdict.error, verdict.rank) == ("StateError", 1)
    assert "nobody knows whether a device still reads block 0" in verdict.message
    check_failed(results, 1, None, verdict)


# A checkpoint that changes --------------------------------------------------------------------------------------------


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touched(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def replaced(path: Path) -> None:
    copy = path.with_name(".copy")
    shutil.copy2(path, copy)
    copy.replace(path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [truncated, touched, replaced])
async def test_a_shard_that_changes_while_it_is_shared_fails_all(
    tmp_path: Path, way: str, change: Callable[[Path], None]
) -> None:
    checkpoint = await asyncio.to_thread(write, tmp_path)
    path = checkpoint.folder / LAST
    changed = asyncio.Event()

    async def take(rank: int, load: ls.Load) -> None:
        async for _ in load:
            if rank == 0 and not changed.is_set():
                await asyncio.to_thread(change, path)
                changed.set()
            await changed.wait()

    async def work(seat: Seat) -> Left:
        async with seat.service(config_of(checkpoint, way)) as service:
            return await go_through(service, partial(take, seat.rank))

    results = values(await all_of(make_seats(3), work))
    check_logs([result.log for result in results])
    for result in results:
        assert result.verdict is not None
        assert result.verdict == results[0].verdict
        assert (result.verdict.error, result.verdict.path) == ("CheckpointError", str(path))
        assert "changed under the reader" in result.verdict.message
        assert isinstance(result.error, ls.CheckpointError | ls.RankFailure)
        assert result.out_bytes == 0


# Reading ahead --------------------------------------------------------------------------------------------------------


def payload_once(seat: Seat, checkpoint: Checkpoint) -> None:
    """Each byte of the payload was read, and none twice."""
    for shard in (FIRST, LAST):
        reads = sorted((read.offset, read.nbytes) for read in payload_reads(seat.storage, f"*{shard}"))
        at, stop = payload_of(checkpoint, shard)
        for offset, nbytes in reads:
            assert offset == at
            at += nbytes
        assert at == stop


async def test_read_ahead_that_fails_is_said_and_nothing_is_read_twice(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "PIECE_BYTES", SLOT_BYTES)
    config = config_of(checkpoint, "page_cache", reads={"threads_per_node": 2})
    seats = make_seats(2)
    gate = seats[1].storage.block("*", operation="read ahead", nth=2)
    seats[1].storage.fail("*", errno.EIO, operation="read ahead", nth=2, times=None)
    names = list(checkpoint.tensors)

    async def work(seat: Seat) -> ls.LoadReport:
        return await load_all(seat, config, names, checkpoint, gate.release)

    for seat, report in zip(seats, values(await all_of(seats, work)), strict=True):
        assert report.complete
        assert report.read_bytes == report.payload_bytes == checkpoint.payload_bytes
        payload_once(seat, checkpoint)
        policy = report.policies["sharing"]
        assert (policy.requested, policy.effective) == ("page_cache", "page_cache")
        degraded = policy.reason.startswith("degraded: ") and "Input/output error" in policy.reason
        assert degraded == (seat.rank == 1), policy
        assert any("reading ahead" in line for line in report.fallbacks) == (seat.rank == 1)
        stripe_bytes = checkpoint.payload_bytes // 2
        assert report.striped_bytes == (2 * SLOT_BYTES if seat.rank == 1 else stripe_bytes)


async def test_read_ahead_that_never_returns_delays_leaving_by_the_grace_only(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)
    gate = seats[1].storage.block("*", operation="read ahead", times=None)

    async def work(seat: Seat) -> ls.LoadReport:
        config = config_of(checkpoint, "page_cache", agreement={"grace_s": 2})
        async with seat.service(config) as service:
            return await forty.consume(service, checkpoint)

    reports = values(await all_of(seats, work))
    gate.release()
    for rank, report in enumerate(reports):
        assert report.complete
        assert any("left behind" in line for line in report.fallbacks) == (rank == 1), report.fallbacks


async def test_nothing_more_is_read_ahead_once_another_rank_has_failed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's consumer is busy, and does not know yet."""
    monkeypatch.setattr(readahead, "PIECE_BYTES", SLOT_BYTES)
    config = config_of(checkpoint, "page_cache", reads={"threads_per_node": 2})
    seats = make_seats(2)
    gate = seats[1].storage.block("*", operation="read ahead", times=None)
    raised = Oops(9, wanted="this one")

    async def fail(_load: ls.Load) -> None:
        await until(gate.reached.is_set)
        raise raised

    async def go_on_once_it_is_known(service: ls.LoaderService, load: ls.Load) -> None:
        ahead = sharing_of(service)._ahead
        await until(lambda: load.failure is not None)
        gate.release()
        await until(lambda: ahead is not None and ahead.over)

    async def work(seat: Seat) -> Left:
        async with seat.service(config) as service:
            return await go_through(service, fail if seat.rank == 0 else partial(go_on_once_it_is_known, service))

    check_failed(values(await all_of(seats, work)), 0, raised, located(FailureRecord("Oops", str(raised)), 0))
    assert gate.calls == 1


# Consumers that keep their batches ------------------------------------------------------------------------------------

KEPT = {0: (0, 2), 1: (4, 6)}  # all that rank 0 has slots for: block 8 cannot come. Neither rank keeps all of them.


async def take_and_keep(rank: int, gives_back: Callable[[], Awaitable[bool]], load: ls.Load) -> None:
    """`gives_back()` is the consumer's body once it has what it keeps: whether it gives that back, or asks for more."""
    number = 0
    with contextlib.ExitStack() as kept:
        async for batch in load.batches():
            if number in KEPT[rank]:
                kept.enter_context(batch)
            else:
                batch.release()
            if (number == KEPT[rank][-1] and await gives_back()) or number >= 8:
                kept.close()
            number += 1


async def test_consumers_that_keep_each_other_from_going_on_are_told_so(checkpoint: Checkpoint) -> None:
    config = config_of(checkpoint, "staging", reads={"stuck_after_s": 2})

    async def never() -> bool:
        return False

    async def work(seat: Seat) -> Left:
        async with seat.service(config) as service:
            return await go_through(service, partial(take_and_keep, seat.rank, never))

    results = values(await all_of(make_seats(2), work))
    check_logs([result.log for result in results])
    verdict = results[0].verdict
    assert verdict is not None
    assert (verdict.error, verdict.phase) == ("StateError", "read")
    assert "of all ranks of this node wait for more" in verdict.message
    assert "this one keeps 2 batches" in verdict.message


async def test_a_consumer_that_keeps_some_and_waits_for_a_slow_one_does_not_fail(checkpoint: Checkpoint) -> None:
    """Rank 1 takes several times as long as a node may stand still, and then gives back what it has."""
    config = config_of(checkpoint, "staging", reads={"stuck_after_s": 1.5})
    services: dict[int, ls.LoaderService] = {}

    async def gives_back(rank: int) -> bool:
        if rank == 1:
            stage = sharing_of(services[0])._stage
            assert stage is not None
            await until(lambda: stage._machine._quiet > 4 * stage._machine._patience)
        return rank == 1

    async def work(seat: Seat) -> Left:
        async with seat.service(config) as service:
            services[seat.rank] = service
            return await go_through(service, partial(take_and_keep, seat.rank, partial(gives_back, seat.rank)))

    for result in values(await all_of(make_seats(2), work)):
        assert (result.error, result.complete) == (None, True)
