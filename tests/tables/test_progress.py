"""Who watches a load learns that rows of a table are being read: the other ranks, and a person."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from loader_service.agreement.session import Session
from loader_service.cli import app
from loader_service.cli.host_rows import pieces
from tests.e2e.seats import make_seats
from tests.support.checkpoints import Checkpoint
from tests.tables.making import LAYOUTS, ROWS, TABLES, WEIGHT, config_of, rules, service_of


async def test_the_other_ranks_hear_of_rows_that_are_read_until_the_load_is_left(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Session, "report_progress", lambda _, progress: told.append(str(progress)))
    (seat,) = make_seats(1)
    config = config_of(checkpoint, rules("per_rank"), 1, reads={"chunk_bytes": 1024, "threads": 1})
    rows = torch.empty((ROWS, 96), dtype=torch.float8_e4m3fn)
    async with service_of(seat, config) as service:
        async with service.open("target") as load:
            source = load.tables[WEIGHT]
            await source.aread_rows_into(rows, 0)
            assert len(told) >= ROWS * 96 // 1024, "after each chunk"
            assert told[-1] == f"{ROWS * 96} bytes read, {ROWS * 96} bytes of it rows of host-resident tables"
        left = len(told)
        await source.aread_rows_into(rows, 0)
        assert len(told) == left


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_the_other_ranks_hear_from_the_start_what_a_host_table_is_at(
    checkpoint: Checkpoint, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Session, "report_progress", lambda _, progress: told.append(str(progress)))
    (seat,) = make_seats(1)
    async with service_of(seat, config_of(checkpoint, rules(layout), 1)) as service:
        await service.host_table("target", WEIGHT)
    steps = [text for text in told if "reserving" in text or "reading" in text]
    assert steps == [f"reserving shared memory of '{WEIGHT}'"] * (layout == "shared") + [f"reading rows of '{WEIGHT}'"]


class Noted:
    """A load's progress as its consumer tells it."""

    def __init__(self) -> None:
        self.total_bytes = self.tensors = 0
        self.bytes_by_table: dict[str, list[int]] = {}
        self._of = ""

    def __enter__(self) -> Noted:
        return self

    def __exit__(self, *exc: object) -> None:
        assert not self._of

    def begin(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes

    def rows_of(self, table: str) -> None:
        self._of = table

    def advance(self, nbytes: int) -> None:
        self.bytes_by_table.setdefault(self._of, []).append(nbytes)

    def tensor_done(self) -> None:
        self.tensors += 1
        self._of = ""

    def tick(self) -> None:
        """Nothing is shown."""


def test_a_person_sees_whose_rows_are_read_and_tensors_that_are_counted_once(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    noted = Noted()
    monkeypatch.setattr("loader_service.cli.load.progress_of", lambda load, *, shown, others: noted)
    monkeypatch.setattr("loader_service.cli.load.pieces", partial(pieces, piece_bytes=500))
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "checkpoint": {"path": str(checkpoint.folder)},
                "mesh": {"tp": 1},
                "loads": {"target": rules("per_rank")},
            }
        )
    )
    assert app.run(["load", str(config), "--load", "target", "--json"]) == 0
    assert noted.tensors == len(checkpoint.tensors)
    assert noted.bytes_by_table.keys() == {"", *TABLES}
    assert len(noted.bytes_by_table[WEIGHT]) > 1
    assert sum(map(sum, noted.bytes_by_table.values())) == noted.total_bytes == checkpoint.payload_bytes
