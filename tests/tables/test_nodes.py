"""Ranks that cannot share memory, though they run on one kernel: each group has a table of its own, all right."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.hosts.host import need_hosts, two_hosts
from tests.support.checkpoints import Checkpoint
from tests.support.ranks import Rank, run_ranks
from tests.tables.making import (
    ROWS,
    SCALE,
    WEIGHT,
    assert_table,
    config_of,
    left_behind,
    reads_of_bytes,
    rules,
    shares,
)
from tests.tables.standing import stand_at

pytestmark = pytest.mark.processes

NEW_MOUNTS = 0x00020000
PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces")
Plain = tuple[Path, dict[str, Any], dict[str, str]]


def fill(rank: Rank, given: Plain) -> list[int]:
    """How many times this rank has read each row of a shared table, after all that was checked."""
    checkpoint, storage = Checkpoint(*given), FakeStorage(LocalStorage())
    config = config_of(checkpoint, rules("shared"), rank.world_size, reads={"access": "buffered"})
    group = ls.Rendezvous(rank.address, rank.rank, rank.world_size, "nodes")
    own = shares("equal", rank.world_size)[rank.rank]
    with ls.LoaderService.blocking(config, group, storage=storage) as service:
        for name in (SCALE, WEIGHT):
            assert_table(service.host_table("target", name), checkpoint, name, own, "shared")
    assert not left_behind()
    return reads_of_bytes([storage], checkpoint, SCALE)[::3]


def rows_read(found: list[list[int]], ranks: list[int]) -> list[int]:
    return [sum(found[rank][row] for rank in ranks) for row in range(ROWS)]


def leave_shared_memory(rank: int) -> None:
    """Rank 1 sees a /dev/shm of its own; kernel, network and user are the others'."""
    if rank != 1:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE), None) == 0
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=1m") == 0


@needs_root
def test_a_rank_with_a_private_shared_memory_has_a_table_of_its_own(checkpoint: Checkpoint) -> None:
    given = (checkpoint.folder, dict(checkpoint.tensors), dict(checkpoint.shard_of))
    found = [outcome.get() for outcome in run_ranks(fill, 3, given, enter=leave_shared_memory)]
    assert found[1] == [1] * ROWS
    assert rows_read(found, [0, 2]) == [1] * ROWS
    assert found[0][:12] == [1] * 12
    assert found[2][24:] == [1] * 13
    assert 0 < sum(found[0][12:24]) < 12, "rows of the rank that is elsewhere are divided among those who are here"


def test_ranks_in_separate_networks_form_groups_of_their_own(checkpoint: Checkpoint) -> None:
    need_hosts()
    given = (checkpoint.folder, dict(checkpoint.tensors), dict(checkpoint.shard_of))
    with two_hosts() as hosts:
        outcomes = run_ranks(fill, 4, given, enter=hosts.enter(2), address=hosts.address)
        found = [outcome.get() for outcome in outcomes]
        assert rows_read(found, [0, 1]) == rows_read(found, [2, 3]) == [1] * ROWS

        # The host of the second group dies: it is not who leads the ranks.
        address = hosts.first.address_at(hosts.port + 1)
        outcomes = run_ranks(
            fill_until_killed,
            4,
            given,
            enter=hosts.enter(2),
            address=address,
            on_mark=lambda rank, _text, pids: os.kill(pids[rank], signal.SIGKILL),
        )
    assert outcomes[2].exitcode == -signal.SIGKILL
    for rank in (0, 1, 3):
        error, failed, left = outcomes[rank].get()
        assert (error, failed, left) == ("RankFailure", 2, []), rank


def fill_until_killed(rank: Rank, given: Plain) -> tuple[str, int | None, list[str]]:
    if rank.rank == 2:
        stand_at(rank, "hand over")
    quick = {"timeout_s": 20, "start_timeout_s": 60, "grace_s": 5}
    config = config_of(Checkpoint(*given), rules("shared"), rank.world_size, agreement=quick)

    async def main() -> BaseException | None:
        async with ls.LoaderService(config, ls.Rendezvous(rank.address, rank.rank, 4, "killed")) as service:
            try:
                await service.host_table("target", WEIGHT)
            except ls.LoaderError as error:
                return error
            return None

    error = asyncio.run(main())
    return type(error).__name__, getattr(error, "rank", None), left_behind()
