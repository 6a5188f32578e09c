"""Page-locked memory of staging and host tables: who can lock it, what was asked for, and what came of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, SupportsInt

from loader_service import logs
from loader_service.errors import MemoryLimitError
from loader_service.memory.allocators import HostBuffer
from loader_service.report import PolicyOutcome
from loader_service.sizes import format_size

_log = logs.logger(__name__)

PinMode = Literal["auto", "required", "never"]

# cudaHostRegisterPortable: locked for every context of the process, not only the registering device's.
_PORTABLE = 1


class Pinner(Protocol):
    """Locks memory for a device. May block for milliseconds a buffer: never called on an event loop.

    The pool registers on a thread of its own: CUDA keeps the error of a refusal for that thread's next kernel.
    """

    @property
    def has_device(self) -> bool:
        """Whether there is an accelerator at all: pageable memory is the plain way where none is."""
        ...

    def available(self) -> str | None:
        """None if it can lock memory, else the reason why not. Cheap."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Locks exactly these bytes; raises MemoryLimitError if that is refused (nothing is locked then)."""
        ...

    def unregister(self, address: int) -> None:
        """Ends the registration that began at `address`; the memory stays usable."""
        ...


class CudaPinner:
    """Registers memory with CUDA, for the device that is current on the thread that makes this object.

    CUDA is never initialised by it: a process that has not chosen its device yet would be given device 0, on every
    rank. Make it after `torch.cuda.set_device`.
    """

    def __init__(self) -> None:
        self.has_device = False
        self._device: int | None = None
        self._reason = "torch is not loaded, so no device can be in use"
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None:
            return
        if not cuda.is_available():
            self._reason = "torch sees no CUDA device"
            return
        self.has_device = True
        if not cuda.is_initialized():
            self._reason = (
                "CUDA was not initialised when the service was made: call torch.cuda.set_device(local_rank) before"
            )
        else:
            self._device = int(cuda.current_device())

    def available(self) -> str | None:
        return self._reason if self._device is None else None

    def register(self, address: int, nbytes: int) -> None:
        with _on_device(self._device) as cudart:
            code = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            raise MemoryLimitError(
                f"CUDA refused to lock {format_size(nbytes)} of memory (cudaHostRegister returned {code}): raise the "
                "limit of locked memory (ulimit -l), or lower staging.capacity_bytes or what a host table holds"
            )

    def unregister(self, address: int) -> None:
        if sys.is_finalizing():
            return  # CUDA may have gone already; the process takes its registrations with it
        with _on_device(self._device) as cudart:
            code = int(cudart.cudaHostUnregister(address))
        if code:
            _log.warning("CUDA could not unlock memory at %#x (cudaHostUnregister returned %d)", address, code)


class _CudaRuntime(Protocol):
    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> SupportsInt: ...  # noqa: N802 - CUDA's name
    def cudaHostUnregister(self, address: int) -> SupportsInt: ...  # noqa: N802 - CUDA's name


@contextmanager
def _on_device(device: int | None) -> Iterator[_CudaRuntime]:
    """CUDA's runtime with the current device of this thread set: a new thread's is device 0."""
    import torch

    cuda: Any = torch.cuda
    with torch.cuda.device(device):
        yield cuda.cudart()


class FakePinner:
    """Keeps account of what would be locked. Refuses from registration number `refuse_from` (from 0) on.

    `reason`: what `available` answers. `locked` are the addresses and bytes that are registered now.
    """

    def __init__(self, *, refuse_from: int | None = None, reason: str | None = None, has_device: bool = True) -> None:
        self.has_device = has_device
        self.refuse_from = refuse_from
        self.reason = reason
        self.registrations = 0
        self.locked: dict[int, int] = {}
        self._lock = threading.Lock()

    def available(self) -> str | None:
        return self.reason

    def register(self, address: int, nbytes: int) -> None:
        with self._lock:
            number, self.registrations = self.registrations, self.registrations + 1
            if self.refuse_from is not None and number >= self.refuse_from:
                raise MemoryLimitError(f"locking {format_size(nbytes)} of memory was refused (registration {number})")
            if address in self.locked:
                raise MemoryLimitError(f"memory at {address:#x} is locked already")
            self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        with self._lock:
            del self.locked[address]


class PinPolicy:
    """What `staging.pin` asks for, and whether it can (still) be done.

    `auto` gives up at the first refusal; its outcome then says why, and so does one warning where there is a device,
    one line of a process where there is none. `required` raises instead: at once where nothing can be locked, else at
    the refused registration. Thread-safe.
    """

    def __init__(self, requested: PinMode, pinner: Pinner | None, what: str = "staging memory") -> None:
        self._what = what
        self._requested = requested
        self._pinner = pinner
        self._reason = ""
        self._lock = threading.Lock()
        if requested == "never":
            self._reason = "the configuration says never"
            return
        reason = "nothing on this machine can lock memory" if pinner is None else pinner.available()
        if reason is not None:
            self._give_up(reason)

    @property
    def active(self) -> bool:
        """Whether new buffers are locked."""
        return not self._reason

    @property
    def outcome(self) -> PolicyOutcome:
        """For the report: effective is `pinned` or `pageable`."""
        return PolicyOutcome(self._requested, "pinned" if self.active else "pageable", self._reason)

    def pin(self, buffer: HostBuffer) -> bool:
        """Locks the buffer until its memory is given back to the system; False if it stays pageable.

        May block for milliseconds. The registration ends with the memory and not before: tensors that a consumer kept
        stay as they were.
        """
        if self._pinner is None or not self.active:
            return False
        try:
            self._pinner.register(buffer.address, buffer.nbytes)
        except MemoryLimitError as error:
            self._give_up(str(error), error)
            return False
        buffer.before_unmap(partial(self._pinner.unregister, buffer.address))
        return True

    def _give_up(self, reason: str, error: MemoryLimitError | None = None) -> None:
        if self._requested == "required":
            raise MemoryLimitError(f"staging.pin is required, but memory cannot be locked: {reason}") from error
        with self._lock:
            first, self._reason = not self._reason, self._reason or reason
        if self._pinner is None or not self._pinner.has_device:
            _say_once(reason)
        elif first:
            _log.warning("%s stays pageable: %s", self._what, reason)


_said_lock = threading.Lock()
_said: set[str] = set()


def _say_once(reason: str) -> None:
    """Without a device every service and every table of a process would say the same: the first one does."""
    with _said_lock:
        first = not _said
        _said.add(reason)
    if first:
        _log.info("staging memory and host tables are pageable: %s", reason)
