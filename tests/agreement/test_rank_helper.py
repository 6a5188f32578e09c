"""The helper that starts rank processes: what became of each rank is told, and a rank that hangs fails the test."""

from __future__ import annotations

import os
import signal
import time

import pytest

from loader_service.errors import ReadError
from tests.support.ranks import Rank, run_ranks

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
