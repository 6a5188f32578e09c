from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from loader_service.errors import ConfigError, MemoryLimitError
from loader_service.memory import allocators
from loader_service.memory.allocators import HUGE_PAGE_BYTES, PAGE_BYTES, HostRegion, _AtItsEnd, allocate_host

MIB = 1 << 20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def smaps_of(address: int) -> dict[str, int] | None:
    """The kernel's figures (KiB) for the mapping that holds `address`, None if nothing is mapped there."""
    found: dict[str, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            if found is not None:
                return found
            start, stop = (int(text, 16) for text in head.groups())
            found = {} if start <= address < stop else None
        elif found is not None and (figure := re.match(r"(\w+): +(\d+) kB", line)):
            found[figure[1]] = int(figure[2])
    return found


def is_mapped(address: int) -> bool:
    return smaps_of(address) is not None


def is_resident(address: int) -> bool:
    """Whether the page of `address` is mapped, and has memory."""
    found = ctypes.c_ubyte()
    page = ctypes.c_void_p(address // PAGE_BYTES * PAGE_BYTES)
    return ctypes.CDLL(None).mincore(page, ctypes.c_size_t(PAGE_BYTES), ctypes.byref(found)) == 0 and bool(found.value)


_MARK = os.urandom(8)


def mark(*addresses: int) -> tuple[int, ...]:
    """Marks the end of each address's page, so that `still_there` knows this memory from what is mapped there later:
    freed addresses are soon others'."""
    for address in addresses:
        ctypes.memmove(_end_of_page(address), _MARK, len(_MARK))
    return addresses


def still_there(addresses: Sequence[int]) -> list[bool]:
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        return [_read(memory.fileno(), _end_of_page(address)) == _MARK for address in addresses]


def _read(memory: int, address: int) -> bytes:
    """Nothing where nothing is mapped. By the kernel: what is mapped there by now may not be readable."""
    try:
        return os.pread(memory, len(_MARK), address)
    except OSError:
        return b""


def _end_of_page(address: int) -> int:
    return (address // PAGE_BYTES + 1) * PAGE_BYTES - len(_MARK)


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 100_000, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
@pytest.mark.parametrize("offset", [0, 1, 511, 4095, 4096, 123_456_789])
def test_memory_is_congruent_with_the_file_offset_and_writable_to_its_end(nbytes: int, offset: int) -> None:
    buffer = allocate_host(nbytes, congruent_to=offset)
    view = buffer.memoryview
    assert buffer.address % PAGE_BYTES == offset % PAGE_BYTES
    assert (buffer.nbytes, view.nbytes, buffer.tensor.nbytes) == (nbytes, nbytes, nbytes)
    assert (view.format, view.ndim, view.readonly, view.c_contiguous) == ("B", 1, False, True)
    assert (buffer.tensor.dtype, buffer.tensor.shape) == (torch.uint8, (nbytes,))
    if nbytes:
        assert buffer.tensor.data_ptr() == buffer.address
        view[0], view[-1] = 1, 2
        assert (int(buffer.tensor[-1]), view[0]) == (2, 1 if nbytes > 1 else 2)


@pytest.mark.parametrize("nbytes", [2 * MIB, 9 * MIB, 64 * MIB])
def test_large_memory_begins_at_a_huge_page(nbytes: int) -> None:
    for buffer in [allocate_host(nbytes, congruent_to=77) for _ in range(4)]:
        assert buffer.address % HUGE_PAGE_BYTES == 77


@pytest.mark.skipif("[never]" in THP.read_text(), reason="transparent huge pages are switched off")
def test_large_memory_gets_huge_pages_and_no_more_than_was_asked_for() -> None:
    buffer = allocate_host(33 * MIB)
    buffer.tensor.fill_(1)
    figures = smaps_of(buffer.address)
    assert figures is not None
    assert figures["Rss"] == 33 * 1024
    assert figures["AnonHugePages"] >= 30 * 1024  # of 32: the machine may be short of them


def test_memory_is_private_and_not_touched_before_it_is_used() -> None:
    buffer = allocate_host(16 * MIB)
    figures = smaps_of(buffer.address)
    assert figures is not None
    assert figures["Rss"] == 0
    start = rf"^{buffer.address:x}-[0-9a-f]+ rw-p "
    assert re.search(start, Path("/proc/self/maps").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda buffer: buffer.memoryview, id="memoryview"),
        pytest.param(lambda buffer: buffer.memoryview[5:10].cast("b"), id="part of a memoryview"),
        pytest.param(lambda buffer: buffer.tensor, id="tensor"),
        pytest.param(lambda buffer: buffer.tensor[8:16].view(torch.float32), id="view of a tensor"),
        pytest.param(lambda buffer: np.asarray(buffer.memoryview)[3:], id="array"),
        pytest.param(lambda buffer: buffer.part(7, 9), id="part"),
    ],
)
@pytest.mark.parametrize("nbytes", [100_000, 4 * MIB])
def test_memory_lives_exactly_as_long_as_the_last_view_of_it(view: object, nbytes: int) -> None:
    gc.disable()  # reference counts alone must do
    try:
        unmapped: list[int] = []
        buffer = allocate_host(nbytes)
        buffer.memoryview[7] = 9
        buffer.before_unmap(lambda: unmapped.append(1))
        address = buffer.address
        kept = view(buffer)  # type: ignore[operator]
        del buffer
        assert unmapped == []
        assert is_mapped(address)
        del kept
        assert unmapped == [1]
    finally:
        gc.enable()


def test_freed_memory_goes_back_to_the_system() -> None:
    buffers = [allocate_host(8 * MIB) for _ in range(4)]
    addresses = [buffer.address for buffer in buffers]
    for buffer in buffers:
        buffer.tensor.fill_(1)
    mark(*addresses)
    buffers.clear()
    del buffer
    assert still_there(addresses) == [False] * 4


def test_neither_address_space_nor_a_larger_mapping_is_left_by_aligning() -> None:
    before_bytes = psutil.Process().memory_info().vms
    for _ in range(64):
        buffer = allocate_host(4 * MIB, congruent_to=1)
        figures = smaps_of(buffer.address)
        assert figures is not None
        assert figures["Size"] == 4 * 1024 + 4
        del buffer
    assert psutil.Process().memory_info().vms - before_bytes < 16 * MIB


def test_a_part_shares_the_memory_of_the_whole() -> None:
    whole = allocate_host(1000, congruent_to=10)
    part = whole.part(100, 300)
    part.memoryview[0] = 5
    assert (part.nbytes, part.address, whole.memoryview[100]) == (200, whole.address + 100, 5)
    assert part.part(1, 2).address == whole.address + 101


def test_the_memory_goes_back_even_if_what_comes_before_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: caught.append(event.exc_type))
    buffer = allocate_host(8 * MIB)
    address = buffer.address

    def fail() -> None:
        raise ValueError

    buffer.before_unmap(fail)
    marked = mark(address)
    del buffer
    assert caught == [ValueError]
    assert still_there(marked) == [False]


def test_a_buffer_is_no_reference_cycle() -> None:
    buffer = allocate_host(100)
    gone = weakref.ref(buffer.tensor)
    del buffer
    assert gone() is None


@pytest.mark.parametrize(("nbytes", "offset"), [(-1, 0), (10, -1)])
def test_negative_sizes_and_offsets_are_refused(nbytes: int, offset: int) -> None:
    with pytest.raises(ConfigError):
        allocate_host(nbytes, congruent_to=offset)


def test_memory_that_cannot_be_had_is_an_error_with_both_figures() -> None:
    with pytest.raises(
        MemoryLimitError, match=rf"^{1 << 30}\.00 GiB of memory cannot be had .*: [\d.]+ [GM]iB .* available"
    ):
        allocate_host(1 << 60)


_LIMITED = """
import resource, psutil
from loader_service.errors import MemoryLimitError
from loader_service.memory.allocators import allocate_host
from loader_service.memory.shared import SharedMemory

limit = psutil.Process().memory_info().vms + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
kept = allocate_host(16 << 20)
try:
    allocate_host(128 << 20)
except MemoryLimitError as error:
    print(error.exit_code, error.errno, error)
memory = SharedMemory.create(128 << 20)
try:
    memory.map()
except MemoryLimitError as error:
    print(error)
"""


def test_an_address_space_limit_is_named_with_what_is_left_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    own, shared = done.stdout.splitlines()
    assert re.match(r"6 12 128\.00 MiB of memory cannot be had .* \d+\.\d\d MiB is left of the address space", own)
    assert re.match(
        r"128\.00 MiB of memory that ranks of this node share, .* is left of the address space .*sharing", shared
    )


def test_threads_may_allocate_and_free_at_once() -> None:
    def work() -> None:
        for _ in range(50):
            buffer = allocate_host(3 * MIB, congruent_to=3)
            buffer.memoryview[-1] = 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_buffers_of_a_region_lie_apart_and_are_given_back_one_by_one() -> None:
    sizes = [700_000, 3 * MIB, 0, 5, MIB]
    region = HostRegion(8 * MIB)
    buffers = region.allocate(sizes)
    assert [buffer.nbytes for buffer in buffers] == sizes
    assert all(buffer.address % PAGE_BYTES == 0 for buffer in buffers)
    for number, buffer in enumerate(buffers):
        buffer.memoryview[:] = bytes([number + 1]) * buffer.nbytes
    for number, buffer in enumerate(buffers):
        assert bytes(buffer.memoryview) == bytes([number + 1]) * buffer.nbytes, "no two share a byte"
    addresses = [buffer.address for buffer in buffers]
    mark(*addresses)  # an empty buffer has a page, too
    kept = buffers.pop(3).memoryview
    buffers.clear()
    del buffer
    assert [is_resident(address) for address in addresses] == [False, False, False, True, False]
    assert bytes(kept) == bytes([4]) * 5
    del kept, region
    assert still_there(addresses) == [False] * 5


def test_buffers_that_are_kept_of_many_leave_their_region_one_mapping() -> None:
    before = mappings()
    region = HostRegion(64 * MIB)
    buffers = region.allocate([64 << 10] * 1024)
    for buffer in buffers:
        buffer.memoryview[0] = 7
    addresses = [buffer.address for buffer in buffers]
    kept = buffers[::2]
    buffers.clear()
    del buffer
    assert [is_resident(address) for address in addresses] == [True, False] * 512
    assert mappings() - before < 64
    assert {buffer.memoryview[0] for buffer in kept} == {7}


def test_memory_that_the_kernel_takes_back_only_with_its_addresses_goes_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locked memory, before Linux 5.18."""
    monkeypatch.setattr(allocators, "_advice_that_gives_back", lambda address: None)
    region = HostRegion(8 * MIB)
    first, second = region.allocate([MIB, MIB])
    marked = mark(first.address, second.address, second.address + MIB)
    del first
    assert still_there(marked) == [False, True, True]
    del region
    assert still_there(marked) == [False, True, False]


_MANY_MAPPINGS = """
import ctypes, mmap
from loader_service.errors import MemoryLimitError
from loader_service.memory.allocators import HostRegion, _libc, allocate_host

def resident(address):
    found = ctypes.c_ubyte()
    return _libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(4096), ctypes.byref(found)) or found.value

whole, parts = allocate_host(8 << 20), HostRegion(32 << 20).allocate([1 << 20] * 16)
for buffer in (whole, *parts):
    buffer.memoryview[0] = 1
addresses = [whole.address, *(part.address for part in parts)]

def use_up(failed=ctypes.c_void_p(-1).value):
    number = 0
    while _libc().mmap(None, 4096, (1, 3)[number % 2], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0) != failed:
        number += 1  # one that may be written beside one that may not: no two are one to the kernel

use_up()
del buffer, whole, parts[::2]
print([resident(address) for address in addresses])
use_up()
for refused in (lambda: allocate_host(8 << 20), lambda: HostRegion(1 << 20).allocate([5])):
    try:
        refused()
    except MemoryLimitError as error:
        print(error.errno, error)
"""


def test_memory_goes_back_where_no_mapping_can_be_cut_any_more_and_the_limit_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", _MANY_MAPPINGS], capture_output=True, text=True, check=True)
    resident, whole, small = done.stdout.splitlines()
    assert json.loads(resident)[1:] == [0, 1] * 8
    assert json.loads(resident)[0] in (0, -1), "unmapped, where that needed no cut"
    assert re.match(r"12 8\.00 MiB of memory cannot be had .* \d+ mappings, all that vm\.max_map_count \(\d+\)", whole)
    assert re.match(r"12 5 bytes of memory cannot be had .* mappings, all that vm\.max_map_count", small)


def test_a_region_asks_the_system_once_for_many_buffers() -> None:
    region = HostRegion(64 * MIB)
    buffers = [region.allocate([MIB - PAGE_BYTES * (number % 3)])[0] for number in range(64)]
    ends = [buffer.address + buffer.nbytes for buffer in buffers]
    assert ends[:-1] == [buffer.address for buffer in buffers[1:]], "side by side"
    assert is_mapped(ends[-1]), "what is expected lies ready"


def test_a_region_grows_by_what_is_needed_beyond_what_was_expected() -> None:
    region = HostRegion(0)
    first, second = region.allocate([5 * MIB])[0], region.allocate([9 * MIB])[0]
    first.memoryview[-1], second.memoryview[-1] = 1, 2
    assert first.address % HUGE_PAGE_BYTES == second.address % HUGE_PAGE_BYTES == 0


def test_what_no_buffer_has_taken_goes_with_the_region_and_the_buffers_stay() -> None:
    """It has memory where all that is mapped gets some at once (mlockall)."""
    region = HostRegion(64 * MIB)
    [buffer] = region.allocate([3 * MIB])
    [behind] = mark(buffer.address + 3 * MIB)
    assert is_resident(behind)
    buffer.memoryview[:] = b"x" * buffer.nbytes
    del region
    assert still_there([behind]) == [False]
    assert bytes(buffer.memoryview) == b"x" * buffer.nbytes
    mark(address := buffer.address)
    del buffer
    assert still_there([address]) == [False]


def test_a_region_takes_no_more_addresses_than_it_must_where_they_are_limited() -> None:
    code = """
import resource, psutil
from loader_service.errors import MemoryLimitError
from loader_service.memory.allocators import HostRegion
region = HostRegion(1 << 30)
process = psutil.Process()
resource.setrlimit(resource.RLIMIT_AS, (process.memory_info().vms + (64 << 20),) * 2)
before = process.memory_info().vms
kept = region.allocate([16 << 20])
print((process.memory_info().vms - before) >> 20)
try:
    region.allocate([128 << 20])
except MemoryLimitError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    more, refused = done.stdout.splitlines()
    assert int(more) == 16
    assert re.match(r"128\.00 MiB of memory cannot be had \(.*\): .* is left of the address space limit", refused)


@pytest.mark.skipif("[never]" in THP.read_text(), reason="transparent huge pages are switched off")
def test_small_buffers_of_a_region_get_huge_pages() -> None:
    region = HostRegion(32 * MIB)
    buffers = [region.allocate([MIB])[0] for _ in range(32)]
    for buffer in buffers:
        buffer.tensor.fill_(1)
    figures = smaps_of(buffers[0].address)
    assert figures is not None
    assert figures["AnonHugePages"] >= 28 * 1024  # of 32: the machine may be short of them


@pytest.mark.skipif("[never]" in THP.read_text(), reason="transparent huge pages are switched off")
def test_a_buffer_that_is_filled_late_takes_no_huge_page_beyond_it() -> None:
    """Each is too large for the rest of the region before, and is filled once that was let go."""
    size = 40 * MIB + 2 * PAGE_BYTES
    region = HostRegion(4 * size)
    buffers = [region.allocate([size])[0] for _ in range(3)]
    for buffer in buffers[:-1]:
        buffer.tensor.fill_(1)
        figures = smaps_of(buffer.address + size - 1)
        assert figures is not None
        assert figures["Rss"] * 1024 <= size, "the whole mapping, of which nothing is behind the buffer"


class Interrupted(BaseException):
    """What a handler of a signal raises, as Python's own does for SIGINT."""


def test_a_signal_while_memory_is_unmapped_reaches_who_dropped_it() -> None:
    """A finalizer in Python would swallow what the handler raises, and Ctrl-C do nothing."""

    def interrupted(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        pages = _AtItsEnd(ctypes.CDLL(None)["raise"], signal.SIGUSR1)  # in place of madvise or munmap
        with pytest.raises(Interrupted):
            del pages
            os.getpid()  # a call, after which the interpreter looks for signals
    finally:
        signal.signal(signal.SIGUSR1, before)
