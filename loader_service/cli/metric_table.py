"""Every metric of a resident service: its name, labels and meaning, and the samples that it gives. Pure.

What is said of a load is a gauge of the newest load of that name: a worker may load it again, and begins at zero then.
Counters are only what the service itself counts from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, get_args

from loader_service.keeping.status import ServedLoad, ServiceStatus, State, WorkerLoad

Sample = tuple[tuple[object, ...], float]
"""Values of the labels, and the metric's own."""
Samples = Callable[[ServiceStatus], Iterable[Sample]]

_UNITS: Final = {"_bytes_per_second": "bytes per second", "_bytes": "bytes", "_seconds": "seconds"}
_LOAD: Final = ("load",)
_WORKER: Final = ("load", "rank")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: how it is called, and how its samples come from what the service is at."""

    name: str
    labels: tuple[str, ...]
    meaning: str
    samples: Samples

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def unit(self) -> str:
        """What its name ends with, as Prometheus' conventions have it; nothing for numbers of things."""
        return next((unit for suffix, unit in _UNITS.items() if self.name.endswith(suffix)), "")


# The service


def _service(value: Callable[[ServiceStatus], float]) -> Samples:
    return lambda status: [((), value(status))]


def _service_info(status: ServiceStatus) -> Iterator[Sample]:
    start, stop = status.ranks_served
    yield (status.version, status.node, status.rank, status.world_size, f"{start}-{stop - 1}"), 1


# Its loads


def _loads(value: Callable[[ServedLoad], float | None]) -> Samples:
    def samples(status: ServiceStatus) -> Iterator[Sample]:
        for load in status.loads:
            if (number := value(load)) is not None:
                yield (load.load,), number

    return samples


def _load_states(status: ServiceStatus) -> Iterator[Sample]:
    for load in status.loads:
        for state in get_args(State):
            yield (load.load, state), load.state == state


def _load_info(status: ServiceStatus) -> Iterator[Sample]:
    for load in status.loads:
        yield (load.load, load.kept), 1


def _load_phases(status: ServiceStatus) -> Iterator[Sample]:
    for load in status.loads:
        for phase, seconds in load.phases.items():
            yield (load.load, phase), seconds


def _load_throughput(load: ServedLoad) -> float | None:
    seconds = load.phases.get("read", 0.0)
    return load.read_bytes / seconds if seconds > 0 else None


# Loads in workers


def _newest(status: ServiceStatus) -> Iterable[WorkerLoad]:
    """Of several processes that were the same rank of the same load the last one: Prometheus takes no two samples with
    the same labels."""
    return {(load.load, load.rank): load for load in status.worker_loads}.values()


def _workers(value: Callable[[WorkerLoad], float | None]) -> Samples:
    def samples(status: ServiceStatus) -> Iterator[Sample]:
        for load in _newest(status):
            if (number := value(load)) is not None:
                yield (load.load, load.rank), number

    return samples


def _levels(value: Callable[[WorkerLoad], float]) -> Samples:
    """What goes up and down in a load, and is nothing after it."""
    return _workers(lambda load: value(load) if _worker_state(load) == "running" else 0)


def _worker_states(status: ServiceStatus) -> Iterator[Sample]:
    for load in _newest(status):
        now = _worker_state(load)
        for state in ("running", "done", "failed"):
            yield (load.load, load.rank, state), state == now


def _worker_state(load: WorkerLoad) -> str:
    return "failed" if load.failure is not None else "running" if load.report is None else "done"


def _worker_phases(status: ServiceStatus) -> Iterator[Sample]:
    for load in _newest(status):
        for phase, seconds in _mapping(load.report, "phases").items():
            if (number := _number(seconds)) is not None:
                yield (load.load, load.rank, phase), number


def _policies(status: ServiceStatus) -> Iterator[Sample]:
    for load in _newest(status):
        for policy, outcome in _mapping(load.report, "policies").items():
            if isinstance(outcome, Mapping):
                yield (load.load, load.rank, policy, outcome.get("requested", ""), outcome.get("effective", "")), 1


def _failures(status: ServiceStatus) -> Iterator[Sample]:
    for load in _newest(status):
        if load.failure is not None:
            yield (load.load, load.rank, load.failure.get("error", "")), 1


def _read(load: WorkerLoad) -> float:
    own, striped = _reported(load, "read_bytes"), _reported(load, "striped_bytes")
    return load.counters.read_bytes if own is None else own + (striped or 0)


def _payload(load: WorkerLoad) -> float:
    taken = _reported(load, "payload_bytes")
    return load.counters.taken_bytes if taken is None else taken


def _worker_throughput(load: WorkerLoad) -> float | None:
    taken, seconds = _reported(load, "payload_bytes"), _reported(load, "seconds")
    return taken / seconds if taken is not None and seconds else None


def _fallbacks(load: WorkerLoad) -> float | None:
    found = None if load.report is None else load.report.get("fallbacks")
    return len(found) if isinstance(found, list | tuple) else None


# Reports come from other processes, perhaps of another version: what is not there, or no number, gives no sample


def _reported(load: WorkerLoad, key: str) -> float | None:
    return None if load.report is None else _number(load.report.get(key))


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _mapping(report: Mapping[str, object] | None, key: str) -> Mapping[str, object]:
    found = None if report is None else report.get(key)
    return found if isinstance(found, Mapping) else {}


METRICS: Final = (
    Metric(
        "loader_service_info",
        ("version", "node", "service_rank", "services", "ranks"),
        "1 for this service: its rank among the services, and the ranks that it serves",
        _service_info,
    ),
    Metric(
        "loader_service_ready",
        (),
        "1 once the services of all ranks have everything that they keep",
        _service(lambda status: status.ready),
    ),
    Metric(
        "loader_service_uptime_seconds",
        (),
        "How long this service has been running",
        _service(lambda status: status.uptime_s),
    ),
    Metric(
        "loader_service_loop_lag_seconds",
        (),
        "The longest that the service's event loop was late in the last minute",
        _service(lambda status: status.loop_lag_s),
    ),
    Metric(
        "loader_service_workers",
        (),
        "Worker processes that are attached now",
        _service(lambda status: status.workers),
    ),
    Metric(
        "loader_service_attachments_total",
        (),
        "Worker processes that have attached since the service began",
        _service(lambda status: status.attached_total),
    ),
    Metric(
        "loader_service_failures_total",
        (),
        "Loads that have failed in attached workers since the service began",
        _service(lambda status: status.failed_total),
    ),
    Metric(
        "loader_service_load_state",
        (*_LOAD, "state"),
        "1 for the state of the service's load, 0 for others: waiting, agreeing, reading, ready, failed",
        _load_states,
    ),
    Metric(
        "loader_service_load_info",
        (*_LOAD, "kept"),
        "1 for what of the load this node has in memory: everything, tables, page cache or nothing",
        _load_info,
    ),
    Metric(
        "loader_service_load_wanted_bytes",
        _LOAD,
        "What the service has to read of the load",
        _loads(lambda load: load.wanted_bytes),
    ),
    Metric(
        "loader_service_load_read_bytes",
        _LOAD,
        "What of that it has read so far",
        _loads(lambda load: load.read_bytes),
    ),
    Metric(
        "loader_service_load_kept_bytes",
        _LOAD,
        "What of the load lies in memory that the node shares, headers and small gaps included",
        _loads(lambda load: load.kept_bytes),
    ),
    Metric(
        "loader_service_load_tensors",
        _LOAD,
        "How many tensors of the load are kept",
        _loads(lambda load: load.tensors),
    ),
    Metric(
        "loader_service_load_phase_seconds",
        (*_LOAD, "phase"),
        "How long the service has spent in each phase of the load",
        _load_phases,
    ),
    Metric(
        "loader_service_load_throughput_bytes_per_second",
        _LOAD,
        "What the service has read of the load, by the seconds of its phase `read`",
        _loads(_load_throughput),
    ),
    Metric(
        "loader_service_worker_state",
        (*_WORKER, "state"),
        "1 for the state of the worker's load, 0 for others: running, done, failed",
        _worker_states,
    ),
    Metric(
        "loader_service_worker_payload_bytes",
        _WORKER,
        "What the worker's consumer has got so far; rows of tables are counted once the load is done",
        _workers(_payload),
    ),
    Metric(
        "loader_service_worker_read_bytes",
        _WORKER,
        "What the worker has read so far, for its own use and for its node",
        _workers(_read),
    ),
    Metric(
        "loader_service_worker_striped_bytes",
        _WORKER,
        "What of that it has read for its node; known once the load is done",
        _workers(lambda load: _reported(load, "striped_bytes")),
    ),
    Metric(
        "loader_service_worker_seconds",
        _WORKER,
        "How long the load took; known once it is done",
        _workers(lambda load: _reported(load, "seconds")),
    ),
    Metric(
        "loader_service_worker_phase_seconds",
        (*_WORKER, "phase"),
        "How long each phase of the load took; known once it is done",
        _worker_phases,
    ),
    Metric(
        "loader_service_worker_throughput_bytes_per_second",
        _WORKER,
        "What the consumer got, by the seconds of the whole load; known once it is done",
        _workers(_worker_throughput),
    ),
    Metric(
        "loader_service_worker_queue_depth",
        _WORKER,
        "Units that are filled, and that the consumer has not taken; 0 after the load",
        _levels(lambda load: load.counters.queued),
    ),
    Metric(
        "loader_service_worker_staging_bytes",
        _WORKER,
        "Staging memory that is out; 0 after the load",
        _levels(lambda load: load.counters.held_bytes),
    ),
    Metric(
        "loader_service_worker_peak_staging_bytes",
        _WORKER,
        "The most of it that was out at once; known once the load is done",
        _workers(lambda load: _reported(load, "peak_staging_bytes")),
    ),
    Metric(
        "loader_service_worker_reads_in_flight",
        _WORKER,
        "Reading threads that are at work; 0 after the load",
        _levels(lambda load: load.counters.in_flight),
    ),
    Metric(
        "loader_service_worker_reading_threads",
        _WORKER,
        "Reading threads that there are; 0 after the load",
        _levels(lambda load: load.counters.threads),
    ),
    Metric(
        "loader_service_worker_consumer_waits",
        _WORKER,
        "1 while the consumer waits for data",
        _levels(lambda load: load.counters.consumer_waits),
    ),
    Metric(
        "loader_service_worker_waits_for_memory",
        _WORKER,
        "1 while the loader waits for staging memory, of the consumer or of a larger budget",
        _levels(lambda load: load.counters.waits_for_memory),
    ),
    Metric(
        "loader_service_worker_fallbacks",
        _WORKER,
        "How much was done otherwise than asked; known once the load is done",
        _workers(_fallbacks),
    ),
    Metric(
        "loader_service_policy_info",
        (*_WORKER, "policy", "requested", "effective"),
        "1 for each policy: what was asked for, and what was in effect; known once the load is done",
        _policies,
    ),
    Metric(
        "loader_service_worker_failure_info",
        (*_WORKER, "error"),
        "1 for the class of the error that the load has failed with, LostWorker where the process has gone meanwhile; "
        "no sample where it has not",
        _failures,
    ),
    Metric(
        "loader_service_worker_loop_lag_seconds",
        _WORKER,
        "The longest that the loader's event loop in the worker was late since the load began",
        _workers(lambda load: load.loop_lag_s),
    ),
)
"""Every metric of the service, in the order in which they are given."""
