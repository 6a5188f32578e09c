"""What resident services may be at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loader_service.errors import ReadError
from loader_service.keeping.status import ServedLoad, ServiceStatus, WorkerLoad
from loader_service.report import LoadReport, PolicyOutcome
from loader_service.timeline import Counters

REPORT = LoadReport(
    "target", 1, 4, 291, 6000, 5000, 1500, 2, ("a.safetensors",), 4.0, 800, True, "c" * 64, "p" * 64,
    phases={"open": 0.5, "read": 3.0},
    policies={"access": PolicyOutcome("auto", "direct", "nothing of it was cached")},
    fallbacks=("headers were read again", "one more"),
)  # fmt: skip
DONE = WorkerLoad("target", 1, 4, 101, Counters(read_bytes=1, queued=9, in_flight=9), 0.25, REPORT.as_dict())
RUNNING = WorkerLoad("target", 0, 4, 100, Counters(2000, 1900, 1800, 3, 8, 2, 700, True, True), 0.125)
FAILED = WorkerLoad("draft", 1, 4, 101, Counters(40, 30, 20), failure=ReadError("gone").record().as_dict())
TARGET = ServedLoad("target", "reading", "tables", "no room", 9000, 6000, 7000, 291, {"agree": 0.5, "read": 2.0})
DRAFT = ServedLoad("draft")

STATUS = ServiceStatus(
    "1.2.3", 0, 2, "node-a", (0, 4), "/run/loader.sock", False, 60.0, 0.0, 0.5, (TARGET, DRAFT), 2,
    (RUNNING, DONE, FAILED), 7, 1,
)  # fmt: skip
"""A service that still reads, and has two workers."""

READY = replace(STATUS, ready=True, loads=(replace(TARGET, state="ready"),))


def status_with(**changes: Any) -> ServiceStatus:
    """That service, otherwise in this."""
    return replace(STATUS, **changes)
