"""What the ranks of a node read from the disk together, as the kernel counts it: what they share comes once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeAlias

import pytest
import torch

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from tests.agreement.folders import all_told
from tests.reading.disk import bring_code_in, disk_bytes, disk_folder, held, uncache
from tests.sharing.failing import remains
from tests.support.checkpoints import Checkpoint, write_checkpoint
from tests.support.ranks import Rank, run_ranks

pytestmark = pytest.mark.processes

RANKS = 4
Case: TypeAlias = tuple[str, str, str]  # the load, how it is shared, how files are read
Got: TypeAlias = tuple[str, int, int, int, tuple[str, ...]]  # digest, from the disk, payload, read, files
CASES: list[Case] = [
    *(("target", way, access) for way in ("staging", "page_cache") for access in ("auto", "buffered", "direct")),
    ("target", "none", "auto"),
    *(("draft", "staging", access) for access in ("auto", "direct")),
]
DRAFT = "mtp.0."
Shape: TypeAlias = tuple[str, tuple[int, ...]]  # (dtype code, shape)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """48 MiB in three shards; the draft is 6 MiB in the middle of one."""
    shape: Shape = ("BF16", (1000, 1024))
    middle: dict[str, Shape] = {
        f"{DRAFT if number in (3, 4, 5) else 'layers.'}{number}.weight": shape for number in range(8)
    }
    shards: dict[str, dict[str, Shape]] = {
        "a.safetensors": {f"layers.{number}.weight": shape for number in range(10, 18)},
        "b.safetensors": {"bias": ("U8", (13,)), "norm": ("F32", (257,)), **middle},
        "c.safetensors": {f"layers.{number}.weight": shape for number in range(20, 28)},
    }
    with disk_folder(tmp_path_factory.mktemp("disk")) as folder:
        yield write_checkpoint(folder / "checkpoint", shards)


def config_of(folder: str, way: str, access: str) -> ServiceConfig:
    return ls.config_from_dict(
        {
            "checkpoint": {"path": folder},
            "loads": {"target": {}, "draft": {"key_prefixes": [DRAFT]}},
            "reads": {"chunk_bytes": "1MiB", "sharing": way, "access": access},
            "staging": {"capacity_bytes": "16MiB"},
        }
    )


def digest_of(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_each(rank: Rank, folder: str, paths: list[str], told: str) -> tuple[list[Got], list[str]]:
    """Every case, of which no byte is in the page cache at the beginning; and what is left of all."""

    def load(case: Case) -> Got:
        name, way, access = case
        group = ls.Rendezvous(rank.address, rank.rank, rank.world_size, " ".join(case))
        before = disk_bytes()
        with ls.LoaderService.blocking(config_of(folder, way, access), group) as service:
            with service.open(name) as load:
                digest = digest_of(iter(load))
        report = load.report
        assert report.policies["sharing"].effective == way
        return digest, disk_bytes() - before, report.payload_bytes, report.read_bytes, report.files_read

    bring_code_in()
    load(("draft", "none", "direct"))  # so that no module is still to be imported
    found = []
    for number, case in enumerate(CASES):
        all_told(told, rank, f"before {number} ")
        if rank.rank == 0:
            for path in paths:
                uncache(path)
                assert held(path) == 0
        all_told(told, rank, f"uncached {number} ")
        found.append(load(case))
    return found, remains()


def test_the_ranks_of_a_node_read_from_the_disk_once_what_all_of_them_want(checkpoint: Checkpoint) -> None:
    told = checkpoint.folder.parent / "told"
    told.mkdir()
    paths = [str(path) for path in checkpoint.folder.iterdir()]
    outcomes = [outcome.get() for outcome in run_ranks(load_each, RANKS, str(checkpoint.folder), paths, str(told))]
    assert [left for _, left in outcomes] == [[]] * RANKS
    for number, case in enumerate(CASES):
        names = [name for name in checkpoint.tensors if case[0] == "target" or name.startswith(DRAFT)]
        expected = digest_of((name, checkpoint.tensor(name)) for name in names)
        payload_bytes = sum(len(checkpoint.tensors[name][2]) for name in names)
        ranks = [found[number] for found, _ in outcomes]
        assert [digest for digest, *_ in ranks] == [expected] * RANKS, case
        assert [payload for _, _, payload, _, _ in ranks] == [payload_bytes] * RANKS
        from_disk = sum(nbytes for _, nbytes, *_ in ranks)

        assert from_disk <= 1.05 * payload_bytes, case
