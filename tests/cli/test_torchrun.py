"""Ranks under torchrun: which one prints, when, and with which code each ends.

torchrun looks at its ranks ten times a second. Once one has ended with an error it sends SIGTERM to all others, which
must not change what they say: the one record is the root cause, printed before anything is cleaned up.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.faulty_rank import RankFaults
from tests.cli.support import Ended, Fault, wait_until, write_config, write_small_checkpoint
from tests.cli.torchrun import Torchrun, is_running

pytestmark = pytest.mark.processes

QUICK: dict[str, Any] = {"timeout_s": 20, "start_timeout_s": 60, "grace_s": 0.2}
ABORTS = ("terminate called", "Fatal Python error", "core dumped", "Exception ignored")
FAILING_READ = Fault("input/output error")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_small_checkpoint(tmp_path / "checkpoint")


def command(config: Path, *more: str) -> list[str]:
    return ["load", str(config), "--load", "all", "--json", *more]


def stuck(folder: Path, rank: int) -> RankFaults:
    return RankFaults(reading=Fault("never returns", folder / f"reads.{rank}"))


def wait_for_reads(folder: Path, ranks: int) -> None:
    wait_until(lambda: all((folder / f"reads.{rank}").exists() for rank in range(ranks)))


def codes_of(ranks: list[Ended]) -> list[int]:
    return [ended.code for ended in ranks]


def only_document(ranks: list[Ended], by: int) -> dict[str, Any]:
    """What rank `by` printed, it alone; no rank broke down on its way."""
    assert [rank for rank, ended in enumerate(ranks) if ended.out] == [by]
    for ended in ranks:
        assert "Traceback" not in ended.err, ended.err
        assert not any(text in ended.err for text in ABORTS), ended.err
    return ranks[by].document


def only_record(ranks: list[Ended], by: int) -> dict[str, Any]:
    """As `only_document`, for a failure: there is one line for people too, of the same rank."""
    for rank, ended in enumerate(ranks):
        assert ended.err.count("loader-service: rank ") == (1 if rank == by else 0), ended.err
    return only_document(ranks, by)


def test_the_cause_is_printed_before_cleaning_up_and_stays_it_when_torchrun_stops_the_others(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Reads that never return hold the cleaning up of ranks 0 and 2 for `grace_s`; meanwhile torchrun stops them."""
    config = write_config(
        tmp_path / "config.yaml", checkpoint, ranks=3, reads={"retries": 0}, agreement={"timeout_s": 20, "grace_s": 6}
    )
    faults = {0: stuck(tmp_path, 0), 1: RankFaults(reading=FAILING_READ), 2: stuck(tmp_path, 2)}
    torchrun = Torchrun(command(config), tmp_path, ranks=3, faults=[faults])
    wait_until(lambda: torchrun.printed(0) != "")
    assert "did not return" not in torchrun.logged(0)
    ended = torchrun.end()
    record = only_record(ended.ranks, by=0)
    assert (record["error"], record["rank"], record["phase"], record["errno"]) == ("ReadError", 1, "read", 5)
    assert codes_of(ended.ranks) == [4, 5, 4]
    assert ended.code == 1
    assert "did not return" in ended.ranks[0].err
    for rank in (0, 2):
        assert f"Sending process {torchrun.pid(rank)} closing signal SIGTERM" in ended.err


def test_a_killed_rank_0_is_what_the_others_name_although_torchrun_interrupts_them(
    tmp_path: Path, checkpoint: Path
) -> None:
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=3, agreement=QUICK)
    torchrun = Torchrun(command(config), tmp_path, ranks=3, faults=[{rank: stuck(tmp_path, rank) for rank in range(3)}])
    wait_for_reads(tmp_path, 3)
    torchrun.send(signal.SIGKILL, 0)
    ended = torchrun.end()
    record = only_record(ended.ranks, by=1)
    assert (record["error"], record["rank"]) == ("LostRank", 0)
    assert codes_of(ended.ranks) == [-signal.SIGKILL, 4, 4]
    assert ended.code == 1


def test_each_attempt_has_its_own_cause_and_the_one_without_a_fault_succeeds(tmp_path: Path, checkpoint: Path) -> None:
    other = write_small_checkpoint(tmp_path / "other")
    (other / "b.safetensors").unlink()
    more: dict[str, Any] = {"ranks": 2, "agreement": QUICK, "reads": {"retries": 0}}
    config = write_config(tmp_path / "config.yaml", checkpoint, **more)
    elsewhere = write_config(tmp_path / "elsewhere.yaml", other, **more)
    faults = [
        {1: RankFaults(config=elsewhere)},
        {0: RankFaults(reading=FAILING_READ)},
        {1: RankFaults(consumer="weights of no use")},
    ]
    ended = Torchrun(command(config, "--verify"), tmp_path, ranks=2, faults=faults, restarts=3).end()
    shard, read, consumer, last = ended.attempts
    record = only_record(shard, by=0)
    assert (record["error"], record["phase"]) == ("AgreementError", "catalog")
    assert "shard 'b.safetensors'" in record["message"]
    assert codes_of(shard) == [4, 4]
    record = only_record(read, by=0)
    assert (record["error"], record["rank"]) == ("ReadError", 0)
    assert codes_of(read) == [5, 4]
    record = only_record(consumer, by=0)
    assert (record["error"], record["message"], record["rank"]) == ("KeyError", "'weights of no use'", 1)
    assert codes_of(consumer) == [4, 1]
    assert [report["verified"] for report in only_document(last, by=0)["ranks"]] == [True, True]
    assert (codes_of(last), ended.code) == ([0, 0], 0)


def test_an_interrupted_torchrun_ends_every_rank_with_130_and_one_record(tmp_path: Path, checkpoint: Path) -> None:
    """Ctrl-C in a terminal: torchrun gets it, and passes it on; its ranks are in sessions of their own."""
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=2, agreement=QUICK)
    torchrun = Torchrun(command(config), tmp_path, ranks=2, faults=[{rank: stuck(tmp_path, rank) for rank in range(2)}])
    wait_for_reads(tmp_path, 2)
    torchrun.send(signal.SIGINT)
    ended = torchrun.end()
    record = only_record(ended.ranks, by=0)
    assert (record["error"], record["message"]) == ("LoadCancelledError", "interrupted by SIGINT")
    assert (codes_of(ended.ranks), ended.code) == ([130, 130], 1)


def test_a_rank_that_is_interrupted_before_it_has_imported_anything_tells_the_others(
    tmp_path: Path, checkpoint: Path
) -> None:
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=2, agreement=QUICK)
    torchrun = Torchrun(command(config), tmp_path, ranks=2)
    torchrun.send(signal.SIGTERM, 1)
    ended = torchrun.end()
    record = only_record(ended.ranks, by=0)
    assert (record["error"], record["message"], record["rank"]) == ("LoadCancelledError", "interrupted by SIGTERM", 1)
    assert (codes_of(ended.ranks), ended.code) == ([4, 130], 1)


def test_ranks_whose_store_is_frozen_with_torchrun_end_by_themselves(tmp_path: Path, checkpoint: Path) -> None:
    """Their calls to the store never return, no more than their reads."""
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=2, agreement={**QUICK, "timeout_s": 4})
    torchrun = Torchrun(command(config), tmp_path, ranks=2, faults=[{rank: stuck(tmp_path, rank) for rank in range(2)}])
    wait_for_reads(tmp_path, 2)
    torchrun.send(signal.SIGSTOP)
    try:
        wait_until(lambda: not any(is_running(torchrun.pid(rank)) for rank in range(2)))
    finally:
        torchrun.send(signal.SIGCONT)
    ended = torchrun.end()
    assert [json.loads(rank.out)["error"] for rank in ended.ranks if rank.out] == ["LostStore"]
    assert (codes_of(ended.ranks), ended.code) == ([4, 4], 1)
