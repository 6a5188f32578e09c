"""The store carrier between real processes: the agreement, a named difference, a FAIL, the caller's collectives."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from loader_service.agreement.group import Group, Rendezvous, join_group
from loader_service.agreement.messages import PHASES, Phase, PhaseRecord
from loader_service.errors import ReadError
from tests.agreement.meeting import PATIENT, SAME, meet, until
from tests.support.ranks import Rank, run_ranks

pytestmark = pytest.mark.processes


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
        session = group.session("load", describe={Phase.PLAN: lambda a, b, who: f"key threads: {a} and {b}"})
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
        assert "(rank 1 agrees with rank 0)" in outcome.error.message


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
        settings = SimpleNamespace(timeout_s=60.0, start_timeout_s=4.0, grace_s=1.0)
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
    assert "did not arrive within 4 s" in outcome.error.message
