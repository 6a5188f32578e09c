"""Ranks in different control groups: each takes the memory of what it fills from its own, in both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import loader_service as ls
from loader_service.memory.admission import memory_rooms
from tests.e2e.seats import Seat, all_of, make_seats, payload_reads, values
from tests.memory.trees import mount, tree, v2
from tests.support.checkpoints import Checkpoint
from tests.tables.making import LAYOUTS, WEIGHT, assert_table, config_of, rules, service_of, shares

SHARES = (18 * 96, 19 * 96)  # of 37 rows of 96 bytes: what rank 0 and rank 1 hold, and fill
MUCH = 1 << 30


def in_cgroup(root: Path, name: str, free_bytes: int) -> Path:
    """The files of a process in a control group with so much left."""
    return tree(
        root / name,
        {
            "proc/self/cgroup": f"0::/{name}\n",
            "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup", options="rw"),
            **v2(f"sys/fs/cgroup/{name}", free_bytes + 500, "max", 500),
        },
    )


async def fill(checkpoint: Checkpoint, layout: str, roots: Sequence[Path]) -> list[str]:
    """What ranks in these control groups are told that are refused; nothing of theirs was read. Nothing if they have
    got the table."""
    seats = make_seats(len(roots))
    config = config_of(checkpoint, rules(layout), len(roots), memory={"reserve_bytes": 0})

    async def work(seat: Seat) -> str | None:
        async with service_of(seat, config) as service:
            assert service._engine is not None
            service._engine.memory_rooms = lambda: memory_rooms(roots[seat.rank])
            try:
                table = await service.host_table("target", WEIGHT)
            except ls.MemoryLimitError as error:
                told = str(error)
            else:
                assert_table(table, checkpoint, WEIGHT, shares("equal", len(roots))[seat.rank], layout)
                return None
            assert not payload_reads(seat.storage)
            return told

    found = values(await all_of(seats, work))
    told = [text for text in found if text is not None]
    assert len(told) in (0, len(roots)), "all ranks or none"
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_each_rank_takes_its_share_from_its_own_control_group(
    checkpoint: Checkpoint, layout: str, tmp_path: Path
) -> None:
    """Also the host of a shared table, whose control group need not hold all of it."""
    roots = [in_cgroup(tmp_path, name, free) for name, free in zip("ab", SHARES, strict=True)]
    assert await fill(checkpoint, layout, roots) == []


@pytest.mark.parametrize("tight", [0, 1], ids=["host", "member"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_control_group_that_cannot_hold_its_ranks_share_is_named_on_all_ranks(
    checkpoint: Checkpoint, layout: str, tight: int, tmp_path: Path
) -> None:
    roots = [in_cgroup(tmp_path, "ab"[rank], SHARES[rank] - 1 if rank == tight else MUCH) for rank in range(2)]
    told = await fill(checkpoint, layout, roots)
    assert len(set(told)) == 1
    free = SHARES[tight] - 1
    expected = (
        f"host table '{WEIGHT}': rank {tight} wants {free + 1} bytes of host memory, but cgroup /sys/fs/cgroup/"
        f"{'ab'[tight]} has {free} bytes free of {free + 500} bytes"
    )
    assert expected in told[0]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_ranks_in_one_control_group_take_the_table_from_it_together(
    checkpoint: Checkpoint, layout: str, tmp_path: Path
) -> None:
    both = sum(SHARES)
    assert await fill(checkpoint, layout, [in_cgroup(tmp_path / "enough", "pod", both)] * 2) == []
    told = await fill(checkpoint, layout, [in_cgroup(tmp_path / "tight", "pod", both - 1)] * 2)
    assert len(set(told)) == 1
    assert f"2 ranks (lowest: 0) want {both} bytes of host memory, but cgroup /sys/fs/cgroup/pod has" in told[0]
