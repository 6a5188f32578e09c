"""Ranks that come to the middle of a load and stay there, and the test that does something to them then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from tests.e2e.forty import SMALL
from tests.hosts.host import Hosts
from tests.support.checkpoints import Checkpoint
from tests.support.ranks import Outcome, Rank, run_ranks

BOUND_S = 30.0  # within which all must have ended after a cut: far more than they need
STARTED_WITHIN_S = 60.0
RANKS = 4
ON_FIRST, ON_SECOND = (0, 1), (2, 3)


def config_of(folder: str, **sections: Any) -> ServiceConfig:
    return Checkpoint(Path(folder), {}, {}).config(**{**SMALL, **sections})


def meeting(rank: Rank) -> ls.Rendezvous:
    return ls.Rendezvous(rank.address, rank.rank, rank.world_size, "two hosts")


def hold(rank: Rank, folder: str, timeout_s: float) -> None:
    """Takes one tensor, and the next one when the load has failed."""
    config = config_of(folder, agreement={"timeout_s": timeout_s, "start_timeout_s": STARTED_WITHIN_S, "grace_s": 0.2})

    async def main() -> None:
        async with ls.LoaderService(config, meeting(rank)) as service, service.open("target") as load:
            async for _ in load:
                rank.mark("in the middle")
                while load.failure is None:  # noqa: ASYNC110 - it is what the command line looks at too
                    await asyncio.sleep(0.02)

    asyncio.run(main())


def disturb(
    hosts: Hosts, folder: Path, action: Callable[[list[int]], None], *, timeout_s: float = 2.0
) -> list[Outcome]:
    """Runs `action(pids)` once every rank stands in the middle of its load; what became of them, by rank."""
    there: set[int] = set()

    def on_mark(rank: int, _text: str, pids: list[int]) -> None:
        there.add(rank)
        if len(there) == RANKS:
            action(pids)

    outcomes = run_ranks(
        hold,
        RANKS,
        str(folder),
        timeout_s,
        timeout_s=STARTED_WITHIN_S + BOUND_S,
        on_mark=on_mark,
        enter=hosts.enter(),
        address=hosts.address,
    )
    assert there == set(range(RANKS)), [outcome.error for outcome in outcomes]
    return outcomes


def cause(outcome: Outcome) -> tuple[str, str | None, int | None]:
    """(exception, root cause, rank that is named); the process has ended by itself, after its exception."""
    assert outcome.error is not None, outcome
    assert outcome.exitcode == 0, outcome
    assert outcome.error.exit_code == 4, outcome.error
    assert outcome.error.record is not None
    return outcome.error.name, outcome.error.record.error, outcome.error.rank
