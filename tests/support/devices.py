"""What tests of the real device paths share: a device that is busy, and a pinner that keeps account."""

from __future__ import annotations

import functools
import threading

import torch

from loader_service.memory.pinning import CudaPinner

_CALIBRATION_CYCLES = 50_000_000


@functools.cache
def _cycles_per_ms() -> float:
    """How fast this device's clock runs, as `_sleep` counts it."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
    last.record()
    last.synchronize()
    return _CALIBRATION_CYCLES / float(first.elapsed_time(last))


def busy(ms: float) -> None:
    """The device does nothing else on the current stream for about so long. Returns at once."""
    torch.cuda._sleep(int(_cycles_per_ms() * ms))  # type: ignore[no-untyped-call]


class CountingPinner(CudaPinner):
    """CUDA's own, with an account of what is locked now: `{address: bytes}`."""

    def __init__(self) -> None:
        super().__init__()
        self.registrations = 0
        self.locked: dict[int, int] = {}
        self._lock = threading.RLock()  # a buffer may be collected while it is held

    def register(self, address: int, nbytes: int) -> None:
        super().register(address, nbytes)
        with self._lock:
            self.registrations += 1
            self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        super().unregister(address)
        with self._lock:
            del self.locked[address]
