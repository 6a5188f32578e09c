"""The limits count what they move, and their conditions are what they say. No timing is asserted."""

from __future__ import annotations

import re
import resource
import threading
from pathlib import Path

import psutil
import pytest

from loader_service.errors import CheckpointError, EndOfFileError
from loader_service.measuring import conditions, limits
from loader_service.measuring.conditions import cached_parts, cached_share, condition_memory, drop_from_cache
from loader_service.measuring.limits import CHUNK_BYTES, Part, Rate, StoppedError, parts_of, read_parts
from loader_service.measuring.machine import this_machine, usable_cores
from loader_service.memory.admission import Room
from loader_service.memory.allocators import HostBuffer, allocate_host

MIB = 1 << 20
SIZES = (5 * MIB + 123, 4096, 1)  # tails that are no block


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{i}.bin" for i in range(len(SIZES))]
    for path, size in zip(made, SIZES, strict=True):
        path.write_bytes(bytes(size))
    return made


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_ring_counts_every_byte_once(files: list[Path], direct: bool, threads: int) -> None:
    if direct and not limits.can_read_direct(files[0]):
        pytest.skip("no direct reads here")
    assert read_parts(parts_of(files), direct=direct, threads=threads, chunk_bytes=MIB) == sum(SIZES)


def test_parts_are_the_files_in_order_up_to_a_number_of_bytes(files: list[Path]) -> None:
    names = [str(path) for path in files]
    assert parts_of(files) == [Part(name, 0, size) for name, size in zip(names, SIZES, strict=True)]
    assert parts_of(files, MIB) == [Part(names[0], 0, MIB)]
    assert parts_of(files, SIZES[0] + 5) == [Part(names[0], 0, SIZES[0]), Part(names[1], 0, 5)]


def test_a_ring_ends_early(files: list[Path]) -> None:
    assert read_parts(parts_of(files), direct=False, threads=1, within_s=0.0) == 0
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        read_parts(parts_of(files), direct=False, threads=2, stop=stop)


def test_errors_are_those_of_every_read(files: list[Path]) -> None:
    with pytest.raises(EndOfFileError):
        read_parts([Part(str(files[1]), 0, 9000)], direct=False, threads=1)
    with pytest.raises(CheckpointError):
        read_parts([Part("/nowhere/x.safetensors", 0, 9000)], direct=False, threads=1)
    assert not limits.can_read_direct("/nowhere/x.safetensors")


@pytest.mark.parametrize("huge", [True, False])
def test_fresh_memory_is_counted_and_on_the_pages_that_were_asked_for(
    huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def allocate(nbytes: int, *, huge: bool) -> HostBuffer:
        asked.append(huge)
        return allocate_host(nbytes, huge=huge)

    monkeypatch.setattr(limits, "allocate_host", allocate)
    rate = limits.touch_fresh(7 * MIB + 5, threads=2, huge=huge)
    assert (rate.nbytes, set(asked)) == (7 * MIB + 4, {huge})
    assert rate.seconds > 0


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping holds it")


def test_ordinary_pages_are_asked_for_as_huge_ones_are() -> None:
    ordinary, huge = (allocate_host(8 * MIB, huge=huge) for huge in (False, True))
    if not {"hg", "nh"} & set(flags_of(huge.address)):
        pytest.skip("this system has no huge pages to advise about")
    assert "nh" in flags_of(ordinary.address)
    assert "hg" in flags_of(huge.address)


def test_copies_are_counted_in_whole_buffers() -> None:
    assert limits.copy_memory(5 * MIB, threads=2, copy_bytes=MIB).nbytes == 6 * MIB


def test_a_rate_of_nothing_is_nothing() -> None:
    assert (Rate(0, 0.0, 0.0).gib_per_s, Rate(0, 0.0, 0.0).cpu_s_per_gib) == (0.0, 0.0)
    assert Rate(1 << 30, 0.5, 0.25).gib_per_s == 2.0


def test_the_page_cache_is_brought_into_a_state_and_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(2 * CHUNK_BYTES + 5000))
    parts = parts_of([path])
    conditions.read_into_cache(parts)
    share = cached_share([path])
    if not share:
        pytest.skip("this kernel or file system does not say what is cached")
    assert share > 0.99
    assert sum(part.nbytes for part in cached_parts(parts)) == 2 * CHUNK_BYTES + 5000
    drop_from_cache([path])
    left = cached_share([path])
    assert left is not None
    assert left < 0.01
    assert cached_parts(parts) == []


@pytest.mark.parametrize(
    ("rooms", "spare"),
    [
        ([], 0),
        ([Room("", 100 * MIB, 50 * MIB)], 40 * MIB),
        ([Room("", 100 * MIB, 50 * MIB), Room("/small", 20 * MIB, 12 * MIB)], 10 * MIB),
        ([Room("", 100 * MIB, 5 * MIB)], 0),
    ],
    ids=["unknown", "machine", "control group", "none left"],
)
def test_measuring_leaves_a_tenth_of_every_room_free(rooms: list[Room], spare: int) -> None:
    assert conditions.spare_memory(rooms) == spare
    assert condition_memory(45 * MIB, spare_bytes=spare) == min(45 * MIB, spare)


def test_measuring_takes_half_of_the_addresses_that_a_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_bytes = psutil.Process().memory_info().vms + 64 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit_bytes, limit_bytes))
    assert conditions.spare_memory([Room("", 1 << 40, 1 << 40)]) == pytest.approx(32 * MIB, abs=2 * MIB)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", None), ("", None)],
)
def test_a_quota_of_the_control_group_counts_as_fewer_cores(
    quota: str, cores: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "sys/fs/cgroup/cpu.max"
    place.parent.mkdir(parents=True)
    place.write_text(quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(tmp_path) == (cores or 8)


@pytest.mark.parametrize(("text", "chosen"), [("always madvise [never]\n", "never"), ("[always] never", "always")])
def test_what_the_system_says_of_huge_pages(text: str, chosen: str, tmp_path: Path) -> None:
    place = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    place.parent.mkdir(parents=True)
    place.write_text(text)
    assert this_machine([], tmp_path).huge_pages == chosen


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COPY_BYTES", MIB)
