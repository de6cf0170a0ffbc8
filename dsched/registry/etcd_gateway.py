"""Calls of etcd's JSON gateway (`/v3/...`, etcd 3.4 and newer): several endpoints, one at a time.

Every call goes to the endpoint that answered last. One that refuses, breaks off, has no leader or
takes longer than `attempt_timeout_s` costs the call that attempt, and the next endpoint is asked.
Only when all have failed is it a `RegistryError`, which says of each endpoint why.

A call that must not happen twice (compare-and-set) is not repeated once it may have been carried
out: the caller reads what became of it. All others may be repeated: a lease is granted under an id
that we draw, so even that is the same the second time.

JSON over HTTP and not gRPC: an engine's environment pins its own grpcio, and dsched must fit in.
"""

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
import structlog

from dsched.errors import RegistryError

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")
Body = Mapping[str, object]

MAX_ANSWER_BYTES = 64 << 20
"""Largest answer, and largest line of a watch. Above it something is wrong with the other side."""
SILENCE_S = 10.0
"""A watch without a line for so long is opened anew: a host that vanished breaks no socket. Below:
needless work. Above: changes are noticed late after the loss of a host."""
NOT_FOUND, FAILED_PRECONDITION, OUT_OF_RANGE, UNAUTHENTICATED = 5, 9, 11, 16
"""gRPC's status codes, which the gateway puts into the body."""
TRANSIENT_CODES = frozenset({1, 2, 4, 13, 14})
"""Cancelled, unknown, deadline, internal, unavailable: of this endpoint at this moment."""


class EtcdError(RegistryError):
    """etcd understood the call and said no; another endpoint would say the same."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class EndpointError(RegistryError):
    """One endpoint failed."""

    def __init__(self, reason: str, *, may_have_acted: bool, is_broken: bool = False) -> None:
        super().__init__(reason)
        self.may_have_acted = may_have_acted
        """The call may have been carried out."""
        self.is_broken = is_broken
        """A connection broke that may have been idle since before an outage: one more try."""


class _ErrorBody(msgspec.Struct):
    code: int = 0
    grpc_code: int = 0
    message: str = ""
    error: object = None


class _Header(msgspec.Struct, frozen=True):
    cluster_id: int = 0


class _AnyAnswer(msgspec.Struct):
    header: _Header = _Header()


class _Token(msgspec.Struct):
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """How to be let in."""

    user: str | None = None
    password: str | None = None
    ca_file: str | None = None
    """`None`: plain HTTP."""


class EtcdGateway:
    """The endpoints of one etcd cluster. Made anywhere, used on one event loop."""

    def __init__(
        self,
        endpoints: tuple[str, ...],
        *,
        access: EtcdAccess,
        attempt_timeout_s: float,
        silence_s: float = SILENCE_S,
    ) -> None:
        scheme = "http" if access.ca_file is None else "https"
        self.urls = tuple(f"{scheme}://{endpoint}" for endpoint in endpoints)
        self._access = access
        self._attempt_timeout_s = attempt_timeout_s
        self._silence_s = silence_s
        self._current = 0
        self._cluster_id = 0
        """Of the cluster that answers; 0 while it is not known."""
        self._token: str | None = None
        self._opened: aiohttp.ClientSession | None = None

    async def call(
        self, path: str, body: Body, answer: type[Answer], *, is_repeatable: bool = True
    ) -> Answer:
        """Ask endpoints until one answers. Raises `EtcdError` or `RegistryError`."""
        failures: list[tuple[str, EndpointError]] = []
        todo = self._order()
        for index in todo:  # grows by one, at most
            try:
                data = await self._ask(index, path, body)
                self._check_cluster(data)
                found = _decode(data, answer)
            except EndpointError as error:
                failures.append((self.urls[index], error))
                if error.may_have_acted and not is_repeatable:
                    break
                if error.is_broken and len(failures) == 1:
                    todo.append(index)
            else:
                self._use(index, failures)
                return found
        self._cluster_id = 0  # perhaps it was made anew: take whichever answers next
        raise RegistryError(describe(failures))

    async def stream(
        self, path: str, body: Body, answer: type[Answer]
    ) -> AsyncGenerator[Answer, None]:
        """Yield the lines of an answer without end; stop when it breaks off or goes silent.

        Raises `RegistryError` when no endpoint sends a first line.
        """
        failures: list[tuple[str, EndpointError]] = []
        for index in self._order():
            async with contextlib.AsyncExitStack() as stack:
                try:
                    lines = await stack.enter_async_context(self._open_stream(index, path, body))
                    async with asyncio.timeout(self._attempt_timeout_s):
                        first = _decode(await anext(lines), answer)
                except TimeoutError:
                    failures.append((self.urls[index], self._too_slow()))
                    continue
                except StopAsyncIteration:
                    failures.append((self.urls[index], _broken("ended the watch at once")))
                    continue
                except EndpointError as error:
                    failures.append((self.urls[index], error))
                    continue
                self._use(index, failures)
                yield first
                async for item in self._rest(index, lines, answer):
                    yield item
                return
        raise RegistryError(describe(failures))

    async def _rest(
        self, index: int, lines: AsyncIterator[bytes], answer: type[Answer]
    ) -> AsyncIterator[Answer]:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    line = await anext(lines)
                found = _decode(line, answer)
            except TimeoutError:
                return
            except (StopAsyncIteration, EndpointError):
                self._avoid(index)
                return
            yield found

    def _check_cluster(self, data: bytes) -> None:
        """Two clusters in one URL would each have half of the entries."""
        found = _decode(data, _AnyAnswer).header.cluster_id
        if found and self._cluster_id and found != self._cluster_id:
            reason = f"belongs to another etcd cluster ({found:x}, not {self._cluster_id:x})"
            raise EndpointError(reason, may_have_acted=True)
        self._cluster_id = found or self._cluster_id

    async def close(self) -> None:
        """Close every connection."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            await opened.close()

    # ---- one endpoint

    async def _ask(self, index: int, path: str, body: Body, *, is_again: bool = False) -> bytes:
        await self._log_in(index)
        async with (
            _faults_named(self._too_slow()),
            asyncio.timeout(self._attempt_timeout_s),
            self._session().post(
                self.urls[index] + path, data=msgspec.json.encode(body), headers=self._headers()
            ) as response,
        ):
            data = await response.content.read(MAX_ANSWER_BYTES)
            while not response.content.at_eof() and len(data) < MAX_ANSWER_BYTES:
                data += await response.content.read(MAX_ANSWER_BYTES)
            status = response.status
        if status == 200:
            return data
        error = _read_error(status, data)
        if isinstance(error, EtcdError) and self._is_token_over(error) and not is_again:
            self._token = None
            return await self._ask(index, path, body, is_again=True)
        raise error

    @contextlib.asynccontextmanager
    async def _open_stream(
        self, index: int, path: str, body: Body
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        await self._log_in(index)
        try:
            async with (
                _faults_named(self._too_slow()),
                asyncio.timeout(self._attempt_timeout_s),
            ):
                response = await self._session().post(
                    self.urls[index] + path,
                    data=msgspec.json.encode(body),
                    # Without it a member that is cut off from the others keeps a silent watch.
                    headers=self._headers() | {"Grpc-Metadata-hasleader": "true"},
                )
        except EtcdError:
            self._token = None
            raise
        try:
            if response.status != 200:
                async with _faults_named(self._too_slow()):
                    error = _read_error(response.status, await response.read())
                if isinstance(error, EtcdError) and self._is_token_over(error):
                    self._token = None
                    raise EndpointError(str(error), may_have_acted=False)
                raise error
            yield self._lines(response)
        finally:
            response.close()

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        rest = bytearray()
        async with _faults_named(self._too_slow()):
            async for chunk in response.content.iter_any():
                rest += chunk
                *lines, tail = rest.split(b"\n")
                rest = bytearray(tail)
                for line in lines:
                    if line:
                        yield bytes(line)
                if len(rest) > MAX_ANSWER_BYTES:
                    raise _broken(f"a line of over {MAX_ANSWER_BYTES} bytes")

    async def _log_in(self, index: int) -> None:
        if self._access.user is None or self._token is not None:
            return
        body = {"name": self._access.user, "password": self._access.password}
        async with (
            _faults_named(self._too_slow()),
            asyncio.timeout(self._attempt_timeout_s),
            self._session().post(
                f"{self.urls[index]}/v3/auth/authenticate", data=msgspec.json.encode(body)
            ) as response,
        ):
            data, status = await response.read(), response.status
        if status != 200:
            raise _read_error(status, data)
        self._token = _decode(data, _Token).token

    def _is_token_over(self, error: EtcdError) -> bool:
        is_about_auth = error.code == UNAUTHENTICATED or "auth" in str(error)
        return self._access.user is not None and is_about_auth

    def _headers(self) -> dict[str, str]:
        return {} if self._token is None else {"Authorization": self._token}

    def _too_slow(self) -> EndpointError:
        reason = f"no answer in {self._attempt_timeout_s:g} s"
        return EndpointError(reason, may_have_acted=True)

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            tls: ssl.SSLContext | bool = True
            if self._access.ca_file is not None:
                tls = ssl.create_default_context(cafile=self._access.ca_file)
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=tls, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._opened

    # ---- which endpoint

    def _order(self) -> list[int]:
        count = len(self.urls)
        return [(self._current + offset) % count for offset in range(count)]

    def _use(self, index: int, failures: list[tuple[str, EndpointError]]) -> None:
        if index != self._current:
            log.warning(
                "registry.endpoint_changed", endpoint=self.urls[index], reason=_reasons(failures)
            )
            self._current = index

    def _avoid(self, index: int) -> None:
        if index == self._current:
            self._current = (index + 1) % len(self.urls)


def describe(failures: list[tuple[str, EndpointError]]) -> str:
    """Say of each endpoint why it failed, in one line."""
    return f"no etcd endpoint answers: {_reasons(failures)}"


def _reasons(failures: list[tuple[str, EndpointError]]) -> str:
    each = dict.fromkeys(f"{url}: {error}" for url, error in failures)
    return "; ".join(each) or "its watch broke"


def to_base64(data: bytes) -> str:
    """Write bytes as the gateway wants them.

    >>> to_base64(b"a")
    'YQ=='
    """
    return base64.b64encode(data).decode()


@contextlib.asynccontextmanager
async def _faults_named(too_slow: EndpointError) -> AsyncIterator[None]:
    """Turn what aiohttp raises into an `EndpointError` with a reason for people."""
    try:
        yield
    except TimeoutError as error:
        raise too_slow from error
    except aiohttp.ClientConnectorError as error:
        reason = str(error.os_error.strerror or error)
        raise EndpointError(reason, may_have_acted=False) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _broken(f"connection broke: {str(error) or type(error).__name__}") from error


def _broken(reason: str) -> EndpointError:
    return EndpointError(reason, may_have_acted=True, is_broken=True)


def _decode(data: bytes, answer: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(data, type=answer, strict=False)
    except msgspec.MsgspecError as error:
        raise EndpointError(f"is no etcd: {error}", may_have_acted=True) from error


def _read_error(status: int, data: bytes) -> EtcdError | EndpointError:
    try:
        body = msgspec.json.decode(data, type=_ErrorBody, strict=False)
    except msgspec.MsgspecError:
        reason = f"HTTP {status} without etcd's JSON; is it etcd 3.4 or newer?"
        return EndpointError(reason, may_have_acted=False)
    code = body.code or body.grpc_code
    message = body.message or str(body.error)
    if code in TRANSIENT_CODES or status >= 500:
        return EndpointError(message, may_have_acted=True)
    return EtcdError(code, message)
