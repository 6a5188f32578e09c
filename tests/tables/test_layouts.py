"""What ranks hold of a table, in both layouts, with every split: the rows of the memory-mapped tensor, read once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import loader_service as ls
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.shared import SharedMemory
from tests.e2e.seats import Seat, all_of, make_seats, values
from tests.rows.making import until
from tests.support.checkpoints import Checkpoint
from tests.tables.making import (
    DEEP,
    EMPTY,
    LAYOUTS,
    ROWS,
    SCALE,
    SPLITS,
    TABLES,
    WEIGHT,
    assert_table,
    config_of,
    left_behind,
    place_of,
    reads_of_bytes,
    rows_range,
    rules,
    service_of,
    shares,
)

BUFFERED = {"access": "buffered"}


async def tables_of(
    seats: list[Seat], checkpoint: Checkpoint, load: Mapping[str, object], names: tuple[str, ...], **sections: Any
) -> list[list[ls.HostTable]]:
    """Each rank's tables, all of a service."""
    config = config_of(checkpoint, load, **{"ranks": len(seats), **sections})

    async def fill(seat: Seat) -> list[ls.HostTable]:
        async with service_of(seat, config) as service:
            return [await service.host_table("target", name) for name in names]

    return values(await all_of(seats, fill))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_rank_gets_its_rows_and_each_is_read_once(checkpoint: Checkpoint, layout: str, ranks: int) -> None:
    for split in SPLITS:
        seats = make_seats(ranks)
        load = rules(layout, SPLITS[split](ranks))
        found = await tables_of(seats, checkpoint, load, TABLES, reads={**BUFFERED, "chunk_bytes": 1000})
        for rank, tables in enumerate(found):
            for name, table in zip(TABLES, tables, strict=True):
                own = shares(split, ranks)[rank] if name != EMPTY else (0, 0)
                assert_table(table, checkpoint, name, own, layout)
                assert not table.pinned
        assert bool(left_behind()) == (layout == "shared"), "as long as a tensor is there, and no longer"
        for name in TABLES:
            counts = reads_of_bytes([seat.storage for seat in seats], checkpoint, name)
            assert counts == [1] * checkpoint.tensor(name).nbytes, name


def replicated(layout: str) -> dict[str, Any]:
    return {"rules": [{"match": "engram.*", "host_resident": {"layout": layout}, "split": {"axis": "tp", "dim": 0}}]}


async def test_replicas_have_copies_of_their_own_or_fill_one_together(checkpoint: Checkpoint) -> None:
    mesh = {"replica": 2, "tp": 2}
    for layout, times in (("per_rank", 2), ("shared", 1)):
        seats = make_seats(4)
        found = await tables_of(seats, checkpoint, replicated(layout), (WEIGHT, DEEP), mesh=mesh, reads=BUFFERED)
        for rank, tables in enumerate(found):
            for name, table in zip((WEIGHT, DEEP), tables, strict=True):
                assert_table(table, checkpoint, name, [(0, 18), (18, 37)][rank % 2], layout)
        for name in (WEIGHT, DEEP):
            assert set(reads_of_bytes([seat.storage for seat in seats], checkpoint, name)) == {times}
        own = [sum(reads_of_bytes([seat.storage], checkpoint, WEIGHT)) for seat in seats]
        if layout == "shared":
            assert own == [9 * 96, 9 * 96, 9 * 96, 10 * 96], "each fills a half of what two hold"


async def test_a_table_that_no_rule_cuts_is_whole_on_every_rank(checkpoint: Checkpoint) -> None:
    for layout, times in (("per_rank", 3), ("shared", 1)):
        seats = make_seats(3)
        load = {"rules": [{"match": "engram.*", "host_resident": {"layout": layout}}]}
        for (table,) in await tables_of(seats, checkpoint, load, (SCALE,), reads=BUFFERED):
            assert_table(table, checkpoint, SCALE, (0, ROWS), layout)
        assert set(reads_of_bytes([seat.storage for seat in seats], checkpoint, SCALE)) == {times}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_ranks_that_take_nothing_of_a_table_take_part(checkpoint: Checkpoint, layout: str) -> None:
    """In layout shared they see it all the same, as ranks of the node."""
    load = {"rules": [{"match": "engram.*", "host_resident": {"layout": layout}, "assign": {"axis": "tp", "to": [1]}}]}
    seats = make_seats(3)
    found = await tables_of(seats, checkpoint, load, (WEIGHT,), reads=BUFFERED)
    for rank, (table,) in enumerate(found):
        assert_table(table, checkpoint, WEIGHT, (0, ROWS) if rank == 1 else (0, 0), layout)
    assert [sum(reads_of_bytes([seat.storage], checkpoint, WEIGHT)) for seat in seats] == [0, ROWS * 96, 0]


async def test_in_a_shared_table_each_rank_writes_its_own_rows_and_no_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's reads stand still: its rows are as they were, all others are there; and each has mapped one memory."""
    buffers: list[HostBuffer] = []
    take = SharedMemory.map

    def map_and_keep(memory: SharedMemory) -> HostBuffer:
        buffers.append(take(memory))
        return buffers[-1]

    monkeypatch.setattr(SharedMemory, "map", map_and_keep)
    seats = make_seats(3)
    gate = seats[1].storage.block("*.safetensors", within=rows_range(checkpoint, WEIGHT, (12, 24)), times=None)
    filling = asyncio.ensure_future(
        tables_of(seats, checkpoint, rules("shared"), (WEIGHT,), reads={**BUFFERED, "chunk_bytes": "1MiB"})
    )
    _, start, stop = place_of(checkpoint, WEIGHT)

    def others_are_done() -> bool:
        done = sum(sum(reads_of_bytes([seats[rank].storage], checkpoint, WEIGHT)) for rank in (0, 2))
        return gate.reached.is_set() and done == (ROWS - 12) * 96

    await asyncio.to_thread(until, others_are_done)
    wanted = checkpoint.tensors[WEIGHT][2]
    expected = wanted[: 12 * 96] + bytes(12 * 96) + wanted[24 * 96 :]
    assert len(buffers) == 3
    assert all(bytes(buffer.memoryview[-(stop - start) :]) == expected for buffer in buffers)
    gate.release()
    await filling
    assert all(bytes(buffer.memoryview[-(stop - start) :]) == wanted for buffer in buffers)


async def test_a_shared_table_is_one_memory_for_all_ranks_of_the_node(checkpoint: Checkpoint) -> None:
    tables = [tables[0] for tables in await tables_of(make_seats(2), checkpoint, rules("shared"), (SCALE,))]
    tables[0].tensor.view(torch.uint8)[36] = 0x77
    assert bytes(tables[1].tensor.view(torch.uint8)[36].tolist()) == b"\x77" * 3
    assert tables[0].tensor.data_ptr() != tables[1].tensor.data_ptr()
