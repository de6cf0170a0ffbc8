"""EtcdGateway and EtcdRegistry over endpoints that misbehave, each in its own way.

The endpoints are small servers that answer as etcd 3.4.23 does, or as nothing does; a real etcd is
in `tests/conformance` and `tests/e2e`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import msgspec
import pytest
from aiohttp import web

from dsched.errors import RegistryError
from dsched.registry import LeaseLostError, WatchLostError
from dsched.registry.etcd import EtcdRegistry
from dsched.registry.etcd_gateway import EtcdAccess, EtcdError, EtcdGateway
from dsched.testing.ports import refusing_port

ATTEMPT_S = 0.2
HEADER = {"header": {"revision": "7"}}


class Endpoint:
    """A server whose answers a test sets by path, and which counts what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[web.Request], object]] = {}
        self.asked: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.address = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        self.bodies.append(json.loads(await request.read()))
        self.headers.append(dict(request.headers))
        answer = self.answers[request.path](request)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.json_response(answer)


def refusal(code: int, message: str, *, status: int = 400) -> Callable[[web.Request], object]:
    body = {"error": message, "message": message, "code": code}
    return lambda _: web.json_response(body, status=status)


def always(document: object) -> Callable[[web.Request], object]:
    return lambda _: document


def in_turn(*answers: Callable[[web.Request], object]) -> Callable[[web.Request], object]:
    left = iter(answers)

    def answer(request: web.Request) -> object:
        return next(left)(request)

    return answer


async def hang(request: web.Request) -> object:
    await asyncio.sleep(60)
    return {}


async def break_off(request: web.Request) -> object:
    assert request.transport is not None
    request.transport.abort()
    return {}


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    pair = Endpoint(), Endpoint()
    for each in pair:
        await each.start()
    yield pair
    for each in pair:
        await each.stop()


@pytest.fixture
async def gateway(pair: tuple[Endpoint, Endpoint]) -> AsyncIterator[EtcdGateway]:
    gateway = make_gateway(*(each.address for each in pair))
    yield gateway
    await gateway.close()


@pytest.fixture
def registry(gateway: EtcdGateway) -> EtcdRegistry:
    return EtcdRegistry(gateway, prefix="/p/")


def make_gateway(*addresses: str, access: EtcdAccess | None = None) -> EtcdGateway:
    return EtcdGateway(
        addresses, access=access or EtcdAccess(), attempt_timeout_s=ATTEMPT_S, silence_s=0.3
    )


BAD_ANSWERS = {
    "hangs": hang,
    "breaks off": break_off,
    "no leader": refusal(14, "etcdserver: no leader", status=503),
    "timed out": refusal(14, "etcdserver: request timed out", status=503),
    "gateway error": lambda _: web.Response(status=502, text="<html>"),
    "no etcd": lambda _: web.Response(status=404, text="Not Found"),
    "html": lambda _: web.Response(text="<html>"),
    "another document": lambda _: web.json_response([1]),
}


@pytest.mark.parametrize("bad", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_a_call_goes_on_at_another_endpoint_and_stays_there(
    pair: tuple[Endpoint, Endpoint],
    registry: EtcdRegistry,
    bad: Callable[[web.Request], object],
) -> None:
    """Whatever is wrong with the first one; it is not asked again while the other answers."""
    first, second = pair
    first.answers["/v3/kv/put"] = bad
    second.answers["/v3/kv/put"] = always(HEADER)

    revisions = [await registry.put("k", b"v") for _ in range(3)]

    assert revisions == [7, 7, 7]
    assert 1 <= len(first.asked) <= 2
    assert len(second.asked) == 3


async def test_a_member_of_another_cluster_is_not_believed(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry
) -> None:
    """Nobody reads half of the entries; once all have failed, whoever answers next is taken."""
    first, second = pair
    first.answers["/v3/kv/range"] = in_turn(
        always({"header": {"revision": "7", "cluster_id": "10"}}), *[BAD_ANSWERS["no leader"]] * 2
    )
    second.answers["/v3/kv/range"] = always({"header": {"revision": "1", "cluster_id": "11"}})

    await registry.list_entries("")
    with pytest.raises(RegistryError, match=r"belongs to another etcd cluster \(b, not a\)"):
        await registry.list_entries("")
    assert (await registry.list_entries("")).revision == 1


async def test_every_endpoint_is_named_with_its_fault(pair: tuple[Endpoint, Endpoint]) -> None:
    """Refused, slow, no etcd: one line says it all."""
    first, second = pair
    first.answers["/v3/kv/range"] = hang
    second.answers["/v3/kv/range"] = BAD_ANSWERS["no etcd"]
    with refusing_port() as port:
        gateway = make_gateway(f"127.0.0.1:{port}", first.address, second.address)
        with pytest.raises(RegistryError) as caught:
            await EtcdRegistry(gateway, prefix="/p/").get("k")
        await gateway.close()

    assert str(caught.value) == (
        f"no etcd endpoint answers: http://127.0.0.1:{port}: Connect call failed "
        f"('127.0.0.1', {port}); http://{first.address}: no answer in 0.2 s; "
        f"http://{second.address}: HTTP 404 without etcd's JSON; is it etcd 3.4 or newer?"
    )


@pytest.mark.parametrize("bad", ["hangs", "breaks off", "timed out"])
async def test_compare_and_set_is_not_repeated_when_it_may_have_happened(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry, bad: str
) -> None:
    """Repeated, it would fail against itself and look as if somebody else had been first."""
    first, second = pair
    first.answers["/v3/kv/txn"] = BAD_ANSWERS[bad]
    second.answers["/v3/kv/txn"] = lambda _: {**HEADER, "succeeded": False}

    with pytest.raises(RegistryError):
        await registry.compare_and_set("k", b"v", expected_revision=None)

    assert (len(first.asked), len(second.asked)) == (1, 0)


async def test_compare_and_set_goes_on_where_nothing_can_have_happened(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    """A refused connection has carried nothing."""
    _, second = pair
    second.answers["/v3/kv/txn"] = lambda _: {**HEADER, "succeeded": True}
    with refusing_port() as port:
        gateway = make_gateway(f"127.0.0.1:{port}", second.address)
        revision = await EtcdRegistry(gateway, prefix="/p/").compare_and_set(
            "k", b"v", expected_revision=3
        )
        await gateway.close()

    assert revision == 7
    (condition,) = second.bodies[0]["compare"]  # type: ignore[misc]
    assert (condition["target"], condition["mod_revision"]) == ("MOD", "3")


async def test_a_lease_whose_grant_was_not_heard_is_the_same_lease(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry
) -> None:
    """It is asked for again under the id that we drew; etcd says that it exists."""
    first, second = pair
    first.answers["/v3/lease/grant"] = hang
    second.answers["/v3/lease/grant"] = refusal(9, "etcdserver: lease already exists", status=412)

    lease_id = await registry.grant_lease(2.2)

    assert first.bodies == second.bodies == [{"TTL": 3, "ID": str(lease_id)}]


async def test_what_etcd_refuses_is_not_asked_again(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry
) -> None:
    """A full disk, a value too large: the others would say the same."""
    first, second = pair
    first.answers["/v3/kv/put"] = refusal(8, "etcdserver: mvcc: database space exceeded")

    with pytest.raises(EtcdError, match="database space exceeded"):
        await registry.put("k", b"v")

    assert second.asked == []


async def test_a_lease_that_is_over_is_told_from_other_refusals(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry
) -> None:
    """A keep-alive without TTL, and a put under a lease that is not found."""
    first, _ = pair
    first.answers["/v3/lease/keepalive"] = lambda _: {"result": {"ID": "5"}}
    first.answers["/v3/kv/put"] = refusal(5, "etcdserver: requested lease not found", status=404)

    with pytest.raises(LeaseLostError, match="lease 5 is over"):
        await registry.renew_lease(5)
    with pytest.raises(LeaseLostError, match="lease 5 is over"):
        await registry.put("k", b"v", lease_id=5)


async def test_stale_connection_costs_one_more_try(pair: tuple[Endpoint, Endpoint]) -> None:
    """The only endpoint has restarted: the pooled connection breaks, a new one works."""
    first, _ = pair
    first.answers["/v3/kv/put"] = in_turn(break_off, always(HEADER))
    gateway = make_gateway(first.address)

    assert await EtcdRegistry(gateway, prefix="/p/").put("k", b"v") == 7
    await gateway.close()
    assert len(first.asked) == 2


# ---- watches


def line(**result: object) -> bytes:
    return json.dumps({"result": {**HEADER, **result}}).encode() + b"\n"


def event(revision: int, value: str = "dg==") -> dict[str, object]:
    return {"kv": {"key": "L3Avaw==", "value": value, "mod_revision": str(revision)}}


def streaming(*chunks: bytes, is_open: bool = True) -> Callable[[web.Request], object]:
    """Send chunks as they are, then stay open in silence, or end."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.01)
        if is_open:
            await asyncio.sleep(60)
        return response

    return answer


async def watched(registry: EtcdRegistry, *, from_revision: int, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(10):
        async with aclosing(registry.watch("", from_revision=from_revision)) as changes:
            async for change in changes:
                assert change.key == "k"
                found.append(change.revision)
                if len(found) == count:
                    break
    return found


def start_revision(body: dict[str, object]) -> object:
    return body["create_request"]["start_revision"]  # type: ignore[index]


async def test_a_watch_that_breaks_goes_on_elsewhere_after_its_last_revision(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry
) -> None:
    """In the middle of a line; what was sent before is not seen twice, nothing is missed."""
    first, second = pair
    cut = line(events=[event(6)])
    whole = line(events=[event(4), event(5)])
    first.answers["/v3/watch"] = streaming(
        line(created=True) + whole[:25], whole[25:] + cut[:30], is_open=False
    )
    second.answers["/v3/watch"] = streaming(line(created=True), line(events=[event(5), event(6)]))

    assert await watched(registry, from_revision=4, count=3) == [4, 5, 6]

    assert start_revision(second.bodies[-1]) == "6"
    assert second.headers[-1]["Grpc-Metadata-hasleader"] == "true"


async def test_a_silent_watch_is_opened_anew(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry
) -> None:
    """A host that vanished breaks no socket: after the silence the watch is asked for again."""
    first, _ = pair
    first.answers["/v3/watch"] = in_turn(
        streaming(line(created=True), line(events=[event(4)])),
        streaming(line(created=True), line(events=[event(5)])),
    )

    assert await watched(registry, from_revision=4, count=2) == [4, 5]

    watches = [body for body in first.bodies if "create_request" in body]
    assert [start_revision(body) for body in watches] == ["4", "5"]


@pytest.mark.parametrize(
    "first_line",
    [
        b'{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader"}}\n',
        b"",
        b"<html>\n",
    ],
)
async def test_a_watch_that_does_not_open_is_opened_elsewhere(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry, first_line: bytes
) -> None:
    """A member without a leader, one that ends at once, and something else entirely."""
    first, second = pair
    first.answers["/v3/watch"] = streaming(first_line, is_open=False)
    second.answers["/v3/watch"] = streaming(line(created=True), line(events=[event(4)]))

    assert await watched(registry, from_revision=4, count=1) == [4]


async def test_a_watch_without_any_endpoint_is_an_error(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry
) -> None:
    """The caller tries again from where it is; nothing spins."""
    first, second = pair
    first.answers["/v3/watch"] = hang
    second.answers["/v3/watch"] = BAD_ANSWERS["no leader"]

    with pytest.raises(RegistryError, match=r"no answer in 0\.2 s; .*: etcdserver: no leader"):
        await watched(registry, from_revision=4, count=1)


async def test_compacted_and_cancelled_watches_differ(
    pair: tuple[Endpoint, Endpoint], registry: EtcdRegistry
) -> None:
    """History that is gone means to list again; anything else is a fault."""
    first, _ = pair
    first.answers["/v3/watch"] = streaming(
        line(created=True), line(canceled=True, compact_revision="6")
    )
    with pytest.raises(WatchLostError, match="revision 4 is before 6; list again"):
        await watched(registry, from_revision=4, count=1)

    first.answers["/v3/watch"] = streaming(
        line(created=True), line(canceled=True, cancel_reason="permission denied")
    )
    with pytest.raises(RegistryError, match="permission denied") as caught:
        await watched(registry, from_revision=4, count=1)
    assert not isinstance(caught.value, WatchLostError)


# ---- users


async def test_a_user_logs_in_once_and_again_when_the_token_is_over(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    """The token is sent with every call; one that etcd does not know any more is renewed."""
    first, _ = pair
    tokens = iter(["t1", "t2"])
    first.answers["/v3/auth/authenticate"] = lambda _: {"token": next(tokens), **HEADER}

    def put(request: web.Request) -> object:
        is_first_restart = len(first.asked) in (4,)
        if is_first_restart:
            return refusal(16, "etcdserver: invalid auth token", status=401)(request)
        return HEADER

    first.answers["/v3/kv/put"] = put
    gateway = make_gateway(first.address, access=EtcdAccess(user="u", password="p"))
    registry = EtcdRegistry(gateway, prefix="/p/")
    for _ in range(3):
        await registry.put("k", b"v")
    await gateway.close()

    sent = [each.get("Authorization") for each in first.headers]
    assert sent == [None, "t1", "t1", "t1", None, "t2"]
    assert first.bodies[0] == {"name": "u", "password": "p"}


async def test_a_wrong_password_is_said_and_not_tried_elsewhere(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    """The password is in no message."""
    first, second = pair
    first.answers["/v3/auth/authenticate"] = refusal(
        3, "etcdserver: authentication failed, invalid user ID or password"
    )
    gateway = make_gateway(
        first.address, second.address, access=EtcdAccess(user="u", password="geheim")
    )

    with pytest.raises(EtcdError, match="invalid user ID or password") as caught:
        await EtcdRegistry(gateway, prefix="/p/").get("k")
    await gateway.close()

    assert "geheim" not in str(caught.value)
    assert second.asked == []


def test_numbers_of_64_bits_are_read() -> None:
    """etcd writes them as strings."""
    from dsched.registry.etcd import _RangeAnswer

    text = (
        b'{"header":{"cluster_id":"15118495548433857066","revision":"9007199254740993"},'
        b'"kvs":[{"key":"YQ==","mod_revision":"9007199254740993","lease":"7587869999999999999"}]}'
    )

    answer = msgspec.json.decode(text, type=_RangeAnswer, strict=False)

    assert answer.header.revision == answer.kvs[0].mod_revision == 9007199254740993
    assert answer.kvs[0].lease == 7587869999999999999
