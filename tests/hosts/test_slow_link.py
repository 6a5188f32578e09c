"""A link with 20 to 30 ms each way that loses three frames of a hundred: slow ranks, and nobody is taken for lost."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

import loader_service as ls
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.e2e import forty
from tests.e2e.forty import LAST
from tests.e2e.seats import header_end
from tests.hosts.holding import BOUND_S, RANKS, STARTED_WITHIN_S, config_of, meeting
from tests.hosts.host import need_hosts, two_hosts
from tests.support.checkpoints import Checkpoint, sha256
from tests.support.ranks import Rank, run_ranks

pytestmark = pytest.mark.processes

DELAY_S = (0.02, 0.03)
LOSS = 0.03
WHO_FAILS = 3


@pytest.fixture(autouse=True, scope="module")
def possible() -> None:
    need_hosts()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("hosts"))


def load_well_and_then_badly(rank: Rank, folder: str) -> tuple[dict[str, str], str, int | None, int | None]:
    """A whole load, and in the same service one that fails on one rank: what this rank got, and what it was told."""
    storage = FakeStorage(LocalStorage())
    # Several frames in a row may get lost, and TCP then waits for ever longer; but for less than the limit of silence.
    config = config_of(folder, agreement={"timeout_s": 15, "start_timeout_s": STARTED_WITHIN_S})

    async def main() -> tuple[dict[str, str], ls.LoaderError]:
        async with ls.LoaderService(config, meeting(rank), storage=storage) as service:
            async with service.open("target") as load:
                found = {name: sha256(tensor) async for name, tensor in load}
            if rank.rank == WHO_FAILS:
                path = os.path.join(folder, LAST)
                storage.fail(f"*{LAST}", errno.EIO, times=None, within=(header_end(path), os.stat(path).st_size))
            with pytest.raises(ls.LoaderError) as caught:
                async with service.open("target") as load:
                    async for _ in load:
                        pass
            return found, caught.value

    found, error = asyncio.run(main())
    return found, type(error).__name__, error.rank, error.errno


def test_ranks_across_a_slow_and_lossy_link_load_the_right_bytes_and_hear_of_a_failure(checkpoint: Checkpoint) -> None:
    with two_hosts("relay") as hosts:
        assert hosts.relay is not None
        hosts.relay.be_slow(delay_s=DELAY_S, loss=LOSS, seed=7)
        outcomes = run_ranks(
            load_well_and_then_badly,
            RANKS,
            str(checkpoint.folder),
            timeout_s=STARTED_WITHIN_S + BOUND_S,
            enter=hosts.enter(),
            address=hosts.address,
        )
        carried, lost = hosts.relay.counts
    wanted = {name: sha256(checkpoint.tensor(name)) for name in checkpoint.tensors}
    for outcome in outcomes:
        found, *told = outcome.get()
        assert found == wanted
        assert told == ["ReadError" if outcome.rank == WHO_FAILS else "RankFailure", WHO_FAILS, errno.EIO]
    assert carried > 100, "the ranks have met across the link"
    assert lost > 0
