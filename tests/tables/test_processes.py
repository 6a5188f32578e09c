"""Rank processes fill tables: right rows on each, and nothing left of those that are killed or interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import uvloop

import loader_service as ls
from tests.conftest import _descriptors, _unfinished_threads
from tests.e2e.seats import serve
from tests.support import shared_memory
from tests.support.checkpoints import Checkpoint
from tests.support.ranks import Rank, run_ranks, run_teams
from tests.tables.making import (
    LAYOUTS,
    SPLITS,
    TABLES,
    WEIGHT,
    assert_table,
    config_of,
    left_behind,
    opened_since,
    rules,
    shares,
)
from tests.tables.standing import STANDS, stand_at

pytestmark = pytest.mark.processes

RANKS = 3
LIMITS = {"timeout_s": 60, "start_timeout_s": 60, "grace_s": 5}
BUFFERED = {"access": "buffered", "chunk_bytes": 200}
Plain: TypeAlias = tuple[Path, dict[str, Any], dict[str, str]]  # a checkpoint, as it travels to a process


def plain(checkpoint: Checkpoint) -> Plain:
    return checkpoint.folder, dict(checkpoint.tensors), dict(checkpoint.shard_of)


# -- filling


def fill_all(rank: Rank, given: Plain) -> None:
    checkpoint = Checkpoint(*given)
    for layout in LAYOUTS:
        for split in SPLITS:
            own = shares(split, rank.world_size)[rank.rank]
            config = config_of(checkpoint, rules(layout, SPLITS[split](rank.world_size)), rank.world_size)
            group = ls.Rendezvous(rank.address, rank.rank, rank.world_size, f"{layout} {split}")
            with ls.LoaderService.blocking(config, group) as service:
                tables = {name: service.host_table("target", name) for name in TABLES}
            for name, table in tables.items():
                assert_table(table, checkpoint, name, own if checkpoint.tensor(name).numel() else (0, 0), layout)
            assert bool(left_behind()) == (layout == "shared")
            del tables, table
            assert not left_behind()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rank_processes_get_their_rows_with_every_split_and_layout(checkpoint: Checkpoint, ranks: int) -> None:
    for outcome in run_ranks(fill_all, ranks, plain(checkpoint)):
        outcome.get()


# -- killed


Case: TypeAlias = tuple[str, int, str, str]  # where it stands, who, in which layout and face
Told: TypeAlias = tuple[str, str, int | None, list[str], list[str], list[str]]


def fill_until(rank: Rank, address: str, given: Plain, point: str, who: int, layout: str, face: str) -> Told:
    """What a rank is told, and what it has left afterwards: shared memory and sockets, threads, descriptors."""
    config = config_of(Checkpoint(*given), rules(layout), rank.world_size, agreement=LIMITS, reads=BUFFERED)
    group = ls.Rendezvous(address, rank.rank, rank.world_size, f"{rank.address}", served=True)
    uvloop.new_event_loop().close()  # what is opened once a process: libuv's pipe for signals
    before = _descriptors()
    if rank.rank == who:
        stand_at(rank, point)

    def blocking() -> BaseException | None:
        with ls.LoaderService.blocking(config, group) as service:
            try:
                service.host_table("target", WEIGHT)
            except BaseException as error:
                return error
            return None

    async def asynchronous() -> BaseException | None:
        async with ls.LoaderService(config, group) as service:
            try:
                await service.host_table("target", WEIGHT)
            except BaseException as error:
                return error
            return None

    error = blocking() if face == "blocking" else asyncio.run(asynchronous())
    cause = None if error is None else error.__cause__
    threads = [thread.name for thread in _unfinished_threads(set())]
    text = str(cause) if type(cause) is ls.LoaderError else type(cause).__name__
    return type(error).__name__, text, getattr(error, "rank", None), left_behind(), threads, opened_since(before)


def kill_at(checkpoint: Checkpoint, ranks: int, cases: Sequence[Case]) -> None:
    """One rank is killed in each case: all others see its end, not its silence, name it, and of memory, sockets and
    threads nothing is left."""
    before = shared_memory.names()

    def kill(team: int, rank: int, _text: str, pids: list[int]) -> None:
        assert rank == cases[team][1]
        os.kill(pids[rank], signal.SIGKILL)

    address = f"127.0.0.1:{serve().port}"
    given = [(address, plain(checkpoint), *case) for case in cases]
    for case, outcomes in zip(cases, run_teams(fill_until, ranks, given, on_mark=kill, timeout_s=90), strict=True):
        who = case[1]
        assert (outcomes[who].exitcode, outcomes[who].marks) == (-signal.SIGKILL, (STANDS,)), case
        for outcome in outcomes:
            if outcome.rank != who:
                error, cause, rank, *left = outcome.get()
                assert (error, rank) == ("RankFailure", who), (case, cause)
                assert "LostRank: its process has ended" in cause, (case, cause)
                assert left == [[], [], []], case
    shared_memory.assert_nothing_new(before)


AT_WORK: list[Case] = [
    ("meet", 0, "shared", "async"),
    ("hand over", 0, "shared", "blocking"),
    ("receive", 2, "shared", "async"),
    ("reserve", 0, "shared", "async"),
    ("reading", 0, "shared", "blocking"),
    ("reading", 2, "per_rank", "async"),
    ("pin", 2, "per_rank", "blocking"),
]
IN_EACH_PHASE: list[Case] = [
    ("catalog", 0, "shared", "async"),
    ("catalog", 1, "per_rank", "blocking"),
    ("plan", 1, "shared", "blocking"),
    ("plan", 0, "per_rank", "async"),
    ("open", 1, "shared", "async"),
    ("open", 0, "per_rank", "blocking"),
    ("read", 0, "shared", "blocking"),
    ("read", 1, "per_rank", "async"),
    ("finish", 1, "shared", "async"),
    ("finish", 0, "per_rank", "blocking"),
]


def test_a_rank_that_is_killed_at_its_work_leaves_no_other_hanging(checkpoint: Checkpoint) -> None:
    """Where others wait for it, at their sockets or for its rows."""
    kill_at(checkpoint, RANKS, AT_WORK)


def test_a_rank_that_is_killed_in_any_phase_leaves_no_other_hanging(checkpoint: Checkpoint) -> None:
    """Just before its record is due. Not in `config`: a rank that the others have never met has not died, it is late,
    after `start_timeout_s`."""
    kill_at(checkpoint, 2, IN_EACH_PHASE)


def test_ranks_that_were_all_killed_while_they_read_leave_nothing(checkpoint: Checkpoint) -> None:
    before = shared_memory.names()
    stand: list[int] = []

    def kill(rank: int, _text: str, pids: list[int]) -> None:
        if rank not in stand:
            stand.append(rank)
        if len(stand) == RANKS:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    outcomes = run_ranks(read_for_ever, RANKS, plain(checkpoint), on_mark=kill)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * RANKS
    shared_memory.assert_nothing_new(before)


def read_for_ever(rank: Rank, given: Plain) -> None:
    stand_at(rank, "reading")
    config = config_of(Checkpoint(*given), rules("shared"), RANKS)
    with ls.LoaderService.blocking(config, ls.Rendezvous(rank.address, rank.rank, RANKS, "killed")) as service:
        service.host_table("target", WEIGHT)
