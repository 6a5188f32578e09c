"""A checkpoint with tables of 37 rows among its tensors, rules for them, and what ranks must hold of each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.memory.pinning import Pinner
from loader_service.memory.tensors import raw_memory
from loader_service.reading.fake import FakeStorage
from tests.conftest import _descriptors
from tests.e2e.seats import Seat
from tests.support.checkpoints import Checkpoint, write_checkpoint

ROWS = 37
SHARD = "model-00001-of-00002.safetensors"
WEIGHT, SCALE, DEEP, EMPTY = "engram.weight", "engram.scale", "engram.deep", "engram.empty"
TABLES = (WEIGHT, SCALE, DEEP, EMPTY)
LAYOUTS = ("per_rank", "shared")
COLUMNS = (5, 11, 13, 8)  # sub-tables that the rows are made of
COLUMN_CUTS = {1: [0, 37], 2: [0, 16, 37], 3: [0, 5, 29, 37], 4: [0, 5, 16, 29, 37]}
SPLITS: Mapping[str, Any] = {
    "equal": lambda _: {},
    "align": lambda _: {"align": 8},
    "boundaries": lambda ranks: {"boundaries": COLUMN_CUTS[ranks]},
}
QUICK = {"timeout_s": 10, "start_timeout_s": 30, "grace_s": 5}


def write(folder: Path) -> Checkpoint:
    """Tables first, between tensors and last, at odd offsets; one without rows, one with rows of two dimensions."""
    return write_checkpoint(
        folder,
        {
            SHARD: {
                WEIGHT: ("F8_E4M3", (ROWS, 96)),
                "a.first": ("F32", (5, 6)),
                "a.odd": ("U8", (3,)),
                SCALE: ("F8_E8M0", (ROWS, 3)),
                EMPTY: ("BF16", (0, 8)),
                "m.mid": ("BF16", (7,)),
            },
            "model-00002-of-00002.safetensors": {"b.first": ("U8", (13,)), DEEP: ("F32", (ROWS, 2, 5))},
        },
    )


def cuts(split: str, ranks: int) -> list[int]:
    """Where ranks' rows begin and end, by the words of the contract."""
    if split == "boundaries":
        return COLUMN_CUTS[ranks]
    if split == "align":
        return [min(ROWS, 8 * (5 * rank // ranks)) for rank in range(ranks + 1)]
    return [ROWS * rank // ranks for rank in range(ranks + 1)]


def shares(split: str, ranks: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cuts(split, ranks)))


def rules(layout: str, split: Mapping[str, object] | None = None) -> dict[str, Any]:
    """A load in which ranks cut the tables' rows over `tp`."""
    fields = {"axis": "tp", "dim": 0, **(split or {})}
    plain = {"axis": "tp", "dim": 0}
    resident = {"layout": layout}
    return {
        "rules": [
            {"match": EMPTY, "host_resident": resident, "split": plain},
            {"match": "engram.*", "host_resident": resident, "split": fields},
        ]
    }


def config_of(checkpoint: Checkpoint, load: Mapping[str, object], ranks: int, **sections: Any) -> ServiceConfig:
    given = {"mesh": {"tp": ranks}, "agreement": QUICK, **sections}
    return checkpoint.config(load, **given)


def service_of(seat: Seat, config: ServiceConfig, pinner: Pinner | None = None, **more: Any) -> ls.LoaderService:
    return ls.LoaderService(config, seat.group, storage=seat.storage, pinner=pinner, **more)


def mapped(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """The tensor in the memory-mapped file."""
    with safe_open(checkpoint.folder / checkpoint.shard_of[name], framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def assert_rows(found: torch.Tensor, checkpoint: Checkpoint, name: str, rows: tuple[int, int]) -> None:
    """Byte for byte the rows of the memory-mapped tensor."""
    wanted = mapped(checkpoint, name)[rows[0] : rows[1]]
    assert found.dtype == wanted.dtype
    assert tuple(found.shape) == tuple(wanted.shape)
    assert bytes_of(found) == bytes_of(wanted)


def assert_table(table: ls.HostTable, checkpoint: Checkpoint, name: str, rows: tuple[int, int], layout: str) -> None:
    assert (table.rows, table.layout) == (rows, layout)
    held = rows if layout == "per_rank" else (0, checkpoint.tensor(name).shape[0])
    assert_rows(table.tensor, checkpoint, name, held)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(raw_memory(tensor.clone())) if tensor.numel() else b""


def place_of(checkpoint: Checkpoint, name: str) -> tuple[str, int, int]:
    """(path, first byte, last byte + 1) of a tensor, as its header says."""
    path = checkpoint.folder / checkpoint.shard_of[name]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(length))[name]["data_offsets"]
    return str(path), 8 + length + start, 8 + length + stop


def rows_range(checkpoint: Checkpoint, name: str, rows: tuple[int, int]) -> tuple[int, int]:
    """The bytes of some rows in their file."""
    _, start, stop = place_of(checkpoint, name)
    row_bytes = (stop - start) // ROWS
    return start + rows[0] * row_bytes, start + rows[1] * row_bytes


def reads_of_bytes(storages: Sequence[FakeStorage], checkpoint: Checkpoint, name: str) -> list[int]:
    """How many times each byte of a tensor was read, through all storages together."""
    path, start, stop = place_of(checkpoint, name)
    counts = [0] * (stop - start)
    for storage in storages:
        for read in storage.reads_of(path):
            for at in range(max(start, read.offset), min(stop, read.offset + read.nbytes)):
                counts[at - start] += 1
    return counts


def left_behind() -> list[str]:
    """What this process has of shared tables and of the sockets that hand them over."""
    own = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:loader-service" in line]
    open_ = _descriptors().values()
    doors = _doors() if any(target.startswith("socket:") for target in open_) else set()
    return own + [target for target in open_ if "memfd:loader-service" in target or target in doors]


def opened_since(before: Mapping[int, str]) -> list[str]:
    """Descriptors that are open and were not; without connections to a store, which are kept for the next service."""
    new = [target for number, target in _descriptors().items() if before.get(number) != target]
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6") if new]
    stores = {f"socket:[{line.split()[9]}]" for table in tables for line in table}
    return [target for target in new if target not in stores]


def _doors() -> set[str]:
    """The sockets at which ranks of this machine meet, as descriptors are shown."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {f"socket:[{fields[6]}]" for fields in lines if len(fields) > 7 and fields[7].startswith("@loader-service-")}
