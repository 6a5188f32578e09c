"""What the peers' benchmark measures: checkpoints, what is wanted of them, and which sides take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import limits
from benchmarks.common import TensorShape, files_of, layered_tensors, make_checkpoint
from benchmarks.peers_works import PREFIX

SHARDS = 4
SMALL_TENSORS = 232_670
DRAFT_SHARDS = 48
IN_SHARDS = (15, 31, 47)  # those that hold the draft
TENSORS_A_SHARD = 100
DRAFTED = range(40, 56)  # of each of those shards: 16 of 100 tensors in 3 of 48 shards are 1 % of the bytes
COLUMNS = 1024

OURS, LIMIT = "ours", "limit"
PEERS = ("safetensors", "pre-release", "fastsafetensors", "runai", "unified", "torch")
PART, WHOLE = "what is wanted", "everything"


@dataclass(frozen=True, slots=True)
class Side:
    """One way to load. `reads` is what it reads where only a part is wanted; `where` is its environment."""

    label: str
    work: str
    peer: str
    where: str = "peers"
    reads: str = PART


LOADER = Side("loader_service, owned", "peers_ours.owned", OURS, "own")
DIRECT = Side("limit: O_DIRECT ring", "peers_ours.ring_direct", LIMIT, "own", WHOLE)
BUFFERED = Side("limit: buffered ring", "peers_ours.ring_buffered", LIMIT, "own", WHOLE)
SAFE_OPEN = Side("safetensors, safe_open + clone", "peers_works.safe_open_cloned", "safetensors")
SAFE_OPEN_PREAD = Side("safetensors, safe_open, pread", "peers_works.safe_open_pread", "safetensors")
RUNAI = Side("runai-model-streamer", "peers_works.runai", "runai", reads=WHOLE)
TORCH = Side("torch, HuggingFaceStorageReader", "peers_works.torch_reader", "torch")


def _pre(side: Side) -> Side:
    label = side.label.replace("safetensors", "safetensors pre-release")
    return Side(label, side.work, "pre-release", "pre", side.reads)


OTHERS = (
    Side("fastsafetensors", "peers_works.fastsafetensors", "fastsafetensors", reads=WHOLE),
    Side("fastsafetensors, a buffer a file", "peers_works.fastsafetensors_buffers", "fastsafetensors", reads=WHOLE),
    RUNAI,
    Side("unifiedefficientloader", "peers_works.unified", "unified", reads=WHOLE),
)
LOAD_FILES = (
    Side("safetensors, load_file + clone", "peers_works.load_file_cloned", "safetensors"),
    Side("safetensors, load_file, pread", "peers_works.load_file_pread", "safetensors", reads=WHOLE),
)
OPENED = (SAFE_OPEN, SAFE_OPEN_PREAD)
WHOLE_SIDES = (*OPENED, *LOAD_FILES, *map(_pre, (*OPENED, *LOAD_FILES)), *OTHERS, TORCH)
SLICE_SIDES = (*OPENED, *map(_pre, OPENED), *OTHERS, TORCH)
DRAFT_SIDES = (
    *OPENED,
    *map(_pre, OPENED),
    Side("fastsafetensors, filtered", "peers_works.fastsafetensors", "fastsafetensors"),
    Side("runai-model-streamer, by name", "peers_works.runai", "runai"),
    Side("unifiedefficientloader, by name", "peers_works.unified", "unified"),
    TORCH,
    LOAD_FILES[1],
    _pre(LOAD_FILES[1]),
    Side("fastsafetensors, everything", "peers_works.fastsafetensors_whole", "fastsafetensors", reads=WHOLE),
    Side("runai-model-streamer, everything", "peers_works.runai_whole", "runai", reads=WHOLE),
    Side("unifiedefficientloader, everything", "peers_works.unified_whole", "unified", reads=WHOLE),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint and what is wanted of it."""

    name: str
    text: str
    take: str
    files: tuple[str, ...]
    payload_bytes: int
    sides: tuple[Side, ...]

    def limits(self, cache: str) -> tuple[Side, ...]:
        """Warm only through the page cache: a direct read does not use what is cached."""
        direct = cache == "cold" and limits.can_read_direct(Path(self.files[0]))
        return (DIRECT, BUFFERED) if direct else (BUFFERED,)


def small_tensors(count: int) -> list[TensorShape]:
    """Tensors of 2 to 8 KiB."""
    return [TensorShape(f"model.layers.{i % 61}.experts.{i}.scale", (1 + i % 4, COLUMNS)) for i in range(count)]


def draft_tensors(payload_bytes: int) -> list[TensorShape]:
    """Equal tensors in the order of the shards; a run in the middle of each of `IN_SHARDS` is the draft's."""
    rows = max(1, round(payload_bytes / (2 * COLUMNS * DRAFT_SHARDS * TENSORS_A_SHARD)))
    tensors = []
    for shard in range(DRAFT_SHARDS):
        for number in range(TENSORS_A_SHARD):
            drafted = shard in IN_SHARDS and number in DRAFTED
            prefix = f"{PREFIX}{IN_SHARDS.index(shard)}" if drafted else f"model.layers.{shard}"
            tensors.append(TensorShape(f"{prefix}.mlp.experts.{number}.weight", (rows, COLUMNS)))
    return tensors


def _layered(parent: Path, payload_bytes: int) -> tuple[Path, list[TensorShape], int]:
    return parent / f"loader-bench-stream-{payload_bytes / (1 << 30):g}", layered_tensors(payload_bytes), SHARDS


Made = tuple[Path, list[TensorShape], int]


@dataclass(frozen=True, slots=True)
class _Kind:
    text: str
    take: str
    sides: tuple[Side, ...]
    make: Callable[[Path, int, int], Made]  # (folder for folders, payload's bytes, number of small tensors)


CASES = {
    "whole": _Kind("everything", "all", WHOLE_SIDES, lambda parent, nbytes, _: _layered(parent, nbytes)),
    "small": _Kind(
        "everything, small tensors",
        "all",
        WHOLE_SIDES,
        lambda parent, _, count: (parent / f"loader-bench-few-kib-{count}", small_tensors(count), SHARDS),
    ),
    "rows": _Kind(
        "the first quarter of each tensor's rows",
        "rows",
        SLICE_SIDES,
        lambda parent, nbytes, _: _layered(parent, nbytes),
    ),
    "columns": _Kind(
        "the first quarter of each tensor's columns",
        "columns",
        SLICE_SIDES,
        lambda parent, nbytes, _: _layered(parent, nbytes),
    ),
    "draft": _Kind(
        "a draft of 1 %, in 3 of the shards",
        "draft",
        DRAFT_SIDES,
        lambda parent, nbytes, _: (
            parent / f"loader-bench-one-percent-{nbytes / (1 << 30):g}",
            draft_tensors(nbytes),
            DRAFT_SHARDS,
        ),
    ),
}


def make_case(name: str, parent: Path, payload_bytes: int, small_count: int, peers: Sequence[str]) -> Case:
    """Writes the case's checkpoint unless it is there; its sides are the loader's and those of `peers`."""
    kind = CASES[name]
    folder, tensors, shards = kind.make(parent, payload_bytes, small_count)
    made_bytes = make_checkpoint(folder, tensors, shards)
    text = f"{kind.text}: {made_bytes / (1 << 30):.2f} GiB in {len(tensors):,} tensors and {shards} shards"
    sides = (LOADER, *(side for side in kind.sides if side.peer in peers))
    return Case(name, text, kind.take, tuple(map(str, files_of(folder))), made_bytes, sides)
