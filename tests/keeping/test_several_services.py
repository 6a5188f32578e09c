"""Services that act together: what they must agree on, and what each of one node keeps."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import loader_service as ls
from loader_service.cli.serve import _own_address
from loader_service.config.schema import ServiceConfig
from loader_service.keeping.shape import equal_part
from loader_service.memory.held import ByteRanges
from tests.cli.support import start_ranks
from tests.e2e.seats import Seat, all_of, errors, make_seats, payload_reads, values
from tests.e2e.seats import serve as served_store
from tests.keeping.making import config_of, worker
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint
from tests.support.ranks import Rank, free_port, run_ranks
from tests.tables import making as tables
from tests.tables.standing import stand_at


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    return awkward_checkpoint(tmp_path / "checkpoint", columns=70)


@pytest.mark.parametrize(
    ("serve", "ranks", "differs"),
    [
        ([{"keep": ["target", "draft"]}, {"keep": ["target"]}], [2, 2], "serve.keep is"),
        ([{"keep": ["target"]}, {"keep": ["draft"]}], [2, 2], "serve.keep is"),
        ([{"keep": ["target"]}, {"keep": ["target"], "warm": ["draft"]}], [2, 2], "serve.warm is"),
        ([{"keep": ["target"]}, {"keep": ["target"]}], [4, 2], "world_size is 4 on rank 0 and 2 on rank 1"),
    ],
)
async def test_all_of_it_is_agreed_on_before_anything_is_read(
    small: Checkpoint, serve: list[Mapping[str, object]], ranks: list[int], differs: str
) -> None:
    """Else one would wait for the other in a load that this one does not know, or be ready while that one fails."""
    configs = [config_of(small, draft={}, serve=each) for each in serve]

    async def fill(seat: Seat) -> None:
        at = seat.rank
        async with ls.ResidentService(configs[at], seat.group, ranks=ranks[at], storage=seat.storage) as service:
            await service.fill()

    seats = make_seats(2)
    for error in errors(await all_of(seats, fill)):
        assert isinstance(error, ls.AgreementError)
        assert differs in str(error)
        assert error.phase == "config"
    assert [seat.storage.reads for seat in seats] == [[], []]


async def test_a_node_keeps_every_byte_once(tmp_path: Path) -> None:
    """Tensors that both workers take, and shared tables: each byte is read, and kept, by one of the services."""
    checkpoint = tables.write(tmp_path)
    rules = {"rules": [{"match": "engram.*", "host_resident": {"layout": "shared"}}]}
    config = config_of(checkpoint, rules, serve={"keep": ["target"]}, mesh={"tp": 2})
    seats, filled, done = make_seats(2), asyncio.Barrier(3), asyncio.Event()

    async def serve(seat: Seat) -> int:
        async with ls.ResidentService(config, seat.group, storage=seat.storage) as service:
            await service.fill()
            await filled.wait()
            await done.wait()
            return service.status().loads[0].read_bytes

    async def work(seat: Seat) -> list[str]:
        async with worker(seat, config) as attached:
            async with attached.open("target") as load:
                async for name, value in load:
                    if not isinstance(value, ls.RowSource):
                        assert_same(value, checkpoint.tensor(name))
            found = [await attached.host_table("target", name) for name in (tables.WEIGHT, tables.SCALE, tables.DEEP)]
            for name, table in zip((tables.WEIGHT, tables.SCALE, tables.DEEP), found, strict=True):
                assert_same(table.tensor, checkpoint.tensor(name))
        assert payload_reads(seat.storage) == []
        return [table.access.effective for table in found]

    serving = asyncio.ensure_future(all_of(seats, serve))
    try:
        await filled.wait()
        assert values(await all_of(make_seats(2), work)) == [["kept"] * 3] * 2
    finally:
        done.set()
    read = [sum(each.nbytes for each in payload_reads(seat.storage)) for seat in seats]
    assert sum(read) == checkpoint.payload_bytes
    assert min(read) > 0
    values(await serving)


async def test_a_table_is_shared_though_another_load_streams_it(tmp_path: Path) -> None:
    checkpoint = tables.write(tmp_path)
    rules = {"rules": [{"match": "engram.*", "host_resident": {"layout": "shared"}}]}
    config = config_of(checkpoint, rules, draft={}, serve={"keep": ["draft", "target"]})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        async with ls.LoaderService(config, "solo", attach=True) as attached:
            for name in (tables.WEIGHT, tables.SCALE):
                table = await attached.host_table("target", name)
                assert table.access.reason.startswith("nothing was read")
                assert_same(table.tensor, checkpoint.tensor(name))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_equal_parts_are_disjoint_complete_and_equal(count: int) -> None:
    ranges = {
        "a": ByteRanges(np.array([5, 100]), np.array([17, 130])),
        "b": ByteRanges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)),
        "c": ByteRanges(np.array([0]), np.array([1000])),
    }
    parts = [equal_part(ranges, number, count) for number in range(count)]
    nbytes = [sum(each.nbytes for each in part.values()) for part in parts]
    assert sum(nbytes) == 1042
    assert max(nbytes) - min(nbytes) <= 1
    for key, whole in ranges.items():
        joined = ByteRanges.merged([], [])
        for part in parts:
            joined = joined.joined(part.get(key, joined))
        assert (joined.starts.tolist(), joined.stops.tolist()) == (whole.starts.tolist(), whole.stops.tolist())


@pytest.mark.parametrize(
    ("given", "environ", "own"),
    [
        ("127.0.0.1:9100", {}, "127.0.0.1:9100"),
        ("127.0.0.1:9100", {"LOCAL_RANK": "3"}, "127.0.0.1:9103"),
        ("[::1]:9100", {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "[::1]:9101"),
        ("127.0.0.1:0", {"LOCAL_RANK": "3"}, "127.0.0.1:0"),
        ("nonsense", {"LOCAL_RANK": "3"}, "nonsense"),
    ],
)
def test_services_of_one_node_serve_http_side_by_side(given: str, environ: dict[str, str], own: str) -> None:
    assert _own_address(given, environ) == own


def keep_until_killed(rank: Rank, address: str, config: ServiceConfig) -> tuple[str, int | None, str]:
    """One service is killed while it reads; what the other is told."""
    if rank.rank == 1:
        stand_at(rank, "reading")

    async def keep() -> BaseException | None:
        group = ls.Rendezvous(address, rank.rank, rank.world_size, rank.address, served=True)
        async with ls.ResidentService(config, group) as service:
            try:
                await service.fill()
            except BaseException as error:
                return error
            return None

    error = asyncio.run(keep())
    return type(error).__name__, getattr(error, "rank", None), str(error)


@pytest.mark.processes
def test_a_service_that_is_killed_while_it_fills_is_known_at_once(small: Checkpoint) -> None:
    """By its end; its silence would tell after a time that no test has."""
    limits = {"timeout_s": 600, "start_timeout_s": 60, "grace_s": 5}
    config = config_of(small, serve={"keep": ["target"]}, mesh={"tp": 2}, agreement=limits)
    survivor, victim = run_ranks(
        keep_until_killed,
        2,
        f"127.0.0.1:{served_store().port}",
        config,
        on_mark=lambda rank, _text, pids: os.kill(pids[rank], signal.SIGKILL),
    )
    assert victim.exitcode == -signal.SIGKILL
    error, failed, text = survivor.get()
    assert (error, failed) == ("RankFailure", 1)
    assert "LostRank: its process has ended" in text


def test_a_service_that_cannot_serve_http_fails_all_at_once(small: Checkpoint, tmp_path: Path) -> None:
    """Before it has met the others, who would wait for it."""
    config: dict[str, Any] = {
        "checkpoint": {"path": str(small.folder)},
        "loads": {"target": {}},
        "serve": {"keep": ["target"], "socket": str(tmp_path / "s")},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    args = ["serve", str(path), "--json"]
    http = ["--http", f"192.0.2.1:{free_port()}"]  # no address of this machine
    first, second = (each.end() for each in start_ranks([args, [*args, *http]], tmp_path))
    assert (first.code, second.code) == (4, 2), first.err + second.err
    assert "HTTP cannot be served at 192.0.2.1" in first.document["message"]
    assert first.document["rank"] == 1
