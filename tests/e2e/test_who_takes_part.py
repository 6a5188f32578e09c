"""Who takes part in a load: every kind of group, launcher and executor, with real processes and files."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.e2e.seats import Seat, all_of, values
from tests.support.checkpoints import Checkpoint, write_checkpoint
from tests.support.ranks import Rank, run_ranks

pytestmark = pytest.mark.processes

NAMES = [f"layers.{i}.w" for i in range(8)]
EVERY_OTHER = [{"match": "*", "assign": {"axis": "tp", "index": r"layers\.(\d+)\.", "how": "round_robin"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shards = {f"{i}.safetensors": dict.fromkeys(NAMES[4 * i : 4 * i + 4], ("BF16", (9, 7))) for i in range(2)}
    return write_checkpoint(tmp_path_factory.mktemp("groups"), shards).folder


def config_of(folder: str | Path, *, tp: int = 0, **sections: Any) -> ServiceConfig:
    load = {"rules": EVERY_OTHER} if tp else {}
    mesh = {"mesh": {"tp": tp}} if tp else {}
    agreement = {"timeout_s": 20, "start_timeout_s": 30, "grace_s": 5, **sections.pop("agreement", {})}
    return Checkpoint(Path(folder), {}, {}).config(load, agreement=agreement, **mesh, **sections)


def names_loaded(config: ServiceConfig, group: Any) -> list[str]:
    with ls.LoaderService.blocking(config, group) as service:
        return [name for name, _ in service.iter_weights("target")]


def share(rank: int, of: int) -> list[str]:
    """What a rank takes of a load in which ranks take turns."""
    return NAMES[rank::of]


# Nobody connected the ranks ------------------------------------------------------------------------------------------


def enter_unconnected(rank: Rank, folder: str, variable: str) -> tuple[str, float, int]:
    os.environ[variable] = "2"
    storage = FakeStorage(LocalStorage())
    started_s = time.monotonic()
    with pytest.raises(ls.ConfigError) as caught, ls.LoaderService.blocking(config_of(folder), storage=storage):
        pass
    return str(caught.value), time.monotonic() - started_s, len(storage.reads)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_process_of_several_that_nobody_connected_is_refused_at_once(folder: Path, variable: str) -> None:
    (outcome,) = run_ranks(enter_unconnected, 1, str(folder), variable)
    message, seconds, reads = outcome.get()
    assert f"{variable} is 2, but torch.distributed is not initialised" in message
    assert reads == 0
    assert seconds < 5, "a second on a machine that does nothing else"


# One service after the other -----------------------------------------------------------------------------------------


# Each of two ranks keeps up to four connections to the store, and rank 0, which serves it, has the other ends of all.
# Twenty services that leave one descriptor each are still found.
SPARE_DESCRIPTORS = 12


def once_few(count: Callable[[], int], most: int) -> int:
    """How many there are, at most `most` if that comes to be: threads that speak to a store end a moment after their
    service, and its connections with them."""
    deadline_s = time.monotonic() + 10
    while (found := count()) > most and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found


def load_thirty_times(rank: Rank, folder: str, kind: str) -> list[int]:
    """Every fifth load fails in a rank's body. Descriptors, threads and keys in the store after ten and at the end."""
    import torch.distributed as dist

    rank.init_process_group()
    store = dist.distributed_c10d._get_default_store()
    config = config_of(folder, tp=2)
    counts: list[int] = []
    for number in range(30):
        group = None if kind == "default" else ls.Rendezvous(store, rank.rank, rank.world_size, "thirty")
        if number % 5 == 3:
            with pytest.raises((ls.RankFailure, ZeroDivisionError)):
                fail_in_the_body(config, group, fails=rank.rank == number % 2)
        else:
            assert names_loaded(config, group) == share(rank.rank, 2)
        if number in (9, 29):
            dist.barrier()
            descriptors, threads = (counts[0] + SPARE_DESCRIPTORS, counts[1]) if counts else (sys.maxsize, sys.maxsize)
            counts.append(once_few(lambda: len(os.listdir("/proc/self/fd")), descriptors))
            counts.append(once_few(threading.active_count, threads))
            counts.append(store.num_keys() if rank.rank == 0 else 0)
            dist.barrier()
    dist.destroy_process_group()
    return counts


def fail_in_the_body(config: ServiceConfig, group: Any, *, fails: bool) -> None:
    with ls.LoaderService.blocking(config, group) as service, service.open("target") as load:
        for _ in load:
            if fails:
                raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["default", "rendezvous"])
def test_thirty_services_one_after_the_other_some_of_which_fail_leave_nothing(folder: Path, kind: str) -> None:
    for outcome in run_ranks(load_thirty_times, 2, str(folder), kind):
        counts = outcome.get()
        after_ten, at_the_end = counts[:3], counts[3:]
        assert at_the_end[0] <= after_ten[0] + SPARE_DESCRIPTORS, "descriptors"
        assert at_the_end[1] <= after_ten[1], "threads"
        assert at_the_end[2] <= after_ten[2], "keys in the store"


# Two at once, beside the caller's own collectives --------------------------------------------------------------------


class AllReduces:
    """The caller's own: sums over the default group without a pause, in a thread. Nobody else may use that group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._expected = world_size * (world_size + 1) // 2
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.done = 0
        self.wrong = 0

    def __enter__(self) -> AllReduces:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        import torch
        import torch.distributed as dist

        while True:
            value = torch.full((1000,), self._rank + 1 if not self._end.is_set() else 1_000_000)
            dist.all_reduce(value)
            if int(value[0]) >= 1_000_000:  # one of them is at its end, and all see it in the same round
                return
            self.wrong += bool((value != self._expected).any())
            self.done += 1


def load_in_two_groups(rank: Rank, folder: str, form: str) -> tuple[list[str], list[str], int, int]:
    """Rank r is in a tensor-parallel pair and in a pair of replicas; both load at once."""
    import torch.distributed as dist

    rank.init_process_group()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    parallel, replica = pairs[rank.rank // 2], replicas[rank.rank % 2]
    sharded, whole = config_of(folder, tp=2), config_of(folder)
    found: list[tuple[list[str], list[str]]] = []
    done = wrong = 0
    for number in range(3):
        with AllReduces(rank.rank, rank.world_size) as sums:
            if form == "threads":
                loads = (partial(names_loaded, sharded, parallel), partial(names_loaded, whole, replica))
                found.append(in_two_threads(*loads))
            else:
                found.append(asyncio.run(in_one_loop((sharded, parallel), (whole, replica))))
        change_groups(rank.rank, number)  # not beside the sums: torch itself hangs at that
        done, wrong = done + sums.done, wrong + sums.wrong
    ours, theirs = found[0]
    assert found == [(ours, theirs)] * 3
    dist.barrier()
    dist.destroy_process_group()
    return ours, theirs, done, wrong


def in_two_threads(first: Callable[[], list[str]], second: Callable[[], list[str]]) -> tuple[list[str], list[str]]:
    found: dict[int, list[str]] = {}
    other = threading.Thread(target=lambda: found.update({1: second()}))
    other.start()
    found[0] = first()
    other.join()
    return found[0], found[1]


async def in_one_loop(*loads: tuple[ServiceConfig, Any]) -> Any:
    async def load(config: ServiceConfig, group: Any) -> list[str]:
        async with ls.LoaderService(config, group) as service:
            return [name async for name, _ in service.iter_weights("target")]

    return tuple(await asyncio.gather(*(load(*each) for each in loads)))


def change_groups(rank: int, number: int) -> None:
    """What a caller does meanwhile: groups of all ranks come and go, and some ranks make more of them than others."""
    import torch.distributed as dist

    if rank in (1, 2) and number < 2:  # first: torch names such a group by how many its members have at the moment
        dist.new_group([1, 2], use_local_synchronization=True)
    group = dist.new_group([number % 2, 2 + number % 2])
    dist.barrier()  # or torch takes it from a member that is still at making it
    if rank % 2 == number % 2:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("form", ["threads", "one loop"])
def test_two_services_at_once_on_different_groups_beside_the_callers_collectives(folder: Path, form: str) -> None:
    for outcome in run_ranks(load_in_two_groups, 4, str(folder), form):
        sharded, whole, sums, wrong = outcome.get()
        assert sharded == share(outcome.rank % 2, 2)
        assert whole == NAMES
        assert sums > 10
        assert wrong == 0


def load_while_groups_change(rank: Rank, folder: str) -> tuple[list[str], list[int]]:
    """Between two tensors of an open load the caller makes groups, destroys them, and sums over all ranks."""
    import torch
    import torch.distributed as dist

    rank.init_process_group()
    names, sums = [], []
    with ls.LoaderService.blocking(config_of(folder)) as service, service.open("target") as load:
        for number, (name, _) in enumerate(load):
            names.append(name)
            change_groups(rank.rank, number)
            value = torch.tensor(rank.rank + number)
            dist.all_reduce(value)
            sums.append(int(value))
    dist.barrier()
    dist.destroy_process_group()
    return names, sums


def test_the_callers_groups_may_come_and_go_while_a_load_is_open(folder: Path) -> None:
    for outcome in run_ranks(load_while_groups_change, 4, str(folder)):
        names, sums = outcome.get()
        assert names == NAMES
        assert sums == [6 + 4 * number for number in range(len(NAMES))]


def load_in_a_subgroup_only(rank: Rank, folder: str) -> list[str] | None:
    """Ranks 1 and 2 of four load; the others do not know of it and go on. Rank 0 serves the store, so it stays."""
    import torch.distributed as dist

    rank.init_process_group()
    pair = dist.new_group([1, 2])
    found = None
    if rank.rank in (1, 2):
        found = names_loaded(config_of(folder, tp=2), pair)
    else:
        with pytest.raises(ls.ConfigError, match="no member of"):
            names_loaded(config_of(folder, tp=2), pair)
    dist.barrier()
    dist.destroy_process_group()
    if found is not None:
        with pytest.raises(ls.ConfigError, match="was destroyed"):
            names_loaded(config_of(folder, tp=2), pair)
    return found


def test_a_subgroup_loads_alone_and_who_is_no_member_any_more_or_at_all_is_refused(folder: Path) -> None:
    found = [outcome.get() for outcome in run_ranks(load_in_a_subgroup_only, 4, str(folder))]
    assert found == [None, share(0, 2), share(1, 2), None]


# Stores and addresses ------------------------------------------------------------------------------------------------


def load_at(rank: Rank, folder: str, where: str) -> list[str]:
    import torch.distributed as dist
    from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

    place = os.path.join(folder, "..", f"store of {rank.address}")
    port = int(rank.address.rpartition(":")[2])
    group: Any = None
    if where == "a group with file://":
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank.rank, world_size=rank.world_size)
    elif where == "an IPv6 address":
        group = ls.Rendezvous(f"[::1]:{port}", rank.rank, rank.world_size, "n")
    else:
        if where.startswith("FileStore"):
            store: Any = FileStore(place, rank.world_size)
        else:
            store = TCPStore("127.0.0.1", port, None, is_master=rank.rank == 0, wait_for_workers=False)
        if where.endswith("PrefixStore"):
            store = PrefixStore("outer", PrefixStore("inner", store))
        group = ls.Rendezvous(store, rank.rank, rank.world_size, "n")
    config = config_of(folder, tp=2)
    found = [names_loaded(config, group) for _ in range(2)]
    assert found[0] == found[1]
    if group is None:
        dist.destroy_process_group()
    return found[0]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "where",
    [
        "a group with file://",
        pytest.param("an IPv6 address", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
        "TCPStore in a PrefixStore",
        "FileStore in a PrefixStore",
    ],
)
def test_ranks_meet_in_every_kind_of_store(folder: Path, where: str) -> None:
    found = [outcome.get() for outcome in run_ranks(load_at, 2, str(folder), where)]
    assert found == [share(0, 2), share(1, 2)]


@pytest.mark.parametrize("prefixed", [False, True])
async def test_ranks_of_one_process_meet_in_a_hash_store(folder: Path, prefixed: bool) -> None:
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

    store: Any = PrefixStore("p", HashStore()) if prefixed else HashStore()
    seats = [Seat(rank, 2, ls.Rendezvous(store, rank, 2, "n")) for rank in range(2)]
    config = config_of(folder, tp=2)

    async def work(seat: Seat) -> list[str]:
        async with seat.service(config) as service:
            return [name async for name, _ in service.iter_weights("target")]

    for _ in range(2):
        assert values(await all_of(seats, work)) == [share(0, 2), share(1, 2)]


# Launchers -----------------------------------------------------------------------------------------------------------


def load_as_mpirun_starts_it(rank: Rank, folder: str) -> tuple[int, str]:
    """The command line with the variables that Open MPI sets, and an address for all."""
    from loader_service.cli.app import run

    host, _, port = rank.address.rpartition(":")
    os.environ |= {
        "OMPI_COMM_WORLD_SIZE": str(rank.world_size),
        "OMPI_COMM_WORLD_RANK": str(rank.rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    with captured() as lines:
        code = run(["load", os.path.join(folder, "model.yaml"), "--load", "target", "--json"])
    return code, "".join(lines)


@contextmanager
def captured() -> Iterator[list[str]]:
    import contextlib
    import io

    lines: list[str] = []
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield lines
    lines.append(text.getvalue())


def test_the_command_line_under_mpirun(folder: Path) -> None:
    document = {"checkpoint": {"path": "."}, "mesh": {"tp": 2}, "loads": {"target": {"rules": EVERY_OTHER}}}
    (folder / "model.yaml").write_text(json.dumps(document))
    outcomes = run_ranks(load_as_mpirun_starts_it, 2, str(folder))
    (code, text), (other_code, nothing) = [outcome.get() for outcome in outcomes]
    assert (code, other_code, nothing) == (0, 0, "")
    assert [(rank["rank"], rank["world_size"], rank["tensors"]) for rank in json.loads(text)["ranks"]] == [
        (0, 2, 4),
        (1, 2, 4),
    ]
