"""Reads a checkpoint's headers for commands that need no service: `inspect`, `plan` and the demo's tables."""

from __future__ import annotations

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.discovery import read_catalog
from loader_service.config.schema import CheckpointConfig
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.threads import ReadPool

_THREADS = 8


def read_headers(checkpoint: CheckpointConfig, *, retries: int) -> Catalog:
    """The checkpoint's catalog. Blocking; an interrupt ends the wait, also for a read that never returns."""
    storage = LocalStorage()
    handles = HandleCache(storage)
    threads = ReadPool(_THREADS, name="loader-headers")

    try:
        return read_catalog(
            checkpoint.path, checkpoint.index, handles=handles, storage=storage, threads=threads, retries=retries
        )
    finally:
        threads.stop()
        handles.close()
