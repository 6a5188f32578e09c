"""A rank that stops early, by a break or by dropping what it reads from: a success of all ranks."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Callable, Iterator

import pytest
import torch

import loader_service as ls
from tests.e2e import forty
from tests.e2e.doors import (
    QUICK,
    Oops,
    blocking_service,
    in_thread,
    use_blocking,
)
from tests.e2e.forty import consume
from tests.e2e.seats import Seat, all_of, make_seats, values
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_tasks", "nothing_is_left_of_all")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("doors"))


async def abreak(seat: Seat, service: ls.LoaderService) -> None:
    async with service.open("target") as load:
        async for _ in load:
            break
    assert not load.report.complete


async def abreak_in_batch(seat: Seat, service: ls.LoaderService) -> None:
    async with service.open("target") as load:
        async for batch in load.batches():
            with batch:
                break
    assert not load.report.complete


async def areturn_without_consuming(seat: Seat, service: ls.LoaderService) -> None:
    async with service.open("target"):
        pass


async def abreak_out_of_a_generator(seat: Seat, service: ls.LoaderService) -> None:
    """The loop ends it soon, while the service already closes."""
    async for _ in service.iter_weights("target"):
        break


async def aclose_a_generator(seat: Seat, service: ls.LoaderService) -> None:
    stream = service.iter_weights("target")
    await anext(stream)
    await stream.aclose()


async def adrop_a_generator(seat: Seat, service: ls.LoaderService) -> None:
    class Cycle:
        stream: AsyncGenerator[tuple[str, torch.Tensor], None]

    cycle = Cycle()
    cycle.stream, cycle.me = service.iter_weights("target"), cycle  # type: ignore[attr-defined]
    await anext(cycle.stream)
    del cycle
    gc.collect()
    await asyncio.sleep(0)


async def aforget_a_load(seat: Seat, service: ls.LoaderService) -> None:
    """The service closes over it."""
    load = await service.open("target").__aenter__()
    await anext(aiter(load))
    load._exited = True  # it would warn


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "member"])
@pytest.mark.parametrize(
    "door",
    [
        abreak,
        abreak_in_batch,
        areturn_without_consuming,
        abreak_out_of_a_generator,
        aclose_a_generator,
        adrop_a_generator,
        aforget_a_load,
    ],
)
async def test_a_rank_that_stops_early_is_a_success_of_all(
    checkpoint: Checkpoint, door: Callable[[Seat, ls.LoaderService], AsyncGenerator[None, None]], who: int
) -> None:
    config = checkpoint.config(**QUICK)

    async def work(seat: Seat) -> None:
        for _ in range(2):  # and a new service after it
            async with seat.service(config) as service:
                if seat.rank == who:
                    await door(seat, service)  # type: ignore[misc]
                else:
                    assert (await consume(service, checkpoint)).complete

    values(await all_of(make_seats(2), work))


def break_out(seat: Seat, config: ls.ServiceConfig) -> None:
    with blocking_service(seat, config) as service, service.open("target") as load:
        for _ in load:
            break
    assert not load.report.complete


def break_out_of_a_generator(seat: Seat, config: ls.ServiceConfig) -> None:
    with blocking_service(seat, config) as service:
        for _ in service.iter_weights("target"):
            break


def forget_a_load(seat: Seat, config: ls.ServiceConfig) -> None:
    with blocking_service(seat, config) as service:
        load = service.open("target").__enter__()
        next(iter(load))
        load._exited = True


def break_out_of_the_top_level_generator(seat: Seat, config: ls.ServiceConfig) -> None:
    for _ in ls.iter_weights(config, "target", seat.group):
        break


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "member"])
@pytest.mark.parametrize(
    "door",
    [
        break_out,
        break_out_of_a_generator,
        forget_a_load,
        break_out_of_the_top_level_generator,
    ],
    ids=lambda door: door.__name__,
)
async def test_a_blocking_rank_that_stops_early_is_a_success_of_all(
    checkpoint: Checkpoint, door: Callable[[Seat, ls.ServiceConfig], None], who: int
) -> None:
    config = checkpoint.config(**QUICK)

    def work(seat: Seat) -> None:
        for _ in range(2):
            if seat.rank == who:
                door(seat, config)
            else:
                with blocking_service(seat, config) as service:
                    found = use_blocking(service, checkpoint)
                assert (found.error, found.complete) == (None, True)

    values(await all_of(make_seats(2), in_thread(work)))


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "member"])
@pytest.mark.parametrize("thread", ["loader-agreement-write", "loader-read-0"])
async def test_a_generator_that_is_ended_on_a_thread_that_its_end_needs(
    checkpoint: Checkpoint, thread: str, who: int
) -> None:
    """The garbage collector runs on any thread. It waits for nothing there, and the load is left soon nevertheless."""
    config = checkpoint.config(**QUICK)
    dropped = threading.Event()

    class Cycle:
        stream: Iterator[tuple[str, torch.Tensor]]

    def drop(seat: Seat) -> None:
        cycle = Cycle()
        cycle.stream, cycle.me = ls.iter_weights(config, "target", seat.group), cycle  # type: ignore[attr-defined]
        next(cycle.stream)
        del cycle
        collector = threading.Thread(target=gc.collect, name=thread)
        collector.start()
        collector.join(20)
        waits = collector.is_alive()
        dropped.set()
        collector.join(20)
        assert not waits

    def work(seat: Seat) -> None:
        if seat.rank == who:
            drop(seat)
            return
        with blocking_service(seat, config) as service:
            found = use_blocking(service, checkpoint, body=lambda _: dropped.wait(30) and None)
        assert (found.error, found.complete) == (None, True)

    values(await all_of(make_seats(2), in_thread(work)))


async def test_an_error_in_the_body_of_a_loop_over_a_generator(checkpoint: Checkpoint) -> None:
    """To the generator that is a break; the service that is left with the error is quicker, and tells the others."""
    raised = Oops(1, wanted="a loop")

    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**QUICK)) as service:
            async for _ in service.iter_weights("target"):
                if seat.rank == 1:
                    raise raised

    other, own = await all_of(make_seats(2), work)
    assert own is raised
    assert isinstance(other, ls.RankFailure)
    assert (other.rank, other.phase) == (1, "read")
    assert str(raised) in str(other)
