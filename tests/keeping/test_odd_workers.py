"""What comes to a resident service that is no worker, or is one no more; and a service that is used otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.cli.http_pages import Pages
from loader_service.config.schema import ServiceConfig
from loader_service.keeping import wire
from loader_service.keeping.index import PROTOCOL
from tests.keeping.making import config_of
from tests.support.checkpoints import Checkpoint, awkward_checkpoint

WATCHDOG_S = 60.0
NEWS: dict[str, Any] = {"load": "x", "rank": 0, "world_size": 1, "process": 1, "loop_lag_s": 0.0, "counters": {}}


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    return awkward_checkpoint(tmp_path / "checkpoint", columns=70)


async def until(holds: Callable[[], bool]) -> None:
    """What other threads bring about."""
    async with asyncio.timeout(WATCHDOG_S):
        while not holds():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def knocking(config: ServiceConfig) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(WATCHDOG_S)
        connection.connect(wire.address_of(config, 0))
        yield connection


def greet(connection: socket.socket) -> None:
    """As a worker does; what is handed over is not used."""
    connection.send(json.dumps({"protocol": PROTOCOL}).encode())
    _, descriptors = wire.receive(connection)
    assert not any(map(os.get_inheritable, descriptors))
    for descriptor in descriptors:
        os.close(descriptor)


def news(**facts: object) -> bytes:
    return json.dumps({**NEWS, **facts}).encode()


GARBAGE = (
    b"[" * 60_000,
    b"\xff",
    b"{}",
    b"[1]",
    news(rank=float("inf")),
    news(rank=10**30),
    news(rank=-1),
    news(rank="0"),
    news(load=7),
    news(load="\ud800"),
    news(loop_lag_s=float("nan")),
    news(counters=3),
    news(counters={"read_bytes": "many"}),
    news(report=5),
    news(failure=[]),
)


async def test_what_makes_no_sense_is_not_noted_and_harms_nobody(
    small: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(small, serve={"keep": ["target"]})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        for packet in GARBAGE[:2]:  # instead of a greeting
            with knocking(config) as connection:
                connection.send(packet)
                refused, _ = await asyncio.to_thread(wire.receive, connection)
                assert refused is not None
                assert refused["state"] == "refused"
        with knocking(config) as connection:
            await asyncio.to_thread(greet, connection)
            for packet in (*GARBAGE, news(load="y", report={"phases": 5, "policies": [], "seconds": "x"})):
                connection.send(packet)
            await until(lambda: len(service.status().worker_loads) > 0)
            assert [load.load for load in service.status().worker_loads] == ["y"]
            pages = Pages(service.status, lambda _load: {})
            for path in ("/metrics", "/status", "/readyz"):
                assert (await asyncio.to_thread(pages.answer, path)).code == 200
        async with ls.LoaderService(config, "solo", attach=True) as worker:
            async with worker.open("target") as load:
                assert len([name async for name, _ in load]) == len(small.tensors)
        assert load.report.read_bytes == 0
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_worker_that_dies_in_a_load_is_told_of(small: Checkpoint) -> None:
    """All that a service sees of it is the end of the connection."""
    config = config_of(small, serve={"keep": ["target"]})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        with knocking(config) as connection:
            await asyncio.to_thread(greet, connection)
            connection.send(news(load="over", report={}))
            connection.send(news(load="open"))
            await until(lambda: len(service.status().worker_loads) == 2)
            assert service.status().failed_total == 0
        await until(lambda: service.status().workers == 0)
        status = service.status()
        lost = {load.load: load.failure["error"] for load in status.worker_loads if load.failure is not None}
        assert (lost, status.failed_total) == ({"open": "LostWorker"}, 1)


async def test_a_worker_that_dies_in_more_loads_than_are_remembered_is_counted_whole(
    small: Checkpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader_service.keeping.reception._MOST_LOADS", 2)
    config = config_of(small, serve={"keep": ["target"]})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        with knocking(config) as connection:
            await asyncio.to_thread(greet, connection)
            for name in "abc":
                connection.send(news(load=name))
            await until(lambda: {load.load for load in service.status().worker_loads} == {"b", "c"})
        await until(lambda: service.status().workers == 0)
        status = service.status()
        assert (status.failed_total, all(load.failure for load in status.worker_loads)) == (3, True)
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_service_is_opened_and_filled_once(small: Checkpoint) -> None:
    service = ls.ResidentService(config_of(small, serve={"keep": ["target"]}), "solo")
    with pytest.raises(ls.StateError, match="not open"):
        await service.fill()
    async with service:
        filling = asyncio.ensure_future(service.fill())
        await asyncio.sleep(0)
        with pytest.raises(ls.StateError, match="is being filled"):
            await service.fill()
        await filling
        with pytest.raises(ls.StateError, match="was filled before"):
            await service.fill()
        assert service.status().ready
    with pytest.raises(ls.StateError, match="was opened before"):
        await service.__aenter__()
