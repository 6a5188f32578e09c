"""What stays: nothing of ranks that were killed, and nothing more in a long-lived store after many loads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import loader_service as ls
from loader_service.agreement import store_carrier
from loader_service.agreement.messages import PHASES, Phase, entry_key
from loader_service.config.schema import ServiceConfig
from tests.agreement.conftest import Agent
from tests.agreement.meeting import Gathering, impatient, meet, until, wait_until_gone
from tests.support.checkpoints import Checkpoint, write_checkpoint
from tests.support.ranks import Rank, free_port, run_ranks, run_teams

pytestmark = pytest.mark.processes

RANKS = 2
WATCHDOG_S = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(
        tmp_path_factory.mktemp("remains"), {"a.safetensors": {f"w{k}": ("U8", (4096,)) for k in range(20)}}
    )


def config_of(folder: str) -> ServiceConfig:
    return Checkpoint(Path(folder), {}, {}).config(
        staging={"capacity_bytes": "64KiB"}, reads={"chunk_bytes": "4KiB"}, agreement={"timeout_s": 30, "grace_s": 10}
    )


def meeting(rank: Rank, agent: str | None = None) -> ls.Rendezvous:
    return ls.Rendezvous(agent or rank.address, rank.rank, rank.world_size, "remains", served=agent is not None)


# Nothing of ranks that were killed -----------------------------------------------------------------------------------


def load_until_killed(rank: Rank, folder: str) -> None:
    with ls.LoaderService.blocking(config_of(folder), meeting(rank)) as service, service.open("target") as load:
        for batch in load.batches():
            with batch:
                rank.mark("reads")
                while True:
                    signal.pause()


def load_again(rank: Rank, folder: str) -> int:
    with ls.LoaderService.blocking(config_of(folder), meeting(rank)) as service:
        return sum(1 for _ in service.iter_weights("target"))


def test_nothing_is_left_of_ranks_that_were_all_killed_and_they_can_meet_again_at_once(checkpoint: Checkpoint) -> None:
    killed: list[int] = []
    named: set[str] = set()

    def kill(_team: int, pids: list[int]) -> None:
        killed.extend([*pids, *(child for pid in pids for child in children_of(pid))])
        for pid in killed:
            named.update(shared_names_of(pid))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    reads = Gathering(lambda _: "reads", lambda _: set(range(RANKS)), kill)
    folder, address = str(checkpoint.folder), f"127.0.0.1:{free_port()}"
    before = set(os.listdir("/dev/shm"))
    outcomes = run_ranks(
        load_until_killed,
        RANKS,
        folder,
        address=address,
        on_mark=lambda rank, text, pids: reads.mark(0, rank, text, pids),
    )
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * RANKS
    wait_until_gone(killed)
    assert not [path for path in named if os.path.exists(path)]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "loader" in name]
    again = run_ranks(load_again, RANKS, folder, address=address)
    assert [outcome.get() for outcome in again] == [len(checkpoint.tensors)] * RANKS


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ends meanwhile
            found.extend(map(int, (task / "children").read_text().split()))
    return found


def shared_names_of(pid: int) -> set[str]:
    """What it has open or mapped in /dev/shm, and its sockets that have a name in a folder."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    opened = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # one that is closed meanwhile
            opened.add(os.readlink(path))
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    bound = {fields[7] for fields in sockets if len(fields) > 7 and f"socket:[{fields[6]}]" in opened}
    in_memory = {path for path in mapped | opened if path.startswith("/dev/shm/")}
    return in_memory | {path for path in bound if path.startswith("/")}


# Nothing more in a long-lived store ----------------------------------------------------------------------------------

LOADS = 8
FAILURES = 3


class Sizes(NamedTuple):
    """Keys in the store (told by rank 0), and this rank's threads and descriptors by kind. Threads that read are not
    counted: they begin as they are needed, up to a number that is agreed on."""

    keys: list[str]
    threads: int
    sockets: int
    others: int


def load_many_times(rank: Rank, folder: str, agent: str, stages: int, loads: int, failures: int) -> list[Sizes]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

    host, _, port = agent.rpartition(":")
    store = TCPStore(host, int(port), None, is_master=False, timeout=timedelta(seconds=60))

    async def load(service: ls.LoaderService, *, fails: bool = False) -> None:
        async with service.open("target") as opened:
            async for _ in opened:
                if fails:
                    raise ZeroDivisionError

    async def main() -> list[Sizes]:
        found = []
        async with ls.LoaderService(config_of(folder), meeting(rank, agent)) as kept:
            for stage in range(stages):
                for number in range(loads):
                    if number % 2:
                        await load(kept)
                        continue
                    async with ls.LoaderService(config_of(folder), meeting(rank, agent)) as service:
                        await load(service)
                for number in range(failures):
                    mine = number % RANKS == rank.rank
                    with pytest.raises(ZeroDivisionError if mine else ls.RankFailure):
                        await load(kept, fails=mine)
                found.append(await asyncio.to_thread(measure, stage))
        return found

    def measure(stage: int) -> Sizes:
        """Both ranks are between two loads: the next one begins once rank 0 has looked."""
        wait_for_threads_to_end()
        sizes = sizes_now(store)
        if rank.rank == 0:
            store.set("stage", str(stage))
        else:
            while not (store.check(["stage"]) and int(store.get("stage")) == stage):
                time.sleep(0.01)
        return sizes

    return asyncio.run(main())


def wait_for_threads_to_end() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith(("loader-agreement", "loader-node")):  # of a session
            thread.join(WATCHDOG_S)
            assert not thread.is_alive(), thread.name


def sizes_now(store: Any) -> Sizes:
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    sockets = sum(target.startswith("socket:") for target in opened)
    keys = sorted(key for key in store.list_keys() if "stage" not in key)
    return Sizes(keys, min(threads_now() for _ in range(20)), sockets, len(opened) - sockets)


def threads_now() -> int:
    """As the kernel counts them, but for those that read. One that has ended is seen a moment longer: look again."""
    time.sleep(0.005)
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("loader-read")]
    return len(os.listdir("/proc/self/task")) - len(readers)


def test_neither_a_long_lived_store_nor_its_ranks_grow_with_loads(agent: Agent, checkpoint: Checkpoint) -> None:
    outcomes = run_ranks(load_many_times, RANKS, str(checkpoint.folder), agent.address, 3, LOADS, FAILURES)
    for outcome in outcomes:
        _, first, second = outcome.get()
        assert all(after <= before for before, after in zip(first[1:], second[1:], strict=True)), (
            first[1:],
            second[1:],
        )
        assert outcome.rank != 0 or first.keys == second.keys


LAG_S = 0.5  # more than a beat


def lag_behind(rank: Rank, agent: str, who: int) -> list[str]:
    """The thread of rank `who` that follows the log comes late to its last entry: the rank knows of it by then."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

    wait = PrefixStore.wait

    def late_wait(store: Any, keys: list[str], timeout: timedelta) -> None:
        wait(store, keys, timeout)
        if rank.rank == who and keys == [entry_key(len(PHASES) - 1)]:
            time.sleep(LAG_S)

    store_carrier._LONG_STEP_S = WATCHDOG_S  # so long it waits for that thread
    PrefixStore.wait = late_wait  # type: ignore[method-assign, assignment]

    async def main() -> None:
        group = meet(rank, impatient(2.4), agent=agent)
        session = group.session("load")
        await until(session, Phase.FINISH)
        await session.close()
        group.close()

    asyncio.run(main())
    wait_for_threads_to_end()
    host, _, port = agent.rpartition(":")
    keys = sizes_now(TCPStore(host, int(port), None, is_master=False)).keys
    return [key for key in keys if key.startswith(f"loader_service/{rank.team}/")]


def test_a_thread_that_comes_late_to_the_end_of_the_log_is_not_left_waiting_for_it(agent: Agent) -> None:
    for leader, member in run_teams(lag_behind, RANKS, [(agent.address, who) for who in range(RANKS)]):
        assert not [key for key in leader.get() if "/sessions/" not in key]
        member.get()
