"""Reads a checkpoint's files once, from their first byte to their last, and hashes files and tensors meanwhile."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, Final

import numpy as np

from loader_service.checkpoint.catalog import Catalog
from loader_service.cli.checkpoint_manifest import CheckpointManifest, StoredFile, StoredTensor, digits_of, stored_cuts
from loader_service.cli.checksums import Bytes, running_parts
from loader_service.memory.allocators import allocate_host
from loader_service.reading.file_range import FileRange
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.ranges import RangeReader
from loader_service.reading.threads import ReadPool

CHUNK_BYTES: Final = 16 << 20
MOST_FILES: Final = 8  # at once, with two chunks of memory each
_JOBS_A_FILE: Final = 4  # the next chunk is read, while files and tensors are hashed in two ways
_LOOK_EVERY_S: Final = 0.05


def hash_checkpoint(
    catalog: Catalog, *, retries: int, tick: Callable[[int], None] = lambda _: None, chunk_bytes: int = CHUNK_BYTES
) -> CheckpointManifest:
    """Every file's and every tensor's checksums. Blocking; `tick` is called often meanwhile, with the bytes so far.

    Raises as reads do, and CheckpointError where a file is not, or is no longer, the one whose header is in `catalog`.
    An interrupt ends the wait, also for a read that never returns.
    """
    handles = HandleCache(LocalStorage())
    reader = RangeReader(handles, access="auto", retries=retries)
    files = max(1, min(len(catalog.shards), MOST_FILES, os.cpu_count() or 1))
    workers = ReadPool(files, name="loader-manifest")
    jobs = ReadPool(_JOBS_A_FILE * files, name="loader-hash")
    hashing = _Hashing(catalog, handles, reader, jobs, chunk_bytes)
    try:
        pending = [workers.submit(hashing.file, number) for number in range(len(catalog.shards))]
        while True:
            done, missing = wait(pending, timeout=_LOOK_EVERY_S, return_when=FIRST_EXCEPTION)
            tick(hashing.done_bytes)
            failed = next((future for future in done if future.exception() is not None), None)
            if failed is not None or not missing:
                break
        if failed is not None:
            failed.result()
        found = [future.result() for future in pending]
    finally:
        for pool in (workers, jobs):
            pool.stop()
        handles.close()
    stored = {shard.name: file for shard, (file, _) in zip(catalog.shards, found, strict=True)}
    return CheckpointManifest(stored, {name: tensor for _, tensors in found for name, tensor in tensors.items()})


class _Hashing:
    """What all files need. `file` is run by one thread for each file, which gives its work to the threads of `jobs`."""

    def __init__(
        self, catalog: Catalog, handles: HandleCache, reader: RangeReader, jobs: ReadPool, chunk_bytes: int
    ) -> None:
        self._catalog = catalog
        self._handles = handles
        self._reader = reader
        self._jobs = jobs
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self.done_bytes = 0

    def file(self, number: int) -> tuple[StoredFile, dict[str, StoredTensor]]:
        """The checksums of one file, and of the tensors in it that count."""
        shard = self._catalog.shards[number]
        size = shard.identity.size_bytes
        whole, tensors = hashlib.sha256(), _FileTensors(self._catalog, number)
        at = 0
        for data in self._chunks(number):
            work = [
                self._jobs.submit(whole.update, data.data),
                self._jobs.submit(tensors.hash, at, data),
                self._jobs.submit(tensors.check, at, data),
            ]
            for job in work:
                job.result()
            at += len(data)
            with self._lock:
                self.done_bytes += len(data)
        self._handles.verify(shard.path, shard.identity)
        return StoredFile(size, whole.hexdigest()), tensors.stored()

    def _chunks(self, number: int) -> Iterator[Bytes]:
        """The file's bytes in order; the next ones are read while some are worked on, which are there until then."""
        shard = self._catalog.shards[number]
        size = shard.identity.size_bytes
        memories = [allocate_host(min(self._chunk_bytes, size)).memoryview for _ in range(2)]

        def read(start: int) -> Future[memoryview]:
            view = memories[start // self._chunk_bytes % 2][: min(self._chunk_bytes, size - start)]
            where = FileRange(shard.path, shard.identity, start)
            return self._jobs.submit(partial(self._read, where, view), path=shard.path, offset=start)

        reading = read(0)
        for start in range(0, size, self._chunk_bytes):
            view = reading.result()
            if start + self._chunk_bytes < size:
                reading = read(start + self._chunk_bytes)
            yield np.frombuffer(view, np.uint8)

    def _read(self, where: FileRange, view: memoryview) -> memoryview:
        self._reader.read(where, view)
        return view


class _FileTensors:
    """The tensors of one file while its bytes pass. `hash` and `check` may run side by side."""

    def __init__(self, catalog: Catalog, number: int) -> None:
        self._catalog = catalog
        self._ids = np.flatnonzero(catalog.shard_ids == number)
        self._starts, self._stops = catalog.starts[self._ids], catalog.stops[self._ids]
        self._hashes: list[Any] = [hashlib.sha256() for _ in self._ids]  # hashlib has no type for it
        cuts = [stored_cuts(catalog.dtype(i).code, catalog.shapes[i]) for i in self._ids.tolist()]
        self._cuts = cuts
        self._parts = [[running_parts(each, range(each.parts), 0, each.size) for each in some] for some in cuts]

    def hash(self, at: int, data: Bytes) -> None:
        for i, _, part in self._within(at, data):
            self._hashes[i].update(part.data)

    def check(self, at: int, data: Bytes) -> None:
        for i, offset, part in self._within(at, data):
            for running in self._parts[i]:
                running.update(part, offset, range(len(running.values)))

    def _within(self, at: int, data: Bytes) -> Iterator[tuple[int, int, Bytes]]:
        """The tensors that have some of the file's bytes from `at` on: which, from where in it on, the bytes."""
        stop = at + len(data)
        first, last = np.searchsorted(self._stops, at, "right"), np.searchsorted(self._starts, stop)
        for i in range(int(first), int(last)):
            start = max(at, int(self._starts[i]))
            part = data[start - at : int(self._stops[i]) - at]
            if len(part):
                yield i, start - int(self._starts[i]), part

    def stored(self) -> dict[str, StoredTensor]:
        catalog = self._catalog
        return {
            catalog.names[tensor]: StoredTensor(
                catalog.shards[int(catalog.shard_ids[tensor])].name,
                catalog.dtype(tensor).code,
                catalog.shapes[tensor],
                self._hashes[i].hexdigest(),
                {cuts.dim: digits_of(run.values) for cuts, run in zip(self._cuts[i], self._parts[i], strict=True)},
            )
            for i, tensor in enumerate(self._ids.tolist())
        }
