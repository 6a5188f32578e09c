"""SIGINT and SIGTERM on one rank's process in each phase, in both faces: what it raises, and what the others do."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.agreement.messages import PHASES
from loader_service.reading.fake import FakeStorage
from loader_service.reading.faults import Gate
from loader_service.reading.local import LocalStorage
from tests.e2e import forty
from tests.e2e.doors import QUICK, Hold, left, use, use_blocking
from tests.sharing.failing import run_of
from tests.support.checkpoints import Checkpoint
from tests.support.ranks import Outcome, Rank, run_ranks

pytestmark = pytest.mark.processes

Told = tuple[str | None, list[str], str | None, int | None, str | None]  # error, notes, verdict's error, rank, phase


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("signals"))


def told(result: Any) -> Told:
    verdict = result.verdict
    where = (None, None, None) if verdict is None else (verdict.error, verdict.rank, verdict.phase)
    return type(result.error).__name__, result.notes, *where


def mark_when(reached: threading.Event, rank: Rank, text: str) -> None:
    def wait() -> None:
        if reached.wait(30):
            rank.mark(text)

    threading.Thread(target=wait, daemon=True).start()


def leave_in_each_phase(rank: Rank, folder: str, who: int, face: str) -> list[Told]:
    """A service and a load for each phase, in which rank `who` says where it stands still.

    Before them a load that is whole, so that no process is still starting when one is signalled; one after them.
    """
    checkpoint = forty_of(folder)
    config = checkpoint.config(**QUICK)
    group = ls.Rendezvous(rank.address, rank.rank, rank.world_size, "signals")

    def prepare(service: ls.LoaderService | ls.BlockingLoaderService, phase: Any) -> None:
        if rank.rank == who:
            mark_when(Hold(service, phase).reached, rank, phase)

    def terminate(*_: object) -> None:
        raise SystemExit(143)

    def blocking(phase: Any) -> Told:
        signal.signal(signal.SIGTERM, terminate)
        with ls.LoaderService.blocking(config, group) as service:
            if phase:
                prepare(service, phase)
            return told(use_blocking(service, checkpoint))

    async def asynchronous(phase: Any) -> Told:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with ls.LoaderService(config, group) as service:
            if phase:
                prepare(service, phase)
            found.append(told(await use(service, checkpoint)))
        return found[-1]

    results: list[Told] = []
    for phase in (None, *PHASES, None):
        if face == "blocking":
            results.append(blocking(phase))
            continue
        found: list[Told] = []
        try:
            asyncio.run(asynchronous(phase))
        except KeyboardInterrupt:  # asyncio.run's own, after its task was cancelled
            assert rank.rank == who
        results += found
    return results


def forty_of(folder: str) -> Checkpoint:
    names = {f"s{shard}.w{number:02}": ("BF16", (50, 41), b"") for shard in (1, 2) for number in range(20)}
    return Checkpoint(Path(folder), names, {})


def signal_in_each_phase(checkpoint: Checkpoint, who: int, face: str, number: signal.Signals) -> list[Outcome]:
    return run_ranks(
        leave_in_each_phase,
        3,
        str(checkpoint.folder),
        who,
        face,
        on_mark=lambda rank, _text, pids: os.kill(pids[rank], number),
    )


@pytest.mark.parametrize("who", [0, 2], ids=["leader", "member"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("face", ["async", "blocking"])
def test_a_signal_in_each_phase(checkpoint: Checkpoint, face: str, number: signal.Signals, who: int) -> None:
    outcomes = signal_in_each_phase(checkpoint, who, face, number)
    own = {"async": "CancelledError", "blocking": "KeyboardInterrupt" if number == signal.SIGINT else "SystemExit"}
    for outcome in outcomes:
        results = outcome.get()
        assert len(results) == len(PHASES) + 2
        for phase, (error, notes, cause, rank, where) in zip(PHASES, results[1:], strict=False):
            assert (cause, rank, where) == ("LoadCancelledError", who, str(phase)), results
            assert error == (own[face] if outcome.rank == who else "RankFailure")
            assert len(notes) == (outcome.rank == who)
        assert results[-1] == ("NoneType", [], None, None, None), "and the next service loads"
    assert list(outcomes[who].marks) == [str(phase) for phase in PHASES]


def set_when_waiting(service: ls.BlockingLoaderService, gate: Gate, waits: threading.Event) -> None:
    """When that read alone is left, and the consumer has taken what came before it: nothing wakes it any more."""
    gate.reached.wait(30)
    run = run_of(service)
    reading = run.reading._scheduler
    assert reading is not None
    while len(reading._running) > 1 or run.channel._items or not run.channel.consumer_waits:
        time.sleep(0.01)
    waits.set()


def be_signalled_in_the_body(rank: Rank, folder: str, form: str, generator: bool) -> Told | None:
    """The signal comes while the consumer waits for a read that stands still, which comes back a while after it."""
    checkpoint = forty_of(folder)
    storage = FakeStorage(LocalStorage())
    group = ls.Rendezvous(rank.address, rank.rank, rank.world_size, "body")
    gate = storage.block("*00002-of*", nth=2) if rank.rank == 1 else None
    if gate is not None:

        def interrupted(*_: object) -> None:
            threading.Timer(1.0, gate.release).start()
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupted)
    with ls.LoaderService.blocking(checkpoint.config(**QUICK), group, storage=storage) as service:
        if gate is not None:
            waits = threading.Event()
            threading.Thread(target=set_when_waiting, args=(service, gate, waits), daemon=True).start()
            mark_when(waits, rank, "waiting")
        if not generator:
            return told(use_blocking(service, checkpoint, form))
        load, caught = service.open("target"), None
        with_generator = service.iter_weights("target")
        try:
            for _ in with_generator:
                pass
        except BaseException as error:
            caught = error
        assert service._engine is not None
        return told(left(service, load, caught)) if caught is not None else None


@pytest.mark.parametrize("form", ["iterate", "batches", "into"])
def test_an_interrupt_while_the_blocking_consumer_waits(checkpoint: Checkpoint, form: str) -> None:
    outcomes = run_ranks(
        be_signalled_in_the_body,
        2,
        str(checkpoint.folder),
        form,
        False,
        on_mark=lambda rank, _text, pids: os.kill(pids[rank], signal.SIGINT),
    )
    other, own = (outcome.get() for outcome in outcomes)
    assert other == ("RankFailure", [], "LoadCancelledError", 1, "read")
    assert (own[0], *own[2:]) == ("KeyboardInterrupt", "LoadCancelledError", 1, "read")


def test_an_interrupt_of_a_generator_that_waits(checkpoint: Checkpoint) -> None:
    outcomes = run_ranks(
        be_signalled_in_the_body,
        2,
        str(checkpoint.folder),
        "iterate",
        True,
        on_mark=lambda rank, _text, pids: os.kill(pids[rank], signal.SIGINT),
    )
    other, own = (outcome.get() for outcome in outcomes)
    assert other[0] == "RankFailure"
    assert own[0] == "KeyboardInterrupt"
    assert "rank 1 failed in phase read: LoadCancelledError" in own[1][0]
