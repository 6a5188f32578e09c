"""The measured sides of the draft benchmark, each as a rank's process runs it, and the checkpoint that has a draft."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import loader_service as ls
from benchmarks import limits
from benchmarks.common import MIB, TensorShape, files_of, make_checkpoint
from benchmarks.ranks import Rank
from loader_service.agreement.group import GroupChoice
from loader_service.memory.tensors import raw_memory

SHARDS = 48
DRAFT_SHARDS = (15, 31, 47)
TENSORS_A_SHARD = 4000  # headers of 0.4 MiB, 19 MiB in all
DRAFT_SHARDS_PART = 0.45  # of the checkpoint's bytes, so that fixed costs are not all that there is to measure
DRAFT_PART = 1 / 3  # of those shards' bytes
DRAFT_RUNS = 4  # of each of those shards: other tensors lie between
CAPACITY_BYTES = 256 * MIB  # staging.capacity_bytes of a rank
COLUMNS = 1024
PAGE_BYTES = 4096


# The checkpoint


def draft_tensors(payload_bytes: int) -> list[TensorShape]:
    """Tensors in the order of the shards, equally many in each: weights, and a scale of 256 bytes for each.

    A fifth of the tensors of each of `DRAFT_SHARDS`, in runs, are the draft's `mtp.*`, twice as large as their
    neighbours in bytes, so that they are a third of those shards.
    """
    weights = TENSORS_A_SHARD // 2
    drafts = TENSORS_A_SHARD // 5 // 2
    of_drafts = payload_bytes * DRAFT_SHARDS_PART / len(DRAFT_SHARDS)
    draft_rows = _rows(of_drafts * DRAFT_PART / drafts)
    beside_rows = _rows(of_drafts * (1 - DRAFT_PART) / (weights - drafts))
    other_rows = _rows(payload_bytes * (1 - DRAFT_SHARDS_PART) / (SHARDS - len(DRAFT_SHARDS)) / weights)
    a_run = drafts // DRAFT_RUNS
    tensors = []
    for shard in range(SHARDS):
        for number in range(weights):
            expert = f"mlp.experts.{number}.gate_proj.weight"
            drafted = shard in DRAFT_SHARDS and number // a_run % (weights // drafts) == 2
            if drafted:
                name, rows = f"mtp.{DRAFT_SHARDS.index(shard)}.{expert}", draft_rows
            else:
                name = f"model.layers.{shard}.{expert}"
                rows = beside_rows if shard in DRAFT_SHARDS else other_rows
            tensors.append(TensorShape(name, (rows, COLUMNS)))
            tensors.append(TensorShape(f"{name}_scale_inv", (8, 16)))
    return tensors


def _rows(tensor_bytes: float) -> int:
    return max(1, round(tensor_bytes / (2 * COLUMNS)))


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """What lies in the folder. The draft's tensors are those under `mtp`."""

    files: list[Path]
    payload_bytes: int
    tensors: int
    draft_bytes: int
    draft_tensors: int
    draft_shards_bytes: int
    draft_shards_tensors: int

    @property
    def draft_files(self) -> list[Path]:
        """The shards that hold the draft."""
        return [self.files[shard] for shard in DRAFT_SHARDS]


def make_draft_checkpoint(folder: Path, payload_bytes: int) -> DraftCheckpoint:
    """Writes it unless it is there already; all of it is on the disk on return."""
    tensors = draft_tensors(payload_bytes)
    made_bytes = make_checkpoint(folder, tensors, SHARDS)
    drafted = [tensor for tensor in tensors if tensor.name.startswith("mtp.")]
    beside = [tensor for i, tensor in enumerate(tensors) if i // TENSORS_A_SHARD in DRAFT_SHARDS]
    draft_bytes, shards_bytes = (sum(tensor.nbytes for tensor in some) for some in (drafted, beside))
    sizes = (made_bytes, len(tensors), draft_bytes, len(drafted), shards_bytes, len(beside))
    return DraftCheckpoint(files_of(folder), *sizes)


# What a rank's process measures


@dataclass(frozen=True, slots=True)
class Side:
    """What the processes of one side do with `files`. `work` names a function of this module.

    A load takes the keys under `prefixes` (none: all), with `reads` as the configuration has it, and hands over
    `tensors` with `payload_bytes` on each rank.
    """

    label: str
    work: str
    files: tuple[Path, ...]
    ranks: int = 1
    reads: dict[str, str] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    payload_bytes: int = 0
    tensors: int = 0


@dataclass(frozen=True, slots=True)
class Took:
    """One rank's part of a run. Times are monotonic; of a load: `entered_s` when `open` has been entered, `left_s` when
    the load has been left, `closed_s` when the service has been closed. What is counted for `setup` comes before that
    entering, the rest until leaving."""

    began_s: float
    entered_s: float
    left_s: float
    closed_s: float
    setup_cpu_s: float
    cpu_s: float
    disk_bytes: int  # of all of the run
    handed_bytes: int = 0
    tensors: int = 0
    read_bytes: int = 0  # of payload, as the report has it, for this rank or its node
    files_read: tuple[str, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)
    how: str = ""
    wrong: tuple[str, ...] = ()


def run_side(rank: Rank, side: Side, check: bool) -> None:
    """A rank's process: tells that it is ready, starts when told, tells when it has entered, and what it took.

    With `check` it compares all bytes with the files' instead of what it is measured with.
    """
    gc.freeze()  # as docs recommend: the collector would go through all of torch again and again
    WORKS[side.work](rank, side, check)


def disk_bytes(pid: int | str = "self") -> int:
    """What a process has had read from disks so far."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("the kernel does not tell what a process has read from disks")


# Loads


Take = Callable[[ls.BlockingLoad], Any]


def batches(rank: Rank, side: Side, check: bool) -> None:
    """`batches()`, of whose memory one byte a page is looked at, as if a device copied it."""
    _load(rank, side, _compare_batches if check else _touch_batches)


def owned(rank: Rank, side: Side, check: bool) -> None:
    """Tensors that own their memory, all kept until the service is closed."""
    _load(rank, side, _compare_owned if check else _keep_owned)


class _Taken:
    """What the consumer of a load counts."""

    def __init__(self, side: Side, load: ls.BlockingLoad) -> None:
        self.side = side
        self.load = load
        self.nbytes = 0
        self.names: set[str] = set()
        self.tensors = 0
        self.kept: list[Any] = []
        self.wrong: list[str] = []


def _touch_batches(taken: _Taken) -> None:
    most = 0
    names = set()
    for batch in taken.load.batches():
        with batch:
            for piece in batch:
                names.add(piece.name)
                memory = raw_memory(piece.tensor)
                taken.nbytes += memory.nbytes
                most |= int(np.frombuffer(memory, np.uint8)[::PAGE_BYTES].max(initial=0))
    taken.tensors = len(names)


def _compare_batches(taken: _Taken) -> None:
    with ExitStack() as stack:
        file_of = _opened(stack, taken.side.files)
        names = set()
        for batch in taken.load.batches():
            with batch:
                for piece in batch:
                    names.add(piece.name)
                    _compare(taken, piece.name, piece.tensor, file_of[piece.name].get_tensor(piece.name)[piece.index])
        taken.tensors = len(names)


def _keep_owned(taken: _Taken) -> None:
    for _, tensor in taken.load:
        assert isinstance(tensor, torch.Tensor)
        taken.kept.append(tensor)
        taken.nbytes += tensor.nbytes
    taken.tensors = len(taken.kept)


def _compare_owned(taken: _Taken) -> None:
    with ExitStack() as stack:
        file_of = _opened(stack, taken.side.files)
        for name, tensor in taken.load:
            assert isinstance(tensor, torch.Tensor)
            _compare(taken, name, tensor, file_of[name].get_tensor(name))
            taken.tensors += 1


def _opened(stack: ExitStack, files: Sequence[Path]) -> dict[str, Any]:
    opened = [stack.enter_context(safe_open(path, framework="pt", device="cpu")) for path in files]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no dict


def _compare(taken: _Taken, name: str, found: torch.Tensor, right: torch.Tensor) -> None:
    taken.nbytes += found.nbytes
    same = found.dtype == right.dtype and found.shape == right.shape
    if not same or not np.array_equal(raw_memory(found), raw_memory(right.contiguous())):
        taken.wrong.append(name)


def _load(rank: Rank, side: Side, consume: Callable[[_Taken], None]) -> None:
    document: dict[str, object] = {
        "checkpoint": {"path": _path_of(side.files)},
        "loads": {"all": {"key_prefixes": list(side.prefixes)} if side.prefixes else {}},
        "reads": side.reads,
        "staging": {"capacity_bytes": CAPACITY_BYTES},
    }
    config = ls.config_from_dict(document)
    group: GroupChoice = "solo"
    if rank.world_size > 1:
        group = ls.Rendezvous(rank.address, rank.rank, rank.world_size, "draft", served=True)
    began_s, began_cpu_s, began_disk_bytes = _start(rank)
    with ls.LoaderService.blocking(config, group) as service:
        with service.open("all") as load:
            entered_s, entered_cpu_s = time.monotonic(), time.process_time()
            rank.tell("entered")
            taken = _Taken(side, load)
            consume(taken)
        left_s, left_cpu_s = time.monotonic(), time.process_time()
    closed_s = time.monotonic()
    report = load.report
    took = Took(
        began_s,
        entered_s,
        left_s,
        closed_s,
        entered_cpu_s - began_cpu_s,
        left_cpu_s - entered_cpu_s,
        disk_bytes() - began_disk_bytes,
        handed_bytes=taken.nbytes,
        tensors=taken.tensors,
        read_bytes=report.read_bytes + report.striped_bytes,
        files_read=report.files_read,
        phases=dict(report.phases),
        how=", ".join(f"{name} {report.policies[name].effective}" for name in ("access", "sharing", "threads")),
        wrong=tuple(_wrong(side, taken, report)),
    )
    rank.tell("took", took)


def _path_of(files: Sequence[Path]) -> str | list[str]:
    """The folder, if they are all that lies there."""
    folder = files[0].parent
    return str(folder) if list(files) == files_of(folder) else [str(path) for path in files]


def _wrong(side: Side, taken: _Taken, report: ls.LoadReport) -> list[str]:
    found = [f"other bytes in '{name}'" for name in taken.wrong[:3]]
    if side.reads.get("sharing", "none") not in ("none", report.policies["sharing"].effective):
        found += report.fallbacks
    if (taken.tensors, taken.nbytes) != (side.tensors, side.payload_bytes):
        wanted = f"{side.tensors} tensors with {side.payload_bytes} bytes"
        found.append(f"{taken.tensors} tensors with {taken.nbytes} bytes were handed over, not {wanted}")
    return found


def _start(rank: Rank) -> tuple[float, float, int]:
    """(monotonic time, processor time, bytes from disks) when everyone is ready."""
    rank.tell("ready")
    rank.hear()
    return time.monotonic(), time.process_time(), disk_bytes()


# Others


def ring(rank: Rank, side: Side, check: bool) -> None:  # noqa: ARG001 - as the others
    """The limit of the disk: every byte of the files into recycled buffers, past the page cache."""
    _plain(rank, lambda: limits.read_direct(side.files))


def parse(rank: Rank, side: Side, check: bool) -> None:  # noqa: ARG001 - as the others
    """`json.loads` of the headers, which lie in memory."""
    texts = [header_of(path) for path in side.files]

    def work() -> int:
        for text in texts:
            json.loads(text)
        return sum(map(len, texts))

    _plain(rank, work)


def header_of(path: Path) -> bytes:
    """A shard's header without its length."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _plain(rank: Rank, work: Callable[[], int]) -> None:
    began_s, began_cpu_s, began_disk_bytes = _start(rank)
    rank.tell("entered")
    got = work()
    done_s, cpu_s = time.monotonic(), time.process_time() - began_cpu_s
    from_disk_bytes = disk_bytes() - began_disk_bytes
    rank.tell("took", Took(began_s, began_s, done_s, done_s, 0.0, cpu_s, from_disk_bytes, handed_bytes=got))


WORKS: dict[str, Callable[[Rank, Side, bool], None]] = {work.__name__: work for work in (batches, owned, ring, parse)}
