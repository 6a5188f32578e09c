"""Ranks that run different versions of the loader end at once, with words that say so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import loader_service as ls
from loader_service.agreement.messages import PROTOCOL_VERSION
from tests.support.ranks import Rank, run_ranks
from tests.support.shards import write_shard

pytestmark = pytest.mark.processes

VARIABLES = {
    "protocol": "loader_service.agreement.codec.PROTOCOL_VERSION",
    "planner": "loader_service.agreed.PLANNER_VERSION",
}


def load_as_version(rank: Rank, folder: str, what: str, who: int) -> None:
    if rank.rank == who:
        pytest.MonkeyPatch().setattr(VARIABLES[what], 7)
    config = ls.config_from_dict({"checkpoint": {"path": folder}, "loads": {"target": {}}, "agreement": {"grace_s": 1}})

    async def main() -> None:
        group = ls.Rendezvous(rank.address, rank.rank, rank.world_size, "versions")
        async with ls.LoaderService(config, group) as service, service.open("target"):
            pass

    asyncio.run(main())


@pytest.mark.parametrize(("what", "who"), [("protocol", 0), ("protocol", 1), ("planner", 1)])
def test_different_versions_are_named_on_every_rank(tmp_path: Path, what: str, who: int) -> None:
    write_shard(tmp_path / "a.safetensors", {"w": ("U8", (4,), b"abcd")})
    messages = set()
    for outcome in run_ranks(load_as_version, 2, str(tmp_path), what, who):
        assert outcome.error is not None
        assert (outcome.error.exit_code, outcome.error.phase) == (4, "config"), outcome.error
        messages.add(outcome.error.message)
    (message,) = messages
    if what == "planner":
        assert "ranks 0 and 1 differ in config: the planner has version 1 on rank 0 and 7 on rank 1" in message
        assert "install the same version of the loader on all ranks" in message
    else:
        assert " cannot be read: " in message
        assert f"is in version 7 of the protocol, this rank speaks version {PROTOCOL_VERSION}" in message or (
            f"is in version {PROTOCOL_VERSION} of the protocol, this rank speaks version 7" in message
        )
