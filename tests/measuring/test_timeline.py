"""Recording a load: samples, what the time went for, and equal steps that lose nothing."""

from __future__ import annotations

import json
import threading
from itertools import pairwise

import pytest

from loader_service.timeline import Counters, Recorder, Sample, Shares, Timeline, shares, timeline_of

FULL = Counters(in_flight=4, threads=4, consumer_waits=True)


def samples(*looks: tuple[float, Counters]) -> list[Sample]:
    return [Sample(at_s, at_s / 2, counters) for at_s, counters in looks]


def test_a_recorder_looks_from_a_thread_of_its_own_and_at_both_ends() -> None:
    seen = threading.Event()
    threads: set[str] = set()

    def look() -> Counters:
        threads.add(threading.current_thread().name)
        if len(threads) > 1:
            seen.set()
        return Counters(read_bytes=len(threads))

    with Recorder(look, every_s=0.001) as recorder:
        assert seen.wait(10)
    found = recorder.samples
    assert "loader-timeline" in threads
    assert [sample.at_s for sample in found] == sorted(sample.at_s for sample in found)
    assert (found[0].counters.read_bytes, found[-1].counters.read_bytes) == (1, 2)


def test_a_long_recording_is_thinned_and_keeps_its_beginning_and_end() -> None:
    enough = threading.Event()
    looks = 0

    def look() -> Counters:
        nonlocal looks
        looks += 1
        if looks >= 60:
            enough.set()
        return Counters(read_bytes=looks)

    with Recorder(look, every_s=0.0005, most=16) as recorder:
        assert enough.wait(20)
    found = recorder.samples
    assert len(found) <= 17
    assert found[0].counters.read_bytes == 1
    assert found[-1].counters.read_bytes == looks


def test_a_look_that_fails_ends_the_recording_and_not_the_load() -> None:
    fails = threading.Event()

    def look() -> Counters:
        if threading.current_thread() is not threading.main_thread():
            fails.set()
            raise RuntimeError("no more")
        return Counters()

    with Recorder(look, every_s=0.0005) as recorder:
        assert fails.wait(10)
    assert len(recorder.samples) == 2


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        (FULL, Shares(consumer_waits=1, threads_busy=1, in_flight=4)),
        (Counters(threads=4, waits_for_memory=True), Shares(consumer_holds=1)),
        (
            Counters(threads=4, in_flight=1, waits_for_memory=True, consumer_waits=True),
            Shares(consumer_waits=1, budget_full=1, in_flight=1),
        ),
        (Counters(threads=4, in_flight=3), Shares(loader_busy=1, in_flight=3)),
    ],
    ids=["busy", "consumer holds", "budget full", "loader busy"],
)
def test_time_is_told_apart_by_who_waits_for_whom(counters: Counters, expected: Shares) -> None:
    end = Counters(filled_bytes=100)
    assert shares(samples((0, Counters()), (1, counters), (3, end), (9, end)), start_s=1) == expected


def test_time_is_weighed_and_what_comes_after_the_last_byte_does_not_count() -> None:
    half = Counters(threads=4, in_flight=2, filled_bytes=50)
    found = shares(samples((0, FULL), (3, half), (4, Counters(filled_bytes=100)), (50, Counters(filled_bytes=100))), 0)
    assert (found.threads_busy, found.loader_busy, found.in_flight) == (0.75, 0.25, 3.5)
    assert shares([], 0) == shares(samples((0, Counters()), (5, Counters())), 0) == Shares()


@pytest.mark.parametrize("steps", [1, 3, 7, 50])
def test_equal_steps_lose_no_byte_and_no_second(steps: int) -> None:
    looks = [(i * i / 40, Counters(i * 1000, i * 900, i * 800, i % 5, 4, i % 3, i * 7)) for i in range(60)]
    recorded = samples(*looks)
    found = timeline_of(recorded, rank=3, phases={"read": 1.0}, capacity_bytes=9, steps=steps)
    assert len(found.read_bytes) == len(found.held_bytes) == steps
    assert found.step_s * steps == pytest.approx(found.seconds) == pytest.approx(looks[-1][0])
    for name, total in (("read_bytes", 59_000), ("filled_bytes", 59 * 900), ("taken_bytes", 59 * 800)):
        assert sum(getattr(found, name)) == pytest.approx(total)
    assert sum(found.cpu_s) == pytest.approx(found.seconds / 2)
    held = sum((after[0] - before[0]) * before[1].held_bytes for before, after in pairwise(looks))
    assert sum(found.held_bytes) * found.step_s == pytest.approx(held)


def test_a_timeline_comes_back_from_json() -> None:
    made = timeline_of(
        samples((0, Counters()), (1, Counters(100, 90, 80, 2, 4, 1, 5, True, True)), (2, Counters(200, 90, 80))),
        rank=1,
        phases={"read": 2.0},
        capacity_bytes=77,
    )
    assert Timeline.from_dict(json.loads(json.dumps(made.as_dict()))) == made


def test_an_empty_recording_is_no_error() -> None:
    empty = timeline_of([], rank=0, phases={}, capacity_bytes=1)
    assert (empty.seconds, sum(empty.read_bytes)) == (0.0, 0.0)
