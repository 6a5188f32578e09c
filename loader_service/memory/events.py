"""When a device has finished with host memory: the small protocol the pool polls, its fake, and CUDA's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch


class DeviceEvent(Protocol):
    """A point in a device's work, as torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether the device has passed it. Never blocks; called from the pool's thread."""
        ...

    def synchronize(self) -> None:
        """Blocks until the device has passed it."""
        ...


class FakeDeviceEvent:
    """An event that a test completes. `queries` counts the polls, `error` is raised by the next ones if set."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.queried = threading.Event()
        self.queries = 0
        self.error: BaseException | None = None

    def complete(self) -> None:
        """The device has passed the event."""
        self._done.set()

    def query(self) -> bool:
        self.queries += 1
        self.queried.set()
        if self.error is not None:
            raise self.error
        return self._done.is_set()

    def synchronize(self) -> None:
        self._done.wait()


def current_device_event() -> DeviceEvent | None:
    """An event recorded now on the current stream of the calling thread's device.

    None where torch is not loaded or CUDA is not initialised: then no device can be reading host memory. Never
    initialises CUDA by itself.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    event = cuda.Event()
    event.record()
    return cast(DeviceEvent, event)


class UnknownDeviceEvent:
    """Stands for an event that could not be recorded: asking it fails, so what it guards is never used again."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def query(self) -> bool:
        raise RuntimeError("no event could be recorded on the device's stream") from self._error

    def synchronize(self) -> None:
        self.query()


def current_streams(devices: Iterable[torch.device]) -> dict[torch.device, torch.cuda.Stream]:
    """The calling thread's current stream on each CUDA device among `devices`.

    Another thread's is the default stream, which waits for no other and which no other waits for.
    """
    import torch

    return {device: torch.cuda.current_stream(device) for device in set(devices) if device.type == "cuda"}
