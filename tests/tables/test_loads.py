"""Tables in a load: their place among the tensors, sources by name, what is read and what is not, and the report."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loader_service as ls
from loader_service.memory.allocators import allocate_host
from loader_service.memory.tensors import raw_memory
from loader_service.report import PolicyOutcome
from loader_service.sizes import format_size
from tests.e2e.seats import Seat, all_of, make_seats, payload_bytes_read, values
from tests.reading.disk import disk_folder
from tests.support.checkpoints import Checkpoint, assert_same, write_checkpoint
from tests.tables.making import (
    DEEP,
    EMPTY,
    LAYOUTS,
    ROWS,
    SCALE,
    TABLES,
    WEIGHT,
    assert_rows,
    config_of,
    place_of,
    reads_of_bytes,
    rules,
    service_of,
    shares,
    write,
)

PLAN_ORDER = [WEIGHT, "a.first", "a.odd", SCALE, EMPTY, "m.mid", "b.first", DEEP]
TENSORS = [name for name in PLAN_ORDER if name not in TABLES]


def own_rows(source: ls.RowSource) -> torch.Tensor:
    start, stop = source.rows
    rows = torch.empty((stop - start, *source.shape[1:]), dtype=source.dtype)
    source.read_rows_into(rows, start)
    return rows


def table_bytes(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.tensor(name).nbytes for name in TABLES)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_tables_come_in_plan_order_as_sources_of_this_ranks_rows(checkpoint: Checkpoint, layout: str) -> None:
    seats = make_seats(2)

    async def load_all(seat: Seat) -> ls.LoadReport:
        own = shares("equal", 2)[seat.rank]
        async with service_of(seat, config_of(checkpoint, rules(layout), 2)) as service, service.open("target") as load:
            names = []
            async for name, value in load:
                names.append(name)
                if name in TENSORS:
                    assert_same(value, checkpoint.tensor(name), name)
                    continue
                assert value is load.tables[name]
                assert value.rows == (own if name != EMPTY else (0, 0))
                assert value.shape == checkpoint.tensor(name).shape
                rows = torch.empty((value.rows[1] - value.rows[0], *value.shape[1:]), dtype=value.dtype)
                await value.aread_rows_into(rows, value.rows[0])
                assert_rows(rows, checkpoint, name, value.rows)
            assert names == PLAN_ORDER
            assert list(load.tables) == [name for name in PLAN_ORDER if name in TABLES]
        return load.report

    reports = values(await all_of(seats, load_all))
    for rank, report in enumerate(reports):
        start, stop = shares("equal", 2)[rank]
        mine = (stop - start) * (96 + 3 + 40)
        rest = sum(checkpoint.tensor(name).nbytes for name in TENSORS)
        assert (report.tensors, report.complete) == (len(PLAN_ORDER), True)
        assert report.payload_bytes == report.read_bytes == mine + rest
        assert report.files_read == tuple(sorted(set(checkpoint.shard_of.values())))
        assert f"tables_{layout}" in report.policies
    assert all(payload_bytes_read(seat.storage) >= 1 for seat in seats)


async def test_a_consumer_that_drops_the_tables_names_reads_no_byte_of_them(checkpoint: Checkpoint) -> None:
    """Not even as the gap between tensors that are read together, though they lie between them."""
    (seat,) = make_seats(1)
    async with service_of(seat, config_of(checkpoint, rules("per_rank"), 1)) as service:
        async with service.open("target") as load:
            taken = {name: value async for name, value in load if name not in TABLES}
        report = load.report
    assert list(taken) == TENSORS
    for name in TABLES:
        assert not any(reads_of_bytes([seat.storage], checkpoint, name)), name
    assert report.complete
    assert report.payload_bytes == report.read_bytes == sum(checkpoint.tensor(name).nbytes for name in TENSORS)
    assert payload_bytes_read(seat.storage) == report.read_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_what_is_read_is_what_was_planned(tmp_path: Path, layout: str) -> None:
    """Gaps between tensors are read where that was planned, and none of them holds rows."""
    names: dict[str, Any] = {}
    for i in range(12):  # a gap of a rank's own between halves of the rows of w, and tables in between
        names[f"{i:02}.w"] = ("U8", (64, 50))
        names[f"{i:02}.skipped"] = ("U8", (40,))
        names[f"{i:02}.table"] = ("U8", (ROWS, 3)) if i % 3 == 0 else ("U8", (5,))
    checkpoint = write_checkpoint(tmp_path, {"a.safetensors": names})
    cut = {"axis": "tp", "dim": 0}
    for i in (0, 3, 6, 9):
        assert checkpoint.tensors[f"{i:02}.table"][1] == (ROWS, 3)
    load = {
        "skip": ["*.skipped"],
        "rules": [{"match": f"{i:02}.table", "host_resident": {"layout": layout}, "split": cut} for i in (0, 3, 6, 9)],
    }
    for ranks in (1, 3):
        seats = make_seats(ranks)

        async def load_all(seat: Seat, ranks: int = ranks) -> tuple[int, int, ls.LoadReport]:
            async with service_of(seat, config_of(checkpoint, load, ranks)) as service:
                plan = (await service.plan("target")).for_rank(seat.rank)
                async with service.open("target") as opened:
                    async for _, value in opened:
                        if isinstance(value, ls.RowSource):
                            await asyncio.to_thread(own_rows, value)
                return plan.payload_bytes, plan.read_bytes, opened.report

        for seat, (payload, read, report) in zip(seats, values(await all_of(seats, load_all)), strict=True):
            assert (report.payload_bytes, report.read_bytes) == (payload, read)
            assert read > payload, "some gaps were worth reading"
            assert payload_bytes_read(seat.storage) == read
            for i in (0, 3, 6, 9):
                assert sum(reads_of_bytes([seat.storage], checkpoint, f"{i:02}.table")) == 3 * (
                    ROWS * (seat.rank + 1) // ranks - ROWS * seat.rank // ranks
                )


async def test_a_large_table_does_not_pay_for_gaps_between_small_tensors(tmp_path: Path) -> None:
    """A gap of 40 bytes is more than 5 % of what is streamed, though not of the whole."""
    names: dict[str, Any] = {
        "a": ("U8", (100,)),
        "b.skipped": ("U8", (40,)),
        "c": ("U8", (100,)),
        "d.table": ("U8", (ROWS, 1000)),
    }
    checkpoint = write_checkpoint(tmp_path, {"a.safetensors": names})
    load = {"skip": ["*.skipped"], "rules": [{"match": "*.table", "host_resident": {"layout": "per_rank"}}]}
    (seat,) = make_seats(1)
    async with service_of(seat, config_of(checkpoint, load, 1)) as service:
        plan = (await service.plan("target")).for_rank(0)
        async with service.open("target") as opened:
            async for _, value in opened:
                if isinstance(value, ls.RowSource):
                    await asyncio.to_thread(own_rows, value)
    assert plan.read_bytes == plan.payload_bytes == opened.report.read_bytes == 200 + ROWS * 1000


async def test_the_draft_reads_nothing_of_the_targets_tables(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "mtp.0.a": ("F32", (30,)),
        "engram.weight": ("F8_E4M3", (ROWS, 96)),
        "mtp.0.b": ("F32", (30,)),
    }
    checkpoint = write_checkpoint(tmp_path, {"a.safetensors": names})
    resident = [{"match": "engram.*", "host_resident": {"layout": "per_rank"}}]
    config = ls.config_from_dict(
        {
            "checkpoint": {"path": str(tmp_path)},
            "loads": {
                "target": {"skip": ["mtp.*"], "rules": resident},
                "draft": {"rules": resident},
            },
        }
    )
    (seat,) = make_seats(1)
    async with service_of(seat, config) as service:
        async with service.open("draft") as load:
            kept = {name async for name, _ in load if name.startswith("mtp.")}
    assert kept == {"mtp.0.a", "mtp.0.b"}
    assert not any(reads_of_bytes([seat.storage], checkpoint, "engram.weight"))


@pytest.mark.parametrize(
    ("taken", "complete"), [(0, False), (1, False), (4, False), (len(PLAN_ORDER) - 1, False), (len(PLAN_ORDER), True)]
)
async def test_a_consumer_that_leaves_before_the_last_table_is_not_complete(
    checkpoint: Checkpoint, taken: int, complete: bool
) -> None:
    (seat,) = make_seats(1)
    async with service_of(seat, config_of(checkpoint, rules("per_rank"), 1)) as service:
        async with service.open("target") as load:
            items = aiter(load)
            for _ in range(taken):
                await anext(items)
            if complete:
                with pytest.raises(StopAsyncIteration):
                    await anext(items)
        assert (load.report.complete, load.report.tensors) == (complete, taken)


async def test_a_load_of_tables_alone_is_not_complete_before_they_are_taken(checkpoint: Checkpoint) -> None:
    (seat,) = make_seats(1)
    """Nothing is streamed then, so the stream is over at once."""
    config = config_of(checkpoint, {**rules("per_rank"), "skip": TENSORS}, 1)
    async with service_of(seat, config) as service:
        for takes in (False, True):
            async with service.open("target") as load:
                items = aiter(load)
                async with asyncio.timeout(30):
                    while not load._run.channel.over:  # noqa: ASYNC110 - it sends no event
                        await asyncio.sleep(0.001)
                if takes:
                    assert [name async for name, _ in items] == [name for name in PLAN_ORDER if name in TABLES]
            assert load.report.complete == takes


async def test_batches_and_into_skip_tables_unless_they_are_named(checkpoint: Checkpoint) -> None:
    (seat,) = make_seats(1)
    async with service_of(seat, config_of(checkpoint, rules("shared"), 1)) as service:
        found = set()
        async with service.open("target") as load:
            async for batch in load.batches():
                with batch:
                    found |= {piece.name for piece in batch}
        assert (found, load.report.complete) == (set(TENSORS), True)
        assert not any(reads_of_bytes([seat.storage], checkpoint, WEIGHT))
        first, deep = torch.empty(5, 6), torch.zeros(ROWS, 2, 5)
        async with service.open("target") as load:
            await load.into({"a.first": first, DEEP: deep})
        assert_same(first, checkpoint.tensor("a.first"))
        assert_rows(deep, checkpoint, DEEP, (0, ROWS))
        assert load.report.tensors == 2
        assert not any(reads_of_bytes([seat.storage], checkpoint, SCALE))


async def test_into_takes_this_ranks_rows_of_a_table_in_either_layout(checkpoint: Checkpoint) -> None:
    for layout in LAYOUTS:
        seats = make_seats(3)

        async def fill(seat: Seat, layout: str = layout) -> None:
            start, stop = shares("equal", 3)[seat.rank]
            async with service_of(seat, config_of(checkpoint, rules(layout), 3)) as service:
                async with service.open("target") as load:
                    with pytest.raises(ls.DestinationError, match=f"this rank's part is \\({stop - start}, 2, 5\\)"):
                        await load.into({DEEP: torch.zeros(ROWS, 2, 5)})
                    rows = torch.zeros(stop - start, 2, 5)
                    await load.into({DEEP: rows})
                    assert_rows(rows, checkpoint, DEEP, (start, stop))

        values(await all_of(seats, fill))


async def test_the_spec_of_a_table_says_which_rows_are_this_ranks(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)

    async def look(seat: Seat) -> ls.TensorSpec:
        async with service_of(seat, config_of(checkpoint, rules("shared"), 2)) as service:
            async with service.open("target") as load:
                return load.spec(DEEP)

    for rank, spec in enumerate(values(await all_of(seats, look))):
        start, stop = shares("equal", 2)[rank]
        assert (spec.full_shape, spec.shape, spec.dtype) == ((ROWS, 2, 5), (stop - start, 2, 5), torch.float32)
        whole = (slice(0, 2), slice(0, 5))
        assert spec.parts == (((slice(start, stop), *whole), (slice(0, stop - start), *whole)),)


async def test_sources_by_name(checkpoint: Checkpoint) -> None:
    """Before the first item, beside the stream, after the load; not before it is entered, not after the service."""
    (seat,) = make_seats(1)
    async with service_of(seat, config_of(checkpoint, rules("per_rank"), 1)) as service:
        load = service.open("target")
        with pytest.raises(ls.StateError, match="is not open: enter it first"):
            _ = load.tables
        async with load:
            assert_rows(await asyncio.to_thread(own_rows, load.tables[SCALE]), checkpoint, SCALE, (0, ROWS))
            with pytest.raises(KeyError):
                load.tables["a.first"]
            with pytest.raises(TypeError):
                load.tables["other"] = load.tables[SCALE]  # type: ignore[index]
            async for _ in load:
                assert_rows(await asyncio.to_thread(own_rows, load.tables[DEEP]), checkpoint, DEEP, (0, ROWS))
        kept = load.tables[WEIGHT]
        assert_rows(await asyncio.to_thread(own_rows, kept), checkpoint, WEIGHT, (0, ROWS))
    with pytest.raises(ls.StateError):
        await asyncio.to_thread(own_rows, kept)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Checkpoint]:
    with disk_folder(tmp_path) as folder:
        yield write(folder)


async def test_each_source_says_how_its_own_rows_were_read_and_the_report_how_all_were(on_disk: Checkpoint) -> None:
    """Two tables in one file, which refuses direct reads from the second one on."""
    checkpoint = on_disk
    (seat,) = make_seats(1)
    seat.storage.cache("*.safetensors", lambda *_: 0)
    async with service_of(seat, config_of(checkpoint, rules("per_rank"), 1)) as service, service.open("target") as load:
        for name in (WEIGHT, SCALE):
            source = load.tables[name]
            buffer = allocate_host(checkpoint.tensor(name).nbytes, congruent_to=source.offset)
            await source.aread_rows_into(buffer.tensor.view(source.dtype).view(source.shape), 0)
            seat.storage.fail(source.path, errno.EINVAL, operation="read direct", times=None)
        ways = {name: load.tables[name].access for name in (WEIGHT, SCALE, DEEP)}
    assert (ways[WEIGHT].effective, ways[SCALE].effective) == ("direct", "buffered")
    assert "EINVAL" not in ways[WEIGHT].reason
    assert ways[SCALE].reason.endswith(".safetensors: EINVAL")
    assert ways[DEEP] == PolicyOutcome("auto", "auto", "nothing was read")
    together = load.report.policies["tables_per_rank"]
    assert together.effective == "mixed"
    assert f"{format_size(ROWS * 96)} past the page cache" in together.reason
    assert f"{format_size(ROWS * 3)} read through the page cache" in together.reason


def test_a_synchronous_weight_loader_reads_rows_while_the_stream_goes_on(checkpoint: Checkpoint) -> None:
    (seat,) = make_seats(1)
    config = config_of(checkpoint, rules("per_rank"), 1, staging={"capacity_bytes": "4KiB"})
    names = []
    with ls.LoaderService.blocking(config, seat.group, storage=seat.storage) as service:
        with service.open("target") as load:
            for name, value in load:
                names.append(name)
                if isinstance(value, ls.RowSource):
                    assert_rows(own_rows(value), checkpoint, name, value.rows)
            assert list(load.tables) == [name for name in PLAN_ORDER if name in TABLES]
    assert names == PLAN_ORDER


async def test_a_rank_that_reads_rows_hears_at_once_that_another_has_failed(checkpoint: Checkpoint) -> None:
    """Its queued chunks are dropped; it does not first read what nobody needs any more."""
    seats = make_seats(2)
    path, start, stop = place_of(checkpoint, WEIGHT)
    gate = seats[0].storage.block(path, within=(start, stop))
    failed = threading.Event()
    config = config_of(checkpoint, rules("per_rank"), 2, reads={"chunk_bytes": 96, "threads": 1, "access": "buffered"})

    async def read(seat: Seat) -> None:
        async with service_of(seat, config) as service, service.open("target") as load:
            if seat.rank == 1:
                await asyncio.to_thread(gate.reached.wait)
                raise ValueError("this rank's own")
            reading = asyncio.ensure_future(asyncio.to_thread(own_rows, load.tables[WEIGHT]))
            while load.failure is None:  # noqa: ASYNC110 - it sends no event
                await asyncio.sleep(0.01)
            failed.set()
            gate.release()
            await reading

    first, second = await all_of(seats, read)
    assert failed.is_set()
    assert isinstance(first, ls.RankFailure)
    assert first.rank == 1
    assert isinstance(second, ValueError)
    assert sum(reads_of_bytes([seats[0].storage], checkpoint, WEIGHT)) == 96, "one chunk was being read"


async def test_a_file_that_changed_under_a_row_source_fails_the_load(checkpoint: Checkpoint) -> None:
    (seat,) = make_seats(1)
    async with service_of(seat, config_of(checkpoint, {**rules("per_rank"), "skip": TENSORS}, 1)) as service:
        with pytest.raises(ls.CheckpointError, match="changed"):
            async with service.open("target") as load:
                await asyncio.to_thread(own_rows, load.tables[WEIGHT])
                seat.storage.replace("*.safetensors", mtime_ns=1)


def test_host_resident_weights_without_a_configuration(checkpoint: Checkpoint) -> None:
    for files in (
        checkpoint.folder,
        [checkpoint.folder / name for name in sorted(set(checkpoint.shard_of.values()))],
    ):
        found = dict(ls.host_resident_weights(files, ["engram.*"]))
        assert list(found) == PLAN_ORDER
        for name in TENSORS:
            assert_same(found[name], checkpoint.tensor(name), name)
        for name in TABLES:
            assert_rows(own_rows(found[name]), checkpoint, name, (0, checkpoint.tensor(name).shape[0]))
    del found  # the last source ends the threads
    shard = checkpoint.folder / checkpoint.shard_of[DEEP]
    assert [name for name, _ in ls.host_resident_weights(shard, ["*.weight"])] == ["b.first", DEEP]
    with pytest.raises(ls.CheckpointError):
        next(iter(ls.host_resident_weights(checkpoint.folder / "none", [])))
    with pytest.raises(ls.ConfigError):
        next(iter(ls.host_resident_weights([], ["*"])))


def test_weight_and_scale_of_a_table_fill_two_views_of_one_buffer(checkpoint: Checkpoint) -> None:
    memory = torch.full((20 * 96 + 20 * 3,), 0xA5, dtype=torch.uint8)
    weight = memory[: 20 * 96].view(torch.float8_e4m3fn).view(20, 96)
    scale = memory[20 * 96 :].view(torch.float8_e8m0fnu).view(20, 3)
    for name, value in ls.host_resident_weights(checkpoint.folder, ["engram.*"]):
        if name in (WEIGHT, SCALE):
            own = weight if name == WEIGHT else scale
            value.read_rows_into(own[3:17], 11)
    assert_rows(weight[3:17], checkpoint, WEIGHT, (11, 25))
    assert_rows(scale[3:17], checkpoint, SCALE, (11, 25))
    for part in (weight[:3], weight[17:], scale[:3], scale[17:]):
        assert set(bytes(raw_memory(part))) == {0xA5}
