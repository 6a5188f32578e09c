"""Metrics: what Prometheus gets of what a service is at, and that the document has exactly that."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loader_service.cli.metric_table import METRICS
from loader_service.cli.metrics import registry_of
from loader_service.keeping.status import ServiceStatus
from tests.docs.documents import all_blocks, table_rows, text_of
from tests.support.statuses import DONE, RUNNING, STATUS, status_with

DOCUMENT = "docs/metrics.md"
WORKER = "load=target rank=0"


def page(status: ServiceStatus) -> dict[str, dict[str, float]]:
    """What a scrape gives, parsed: by metric, by labels. No sample comes twice."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry_of(lambda: status)).decode()):
        for sample in family.samples:
            labels = " ".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples = found.setdefault(sample.name.removeprefix("loader_service_"), {})
            assert labels not in samples
            samples[labels] = sample.value
    return found


def test_a_scrape_says_everything_of_the_service_and_its_loads() -> None:
    found = page(STATUS)
    assert {name: samples[""] for name, samples in found.items() if name in {
        "ready", "uptime_seconds", "loop_lag_seconds", "workers", "attachments_total", "failures_total"
    }} == {
        "ready": 0, "uptime_seconds": 60, "loop_lag_seconds": 0.5, "workers": 2, "attachments_total": 7,
        "failures_total": 1,
    }  # fmt: skip
    assert found["info"] == {"node=node-a ranks=0-3 service_rank=0 services=2 version=1.2.3": 1}
    assert {name: samples["load=target"] for name, samples in found.items() if "load=target" in samples} == {
        "load_wanted_bytes": 9000, "load_read_bytes": 6000, "load_kept_bytes": 7000, "load_tensors": 291,
        "load_throughput_bytes_per_second": 3000,
    }  # fmt: skip
    assert found["load_info"] == {"kept=tables load=target": 1, "kept=nothing load=draft": 1}
    assert found["load_phase_seconds"] == {"load=target phase=agree": 0.5, "load=target phase=read": 2}
    states = found["load_state"]
    assert {labels for labels, value in states.items() if value} == {
        "load=target state=reading",
        "load=draft state=waiting",
    }
    assert len(states) == 10


def test_a_scrape_says_everything_of_loads_in_workers() -> None:
    found = page(STATUS)
    running = {name: samples[WORKER] for name, samples in found.items() if WORKER in samples}
    assert running == {
        "worker_payload_bytes": 1800, "worker_read_bytes": 2000, "worker_queue_depth": 2, "worker_staging_bytes": 700,
        "worker_reads_in_flight": 3, "worker_reading_threads": 8, "worker_consumer_waits": 1,
        "worker_waits_for_memory": 1, "worker_loop_lag_seconds": 0.125,
    }  # fmt: skip
    done = {name: samples["load=target rank=1"] for name, samples in found.items() if "load=target rank=1" in samples}
    assert done == {
        "worker_payload_bytes": 6000, "worker_read_bytes": 6500, "worker_striped_bytes": 1500, "worker_seconds": 4,
        "worker_throughput_bytes_per_second": 1500, "worker_queue_depth": 0, "worker_staging_bytes": 0,
        "worker_peak_staging_bytes": 800, "worker_reads_in_flight": 0, "worker_reading_threads": 0,
        "worker_consumer_waits": 0, "worker_waits_for_memory": 0, "worker_fallbacks": 2,
        "worker_loop_lag_seconds": 0.25,
    }  # fmt: skip
    assert found["worker_phase_seconds"]["load=target phase=read rank=1"] == 3
    assert found["policy_info"] == {"effective=direct load=target policy=access rank=1 requested=auto": 1}
    assert found["worker_failure_info"] == {"error=ReadError load=draft rank=1": 1}
    assert {labels for labels, value in found["worker_state"].items() if value} == {
        f"{WORKER} state=running", "load=target rank=1 state=done", "load=draft rank=1 state=failed"
    }  # fmt: skip


def test_every_metric_is_given_as_its_type_and_no_other_with_that_name() -> None:
    text = generate_latest(registry_of(lambda: STATUS)).decode()
    types = dict(re.findall(r"^# TYPE (loader_service_\w+) (\w+)$", text, re.MULTILINE))
    assert types == {metric.name: metric.kind for metric in METRICS}
    assert {metric.name.removeprefix("loader_service_") for metric in METRICS} <= page(STATUS).keys()
    assert {"process_open_fds", "python_info", "python_gc_collections_total"} <= page(STATUS).keys()


def test_only_what_the_service_counts_from_its_start_is_a_counter() -> None:
    """A worker that loads again begins at zero: what has a load's label may go down."""
    counters = [metric for metric in METRICS if metric.kind == "counter"]
    assert [metric.labels for metric in counters] == [(), ()]


def test_of_two_processes_with_one_rank_the_last_one_counts_alone() -> None:
    found = page(status_with(worker_loads=(replace(DONE, rank=0), RUNNING)))
    assert found["worker_payload_bytes"] == {WORKER: 1800}
    assert not found.keys() & {"worker_seconds", "policy_info", "worker_phase_seconds"}


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({}, set()),
        ({"payload_bytes": "6000", "seconds": None, "phases": [1], "policies": {"a": "b"}, "fallbacks": 3}, set()),
        ({"payload_bytes": 6000, "seconds": 0, "phases": {"read": "long"}, "policies": None}, {"worker_seconds"}),
    ],
    ids=["empty", "other types", "no time"],
)
def test_a_report_of_another_version_leaves_out_what_it_does_not_say(report: dict[str, object], said: set[str]) -> None:
    of_reports = page(STATUS).keys() - page(status_with(worker_loads=(RUNNING,))).keys() - {"worker_failure_info"}
    assert len(of_reports) == 7
    found = page(status_with(worker_loads=(replace(RUNNING, report=report),)))
    assert found["worker_state"][f"{WORKER} state=done"] == 1
    assert found.keys() & of_reports == said


def test_a_name_that_is_no_text_is_escaped() -> None:
    failed = replace(RUNNING, failure={"error": 'a\udcff"b\n'})
    assert page(status_with(worker_loads=(failed,)))["worker_failure_info"] == {f'error=a\\udcff"b\n {WORKER}': 1}


def test_the_document_has_every_metric_as_it_is() -> None:
    rows = [row for row in table_rows(text_of(DOCUMENT), columns=5) if row[0].startswith("`loader_service_")]
    wanted = [
        [f"`{each.name}`", each.kind, ", ".join(f"`{label}`" for label in each.labels), each.unit, each.meaning]
        for each in METRICS
    ]
    assert rows == wanted, "\n".join(f"| {' | '.join(row)} |" for row in wanted)


def test_queries_of_the_document_name_metrics_and_labels_that_exist() -> None:
    queries = "".join(block.text for block in all_blocks(DOCUMENT) if block.language.startswith("yaml"))
    known = {metric.name: set(metric.labels) for metric in METRICS}
    named = re.findall(r"\b(loader_service_\w+)(?:\{([^}]*)\})?", queries)
    assert len(named) >= 5
    for name, selector in named:
        assert set(re.findall(r"(\w+)(?==)", selector)) <= known[name]


def keys_of(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list | tuple) else set()


def test_every_key_of_the_status_is_explained() -> None:
    """But for those of reports and failures, and the names of phases, which operations.md explains."""
    status = status_with(
        loads=tuple(replace(load, phases={}) for load in STATUS.loads),
        worker_loads=tuple(replace(load, report=None, failure=None) for load in STATUS.worker_loads),
    )
    explained = {word for row in table_rows(text_of(DOCUMENT), columns=2) for word in re.findall(r"`(\w+)`", row[0])}
    assert keys_of(status.as_dict()) == explained
