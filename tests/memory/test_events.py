from __future__ import annotations

import logging
import sys
import threading
import types
from functools import partial

import pytest
import torch

from loader_service.memory.caretaker import Caretaker
from loader_service.memory.events import (
    FakeDeviceEvent,
    UnknownDeviceEvent,
    current_device_event,
    current_streams,
)
from tests.support.devices import busy

PATIENCE_S = 30.0


def test_there_is_no_event_where_no_device_can_be_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        assert current_device_event() is None
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # still being imported elsewhere
    assert current_device_event() is None
    monkeypatch.delitem(sys.modules, "torch")
    assert current_device_event() is None
    assert "torch" not in sys.modules


def test_an_event_is_recorded_on_the_current_stream_where_cuda_is_initialised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: list[object] = []

    class Event:
        def record(self) -> None:
            recorded.append(self)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    event = current_device_event()
    assert recorded == [event]


@pytest.mark.gpu
def test_a_real_event_passes_after_the_work_before_it_on_the_current_stream() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    busy(0.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        busy(300.0)
        late = current_device_event()
    early = current_device_event()
    assert late is not None
    assert early is not None
    assert not late.query(), "300 ms of work lie before it"
    early.synchronize()
    assert early.query()
    late.synchronize()
    assert late.query()


@pytest.mark.gpu
def test_a_watch_waits_for_a_real_event() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    caretaker, answer = Caretaker(), Answer()
    busy(100.0)
    event = current_device_event()
    assert event is not None
    caretaker.watch([event], answer)
    assert answer.came.wait(PATIENCE_S)
    assert (answer.passed, event.query()) == (True, True)
    caretaker.stop().result(PATIENCE_S)


def test_an_event_that_could_not_be_recorded_fails_when_it_is_asked() -> None:
    lost = RuntimeError("device lost")
    event = UnknownDeviceEvent(lost)
    for ask in (event.query, event.synchronize):
        with pytest.raises(RuntimeError, match="could be recorded") as caught:
            ask()
        assert caught.value.__cause__ is lost


def test_streams_are_those_of_cuda_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without CUDA asking would raise; where it is not in use, it would be initialised."""
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    devices = [torch.device(name) for name in ("cpu", "cuda:1", "meta", "cuda:0", "cuda:1")]
    assert current_streams(devices) == {torch.device(name): name for name in ("cuda:0", "cuda:1")}


def test_a_fake_event_passes_when_it_is_told_to() -> None:
    event = FakeDeviceEvent()
    assert not event.query()
    waiting = threading.Thread(target=event.synchronize, daemon=True)
    waiting.start()
    event.complete()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert (event.query(), event.queries) == (True, 2)


class Answer:
    """Waits for what a watch says."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.passed: bool | None = None

    def __call__(self, passed: bool) -> None:
        self.passed = passed
        self.came.set()


def test_a_watch_ends_only_when_every_event_has_passed() -> None:
    caretaker = Caretaker()
    events, answer = [FakeDeviceEvent() for _ in range(3)], Answer()
    caretaker.watch(events, answer)
    for event in events[:0:-1]:
        event.complete()
    assert events[0].queried.wait(PATIENCE_S)
    seen = events[0].queries
    while events[0].queries < seen + 3:  # asked again and again, and still not done
        threading.Event().wait(0.001)
    assert not answer.came.is_set()
    assert caretaker.watching == 1
    events[0].complete()
    assert answer.came.wait(PATIENCE_S)
    assert answer.passed is True
    assert caretaker.watching == 0
    caretaker.stop().result(PATIENCE_S)


def test_an_event_that_cannot_be_asked_is_told_so_and_others_are_still_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caretaker = Caretaker()
    broken, sound = FakeDeviceEvent(), FakeDeviceEvent()
    broken.error = RuntimeError("device lost")
    answers = Answer(), Answer()
    with caplog.at_level(logging.ERROR):
        caretaker.watch([sound], answers[0])
        caretaker.watch([broken], answers[1])
        assert answers[1].came.wait(PATIENCE_S)
    sound.complete()
    assert answers[0].came.wait(PATIENCE_S)
    assert (answers[0].passed, answers[1].passed) == (True, False)
    assert "never used again" in caplog.text
    caretaker.stop().result(PATIENCE_S)


def test_calls_run_in_order_and_their_exceptions_reach_whoever_waits() -> None:
    caretaker = Caretaker()
    done: list[int] = []

    def leave() -> None:
        raise SystemExit

    futures = [caretaker.call(partial(done.append, number)) for number in range(5)]
    failing = caretaker.call(leave)
    last = caretaker.call(threading.get_ident)
    assert isinstance(failing.exception(PATIENCE_S), SystemExit)
    assert last.result(PATIENCE_S) != threading.get_ident()
    assert (done, [future.done() for future in futures]) == ([0, 1, 2, 3, 4], [True] * 5)
    caretaker.stop().result(PATIENCE_S)


def test_the_thread_ends_when_all_is_done_and_starts_again_for_later_work() -> None:
    caretaker = Caretaker(name="loader-memory-test")
    assert caretaker.stop().done(), "it never ran"
    event, answer = FakeDeviceEvent(), Answer()
    caretaker.watch([event], answer)
    first, second = caretaker.stop(), caretaker.stop()
    assert not first.done()
    event.complete()
    first.result(PATIENCE_S)
    second.result(PATIENCE_S)
    assert answer.passed is True
    assert caretaker.call(int).result(PATIENCE_S) == 0
    caretaker.stop().result(PATIENCE_S)
