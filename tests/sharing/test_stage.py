"""Staging on several ranks of one loop: real files, real sockets, scripted faults."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from loader_service.errors import AgreementError, LoaderError, RankFailure, ReadError, StateError
from loader_service.sharing.protocol import Kind, Message
from loader_service.sharing.stage import CHANNEL, StageStatistics
from tests.reading.making import PATIENCE_S
from tests.sharing.staging import BLOCK_BYTES, RankHere, made, node, take_all

pytestmark = pytest.mark.usefixtures("no_leaked_descriptors", "no_leaked_tasks")

EVERYBODY = 0b111


async def until(condition: Callable[[], bool]) -> None:
    """For what is told to nobody: a count that a reading thread has moved."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def start(ranks: list[RankHere]) -> None:
    for rank in ranks:
        rank.stage.start()


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2, 2), (1, 3, 2), (8, 8, 8)], ids=str)
async def test_every_rank_sees_what_it_wants_and_each_byte_is_read_once(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    wants = [EVERYBODY, 0b101, 0b010, 0, 0b110, EVERYBODY, 0b011, 0b100] * 3
    things = await made(tmp_path, wants, 3)
    async with node(things, counts) as ranks:
        start(ranks)
        seen = await asyncio.gather(*(take_all(things, rank) for rank in ranks))
        for place, rank in enumerate(ranks):
            assert seen[place] == [number for number, mask in enumerate(wants) if mask >> place & 1]
            own = sum(mask != 0 for mask in wants[place::3])
            found = rank.stage.statistics
            assert found == StageStatistics(own * BLOCK_BYTES, own, len(seen[place]), found.waits)
            assert rank.stage.shards_read == {0}
            assert rank.stage.waits_for() is None
            assert rank.failures == []


async def test_a_slow_consumer_is_backpressure_for_its_node_and_is_named(tmp_path: Path) -> None:
    things = await made(tmp_path, [EVERYBODY] * 12, 3)
    async with node(things, (2, 1, 1)) as ranks:
        start(ranks)
        fast = [asyncio.create_task(take_all(things, rank)) for rank in ranks[:2]]
        await ranks[2].stage.block(0)
        await until(lambda: ranks[0].stage.waits_for() == (2, 0))
        await until(lambda: ranks[1].stage.waits_for() == (2, 1))  # its own slot is kept by the same rank
        await until(lambda: sum(rank.stage.statistics.blocks_read for rank in ranks) >= 4)
        assert [rank.stage.statistics.blocks_read for rank in ranks] == [2, 1, 1], "as many as there are slots"
        assert await take_all(things, ranks[2]) == list(range(12))
        await asyncio.gather(*fast)


async def test_a_slow_reader_is_named_by_who_waits_for_it(tmp_path: Path) -> None:
    things = await made(tmp_path, [EVERYBODY] * 6, 3)
    async with node(things, (1, 1, 1)) as ranks:
        gate = ranks[1].storage.block("*", times=None)
        start(ranks)
        tasks = [asyncio.create_task(take_all(things, rank)) for rank in ranks]
        await until(lambda: ranks[0].stage.waits_for() == (1, 1))
        gate.release()
        await asyncio.gather(*tasks)
        assert ranks[0].stage.statistics.waits > 0


async def test_a_rank_that_comes_later_misses_nothing(tmp_path: Path) -> None:
    things = await made(tmp_path, [EVERYBODY] * 9, 3)
    async with node(things, (3, 3, 3)) as ranks:
        start(ranks[:2])
        early = [asyncio.create_task(take_all(things, rank)) for rank in ranks[:2]]
        await until(lambda: all(rank.stage.statistics.blocks_read == 3 for rank in ranks[:2]))
        start(ranks[2:])
        assert await take_all(things, ranks[2]) == list(range(9))
        await asyncio.gather(*early)


@pytest.mark.parametrize("leaver", [0, 1])
async def test_a_rank_that_leaves_is_not_waited_for_and_reads_on_for_the_others(tmp_path: Path, leaver: int) -> None:
    only_it = 1 << leaver
    wants = [EVERYBODY] * 6 + [only_it] * 6 + [EVERYBODY] * 6
    things = await made(tmp_path, wants, 3)
    async with node(things, (1, 1, 1)) as ranks:
        start(ranks)
        others = [asyncio.create_task(take_all(things, rank)) for rank in ranks if rank.mesh.rank != leaver]
        await ranks[leaver].stage.block(0)
        ranks[leaver].stage.leave()
        ranks[leaver].stage.done(0)
        with pytest.raises(StateError, match="not waited for"):
            await ranks[leaver].stage.block(1)
        await ranks[leaver].stage.served()
        for seen in await asyncio.gather(*others):
            assert seen == [*range(6), *range(12, 18)]
        reads = [rank.stage.statistics.blocks_read for rank in ranks]
        assert 12 <= sum(reads) < 18, "what only it wanted is not read any more, but for what was on its way"


async def test_blocks_that_are_given_back_before_they_come_are_answered_for(tmp_path: Path) -> None:
    things = await made(tmp_path, [0b11] * 8, 2)
    async with node(things, (1, 1)) as ranks:
        for number in range(8):
            ranks[1].stage.done(number)
        start(ranks)
        assert await take_all(things, ranks[0]) == list(range(8))
        await ranks[1].stage.served()
        assert ranks[1].stage.statistics.blocks_arrived == 0


async def test_blocks_may_be_given_back_from_any_thread(tmp_path: Path) -> None:
    things = await made(tmp_path, [1] * 8, 1)
    async with node(things, (1,)) as (rank,):
        rank.stage.start()
        for number in range(8):
            await rank.stage.block(number)
            thread = threading.Thread(target=rank.stage.done, args=(number,))
            thread.start()
            thread.join()
        await rank.stage.served()


async def test_who_stops_waiting_disturbs_nobody(tmp_path: Path) -> None:
    things = await made(tmp_path, [1] * 2, 1)
    async with node(things, (1,)) as (rank,):
        gate = rank.storage.block("*")
        rank.stage.start()
        first, second = (asyncio.create_task(rank.stage.block(0)) for _ in range(2))
        await until(lambda: rank.stage.statistics.waits == 2)
        first.cancel()
        await asyncio.wait([first])
        gate.release()
        await asyncio.wait([second])
        assert not second.cancelled()
        assert things.holds(0, second.result())
        assert things.holds(0, await rank.stage.block(0)), "as often as it is asked for"
        assert first.cancelled()


async def test_what_this_rank_does_not_want_is_not_waited_for(tmp_path: Path) -> None:
    things = await made(tmp_path, [0b10, 0b01], 2)
    async with node(things, (1, 1)) as ranks:
        start(ranks)
        for number in (0, 2):
            with pytest.raises(StateError, match=f"block {number} of this node is not waited for by rank 0"):
                await ranks[0].stage.block(number)
        await asyncio.gather(*(take_all(things, rank) for rank in ranks))
        with pytest.raises(StateError, match="not waited for"):
            await ranks[0].stage.block(1)


@pytest.mark.parametrize("number", [0, 1, 9])
async def test_a_block_that_is_given_back_once_too_often_is_told(tmp_path: Path, number: int) -> None:
    things = await made(tmp_path, [0b11, 0b10, 0b11], 2)
    async with node(things, (1, 1)) as ranks:
        start(ranks)
        await ranks[0].stage.block(0)
        ranks[0].stage.done(0)
        ranks[0].stage.done(number)
        await until(lambda: bool(ranks[0].failures))
        assert isinstance(ranks[0].failures[0], StateError)


# -- failures


async def test_an_error_of_a_read_is_raised_by_everyone_who_waits_here(tmp_path: Path) -> None:
    things = await made(tmp_path, [0b11] * 8, 2)
    async with node(things, (2, 2)) as ranks:
        ranks[0].storage.fail("*", errno.EIO, within=(2 * 16384, 3 * 16384), times=None)
        start(ranks)
        other = asyncio.create_task(take_all(things, ranks[1]))
        with pytest.raises(ReadError) as caught:
            await take_all(things, ranks[0])
        assert (caught.value.errno, caught.value.path) == (errno.EIO, things.shard.path)
        assert ranks[0].failures == [caught.value]
        with pytest.raises(ReadError):
            await ranks[0].stage.served()
        with pytest.raises(ReadError):
            await ranks[0].stage.block(7)
        assert not other.done(), "the ranks' verdict ends it there"
        verdict = RankFailure(caught.value.record())
        ranks[1].stage.fail(verdict)
        with pytest.raises(RankFailure):
            await other
        assert ranks[1].failures == [], "it was told from outside"


async def test_a_rank_that_takes_nothing_hears_of_its_own_reads_error(tmp_path: Path) -> None:
    things = await made(tmp_path, [0b10] * 4, 2)
    async with node(things, (1, 1)) as ranks:
        ranks[0].storage.truncate("*", 100)
        start(ranks)
        with pytest.raises(LoaderError, match=r"ends at"):
            await ranks[0].stage.served()
        assert len(ranks[0].failures) == 1


async def test_an_odd_error_of_a_read_is_a_read_error(tmp_path: Path) -> None:
    things = await made(tmp_path, [1], 1)
    async with node(things, (1,)) as (rank,):
        rank.storage.fail("*", lambda: SystemExit("odd"))
        rank.stage.start()
        with pytest.raises(ReadError, match=r"SystemExit while reading .* which ranks of this node share: odd"):
            await rank.stage.block(0)


async def test_a_read_that_never_returns_is_named_and_left_behind(tmp_path: Path) -> None:
    things = await made(tmp_path, [1] * 4, 1)
    async with node(things, (2,), stuck_after_s=2, chunk_bytes=1 << 20) as (rank,):
        rank.storage.block("*", within=(0, 5000))
        rank.stage.start()
        with pytest.raises(ReadError, match=r"a read of bytes .* has not returned for .* check the storage"):
            await rank.stage.block(0)
        stuck = await rank.stage.stop(0.0)
        assert stuck == [f"{things.shard.path} at offset 100 (block 0 of this node)"]
        assert len(rank.threads.stuck()) == 1


async def test_stopping_waits_for_reads_in_flight_and_drops_what_is_queued(tmp_path: Path) -> None:
    things = await made(tmp_path, [1] * 8, 1)
    async with node(things, (4,), threads=1) as (rank,):
        gate = rank.storage.block("*", times=None)
        rank.stage.start()
        waiting = asyncio.create_task(rank.stage.block(0))
        await until(gate.reached.is_set)
        stopping = asyncio.create_task(rank.stage.stop(PATIENCE_S))
        with pytest.raises(StateError):
            await waiting
        assert not stopping.done()
        gate.release()
        assert await stopping == []
        assert gate.calls == 1
        assert rank.stage.statistics.blocks_read == 0


async def test_threads_that_were_stopped_are_a_failure(tmp_path: Path) -> None:
    things = await made(tmp_path, [1], 1)
    async with node(things, (1,)) as (rank,):
        rank.threads.stop()
        rank.stage.start()
        with pytest.raises(StateError, match="stopped"):
            await rank.stage.block(0)


CONFUSION: dict[str, bytes] = {
    "no message": b"\xff",
    "another's block": Message(Kind.ANNOUNCE, 0, 0).encoded(),
    "an answer for nothing": Message(Kind.ANSWER, 1).encoded(),
}


@pytest.mark.parametrize("name", CONFUSION)
async def test_a_confused_rank_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    things = await made(tmp_path, [0b11] * 4, 2)
    async with node(things, (1, 1)) as ranks:
        ranks[0].stage.start()
        ranks[1].mesh.send(0, CHANNEL, CONFUSION[name])
        await until(lambda: bool(ranks[0].failures))
        (error,) = ranks[0].failures
        assert isinstance(error, AgreementError)
        assert str(error).startswith("rank 1 says what cannot be in memory that ranks of this node share: ")
        ranks[1].mesh.send(0, CHANNEL, b"and more")
        ranks[1].mesh.send(0, CHANNEL + 1, b"the last")
        heard: list[bytes] = []
        ranks[0].mesh.listen(CHANNEL + 1, lambda rank, data, descriptor: heard.append(data))
        await until(lambda: bool(heard))
        assert len(ranks[0].failures) == 1


async def test_a_rank_of_another_group_is_not_listened_to(tmp_path: Path) -> None:
    things = await made(tmp_path, [1] * 2, 1)
    async with node(things, (1, 1)) as ranks:
        ranks[0].stage._places.pop(1)
        ranks[0].stage.start()
        reading, writing = os.pipe()
        ranks[1].mesh.send(0, CHANNEL, Message(Kind.LEAVE).encoded(), reading)
        os.close(reading)
        await until(lambda: bool(ranks[0].failures))
        assert "it does not share memory with this rank" in str(ranks[0].failures[0])
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"nobody keeps the other end")
        os.close(writing)


async def test_the_first_failure_stays(tmp_path: Path) -> None:
    things = await made(tmp_path, [0b11] * 2, 2)
    async with node(things, (1, 1)) as ranks:
        first = ReadError("first")
        ranks[0].stage.fail(first)
        ranks[0].stage.fail(ReadError("second"))
        start(ranks)
        with pytest.raises(ReadError, match="first"):
            await ranks[0].stage.block(0)
        assert ranks[0].failures == []
