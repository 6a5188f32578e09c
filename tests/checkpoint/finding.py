"""Runs discovery as the service does, with a recording storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.discovery import Discovered, IndexMode, discover, read_catalog
from loader_service.reading.fake import FakeStorage
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage

T = TypeVar("T")


def one_by_one(thunks: list[Callable[[], T]], /) -> list[T]:
    return [thunk() for thunk in thunks]


def in_threads(thunks: list[Callable[[], T]], /) -> list[T]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda thunk: thunk(), thunks))


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
        return read_catalog(where, index, handles=handles, storage=storage, run=in_threads)


def discovered_at(path: Path | tuple[str, ...], index: IndexMode = "advisory") -> Discovered:
    return discover(str(path) if isinstance(path, Path) else path, LocalStorage(), index=index)
