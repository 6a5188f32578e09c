"""What consumers do on one rank, with errors, cancellation, breaks and closing, and what it means for the others."""

from __future__ import annotations

import asyncio

import pytest
import torch

import loader_service as ls
from loader_service.run import LoadRun
from tests.e2e import forty
from tests.e2e.forty import LAST, SMALL, consume, payload_of
from tests.e2e.seats import Seat, all_of, errors, make_seats, values
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("forty"))


class Oops(Exception):
    pass


@pytest.mark.parametrize("at", [0, 17, 40], ids=["at the first", "in the middle", "after the last"])
@pytest.mark.parametrize("who", [0, 1])
async def test_an_error_of_one_ranks_consumer_fails_all(checkpoint: Checkpoint, who: int, at: int) -> None:
    raised = Oops("cannot use it")

    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**SMALL)) as service, service.open("target") as load:
            taken = 0
            async for _ in load:
                if seat.rank == who and taken == at:
                    raise raised
                taken += 1
            if seat.rank == who:
                raise raised

    results = await all_of(make_seats(2), work)
    assert results[who] is raised, "its own exception, unchanged"
    (error,) = errors([results[1 - who]])
    assert isinstance(error, ls.RankFailure)
    assert (error.rank, error.phase) == (who, "read")
    assert "Oops: cannot use it" in str(error)
    assert "cannot use it" in str(error.__cause__)


async def test_an_error_before_anything_was_consumed_fails_all(checkpoint: Checkpoint) -> None:
    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**SMALL)) as service, service.open("target") as load:
            if seat.rank == 1:
                raise Oops
            async for _ in load:
                pass

    results = await all_of(make_seats(2), work)
    assert isinstance(results[1], Oops)
    assert isinstance(results[0], ls.RankFailure)
    assert results[0].rank == 1


async def test_a_destination_that_does_not_fit_on_one_rank_fails_all(checkpoint: Checkpoint) -> None:
    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**SMALL)) as service, service.open("target") as load:
            shape = (50, 41) if seat.rank == 0 else (41, 50)
            await load.into({"s1.w03": torch.zeros(shape, dtype=torch.bfloat16)})

    other, own = errors(await all_of(make_seats(2), work))
    assert isinstance(own, ls.DestinationError)
    assert isinstance(other, ls.RankFailure)
    assert isinstance(other.__cause__, ls.DestinationError)
    assert (other.rank, other.tensor) == (1, "s1.w03")


@pytest.mark.parametrize("where", ["reading headers", "reading payload", "waiting for the others"])
@pytest.mark.parametrize("who", [0, 1])
async def test_a_cancelled_rank_fails_all(checkpoint: Checkpoint, who: int, where: str) -> None:
    """The cancelled rank ends as cancelled; the other one, whose consumer stands still, hears of it."""
    seats = make_seats(2)
    victim, other = seats[who].storage, seats[1 - who].storage
    if where == "reading headers":
        gate = victim.block(f"*{LAST}")
    elif where == "reading payload":
        gate = victim.block(f"*{LAST}", within=payload_of(checkpoint, LAST))
    else:
        gate = other.block(f"*{LAST}", within=payload_of(checkpoint, LAST))
    at_the_end = asyncio.Event()

    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**SMALL)) as service, service.open("target") as load:
            try:
                async for _ in load:
                    pass
            except ls.LoaderError:
                gate.release()
                raise
            at_the_end.set()

    async def main() -> list[object]:
        tasks = [asyncio.ensure_future(work(seat)) for seat in seats]
        assert await asyncio.to_thread(gate.reached.wait, 30)
        if where == "waiting for the others":
            await at_the_end.wait()
        tasks[who].cancel()
        if where != "waiting for the others":  # there the read stands still until its rank has heard of the failure
            gate.release()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    results = await asyncio.wait_for(main(), 60)
    assert isinstance(results[who], asyncio.CancelledError)
    (error,) = errors([results[1 - who]])
    assert isinstance(error, ls.RankFailure)
    assert error.rank == who
    assert isinstance(error.__cause__, ls.LoadCancelledError)
    assert seats[who].storage.in_flight == seats[1 - who].storage.in_flight == 0


@pytest.mark.parametrize("form", ["owned", "batches", "generator"])
@pytest.mark.parametrize("who", [0, 1])
async def test_a_clean_break_on_one_rank_is_a_success_of_all(checkpoint: Checkpoint, who: int, form: str) -> None:
    async def work(seat: Seat) -> bool:
        async with seat.service(checkpoint.config(**SMALL)) as service:
            if seat.rank != who:
                return (await consume(service, checkpoint)).complete
            if form == "generator":
                stream = service.iter_weights("target")
                await anext(stream)
                assert service._engine is not None
                run = service._engine.open_load
                assert isinstance(run, LoadRun)
                await stream.aclose()
                return run.report().complete
            async with service.open("target") as load:
                if form == "owned":
                    async for _ in load:
                        break
                else:
                    async for batch in load.batches():
                        batch.release()
                        break
            return load.report.complete

    complete = values(await all_of(make_seats(2), work))
    assert complete == [rank != who for rank in range(2)]


async def test_a_load_that_one_rank_does_not_consume_is_a_success_of_all(checkpoint: Checkpoint) -> None:
    async def work(seat: Seat) -> tuple[bool, int]:
        async with seat.service(checkpoint.config(**SMALL)) as service:
            if seat.rank == 0:
                report = await consume(service, checkpoint)
                return report.complete, report.tensors
            async with service.open("target") as load:
                pass
            return load.report.complete, load.report.tensors

    assert values(await all_of(make_seats(2), work)) == [(True, 40), (False, 0)]


async def test_a_service_that_closes_over_an_open_load_fails_all_if_it_closes_with_an_error(
    checkpoint: Checkpoint,
) -> None:
    async def work(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**SMALL)) as service:
            if seat.rank == 0:
                await consume(service, checkpoint)
            load = await service.open("target").__aenter__()
            await anext(aiter(load))
            raise Oops

    results = await all_of(make_seats(2), work)
    assert isinstance(results[1], Oops)
    assert isinstance(results[0], ls.RankFailure)
    assert results[0].rank == 1
