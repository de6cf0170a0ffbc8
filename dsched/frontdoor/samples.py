"""The front door's counters as samples of the metrics catalog, read at the moment of a scrape."""

from collections.abc import Iterator

from dsched.frontdoor.stats import FrontDoorStats, ModelStats
from dsched.metrics import MetricsExporter, Sample


def front_door_samples(stats: FrontDoorStats) -> Iterator[Sample]:
    """Yield the samples; a source for `MetricsExporter.add_source`."""
    for status, count in sorted(stats.num_refused.items()):
        yield Sample(name="dsched_requests_refused_total", value=count, labels=(str(status),))
    for model, counters in sorted(stats.per_model.items()):
        yield from _model_samples(model, counters)


def metrics_text(stats: FrontDoorStats) -> bytes:
    """Return the exposition of the front door alone, for one that runs without the rest."""
    exporter = MetricsExporter()
    exporter.add_source(lambda: front_door_samples(stats))
    return exporter.render()


def _model_samples(model: str, counters: ModelStats) -> Iterator[Sample]:
    for (api, outcome), count in sorted(counters.num_requests.items()):
        labels = (model, api.value, outcome.value)
        yield Sample(name="dsched_requests_total", value=count, labels=labels)
    for name, value in (
        ("dsched_open_streams", counters.num_open),
        ("dsched_prompt_tokens_total", counters.num_prompt_tokens),
        ("dsched_cached_prompt_tokens_total", counters.num_cached_tokens),
        ("dsched_output_tokens_total", counters.num_output_tokens),
        ("dsched_ttft_seconds", counters.ttft),
        ("dsched_itl_seconds", counters.itl),
        ("dsched_request_duration_seconds", counters.duration),
    ):
        yield Sample(name=name, value=value, labels=(model,))
