"""The helper that starts rank processes: what became of each rank is told, and a rank that hangs fails the test."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from loader_service.errors import ReadError
from tests.agreement.meeting import wait_until_gone
from tests.support.ranks import Rank, run_ranks, run_teams

pytestmark = pytest.mark.processes


def various(rank: Rank) -> int:
    rank.mark(f"rank {rank.rank} of {rank.world_size}")
    if rank.rank == 1:
        raise ReadError("EIO", path="/a", errno=5)
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank.rank


def test_values_errors_and_signals_are_told_by_rank() -> None:
    started: list[int] = []
    seen: list[str] = []
    outcomes = run_ranks(various, 3, on_start=started.extend, on_mark=lambda rank, text, pids: seen.append(text))
    assert len(started) == 3
    assert sorted(seen) == [f"rank {rank} of 3" for rank in range(3)]
    assert outcomes[0].get() == 0
    error = outcomes[1].error
    assert error is not None
    assert (error.name, error.exit_code) == ("ReadError", 5)
    assert error.record is not None
    assert (error.record.path, error.record.errno) == ("/a", 5)
    assert outcomes[2].exitcode == -signal.SIGKILL
    with pytest.raises(AssertionError, match="ended with -9"):
        outcomes[2].get()


def hang_on_one(rank: Rank) -> None:
    while rank.rank == 1:
        time.sleep(60)


def test_a_rank_that_hangs_is_killed_and_fails_the_test_with_its_stack() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not end within 3 s(.|\n)*in hang_on_one"):
        run_ranks(hang_on_one, 2, timeout_s=3)


def in_a_team(rank: Rank, number: int) -> tuple[int, int, int, int]:
    rank.mark("here")
    return rank.team, rank.rank, rank.world_size, number


def test_teams_run_at_once_and_each_sees_only_itself() -> None:
    seen: list[tuple[int, int, str, tuple[int, ...]]] = []
    teams = run_teams(
        in_a_team,
        2,
        [(10,), (20,), (30,)],
        on_mark=lambda team, rank, text, pids: seen.append((team, rank, text, tuple(pids))),
    )
    found = [[(outcome.rank, *outcome.get()) for outcome in outcomes] for outcomes in teams]
    assert found == [[(rank, team, rank, 2, 10 * (team + 1)) for rank in range(2)] for team in range(3)]
    assert sorted(mark[:3] for mark in seen) == [(team, rank, "here") for team in range(3) for rank in range(2)]
    pids_of = {mark[0]: mark[3] for mark in seen}
    assert len({*pids_of[0], *pids_of[1], *pids_of[2]}) == 6


def leave_a_child(rank: Rank) -> int:
    rank.fork_child()
    print("on its own", file=sys.stderr)
    (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return int(child)


def test_a_child_of_a_rank_is_ended_with_the_test_and_what_a_rank_prints_is_told() -> None:
    (outcome,) = run_ranks(leave_a_child, 1)
    wait_until_gone([outcome.get()])
    assert outcome.stderr == "on its own\n"


def test_a_rank_can_end_as_an_interpreter_does() -> None:
    (outcome,) = run_ranks(Rank.end, 1)
    assert (outcome.value, outcome.error, outcome.exitcode) == (None, None, 0)
