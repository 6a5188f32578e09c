"""The store carrier between real processes: the agreement, a named difference, and ranks and stores that die."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from loader_service.agreement.group import Group, Rendezvous, join_group
from loader_service.agreement.messages import PHASES, Phase, PhaseRecord
from loader_service.agreement.session import Session
from loader_service.errors import ReadError
from tests.support.ranks import Outcome, Rank, context, free_port, run_ranks

pytestmark = pytest.mark.processes

PATIENT = SimpleNamespace(timeout_s=60.0, start_timeout_s=60.0, grace_s=10.0)
IMPATIENT = SimpleNamespace(timeout_s=2.0, start_timeout_s=60.0, grace_s=1.0)
SAME = PhaseRecord("same", counted={"node": "n"})


def meet(rank: Rank, settings: Any = PATIENT, *, served: bool = False) -> Group:
    return join_group(
        Rendezvous(rank.address, rank.rank, rank.world_size, "test", served=served), settings=settings, environ={}
    )


async def until(session: Session, last: Phase) -> None:
    for phase in PHASES[: last.position + 1]:
        await session.exchange(phase, SAME)


def agree_three_times(rank: Rank) -> list[str]:
    """Three services one after the other in one process, each with two loads."""

    async def main() -> list[str]:
        seen = []
        for _ in range(3):
            group = meet(rank)
            for _ in range(2):
                session = group.session("load")
                await until(session, Phase.FINISH)
                seen += [f"{verdict.phase}:{verdict.counts['node']['n']}" for verdict in session.verdict_log]
                await session.close()
            group.close()
        return seen

    return asyncio.run(main())


@pytest.mark.parametrize("world_size", [2, 4])
def test_services_one_after_the_other_agree(world_size: int) -> None:
    expected = [f"{phase}:{world_size}" for phase in PHASES] * 6
    assert [outcome.get() for outcome in run_ranks(agree_three_times, world_size)] == [expected] * world_size


def differ(rank: Rank) -> None:
    async def main() -> None:
        group = meet(rank)
        session = group.session("load", describe={Phase.PLAN: lambda a, b: f"key threads: {a} and {b}"})
        try:
            await until(session, Phase.CATALOG)
            own = rank.rank // 2
            await session.exchange(Phase.PLAN, PhaseRecord(f"digest {own}", body=lambda: own))
        finally:
            await session.close()
            group.close()

    asyncio.run(main())


def test_a_difference_is_named_on_every_rank() -> None:
    for outcome in run_ranks(differ, 3):
        assert outcome.error is not None
        assert outcome.error.name == "AgreementError"
        assert "ranks 0 and 2 differ in plan: key threads: 0 and 1" in outcome.error.message
        assert "2 of 3 ranks have rank 0's, 1 of 3 ranks have rank 2's" in outcome.error.message


def fail_on(rank: Rank, who: int, phase: Phase) -> None:
    async def main() -> None:
        group = meet(rank)
        session = group.session("load")
        try:
            if rank.rank == who:
                await until(session, PHASES[phase.position - 1])
                error = ReadError("EIO", path="/data/model.safetensors", errno=5)
                final = await session.fail(error, phase)
                assert final is not None
                assert final == session.final
                raise error
            await until(session, Phase.FINISH)
        finally:
            await session.close()
            group.close()

    asyncio.run(main())


@pytest.mark.parametrize(("who", "phase"), [(1, Phase.READ), (0, Phase.CATALOG)])
def test_a_fail_reaches_all_ranks_with_its_cause_and_keeps_the_own_exception(who: int, phase: Phase) -> None:
    for outcome in run_ranks(fail_on, 3, who, phase):
        assert outcome.error is not None
        assert outcome.error.name == ("ReadError" if outcome.rank == who else "RankFailure")
        assert outcome.error.record is not None
        assert (outcome.error.record.error, outcome.error.record.errno) == ("ReadError", 5)
        if outcome.rank != who:
            assert (outcome.error.rank, outcome.error.phase, outcome.error.cause) == (who, phase, "ReadError")


def lose_one(rank: Rank, served: bool) -> None:
    """All come to the read phase; one is killed there by the test."""

    async def main() -> None:
        group = meet(rank, IMPATIENT, served=served)
        session = group.session("load")
        session.report_progress(f"shard {rank.rank}")
        try:
            await until(session, Phase.OPEN)
            await asyncio.sleep(3 * 0.4)  # a few heartbeats with the progress
            rank.mark("reading")
            await wait_for_final(session)
        finally:
            await session.close()
            group.close()

    asyncio.run(main())


async def wait_for_final(session: Session) -> None:
    """Reads without end, as far as the others can see."""
    ended = asyncio.Event()
    session.on_final(lambda verdict: ended.set())
    await ended.wait()
    await session.exchange(Phase.READ, SAME)


def when_all_read(world_size: int, action: Callable[[list[int]], None]) -> Callable[[int, str, list[int]], None]:
    reading: set[int] = set()

    def on_mark(rank: int, text: str, pids: list[int]) -> None:
        reading.add(rank)
        if len(reading) == world_size:
            action(pids)

    return on_mark


@pytest.fixture
def agent() -> Any:
    """A store in a process of its own, as torchrun's agent has it: (address, pid)."""
    address = f"127.0.0.1:{free_port()}"
    ours, theirs = context().Pipe()
    process = context().Process(target=serve_store, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60)
    yield address, process.pid
    process.kill()
    process.join(10)
    process.close()
    ours.close()


def serve_store(address: str, pipe: Any) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    store = TCPStore("127.0.0.1", int(address.rpartition(":")[2]), None, is_master=True, wait_for_workers=False)
    pipe.send("serves")
    while store is not None:
        time.sleep(60)


def survivors(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    assert outcomes[victim].exitcode == -signal.SIGKILL
    return [outcome for outcome in outcomes if outcome.rank != victim]


@pytest.mark.parametrize("victim", [2, 0], ids=["member", "leader"])
def test_a_killed_rank_is_named_with_its_last_progress_by_all_survivors(agent: tuple[str, int], victim: int) -> None:
    kill = when_all_read(3, lambda pids: os.kill(pids[victim], signal.SIGKILL))
    outcomes = run_ranks(lose_one, 3, True, on_mark=kill, address=agent[0])
    for outcome in survivors(outcomes, victim):
        assert outcome.error is not None
        assert (outcome.error.name, outcome.error.rank, outcome.error.phase) == ("RankFailure", victim, "read")
        assert "LostRank: no sign of life for" in outcome.error.message
        assert f"last progress: shard {victim}" in outcome.error.message


def test_a_killed_leader_that_served_the_store_is_named_too() -> None:
    kill = when_all_read(3, lambda pids: os.kill(pids[0], signal.SIGKILL))
    for outcome in survivors(run_ranks(lose_one, 3, False, on_mark=kill), 0):
        assert outcome.error is not None
        assert (outcome.error.name, outcome.error.rank) == ("RankFailure", 0)
        assert "lost the store" in outcome.error.message


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_a_store_that_is_frozen_or_killed_holds_nobody(agent: tuple[str, int], number: signal.Signals) -> None:
    address, pid = agent
    outcomes = run_ranks(
        lose_one, 2, True, on_mark=when_all_read(2, lambda pids: os.kill(pid, number)), address=address
    )
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.exitcode == 0, "the process ends, whatever thread is stuck in the store"
        assert "LostStore" in outcome.error.message


def hold_the_interpreter(rank: Rank) -> None:
    """Rank 1 does so for longer than suspicion takes (half the limit of silence), but not for the limit."""

    async def main() -> None:
        group = meet(rank, SimpleNamespace(timeout_s=3.0, start_timeout_s=60.0, grace_s=5.0))
        session = group.session("load")
        await until(session, Phase.OPEN)
        if rank.rank == 1:
            ctypes.PyDLL(None).usleep(1_800_000)  # PyDLL keeps the interpreter's lock: no thread and no loop runs
        await session.exchange(Phase.READ, SAME)
        await session.exchange(Phase.FINISH, SAME)
        await session.close()
        group.close()

    asyncio.run(main())


def test_a_rank_that_holds_the_interpreter_lock_for_less_than_the_limit_is_healthy() -> None:
    assert [outcome.get() for outcome in run_ranks(hold_the_interpreter, 2)] == [None, None]


def beside_the_callers_collectives(rank: Rank) -> list[float]:
    """The default group, used by the caller between the phases and right afterwards, and a subgroup of it."""
    import torch
    import torch.distributed as dist

    rank.init_process_group()

    def reduce() -> float:
        value = torch.ones(8) * (rank.rank + 1)
        dist.all_reduce(value)
        return float(value[0])

    async def load(group: Group) -> list[float]:
        session = group.session("load")
        sums = []
        for phase in PHASES:
            await session.exchange(phase, SAME)
            sums.append(reduce())
        await session.close()
        group.close()
        return sums

    sums = asyncio.run(load(join_group(None, settings=PATIENT, environ={"WORLD_SIZE": str(rank.world_size)})))
    pair = dist.new_group([1, 2])
    if rank.rank in (1, 2):
        group = join_group(pair, settings=PATIENT, environ={})
        assert (group.rank, group.world_size) == (rank.rank - 1, 2)

        async def alone() -> None:
            session = group.session("of two")
            await until(session, Phase.FINISH)
            assert session.verdict_log[0].counts == {"node": {"n": 2}}
            await session.close()

        asyncio.run(alone())
    else:
        with pytest.raises(Exception, match="no member"):
            join_group(pair, settings=PATIENT, environ={})
    sums.append(reduce())
    dist.destroy_process_group()
    return sums


def test_the_default_group_and_a_subgroup_leave_the_callers_collectives_alone() -> None:
    for outcome in run_ranks(beside_the_callers_collectives, 3):
        assert outcome.get() == [6.0] * (len(PHASES) + 1)


def nobody_came(rank: Rank) -> None:
    async def main() -> None:
        settings = SimpleNamespace(timeout_s=60.0, start_timeout_s=1.0, grace_s=1.0)
        group = join_group(Rendezvous(rank.address, rank.rank, 2, "n"), settings=settings, environ={})
        session = group.session("load")
        try:
            await session.exchange(Phase.CONFIG, SAME)
        finally:
            await session.close()

    asyncio.run(main())


def test_a_first_meeting_that_does_not_happen_is_bounded_and_names_who_is_missing() -> None:
    (outcome,) = run_ranks(nobody_came, 1)
    assert outcome.error is not None
    assert (outcome.error.name, outcome.error.rank) == ("RankFailure", 1)
    assert "did not arrive within 1 s" in outcome.error.message
