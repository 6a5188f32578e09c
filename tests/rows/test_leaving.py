"""How reading rows ends when it does not end well: nothing queued is read, and what runs has come back."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loader_service.errors import LoadCancelledError, LoaderError, MemoryLimitError, ReadError, StateError
from loader_service.memory.allocators import allocate_host
from loader_service.reading import chunked
from loader_service.reading.faults import Gate
from loader_service.reading.file_range import FileRange
from loader_service.rows import RowSource
from tests.reading.making import PATIENCE_S
from tests.rows.making import SENTINEL, Table, Workshop, bytes_of, empty_rows, make_table, until, untouched

Make = Callable[..., Workshop]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return make_table(tmp_path, (100, 10))


class Reader(threading.Thread):
    """Reads the whole table blocking, in a thread; `error` is what it ended with."""

    def __init__(self, source: RowSource, dst: torch.Tensor) -> None:
        super().__init__(daemon=True)
        self.source, self.dst = source, dst
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.source.read_rows_into(self.dst, 0)
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.error


async def reached(gate: Gate) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, gate.reached.wait, PATIENCE_S)


# -- a chunk fails


def test_a_failed_chunk_takes_the_queued_ones_with_it(table: Table, workshop: Make) -> None:
    one = workshop(threads=1, chunk_bytes=100)
    one.fake.fail("*", errno.EACCES, nth=2)
    dst = empty_rows(table, 100)
    with pytest.raises(ReadError, match=r"bytes \[323, 423\) of tensor 'table'") as caught:
        table.over(one.reader).read_rows_into(dst, 0)
    assert (caught.value.errno, caught.value.path, caught.value.tensor) == (errno.EACCES, table.path, "table")
    assert len(one.fake.reads) == 2
    assert bytes_of(dst)[:200] == table.content[:200]
    assert untouched(dst[20:])


def test_the_error_comes_only_when_no_other_chunk_is_being_written(table: Table, workshop: Make) -> None:
    one = workshop(threads=2, chunk_bytes=100)
    gate = one.fake.block("*", within=(123, 124))
    one.fake.fail("*", errno.EACCES, within=(223, 224))
    dst = empty_rows(table, 100)
    reader = Reader(table.over(one.reader), dst)
    assert gate.reached.wait(PATIENCE_S)
    until(lambda: one.fake._faults[1].seen == 1 and len(one.pool._idle) == 1 and one.queued == 0)
    assert reader.is_alive()
    assert one.fake.in_flight == 1
    gate.release()
    error = reader.end()
    assert isinstance(error, ReadError)
    assert one.fake.in_flight == 0
    assert len(one.fake.reads) == 1


def test_no_chunk_is_queued_any_more_once_one_has_failed(
    table: Table, workshop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = workshop(threads=1, chunk_bytes=100)
    one.fake.fail("*", errno.EACCES)
    submit, calls = one.pool.submit, []

    def count(*args: object, **options: object) -> object:
        calls.append(options["label"])
        return submit(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(one.pool, "submit", count)
    with pytest.raises(ReadError):
        table.over(one.reader).read_rows_into(empty_rows(table, 100), 0)
    assert len(calls) == 2
    assert len(one.fake.reads) == 0


def test_the_first_error_is_told_and_a_later_one_is_not(table: Table, workshop: Make) -> None:
    one = workshop(threads=2, chunk_bytes=100)
    gate = one.fake.block("*", within=(123, 124))
    one.fake.fail("*", errno.EIO, within=(123, 124))
    one.fake.fail("*", errno.EACCES, within=(223, 224))
    reader = Reader(table.over(one.reader), empty_rows(table, 100))
    assert gate.reached.wait(PATIENCE_S)
    until(lambda: one.fake._faults[2].seen == 1 and len(one.pool._idle) == 1 and one.queued == 0)
    gate.release()
    error = reader.end()
    assert isinstance(error, ReadError)
    assert error.errno == errno.EACCES


def test_another_source_goes_on_when_one_fails(table: Table, tmp_path: Path, workshop: Make) -> None:
    other = make_table(tmp_path, (100, 10), name="other")
    one = workshop(threads=1, chunk_bytes=100)
    gate = one.fake.block(table.path)
    one.fake.fail(table.path, errno.EACCES)
    failing = Reader(table.over(one.reader), empty_rows(table, 100))
    assert gate.reached.wait(PATIENCE_S)
    going_on = Reader(other.over(one.reader), empty_rows(other, 100))
    until(lambda: one.queued == 2)
    gate.release()
    assert isinstance(failing.end(), ReadError)
    assert going_on.end() is None
    assert bytes_of(going_on.dst) == other.content


@pytest.mark.parametrize("error", [MemoryError, ZeroDivisionError])
def test_errors_of_any_kind_reach_the_caller(table: Table, workshop: Make, error: type[Exception]) -> None:
    one = workshop(threads=2, chunk_bytes=100)
    one.fake.fail("*", error, nth=1)
    with pytest.raises(error):
        table.over(one.reader).read_rows_into(empty_rows(table, 100), 0)


# -- cancelled


async def test_cancelled_it_drops_what_is_queued_and_waits_for_what_runs(table: Table, workshop: Make) -> None:
    one = workshop(threads=2, chunk_bytes=100)
    gate = one.fake.block("*", times=None)
    source = await asyncio.to_thread(table.over, one.reader)
    dst = empty_rows(table, 100)
    task = asyncio.create_task(source.aread_rows_into(dst, 0))
    await reached(gate)
    await asyncio.to_thread(until, lambda: gate.calls == 2)
    task.cancel()
    await asyncio.to_thread(one.until_nothing_is_queued)
    task.cancel()  # a second one changes nothing
    await asyncio.sleep(0)
    assert not task.done()
    gate.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.fake.in_flight == 0
    assert len(one.fake.reads) == 2
    assert untouched(dst[20:])


async def test_cancelled_before_its_first_step_it_reads_nothing(table: Table, workshop: Make) -> None:
    one = workshop()
    source = await asyncio.to_thread(table.over, one.reader)
    task = asyncio.create_task(source.aread_rows_into(empty_rows(table, 100), 0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.fake.opens() == 0


async def test_cancelling_one_leaves_the_others_on_other_loops_alone(table: Table, workshop: Make) -> None:
    one = workshop(threads=1, chunk_bytes=100)
    gate = one.fake.block("*")
    source = await asyncio.to_thread(table.over, one.reader)
    task = asyncio.create_task(source.aread_rows_into(empty_rows(table, 100), 0))
    await reached(gate)
    dst = empty_rows(table, 100)
    other = threading.Thread(target=lambda: asyncio.run(source.aread_rows_into(dst, 0)), daemon=True)
    other.start()
    await asyncio.to_thread(until, lambda: one.queued == 2)
    task.cancel()
    await asyncio.to_thread(until, lambda: one.queued == 1)
    gate.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(other.join, PATIENCE_S)
    assert bytes_of(dst) == table.content


def test_an_interrupt_drops_what_is_queued_and_waits_for_what_runs(table: Table, workshop: Make) -> None:
    one = workshop(threads=1, chunk_bytes=100)
    gate = one.fake.block("*", times=None)
    in_flight: list[int] = []

    def interrupt() -> None:
        gate.reached.wait(PATIENCE_S)
        until(lambda: one.queued == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        one.until_nothing_is_queued()
        in_flight.append(one.fake.in_flight)
        gate.release()

    helper = threading.Thread(target=interrupt, daemon=True)
    helper.start()
    dst = empty_rows(table, 100)
    with pytest.raises(KeyboardInterrupt):
        table.over(one.reader).read_rows_into(dst, 0)
    assert one.fake.in_flight == 0
    helper.join(PATIENCE_S)
    assert in_flight == [1]
    assert len(one.fake.reads) == 1
    assert untouched(dst[10:])


def test_a_reading_that_was_cancelled_never_counts_as_complete(table: Table, workshop: Make) -> None:
    one = workshop(threads=1, chunk_bytes=100)
    gate = one.fake.block("*")
    dst = bytearray(1000)
    reading = one.reader.begin(FileRange(table.path, None, 123, "table"), memoryview(dst))
    assert gate.reached.wait(PATIENCE_S)
    reading.cancel()
    gate.release()
    until(lambda: reading.done_bytes == 100 and one.fake.in_flight == 0)
    for look in (reading.raise_error, reading.raise_error, reading.wait):
        with pytest.raises(LoadCancelledError, match="not all was read of tensor 'table': the reading was cancelled"):
            look()
    assert reading.done_bytes == 100


async def test_whoever_looks_at_a_reading_sees_how_far_it_is(table: Table, workshop: Make) -> None:
    one = workshop(threads=1, chunk_bytes=100)
    gate = one.fake.block("*", nth=3)
    dst = bytearray(1000)
    reading = one.reader.begin(FileRange(table.path, None, 123), memoryview(dst))
    await reached(gate)
    assert not await reading.ended_within(0.01)
    assert reading.done_bytes == 300
    gate.release()
    assert await reading.ended_within(PATIENCE_S)
    assert await reading.ended_within(0)
    reading.raise_error()
    assert reading.done_bytes == 1000
    assert dst == table.content


# -- closed


def test_closing_under_a_read_fails_it_and_never_leaves_a_part_unread_in_silence(table: Table, workshop: Make) -> None:
    one = workshop(threads=1, chunk_bytes=100)
    gate = one.fake.block("*")
    reader = Reader(table.over(one.reader), empty_rows(table, 100))
    assert gate.reached.wait(PATIENCE_S)
    until(lambda: one.queued == 1)
    one.reader.close()
    gate.release()
    error = reader.end()
    assert isinstance(error, StateError)
    assert "its source, or the service it is of, was closed" in str(error)
    assert untouched(reader.dst[10:])


def test_what_goes_wrong_with_queueing_is_told_once_nothing_is_written_any_more(
    table: Table, workshop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = workshop(threads=2, chunk_bytes=100)
    gate = one.fake.block("*", within=(123, 124))
    submit, calls = one.pool.submit, iter(range(100))

    def fail_later(*args: object, **options: object) -> object:
        if next(calls) == 4:  # four are queued before any has been read
            raise MemoryLimitError("no more")
        return submit(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(one.pool, "submit", fail_later)
    reader = Reader(table.over(one.reader), empty_rows(table, 100))
    assert gate.reached.wait(PATIENCE_S)
    one.until_nothing_is_queued()
    assert reader.is_alive()
    gate.release()
    error = reader.end()
    assert isinstance(error, MemoryLimitError)
    assert str(error) == "no more"
    assert len(one.fake.reads) == 2


def test_a_source_that_was_closed_says_so_and_names_its_file(table: Table) -> None:
    source = table.alone()
    source.close()
    for rows in (0, 5):
        with pytest.raises(StateError, match=r"nothing was read of the table: its source.* was closed") as caught:
            source.read_rows_into(empty_rows(table, rows), 0)
        assert caught.value.path == table.path
        assert table.path in str(caught.value)


def test_closing_what_shares_a_reader_leaves_it_to_the_others(table: Table, workshop: Make) -> None:
    one = workshop()
    with table.over(one.reader):
        pass
    dst = empty_rows(table, 100)
    table.over(one.reader).read_rows_into(dst, 0)
    assert bytes_of(dst) == table.content


def row_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader-rows")]


@pytest.mark.usefixtures("no_leaked_descriptors")
@pytest.mark.parametrize("how", ["closed", "gone"])
def test_threads_and_files_end_with_a_source_that_was_made_alone(table: Table, how: str) -> None:
    source = table.alone(threads=3, chunk_bytes=50)
    assert row_threads() == [], "none before there is something to read"
    source.read_rows_into(empty_rows(table, 100), 0)
    threads = row_threads()
    assert 1 <= len(threads) <= 3
    if how == "closed":
        source.close()
        source.close()
        with pytest.raises(StateError):
            source.read_rows_into(empty_rows(table, 100), 0)
    else:
        gone = weakref.ref(source._reader)
        del source
        gc.collect()
        assert gone() is None
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_memory_is_let_go_once_it_is_filled(table: Table) -> None:
    with table.alone() as source:
        buffer = allocate_host(1000)
        dst = buffer.tensor.view(table.dtype).view(100, 10)
        gone = weakref.ref(buffer._pages)
        source.read_rows_into(dst, 0)
        del buffer, dst
        until(lambda: gone() is None)


# -- stuck


def test_a_read_that_does_not_return_is_given_up_and_its_thread_replaced(
    table: Table, workshop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_LOOK_EVERY_S", 0.02)
    one = workshop(threads=1, chunk_bytes=100, stuck_after_s=1.0)
    gate = one.fake.block("*", nth=2)
    source, dst = table.over(one.reader), empty_rows(table, 100)
    with pytest.raises(
        ReadError, match=r"bytes \[323, 423\) of tensor 'table' has not returned for .*storage"
    ) as caught:
        source.read_rows_into(dst, 0)
    assert (caught.value.path, caught.value.tensor) == (table.path, "table")
    assert len(one.fake.reads) == 2
    again = empty_rows(table, 100)
    source.read_rows_into(again, 0)
    assert bytes_of(again) == table.content
    assert one.fake.in_flight == 1, "it is still stuck"
    gate.release()


async def test_awaited_too_a_read_that_does_not_return_is_given_up(
    table: Table, workshop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_LOOK_EVERY_S", 0.02)
    one = workshop(threads=2, chunk_bytes=100, stuck_after_s=0.05)
    one.fake.block("*", times=None)
    source = await asyncio.to_thread(table.over, one.reader)
    with pytest.raises(ReadError, match="has not returned for"):
        await source.aread_rows_into(empty_rows(table, 100), 0)


async def test_cancelled_it_waits_no_longer_for_a_stuck_read_than_it_takes_to_give_it_up(
    table: Table, workshop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_LOOK_EVERY_S", 0.02)
    one = workshop(threads=1, chunk_bytes=100, stuck_after_s=0.3)
    gate = one.fake.block("*")
    source = await asyncio.to_thread(table.over, one.reader)
    task = asyncio.create_task(source.aread_rows_into(empty_rows(table, 100), 0))
    await reached(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE_S)
    assert one.fake.in_flight == 1


def test_a_slow_read_is_not_a_stuck_one(table: Table, workshop: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_LOOK_EVERY_S", 0.02)
    one = workshop(threads=1, chunk_bytes=100, stuck_after_s=60.0)
    gate = one.fake.block("*")
    looks: list[float] = []
    in_flight = one.pool.in_flight

    def look() -> list[object]:
        found = in_flight()
        looks.extend(read.age_s for read in found)
        if len(looks) == 3:
            gate.release()
        return list(found)

    monkeypatch.setattr(one.pool, "in_flight", look)
    dst = empty_rows(table, 100)
    table.over(one.reader).read_rows_into(dst, 0)
    assert bytes_of(dst) == table.content
    assert len(looks) >= 3


def test_no_thread_to_be_had_is_an_error(table: Table, workshop: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = workshop()
    source, dst = table.over(one.reader), empty_rows(table, 100)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LoaderError, match="no reading thread could be started"):
            source.read_rows_into(dst, 0)
    assert set(bytes_of(dst)) == {SENTINEL}
    source.read_rows_into(dst, 0)
    assert bytes_of(dst) == table.content
