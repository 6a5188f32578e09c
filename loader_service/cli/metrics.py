"""What a resident service is at, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from loader_service.cli.metric_table import METRICS
from loader_service.keeping.status import ServiceStatus


def registry_of(status: Callable[[], ServiceStatus]) -> CollectorRegistry:
    """A registry of its own, which asks `status` at each scrape, with what Prometheus' client knows of the process."""
    registry = CollectorRegistry()
    registry.register(_Service(status))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class _Service(Collector):
    def __init__(self, status: Callable[[], ServiceStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Family]:
        status = self._status()
        for metric in METRICS:
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(metric.name, metric.meaning, labels=metric.labels)
            for labels, value in metric.samples(status):
                family.add_metric([_text(label) for label in labels], value)
            yield family


def _text(value: object) -> str:
    """A label's value. Names that are no text, as files' may be, must not make the whole page one that cannot be
    encoded."""
    return str(value).encode(errors="backslashreplace").decode()
