"""W3C trace context through dsched, and the spans that the extra `otel` makes of a request."""

import asyncio
import gzip
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from double_cluster import MODEL, PROMPT, Cluster

from dsched.cli import otel_setup
from dsched.cli.otel_setup import make_tracer
from dsched.config import OtelConfig
from dsched.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
UNSAMPLED = PARENT[:-1] + "0"
STATE = "vendor=abc,other=1"


async def ask(cluster: Cluster, *, max_tokens: int = 4, **headers: str) -> dict[str, str]:
    """One streamed completion; return the headers of its answer."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "stream": True}
    url = f"{cluster.url}/v1/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={**body, "ignore_eos": True}, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        return {name.lower(): value for name, value in response.headers.items()}


# ---- without the extra


@pytest.mark.parametrize("is_streamed_chat", [False, True])
async def test_context_reaches_the_engine_and_comes_back(
    cluster: Cluster, *, is_streamed_chat: bool
) -> None:
    """Unchanged, with its state; no span is made."""
    double = await cluster.add_double()
    await cluster.start_service()
    await cluster.wait_until_up()
    if is_streamed_chat:
        answer = await cluster.client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            extra_headers={"traceparent": PARENT, "tracestate": STATE},
        )
        back = {name.lower(): value for name, value in answer.headers.items()}
    else:
        back = await ask(cluster, traceparent=PARENT, tracestate=STATE)

    assert back["traceparent"] == PARENT
    assert double.headers[-1]["traceparent"] == PARENT
    assert double.headers[-1]["tracestate"] == STATE


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "00-1-2-3",
        f"ff-{TRACE_ID}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        PARENT.upper(),
        PARENT + " ; evil=1",
    ],
)
async def test_a_broken_context_is_left_out(cluster: Cluster, broken: str) -> None:
    """The request is served; neither the engine nor the client sees the header."""
    double = await cluster.add_double()
    await cluster.start_service()
    await cluster.wait_until_up()
    back = await ask(cluster, traceparent=broken, tracestate=STATE)

    assert "traceparent" not in back
    assert not {"traceparent", "tracestate"} & set(double.headers[-1])


async def test_a_long_state_is_dropped_alone(cluster: Cluster) -> None:
    """The W3C allows it; the trace itself goes on."""
    double = await cluster.add_double()
    await cluster.start_service()
    await cluster.wait_until_up()
    await ask(cluster, traceparent=PARENT, tracestate="a=" + "x" * 600)

    assert double.headers[-1]["traceparent"] == PARENT
    assert "tracestate" not in double.headers[-1]


async def test_without_a_context_there_is_none(two_engines: Cluster) -> None:
    """Nothing is invented while spans are off."""
    back = await ask(two_engines)

    assert "traceparent" not in back
    assert all(
        "traceparent" not in each for double in two_engines.doubles for each in double.headers
    )


async def test_a_handoff_keeps_the_context(two_engines: Cluster) -> None:
    """The next engine hears of the same trace."""
    task = asyncio.create_task(ask(two_engines, max_tokens=60, traceparent=PARENT))
    await two_engines.wait_until(
        lambda: two_engines.service.journal.status().num_recorded_tokens >= 5
    )
    victim = next(double for double in two_engines.doubles if double.num_running)
    await victim.kill()
    await task

    assert [d.headers[-1]["traceparent"] for d in two_engines.doubles] == [PARENT, PARENT]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install, and what works without."""
    monkeypatch.setattr(otel_setup.importlib.util, "find_spec", lambda _: None)
    config = OtelConfig(endpoint="http://127.0.0.1:4318/v1/traces")

    with pytest.raises(ConfigError, match=r"pip install 'dsched\[otel\]'"):
        make_tracer(config, instance_id="i")


# ---- with it


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Spans of services that are started now, in memory."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    monkeypatch.setattr(
        otel_setup, "_make_provider", partial(otel_setup._make_provider, exporter=memory)
    )
    return memory


async def start(cluster: Cluster, num_engines: int, **otel: object) -> None:
    for _ in range(num_engines):
        await cluster.add_double()
    endpoint = {"endpoint": "http://127.0.0.1:9/v1/traces"}
    await cluster.start_service(otel=endpoint | otel)
    await cluster.wait_until_up()


async def finished(cluster: Cluster, exporter: Any) -> dict[str, list["ReadableSpan"]]:  # noqa: ANN401
    """All spans by name, once the service has stopped and sent them."""
    service = cluster.services.pop()
    assert service._spans is not None
    assert service._spans.num_open == 0
    await service.stop()
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


async def test_a_request_is_four_spans(cluster: Cluster, spans: Any) -> None:  # noqa: ANN401
    """Route, prefill and decode follow each other under the request, which continues the client's
    trace; the engine is given the request's span."""
    await start(cluster, 1)
    back = await ask(cluster, traceparent=PARENT, tracestate=STATE)
    given = cluster.doubles[0].headers[-1]
    found = await finished(cluster, spans)

    assert sorted(found) == ["decode", "prefill", "request", "route"]
    (request,), (route,), (prefill,), (decode,) = (
        found[name] for name in ("request", "route", "prefill", "decode")
    )
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    for child in (route, prefill, decode):
        assert child.parent is not None
        assert child.parent.span_id == request.context.span_id
    times = [request.start_time, route.start_time, route.end_time, prefill.start_time]
    times += [prefill.end_time, decode.start_time, decode.end_time]
    assert times == sorted(times)  # type: ignore[type-var]
    assert route.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert request.attributes is not None
    assert request.attributes["gen_ai.request.model"] == MODEL
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.attributes["dsched.outcome"] == "length"
    assert route.attributes is not None
    assert route.attributes["dsched.engine"] == "p-0"
    ours = f"00-{TRACE_ID}-{request.context.span_id:016x}-01"
    assert given["traceparent"] == ours
    assert given["tracestate"] == STATE
    assert back["traceparent"] == ours


async def test_a_handoff_is_a_span(cluster: Cluster, spans: Any) -> None:  # noqa: ANN401
    """Between two decodes, with the lost engine, the method and the parts of the pause."""
    await start(cluster, 2)
    task = asyncio.create_task(ask(cluster, max_tokens=60))
    await cluster.wait_until(lambda: cluster.service.journal.status().num_recorded_tokens >= 5)
    victim = next(double for double in cluster.doubles if double.num_running)
    await victim.kill()
    await task
    found = await finished(cluster, spans)

    (handoff,) = found["handoff"]
    first, second = sorted(found["decode"], key=lambda span: span.start_time or 0)
    assert handoff.attributes is not None
    assert handoff.attributes["dsched.lost_engine"] == f"p-{cluster.doubles.index(victim)}"
    assert handoff.attributes["dsched.method"] in ("continue", "replay")
    assert handoff.attributes["dsched.prefill_ns"] > 0
    assert first.status.is_ok is False
    assert first.end_time == handoff.start_time
    assert handoff.end_time == second.start_time
    (request,) = found["request"]
    assert request.attributes is not None
    assert request.attributes["dsched.attempts"] == 2
    assert request.status.is_ok


async def test_the_clients_sampling_is_kept(cluster: Cluster, spans: Any) -> None:  # noqa: ANN401
    """A trace that the client does not record is not recorded here, and is passed on so; the share
    counts for requests without one."""
    await start(cluster, 1, sample_share=0.0)
    back = await ask(cluster, traceparent=UNSAMPLED)
    await ask(cluster)
    await ask(cluster, traceparent=PARENT)
    found = await finished(cluster, spans)

    assert back["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert back["traceparent"].endswith("-00")
    assert len(found["request"]) == 1


async def test_a_client_that_leaves_closes_its_spans(cluster: Cluster, spans: Any) -> None:  # noqa: ANN401
    """Nothing stays open in memory."""
    await start(cluster, 1)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 500, "stream": True}
    async with aiohttp.ClientSession() as session:
        response = await session.post(
            f"{cluster.url}/v1/completions", json={**body, "ignore_eos": True}
        )
        await response.content.readany()
        response.close()
    await cluster.wait_until(lambda: cluster.service.front_door.num_open_requests == 0)
    found = await finished(cluster, spans)

    assert {name: len(each) for name, each in found.items()} == {
        "request": 1, "route": 1, "prefill": 1, "decode": 1,
    }  # fmt: skip
    (request,) = found["request"]
    assert request.attributes is not None
    assert request.attributes["dsched.outcome"] == "disconnected"


async def test_spans_go_to_the_endpoint(cluster: Cluster) -> None:
    """As OTLP over HTTP, under the service's name; the last ones when dsched stops."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    await start(cluster, 1, endpoint=f"http://127.0.0.1:{port}/v1/traces", service_name="here")
    await ask(cluster)
    await cluster.services.pop().stop()
    await runner.cleanup()

    names, services = [], set()
    for body in bodies:
        raw = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            services |= {
                each.value.string_value
                for each in resource.resource.attributes
                if each.key == "service.name"
            }
            names += [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["decode", "prefill", "request", "route"]
    assert services == {"here"}
