"""What a resident service is at, as plain frozen data: for `/status`, `/metrics` and its log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, Self

from loader_service.timeline import Counters

State = Literal["waiting", "agreeing", "reading", "ready", "failed"]
Kept = Literal["everything", "tables", "page cache", "nothing"]

_COUNTERS = tuple(counter.name for counter in fields(Counters))


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """One load of the service. `kept` says what of it this node has in memory, `reason` why it is not more.

    `wanted_bytes` is what is to be read for that, `read_bytes` what was so far; `kept_bytes` lie in node-shared memory
    (headers and small gaps included). `phases` are seconds.
    """

    load: str
    state: State = "waiting"
    kept: Kept = "nothing"
    reason: str = ""
    wanted_bytes: int = 0
    read_bytes: int = 0
    kept_bytes: int = 0
    tensors: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A load in an attached worker: its newest `counters` while it runs, then its `report` or its `failure`, as JSON
    objects (`LoadReport.as_dict`, `FailureRecord.as_dict`). `loop_lag_s`: the longest the loader's own loop there was
    late since the load began."""

    load: str
    rank: int
    world_size: int
    process: int
    counters: Counters
    loop_lag_s: float = 0.0
    report: Mapping[str, object] | None = None
    failure: Mapping[str, object] | None = None

    @classmethod
    def from_json(cls, told: Mapping[str, object]) -> Self:
        """What a worker told. Raises ValueError for what makes no sense: it is shown to others, and counted."""
        load, lag_s, counters = told.get("load"), told.get("loop_lag_s"), told.get("counters")
        rank, world_size, process = (_whole(told.get(key)) for key in ("rank", "world_size", "process"))
        report, failure = (_object(told.get(key)) for key in ("report", "failure"))
        if not (isinstance(load, str) and isinstance(lag_s, int | float) and isinstance(counters, Mapping)):
            raise ValueError("no name, lag or counters of a load")  # noqa: TRY004 - it is not the caller's
        if not math.isfinite(lag_s):
            raise ValueError(f"a lag of {lag_s} s")
        load.encode()  # a lone surrogate cannot be shown
        known = {name: _whole(counters[name]) for name in _COUNTERS if name in counters}
        return cls(load, rank, world_size, process, Counters(**known), lag_s, report, failure)  # type: ignore[arg-type]


def _whole(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError("something else than a number")
    return value


def _object(value: object) -> Mapping[str, object] | None:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError("something else than a report")
    return value


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """A resident service at one moment. `rank` and `world_size` count services, `workers` are attached processes.

    `ready` once the services of all ranks have everything. `late_s` is how late the service's event loop is at this
    moment, `loop_lag_s` the longest in the last minute. `workers` counts processes that are attached now,
    `worker_loads` has each one's newest load of each name, `attached_total` and `failed_total` count from the start.
    """

    version: str
    rank: int
    world_size: int
    node: str
    ranks_served: tuple[int, int]
    socket: str
    ready: bool
    uptime_s: float
    late_s: float
    loop_lag_s: float
    loads: tuple[ServedLoad, ...]
    workers: int
    worker_loads: tuple[WorkerLoad, ...]
    attached_total: int
    failed_total: int

    def as_dict(self) -> dict[str, object]:
        """As JSON has it, in these key names."""
        return asdict(self)
