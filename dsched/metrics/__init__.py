"""Metrics: what is measured, by name, and how `/metrics` shows it.

Hot code counts in plain integers of its own; at a scrape, a source turns them into `Sample`s and
`MetricsExporter` into Prometheus text. Nothing here runs while tokens flow.
"""

from dsched.metrics.catalog import CATALOG, Metric, MetricKind
from dsched.metrics.exporter import CONTENT_TYPE, HistogramCounts, MetricsExporter, Sample

__all__ = [
    "CATALOG",
    "CONTENT_TYPE",
    "HistogramCounts",
    "Metric",
    "MetricKind",
    "MetricsExporter",
    "Sample",
]
