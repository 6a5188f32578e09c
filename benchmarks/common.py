"""What the streaming benchmarks share: checkpoints, the page cache, memory, one measured side per process, tables.

A benchmark of reading lies unless memory is conditioned: a virtual machine hands idle free memory back to its host, so
the first touch of a page costs more or less depending on what ran before. Every side therefore runs in a fresh process
that first touches and frees as much memory as it is going to need, and sides alternate in rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import psutil

from loader_service.measuring.conditions import drop_from_cache as drop_from_cache

MIB, GIB = 1 << 20, 1 << 30
HUGE_PAGE_BYTES = 2 * MIB
SPARE_BYTES = 2 * GIB  # of available memory, which conditioning leaves to others
SIDE_TIMEOUT_S = 600.0
_SYS_CACHESTAT = 451


# Checkpoints


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A BF16 tensor of a benchmark checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 2
        for size in self.shape:
            count *= size
        return count


def layered_tensors(payload_bytes: int) -> list[TensorShape]:
    """Layers of a dense model, scaled to the payload: matrices up to a ninth of a layer's bytes, norms and scales."""
    layers = max(1, round(payload_bytes / (192 * MIB)))
    hidden = max(64, int((payload_bytes / layers / (2 * 12)) ** 0.5) // 64 * 64)
    tensors = []
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors += [TensorShape(f"{prefix}.self_attn.{x}_proj.weight", (hidden, hidden)) for x in "qkvo"]
        tensors += [TensorShape(f"{prefix}.mlp.{x}_proj.weight", (hidden * 8 // 3, hidden)) for x in ("gate", "up")]
        tensors.append(TensorShape(f"{prefix}.mlp.down_proj.weight", (hidden, hidden * 8 // 3)))
        tensors += [TensorShape(f"{prefix}.{x}_layernorm.weight", (hidden,)) for x in ("input", "post_attention")]
        tensors += [TensorShape(f"{prefix}.mlp.experts.{e}.scale", (hidden // 32, 16)) for e in range(64)]
    return tensors


def small_tensors(count: int) -> list[TensorShape]:
    """Tensors of 4 to 16 KiB."""
    return [TensorShape(f"model.layers.{i % 61}.experts.{i}.scale", (2 + i % 7, 1024)) for i in range(count)]


def make_checkpoint(folder: Path, tensors: Sequence[TensorShape], shards: int) -> int:
    """Writes the shards unless they are there already (made by the same call before); returns the payload's bytes.

    The payload is random. All is on the disk on return, so that dropping it from the page cache works.
    """
    payload_bytes = sum(tensor.nbytes for tensor in tensors)
    stamp = folder / "made.json"
    want = json.dumps({"tensors": len(tensors), "payload_bytes": payload_bytes, "shards": shards, "version": 1})
    if stamp.exists() and stamp.read_text() == want:
        return payload_bytes
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.safetensors"), stamp):
        old.unlink(missing_ok=True)
    a_shard = -(-len(tensors) // shards)
    for number in range(shards):
        part = tensors[number * a_shard : (number + 1) * a_shard]
        _write_shard(folder / f"model-{number + 1:05d}-of-{shards:05d}.safetensors", part, seed=number)
    stamp.write_text(want)
    return payload_bytes


def _write_shard(path: Path, tensors: Sequence[TensorShape], seed: int) -> None:
    header: dict[str, object] = {}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # so that the payload begins at a page, as O_DIRECT likes it
    block = random.Random(seed).randbytes(16 * MIB)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset:
            offset -= file.write(block[: min(offset, len(block))])
        file.flush()
        os.fsync(file.fileno())


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# The page cache


def read_into_cache(files: Sequence[Path]) -> None:
    buffer = bytearray(16 * MIB)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


class _CacheRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached_share(files: Sequence[Path]) -> float | None:
    """The share of the files' pages that the page cache holds, None where the kernel cannot say (before Linux 6.5)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = cached = 0
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            asked, found = _CacheRange(0, size), _CacheStat()
            if libc.syscall(_SYS_CACHESTAT, file.fileno(), ctypes.byref(asked), ctypes.byref(found), 0):
                return None
            pages += -(-size // mmap.PAGESIZE)
            cached += found.cached
    return cached / pages if pages else 0.0


# Memory


def huge_buffer(nbytes: int) -> memoryview:
    """Private anonymous memory on huge pages where the system gives them, aligned to 2 MiB. Nothing is touched yet."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    head = -address % HUGE_PAGE_BYTES
    return memoryview(memory)[head : head + nbytes]


def condition_memory(nbytes: int) -> int:
    """Touches and frees up to so many bytes, so that the next user of memory meets pages that the host has given.

    Returns how many it touched: less where that would leave others too little.
    """
    nbytes = max(0, min(nbytes, psutil.virtual_memory().available - SPARE_BYTES))
    touched: list[memoryview] = []  # all at once: memory that is freed in between would be used again
    for start in range(0, nbytes, GIB):
        touched.append(huge_buffer(min(GIB, nbytes - start)))
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(touched[-1])), 1, len(touched[-1]))
    return nbytes


# One measured side


@dataclass(frozen=True, slots=True)
class Side:
    """What one process measures. `work` names a function of sides.py, `loop` whose event loop the caller has."""

    work: str
    folder: str
    cache: str  # "cold" or "warm"
    condition_bytes: int
    loop: str = "asyncio"
    capacity_bytes: int = 0
    freeze: bool = False  # whether the caller takes what it has imported out of the garbage collector's rounds
    label: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out, of one run. Lag is that of the caller's loop; memory is resident memory above the start's.

    `lag_open_ms` is the longest before the stream began (headers, plan), the others count from there to the end.
    """

    seconds: float
    cpu_s: float
    payload_bytes: int
    tensors: int
    lag_open_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    above_bytes: int  # most of (resident - at the start - delivered and still held)
    peak_bytes: int  # most of (resident - at the start), as the kernel kept it
    conditioned_bytes: int
    cached_before: float | None

    @property
    def gib_per_s(self) -> float:
        return self.payload_bytes / GIB / self.seconds

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / (self.payload_bytes / GIB)

    @property
    def us_per_tensor(self) -> float:
        return self.seconds / self.tensors * 1e6


def run_side(side: Side) -> Outcome:
    """Runs one side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.sides", json.dumps(asdict(side))]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=SIDE_TIMEOUT_S, cwd=root, check=False)
    if done.returncode:
        raise RuntimeError(f"side {side} failed with {done.returncode}:\n{done.stderr}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


class Rounds(ABC):
    """Figures of one side over its rounds, by the names that a round has for them."""

    @property
    @abstractmethod
    def measured(self) -> Sequence[object]:
        """The rounds."""

    def values(self, name: str) -> list[float]:
        return [float(getattr(each, name)) for each in self.measured]

    def median(self, name: str) -> float:
        return statistics.median(self.values(name))

    def spread(self, name: str, digits: int = 2) -> str:
        """Median and, in brackets, least and most."""
        values = self.values(name)
        return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


@dataclass(slots=True)
class Series(Rounds):
    """All rounds of one side."""

    side: Side
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def measured(self) -> Sequence[Outcome]:
        return self.outcomes

    def as_dict(self) -> dict[str, object]:
        rounds = [asdict(outcome) for outcome in self.outcomes]
        medians = {each.name: self.median(each.name) for each in fields(Outcome) if each.name != "cached_before"}
        return {"side": asdict(self.side), "medians": medians, "rounds": rounds}


def run_rounds(sides: Sequence[Side], rounds: int, *, seed: int = 0) -> list[Series]:
    """Interleaved, in another order each round, so that a busy moment of the machine meets every side."""
    series = [Series(side) for side in sides]
    order = random.Random(seed)
    for number in range(rounds):
        began = time.perf_counter()
        for each in order.sample(series, len(series)):
            each.outcomes.append(run_side(each.side))
        print(f"round {number + 1} of {rounds}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return series


# Tables


def machine() -> str:
    """Cores, memory and kernel; no host name."""
    memory = psutil.virtual_memory()
    return (
        f"{os.cpu_count()} cores, {memory.total / GIB:.0f} GiB memory ({memory.available / GIB:.0f} GiB available), "
        f"Linux {os.uname().release.split('-')[0]}, Python {sys.version.split()[0]}"
    )


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As Markdown, aligned: what the terminal shows can be pasted into docs."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join((first, *rest)) + " |"

    print(line(columns))
    print(line(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]))
    for row in rows:
        print(line(row))


# Command lines


def add_common_arguments(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of all sides (default {rounds})")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is made, kept and used again (default: a temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, with every round")


@contextlib.contextmanager
def working_folder(folder: Path | None) -> Iterator[Path]:
    """The folder that was asked for, or a temporary one."""
    if folder is not None:
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="loader-bench-") as temporary:
        yield Path(temporary)
