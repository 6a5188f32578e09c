"""Rank processes fill tables: right rows on each, and nothing left of those that are killed or interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import loader_service as ls
from tests.conftest import _unfinished_threads
from tests.e2e.seats import serve
from tests.support.checkpoints import Checkpoint
from tests.support.ranks import Outcome, Rank, run_ranks, run_teams
from tests.tables.making import (
    LAYOUTS,
    SPLITS,
    TABLES,
    WEIGHT,
    assert_table,
    config_of,
    left_behind,
    rules,
    shares,
)
from tests.tables.standing import stand_at

pytestmark = pytest.mark.processes

RANKS = 3
IMPATIENT = {"timeout_s": 3, "start_timeout_s": 60, "grace_s": 5}
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


Case: TypeAlias = tuple[str, int, str]  # where it stands, who, in which layout
Told: TypeAlias = tuple[str, str | None, int | None, list[str], list[str]]


def fill_until(rank: Rank, address: str, given: Plain, point: str, who: int, layout: str) -> Told:
    """What a rank is told, and what it has left afterwards: shared memory and sockets, threads."""
    if rank.rank == who:
        stand_at(rank, point)
    checkpoint = Checkpoint(*given)
    config = config_of(checkpoint, rules(layout), RANKS, agreement=IMPATIENT, reads=BUFFERED)
    group = ls.Rendezvous(address, rank.rank, RANKS, f"{rank.address}", served=True)

    async def main() -> BaseException | None:
        async with ls.LoaderService(config, group) as service:
            try:
                await service.host_table("target", WEIGHT)
            except BaseException as error:
                return error
            return None

    error = asyncio.run(main())
    cause = None if error is None else error.__cause__
    threads = [thread.name for thread in _unfinished_threads(set())]
    text = str(cause) if type(cause) is ls.LoaderError else type(cause).__name__
    return type(error).__name__, text, getattr(error, "rank", None), left_behind(), threads


def kill_at(checkpoint: Checkpoint, cases: Sequence[Case]) -> list[list[Outcome]]:
    before = set(os.listdir("/dev/shm"))

    def kill(team: int, rank: int, _text: str, pids: list[int]) -> None:
        assert rank == cases[team][1]
        os.kill(pids[rank], signal.SIGKILL)

    address = f"127.0.0.1:{serve().port}"
    found = run_teams(
        fill_until, RANKS, [(address, plain(checkpoint), *case) for case in cases], on_mark=kill, timeout_s=90
    )
    assert set(os.listdir("/dev/shm")) <= before
    return found


CASES = [
    *((point, 0, "shared") for point in ("meet", "hand over", "reserve", "reading")),
    *((point, 2, "shared") for point in ("receive", "open", "read")),
    ("pin", 2, "per_rank"),
]


def test_a_rank_that_is_killed_leaves_no_other_hanging(checkpoint: Checkpoint) -> None:
    """All others name it; and of the memory, the sockets and the threads nothing is left."""
    for case, outcomes in zip(CASES, kill_at(checkpoint, CASES), strict=True):
        who = case[1]
        assert outcomes[who].exitcode == -signal.SIGKILL, case
        for outcome in outcomes:
            if outcome.rank == who:
                continue
            error, cause, rank, left, threads = outcome.get()
            assert (error, rank) == ("RankFailure", who), (case, cause)
            assert cause is not None
            assert "LostRank" in cause, (case, cause)
            assert (left, threads) == ([], []), case


def test_ranks_that_were_all_killed_while_they_read_leave_nothing(checkpoint: Checkpoint) -> None:
    before = set(os.listdir("/dev/shm"))
    stand: list[int] = []

    def kill(rank: int, _text: str, pids: list[int]) -> None:
        if rank not in stand:
            stand.append(rank)
        if len(stand) == RANKS:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    outcomes = run_ranks(read_for_ever, RANKS, plain(checkpoint), on_mark=kill)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * RANKS
    assert set(os.listdir("/dev/shm")) <= before


def read_for_ever(rank: Rank, given: Plain) -> None:
    stand_at(rank, "reading")
    config = config_of(Checkpoint(*given), rules("shared"), RANKS)
    with ls.LoaderService.blocking(config, ls.Rendezvous(rank.address, rank.rank, RANKS, "killed")) as service:
        service.host_table("target", WEIGHT)


# -- interrupted


def interrupted(rank: Rank, given: Plain, who: int, point: str) -> tuple[str, list[str], list[str]]:
    """The blocking face on all ranks; `who` is interrupted where it stands, then all fill the table."""
    checkpoint = Checkpoint(*given)
    config = config_of(checkpoint, rules("shared"), rank.world_size, reads=BUFFERED)
    group = ls.Rendezvous(rank.address, rank.rank, rank.world_size, "interrupted")
    from loader_service.agreement.session import Session

    exchange = Session.exchange
    if rank.rank == who:
        stand_at(rank, point)
    error: BaseException | None = None
    with ls.LoaderService.blocking(config, group) as service:
        try:
            service.host_table("target", WEIGHT)
        except BaseException as caught:
            error = caught
        Session.exchange = exchange  # type: ignore[method-assign]
        table = service.host_table("target", WEIGHT)
        assert_table(table, checkpoint, WEIGHT, shares("equal", rank.world_size)[rank.rank], "shared")
    del table
    name = type(error).__name__ if type(error) is not ls.RankFailure else type(error.__cause__).__name__
    return name, list(getattr(error, "__notes__", ())), left_behind()


@pytest.mark.parametrize("who", [0, 1], ids=["host", "member"])
def test_an_interrupt_in_the_blocking_face_ends_it_on_all_ranks(checkpoint: Checkpoint, who: int) -> None:
    found = run_ranks(
        interrupted,
        2,
        plain(checkpoint),
        who,
        "read",
        on_mark=lambda rank, _text, pids: os.kill(pids[rank], signal.SIGINT),
    )
    for outcome in found:
        error, notes, left = outcome.get()
        assert error == ("KeyboardInterrupt" if outcome.rank == who else "LoadCancelledError")
        assert len(notes) == (outcome.rank == who)
        assert left == []
