"""The benchmark of starts does what it says at a tiny size, and names what an attached worker must not do."""

from __future__ import annotations

from pathlib import Path

import pytest

import loader_service as ls
from benchmarks import restart
from benchmarks.common import MIB, layered_tensors, make_checkpoint
from benchmarks.restart import Run, Series, Start, missed, print_starts, start, starts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, layered_tensors(4 * MIB), 2)
    return tmp_path


@pytest.mark.may_block
async def test_an_attached_start_reads_nothing_and_the_others_everything(folder: Path) -> None:
    handed = set()
    async with ls.ResidentService(ls.config_from_dict(restart.config_of(str(folder))), "solo") as service:
        await service.fill()
        for each in starts(folder):
            run = await start(each)
            assert (run.read_bytes == 0) == each.attach
            assert 0 < run.open_s <= run.first_s <= run.all_s
            handed.add(run.handed_bytes)
    assert handed == {sum(tensor.nbytes for tensor in layered_tensors(4 * MIB))}


def test_what_is_missed_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def series(label: str, *, attach: bool, first_s: float, read_bytes: int) -> Series:
        run = Run(0.1, first_s, 2.0, 0.5, read_bytes, 1 << 30, read_bytes)
        return Series(Start(label, "owned", "cold", attach, str(folder)), [run])

    good = series("owned, attached", attach=True, first_s=0.2, read_bytes=0)
    cold = series("owned, cold", attach=False, first_s=3.0, read_bytes=1 << 30)
    assert missed([good, cold]) == []
    slow = series("late", attach=True, first_s=1.5, read_bytes=0)
    reads = series("reads", attach=True, first_s=0.2, read_bytes=1)
    assert missed([slow, reads]) == ["late: the first tensor after 1.50 s", "reads: something was read"]
    print_starts([good, cold])
    assert "1.000 x" in capsys.readouterr().out
