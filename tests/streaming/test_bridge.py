"""The bridge between a caller and the service's loop: results, cancellation that waits, and the channel."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import threading
from collections.abc import Iterator

import pytest

from loader_service.bridge import Channel, ChannelClosed, ServiceLoop
from loader_service.errors import MemoryLimitError, StateError


@pytest.fixture
def loop() -> Iterator[ServiceLoop]:
    service_loop = ServiceLoop()
    yield service_loop
    service_loop.request_stop()
    service_loop.ended_blocking()


class Oops(Exception):
    pass


def test_no_descriptors_for_a_loop_are_an_error_that_says_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("loader_service.bridge.loops.new_event_loop", refuse)
    with pytest.raises(MemoryLimitError, match=r"loop cannot be had \(Too many open files\).*ulimit -n"):
        ServiceLoop()


async def test_results_and_errors_come_back(loop: ServiceLoop) -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise Oops("from the service's loop")

    assert await loop.run(answer()) == 42
    with pytest.raises(Oops, match="service's loop"):
        await loop.run(fail())


def test_blocking_results_and_errors_come_back(loop: ServiceLoop) -> None:
    async def answer() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise Oops

    assert loop.run_blocking(answer()) == "loader-service"
    with pytest.raises(Oops):
        loop.run_blocking(fail())


async def test_a_cancelled_caller_waits_for_the_cleaning_up(loop: ServiceLoop) -> None:
    started, may_end, cleaned = threading.Event(), asyncio.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
            cleaned.set()

    task = asyncio.create_task(loop.run(work()))
    await asyncio.to_thread(started.wait)
    task.cancel()
    done, _ = await asyncio.wait((task,), timeout=0.05)
    assert not done, "the caller goes on only after the coroutine has cleaned up"
    loop.post(may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()


async def test_a_second_cancellation_does_not_wait(loop: ServiceLoop) -> None:
    started, may_end = threading.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    task = asyncio.create_task(loop.run(work()))
    await asyncio.to_thread(started.wait)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    loop.post(may_end.set)


async def test_calls_after_the_end_and_from_inside_are_refused(loop: ServiceLoop) -> None:
    async def nothing() -> None:
        return

    async def inside() -> None:
        loop.run_blocking(nothing())

    with pytest.raises(StateError, match="from its own event loop"):
        await loop.run(inside())
    loop.request_stop()
    await loop.ended()
    with pytest.raises(StateError, match="closed"):
        await loop.run(nothing())
    loop.post(lambda: None)  # nothing happens, nothing raises


async def test_a_channel_hands_over_in_order_and_ends() -> None:
    channel: Channel[int] = Channel()
    for item in range(1, 4):
        channel.put(item)
    channel.end()
    assert [channel.get_nowait() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(ChannelClosed):
        channel.get_nowait()
    with pytest.raises(ChannelClosed):
        await channel.wait()


@pytest.mark.parametrize("what", ["item", "end", "error"])
async def test_waiting_ends_with_an_item_an_end_or_an_error(loop: ServiceLoop, what: str) -> None:
    channel: Channel[int] = Channel()
    waiting = asyncio.ensure_future(channel.wait())
    await asyncio.sleep(0)
    assert channel.consumer_waits
    loop.post({"item": lambda: channel.put(7), "end": channel.end, "error": lambda: channel.fail(Oops())}[what])
    if what == "item":
        await waiting
        assert channel.get_nowait() == 7
    else:
        with pytest.raises(ChannelClosed if what == "end" else Oops):
            await waiting


def test_blocking_waiting_ends_from_another_thread() -> None:
    channel: Channel[str] = Channel()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(channel.wait_blocking)
        channel.put("item")
        waiting.result(10)
    assert channel.get_nowait() == "item"


async def test_an_error_goes_before_items_and_stays() -> None:
    channel: Channel[int] = Channel()
    channel.put(1)
    channel.fail(Oops("first"))
    channel.fail(Oops("second"))
    for _ in range(2):
        with pytest.raises(Oops, match="first"):
            channel.get_nowait()
    with pytest.raises(Oops, match="first"):
        await channel.wait()
    assert channel.drain() == [1]


async def test_a_cancelled_wait_takes_nothing() -> None:
    channel: Channel[int] = Channel()
    waiting = asyncio.ensure_future(channel.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert not channel.consumer_waits
    channel.put(1)
    await channel.wait()
    assert channel.get_nowait() == 1


async def test_two_consumers_at_once_are_refused() -> None:
    channel: Channel[int] = Channel()
    waiting = asyncio.ensure_future(channel.wait())
    await asyncio.sleep(0)
    with pytest.raises(StateError, match="two consumers"):
        await channel.wait()
    channel.put(1)
    await waiting


async def test_items_from_another_loop_all_arrive(loop: ServiceLoop) -> None:
    """Every interleaving of put and wait: none is lost, none comes twice."""
    channel: Channel[int] = Channel()

    async def produce() -> None:
        for item in range(1, 3001):
            channel.put(item)
            if item % 7 == 0:
                await asyncio.sleep(0)
        channel.end()

    producing = asyncio.ensure_future(loop.run(produce()))
    found: list[int] = []
    while True:
        try:
            item = channel.get_nowait()
            if item is None:
                await channel.wait()
                continue
        except ChannelClosed:
            break
        found.append(item)
    await producing
    assert found == list(range(1, 3001))
