"""The benchmark of agreement runs at tiny sizes, measures what it says it does, and names a missed target."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agreement, agreement_exchanges, agreement_failures, agreement_simulated
from benchmarks.agreement_exchanges import Exchanges
from benchmarks.agreement_failures import CASES, TOLD_LIMIT_S, Case, End, Failed, failed_of
from benchmarks.agreement_simulated import LIMITS, Load, Silence, Whom
from benchmarks.ranks import Rank, Team
from loader_service.agreement import PHASES
from loader_service.agreement.protocol import Limits
from loader_service.config.schema import AgreementConfig

pytestmark = pytest.mark.processes

ROUNDS = 1
LOADS = 3
FEW, MANY = 20, 200
TIMEOUT_S = 3.0
TEXTS = ("exception in a member's consumer", "SIGKILL of rank 0, which serves the store", "SIGSTOP of a member")
CANCELLED = next(case for case in CASES if case.how == "cancel")
RAISED, KILLED, STOPPED = [next(case for case in CASES if case.text == text) for text in TEXTS]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a whole run returned, and the document that it printed."""

    code: int
    document: dict[str, Any]
    series: list[list[Load]]
    exchanged: list[Exchanges]
    failed: list[Failed]


@pytest.fixture(scope="module")
def run() -> Run:
    """Everything once, with 2 ranks, and three cases for all."""
    arguments = ["--rounds", str(ROUNDS), "--loads", str(LOADS), "--simulated", "8,2", "--ranks", "2", "--json"]
    printed = io.StringIO()
    kept: dict[str, list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(agreement, "TENSORS", FEW)
        patch.setattr(agreement, "MANY_TENSORS", MANY)
        patch.setattr(agreement, "LOAD_SPARE_S", 20.0)
        patch.setattr(agreement_failures, "CASES", (STOPPED, RAISED, KILLED))
        for module, name in ((agreement_simulated, "measure"), (agreement, "_exchanges"), (agreement, "_failures")):
            patch.setattr(module, name, _keeping(kept, name, getattr(module, name)))
        code = agreement.main([*arguments, "--timeouts", str(TIMEOUT_S)])
    return Run(code, json.loads(printed.getvalue()), kept["measure"], kept["_exchanges"], kept["_failures"])


def _keeping(kept: dict[str, list[Any]], name: str, work: Any) -> Any:
    def keep(*args: Any) -> Any:
        kept[name] = work(*args)
        return kept[name]

    return keep


def test_it_prints_one_document_with_every_round(run: Run) -> None:
    document = run.document
    assert run.code == (1 if document["missed"] else 0)
    assert [(each["ranks"], each["tensors"]) for each in document["simulated"][::ROUNDS]] == [
        (2, FEW),
        (8, FEW),
        (8, MANY),
    ]
    assert len(document["simulated"]) == 3 * ROUNDS
    assert [(each["ranks"], each["served"]) for each in document["exchanges"]] == [
        (1, "nowhere"),
        (2, "agent"),
        (2, "rank 0"),
    ]
    assert len(document["failures"]) == 3 * ROUNDS
    assert [(each["whom"], each["timeout_s"]) for each in document["silences"]] == [
        ("member", TIMEOUT_S),
        ("leader", TIMEOUT_S),
    ]


def test_simulated_ranks_send_one_record_a_phase_and_a_last_word(run: Run) -> None:
    for load in (load for loads in run.series for load in loads):
        assert load.member_writes == len(PHASES) + 1
        assert load.leader_writes == 2 * len(PHASES), "its own records, and a verdict a phase"
        records, verdicts, byes = len(PHASES) * load.ranks, 2 * len(PHASES), load.ranks - 1
        assert load.leader_reads == records + verdicts + byes, "a verdict comes back by two ways"
        assert len(load.exchanges_cpu_s) == len(PHASES)
        assert all(seconds > 0 for seconds in load.exchanges_cpu_s)
        assert 0 < load.leader_cpu_s < load.load_cpu_s
        assert load.look_cpu_s > 0
        assert LIMITS.window_s <= load.failure_s < TOLD_LIMIT_S


def test_simulated_bytes_grow_with_ranks_at_the_leader_and_not_with_tensors(run: Run) -> None:
    two, eight, eight_with_more = [loads[0] for loads in run.series]
    assert eight.leader_read_bytes > 2 * two.leader_read_bytes
    assert eight.member_write_bytes == two.member_write_bytes
    assert agreement._bytes_of(eight) == agreement._bytes_of(eight_with_more)


def test_processes_exchange_as_often_as_asked_for(run: Run) -> None:
    alone, *several = run.exchanged
    for each in run.exchanged:
        assert len(each.exchange_s) == each.ranks * LOADS * len(PHASES)
        assert len(each.session_s) == len(each.load_s) == each.ranks * LOADS
        assert min(*each.exchange_s, *each.session_s, *each.load_s) > 0
    assert alone.sent_bytes in {0, None}
    for each in several:
        if each.sent_bytes is not None and each.received_bytes is not None:  # as this kernel can count them
            least = run.series[0][0]
            assert each.sent_bytes > least.member_write_bytes / 2
            assert each.received_bytes > least.member_read_bytes / 2


def of_case(run: Run, case: Case) -> list[Failed]:
    found = [each for each in run.failed if each.case == case]
    assert len(found) == ROUNDS
    return found


@pytest.mark.parametrize(
    ("case", "timeout_s", "seen"),
    [
        (RAISED, agreement_failures.DEFAULT_TIMEOUT_S, "ConsumerError of rank 1"),
        (KILLED, agreement_failures.DEFAULT_TIMEOUT_S, "LostStore of rank 0"),
        (STOPPED, TIMEOUT_S, "LostRank of rank 1"),
    ],
    ids=lambda value: value.text if isinstance(value, Case) else None,
)
def test_a_failure_is_timed_on_the_survivors(run: Run, case: Case, timeout_s: float, seen: str) -> None:
    for each in of_case(run, case):
        assert (each.ranks, each.timeout_s, each.seen) == (2, timeout_s, (seen,))
        assert each.last_s is not None
        assert 0 < each.last_s <= each.left_s
        assert (each.woken_s is not None) == (case is STOPPED)


def test_silence_takes_about_its_limit(run: Run) -> None:
    for each in of_case(run, STOPPED):
        assert each.last_s is not None
        assert each.last_s > TIMEOUT_S / 2


def test_the_tables_are_markdown(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    agreement.print_simulated(run.series)
    agreement.print_silences([agreement_simulated.fall_silent(whom, 1.0, 2) for whom in ("member", "leader", "member")])
    agreement.print_exchanges(run.exchanged, LOADS)
    agreement.print_failures(run.failed)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 4 * (2 + 3), "heads and rows"
    for start in range(0, len(lines), 5):
        assert len({line.count("|") for line in lines[start : start + 5]}) == 1


def test_the_last_survivor_counts_and_a_woken_rank_apart() -> None:
    survivors = [
        End(107.0, 107.5, "LostRank of rank 3"),
        End(109.0, 109.25, "LostRank of rank 3"),
        End(108.0, 111.0, "x"),
    ]
    woken = (120.0, End(120.25, 121.0, "LostRank of rank 3"))
    found = failed_of(STOPPED, 4, 5.0, 100.0, survivors, woken)
    assert found == Failed(STOPPED, 4, 5.0, 9.0, 11.0, 0.25, ("LostRank of rank 3", "x"))
    (command_line,) = [case for case in CASES if "command line" in case.text]
    ended = failed_of(command_line, 2, 60.0, 100.0, [End(None, 100.75, "exit code 4")])
    assert ended == Failed(command_line, 2, 60.0, None, 0.75, None, ("exit code 4",))


def test_the_percentile_is_a_sample() -> None:
    assert agreement._percentile([float(i) for i in range(100)][::-1], 0.95) == 95.0
    assert agreement._percentile([3.0], 0.95) == 3.0


# Targets


def test_the_command_line_shows_only_when_its_ranks_end() -> None:
    (case,) = [case for case in CASES if "command line" in case.text]
    assert Failed(case, 2, 60.0, None, 1.9, None, ()).met
    assert not Failed(case, 2, 60.0, None, 2.1, None, ()).met


@pytest.mark.parametrize(
    ("case", "timeout_s", "limit_s"),
    [
        (RAISED, 60.0, 1.0),
        (KILLED, 60.0, 1.0),
        (CANCELLED, 60.0, 2.0),
        (CANCELLED, 1.0, 1.2),
        (STOPPED, 60.0, 62.0),
        (STOPPED, 5.0, 7.0),
    ],
)
def test_one_round_beyond_the_limit_misses_the_target(case: Case, timeout_s: float, limit_s: float) -> None:
    within = Failed(case, 4, timeout_s, limit_s - 0.01, limit_s + 3.0, None, ())
    beyond = dataclasses.replace(within, last_s=limit_s)
    assert agreement.missed_by_failures([within, within]) == []
    (missed,) = agreement.missed_by_failures([within, beyond, within])
    assert missed == f"{case.text}, 4 ranks: {limit_s:.2f} s, target {limit_s:g} s"


def simulated(ranks: int, tensors: int, **changes: Any) -> list[Load]:
    load = Load(
        ranks=ranks,
        tensors=tensors,
        exchanges_cpu_s=(0.1,) * len(PHASES),
        load_cpu_s=0.6,
        leader_cpu_s=ranks * 1e-4,
        look_cpu_s=0.01,
        member_writes=7,
        member_write_bytes=700,
        member_read_bytes=600,
        leader_writes=12,
        leader_write_bytes=1_300,
        leader_reads=7 * ranks,
        leader_read_bytes=700 * ranks,
        failure_s=0.75,
    )
    return [dataclasses.replace(load, **changes)]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"exchanges_cpu_s": (0.1, 1.2)}, ["80 simulated ranks, 10 tensors: an exchange takes 1.20 s"]),
        ({"failure_s": 1.3}, ["80 simulated ranks, 10 tensors: a failure takes 1.30 s"]),
        ({"leader_cpu_s": 0.04}, ["the leader's time a rank grows by 5.0 from 10 to 80 ranks"]),
        ({"member_write_bytes": 699}, ["80 simulated ranks: the bytes depend on the number of tensors"]),
    ],
    ids=lambda value: next(iter(value), "as it should be") if isinstance(value, dict) else None,
)
def test_what_a_simulation_misses_is_said(changes: dict[str, Any], found: list[str]) -> None:
    series = [simulated(2, 10), simulated(10, 10), simulated(80, 10, **changes), simulated(80, 1000)]
    assert agreement.missed_by_simulated(series) == found


@pytest.mark.parametrize("whom", ["member", "leader"])
def test_simulated_silence_is_found_about_its_limit_later(whom: Whom) -> None:
    timeout_s = 5.0
    heartbeat_s = Limits.of(AgreementConfig(timeout_s=timeout_s)).heartbeat_s
    silence = agreement_simulated.fall_silent(whom, timeout_s, 20)
    assert len(set(silence.seconds)) == 20, "it falls silent at another moment each time"
    assert min(silence.seconds) > timeout_s - heartbeat_s
    assert max(silence.seconds) < timeout_s + 3 * heartbeat_s


def test_the_longest_silence_counts() -> None:
    within, beyond = (Silence("member", 5.0, (5.5, longest_s, 5.25)) for longest_s in (6.75, 7.5))
    assert agreement.missed_by_silences([within]) == []
    assert agreement.missed_by_silences([within, beyond]) == ["silence of a simulated member: 7.50 s, target 7 s"]


@pytest.mark.parametrize(("last_s", "code", "said"), [(0.5, 0, "all met"), (1.5, 1, "4 ranks: 1.50 s, target 1 s")])
def test_the_exit_code_and_the_last_line_say_whether_targets_are_met(
    last_s: float, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    series = [simulated(10, 10), simulated(80, 10), simulated(80, 1000)]
    alone = Exchanges(1, "nowhere", (0.1, 0.2), (0.6,), (0.7,), None, None)
    monkeypatch.setattr(agreement_simulated, "measure", lambda worlds, rounds: series)
    monkeypatch.setattr(agreement_simulated, "fall_silent", lambda whom, timeout_s, _: Silence(whom, timeout_s, (1.0,)))
    monkeypatch.setattr(agreement, "_exchanges", lambda *args: [alone])
    monkeypatch.setattr(agreement, "_failures", lambda *args: [Failed(RAISED, 4, 60.0, last_s, 1.6, None, ("x",))])
    assert agreement.main([]) == code
    assert capsys.readouterr().out.rstrip().endswith(said)


# The processes


def does(rank: Rank, what: str) -> int:
    if rank.rank == 1 and what == "raises":
        raise ValueError("something")
    if rank.rank == 1 and what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    rank.tell("heard", rank.hear())
    return rank.rank


def test_a_team_is_told_and_heard() -> None:
    with Team(does, 2, "nothing") as team:
        team.tell(1, "one")
        assert team.hear("heard", [1]) == ["one"]
        team.tell(0, "zero")
        assert team.hear("result") == [0, 1]
        assert team.hear("heard", [0]) == ["zero"]


@pytest.mark.parametrize(
    ("what", "said"),
    [("raises", "rank 1 failed before it came to 'heard':\n(?s:.*)ValueError: something"), ("dies", "rank 1 ended")],
)
def test_a_rank_that_cannot_go_on_stops_the_benchmark(what: str, said: str) -> None:
    with Team(does, 2, what) as team, pytest.raises(RuntimeError, match=said):
        team.hear("heard")


def test_a_load_that_ends_before_the_failure_stops_the_benchmark(tmp_path: Path) -> None:
    fewer = -3 * agreement_failures.READ_DELAY_S  # than it takes to be in the middle
    agreement_failures.make_slow_checkpoint(tmp_path, fewer)
    with pytest.raises(RuntimeError, match="the load came to its end before anything failed"):
        agreement_failures.measure([RAISED], [2], [], tmp_path)


def test_bytes_of_own_connections_are_counted_on_both_sides() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            before = agreement_exchanges.traffic()
            client.sendall(b"x" * 1000)
            assert len(accepted.recv(1000, socket.MSG_WAITALL)) == 1000
            after = agreement_exchanges.traffic()
    if before != (None, None):
        assert agreement_exchanges._difference(before, after) == (1000, 1000)
    assert agreement_exchanges._difference((None, None), (1, 1)) == (None, None)
