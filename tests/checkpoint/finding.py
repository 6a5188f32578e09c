"""Runs discovery as the service does, with a recording storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.discovery import Discovered, IndexMode, Kept, discover, read_catalog
from loader_service.reading.fake import FakeStorage
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.reader import Storage
from loader_service.reading.threads import ReadPool


def read_with(
    where: str | tuple[str, ...],
    index: IndexMode = "advisory",
    *,
    handles: HandleCache,
    storage: Storage,
    threads: int = 8,
    retries: int = 3,
    kept: Kept | None = None,
) -> Catalog:
    """`read_catalog` with so many threads of its own."""
    pool = ReadPool(threads)
    try:
        return read_catalog(where, index, handles=handles, storage=storage, threads=pool, retries=retries, kept=kept)
    finally:
        assert not pool.shutdown(30)


@contextmanager
def recording() -> Iterator[tuple[FakeStorage, HandleCache]]:
    """A storage that counts and its handles; everything that was opened must be closed afterwards."""
    storage = FakeStorage(LocalStorage())
    handles = HandleCache(storage)
    try:
        yield storage, handles
    finally:
        handles.close()
        assert storage.open_now == 0


def catalog_at(path: Path | tuple[str, ...], index: IndexMode = "advisory") -> Catalog:
    with recording() as (storage, handles):
        where = str(path) if isinstance(path, Path) else path
        return read_with(where, index, handles=handles, storage=storage)


def discovered_at(path: Path | tuple[str, ...], index: IndexMode = "advisory") -> Discovered:
    return discover(str(path) if isinstance(path, Path) else path, LocalStorage(), index=index)
