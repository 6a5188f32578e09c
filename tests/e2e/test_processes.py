"""Ranks as real processes: one fails, differs, is killed or interrupted, and what the others then see."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.e2e import forty
from tests.e2e.forty import LAST, SMALL
from tests.e2e.seats import header_end, payload_reads
from tests.support.checkpoints import Checkpoint, sha256, write_checkpoint
from tests.support.ranks import Outcome, Rank, run_ranks

pytestmark = pytest.mark.processes

BOUND_S = 30.0  # within which survivors must have ended: far more than they need, far less than the watchdog
IMPATIENT: dict[str, Any] = {**SMALL, "agreement": {"timeout_s": 20, "start_timeout_s": 60, "grace_s": 1}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("processes"))


def config_of(folder: str, load: dict[str, Any] | None = None, **sections: Any) -> ServiceConfig:
    return Checkpoint(Path(folder), {}, {}).config(load, **{**SMALL, **sections})


def meeting(rank: Rank, name: str = "e2e") -> ls.Rendezvous:
    return ls.Rendezvous(rank.address, rank.rank, rank.world_size, name)


def failure_of(outcome: Outcome) -> tuple[str, str | None, int | None, str | None, str | None]:
    """(exception, root cause, its rank, phase, file) of a rank that has failed."""
    assert outcome.error is not None, outcome
    record = outcome.error.record
    assert record is not None, outcome.error.traceback
    return outcome.error.name, record.error, record.rank, record.phase, record.path


# One fails, one differs ----------------------------------------------------------------------------------------------


def load_with_a_fault(rank: Rank, folder: str, fault: str, who: int) -> tuple[dict[str, str], list[str]]:
    storage = FakeStorage(LocalStorage())
    if rank.rank == who and fault == "header once":
        storage.fail(f"*{LAST}", errno.ETIMEDOUT)
    if rank.rank == who and fault == "header always":
        storage.fail(f"*{LAST}", errno.EACCES, times=None)
    if rank.rank == who and fault == "payload":
        path = os.path.join(folder, LAST)
        storage.fail(f"*{LAST}", errno.EIO, times=None, within=(header_end(path), os.stat(path).st_size))

    async def main() -> tuple[dict[str, str], list[str]]:
        async with ls.LoaderService(config_of(folder), meeting(rank), storage=storage) as service:
            async with service.open("target") as load:
                found = {name: sha256(tensor) async for name, tensor in load}
        return found, list(load.report.fallbacks)

    try:
        return asyncio.run(main())
    finally:
        if fault == "header always":
            assert not payload_reads(storage)


def test_a_header_that_fails_once_on_one_process_stops_nobody(checkpoint: Checkpoint) -> None:
    wanted = {name: sha256(checkpoint.tensor(name)) for name in checkpoint.tensors}
    for outcome in run_ranks(load_with_a_fault, 3, str(checkpoint.folder), "header once", 1):
        found, fallbacks = outcome.get()
        assert found == wanted
        assert any("headers" in line for line in fallbacks)


@pytest.mark.parametrize(("fault", "phase"), [("header always", "catalog"), ("payload", "read")])
@pytest.mark.parametrize("who", [0, 2])
def test_a_process_that_cannot_read_fails_all_with_its_cause(
    checkpoint: Checkpoint, fault: str, phase: str, who: int
) -> None:
    for outcome in run_ranks(load_with_a_fault, 3, str(checkpoint.folder), fault, who):
        own = "ReadError" if outcome.rank == who else "RankFailure"
        assert failure_of(outcome) == (own, "ReadError", who, phase, str(checkpoint.folder / LAST))


def load_with_own_rules(rank: Rank, folder: str) -> None:
    storage = FakeStorage(LocalStorage())
    rules = [{"match": "s1.*", "split": {"axis": "world", "dim": 1 if rank.rank == 2 else 0}}]

    async def main() -> None:
        service = ls.LoaderService(config_of(folder, {"rules": rules}), meeting(rank), storage=storage)
        async with service, service.open("target") as load:
            async for _ in load:
                pass

    try:
        asyncio.run(main())
    finally:
        assert not storage.reads


def test_a_process_that_differs_stops_all(checkpoint: Checkpoint) -> None:
    outcomes = run_ranks(load_with_own_rules, 4, str(checkpoint.folder))
    for outcome in outcomes:
        assert failure_of(outcome)[:4] == ("AgreementError", "AgreementError", 2, "config")
        assert outcome.error is not None
        assert "ranks 0 and 2 differ in config" in outcome.error.message
        assert "split.dim is 0 on rank 0 and 1 on rank 2 (ranks 1 and 3 agree with rank 0)" in outcome.error.message


# One dies or is interrupted ------------------------------------------------------------------------------------------


def come_to_the_middle(rank: Rank, folder: str, who: int, form: str) -> None:
    """Rank `who` stands still in the middle of its load; the others read theirs to the end and wait for it there."""
    config = config_of(folder, **IMPATIENT)

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        if form == "SIGTERM handled":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with ls.LoaderService(config, meeting(rank)) as service, service.open("target") as load:
            async for _ in load:
                if rank.rank == who:
                    rank.mark("in the middle")
                    await asyncio.Event().wait()

    def blocking() -> None:
        with ls.LoaderService.blocking(config, meeting(rank)) as service, service.open("target") as load:
            for _ in load:
                if rank.rank == who:
                    rank.mark("in the middle")
                    time.sleep(BOUND_S * 2)

    if form == "blocking":
        blocking()
    else:
        asyncio.run(main())


def run_and_signal(
    checkpoint: Checkpoint, who: int, number: signal.Signals, form: str, world_size: int = 3
) -> tuple[list[Outcome], Outcome]:
    """(survivors, victim); survivors have ended within the bound."""
    sent_at_s: list[float] = []

    def on_mark(rank: int, _text: str, pids: list[int]) -> None:
        sent_at_s.append(time.monotonic())
        os.kill(pids[rank], number)

    outcomes = run_ranks(come_to_the_middle, world_size, str(checkpoint.folder), who, form, on_mark=on_mark)
    assert len(sent_at_s) == 1
    survivors = [outcome for outcome in outcomes if outcome.rank != who]
    for outcome in survivors:
        assert outcome.ended_s - sent_at_s[0] < BOUND_S
    return survivors, outcomes[who]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("who", [1, 0], ids=["member", "leader"])
def test_a_process_that_is_killed_is_named_by_all_survivors(
    checkpoint: Checkpoint, who: int, number: signal.Signals
) -> None:
    survivors, victim = run_and_signal(checkpoint, who, number, "async")
    assert victim.exitcode == -number
    for outcome in survivors:
        name, _, rank, phase, _ = failure_of(outcome)
        assert (name, rank) == ("RankFailure", who), outcome.error
        assert phase in {"open", "read"}, "a survivor may just be waiting for the verdict that opens the load"


@pytest.mark.parametrize(
    ("number", "form", "own"),
    [
        pytest.param(signal.SIGTERM, "SIGTERM handled", "CancelledError", id="SIGTERM"),
        pytest.param(signal.SIGINT, "async", "KeyboardInterrupt", id="SIGINT"),
        pytest.param(signal.SIGINT, "blocking", "KeyboardInterrupt", id="SIGINT, blocking"),
    ],
)
def test_a_process_that_is_interrupted_tells_the_others(
    checkpoint: Checkpoint, number: signal.Signals, form: str, own: str
) -> None:
    survivors, victim = run_and_signal(checkpoint, 1, number, form)
    assert victim.error is not None
    assert victim.error.name == own
    for outcome in survivors:
        name, cause, rank, phase, _ = failure_of(outcome)
        assert (name, cause, rank, phase) == ("RankFailure", "LoadCancelledError", 1, "read")


def reduce_in_the_body(rank: Rank, folder: str) -> None:
    """The caller's own collective, in the middle of a load that one rank does not survive."""
    import torch
    import torch.distributed as dist

    rank.init_process_group()
    with ls.LoaderService.blocking(config_of(folder)) as service, service.open("target") as load:
        for _ in load:
            break
        if rank.rank == 2:
            rank.mark("about to die")
            time.sleep(BOUND_S * 2)
        dist.all_reduce(torch.ones(1))


def test_a_death_that_breaks_the_callers_collectives_is_named_and_not_the_collectives(checkpoint: Checkpoint) -> None:
    """With the default limits: its node sees the death at once, not after a minute of silence."""
    outcomes = run_ranks(
        reduce_in_the_body,
        3,
        str(checkpoint.folder),
        on_mark=lambda rank, _text, pids: os.kill(pids[rank], signal.SIGKILL),
    )
    for outcome in outcomes[:2]:
        assert outcome.error is not None
        assert outcome.error.name == "RuntimeError", "its own exception"
        verdict = "verdict of all ranks: rank 2 failed in phase read: LostRank: its process has ended"
        assert verdict in outcome.error.traceback


def die_while_headers_are_read(rank: Rank, folder: str) -> None:
    storage = FakeStorage(LocalStorage())
    if rank.rank == 1:
        gate = storage.block(f"*{LAST}")

        def tell() -> None:
            if gate.reached.wait(BOUND_S):
                rank.mark("stuck")

        threading.Thread(target=tell, daemon=True).start()

    async def main() -> None:
        service = ls.LoaderService(config_of(folder, **IMPATIENT), meeting(rank), storage=storage)
        async with service, service.open("target"):
            pass

    asyncio.run(main())


def test_a_process_that_is_killed_while_it_reads_headers_is_named(checkpoint: Checkpoint) -> None:
    outcomes = run_ranks(
        die_while_headers_are_read,
        2,
        str(checkpoint.folder),
        on_mark=lambda rank, _text, pids: os.kill(pids[rank], signal.SIGKILL),
    )
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert failure_of(outcomes[0])[2:4] == (1, "catalog")


# Groups, faces, descriptors ------------------------------------------------------------------------------------------


def load_in_subgroups(rank: Rank, folder: str) -> tuple[int, int, list[str]]:
    """Two groups of two ranks, each loading for itself; then all four together, between the caller's own exchanges."""
    import torch
    import torch.distributed as dist

    rank.init_process_group()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank.rank // 2]
    rules = [{"match": "*", "assign": {"axis": "tp", "index": r"\.w(\d+)", "how": "round_robin"}}]
    config = config_of(folder, {"rules": rules}, mesh={"tp": 2})
    with ls.LoaderService.blocking(config, mine) as service:
        names = [name for name, _ in service.iter_weights("target")]
        ours = (service.rank, service.world_size)
    total = torch.tensor(len(names))
    dist.all_reduce(total)
    with ls.LoaderService.blocking(config_of(folder)) as service:
        everything = sum(1 for _ in service.iter_weights("target"))
    assert int(total) == 2 * everything
    return *ours, names


def test_subgroups_load_for_themselves_beside_the_callers_collectives(checkpoint: Checkpoint) -> None:
    for outcome in run_ranks(load_in_subgroups, 4, str(checkpoint.folder)):
        place, world_size, names = outcome.get()
        assert (place, world_size) == (outcome.rank % 2, 2)
        assert names == [name for name in checkpoint.tensors if int(name[-2:]) % 2 == place]


def load_with_few_descriptors(rank: Rank, folder: str) -> tuple[int, int, int]:
    """Twice a whole load and then one that fails: (tensors, tensors, descriptors that the second time has cost)."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    storage = FakeStorage(LocalStorage())

    async def load_once() -> int:
        config = config_of(folder, reads={"threads": 8, "retries": 0})
        async with ls.LoaderService(config, meeting(rank), storage=storage) as service:
            async with service.open("target") as load:
                whole = len([name async for name, _ in load])
            if rank.rank == 1:
                path = os.path.join(folder, "s149.safetensors")
                storage.fail(path, errno.EIO, within=(header_end(path), header_end(path) + 8))
            with pytest.raises(ls.LoaderError):
                async with service.open("target") as load:
                    async for _ in load:
                        pass
        return whole

    first = asyncio.run(load_once())
    storage.clear()
    before = len(os.listdir("/proc/self/fd"))
    second = asyncio.run(load_once())
    assert storage.open_now == 0
    assert storage.max_open < 96
    return first, second, len(os.listdir("/proc/self/fd")) - before


def test_150_shards_load_on_two_ranks_with_96_descriptors_each(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path, {f"s{i:03}.safetensors": {f"w{i}": ("U8", (i + 8,))} for i in range(150)})
    assert len(made.tensors) == 150
    for outcome in run_ranks(load_with_few_descriptors, 2, str(tmp_path)):
        first, second, more = outcome.get()
        assert (first, second) == (150, 150)
        assert more <= 0, "no descriptor is left after a failure"


def load_with_more_threads_than_descriptors(rank: Rank, folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    with ls.LoaderService.blocking(config_of(folder, reads={"threads": 200, "threads_per_node": 1000})) as service:
        for _ in service.iter_weights("target"):
            pass


def test_more_threads_than_files_can_be_open_is_a_configuration_error(checkpoint: Checkpoint) -> None:
    (outcome,) = run_ranks(load_with_more_threads_than_descriptors, 1, str(checkpoint.folder))
    assert outcome.error is not None
    assert (outcome.error.name, outcome.error.exit_code) == ("ConfigError", 2)
    assert "ulimit -n" in outcome.error.message
