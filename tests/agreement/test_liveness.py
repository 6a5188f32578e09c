"""Who counts as alive: silence ends a load, slowness does not. Real processes."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.agreement.messages import PHASES, Phase
from loader_service.config.schema import AgreementConfig, ServiceConfig
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.agreement.conftest import Agent
from tests.agreement.meeting import ENDED, Found, Gathering, impatient, meet, through, until
from tests.support.checkpoints import Checkpoint, write_checkpoint
from tests.support.ranks import Rank, run_ranks, run_teams

pytestmark = pytest.mark.processes


# The interpreter's lock ----------------------------------------------------------------------------------------------

HELD_S = 7.0  # silence is counted from the look that saw the last beat, and noticed by the next one: 5 s and two looks


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def hold_the_interpreter(rank: Rank, agent: str) -> list[str]:
    """Rank 1 does so in the read phase, under the limits that are the default. What the ranks warn of meanwhile."""
    warnings = Warnings()
    logging.getLogger("loader_service").addHandler(warnings)

    async def main() -> None:
        group = meet(rank, AgreementConfig(), agent=agent)
        session = group.session("load")
        session.report_progress(f"shard {rank.rank}")
        await until(session, Phase.OPEN)
        if rank.rank == 1:
            ctypes.PyDLL(None).usleep(int(HELD_S * 1e6))  # PyDLL keeps the interpreter's lock: no thread, no loop runs
        await through(session, PHASES[Phase.READ.position :])
        await session.close()
        group.close()

    asyncio.run(main())
    return warnings.texts


def test_a_rank_that_holds_the_interpreter_lock_for_7_s_is_suspect_and_nothing_more(agent: Agent) -> None:
    leader, holder = [outcome.get() for outcome in run_ranks(hold_the_interpreter, 2, agent.address)]
    assert len(leader) == 1
    assert leader[0].startswith("rank 0: rank 1 is suspect: silent for ")
    assert leader[0].endswith("last progress: shard 1")
    assert not holder


# Late ----------------------------------------------------------------------------------------------------------------

LATE_S = 4.0


def dawdle(rank: Rank, phase: Phase, moves: bool, agent: str) -> None:
    """Rank 1 takes more than twice the limit of silence for one phase, with or without a word of progress."""

    async def work_long(done: asyncio.Event) -> None:
        until_s = time.monotonic() + 2.5 * LATE_S
        step = 0
        while time.monotonic() < until_s and not done.is_set():
            await asyncio.sleep(LATE_S / 20)
            step += 1
            if moves:
                session.report_progress(step)

    async def main() -> None:
        ended = asyncio.Event()
        session.on_final(lambda _: ended.set())
        try:
            await through(session, PHASES[: phase.position])
            if rank.rank == 1:
                await work_long(ended)
            await through(session, PHASES[phase.position :])
        finally:
            await session.close()
            group.close()

    group = meet(rank, impatient(LATE_S), agent=agent)
    session = group.session("load")
    session.report_progress("shard 7")
    asyncio.run(main())


def test_who_makes_no_progress_is_late_in_bounded_phases_and_healthy_in_those_that_read(agent: Agent) -> None:
    bounded = (Phase.CATALOG, Phase.PLAN, Phase.OPEN)
    cases = [(phase, moves, agent.address) for phase in bounded for moves in (False, True)]
    cases += [(phase, False, agent.address) for phase in (Phase.READ, Phase.FINISH)]
    for (phase, moves, _), outcomes in zip(cases, run_teams(dawdle, 2, cases), strict=True):
        if moves or phase not in bounded:
            assert [outcome.get() for outcome in outcomes] == [None, None], (phase, moves)
            continue
        for found in map(Found.of, outcomes):
            assert (found.error, found.rank, found.phase, found.cause) == ("RankFailure", 1, phase, "LateRank")
            assert f"late in phase {phase}: alive, but without progress for " in found.message
            assert "last progress: shard 7" in found.message


# A service that is stuck ---------------------------------------------------------------------------------------------

STUCK_S = 5.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Twenty tensors for each of ranks 1 to 3, none for rank 0."""
    folder = tmp_path_factory.mktemp("liveness")
    shards = {f"r{r}.safetensors": {f"r{r}.w{k:02}": ("U8", (4096,)) for k in range(20)} for r in (1, 2, 3)}
    return write_checkpoint(folder, shards)


def config_of(folder: str, timeout_s: float, world_size: int) -> ServiceConfig:
    rules = [{"match": f"r{r}.*", "assign": {"axis": "world", "to": [r % world_size]}} for r in (1, 2, 3)]
    return Checkpoint(Path(folder), {}, {}).config(
        {"rules": rules},
        staging={"capacity_bytes": "16KiB"},
        reads={"chunk_bytes": "4KiB", "threads": 1, "coalesce_gap_bytes": 0},
        agreement={"timeout_s": timeout_s, "start_timeout_s": 60, "grace_s": 1},
    )


def meeting(rank: Rank, agent: str) -> ls.Rendezvous:
    return ls.Rendezvous(agent, rank.rank, rank.world_size, f"{rank.team}", served=True)


def get_stuck(rank: Rank, folder: str, victim: int, agent: str) -> None:
    """The victim's service loop stops for good; its heartbeats go on, for they have a thread of their own."""

    async def main() -> None:
        async with ls.LoaderService(config_of(folder, STUCK_S, rank.world_size), meeting(rank, agent)) as service:
            async with service.open("target") as load:
                if rank.rank == victim:
                    loop = service._loop
                    assert loop is not None
                    loop._loop.call_soon_threadsafe(threading.Event().wait)
                async for _ in load:
                    pass

    try:
        asyncio.run(main())
    finally:
        rank.mark(ENDED)


def test_a_rank_whose_service_is_stuck_for_good_stops_looking_alive(agent: Agent, checkpoint: Checkpoint) -> None:
    cases = [(str(checkpoint.folder), victim, agent.address) for victim in (1, 0)]
    others = Gathering(
        lambda _: ENDED,
        lambda team: {0, 1, 2} - {cases[team][1]},
        lambda team, pids: os.kill(pids[cases[team][1]], signal.SIGKILL),
    )
    for (_, victim, _), outcomes in zip(cases, run_teams(get_stuck, 3, cases, on_mark=others.mark), strict=True):
        for found in (Found.of(outcome) for outcome in outcomes if outcome.rank != victim):
            assert (found.error, found.rank, found.phase, found.cause) == ("RankFailure", victim, "read", "LostRank")


# Long reads ----------------------------------------------------------------------------------------------------------

SILENCE_S = 2.5
LONG_S = 4 * SILENCE_S
IDLE, STREAMS, STANDS_STILL, CONSUMES_SLOWLY = range(4)


def read_for_long(rank: Rank, folder: str, agent: str) -> tuple[list[str], float]:
    storage = FakeStorage(LocalStorage())

    async def main() -> tuple[list[str], float]:
        config = config_of(folder, SILENCE_S, rank.world_size)
        async with ls.LoaderService(config, meeting(rank, agent), storage=storage) as service:
            async with service.open("target") as load:
                slow_down()
                names = []
                async for name, _ in load:
                    names.append(name)
                    if rank.rank == CONSUMES_SLOWLY and len(names) == 1:
                        time.sleep(LONG_S)  # noqa: ASYNC251 - its loop stands still
            return names, load.report.seconds

    def slow_down() -> None:
        if rank.rank == STREAMS:
            storage.delay("*", LONG_S / 20)
        if rank.rank == STANDS_STILL:
            gate = storage.block("*", nth=3)
            threading.Timer(LONG_S, gate.release).start()

    return asyncio.run(main())


def test_ranks_that_read_for_four_times_the_limit_or_have_nothing_to_do_are_healthy(
    agent: Agent, checkpoint: Checkpoint
) -> None:
    outcomes = run_ranks(read_for_long, 4, str(checkpoint.folder), agent.address)
    for outcome in outcomes:
        names, seconds = outcome.get()
        assert names == [name for name in checkpoint.tensors if name.startswith(f"r{outcome.rank}.")]
        assert seconds > LONG_S
    assert not outcomes[IDLE].get()[0]


# A pause of the whole machine ----------------------------------------------------------------------------------------

PAUSED_S = 3.0


def go_on_after_a_pause(rank: Rank, agent: str | None, agent_pid: int) -> None:
    """All are in the read phase when they are stopped, and stay there for long enough to blame each other."""

    async def main() -> None:
        paused = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, paused.set)
        group = meet(rank, impatient(PAUSED_S), agent=agent)
        session = group.session("load")
        await until(session, Phase.OPEN)
        rank.mark("waits")
        await paused.wait()
        await asyncio.sleep(1.5 * PAUSED_S)
        await through(session, PHASES[Phase.READ.position :])
        await session.close()
        group.close()

    asyncio.run(main())


def test_a_pause_of_all_processes_together_is_nobodys_silence(agent: Agent) -> None:
    cases: list[tuple[Any, ...]] = [(agent.address, agent.pid), (None, 0)]
    stopped: list[int] = []

    def pause(team: int, pids: list[int]) -> None:
        stopped.extend([*pids, *filter(None, [cases[team][1]])])
        if len(stopped) < 2 * 3 + 1:
            return
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * PAUSED_S)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    waiting = Gathering(lambda _: "waits", lambda _: {0, 1, 2}, pause)
    for outcomes in run_teams(go_on_after_a_pause, 3, cases, on_mark=waiting.mark):
        assert [outcome.get() for outcome in outcomes] == [None] * 3
