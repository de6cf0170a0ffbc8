"""Turns counters into Prometheus text at a scrape.

In: sources, functions that yield `Sample`s. Out: bytes for `/metrics`. A sample that the catalog
does not know, or with other labels, is our own mistake and raises `InvariantError`: a misspelt
metric would otherwise be missed for months.

Cost: O(samples), only while a scrape runs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from dsched import __version__
from dsched.errors import InvariantError
from dsched.metrics.catalog import CATALOG, Metric, MetricKind

CONTENT_TYPE = CONTENT_TYPE_LATEST
NS_PER_S = 1_000_000_000


class HistogramCounts(Protocol):
    """A histogram as hot code keeps it."""

    bounds_ns: tuple[int, ...]
    """Rising upper bounds; a value lies in the first bucket whose bound is not below it."""
    counts: list[int]
    """Values per bucket, one more than bounds: the last is above them all."""
    sum_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The value of one metric for one set of labels."""

    name: str
    """A name of the catalog."""
    value: float | HistogramCounts
    labels: tuple[str, ...] = ()
    """Label values, in the catalog's order."""


Source = Callable[[], Iterable[Sample]]


class MetricsExporter:
    """Collects samples from sources and renders them. No global state: make one a process."""

    def __init__(self, *, show_process: bool = True) -> None:
        self._sources: list[Source] = [_build_info]
        self._registry = CollectorRegistry()
        self._registry.register(_SampleCollector(self._sources))
        if show_process:
            ProcessCollector(registry=self._registry)
            PlatformCollector(registry=self._registry)
            GCCollector(registry=self._registry)

    def add_source(self, source: Source) -> None:
        """Ask `source` for its samples at every scrape."""
        self._sources.append(source)

    def render(self) -> bytes:
        """Return the text of `/metrics`, of type `CONTENT_TYPE`."""
        return generate_latest(self._registry)


def _build_info() -> Iterator[Sample]:
    yield Sample(name="dsched_build_info", value=1, labels=(__version__,))


class _SampleCollector(Collector):
    """What prometheus-client asks at a scrape."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def describe(self) -> Iterable[PrometheusMetric]:
        return ()  # collected anew each time; nothing to say before

    def collect(self) -> Iterator[PrometheusMetric]:
        families: dict[str, PrometheusMetric] = {}
        for source in self._sources:
            for sample in source():
                metric = CATALOG.get(sample.name)
                if metric is None or len(metric.labels) != len(sample.labels):
                    raise InvariantError(f"metric {sample.name} {sample.labels} is not cataloged")
                family = families.get(sample.name)
                if family is None:
                    family = families[sample.name] = _make_family(metric)
                _add(family, sample)
        # In the catalog's order, so that two scrapes compare line by line.
        for name in CATALOG:
            if name in families:
                yield families[name]


def _make_family(metric: Metric) -> PrometheusMetric:
    if metric.kind is MetricKind.COUNTER:
        name = metric.name.removesuffix("_total")
        return CounterMetricFamily(name, metric.help, labels=metric.labels)
    if metric.kind is MetricKind.GAUGE:
        return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)


def _add(family: PrometheusMetric, sample: Sample) -> None:
    value = sample.value
    if isinstance(family, HistogramMetricFamily):
        if isinstance(value, int | float):
            raise InvariantError(f"metric {sample.name} is a histogram, got {value}")
        family.add_metric(
            sample.labels, buckets=list(_cumulative(value)), sum_value=value.sum_ns / NS_PER_S
        )
        return
    if not isinstance(value, int | float):
        raise InvariantError(f"metric {sample.name} is not a histogram")
    if isinstance(family, CounterMetricFamily | GaugeMetricFamily):
        family.add_metric(sample.labels, value)


def _cumulative(histogram: HistogramCounts) -> Iterator[tuple[str, float]]:
    """(upper bound in seconds, values up to it), as Prometheus wants them."""
    total = 0
    for bound_ns, count in zip(histogram.bounds_ns, histogram.counts, strict=False):
        total += count
        yield repr(bound_ns / NS_PER_S), total
    yield "+Inf", total + histogram.counts[-1]
