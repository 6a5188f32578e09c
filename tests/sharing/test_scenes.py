"""Ranks as real processes that share reads, to one of which something happens: one cause, or no harm, for all."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

import loader_service as ls
from loader_service.memory.admission import Room
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from loader_service.report import LoadReport
from tests.agreement.folders import heard, told
from tests.e2e.doors import Oops, check_logs
from tests.e2e.forty import LAST
from tests.e2e.seats import payload_bytes_read, serve
from tests.sharing.failing import (
    FIRST,
    SLOT_BYTES,
    Seen,
    config_of,
    go_through,
    progress_of,
    seen,
    sharing_of,
    take_in_steps,
    wait_until,
    with_remains,
    write,
    written,
)
from tests.support.checkpoints import Checkpoint, sha256
from tests.support.ranks import Rank, run_teams

pytestmark = pytest.mark.processes

RANKS, WHO = 3, 1
OWN_COPIES = "each has its own copy"
LITTLE_MEMORY = "one has little memory"
STOPS = "one stops consuming"
BUSY = "one cannot read and is busy"
NOT_BEGUN = "one cannot read and has not begun"
RAISES = "one raises"
NOT_AHEAD = "one cannot read ahead"
CHANGES = "a file changes"
SCENES: dict[str, tuple[str, str]] = {
    OWN_COPIES: ("staging", "iterate"),
    LITTLE_MEMORY: ("staging", "iterate"),
    STOPS: ("staging", "iterate"),
    BUSY: ("staging", "iterate"),
    NOT_BEGUN: ("staging", "batches"),
    RAISES: ("staging", "into"),
    NOT_AHEAD: ("page_cache", "iterate"),
    CHANGES: ("staging", "iterate"),
}


@dataclass(frozen=True)
class Played:
    """What came of a scene on one rank; `digest` is of all tensors that it got."""

    seen: Seen
    digest: str
    report: LoadReport
    read_bytes: int


class Actor:
    """One rank in a scene."""

    def __init__(self, rank: Rank, folder: str, scene: str) -> None:
        self.rank = rank
        self.scene = scene
        self.folder = folder
        self.way, self.form = SCENES[scene]
        self.checkpoint = written(os.path.join(folder, scene, str(rank.rank) if scene == OWN_COPIES else ""))
        self.storage = FakeStorage(LocalStorage())
        self.digest = hashlib.sha256()
        self.struck = rank.rank == WHO
        if self.struck and scene in (BUSY, NOT_BEGUN):
            within = (SLOT_BYTES, SLOT_BYTES + 1)  # in the first block that it reads
            self.gate = self.storage.block(f"*{FIRST}", within=within, times=None)
            self.storage.fail(f"*{FIRST}", errno.EIO, within=within, times=None)
        if self.struck and scene == NOT_AHEAD:
            self.gate = self.storage.block("*", operation="read ahead")
            self.storage.fail("*", errno.EIO, operation="read ahead", times=None)

    async def play(self, address: str) -> Played:
        group = ls.Rendezvous(address, self.rank.rank, RANKS, self.rank.address, served=True)
        agreement = {"timeout_s": 120, "start_timeout_s": 120, "grace_s": 5}
        config = config_of(self.checkpoint, self.way, reads={"retries": 0}, agreement=agreement)
        loads: list[ls.Load] = []

        async def body(load: ls.Load) -> None:
            loads.append(load)
            await self.be_in(service, load)

        async with ls.LoaderService(config, group, storage=self.storage) as service:
            if self.struck and self.scene == LITTLE_MEMORY:
                room = Room("", 1 << 30, 1 << 20)
                assert service._engine is not None
                service._engine.memory_rooms = lambda: (room,)
            found = seen(await go_through(service, body))
        return Played(found, self.digest.hexdigest(), loads[0].report, payload_bytes_read(self.storage))

    async def be_in(self, service: ls.LoaderService, load: ls.Load) -> None:
        watching: asyncio.Future[None] | None = None
        if self.scene == STOPS and not self.struck:
            watching = asyncio.ensure_future(asyncio.to_thread(self.wait_for_its_name, service, load))
        try:
            await take_in_steps(load, self.form, self.checkpoint, partial(self.step, service), self.take)
        except ls.LoaderError:
            self.tell()
            raise
        if watching is not None:
            await watching

    def wait_for_its_name(self, service: ls.LoaderService, load: ls.Load) -> None:
        wait_until(lambda: load.waits_for == WHO)
        wait_until(lambda: f"waiting for rank {WHO}" in progress_of(service))
        self.tell()

    def take(self, name: str, tensor: torch.Tensor) -> None:
        self.digest.update(f"{name} {sha256(tensor)}".encode())

    def step(self, service: ls.LoaderService, taken: int) -> None:
        """In the consumer's body, which blocks this rank's loop, as consumers do."""
        if not self.struck:
            return
        if (self.scene, taken) == (STOPS, 2):
            self.others_know()
        if (self.scene, taken) in ((BUSY, 1), (NOT_BEGUN, 0)):
            self.gate.release()
            self.others_know()
        if (self.scene, taken) == (NOT_AHEAD, 5):
            self.gate.release()
            ahead = sharing_of(service)._ahead
            wait_until(lambda: ahead is not None and ahead.over)
        if self.scene == RAISES:
            raise Oops(taken, wanted=self.form)
        if (self.scene, taken) == (CHANGES, 1):
            path = self.checkpoint.folder / LAST
            os.truncate(path, path.stat().st_size // 2)

    def tell(self) -> None:
        told(self.folder, f"{self.scene} {self.rank.rank}")

    def others_know(self) -> None:
        for rank in range(RANKS):
            if rank != WHO:
                heard(self.folder, f"{self.scene} {rank}")


def play(rank: Rank, address: str, folder: str, scene: str) -> Played:
    actor = Actor(rank, folder, scene)
    played = asyncio.run(actor.play(address))
    return replace(played, seen=with_remains(played.seen))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def played(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Played]]:
    """What every rank saw in every scene: all are played at once."""
    folder = tmp_path_factory.mktemp("played")
    for scene in SCENES:
        for rank in range(RANKS if scene == OWN_COPIES else 1):
            shutil.copytree(checkpoint.folder, folder / scene / (str(rank) if scene == OWN_COPIES else ""))
    cases = [(f"127.0.0.1:{serve().port}", str(folder), scene) for scene in SCENES]
    teams = run_teams(play, RANKS, cases, timeout_s=60)
    return {scene: [outcome.get() for outcome in outcomes] for scene, outcomes in zip(SCENES, teams, strict=True)}


@pytest.mark.parametrize("scene", SCENES)
def test_all_ranks_have_the_same_log_and_nothing_is_left(played: dict[str, list[Played]], scene: str) -> None:
    ranks = [one.seen for one in played[scene]]
    assert [one.left for one in ranks] == [()] * RANKS
    check_logs([one.log for one in ranks])
    assert len({one.verdict for one in ranks}) == 1


@pytest.mark.parametrize(
    ("scene", "way"), [(OWN_COPIES, "none"), (LITTLE_MEMORY, "none"), (STOPS, "staging"), (NOT_AHEAD, "page_cache")]
)
def test_what_is_no_failure_gives_all_ranks_all_bytes(
    checkpoint: Checkpoint, played: dict[str, list[Played]], scene: str, way: str
) -> None:
    whole = hashlib.sha256()
    for name in checkpoint.tensors:
        whole.update(f"{name} {sha256(checkpoint.tensor(name))}".encode())
    for one in played[scene]:
        assert one.seen.error is None, one.seen
        assert one.digest == whole.hexdigest()
        sharing = one.report.policies["sharing"]
        assert (sharing.requested, sharing.effective) == (SCENES[scene][0], way)
        if scene != STOPS:
            assert one.read_bytes == checkpoint.payload_bytes, "each byte once, for itself"


def test_why_ranks_do_not_share_is_said_by_all(played: dict[str, list[Played]]) -> None:
    for scene, why in (
        (OWN_COPIES, "ranks 0 and 1 of one node see different files"),
        (LITTLE_MEMORY, "3 ranks (lowest: 0) want 786432 bytes of host memory, but the machine has 1.00 MiB free"),
    ):
        for one in played[scene]:
            assert why in one.report.policies["sharing"].reason
            assert any(why in line for line in one.report.fallbacks)


def test_read_ahead_that_fails_is_said_by_its_rank(played: dict[str, list[Played]]) -> None:
    for rank, one in enumerate(played[NOT_AHEAD]):
        said = any("reading ahead for the node ended early" in line for line in one.report.fallbacks)
        assert said == one.report.policies["sharing"].reason.startswith("degraded: ") == (rank == WHO)


@pytest.mark.parametrize(
    ("scene", "cause"), [(BUSY, "ReadError"), (NOT_BEGUN, "ReadError"), (RAISES, "Oops"), (CHANGES, "CheckpointError")]
)
def test_what_is_a_failure_is_one_cause_for_all(played: dict[str, list[Played]], scene: str, cause: str) -> None:
    for rank, one in enumerate(played[scene]):
        verdict = one.seen.verdict
        assert verdict is not None
        assert (verdict.error, verdict.phase) == (cause, "read")
        if scene == CHANGES:  # which any of them may find first, and each for itself
            assert Path(verdict.path or "").name == LAST
            assert one.seen.error in ("RankFailure", "CheckpointError")
            continue
        assert verdict.rank == WHO
        assert one.seen.error == (cause if rank == WHO else "RankFailure")
