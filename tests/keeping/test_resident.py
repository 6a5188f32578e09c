"""The resident service itself: what it agrees on, admits, reads and tells; and how it ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loader_service as ls
from loader_service.engine import Engine
from loader_service.memory.admission import Room
from tests.e2e.seats import WATCHDOG_S, Seat, all_of, errors, make_seats, payload_bytes_read, values
from tests.e2e.test_sharing import check
from tests.keeping.making import config_of, storage, worker
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint
from tests.tables import making as tables

PAGE = 4096


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    return awkward_checkpoint(tmp_path / "checkpoint", columns=70)


@pytest.fixture
def with_tables(tmp_path: Path) -> Checkpoint:
    return tables.write(tmp_path)


def resident(seat: Seat, config: Any) -> ls.ResidentService:
    return ls.ResidentService(config, seat.group, storage=seat.storage)


async def until(holds: Callable[[], bool]) -> None:
    """What other threads bring about."""
    async with asyncio.timeout(WATCHDOG_S):
        while not holds():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


async def test_each_byte_is_read_once_and_lies_in_pages_of_its_own(small: Checkpoint) -> None:
    disk = storage()
    config = config_of(small, draft={"key_prefixes": ["layers.1"]}, serve={"keep": ["target"], "warm": ["draft"]})
    async with ls.ResidentService(config, "solo", storage=disk) as service:
        assert not service.status().ready
        await service.fill()
        status = service.status()
    assert status.ready
    target, draft = status.loads
    heads = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in small.folder.iterdir())
    assert (target.state, target.kept) == ("ready", "everything")
    assert target.read_bytes == target.wanted_bytes == small.payload_bytes + heads
    assert target.read_bytes <= target.kept_bytes <= target.read_bytes + 2 * 2 * PAGE
    assert payload_bytes_read(disk) == small.payload_bytes
    assert (draft.state, draft.kept, draft.kept_bytes) == ("ready", "page cache", 0)
    assert draft.read_bytes == draft.wanted_bytes == 257 * 2
    assert list(target.phases) == ["config", "catalog", "plan", "open", "read", "finish"]


async def test_services_keep_what_their_share_of_the_workers_takes(small: Checkpoint) -> None:
    rules = {"rules": [{"match": "big.weight", "split": {"axis": "tp", "dim": 0}}]}
    config = config_of(small, rules, serve={"keep": ["target"]}, mesh={"tp": 4})
    seats = make_seats(2)
    done = asyncio.Event()

    opened: list[ls.ResidentService] = []

    async def serve(seat: Seat) -> ls.ResidentService:
        async with resident(seat, config) as service:
            opened.append(service)
            await service.fill()
            await done.wait()
            return service

    async def work(seat: Seat) -> ls.LoadReport:
        async with worker(seat, config) as attached:
            async with attached.open("target") as load:
                found = {name: tensor async for name, tensor in load}
            assert_same(found["big.weight"], small.tensor("big.weight")[160 * seat.rank : 160 * (seat.rank + 1)])
        return load.report

    serving = asyncio.ensure_future(all_of(seats, serve))
    try:
        await until(lambda: len(opened) == 2 and all(service._reception is not None for service in opened))
        reports = values(await all_of(make_seats(4), work))
    finally:
        done.set()
    assert [report.policies["service"].effective for report in reports] == ["kept"] * 4
    services = values(await serving)
    assert [service.status().ranks_served for service in services] == [(0, 2), (2, 4)]
    halves = [payload_bytes_read(seat.storage) for seat in seats]  # of what the workers of their node take
    assert sum(halves) == small.payload_bytes
    assert abs(halves[0] - halves[1]) <= 1
    assert services[0].status().attached_total == services[1].status().attached_total == 4


async def test_a_service_that_fails_fails_all_and_none_gets_ready(small: Checkpoint) -> None:
    config = config_of(small, serve={"keep": ["target"], "if_absent": "error"}, reads={"retries": 0})
    seats = make_seats(2)
    seats[1].storage.fail("*00002*", errno.EIO, within=(150_000, 150_001), times=None)

    async def serve(seat: Seat) -> None:
        async with resident(seat, config) as service:
            try:
                await service.fill()
            finally:
                status = service.status()
                assert not status.ready
                assert [load.state for load in status.loads] == ["failed"]
                assert "00002" in status.loads[0].reason

    first, second = errors(await all_of(seats, serve))
    assert (type(first), type(second)) == (ls.RankFailure, ls.ReadError)
    assert (first.rank, first.errno, first.phase) == (1, errno.EIO, "read")
    with pytest.raises(ls.AttachError):
        async with ls.LoaderService(config, "solo", attach=True) as attached, attached.open("target"):
            pass


async def test_services_that_would_keep_different_things_say_so(small: Checkpoint) -> None:
    configs = [config_of(small, {"skip": skip}, serve={"keep": ["target"]}) for skip in ([], ["odd"])]

    async def serve(seat: Seat) -> None:
        async with resident(seat, configs[seat.rank]) as service:
            await service.fill()

    for error in errors(await all_of(make_seats(2), serve)):
        assert isinstance(error, ls.AgreementError)
        assert "loads.target.skip" in str(error)


def rooms(free_bytes: int) -> Any:
    return lambda: (Room("", 1 << 40, free_bytes),)


@pytest.mark.parametrize(("free", "kept"), [(1 << 30, "everything"), (40 << 10, "tables"), (4 << 10, None)])
async def test_memory_decides_what_is_kept(
    with_tables: Checkpoint, monkeypatch: pytest.MonkeyPatch, free: int, kept: str | None
) -> None:
    """Whole, the shared tables alone, or an error of all services; workers get every byte whichever it is."""
    config = config_of(
        with_tables,
        tables.rules("shared"),
        serve={"keep": ["target"]},
        mesh={"tp": 1},
        memory={"reserve_bytes": 0},
    )
    if kept == "tables":  # more to stream than there is room
        (with_tables.folder / "z.safetensors").write_bytes(_padded_shard(200_000))
    start = Engine.start

    async def limited(engine: Engine) -> None:
        await start(engine)
        engine.memory_rooms = rooms(free)

    monkeypatch.setattr(Engine, "start", limited)
    async with ls.ResidentService(config, "solo") as service:
        if kept is None:
            with pytest.raises(ls.MemoryLimitError, match="shared host tables of load 'target' cannot be kept"):
                await service.fill()
            return
        await service.fill()
        (load,) = service.status().loads
        assert load.kept == kept
        assert ("to stay" in load.reason) == (kept == "tables")
        monkeypatch.setattr(Engine, "start", start)
        disk = storage()
        async with ls.LoaderService(config, "solo", storage=disk, attach=True) as attached:
            table = await attached.host_table("target", tables.WEIGHT)
            assert table.access.effective == "kept"
            tables.assert_table(table, with_tables, tables.WEIGHT, (0, tables.ROWS), "shared")
            async with attached.open("target") as opened:
                found = {name: tensor async for name, tensor in opened if isinstance(tensor, torch.Tensor)}
        for name in ("a.first", "m.mid", "b.first"):
            assert torch.equal(found[name].view(torch.uint8), with_tables.tensor(name).view(torch.uint8))
        assert (opened.report.read_bytes == 0) == (kept == "everything")


def _padded_shard(nbytes: int) -> bytes:
    header = f'{{"pad":{{"dtype":"U8","shape":[{nbytes}],"data_offsets":[0,{nbytes}]}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(nbytes)


async def test_a_worker_that_comes_early_waits_and_is_told_how_far_the_service_is(small: Checkpoint) -> None:
    config = config_of(small, serve={"keep": ["target"]})
    disk = storage()
    gate = disk.block("*00002*", within=(20_000, 20_001))
    async with ls.ResidentService(config, "solo", storage=disk) as service:
        filling = asyncio.ensure_future(service.fill())
        await asyncio.to_thread(gate.reached.wait, WATCHDOG_S)
        async with ls.LoaderService(config, "solo", attach=True) as attached:
            loading = asyncio.ensure_future(_load(attached))
            assert attached._engine is not None
            assert attached._engine.attachment is not None
            attachment = attached._engine.attachment
            await until(lambda: "load 'target' is reading" in attachment.progress)
            assert not loading.done()
            assert [load.state for load in service.status().loads] == ["reading"]
            gate.release()
            await filling
            check(await loading, {name: small.tensor(name) for name in small.tensors})


async def _load(service: ls.LoaderService) -> dict[str, torch.Tensor]:
    async with service.open("target") as load:
        return {name: tensor async for name, tensor in load}


async def test_what_workers_tell_of_their_loads_is_in_the_status(small: Checkpoint) -> None:
    config = config_of(small, serve={"keep": ["target"]})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()

        async def work(seat: Seat) -> None:
            async with worker(seat, config) as attached:
                await _load(attached)
                if seat.rank == 1:
                    with pytest.raises(ZeroDivisionError):
                        async with attached.open("target"):
                            raise ZeroDivisionError
                else:
                    with pytest.raises(ls.RankFailure):
                        async with attached.open("target"):
                            pass
                await until(lambda: service.status().failed_total == 2)

        values(await all_of(make_seats(2), work))
        await until(lambda: service.status().workers == 0)
        status = service.status()
    assert status.attached_total == 2
    assert [(load.load, load.rank, load.world_size) for load in status.worker_loads] in (
        [("target", 0, 2), ("target", 1, 2)],
        [("target", 1, 2), ("target", 0, 2)],
    )
    for load in status.worker_loads:
        assert load.process == os.getpid()
        assert load.failure is not None
        assert load.failure["error"] == "ZeroDivisionError"
        assert load.report is None


async def test_nothing_is_left_of_it(small: Checkpoint) -> None:
    """Descriptors, threads (see conftest) and memory files end with it, and with its workers."""
    config = config_of(small, serve={"keep": ["target"], "socket": str(small.folder / "here.sock")})

    async def once() -> dict[str, torch.Tensor]:
        async with ls.ResidentService(config, "solo") as service:
            await service.fill()
            assert (small.folder / "here.sock").stat().st_mode & 0o777 == 0o600
            async with ls.LoaderService(config, "solo", attach=True) as attached:
                return await _load(attached)

    found = await once()
    assert not (small.folder / "here.sock").exists()
    assert _memory_files() != []  # the tensors' own
    del found
    gc.collect()
    before = os.listdir("/proc/self/fd")
    await once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert _memory_files() == []


def _memory_files() -> list[str]:
    with open("/proc/self/maps") as file:
        return [line for line in file if "memfd:loader-service" in line]


async def test_a_cancelled_filling_leaves_nothing_and_can_be_done_again(small: Checkpoint) -> None:
    config = config_of(small, serve={"keep": ["target"]})
    disk = storage()
    gate = disk.block("*00002*", within=(20_000, 20_001))
    async with ls.ResidentService(config, "solo", storage=disk) as service:
        filling = asyncio.ensure_future(service.fill())
        await asyncio.to_thread(gate.reached.wait)
        filling.cancel()
        gate.release()
        with pytest.raises(asyncio.CancelledError):
            await filling
        gc.collect()
        assert _memory_files() == []
        await service.fill()
        assert service.status().ready


async def test_another_service_cannot_have_the_same_socket(small: Checkpoint) -> None:
    config = config_of(small, serve={"keep": ["target"]})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        async with ls.ResidentService(config, "solo") as second:
            with pytest.raises(ls.ConfigError, match="another service listens there"):
                await second.fill()


def test_what_is_wrong_is_said_before_anything_starts(small: Checkpoint) -> None:
    with pytest.raises(ls.ConfigError, match=r"serve.keep\[0\]: no load is named 'tarjet'.*did you mean 'target'"):
        config_of(small, serve={"keep": ["tarjet"]})
    with pytest.raises(ls.ConfigError, match="load 'target' is kept already"):
        config_of(small, serve={"keep": ["target"], "warm": ["target"]})
    with pytest.raises(ls.ConfigError, match="of at most 100 bytes"):
        config_of(small, serve={"keep": ["target"], "socket": "@" + "x" * 100})
    with pytest.raises(ls.ConfigError, match="nothing is to be kept or warmed"):
        ls.ResidentService(config_of(small, serve={}), "solo")


async def test_more_services_than_workers_are_refused(small: Checkpoint) -> None:
    config = config_of(small, serve={"keep": ["target"]}, mesh={"tp": 1})

    async def serve(seat: Seat) -> None:
        async with resident(seat, config) as service:
            await service.fill()

    for error in errors(await all_of(make_seats(2), serve)):
        assert isinstance(error, ls.ConfigError)
        assert "2 services are more than the 1 workers" in str(error)
