"""What ends the work of one rank between its load's success and the reports: told to the others, by it alone, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from loader_service.agreement.group import Rendezvous
from loader_service.cli import load, ranks
from loader_service.cli.load import LoadOptions, _LoadProcess
from loader_service.config.yaml_file import load_config
from loader_service.errors import FailureRecord, RankFailure
from loader_service.service import LoaderService
from tests.cli.support import write_config, write_small_checkpoint

SETTINGS: dict[str, Any] = {"agreement": {"timeout_s": 20, "start_timeout_s": 60, "grace_s": 2}}
NO_ROOM = FailureRecord("MemoryError", "no room", 1, "finish")
CANCELLED = FailureRecord("LoadCancelledError", "interrupted by SIGTERM", 1, "finish")

Patch = pytest.MonkeyPatch


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[_LoadProcess]]:
    """Two ranks' loads in this process, of one real checkpoint, that meet in one real store."""
    path = write_config(tmp_path / "c.yaml", write_small_checkpoint(tmp_path / "checkpoint"), ranks=2, **SETTINGS)
    options = LoadOptions(path, "all", False, tmp_path / "m.json", None, "crc32", as_json=True, debug=False)
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    address, config = f"127.0.0.1:{server.port}", load_config(path)
    places = [ranks.Place(rank, 2, Rendezvous(address, rank, 2, "after", served=True)) for rank in (0, 1)]
    made = [_LoadProcess(options, place, config, "all", None) for place in places]
    yield made
    for one in made:
        one._threads.stop()
    del server


def in_the_manifest(patch: Patch) -> None:
    def write(path: Path, entries: Mapping[str, object]) -> None:
        if path.name == "m.rank1.json":
            raise MemoryError("no room")

    patch.setattr(load, "write_manifest", write)


def in_leaving_the_service(patch: Patch) -> None:
    left = LoaderService.__aexit__

    async def leave(self: LoaderService, *why: Any) -> None:
        rank = self.rank
        await left(self, *why)
        if rank == 1:
            raise asyncio.CancelledError("interrupted by SIGTERM")

    patch.setattr(LoaderService, "__aexit__", leave)


def before_taking_part(patch: Patch) -> None:
    gathered = ranks.gather

    async def gather(place: ranks.Place, *args: Any, **more: Any) -> list[dict[str, object]]:
        if place.rank == 1:
            raise MemoryError("no room")
        return await gathered(place, *args, **more)

    patch.setattr(ranks, "gather", gather)


def while_gathering(patch: Patch) -> None:
    def pack(document: Mapping[str, object], limit_chars: int) -> str:
        if document["rank"] == 1:
            raise MemoryError("no room")
        return "{}"

    patch.setattr(ranks, "_packed_to_fit", pack)


@pytest.mark.parametrize(
    ("fault", "record", "telling"),
    [
        (in_the_manifest, NO_ROOM, [1]),
        (in_leaving_the_service, CANCELLED, [1]),
        (before_taking_part, NO_ROOM, [1]),
        (while_gathering, NO_ROOM, []),
    ],
)
async def test_an_end_after_the_load_is_told_once_by_its_rank(
    fault: Callable[[Patch], None],
    record: FailureRecord,
    telling: list[int],
    processes: list[_LoadProcess],
    monkeypatch: Patch,
) -> None:
    told: list[int] = []
    tell = ranks.fail_reports

    async def fail_reports(place: ranks.Place, *args: Any, **more: Any) -> None:
        told.append(place.rank)
        await tell(place, *args, **more)

    monkeypatch.setattr(ranks, "fail_reports", fail_reports)
    fault(monkeypatch)
    async with asyncio.timeout(60):
        first, second = await asyncio.gather(*(one._work() for one in processes), return_exceptions=True)
    assert isinstance(first, RankFailure)
    assert first.record() == record
    assert isinstance(second, MemoryError if record.error == "MemoryError" else asyncio.CancelledError)
    assert told == telling
