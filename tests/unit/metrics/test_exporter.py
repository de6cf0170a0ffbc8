"""MetricsExporter: the text of /metrics, read back by prometheus-client's own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsched import __version__
from dsched.errors import InvariantError
from dsched.metrics import CATALOG, MetricKind, MetricsExporter, Sample


class Histogram:
    """What hot code keeps."""

    def __init__(self, bounds_ns: tuple[int, ...], counts: list[int], sum_ns: int) -> None:
        self.bounds_ns = bounds_ns
        self.counts = counts
        self.sum_ns = sum_ns


def scrape(*samples: Sample) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    exporter = MetricsExporter(show_process=False)
    exporter.add_source(lambda: samples)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exporter.render().decode())
        for sample in family.samples
    }


def test_counter_and_gauge_are_read_back() -> None:
    """Names, labels and values arrive as they were counted."""
    found = scrape(
        Sample(name="dsched_requests_total", value=3, labels=("m", "chat", "stop")),
        Sample(name="dsched_requests_total", value=4, labels=("m", "chat", "length")),
        Sample(name="dsched_admission_queue_depth", value=0),
    )

    assert found == {
        ("dsched_build_info", (("version", __version__),)): 1,
        (
            "dsched_requests_total",
            (("api", "chat"), ("model", "m"), ("outcome", "stop")),
        ): 3,
        (
            "dsched_requests_total",
            (("api", "chat"), ("model", "m"), ("outcome", "length")),
        ): 4,
        ("dsched_admission_queue_depth", ()): 0,
    }


def test_histogram_buckets_add_up() -> None:
    """Counts per bucket become counts up to a bound, in seconds; the last holds all values."""
    histogram = Histogram((1_000_000, 2_500_000_000), [2, 0, 3], 7_000_000_000)

    found = scrape(Sample(name="dsched_ttft_seconds", value=histogram, labels=("m",)))

    model = ("model", "m")
    assert found[("dsched_ttft_seconds_bucket", (("le", "0.001"), model))] == 2
    assert found[("dsched_ttft_seconds_bucket", (("le", "2.5"), model))] == 2
    assert found[("dsched_ttft_seconds_bucket", (("le", "+Inf"), model))] == 5
    assert found[("dsched_ttft_seconds_count", (model,))] == 5
    assert found[("dsched_ttft_seconds_sum", (model,))] == 7


def test_histogram_without_bounds_has_count_and_sum() -> None:
    """No bounds leave one bucket."""
    found = scrape(
        Sample(name="dsched_itl_seconds", value=Histogram((), [4], 2_000_000_000), labels=("m",))
    )

    assert found[("dsched_itl_seconds_count", (("model", "m"),))] == 4
    assert found[("dsched_itl_seconds_sum", (("model", "m"),))] == 2


def test_label_values_are_escaped() -> None:
    """A model's name may hold quotes and line ends without breaking the text."""
    name = 'a"b\\c\nd'

    found = scrape(Sample(name="dsched_open_streams", value=1, labels=(name,)))

    assert found[("dsched_open_streams", (("model", name),))] == 1


@pytest.mark.parametrize(
    "sample",
    [
        Sample(name="dsched_requets_total", value=1, labels=("m", "chat", "stop")),
        Sample(name="dsched_requests_total", value=1, labels=("m",)),
        Sample(name="dsched_ttft_seconds", value=1, labels=("m",)),
        Sample(name="dsched_open_streams", value=Histogram((), [1], 1), labels=("m",)),
    ],
)
def test_sample_that_the_catalog_does_not_know(sample: Sample) -> None:
    """A misspelt name, other labels or another kind is our mistake, not a new metric."""
    with pytest.raises(InvariantError, match=sample.name):
        scrape(sample)


def test_exporters_share_nothing() -> None:
    """Two in one process do not collide, also with process metrics."""
    texts = [MetricsExporter().render() for _ in range(2)]

    assert all(b"process_resident_memory_bytes" in text for text in texts)


def test_catalog_keeps_the_conventions() -> None:
    """Prefix, base units, `_total` on counters alone, and no label that a client chooses."""
    for name, metric in CATALOG.items():
        assert name.startswith("dsched_")
        assert name.endswith("_total") == (metric.kind is MetricKind.COUNTER), name
        assert not name.endswith(("_ms", "_us", "_ns", "_milliseconds")), name
        assert metric.help.endswith("."), name
        assert not {"request_id", "attempt_id", "tenant", "user"} & set(metric.labels), name
        if metric.kind is MetricKind.HISTOGRAM:
            assert name.endswith("_seconds"), name
