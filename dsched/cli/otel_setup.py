"""Makes the tracer that `otel.endpoint` asks for: OTLP over HTTP, in batches, from a thread."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsched import __version__
from dsched.config import OtelConfig
from dsched.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

STOP_MS = 2_000
"""Time that spans which were not sent yet get when dsched stops."""
MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def make_tracer(
    config: OtelConfig, *, instance_id: str
) -> "tuple[Tracer, Callable[[], None]] | None":
    """Return the tracer and what stops it; `None` where no endpoint is set.

    Raises:
        ConfigError: the extra is not installed.
    """
    if config.endpoint is None:
        return None
    check_extra()
    provider = _make_provider(config, instance_id=instance_id)

    def stop() -> None:
        provider.force_flush(STOP_MS)
        provider.shutdown()

    return provider.get_tracer("dsched", __version__), stop


def check_extra() -> None:
    """Raise `ConfigError` where OpenTelemetry is not installed."""
    for module in MODULES:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(
                "$.otel.endpoint: spans need OpenTelemetry: pip install 'dsched[otel]'; "
                "traceparent is passed on without it"
            )


def _make_provider(
    config: OtelConfig, *, instance_id: str, exporter: "SpanExporter | None" = None
) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    resource = Resource.create(
        {
            "service.name": config.service_name,
            "service.version": __version__,
            "service.instance.id": instance_id,
        }
    )
    provider = TracerProvider(
        resource=resource, sampler=ParentBasedTraceIdRatio(config.sample_share)
    )
    provider.add_span_processor(
        BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=config.endpoint))
    )
    return provider
