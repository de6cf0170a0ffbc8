"""Request heads that were read before.

A client sends the same head with every request, byte for byte, as long as nothing in it counts; so
what the parser said of a head is kept, and the next request with these very bytes needs no parser.
What is kept is only what the parser made of a whole request in one read whose body is all that
follows its head: everything else (chunks, `Expect`, offers of other protocols, requests in pieces
or in a row) is read anew each time.
"""

import msgspec

MAX_HEADS = 1_024
"""Heads kept; then all are forgotten. Below: busy servers of many different clients parse more.
Above: memory, some KB a head."""
MAX_HEAD_BYTES = 2_048
"""Longest head that is kept. Longer ones carry cookies or tokens that are seldom the same."""

_END = b"\r\n\r\n"


class HttpRequest(msgspec.Struct, kw_only=True):
    """One whole request."""

    method: bytes
    path: bytes
    """Without the query, as it was sent."""
    query: bytes
    headers: list[tuple[bytes, bytes]]
    """Names in lower case. Requests with equal heads share the list: do not change it."""
    fields: dict[bytes, bytes]
    """The same, the first value of each name."""
    body: bytes
    is_http_10: bool
    is_kept_alive: bool
    """The connection may serve another request after this one."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header."""
        return self.fields.get(name)


class KnownHeads:
    """Heads by their bytes. One for each server."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[int, HttpRequest]] = {}
        """Bytes of the body, and the request without it."""

    def __len__(self) -> int:
        return len(self._known)

    def find(self, data: bytes) -> HttpRequest | None:
        """Return the request that `data` is, if it has a known head and nothing but its body."""
        end = data.find(_END) + len(_END)
        found = self._known.get(data[:end])
        if found is None or len(data) - end != found[0]:
            return None
        known = found[1]
        return HttpRequest(
            method=known.method,
            path=known.path,
            query=known.query,
            headers=known.headers,
            fields=known.fields,
            body=data[end:],
            is_http_10=known.is_http_10,
            is_kept_alive=known.is_kept_alive,
        )

    def learn(self, data: bytes, request: HttpRequest) -> None:
        """Keep the head of `request`, which the parser made of `data` and nothing else, if its body
        is what follows the head."""
        end = data.find(_END) + len(_END)
        if end > MAX_HEAD_BYTES or data[end:] != request.body:
            return
        fields = request.fields
        head = data[:end]
        if b"expect" in fields or b"transfer-encoding" in fields or b"\r\nupgrade" in head.lower():
            return
        if request.body and b"content-length" not in fields:
            return
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        self._known[head] = (len(request.body), msgspec.structs.replace(request, body=b""))
