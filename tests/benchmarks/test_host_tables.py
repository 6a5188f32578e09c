"""The benchmark of host tables runs at a tiny size, compares bytes, names a missed target. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

from benchmarks import host_tables, host_tables_sides, limits
from benchmarks.common import GIB, MIB
from benchmarks.host_tables import (
    DIRECT,
    HUGE,
    LABELS,
    MAPPED,
    MAPPED_TORCH,
    OURS,
    SHARED,
    TORCH,
    Run,
    Series,
    Target,
)
from benchmarks.host_tables_sides import ROW_BYTES, TABLE, Table, Took, make_table
from loader_service.memory.tensors import raw_memory


def test_the_table_is_one_that_safetensors_reads_and_lies_at_no_block(tmp_path: Path) -> None:
    table = make_table(tmp_path, 3 * MIB)
    assert table.offset % 16 == 8
    with safe_open(table.path, framework="pt") as file:
        found = file.get_tensor(TABLE)
    assert (found.dtype, tuple(found.shape)) == (torch.float8_e4m3fn, (table.rows, ROW_BYTES))
    assert host_tables_sides.compare(table.path, table.offset, raw_memory(found)) == ""
    made_ns = table.path.stat().st_mtime_ns
    assert make_table(tmp_path, 3 * MIB) == table
    assert table.path.stat().st_mtime_ns == made_ns, "it is used again"


def test_shares_follow_one_another_and_rings_read_them_all(tmp_path: Path) -> None:
    table = make_table(tmp_path, MIB)
    parts = [table.bytes_of(rank, 3) for rank in range(3)]
    assert [parts[0][0], parts[-1][1]] == [table.offset, table.offset + table.nbytes]
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]
    for direct in (False, limits.can_read_direct(table.path)):
        for start, stop in parts:
            assert limits.read_part(table.path, start, stop, direct=direct, threads=2) >= stop - start


def test_other_bytes_are_found(tmp_path: Path) -> None:
    table = make_table(tmp_path, MIB)
    content = bytearray(table.path.read_bytes()[table.offset : table.offset + table.nbytes])
    assert host_tables_sides.compare(table.path, table.offset, memoryview(content)) == ""
    assert host_tables_sides.compare(table.path, table.offset + 8, memoryview(content)) != ""
    content[-1] ^= 1
    assert "other bytes" in host_tables_sides.compare(table.path, table.offset, memoryview(content))


def test_threads_fill_a_view_that_is_no_multiple_of_their_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(tmp_path, MIB)
    monkeypatch.setattr(host_tables_sides, "OTHER_CHUNK_BYTES", 100_003)
    view = memoryview(bytearray(table.nbytes))
    host_tables_sides.read_in_threads(table.path, table.offset, view)
    assert host_tables_sides.compare(table.path, table.offset, view) == ""
    with pytest.raises(EOFError):
        host_tables_sides.read_in_threads(table.path, table.path.stat().st_size - 5, view)


def test_a_page_cache_that_stays_in_another_state_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(tmp_path, MIB)
    assert host_tables.prepare(Series(OURS, 1, "warm", table.nbytes), table)[0] in (1.0, None)
    monkeypatch.setattr(host_tables, "cached_share", lambda _: 0.5)
    with pytest.raises(RuntimeError, match=r"50\.0% of the file is cached where it is to be cold"):
        host_tables.prepare(Series(OURS, 1, "cold", table.nbytes), table)


def test_a_run_lasts_from_the_first_start_to_the_last_end() -> None:
    run = host_tables.run_of([Took(10.0, 12.0, 0.5), Took(10.5, 13.0, 0.25, "direct")], 0.0, 7)
    assert run == Run(3.0, 0.75, 2.5, 0.0, 7, "direct")


def series(side: str, ranks: int, cache: str, *gib_per_s: float) -> Series:
    return Series(side, ranks, cache, GIB, [Run(1 / speed, 0.1, 1 / speed, 0.0, 0, "") for speed in gib_per_s])


def test_targets_compare_medians() -> None:
    cold = [series(OURS, 4, "cold", 1.8, 1.9, 9.0), series(DIRECT, 4, "cold", 2.0, 2.0, 5.0)]
    cold += [series(HUGE, 4, "cold", 1.9), series(MAPPED, 4, "cold", 1.25), series(OURS, 2, "cold", 0.1)]
    cold += [series(MAPPED_TORCH, 4, "cold", 1.0)]
    warm = [series(OURS, 2, "warm", 3.0), series(MAPPED, 2, "warm", 2.0), series(TORCH, 2, "warm", 4.0)]
    found = host_tables.targets_of([*cold, *warm])
    assert [(round(target.ratio, 2), target.met) for target in found] == [
        (0.95, True),
        (1.0, False),
        (1.52, False),
        (1.9, True),
        (0.75, False),
    ]
    assert [str(target) for target in found] == [
        "cold, 4 ranks, of (d), the limit: 0.95, target 0.93 (met)",
        "cold, 4 ranks, times (b) into huge pages: 1.00, target 1.2 (MISSED); the disk's limit: 1.05",
        "cold, 4 ranks, times (a) into huge pages: 1.52, target 1.8 (MISSED); the disk's limit: 1.60",
        "cold, 4 ranks, times (a) into torch.empty: 1.90, no target; the disk's limit: 2.00",
        "warm, 2 ranks, times the best of (a) and (b): 0.75, target 1 (MISSED)",
    ]
    assert host_tables.targets_of([series(OURS, 4, "cold", 1.0)]) == []


def test_sizes_follow_the_machine_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 8 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert host_tables.scaled_bytes(GIB // 2, tmp_path) == (
        GIB // 2,
        "as large as wanted; NOT larger than 2 GiB, so that the figures say little",
    )
    nbytes, note = host_tables.scaled_bytes(100 * GIB, tmp_path)
    assert nbytes <= 2.7 * GIB
    assert note.startswith("scaled from 100 GiB: room for 5.4 GiB in memory")


@pytest.mark.processes
def test_every_side_runs_and_has_the_right_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tables, "targets_of", lambda _: [])
    arguments = ["--gib", "0.02", "--rounds", "1", "--ranks", "2", "--cache", "cold", "--folder", str(tmp_path)]
    assert host_tables.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {each["side"]: each for each in document["series"]}
    direct = limits.can_read_direct(next(tmp_path.rglob("*.safetensors")))
    assert found.keys() == LABELS.keys() - (set() if direct else {DIRECT})
    assert document["wrong"] == []
    for side, each in found.items():
        assert len(each["rounds"]) == 1
        assert each["medians"]["gib_per_s"] > 0
        assert bool(each["rounds"][0]["how"]) == (side in (OURS, SHARED))


def test_direct_rings_are_no_limit_of_a_warm_table(tmp_path: Path) -> None:
    found = host_tables.make_series(make_table(tmp_path, MIB), [1, 2], ["cold", "warm"], list(LABELS))
    warm = [each for each in found if each.cache == "warm"]
    assert {each.side for each in warm} == LABELS.keys() - {DIRECT}
    assert {each.ranks for each in warm} == {1, 2}


@pytest.mark.processes
def test_wrong_bytes_and_missed_targets_are_told_and_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def somewhere_else(folder: Path, nbytes: int) -> Table:
        table = make_table(folder, nbytes)
        return Table(table.path, table.offset + 16, table.rows)  # what the sides load is not what lies there

    monkeypatch.setattr(host_tables, "make_table", somewhere_else)
    sides = ["--sides", ",".join((MAPPED, TORCH)), "--cache", "warm"]
    assert host_tables.main(["--gib", "0.01", "--rounds", "1", "--ranks", "1", "--folder", str(tmp_path), *sides]) == 1
    out = capsys.readouterr().out
    assert "WRONG: (a) memory-mapped copy, huge pages, 1 ranks, rank 0: other bytes between" in out
    assert "(b) into torch.empty, 1 ranks" not in out, "that side reads where it is told"
    monkeypatch.setattr(host_tables, "make_table", make_table)
    monkeypatch.setattr(host_tables, "targets_of", lambda _: [Target("of the sun", 0.5, 1.0)])
    assert host_tables.main(["--gib", "0.01", "--rounds", "1", "--ranks", "1", "--folder", str(tmp_path), *sides]) == 1
    out = capsys.readouterr().out
    assert "bytes: the file's, on every side" in out
    assert "of the sun: 0.50, target 1 (MISSED)" in out
