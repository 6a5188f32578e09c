"""What is logged of a load says of which one, on which rank and in which phase, whatever thread it comes from."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from pathlib import Path

import pytest
import torch

import loader_service as ls
from tests.e2e.seats import Seat, all_of, make_seats, values
from tests.support.checkpoints import awkward_checkpoint

QUICK = {"timeout_s": 10.0, "start_timeout_s": 60.0, "grace_s": 5.0}  # heartbeats every second
PHASES = ["config", "catalog", "plan", "open", "read", "finish"]


async def test_records_of_two_ranks_say_which_load_rank_and_phase(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "loader_service")
    rules = [{"match": "embed.*", "host_resident": {"layout": "per_rank"}}]
    config = awkward_checkpoint(tmp_path).config({"rules": rules}, reads={"access": "direct", "sharing": "none"})
    seats = make_seats(2)
    seats[1].storage.fail("*", errno.EINVAL, operation="open direct", times=None)

    async def run(seat: Seat) -> None:
        async with seat.service(config) as service, service.open("target") as load:
            async for _, value in load:
                if isinstance(value, ls.RowSource):
                    await value.aread_rows_into(torch.empty(value.shape, dtype=value.dtype), 0)

    values(await all_of(seats, run))
    known = [record for record in caplog.records if getattr(record, "load", None) is not None]
    assert {record.load for record in known} == {"target"}  # type: ignore[attr-defined]
    assert {record.world_size for record in known} == {2}  # type: ignore[attr-defined]
    told = [record for record in caplog.records if record.name == "loader_service.agreement"]
    assert told
    assert {record.load for record in told} == {"target"}  # type: ignore[attr-defined]
    for rank in range(2):
        phases = [record.phase for record in known if record.rank == rank]  # type: ignore[attr-defined]
        assert list(dict.fromkeys(phases)) == PHASES
    # From a reading thread, which works for one service after another.
    fallen_back = [record for record in caplog.records if "is read through the page cache" in record.getMessage()]
    assert len(fallen_back) == 3, "both files of what is streamed, and the one of the table"
    assert {(record.load, record.rank, record.phase) for record in fallen_back} == {("target", 1, "read")}  # type: ignore[attr-defined]
    assert {record.threadName.rstrip("0123456789") for record in fallen_back} == {"loader-read-"}  # type: ignore[union-attr]
    lines = [json.loads(ls.JsonFormatter().format(record)) for record in known]
    assert all({"load", "rank", "world_size", "phase"} <= line.keys() for line in lines)


async def test_rank_0_knows_how_far_each_rank_has_come(tmp_path: Path) -> None:
    config = awkward_checkpoint(tmp_path).config(agreement=QUICK)
    seen = asyncio.Event()

    async def run(seat: Seat) -> dict[int, tuple[int, int]]:
        async with seat.service(config) as service, service.open("target") as load:
            of_all = load.plan.for_rank(seat.rank).payload_bytes
            async for _ in load:
                pass
            if seat.rank == 0:
                while load.done_by_rank != dict.fromkeys(range(2), (of_all, of_all)):  # noqa: ASYNC110 - heartbeats
                    await asyncio.sleep(0.01)
                seen.set()
            await seen.wait()
            return dict(load.done_by_rank)

    first, second = values(await all_of(make_seats(2), run))
    assert first.keys() == {0, 1}
    assert second == {}
