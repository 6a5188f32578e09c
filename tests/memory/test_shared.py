"""Memory that processes share: without a name, of a size that stays, and never more than there is."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loader_service.errors import MemoryLimitError
from loader_service.memory import shared
from loader_service.memory.admission import Room
from loader_service.memory.allocators import HUGE_PAGE_BYTES, HostBuffer, collapse_shared, map_shared
from loader_service.memory.shared import SharedMemory, refusal_of_shared
from tests.rows.making import until
from tests.support.descriptors import no_descriptor_is_free

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.create(3 * MIB)
    yield made
    made.close()


def resident(memory: SharedMemory) -> int:
    return os.fstat(memory.descriptor).st_blocks * 512


def test_two_mappings_are_the_same_memory_which_begins_as_zeros(memory: SharedMemory) -> None:
    one, other = memory.map(), memory.map()
    assert one.address != other.address
    assert not np.frombuffer(one.memoryview, np.uint8).any()
    one.memoryview[5:10] = b"abcde"
    assert bytes(other.memoryview[4:11]) == b"\0abcde\0"
    assert (one.nbytes, other.tensor.numel()) == (3 * MIB, 3 * MIB)


def test_a_mapping_outlives_the_descriptor_and_a_closed_one_maps_nothing(memory: SharedMemory) -> None:
    buffer = memory.map()
    memory.close()
    memory.close()
    buffer.memoryview[:] = b"x" * (3 * MIB)
    assert bytes(buffer.memoryview[-3:]) == b"xxx"
    with pytest.raises(MemoryLimitError):
        memory.map()


def test_it_has_no_name_anywhere() -> None:
    memory = SharedMemory.create(MIB)
    memory.reserve(0, MIB)
    found = os.fstat(memory.descriptor)
    assert (found.st_nlink, found.st_dev == os.stat("/dev/shm").st_dev) == (0, False)
    assert os.readlink(f"/proc/self/fd/{memory.descriptor}").startswith("/memfd:loader-service")
    memory.close()


def test_nobody_can_change_its_size(memory: SharedMemory) -> None:
    for size in (0, MIB, 4 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(memory.descriptor).st_size == 3 * MIB


def test_programs_do_not_inherit_it(memory: SharedMemory) -> None:
    assert not os.get_inheritable(memory.descriptor)


def test_memory_of_no_bytes(memory: SharedMemory) -> None:
    empty = SharedMemory.create(0)
    empty.reserve(0, 0)
    assert empty.map().nbytes == 0
    empty.close()


# -- reserving


def test_what_is_reserved_is_there_and_only_that(memory: SharedMemory) -> None:
    assert resident(memory) == 0
    memory.reserve(MIB, 2 * MIB)
    assert MIB <= resident(memory) <= MIB + 8192
    memory.reserve(MIB, 2 * MIB)
    assert resident(memory) <= MIB + 8192
    memory.reserve(5, 5)
    buffer = memory.map()
    assert not any(buffer.memoryview[MIB : 2 * MIB])


def test_reserving_leaves_what_others_have_written(memory: SharedMemory) -> None:
    buffer = memory.map()
    buffer.memoryview[MIB - 5 : MIB + 5] = b"0123456789"
    memory.reserve(0, 3 * MIB)
    assert bytes(buffer.memoryview[MIB - 5 : MIB + 5]) == b"0123456789"


def rooms(monkeypatch: pytest.MonkeyPatch, *free: int) -> list[int]:
    """What is free at each look, the last for ever; returns the looks."""
    left, looks = list(free), []

    def look() -> tuple[Room, ...]:
        now = left.pop(0) if len(left) > 1 else left[0]
        looks.append(now)
        return (Room("", 1 << 40, 1 << 40), Room("/c", 1 << 30, now))

    monkeypatch.setattr(shared, "memory_rooms", look)
    return looks


def test_less_memory_than_is_wanted_is_an_error_with_both_figures_before_any_is_taken(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms(monkeypatch, 2 * MIB - 1)
    with pytest.raises(
        MemoryLimitError, match=r"2\.00 MiB of shared memory cannot be had .*: 2\.00 MiB of memory"
    ) as got:
        memory.reserve(0, 2 * MIB)
    assert got.value.errno == errno.ENOMEM
    assert "layout per_rank" in str(got.value)
    assert resident(memory) == 0


def test_it_looks_again_on_the_way_and_stops_when_others_have_taken_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_RESERVE_STEP_BYTES", MIB)
    looks = rooms(monkeypatch, 100 * MIB, 99 * MIB, 5 * MIB)
    memory = SharedMemory.create(8 * MIB)
    with pytest.raises(MemoryLimitError, match=r"6\.00 MiB .*: 5\.00 MiB of memory"):
        memory.reserve(0, 8 * MIB)
    assert len(looks) == 3
    assert resident(memory) <= 2 * MIB + 8192
    memory.close()


def test_it_stops_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_RESERVE_STEP_BYTES", MIB)
    memory = SharedMemory.create(8 * MIB)
    looks = iter([False, False, True])
    memory.reserve(0, 8 * MIB, lambda: next(looks))
    assert 2 * MIB <= memory.reserved_bytes <= 2 * MIB + 8192
    memory.close()


def test_it_looks_at_every_step_of_the_memory_wherever_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_RESERVE_STEP_BYTES", 2 * MIB)
    looks = rooms(monkeypatch, 100 * MIB)
    memory = SharedMemory.create(8 * MIB)
    memory.reserve(MIB, 7 * MIB)
    assert len(looks) == 4, "1 to 2, to 4, to 6, to 7 MiB: huge pages are not cut"
    memory.close()


def test_a_system_that_tells_of_no_memory_is_not_refused(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "memory_rooms", lambda: ())
    memory.reserve(0, MIB)
    assert resident(memory) >= MIB


def test_a_process_that_can_open_nothing_more_is_told_so() -> None:
    """Not even what would tell how much memory is free."""
    with no_descriptor_is_free(), pytest.raises(MemoryLimitError, match=r"\(Too many open files\): .*ulimit -n") as got:
        SharedMemory.create(MIB)
    assert got.value.errno == errno.EMFILE


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_the_systems_own_refusal_is_told_with_both_figures(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(descriptor: int, start: int, nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    rooms(monkeypatch, 77 * MIB)
    monkeypatch.setattr("loader_service.memory.shared.os.posix_fallocate", refuse)
    with pytest.raises(MemoryLimitError, match=rf"^1\.00 MiB .*{os.strerror(code)}\): 77\.00 MiB of memory") as caught:
        memory.reserve(0, MIB)
    assert caught.value.errno == code


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSYS, "seccomp"),
        (errno.EPERM, "seccomp"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EFBIG, "ulimit -f"),
        (errno.ENOMEM, "of memory is available"),
    ],
)
def test_a_system_without_memory_files_is_told_of_and_known_before(
    monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("loader_service.memory.shared.os.memfd_create", refuse)
    problem = refusal_of_shared(MIB)
    assert problem is not None
    assert problem.startswith(f"1.00 MiB of shared memory cannot be had ({os.strerror(code)}): ")
    assert advice in problem
    with pytest.raises(MemoryLimitError) as caught:
        SharedMemory.create(MIB)
    assert str(caught.value).startswith(f"{problem}, or do not share: ")
    assert caught.value.errno == code


@pytest.mark.usefixtures("no_leaked_descriptors")
def test_looking_whether_memory_can_be_shared_keeps_nothing() -> None:
    assert refusal_of_shared(MIB) is None


_SMALL_FILES = """
import resource
from loader_service.memory.shared import refusal_of_shared
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
print(refusal_of_shared(1 << 20), refusal_of_shared(2 << 20))
"""


def test_a_limit_of_file_sizes_is_found_out() -> None:
    done = subprocess.run([sys.executable, "-c", _SMALL_FILES], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "None 2.00 MiB of shared memory cannot be had (File too large): raise the limit of file "
    )


def test_more_than_the_machine_has_is_refused_for_real() -> None:
    memory = SharedMemory.create(1 << 50, instead="keep less")
    said = r"1048576\.00 GiB of shared memory cannot be had .*: \d+\.\d\d [GM]iB .*, or keep less$"
    with pytest.raises(MemoryLimitError, match=said):
        memory.reserve(0, 1 << 50)
    assert resident(memory) == 0
    memory.close()


def test_an_address_space_that_is_full_is_an_error_and_leaves_nothing_mapped() -> None:
    memory = SharedMemory.create(1 << 60)
    with pytest.raises(MemoryLimitError):
        memory.map()
    memory.close()


@pytest.mark.usefixtures("no_leaked_descriptors")
@pytest.mark.parametrize("step", ["truncate", "fcntl"])
def test_a_failure_while_it_is_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "none")

    name = "os.truncate" if step == "truncate" else "fcntl.fcntl"
    monkeypatch.setattr(f"loader_service.memory.shared.{name}", refuse)
    with pytest.raises(MemoryLimitError, match=r"^1\.00 MiB of shared memory"):
        SharedMemory.create(MIB)


def test_elsewhere_than_on_linux_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader_service.memory.shared.sys.platform", "darwin")
    with pytest.raises(MemoryLimitError, match="needs Linux: do not share"):
        SharedMemory.create(MIB)


# -- from another process


@pytest.mark.usefixtures("no_leaked_descriptors")
@pytest.mark.parametrize("what", ["too small", "not sealed", "a file", "a pipe"])
def test_a_descriptor_that_is_not_what_was_announced_is_refused_and_closed(what: str) -> None:
    if what == "too small":
        descriptor = SharedMemory.create(MIB - 1).descriptor
    elif what == "not sealed":
        descriptor = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(descriptor, MIB)
    elif what == "a file":
        with tempfile.TemporaryFile() as file:
            file.truncate(MIB)
            descriptor = os.dup(file.fileno())
    else:
        descriptor, other = os.pipe()
        os.close(other)
    with pytest.raises(MemoryLimitError, match="1048576 bytes was announced"):
        SharedMemory.received(descriptor, MIB)
    with pytest.raises(OSError):
        os.fstat(descriptor)


_RANK = """
import sys
from loader_service.memory.shared import SharedMemory, refusal_of_shared
descriptor, nbytes, start, stop, fill = map(int, sys.argv[1:])
memory = SharedMemory.received(descriptor, nbytes)
memory.reserve(start, stop)
buffer = memory.map()
memory.close()
buffer.memoryview[start:stop] = bytes([fill]) * (stop - start)
print("done", flush=True)
if fill == 9:
    sys.stdin.read()
"""


def start(memory: SharedMemory, nbytes: int, first: int, last: int, fill: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _RANK, *map(str, (memory.descriptor, nbytes, first, last, fill))],
        pass_fds=(memory.descriptor,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_reserve_and_fill_their_parts_at_the_same_time() -> None:
    nbytes, edges = 24 * MIB + 777, [0, 5 * MIB + 13, 6 * MIB, 20 * MIB + 1, 24 * MIB + 777]
    memory = SharedMemory.create(nbytes)
    ranks = [start(memory, nbytes, edges[r], edges[r + 1], r + 1) for r in range(4)]
    for rank in ranks:
        out, _ = rank.communicate(timeout=60)
        assert (rank.returncode, out) == (0, "done\n")
    held = np.frombuffer(memory.map().memoryview, np.uint8)
    for r in range(4):
        assert (held[edges[r] : edges[r + 1]] == r + 1).all()
    assert resident(memory) <= nbytes + 8192
    memory.close()


def shmem_bytes() -> int:
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:")]
    return int(line.split()[1]) * 1024


def test_a_killed_process_leaves_nothing() -> None:
    nbytes = 256 * MIB
    memory = SharedMemory.create(nbytes)
    rank = start(memory, nbytes, 0, nbytes, 9)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "done\n"
    memory.close()
    full = shmem_bytes()
    rank.send_signal(signal.SIGKILL)
    rank.communicate(timeout=60)
    until(lambda: shmem_bytes() < full - nbytes * 3 // 4)


# -- mappings


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, HUGE_PAGE_BYTES, 5 * MIB + 3])
def test_mappings_are_aligned_for_huge_pages_from_their_size_on(nbytes: int) -> None:
    memory = SharedMemory.create(nbytes)
    buffer = memory.map()
    assert buffer.address % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 4096) == 0
    buffer.memoryview[nbytes - 1] = 7
    assert os.pread(memory.descriptor, 1, nbytes - 1) == b"\7"
    memory.close()


def test_mapping_what_is_no_memory_is_an_error() -> None:
    reading, writing = os.pipe()
    for descriptor in (-1, reading):
        with pytest.raises(MemoryLimitError):
            map_shared(descriptor, 4 * MIB)
    os.close(reading)
    os.close(writing)


# -- huge pages


def pages_are_collapsed() -> bool:
    """Whether memory files get huge pages by collapsing and not by themselves; asked of the system, and not of what is
    tested."""
    configured = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    release = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
    return (
        release >= (6, 1)
        and configured.exists()
        and bool({"[never]", "[advise]"} & set(configured.read_text().split()))
    )


needs_collapsing = pytest.mark.skipif(
    not pages_are_collapsed(),
    reason="memory files get huge pages by themselves here, or none (shmem_enabled, Linux 6.1)",
)


def huge_bytes(buffer: HostBuffer) -> int:
    """How much of a mapping this process has mapped by huge pages, as the kernel counts it."""
    text = Path("/proc/self/smaps").read_text()
    about = text[text.index(f"{buffer.address:x}-") :]
    (line,) = [line for line in about.splitlines()[:40] if line.startswith("ShmemPmdMapped:")][:1]
    return int(line.split()[1]) * 1024


@needs_collapsing
@pytest.mark.parametrize(
    ("start", "stop", "wanted"),
    [
        (0, 8 * MIB, 8 * MIB),
        (1, 8 * MIB - 1, 4 * MIB),
        (MIB, 7 * MIB + 5, 4 * MIB),
        (2 * MIB + 1, 4 * MIB + 1, 0),
        (MIB, 2 * MIB, 0),
    ],
)
def test_whole_huge_pages_of_what_is_reserved_are_such_and_nothing_beside_it(
    start: int, stop: int, wanted: int
) -> None:
    memory = SharedMemory.create(8 * MIB)
    memory.reserve(start, stop)
    pages = (start // 4096 * 4096, -(-stop // 4096) * 4096)
    assert pages[1] - pages[0] <= resident(memory) <= pages[1] - pages[0] + 8192
    buffer = memory.map()
    assert not any(buffer.memoryview[start:stop])
    buffer.memoryview[start:stop:4096] = b"x" * len(range(start, stop, 4096))
    assert (memory.collapsed_bytes, huge_bytes(buffer)) == (wanted, wanted)
    memory.close()


@needs_collapsing
def test_steps_and_ranks_do_not_cut_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_RESERVE_STEP_BYTES", 4 * MIB)
    memory = SharedMemory.create(16 * MIB)
    received = SharedMemory.received(os.dup(memory.descriptor), 16 * MIB)
    memory.reserve(0, 9 * MIB)
    received.reserve(9 * MIB, 16 * MIB)
    assert (memory.collapsed_bytes, received.collapsed_bytes) == (8 * MIB, 6 * MIB)
    memory.reserve(0, 16 * MIB)
    assert memory.reserved_bytes <= 16 * MIB + 8192
    memory.close()
    received.close()


def test_what_others_have_written_stays_and_they_see_what_is_written_then() -> None:
    memory = SharedMemory.create(8 * MIB)
    other = memory.map()
    content = np.random.default_rng(1).bytes(5 * MIB)
    other.memoryview[MIB : 6 * MIB] = content
    memory.reserve(0, 8 * MIB)
    buffer = memory.map()
    assert buffer.memoryview[MIB : 6 * MIB] == content
    assert other.memoryview[MIB : 6 * MIB] == content
    assert not any(other.memoryview[6 * MIB :])
    buffer.memoryview[:] = b"y" * (8 * MIB)
    assert other.memoryview == b"y" * (8 * MIB)
    memory.close()


@pytest.mark.parametrize(("code", "asked"), [(errno.EINVAL, 1), (errno.ENOMEM, 4), (errno.EBUSY, 4), (errno.EAGAIN, 4)])
def test_where_there_are_no_huge_pages_small_ones_do_and_a_kernel_without_any_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, code: int, asked: int
) -> None:
    calls: list[tuple[int, int]] = []

    def refuse(descriptor: int, start: int, stop: int) -> int:
        calls.append((start, stop))
        return code

    monkeypatch.setattr(shared, "_RESERVE_STEP_BYTES", 2 * MIB)
    monkeypatch.setattr(shared, "collapse_shared", refuse)
    memory = SharedMemory.create(8 * MIB)
    memory.reserve(0, 8 * MIB)
    assert 8 * MIB <= memory.reserved_bytes <= 8 * MIB + 8192
    assert (memory.collapsed_bytes, calls) == (0, [(at, at + 2 * MIB) for at in range(0, 2 * asked * MIB, 2 * MIB)])
    memory.close()


def test_collapsing_what_is_not_there_is_refused_and_leaves_nothing_mapped() -> None:
    memory = SharedMemory.create(4 * MIB)
    before = Path("/proc/self/maps").read_text().count("memfd:loader-service")
    assert collapse_shared(memory.descriptor, 0, 4 * MIB) != 0
    assert Path("/proc/self/maps").read_text().count("memfd:loader-service") == before
    assert resident(memory) == 0
    memory.close()
