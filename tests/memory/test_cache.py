"""The raw weight cache: what is held, for whom there is room, what goes first, and memory that was changed."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loader_service.errors import ConfigError
from loader_service.memory import cache as cache_module
from loader_service.memory import process_cache
from loader_service.memory.allocators import allocate_host
from loader_service.memory.cache import Admission, FileState, WeightCache
from loader_service.memory.fingerprints import fingerprint
from loader_service.memory.held import ByteRanges
from loader_service.memory.process_cache import clear_weight_cache, weight_cache
from loader_service.reading.reader import FileIdentity

ROOT = Path(__file__).resolve().parents[2]
FILE = FileState("/m/a.safetensors", FileIdentity(1, 2, 1000, 4))
OTHER = FileState("/m/b.safetensors", FileIdentity(1, 3, 1000, 4))


def content(file: FileState, start: int, stop: int) -> bytearray:
    """What the file holds there: every byte tells its place."""
    salt = len(file.path) + sum(file.path.encode())
    return bytearray((salt + 7 * at + at // 256) % 256 for at in range(start, stop))


def wanting(*ranges: tuple[FileState, int, int]) -> dict[FileState, ByteRanges]:
    files = {file for file, _, _ in ranges}
    return {
        file: ByteRanges.merged(
            [start for of, start, _ in ranges if of == file], [stop for of, _, stop in ranges if of == file]
        )
        for file in files
    }


def fill(admission: Admission, file: FileState, start: int, stop: int) -> int:
    return admission.insert(file, start, memoryview(content(file, start, stop)))


def load(cache: WeightCache, capacity_bytes: int, *ranges: tuple[FileState, int, int]) -> Admission:
    """A load of these ranges, from its beginning to its end."""
    with cache.make_room(wanting(*ranges), capacity_bytes) as admission:
        for file, start, stop in ranges:
            if cache.held(file, start, stop) is None:
                fill(admission, file, start, stop)
    return admission


def holds(cache: WeightCache, file: FileState, start: int, stop: int) -> bool:
    """Whether it holds exactly the file's bytes there."""
    found = cache.held(file, start, stop)
    if found is None:
        return False
    assert [each.start for each in found] == [start, *(each.stop for each in found[:-1])]
    assert found[-1].stop == stop
    assert b"".join(each.memory for each in found) == content(file, start, stop)
    return True


def test_a_range_is_found_whole_in_part_and_over_neighbours() -> None:
    cache = WeightCache()
    load(cache, 1000, (FILE, 10, 20), (FILE, 20, 21), (FILE, 21, 40), (FILE, 50, 60))
    for start, stop in ((10, 20), (12, 15), (15, 35), (10, 40), (39, 40), (50, 60)):
        assert holds(cache, FILE, start, stop)
    for start, stop in ((9, 11), (39, 41), (30, 55), (40, 50), (60, 61), (0, 1000)):
        assert cache.held(FILE, start, stop) is None
    assert cache.held(OTHER, 10, 20) is None
    statistics = cache.statistics()
    assert (statistics.held_bytes, statistics.entries, statistics.hits, statistics.misses) == (40, 4, 6, 4 + 6 + 1)


@pytest.mark.parametrize("field", ["device", "inode", "size_bytes", "mtime_ns"])
def test_another_state_of_the_file_and_another_path_are_other_files(field: str) -> None:
    cache = WeightCache()
    load(cache, 1000, (FILE, 0, 10))
    values = {"device": 1, "inode": 2, "size_bytes": 1000, "mtime_ns": 4} | {field: 77}
    assert cache.held(FileState(FILE.path, FileIdentity(**values)), 0, 10) is None
    assert cache.held(FileState("/link/a.safetensors", FILE.identity), 0, 10) is None
    assert holds(cache, FileState(FILE.path, FileIdentity(1, 2, 1000, 4)), 0, 10)


def test_a_host_buffer_is_kept_alive_by_the_cache_and_by_whoever_took_it() -> None:
    cache = WeightCache()
    buffer = allocate_host(10)
    mapping = weakref.ref(buffer._pages)
    buffer.memoryview[:] = bytes(content(FILE, 5, 15))
    with cache.make_room(wanting((FILE, 5, 15)), 100) as admission:
        assert admission.insert(FILE, 5, buffer) == 10
    del buffer
    taken = cache.held(FILE, 6, 7)
    assert taken is not None
    cache.clear()
    assert taken[0].memory == content(FILE, 6, 7)
    assert mapping() is not None
    del taken
    gc.collect()
    assert mapping() is None


def test_the_same_memory_is_shared_not_copied() -> None:
    cache = WeightCache()
    memory = content(FILE, 0, 8)
    with cache.make_room(wanting((FILE, 0, 8)), 100) as admission:
        admission.insert(FILE, 0, memoryview(memory))
    found = cache.held(FILE, 0, 8)
    assert found is not None
    assert found[0].memory.obj is memory
    assert not found[0].memory.readonly  # tensors are made of it, and torch warns of memory that is read-only


def test_what_is_held_already_is_not_held_twice() -> None:
    cache = WeightCache()
    load(cache, 100, (FILE, 10, 20), (FILE, 30, 40))
    with cache.make_room(wanting((FILE, 0, 50)), 100) as admission:
        assert cache.statistics().reserved_bytes == 30
        assert fill(admission, FILE, 0, 50) == 30
        assert fill(admission, FILE, 0, 50) == 0
        assert fill(admission, FILE, 12, 12) == 0
        assert cache.statistics().reserved_bytes == 0
    assert (cache.statistics().held_bytes, cache.statistics().entries) == (50, 5)
    assert holds(cache, FILE, 0, 50)


class TestRoom:
    def test_the_least_recently_used_goes_first_and_before_anything_is_added(self) -> None:
        cache = WeightCache()
        load(cache, 100, (FILE, 0, 30), (FILE, 30, 60), (FILE, 60, 90))
        assert holds(cache, FILE, 0, 30)  # now the second is the one that was not used for longest
        with cache.make_room(wanting((OTHER, 0, 40)), 100) as admission:
            assert (cache.statistics().held_bytes, cache.statistics().reserved_bytes) == (60, 40)
            assert admission.admitted
            assert fill(admission, OTHER, 0, 40) == 40
        assert [holds(cache, FILE, at, at + 30) for at in (0, 30, 60)] == [True, False, True]
        assert (cache.statistics().held_bytes, cache.statistics().evictions) == (100, 1)
        assert admission.outcome.as_dict() == {
            "requested": "on",
            "effective": "on",
            "reason": "0 bytes of 40 bytes were held, 40 bytes are added; 30 bytes of other loads were evicted",
        }

    def test_no_more_is_evicted_than_is_needed(self) -> None:
        cache = WeightCache()
        load(cache, 100, *((FILE, at, at + 10) for at in range(0, 100, 10)))
        load(cache, 100, (OTHER, 0, 15))
        assert [holds(cache, FILE, at, at + 10) for at in range(0, 100, 10)] == [False] * 2 + [True] * 8

    def test_a_filtered_load_reuses_what_the_full_one_left_and_never_evicts_it(self) -> None:
        cache = WeightCache()
        load(cache, 100, *((FILE, at, at + 10) for at in range(0, 90, 10)))
        draft = wanting((FILE, 0, 10), (FILE, 35, 40), (OTHER, 0, 30))
        with cache.make_room(draft, 100) as admission:
            assert holds(cache, FILE, 0, 10)  # the oldest of all, and wanted
            assert holds(cache, FILE, 35, 40)
            assert cache.statistics().evictions == 2
            assert fill(admission, OTHER, 0, 30) == 30
        assert [holds(cache, FILE, at, at + 10) for at in range(0, 90, 10)] == [True, False, False] + [True] * 6

    def test_a_load_that_is_held_whole_evicts_nothing_and_adds_nothing(self) -> None:
        cache = WeightCache()
        load(cache, 100, (FILE, 0, 50), (FILE, 50, 100))
        again = load(cache, 100, (FILE, 0, 100))
        assert again.outcome.reason == "100 bytes of 100 bytes were held"
        assert (cache.statistics().entries, cache.statistics().evictions) == (2, 0)

    def test_sizes_that_are_equal_only_when_rounded_are_not_said_to_be(self) -> None:
        cache, most = WeightCache(), 3 << 20
        load(cache, most, (FILE, 0, most - 192))
        with cache.make_room(wanting((FILE, 0, most)), most) as admission:
            assert admission.outcome.reason == "all but 192 bytes of 3.00 MiB were held, 192 bytes are added"

    @pytest.mark.parametrize(("wanted", "admitted"), [(100, True), (101, False)])
    def test_a_load_that_is_too_large_is_not_cached_and_evicts_nothing(self, wanted: int, admitted: bool) -> None:
        cache = WeightCache()
        load(cache, 100, (FILE, 0, 60))
        with cache.make_room(wanting((OTHER, 0, wanted)), 100) as admission:
            assert admission.admitted == admitted
            assert fill(admission, OTHER, 0, 10) == (10 if admitted else 0)
        assert holds(cache, FILE, 0, 60) != admitted
        if not admitted:
            assert admission.outcome.as_dict() == {
                "requested": "on",
                "effective": "reuse only",
                "reason": "0 bytes of 101 bytes were held, 101 bytes are not added: with 0 bytes that must "
                "stay they are more than cache.capacity_bytes, 100 bytes; it takes 101 bytes",
            }
            assert cache.statistics().reserved_bytes == 0

    def test_what_a_load_wants_of_a_held_range_keeps_all_of_it_and_counts(self) -> None:
        cache = WeightCache()
        load(cache, 100, (FILE, 0, 60), (OTHER, 0, 40))
        with cache.make_room(wanting((FILE, 50, 91)), 100) as admission:
            assert (admission.admitted, cache.statistics().held_bytes) == (True, 60)
        load(cache, 100, (OTHER, 0, 40))
        with cache.make_room(wanting((FILE, 50, 101)), 100) as admission:
            assert not admission.admitted
            assert "with 60 bytes that must stay" in admission.outcome.reason
            assert holds(cache, OTHER, 0, 40)

    def test_a_lower_capacity_brings_down_what_is_held(self) -> None:
        cache = WeightCache()
        load(cache, 100, *((FILE, at, at + 10) for at in range(0, 100, 10)))
        too_large = cache.make_room(wanting((OTHER, 0, 50)), 45)
        assert not too_large.admitted
        assert cache.statistics().held_bytes == 40
        assert holds(cache, FILE, 60, 100)
        with cache.make_room(wanting((OTHER, 0, 5), (FILE, 70, 80)), 15) as admission:
            assert admission.admitted
            assert (cache.statistics().held_bytes, cache.statistics().reserved_bytes) == (10, 5)
            assert holds(cache, FILE, 70, 80)

    def test_a_lower_capacity_leaves_what_the_load_itself_wants(self) -> None:
        cache = WeightCache()
        load(cache, 100, (FILE, 0, 50), (FILE, 50, 100))
        admission = load(cache, 10, (FILE, 0, 50))
        assert admission.outcome.effective == "on"
        assert admission.outcome.reason == "50 bytes of 50 bytes were held; 50 bytes of other loads were evicted"
        assert holds(cache, FILE, 0, 50)

    @pytest.mark.parametrize("capacity_bytes", [0, -1])
    def test_a_load_whose_cache_is_off_does_not_ask(self, capacity_bytes: int) -> None:
        cache = WeightCache()
        with pytest.raises(ConfigError):
            cache.make_room(wanting((FILE, 0, 1)), capacity_bytes)
        assert cache._claims == []


class TestOpenLoads:
    def test_room_is_reserved_until_a_load_ends(self) -> None:
        cache = WeightCache()
        first = cache.make_room(wanting((FILE, 0, 60)), 100)
        second = cache.make_room(wanting((OTHER, 0, 50)), 100)
        assert not second.admitted
        assert "with 60 bytes that must stay" in second.outcome.reason
        fill(first, FILE, 0, 20)
        first.close()
        first.close()
        assert (cache.statistics().held_bytes, cache.statistics().reserved_bytes) == (20, 0)
        second.close()
        assert cache.make_room(wanting((OTHER, 0, 80)), 100).admitted
        assert cache.statistics().held_bytes == 20

    def test_what_an_open_load_wants_is_not_evicted_by_another(self) -> None:
        cache = WeightCache()
        load(cache, 100, (FILE, 0, 50), (FILE, 50, 100))
        reading = cache.make_room(wanting((FILE, 0, 50)), 100)
        assert not cache.make_room(wanting((OTHER, 0, 60)), 100).admitted
        assert cache.make_room(wanting((OTHER, 0, 50)), 100).admitted
        assert [holds(cache, FILE, at, at + 50) for at in (0, 50)] == [True, False]
        reading.close()
        assert cache.make_room(wanting((OTHER, 100, 110)), 100).admitted
        assert cache.held(FILE, 0, 50) is None

    def test_a_load_that_is_over_adds_nothing(self) -> None:
        cache = WeightCache()
        admission = cache.make_room(wanting((FILE, 0, 10)), 100)
        admission.close()
        assert fill(admission, FILE, 0, 10) == 0
        assert cache.statistics().entries == 0

    def test_what_was_not_announced_is_taken_where_there_is_room(self) -> None:
        cache = WeightCache()
        first = cache.make_room(wanting((FILE, 0, 40)), 100)
        second = cache.make_room(wanting((OTHER, 0, 30)), 100)
        assert fill(first, FILE, 100, 171) == 0  # 30 beyond its own 40, and one byte more
        assert fill(first, FILE, 100, 170) == 70
        assert fill(second, OTHER, 0, 30) == 30
        assert (cache.statistics().held_bytes, cache.statistics().reserved_bytes) == (100, 0)
        assert fill(first, FILE, 0, 1) == 0

    def test_a_reservation_holds_although_another_load_has_a_larger_capacity(self) -> None:
        cache = WeightCache()
        small = cache.make_room(wanting((FILE, 0, 10)), 20)
        load(cache, 1000, (OTHER, 0, 500))
        assert fill(small, FILE, 0, 10) == 10
        assert fill(small, FILE, 10, 11) == 0

    def test_two_loads_that_bring_the_same_bytes_hold_them_once(self) -> None:
        cache = WeightCache()
        with cache.make_room(wanting((FILE, 0, 40)), 100) as first:
            with cache.make_room(wanting((FILE, 0, 40)), 100) as second:
                assert cache.statistics().reserved_bytes == 80
                assert fill(first, FILE, 0, 40) == 40
                assert fill(second, FILE, 0, 40) == 0
        assert (cache.statistics().held_bytes, cache.statistics().reserved_bytes) == (40, 0)

    def test_bytes_that_another_load_brings_at_the_same_moment_are_held_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = WeightCache()
        first, second = (cache.make_room(wanting((FILE, 0, 40)), 100) for _ in range(2))

        def meanwhile(memory: memoryview) -> int:
            monkeypatch.setattr(cache_module, "fingerprint", fingerprint)
            fill(second, FILE, 10, 20)
            return fingerprint(memory)

        monkeypatch.setattr(cache_module, "fingerprint", meanwhile)
        assert fill(first, FILE, 0, 40) == 0
        assert cache.statistics().held_bytes == 10
        assert fill(first, FILE, 0, 40) == 30
        assert holds(cache, FILE, 0, 40)

    def test_clearing_lets_go_of_all_and_open_loads_go_on(self) -> None:
        cache = WeightCache()
        load(cache, 100, (FILE, 0, 50))
        cache.headers.keep("/m/h", 1, b"header")
        with cache.make_room(wanting((OTHER, 0, 30)), 100) as admission:
            cache.clear()
            statistics = cache.statistics()
            assert (statistics.held_bytes, statistics.entries, statistics.headers) == (0, 0, 0)
            assert statistics.reserved_bytes == 30
            assert fill(admission, OTHER, 0, 30) == 30
        assert cache.held(FILE, 0, 50) is None
        assert holds(cache, OTHER, 0, 30)


class TestChanges:
    def held_with(self, memories: Mapping[int, bytearray]) -> WeightCache:
        cache = WeightCache()
        ranges = [(FILE, start, start + len(memory)) for start, memory in memories.items()]
        with cache.make_room(wanting(*ranges), 1 << 20) as admission:
            for start, memory in memories.items():
                admission.insert(FILE, start, memoryview(memory))
        return cache

    def test_a_change_in_place_is_found_at_the_next_use_and_the_range_dropped(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        memories = {0: content(FILE, 0, 10), 10: content(FILE, 10, 20), 20: content(FILE, 20, 30)}
        cache = self.held_with(memories)
        memories[10][3] ^= 1
        assert holds(cache, FILE, 0, 10)
        assert holds(cache, FILE, 20, 30)
        with caplog.at_level(logging.WARNING, "loader_service.memory.cache"):
            assert cache.held(FILE, 5, 12) is None
        (line,) = caplog.messages
        assert line.startswith("/m/a.safetensors: bytes [10, 20) were changed")
        statistics = cache.statistics()
        assert (statistics.held_bytes, statistics.entries, statistics.changed) == (20, 2, 1)
        assert (statistics.hits, statistics.misses) == (2, 1)
        memories[10][3] ^= 1
        assert cache.held(FILE, 10, 20) is None  # it is gone, whatever becomes of the memory

    def test_it_is_read_anew_and_held_anew(self) -> None:
        memory = content(FILE, 0, 10)
        cache = self.held_with({0: memory})
        memory[0] ^= 1
        with cache.make_room(wanting((FILE, 0, 10)), 10) as admission:
            assert cache.held(FILE, 0, 10) is None
            assert cache._files == {}
            assert fill(admission, FILE, 0, 10) == 10
            assert holds(cache, FILE, 0, 10)

    def test_a_lookup_that_misses_anyway_looks_at_no_memory(self) -> None:
        memory = content(FILE, 0, 10)
        cache = self.held_with({0: memory})
        memory[0] ^= 1
        assert cache.held(FILE, 5, 15) is None
        assert (cache.statistics().changed, cache.statistics().entries) == (0, 1)

    def test_a_changed_range_that_went_meanwhile_counts_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = content(FILE, 0, 10)
        cache = self.held_with({0: memory})
        memory[0] ^= 1

        def meanwhile(view: memoryview) -> int:
            monkeypatch.setattr(cache_module, "fingerprint", fingerprint)
            assert cache.held(FILE, 0, 10) is None
            return fingerprint(view)

        monkeypatch.setattr(cache_module, "fingerprint", meanwhile)
        assert cache.held(FILE, 0, 10) is None
        assert (cache.statistics().changed, cache.statistics().misses) == (1, 2)


def test_many_threads_load_at_once_within_the_capacity_and_get_the_right_bytes() -> None:
    cache = WeightCache()
    files = [FileState(f"/m/{i}", i) for i in range(3)]
    whole = {file: bytes(content(file, 0, 400)) for file in files}
    capacity_bytes, step_bytes = 600, 20

    def loads(seed: int) -> int:
        random, right = Random(seed), 0
        for _ in range(40):
            file, first = random.choice(files), random.randrange(0, 300, step_bytes)
            ranges = [(file, at, at + step_bytes) for at in range(first, first + 100, step_bytes)]
            with cache.make_room(wanting(*ranges), capacity_bytes) as admission:
                for _, start, stop in ranges:
                    found = cache.held(file, start, stop)
                    if found is None:
                        admission.insert(file, start, memoryview(bytearray(whole[file][start:stop])))
                    else:
                        right += b"".join(each.memory for each in found) == whole[file][start:stop]
                    statistics = cache.statistics()
                    assert statistics.held_bytes + statistics.reserved_bytes <= capacity_bytes
        return right

    with ThreadPoolExecutor(4) as threads:
        right = sum(threads.map(loads, range(4)))
    statistics = cache.statistics()
    assert (statistics.hits, statistics.hits + statistics.misses) == (right, 4 * 40 * 5)
    assert (statistics.reserved_bytes, statistics.changed, cache._claims) == (0, 0, [])
    assert statistics.held_bytes == sum(int(held.sizes.sum()) for held in cache._files.values())
    assert right > 0
    assert statistics.evictions > 0


def test_threads_that_ask_at_once_share_one_cache_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_cache._OfProcess, "cache", None)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: weight_cache(), range(16)))
    assert all(each is found[0] for each in found)
    load(found[0], 100, (FILE, 0, 10))
    clear_weight_cache()
    assert weight_cache().statistics().entries == 0


FORK = """
import os, threading, weakref
from loader_service.memory import process_cache as module
from loader_service.memory.cache import FileState
from loader_service.memory.process_cache import weight_cache
from loader_service.memory.held import ByteRanges

mine, file = weight_cache(), FileState("/m/a", 1)
with mine.make_room({file: ByteRanges.merged([0], [4])}, 10) as admission:
    admission.insert(file, 0, memoryview(bytearray(4)))
seen, locks = weakref.ref(mine), (mine._lock, module._OfProcess.lock)
del mine, admission
taken, done = threading.Event(), threading.Event()
def hold():
    with locks[0], locks[1]:
        taken.set()
        done.wait()
holder = threading.Thread(target=hold)
holder.start()
taken.wait()
child = os.fork()
if child == 0:
    forgotten = seen() is None
    empty = weight_cache().statistics().entries == 0
    os._exit(0 if forgotten and empty else 1)
_, status = os.waitpid(child, 0)
done.set()
holder.join()
print(os.waitstatus_to_exitcode(status), weight_cache().statistics().entries)
"""


def test_a_forked_child_forgets_the_cache_and_its_locks() -> None:
    env: dict[str, Any] = {"PYTHONPATH": str(ROOT), "PATH": ""}
    ended = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, env=env)
    assert ended.stdout.split() == ["0", "1"], ended.stderr
