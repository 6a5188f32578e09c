"""Rows are the file's bytes, for every type, shape, chunk size and number of threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.errors import CheckpointError, ConfigError, EndOfFileError
from loader_service.memory.allocators import allocate_host
from loader_service.memory.tensors import torch_dtype
from loader_service.reading.file_range import FileRange
from loader_service.rows import RowSource
from loader_service.sizes import format_size
from tests.reading.disk import PAGE, disk_folder, held, uncache, warm
from tests.reading.making import PATIENCE_S
from tests.rows.making import Table, Workshop, bytes_of, empty_rows, make_table, until, untouched

HELD = [(dtype.code, torch_dtype(dtype.code)) for dtype in DTYPE_LIST if dtype.torch_name is not None]


@pytest.mark.parametrize(("code", "dtype"), HELD, ids=lambda value: value if isinstance(value, str) else "")
def test_every_type_that_torch_has(tmp_path: Path, code: str, dtype: torch.dtype) -> None:
    table = make_table(tmp_path, (11, 3, 2), dtype, offset=77)
    dst = empty_rows(table, 5)
    with RowSource(table.path, table.offset, table.shape, code, threads=3, chunk_bytes=7) as source:
        assert source.dtype == dtype
        source.read_rows_into(dst, 4)
    assert dst.dtype == dtype
    assert bytes_of(dst) == table.rows(4, 9)


def test_no_type_of_the_format_is_forgotten() -> None:
    assert {code for code, _ in HELD} >= {"F8_E4M3", "F8_E8M0", "F8_E5M2", "F4", "BF16", "F32", "U8", "C64", "BOOL"}
    assert None not in [dtype for _, dtype in HELD]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return make_table(tmp_path_factory.mktemp("rows"), (37, 3), torch.float32, offset=4099)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_every_chunk_size_gives_the_same_bytes(small: Table, threads: int) -> None:
    for chunk_bytes in range(1, 78):
        dst = empty_rows(small, 9)
        with small.alone(threads=threads, chunk_bytes=chunk_bytes) as source:
            source.read_rows_into(dst, 9)
        assert bytes_of(dst) == small.rows(9, 18), chunk_bytes


@given(data=st.data())
def test_any_rows_of_any_table(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    trailing = data.draw(st.lists(st.integers(1, 4), max_size=4))
    dtype = data.draw(st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex64]))
    shape = (data.draw(st.integers(0, 60)), *trailing)
    table = make_table(tmp_path_factory.getbasetemp(), shape, dtype, offset=data.draw(st.integers(0, 5000)))
    one = Workshop.make(threads=data.draw(st.sampled_from([1, 3, 8])), chunk_bytes=data.draw(st.integers(5, 5000)))
    if data.draw(st.booleans()):
        one.fake.shorten("*", data.draw(st.integers(3, 100)))
    source = table.over(one.reader)
    held_rows = torch.cat([empty_rows(table, table.shape[0]).view(torch.uint8).flatten()]).view(dtype).view(shape)
    ranges = data.draw(st.lists(st.tuples(st.integers(0, shape[0]), st.integers(0, shape[0])), max_size=3))
    for edges in ranges:
        start, stop = sorted(edges)
        source.read_rows_into(held_rows[start:stop], start)
    got, row = bytes_of(held_rows), table.row_bytes
    one.end()
    for index in range(shape[0]):
        wanted = any(min(edges) <= index < max(edges) for edges in ranges)
        found = got[index * row : (index + 1) * row]
        assert found == table.rows(index, index + 1) if wanted else set(found) == {0xA5}
    assert one.fake.bytes_read() == sum((max(edges) - min(edges)) * row for edges in ranges)


async def test_the_async_face_reads_the_same(small: Table) -> None:
    dst = empty_rows(small, 37)
    with small.alone(threads=3, chunk_bytes=10) as source:
        await source.aread_rows_into(dst, 0)
    assert bytes_of(dst) == small.content


@pytest.mark.may_block
async def test_a_synchronous_weight_loader_may_read_under_a_running_loop(small: Table) -> None:
    dst = empty_rows(small, 37)
    with small.alone() as source:
        source.read_rows_into(dst, 0)
    assert bytes_of(dst) == small.content


def test_two_sources_fill_two_views_of_one_buffer(tmp_path: Path, workshop: Callable[..., Workshop]) -> None:
    weight = make_table(tmp_path, (37, 64), torch.float8_e4m3fn, name="weight")
    scale = make_table(tmp_path, (37, 4), torch.float8_e8m0fnu, name="scale")
    one = workshop(threads=3, chunk_bytes=50)
    buffer = torch.full((37 * 68 + 9,), 0xA5, dtype=torch.uint8)
    views = [
        buffer[: 37 * 64].view(torch.float8_e4m3fn).view(37, 64),
        buffer[37 * 64 : 37 * 68].view(torch.float8_e8m0fnu).view(37, 4),
    ]
    threads = [
        threading.Thread(target=table.over(one.reader).read_rows_into, args=(view, 0), daemon=True)
        for table, view in zip((weight, scale), views, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert bytes_of(buffer) == weight.content + scale.content + b"\xa5" * 9


# -- several at once


def test_several_threads_and_loops_share_one_reader_and_its_threads(
    tmp_path: Path, workshop: Callable[..., Workshop]
) -> None:
    tables = [make_table(tmp_path, (100, 12), name=f"table{number}") for number in range(3)]
    one = workshop(threads=3, chunk_bytes=40)
    sources = [table.over(one.reader) for table in tables]
    outcomes: list[bool] = []

    def blocking(number: int) -> None:
        dst = empty_rows(tables[number], 100)
        sources[number].read_rows_into(dst, 0)
        outcomes.append(bytes_of(dst) == tables[number].content)

    async def several() -> None:
        held_rows = [empty_rows(table, 50) for table in tables]
        await asyncio.gather(*(source.aread_rows_into(dst, 25) for source, dst in zip(sources, held_rows, strict=True)))
        outcomes.extend(bytes_of(dst) == table.rows(25, 75) for table, dst in zip(tables, held_rows, strict=True))

    threads = [threading.Thread(target=blocking, args=(number,), daemon=True) for number in range(3)]
    threads += [threading.Thread(target=lambda: asyncio.run(several()), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert outcomes == [True] * 9
    assert one.fake.max_in_flight <= 3
    assert [one.fake.opens(table.path) for table in tables] == [1, 1, 1]


def test_only_a_few_chunks_of_a_large_read_are_queued_at_a_time(
    tmp_path: Path, workshop: Callable[..., Workshop]
) -> None:
    table = make_table(tmp_path, (5000, 2))
    one = workshop(threads=3, chunk_bytes=2)
    gate = one.fake.block("*", times=None)
    dst = bytearray(10_000)
    reading = one.reader.begin(FileRange(table.path, None, table.offset), memoryview(dst))
    until(lambda: gate.calls == 3)
    assert one.queued == 3
    gate.release()
    reading.wait()
    assert dst == table.content


def test_a_small_read_does_not_wait_for_all_of_a_large_one(tmp_path: Path, workshop: Callable[..., Workshop]) -> None:
    large, small = make_table(tmp_path, (100, 10), name="large"), make_table(tmp_path, (3, 10), name="small")
    one = workshop(threads=1, chunk_bytes=10)
    first, last = one.fake.block(large.path), one.fake.block(large.path, nth=50)
    reading = one.reader.begin(FileRange(large.path, None, large.offset), memoryview(bytearray(1000)))
    assert first.reached.wait(PATIENCE_S)
    dst = bytearray(30)
    other = one.reader.begin(FileRange(small.path, None, small.offset), memoryview(dst))
    first.release()
    other.wait()
    assert dst == small.content
    last.release()
    reading.wait()


def test_a_file_is_opened_once_for_all_that_is_read_of_it(tmp_path: Path, workshop: Callable[..., Workshop]) -> None:
    with disk_folder(tmp_path) as folder:
        table = make_table(folder, (40, PAGE), torch.uint8, offset=PAGE)
        one = workshop(threads=4, chunk_bytes=PAGE, access="direct")
        sources = [table.over(one.reader) for _ in range(3)]
        for source in sources:
            dst = allocate_host(40 * PAGE).tensor.view(40, PAGE)
            source.read_rows_into(dst, 0)
            assert bytes_of(dst) == table.content
        assert one.fake.opens() == 1
        assert one.reader.ranges.statistics.direct_bytes == 3 * 40 * PAGE


# -- past the page cache


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Table]:
    with disk_folder(tmp_path) as folder:
        table = make_table(folder, (500, 4000), offset=1000)
        uncache(table.path)
        yield table


def test_congruent_memory_is_filled_past_the_page_cache(large: Table) -> None:
    start = large.offset + 100 * 4000
    buffer = allocate_host(300 * 4000, congruent_to=start)
    dst = buffer.tensor.view(large.dtype).view(300, 4000)
    with large.alone(chunk_bytes=40_960, threads=3) as source:
        source.read_rows_into(dst, 100)
        outcome = source.access
    assert bytes_of(dst) == large.rows(100, 400)
    assert outcome.effective == "direct"
    assert held(large.path) == 0


def test_other_memory_is_filled_by_way_of_a_copy_and_the_source_says_so(large: Table) -> None:
    buffer = allocate_host(300 * 4000, congruent_to=large.offset + 1)
    dst = buffer.tensor.view(large.dtype).view(300, 4000)
    with large.alone() as source:
        source.read_rows_into(dst, 100)
        outcome = source.access
    assert bytes_of(dst) == large.rows(100, 400)
    assert outcome.effective == "direct"
    assert f"({format_size(300 * 4000)} copied over)" in outcome.reason
    assert held(large.path) == 0


def test_chunks_end_where_blocks_do_so_that_only_the_ends_are_copied_over(
    large: Table, workshop: Callable[..., Workshop]
) -> None:
    one = workshop(threads=2, chunk_bytes=10 * PAGE, access="auto")
    one.fake.align(4096)
    buffer = allocate_host(500 * 4000, congruent_to=large.offset)
    large.over(one.reader).read_rows_into(buffer.tensor.view(large.dtype).view(500, 4000), 0)
    assert bytes(buffer.memoryview) == large.content
    first, last = PAGE - large.offset % PAGE, (large.offset + 500 * 4000) % PAGE
    assert one.reader.ranges.statistics.bounced_bytes == first + last
    assert [read for read in one.fake.reads if not read.direct] == []


def test_the_page_cache_is_dropped_behind_the_reads_on_request(large: Table) -> None:
    for drop in (False, True):
        warm(large.path, 0, os.path.getsize(large.path))
        dst = empty_rows(large, 400)
        with large.alone(drop_page_cache=drop, chunk_bytes=64 * PAGE) as source:
            source.read_rows_into(dst, 50)
        assert bytes_of(dst) == large.rows(50, 450)
        left = held(large.path, large.offset + 50 * 4000, 400 * 4000)
        assert left <= 2 * PAGE if drop else left == 400 * 4000
        assert held(large.path, 0, 50 * 4000) == 50 * 4000, "what was not read stays"


# -- failures of files


def test_a_table_that_the_file_does_not_hold_is_an_end_of_file_error(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    size = os.path.getsize(table.path)
    with RowSource(table.path, 123, (100, 20), "F8_E4M3", chunk_bytes=300) as source:
        with pytest.raises(EndOfFileError, match=rf"the file ends at byte {size} while reading bytes \[") as caught:
            source.read_rows_into(torch.empty(90, 20, dtype=torch.float8_e4m3fn), 10)
    assert isinstance(caught.value, EOFError)
    assert caught.value.path == table.path


def test_a_file_that_is_missing_is_told_at_the_first_read(tmp_path: Path) -> None:
    with RowSource(tmp_path / "missing", 0, (4, 4), torch.uint8) as source:
        with pytest.raises(CheckpointError, match="No such file"):
            source.read_rows_into(torch.empty(4, 4, dtype=torch.uint8), 0)


# -- what a source is


def test_what_a_source_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RowSource("a.bin", 64, [37, 4], "F8_E8M0") as source:
        assert (source.path, source.offset, source.shape) == (str(tmp_path / "a.bin"), 64, (37, 4))
        assert (source.dtype, source.rows) == (torch.float8_e8m0fnu, (0, 37))
        assert str(tmp_path / "a.bin") in repr(source)
        assert source.access.reason == "nothing was read"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dtype": "F6_E2M3"}, "torch has no dtype 'F6_E2M3'"),
        ({"dtype": "float32"}, "torch has no dtype"),
        ({"dtype": 5}, "torch has no dtype 5"),
        ({"dtype": None}, "torch has no dtype"),
        ({"shape": ()}, "at least one dimension"),
        ({"shape": (-1, 4)}, "not negative"),
        ({"shape": (3, 4.0)}, "integers"),
        ({"shape": (True, 4)}, "integers"),
        ({"shape": 37}, "at least one dimension"),
        ({"offset": -1}, "not negative"),
        ({"offset": 1.5}, "integers"),
        ({"threads": 0}, "threads must be an integer of at least 1, not 0"),
        ({"threads": "8"}, "/a: threads must be an integer of at least 1, not '8'"),
        ({"threads": 2.5}, "threads must be an integer"),
        ({"threads": True}, "threads must be an integer"),
        ({"chunk_bytes": 0}, "/a: chunk_bytes must be an integer of at least 1, not 0"),
        ({"chunk_bytes": 1.5}, "chunk_bytes must be an integer"),
        ({"chunk_bytes": "1MiB"}, "chunk_bytes must be an integer"),
        ({"drop_page_cache": "x"}, "drop_page_cache must be True or False, not 'x'"),
        ({"shape": b"ab"}, "at least one dimension"),
        ({"offset": 2**63}, "no file can hold a table"),
        ({"offset": 2**63 - 11}, "no file can hold a table"),
        ({"shape": (2**62, 2**62)}, "no file can hold a table"),
        ({"path": "/a\0b"}, "a path that is without NUL characters, not '/a"),
        ({"path": "/a\ud800b"}, "a path that is one that can be encoded"),
        ({"path": b"/a"}, "the path of a file, as text, not b'/a'"),
        ({"path": 3}, "the path of a file, as text, not 3"),
        ({"path": None}, "the path of a file, as text, not None"),
    ],
    ids=str,
)
def test_what_is_no_table_is_refused(change: dict[str, object], problem: str) -> None:
    options = {"path": "/a", "offset": 0, "shape": (3, 4), "dtype": torch.uint8, **change}
    with pytest.raises(ConfigError, match=problem):
        RowSource(**options)  # type: ignore[arg-type]


def test_rows_beyond_the_file_do_not_touch_what_was_asked_for_elsewhere(small: Table) -> None:
    dst = empty_rows(small, 37)
    with small.alone() as source:
        source.read_rows_into(dst[:5], 32)
    assert bytes_of(dst[:5]) == small.rows(32, 37)
    assert untouched(dst[5:])
