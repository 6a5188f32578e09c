"""Several ranks in one process: a service each, on loops of their own, that meet in one real store.

Everything but the processes is real, and a test sees each rank's storage and its very exception. What needs processes
(signals, deaths) is in `test_processes.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.reading.fake import FakeStorage, ReadCall
from loader_service.reading.local import LocalStorage

T = TypeVar("T")

WATCHDOG_S = 60.0
_nonces = itertools.count()


@dataclass(frozen=True)
class Seat:
    """One rank: who it is, where it meets the others, and the storage that it reads through."""

    rank: int
    world_size: int
    group: ls.Rendezvous
    storage: FakeStorage = field(default_factory=lambda: FakeStorage(LocalStorage()))

    def service(self, config: ServiceConfig, coords: Mapping[str, int] | None = None) -> ls.LoaderService:
        return ls.LoaderService(config, self.group, coords, storage=self.storage)


@cache
def serve() -> TCPStore:
    """The store of all seats; its server lives as long as the process."""
    return TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)


def make_seats(world_size: int) -> list[Seat]:
    nonce = f"seats {next(_nonces)}"
    return [Seat(rank, world_size, ls.Rendezvous(serve(), rank, world_size, nonce)) for rank in range(world_size)]


async def all_of(seats: Sequence[Seat], work: Callable[[Seat], Awaitable[T]]) -> list[T | BaseException]:
    """Runs `work` on every rank at once; what each returned or raised, by rank. A watchdog bounds it."""
    async with asyncio.timeout(WATCHDOG_S):
        return await asyncio.gather(*(work(seat) for seat in seats), return_exceptions=True)


def values(results: Sequence[T | BaseException]) -> list[T]:
    """The results, all of them values: the first exception among them is raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def errors(results: Sequence[object]) -> list[ls.LoaderError]:
    """The results, all of them the loader's errors."""
    found = [result for result in results if isinstance(result, ls.LoaderError)]
    others = [result for result in results if not isinstance(result, ls.LoaderError)]
    assert not others, others
    return found


def payload_reads(storage: FakeStorage, pattern: str = "*") -> list[ReadCall]:
    """The reads that touched a byte after a shard's header."""
    return [
        read
        for read in storage.reads
        if read.path.endswith(".safetensors") and read in storage.reads_of(pattern, from_byte=header_end(read.path))
    ]


def payload_bytes_read(storage: FakeStorage) -> int:
    """Bytes after the headers that were read, each as often as it was."""
    return sum(min(read.nbytes, read.offset + read.nbytes - header_end(read.path)) for read in payload_reads(storage))


def header_reads(storage: FakeStorage, path: str) -> int:
    """How many times the first bytes of a shard were read."""
    return sum(read.path == path and read.offset == 0 for read in storage.reads)


def header_end(path: str) -> int:
    """Where the payload of a shard begins."""
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
