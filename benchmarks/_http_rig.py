"""Processes around a router under test, all raw uvloop: dummy engine, bare relay, load generator.

Run by `frontdoor.py` as `python _http_rig.py backend|relay|load|streams ...`; each prints one JSON
line. They are as light as Python allows, because they share the machine with what is measured.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from typing import Any

import httptools
import msgspec
import uvloop

# vLLM's shape of an event, with a token id that the relay has to read.
EVENT = (
    b'data: {"id":"cmpl-4f1d2c3b4a59687f","object":"text_completion","created":1790000000,'
    b'"model":"tiny","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":%b,'
    b'"stop_reason":null,"token_ids":[%d],"prompt_token_ids":null}],"usage":null}\n\n'
)
USAGE = (
    b'data: {"id":"cmpl-4f1d2c3b4a59687f","object":"text_completion","created":1790000000,'
    b'"model":"tiny","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,'
    b'"total_tokens":%d}}\n\ndata: [DONE]\n\n'
)
WHOLE = (
    b'{"id":"cmpl-4f1d2c3b4a59687f","object":"text_completion","created":1790000000,'
    b'"model":"tiny","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":"length","stop_reason":null,"token_ids":null}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
)
FIRST_TOKEN, NUM_TOKENS = 300, 700
PROMPT_CHARS = 100


class Body(msgspec.Struct):
    max_tokens: int = 16
    stream: bool = False


class Backend(asyncio.Protocol):
    """A dummy engine: answers at once, or a token per stream at every step."""

    streams: dict["Backend", list[int]] = {}  # noqa: RUF012 - one process, one engine
    step_s = 0.0
    decoder = msgspec.json.Decoder(Body)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.body = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def connection_lost(self, _: Exception | None) -> None:
        self.streams.pop(self, None)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        url, body, self.url, self.body = self.url, self.body, b"", b""
        if url == b"/v1/completions":
            self.complete(self.decoder.decode(body))
        elif url == b"/v1/models":
            card = {"id": "tiny", "object": "model", "max_model_len": 131_072}
            self.respond(json.dumps({"object": "list", "data": [card]}).encode())
        else:
            self.respond(b"{}")

    def respond(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)

    def complete(self, body: Body) -> None:
        if not body.stream:
            self.respond(WHOLE)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        head += b"transfer-encoding: chunked\r\n\r\n"
        if self.step_s and body.max_tokens > 1:
            self.transport.write(head)
            self.streams[self] = [0, body.max_tokens]
            return
        events = [self.event(k, body.max_tokens) for k in range(body.max_tokens)]
        self.transport.write(head + b"".join(events) + self.last(body.max_tokens))

    def event(self, k: int, count: int) -> bytes:
        reason = b'"length"' if k == count - 1 else b"null"
        data = EVENT % (reason, FIRST_TOKEN + k % NUM_TOKENS)
        return b"%x\r\n%b\r\n" % (len(data), data)

    def last(self, count: int) -> bytes:
        data = USAGE % (count, count + 9)
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)

    def step(self) -> None:
        place = self.streams[self]
        k, count = place
        place[0] = k + 1
        data = self.event(k, count)
        if k == count - 1:
            del self.streams[self]
            data += self.last(count)
        self.transport.write(data)


async def run_backend(port: int, step_ms: float) -> None:
    loop = asyncio.get_running_loop()
    Backend.step_s = step_ms / 1e3
    await loop.create_server(Backend, "127.0.0.1", port, backlog=1_024)
    print(json.dumps({"port": port}), flush=True)
    next_s = loop.time()
    while True:
        next_s = max(next_s + Backend.step_s, loop.time())
        await asyncio.sleep(next_s - loop.time() if Backend.step_s else 3_600)
        for connection in list(Backend.streams):
            connection.step()


class Relay(asyncio.Protocol):
    """A client of the bare relay: its bytes go to an engine in turn, the engine's come back.

    The least that a relay in Python can do, so the floor of what dsched's could cost: nothing is
    looked at but where requests and answers end.
    """

    idle: list[list["Upstream"]] = []  # noqa: RUF012 - one process, one relay
    ports: tuple[int, ...] = ()
    num_requests = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.request = b""

    def data_received(self, data: bytes) -> None:
        self.request += data
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        request, self.request = self.request, b""
        if not self.parser.should_keep_alive():
            # For this hop only: the engine would take no further request on its connection.
            request = re.sub(rb"(?i)\r\nconnection: close", b"", request)
        number = Relay.num_requests % len(self.ports)
        Relay.num_requests += 1
        if self.idle[number]:
            self.idle[number].pop().send(self, request)
            return
        loop = asyncio.get_running_loop()
        connect = loop.create_connection(
            lambda: Upstream(self.idle[number], self, request), "127.0.0.1", self.ports[number]
        )
        self.connecting = loop.create_task(connect)


class Upstream(asyncio.Protocol):
    """A connection of the bare relay to an engine."""

    def __init__(self, idle: list["Upstream"], client: Relay, request: bytes) -> None:
        self.idle = idle
        self.client = client
        self.first = request

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)
        self.send(self.client, self.first)

    def send(self, client: Relay, request: bytes) -> None:
        self.client = client
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.client.transport.write(data)
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.idle.append(self)


async def run_relay(port: int, ports: list[int]) -> None:
    Relay.ports = tuple(ports)
    Relay.idle = [[] for _ in ports]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Relay, "127.0.0.1", port, backlog=1_024)
    print(json.dumps({"port": port}), flush=True)
    await server.serve_forever()


class Caller(asyncio.Protocol):
    """One client: sends its request again as soon as it has the answer."""

    def __init__(self, load: "Load") -> None:
        self.load = load

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)
        self.send()

    def send(self) -> None:
        self.start_s = time.perf_counter()
        self.transport.write(self.load.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.load.done(self.parser.get_status_code(), time.perf_counter() - self.start_s)
        if self.load.is_over:
            self.transport.close()
        else:
            self.send()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.load.is_over:
            self.load.num_errors += 1


class Load:
    """Counts of one run; answers before `start` are warming up."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.is_warm = False
        self.is_over = False
        self.num_errors = 0
        self.latencies_s: list[float] = []

    def done(self, status: int, latency_s: float) -> None:
        if status != 200:
            self.num_errors += 1
        elif self.is_warm and not self.is_over:
            self.latencies_s.append(latency_s)


def post(port: int, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def prompt_of(num_chars: int) -> str:
    words = "the quick brown fox jumps over the lazy dog "
    return (words * (num_chars // len(words) + 1))[:num_chars]


async def run_load(port: int, num_clients: int, seconds: float, prompt_chars: int) -> None:
    loop = asyncio.get_running_loop()
    body = {"model": "tiny", "prompt": prompt_of(prompt_chars), "max_tokens": 1}
    load = Load(post(port, body))
    for _ in range(num_clients):
        await loop.create_connection(lambda: Caller(load), "127.0.0.1", port)
    await asyncio.sleep(0.3)
    load.is_warm = True
    start_s = time.perf_counter()
    await asyncio.sleep(seconds)
    load.is_over = True
    elapsed_s = time.perf_counter() - start_s
    ordered = sorted(load.latencies_s) or [float("nan")]
    result = {
        "requests_per_s": len(load.latencies_s) / elapsed_s,
        "p50_us": ordered[len(ordered) // 2] * 1e6,
        "p99_us": ordered[len(ordered) * 99 // 100] * 1e6,
        "num_errors": load.num_errors,
    }
    print(json.dumps(result), flush=True)


class Listener(asyncio.Protocol):
    """One client of one long stream."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.ended = asyncio.get_running_loop().create_future()
        self.num_events = 0
        self.is_whole = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: {")
        # The end mark may lie across two reads; the last chunk after it is always in the second.
        if b"[DONE]" in data or data.endswith(b"0\r\n\r\n"):
            self.is_whole = True
            self.transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set_result(None)


async def run_streams(port: int, num_streams: int, num_tokens: int) -> None:
    loop = asyncio.get_running_loop()
    body = {"model": "tiny", "prompt": "one two", "max_tokens": num_tokens, "stream": True}
    request = post(port, body)
    listeners = []
    for _ in range(num_streams):
        _, listener = await loop.create_connection(lambda: Listener(request), "127.0.0.1", port)
        listeners.append(listener)
    start_s = time.perf_counter()
    async with asyncio.timeout(300):
        await asyncio.gather(*(listener.ended for listener in listeners))
    result = {
        "seconds": time.perf_counter() - start_s,
        "num_tokens": num_streams * num_tokens,
        "num_events": sum(listener.num_events for listener in listeners),
        "num_errors": sum(not listener.is_whole for listener in listeners),
    }
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["backend", "relay", "load", "streams"])
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--prompt-chars", type=int, default=PROMPT_CHARS)
    parser.add_argument("--to", type=int, nargs="*", default=[])
    given = parser.parse_args()
    if given.mode == "backend":
        uvloop.run(run_backend(given.port, given.step_ms))
    elif given.mode == "relay":
        uvloop.run(run_relay(given.port, given.to))
    elif given.mode == "load":
        uvloop.run(run_load(given.port, given.clients, given.seconds, given.prompt_chars))
    else:
        uvloop.run(run_streams(given.port, given.clients, given.tokens))


if __name__ == "__main__":
    sys.exit(main())
