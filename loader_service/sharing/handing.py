"""One memory file for ranks of a node: made by the lowest of them, which hands it to the others over the mesh."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from typing import Final

from loader_service.agreement.node_mesh import Mesh
from loader_service.errors import OUT_OF_FILES, LoaderError, MemoryLimitError
from loader_service.memory.shared import SharedMemory

CHANNEL: Final = 1  # of the mesh
_HANDED: Final = b"memory"


async def shared_memory(mesh: Mesh, ranks: Sequence[int], nbytes: int, within_s: float, instead: str) -> SharedMemory:
    """Collective over `ranks`, ascending, which `mesh` connects: memory of `nbytes` of which nothing is reserved yet.

    Raises MemoryLimitError, and LoaderError if the lowest rank has not handed it over `within_s`; both say what to do
    `instead`. If another rank fails or dies, this waits until it is cancelled.
    """
    if mesh.rank != ranks[0]:
        return SharedMemory.received(await _handed_over(mesh, ranks[0], within_s, instead), nbytes)
    shared = SharedMemory.create(nbytes)
    try:
        for rank in ranks[1:]:  # one that is gone is found out by its death
            mesh.send(rank, CHANNEL, _HANDED, shared.descriptor)
    except BaseException as error:
        shared.close()
        if isinstance(error, OSError):
            raise MemoryLimitError(
                f"memory that ranks of this node share could not be handed over ({error.strerror}): raise the limit of "
                f"open files (ulimit -n), or {instead}",
                errno=error.errno,
            ) from error
        raise
    return shared


async def _handed_over(mesh: Mesh, host: int, within_s: float, instead: str) -> int:
    handed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def take(rank: int, data: bytes, descriptor: int | None) -> None:
        expected = rank == host and data == _HANDED and not handed.done()
        if expected and descriptor is not None:
            handed.set_result(descriptor)
        elif expected:
            handed.set_exception(_lost_on_the_way(host))
        elif descriptor is not None:
            os.close(descriptor)

    mesh.listen(CHANNEL, take)
    try:
        async with asyncio.timeout(within_s):
            return await handed
    except BaseException as error:
        if handed.done() and not handed.cancelled() and handed.exception() is None:
            os.close(handed.result())
        if isinstance(error, TimeoutError):
            text = f"rank {host} has not handed over the memory that ranks of this node share for {within_s:g} s"
            raise LoaderError(f"{text}: {instead}") from None
        raise
    finally:
        mesh.ignore(CHANNEL)


def _lost_on_the_way(host: int) -> MemoryLimitError:
    return MemoryLimitError(
        f"the memory that rank {host} hands to the ranks of this node did not arrive, since this process may open no "
        f"more files: {OUT_OF_FILES[errno.EMFILE]}",
        errno=errno.EMFILE,
    )
