"""The reference consumer: an embedding in host memory, filled from row sources, on every rank at TP 1 to 4."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.engram import HostEmbedding
from loader_service.memory.tensors import raw_memory
from tests.e2e.seats import Seat, all_of, make_seats, values
from tests.support.checkpoints import Checkpoint, write_checkpoint
from tests.tables.making import COLUMN_CUTS, LAYOUTS, ROWS, SPLITS, bytes_of, config_of, mapped, service_of, shares

COLUMNS, GROUP = 64, 16
SENTINEL = 0xA5
IDS = torch.tensor([[0, 36, 17, 5], [9, 8, 18, 29]])


@pytest.fixture(scope="module")
def engram(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(
        tmp_path_factory.mktemp("engram"),
        {
            "a.safetensors": {"a": ("U8", (7,)), "engram.weight": ("F8_E4M3", (ROWS, COLUMNS))},
            "b.safetensors": {"engram.scale": ("F8_E8M0", (ROWS, COLUMNS // GROUP)), "b": ("F32", (3, 3))},
        },
    )


def rules(layout: str, split: str, ranks: int) -> dict[str, object]:
    cut = {"axis": "tp", "dim": 0, **SPLITS[split](ranks)}
    return {"rules": [{"match": "engram.*", "host_resident": {"layout": layout}, "split": cut}]}


def embedding(share: tuple[int, int], layout: str) -> tuple[HostEmbedding, torch.Tensor]:
    """An embedding over memory with a sentinel in every byte, and one byte too many at the end."""
    held = ROWS if layout == "shared" else share[1] - share[0]
    memory = torch.full((HostEmbedding.nbytes(held, COLUMNS, GROUP) + 1,), SENTINEL, dtype=torch.uint8)
    return HostEmbedding(ROWS, COLUMNS, GROUP, share, layout, memory), memory  # type: ignore[arg-type]


def expected_rows(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    weight, scale = mapped(checkpoint, "engram.weight"), mapped(checkpoint, "engram.scale")
    return (weight.float() * scale.float().repeat_interleave(GROUP, dim=1))[ids]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Also where both are no numbers."""
    return torch.equal(found.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_rank_gets_the_same_bytes_as_from_the_memory_mapped_tensors(
    engram: Checkpoint, layout: str, ranks: int
) -> None:
    for split in ("equal", "boundaries"):
        seats = make_seats(ranks)

        async def work(seat: Seat, split: str = split) -> HostEmbedding:
            share = shares(split, ranks)[seat.rank]
            ours, memory = embedding(share, layout)
            theirs, their_memory = embedding(share, layout)
            async with service_of(seat, config_of(engram, rules(layout, split, ranks), ranks)) as service:
                async with service.open("target") as load:
                    taken = [name async for name, value in load if await asyncio.to_thread(ours.load, name, value)]
            assert taken == ["engram.weight", "engram.scale"]
            for name in taken:
                assert theirs.load(name, mapped(engram, name))
            assert bytes_of(memory) == bytes_of(their_memory)
            for part, name in ((ours.weight, "engram.weight"), (ours.scale, "engram.scale")):
                assert bytes_of(ours.own(part)) == bytes_of(mapped(engram, name)[share[0] : share[1]])
                outside = [part[: share[0]], part[share[1] :]] if layout == "shared" else []
                assert {byte for rows in outside if len(rows) for byte in bytes(raw_memory(rows))} <= {SENTINEL}
            assert int(memory[-1]) == SENTINEL
            return ours

        found = values(await all_of(seats, work))
        if layout == "per_rank":
            added = torch.stack([table(IDS).nan_to_num(nan=-7.0) for table in found]).sum(0)
            assert same(added, expected_rows(engram, IDS))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_lookups_in_tables_that_the_service_filled(engram: Checkpoint, layout: str) -> None:
    seats = make_seats(4)
    column_starts = torch.tensor([[0, 5, 16, 29], [4, 15, 28, 36]])

    async def work(seat: Seat) -> torch.Tensor:
        async with service_of(seat, config_of(engram, rules(layout, "boundaries", 4), 4)) as service:
            weight = await service.host_table("target", "engram.weight")
            scale = await service.host_table("target", "engram.scale")
        table = HostEmbedding.of_tables(weight, scale)
        assert table.share == (COLUMN_CUTS[4][seat.rank], COLUMN_CUTS[4][seat.rank + 1])
        found: torch.Tensor = table(column_starts).nan_to_num(nan=-7.0)
        return found

    found = values(await all_of(seats, work))
    expected = expected_rows(engram, column_starts)
    if layout == "shared":
        assert all(same(rows, expected) for rows in found)
    else:
        assert same(torch.stack(found).sum(0), expected)


def test_a_rank_without_rows_looks_up_zeros() -> None:
    table = HostEmbedding(ROWS, COLUMNS, GROUP, (9, 9), "per_rank")
    assert torch.equal(table(IDS), torch.zeros(2, 4, COLUMNS))
    assert table.load("engram.weight", torch.zeros(ROWS, COLUMNS).to(torch.float8_e4m3fn))
    assert not table.load("other.weight", torch.zeros(1))


@pytest.mark.processes
def test_the_example_runs_as_a_program() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "examples/engram.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": str(root), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "4 ranks hold [9, 9, 9, 10] of 37 rows" in done.stdout
    assert done.stdout.count("equal to torch alone: True") == 2
