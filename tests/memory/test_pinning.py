from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch

from loader_service.errors import MemoryLimitError
from loader_service.memory import pinning
from loader_service.memory.allocators import allocate_host
from loader_service.memory.caretaker import Caretaker
from loader_service.memory.pinning import CudaPinner, FakePinner, Pinner, PinPolicy
from loader_service.report import PolicyOutcome
from tests.support.devices import CountingPinner

SIZE = 1 << 20
PATIENCE_S = 30.0


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="loader_service")
    return caplog


def test_memory_is_locked_by_its_real_bytes_until_it_is_freed() -> None:
    pinner = FakePinner()
    policy = PinPolicy("required", pinner)
    buffer = allocate_host(SIZE + 5)
    tensor = buffer.tensor
    assert policy.pin(buffer)
    assert pinner.locked == {buffer.address: SIZE + 5}
    del buffer
    assert len(pinner.locked) == 1, "a consumer's tensor keeps it as it is"
    del tensor
    assert pinner.locked == {}
    assert policy.outcome == PolicyOutcome("required", "pinned", "")


def test_never_touches_no_pinner_and_warns_nobody(warnings: pytest.LogCaptureFixture) -> None:
    pinner = FakePinner()
    policy = PinPolicy("never", pinner)
    assert not policy.active
    assert not policy.pin(allocate_host(SIZE))
    assert pinner.registrations == 0
    assert policy.outcome.effective == "pageable"
    assert warnings.messages == []


@pytest.mark.parametrize(
    "pinner", [None, FakePinner(reason="none here", has_device=False), CudaPinner()], ids=["none", "fake", "cuda"]
)
def test_auto_without_a_device_is_pageable_and_a_process_says_so_once_and_does_not_warn(
    pinner: Pinner | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pinner is not None and pinner.has_device:
        pytest.skip("this machine has a device")
    monkeypatch.setattr(pinning, "_said", set())
    caplog.set_level(logging.INFO, logger="loader_service")
    policies = [PinPolicy("auto", pinner), PinPolicy("auto", pinner, "host table 't'")]
    for policy in policies:
        assert not policy.pin(allocate_host(SIZE))
        assert (policy.outcome.requested, policy.outcome.effective) == ("auto", "pageable")
        assert policy.outcome.reason
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert policies[0].outcome.reason in caplog.messages[0]


def test_auto_warns_once_for_each_where_there_is_a_device_that_cannot_be_used(
    warnings: pytest.LogCaptureFixture,
) -> None:
    policy = PinPolicy("auto", FakePinner(reason="not initialised"), "host table 't'")
    assert not policy.pin(allocate_host(SIZE))
    assert not policy.pin(allocate_host(SIZE))
    assert policy.outcome == PolicyOutcome("auto", "pageable", "not initialised")
    assert warnings.messages == ["host table 't' stays pageable: not initialised"]


def test_auto_gives_up_at_the_first_refusal_with_one_warning(warnings: pytest.LogCaptureFixture) -> None:
    pinner = FakePinner(refuse_from=1)
    policy = PinPolicy("auto", pinner)
    buffers = [allocate_host(SIZE) for _ in range(4)]
    assert [policy.pin(buffer) for buffer in buffers] == [True, False, False, False]
    assert pinner.registrations == 2
    assert len(warnings.messages) == 1
    assert policy.outcome.reason == "locking 1.00 MiB of memory was refused (registration 1)"


def test_required_fails_at_once_without_a_pinner_and_at_the_refusal_with_one() -> None:
    for pinner in (None, FakePinner(reason="no device")):
        with pytest.raises(MemoryLimitError, match=r"staging\.pin is required"):
            PinPolicy("required", pinner)
    policy = PinPolicy("required", FakePinner(refuse_from=0))
    with pytest.raises(MemoryLimitError, match="was refused") as caught:
        policy.pin(allocate_host(SIZE))
    assert caught.value.exit_code == 6
    assert isinstance(caught.value.__cause__, MemoryLimitError)
    assert policy.active, "what is required is never silently given up"


def test_cuda_is_not_touched_where_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert CudaPinner().available() == "torch is not loaded, so no device can be in use"
    assert "torch" not in sys.modules


class FakeRuntime:
    """CUDA's two functions, with the device that was current at each call."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[object, ...]] = []
        self.device: object = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", self.device, address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.device, address))
        return self.code


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, initialised: bool, code: int = 0) -> FakeRuntime:
    runtime = FakeRuntime(code)

    class OnDevice:
        def __init__(self, device: object) -> None:
            self.device = device

        def __enter__(self) -> None:
            runtime.device = self.device

        def __exit__(self, *_: object) -> None:
            runtime.device = 0

    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: initialised,
        "current_device": lambda: 3,
        "cudart": lambda: runtime,
        "device": OnDevice,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return runtime


def test_cuda_locks_for_the_device_of_the_thread_that_made_the_pinner(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = fake_cuda(monkeypatch, initialised=True)
    pinner = CudaPinner()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert pinner.available() is None
    pinner.register(4096, 100)
    pinner.unregister(4096)
    assert runtime.calls == [("register", 3, 4096, 100, 1), ("unregister", 3, 4096)]


def test_cuda_that_refuses_is_a_memory_error_and_a_failed_unlocking_a_warning(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    fake_cuda(monkeypatch, initialised=True, code=2)
    pinner = CudaPinner()
    with pytest.raises(MemoryLimitError, match="returned 2"):
        pinner.register(4096, 100)
    pinner.unregister(4096)
    assert len(warnings.messages) == 1


def test_cuda_is_never_initialised_by_the_pinner(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = fake_cuda(monkeypatch, initialised=False)
    pinner = CudaPinner()
    reason = pinner.available()
    assert reason is not None
    assert "torch.cuda.set_device" in reason
    assert pinner.has_device, "which is worth a warning"
    assert runtime.calls == []


@pytest.mark.gpu
def test_cuda_locks_real_memory() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    policy = PinPolicy("required", CudaPinner())
    buffer = allocate_host(32 << 20)
    tensor = buffer.tensor
    assert not tensor.is_pinned()
    assert policy.pin(buffer)
    assert tensor.is_pinned()
    tensor.fill_(7)
    assert tensor.to("cuda", non_blocking=True).sum().item() == 7 * (32 << 20)
    torch.cuda.synchronize()
    address = buffer.address
    del buffer, tensor
    again = allocate_host(32 << 20)
    assert policy.pin(again), f"{address:#x} was unlocked before it was unmapped"


@pytest.mark.gpu
def test_cuda_locks_memory_that_ends_within_a_page_and_lets_it_go() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    pinner = CountingPinner()
    policy = PinPolicy("required", pinner)
    buffer = allocate_host(5000, congruent_to=100)
    tensor = buffer.tensor
    assert policy.pin(buffer)
    assert pinner.locked == {buffer.address: 5000}
    part = buffer.part(4097, 4999).tensor
    assert part.is_pinned()
    del buffer
    assert tensor.is_pinned()
    del tensor
    assert part.is_pinned(), "the last view keeps it"
    del part
    assert pinner.locked == {}


@pytest.mark.gpu
def test_what_cuda_refuses_says_so_and_leaves_the_device_usable(warnings: pytest.LogCaptureFixture) -> None:
    """On the pool's thread, as always: CUDA keeps an error for the next kernel of the thread that met it."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    pinner, caretaker = CudaPinner(), Caretaker()
    buffer = allocate_host(SIZE)

    def on_its_thread(call: Callable[[], None]) -> None:
        caretaker.call(call).result(PATIENCE_S)

    on_its_thread(lambda: pinner.register(buffer.address, SIZE))
    for address in (buffer.address, 1 << 46):  # locked already; nobody's memory
        with pytest.raises(MemoryLimitError, match=r"cudaHostRegister returned [1-9]"):
            on_its_thread(partial(pinner.register, address, SIZE))
    on_its_thread(lambda: pinner.unregister(buffer.address))
    assert not buffer.tensor.is_pinned()
    assert warnings.messages == []
    on_its_thread(lambda: pinner.unregister(buffer.address))
    assert len(warnings.messages) == 1
    assert "could not unlock" in warnings.messages[0]
    assert torch.ones(4, device="cuda").sum().item() == 4
    caretaker.stop().result(PATIENCE_S)
