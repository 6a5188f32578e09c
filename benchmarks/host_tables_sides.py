"""The measured sides of the host table benchmark, each as a rank's process runs it, and the table that they load."""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import loader_service as ls
from benchmarks import limits
from benchmarks.common import MIB, huge_buffer
from benchmarks.ranks import Rank
from loader_service.memory.tensors import raw_memory

TABLE = "model.layers.1.engram.table.weight"
ROW_BYTES = 1280
OTHER_THREADS = 8
OTHER_CHUNK_BYTES = 64 * MIB
RING_READS_A_PROCESS = limits.DIRECT_THREADS
RING_READS_A_MACHINE = 8
COMPARE_BYTES = 16 * MIB
PATTERN_BYTES = 16 * MIB + 8 * 1021  # a chunk that was read from another chunk's place has other bytes

_SMALL = {"model.embed.weight": ("BF16", [3, 5, 4]), "model.norm.weight": ("F32", [8])}
FIRST_TABLE = "model.norm.weight"
_SCALE = "model.layers.1.engram.table.scale"
_ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of F8_E4M3 rows in a safetensors file, and where its bytes lie."""

    path: Path
    offset: int
    rows: int

    @property
    def nbytes(self) -> int:
        return self.rows * ROW_BYTES

    def rows_of(self, rank: int, ranks: int) -> tuple[int, int]:
        """A rank's rows in the equal split."""
        return self.rows * rank // ranks, self.rows * (rank + 1) // ranks

    def bytes_of(self, rank: int, ranks: int) -> tuple[int, int]:
        """Where they lie in the file."""
        start, stop = self.rows_of(rank, ranks)
        return self.offset + start * ROW_BYTES, self.offset + stop * ROW_BYTES


def make_table(folder: Path, wanted_bytes: int) -> Table:
    """Writes the file unless it is there already; all of it is on the disk on return. Small tensors lie before the
    table and its scales behind it, so that its offset is a multiple of 8 and of nothing larger."""
    rows = wanted_bytes // ROW_BYTES
    tensors = {**_SMALL, TABLE: ("F8_E4M3", [rows, ROW_BYTES]), _SCALE: ("F8_E8M0", [rows])}
    header, begins, at = {}, {}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        begins[name], at = at, at + nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 16)
    table = Table(folder / "model.safetensors", 8 + len(text) + begins[TABLE], rows)
    file_bytes = 8 + len(text) + at
    if not (table.path.exists() and table.path.stat().st_size == file_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        _write(table.path, text, file_bytes)
    return table


def _write(path: Path, header: bytes, file_bytes: int) -> None:
    pattern = random.Random(7).randbytes(PATTERN_BYTES)
    with path.open("wb") as file:
        left = file_bytes - file.write(len(header).to_bytes(8, "little") + header)
        while left:
            left -= file.write(pattern[: min(left, len(pattern))])
        file.flush()
        os.fsync(file.fileno())


# What a rank's process measures


@dataclass(frozen=True, slots=True)
class Took:
    """One rank's part of a run: when it began and was done (monotonic), and its processor time meanwhile. `first_s`:
    how long `host_table` took before, for a table of a few bytes, when the ranks had not yet met."""

    began_s: float
    done_s: float
    cpu_s: float
    how: str = ""
    first_s: float | None = None


Check = Callable[[], str]  # what is wrong with the bytes; empty if nothing is


def run_side(rank: Rank, side: str, table: Table, check: bool) -> None:
    """A rank's process: tells that it is ready, starts when told, tells what it took, and what is wrong with it."""
    SIDES[side](Seat(rank, table, check))


@dataclass(frozen=True, slots=True)
class Seat:
    """What a side has on its rank."""

    rank: Rank
    table: Table
    check: bool

    @property
    def rows(self) -> tuple[int, int]:
        return self.table.rows_of(self.rank.rank, self.rank.world_size)

    @property
    def bytes_in_file(self) -> tuple[int, int]:
        return self.table.bytes_of(self.rank.rank, self.rank.world_size)

    def clock(self, work: Callable[[], Any]) -> tuple[Any, Took]:
        """Runs the work once everyone is ready."""
        self.rank.tell("ready")
        self.rank.hear()
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        result = work()
        return result, Took(began_s, time.monotonic(), time.process_time() - began_cpu_s)

    def finish(self, took: Took, wrong: Check) -> None:
        """Tells it, and once all ranks are done whether the bytes are right."""
        self.rank.tell("took", took)
        self.rank.hear()
        self.rank.tell("wrong", wrong() if self.check else "")


def compare(path: Path, start: int, found: memoryview) -> str:
    """What differs from the file's bytes from `start` on; empty if nothing does."""
    buffer = bytearray(min(COMPARE_BYTES, max(1, found.nbytes)))
    with path.open("rb", buffering=0) as file:
        for at in range(0, found.nbytes, len(buffer)):
            part = found[at : at + len(buffer)]
            file.seek(start + at)
            right = memoryview(buffer)[: file.readinto(buffer)][: part.nbytes]
            if not np.array_equal(np.frombuffer(right, np.uint8), np.frombuffer(part, np.uint8)):
                return f"other bytes between {start + at} and {start + at + part.nbytes}"
    return ""


# (a), (b)


Allocate = Callable[[int], torch.Tensor]


def _huge(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(huge_buffer(nbytes), dtype=torch.uint8)


def _of_torch(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def mapped_into_huge(seat: Seat) -> None:
    _mapped(seat, _huge)


def mapped_into_torch(seat: Seat) -> None:
    _mapped(seat, _of_torch)


def _mapped(seat: Seat, allocate: Allocate) -> None:
    """The rows copied out of the memory-mapped tensor. Threads as a launcher gives them: the cores shared out."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // seat.rank.world_size))
    start, stop = seat.rows
    with safe_open(seat.table.path, framework="pt", device="cpu") as file:
        file.get_tensor(FIRST_TABLE).clone()

    def work() -> torch.Tensor:
        destination = allocate((stop - start) * ROW_BYTES).view(torch.float8_e4m3fn).view(-1, ROW_BYTES)
        with safe_open(seat.table.path, framework="pt", device="cpu") as file:
            destination.copy_(file.get_slice(TABLE)[start:stop])
        return destination

    destination, took = seat.clock(work)
    seat.finish(took, lambda: compare(seat.table.path, seat.bytes_in_file[0], raw_memory(destination)))


def buffered_into_huge(seat: Seat) -> None:
    _buffered(seat, _huge)


def buffered_into_torch(seat: Seat) -> None:
    _buffered(seat, _of_torch)


def _buffered(seat: Seat, allocate: Allocate) -> None:
    start, stop = seat.bytes_in_file

    def work() -> torch.Tensor:
        destination = allocate(stop - start)
        read_in_threads(seat.table.path, start, raw_memory(destination))
        return destination

    destination, took = seat.clock(work)
    seat.finish(took, lambda: compare(seat.table.path, start, raw_memory(destination)))


def read_in_threads(path: Path, start: int, view: memoryview) -> None:
    """8 threads of buffered preadv, 64 MiB a chunk, the page cache dropped behind each."""
    chunks = iter(range(0, view.nbytes, OTHER_CHUNK_BYTES))
    lock = threading.Lock()
    errors: list[BaseException] = []
    descriptor = os.open(path, os.O_RDONLY)

    def read() -> None:
        try:
            while True:
                with lock:
                    at = next(chunks, None)
                if at is None:
                    return
                part = view[at : at + OTHER_CHUNK_BYTES]
                _read_fully(descriptor, start + at, part)
                os.posix_fadvise(descriptor, start + at, part.nbytes, os.POSIX_FADV_DONTNEED)
        except BaseException as error:  # noqa: BLE001 - raised below, by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(OTHER_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    if errors:
        raise errors[0]


def _read_fully(descriptor: int, start: int, view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        got = os.preadv(descriptor, [view[done:]], start + done)
        if got == 0:
            raise EOFError(f"the file ends at byte {start + done}")
        done += got


# (c)


def ours_per_rank(seat: Seat) -> None:
    _ours(seat, "per_rank")


def ours_shared(seat: Seat) -> None:
    _ours(seat, "shared")


def _ours(seat: Seat, layout: str) -> None:
    rank, table = seat.rank, seat.table
    rules = [
        {"match": name, "host_resident": {"layout": layout}, "split": {"axis": "world", "dim": 0}}
        for name in (FIRST_TABLE, TABLE)
    ]
    config = ls.config_from_dict({"checkpoint": {"path": str(table.path)}, "loads": {"tables": {"rules": rules}}})
    meeting = ls.Rendezvous(rank.address, rank.rank, rank.world_size, "host tables", served=True)
    with ls.LoaderService.blocking(config, meeting) as service:
        began_s = time.monotonic()
        service.host_table("tables", FIRST_TABLE)
        first_s = time.monotonic() - began_s
        found, took = seat.clock(lambda: service.host_table("tables", TABLE))
    how = f"{found.access.effective}: {found.access.reason}"
    seat.finish(replace(took, how=how, first_s=first_s), lambda: _wrong(seat, found))


def _wrong(seat: Seat, found: ls.HostTable) -> str:
    """Of a shared table, rank 0 looks at all of it and the others at their own rows."""
    if found.rows != seat.rows:
        return f"rows {found.rows}, not {seat.rows}"
    start, stop = seat.bytes_in_file
    have = raw_memory(found.tensor)
    if found.layout == "shared":
        if have.nbytes != seat.table.nbytes:
            return f"{have.nbytes} bytes of {seat.table.nbytes}"
        if seat.rank.rank == 0:
            return compare(seat.table.path, seat.table.offset, have)
        have = have[start - seat.table.offset : stop - seat.table.offset]
    return compare(seat.table.path, start, have)


# (d)


def ring_direct(seat: Seat) -> None:
    _ring(seat, direct=True, threads=max(1, min(RING_READS_A_PROCESS, RING_READS_A_MACHINE // seat.rank.world_size)))


def ring_buffered(seat: Seat) -> None:
    _ring(seat, direct=False, threads=max(1, (os.cpu_count() or 1) // seat.rank.world_size))


def _ring(seat: Seat, *, direct: bool, threads: int) -> None:
    start, stop = seat.bytes_in_file
    got, took = seat.clock(lambda: limits.read_part(seat.table.path, start, stop, direct=direct, threads=threads))
    short = "" if got >= stop - start else f"{got} bytes of {stop - start}"
    seat.finish(took, lambda: short)


SIDES: dict[str, Callable[[Seat], None]] = {
    side.__name__: side
    for side in (
        mapped_into_huge,
        mapped_into_torch,
        buffered_into_huge,
        buffered_into_torch,
        ours_per_rank,
        ours_shared,
        ring_direct,
        ring_buffered,
    )
}
