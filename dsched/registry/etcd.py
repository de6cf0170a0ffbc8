"""`EtcdRegistry`: the registry in an etcd cluster, for dsched processes on several hosts.

A key of ours is an etcd key under the URL's prefix, a revision is etcd's, a lease is etcd's. etcd
counts a lease in whole seconds, grants 2 at least, and deletes its keys up to half a second after
its end; a new leader starts all leases anew, so the dead stay for up to that much longer.

Losing one endpoint, or the leader, costs a call the attempts of `etcd_gateway`. A watch goes on at
another endpoint from the revision after the last one it yielded, so that nothing is missed or seen
twice. What is compacted away meanwhile, or an etcd that begins anew with smaller revisions, is a
`WatchLostError`.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from dsched.errors import RegistryError
from dsched.registry.base import (
    ChangeKind,
    LeaseLostError,
    Listing,
    RegistryChange,
    RegistryEntry,
    WatchLostError,
)
from dsched.registry.etcd_gateway import (
    FAILED_PRECONDITION,
    NOT_FOUND,
    EtcdError,
    EtcdGateway,
    to_base64,
)
from dsched.registry.sqlite_file import MAX_VALUE_BYTES

REOPEN_S = 0.1
"""Pause before a watch that broke is opened again, so that no loop spins."""


class _Header(msgspec.Struct):
    revision: int = 0


class _KeyValue(msgspec.Struct):
    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class _Answer(msgspec.Struct, kw_only=True):
    header: _Header


class _RangeAnswer(_Answer, kw_only=True):
    kvs: tuple[_KeyValue, ...] = ()


class _TxnAnswer(_Answer, kw_only=True):
    succeeded: bool = False


class _DeleteAnswer(_Answer, kw_only=True):
    deleted: int = 0


class _KeepAlive(msgspec.Struct, kw_only=True):
    TTL: int = 0


class _KeepAliveAnswer(msgspec.Struct, kw_only=True):
    result: _KeepAlive


class _Event(msgspec.Struct, kw_only=True):
    kv: _KeyValue
    type: str = "PUT"


class _Watched(msgspec.Struct, kw_only=True):
    header: _Header
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[_Event, ...] = ()


class _WatchAnswer(msgspec.Struct, kw_only=True):
    result: _Watched


class EtcdRegistry:
    """A `Registry` in etcd 3.4 or newer."""

    def __init__(self, gateway: EtcdGateway, *, prefix: str) -> None:
        self._gateway = gateway
        self._prefix = prefix.encode()

    async def grant_lease(self, ttl_s: float) -> int:
        """Begin a lease of `ttl_s` seconds, rounded up; return its id."""
        if not ttl_s > 0:
            raise ValueError(f"a lease of {ttl_s} s has no time")
        lease_id = secrets.randbits(62) + 1
        body = {"TTL": math.ceil(ttl_s), "ID": str(lease_id)}
        try:
            await self._gateway.call("/v3/lease/grant", body, _Answer)
        except EtcdError as error:
            # The try before this one was carried out, though its answer did not arrive.
            if error.code != FAILED_PRECONDITION:
                raise
        return lease_id

    async def renew_lease(self, lease_id: int) -> None:
        """Start the lease's time anew. Raises `LeaseLostError` if it is over."""
        body = {"ID": str(lease_id)}
        answer = await self._gateway.call("/v3/lease/keepalive", body, _KeepAliveAnswer)
        if answer.result.TTL <= 0:
            raise LeaseLostError(f"lease {lease_id} is over")

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys. An ended one is ignored."""
        try:
            await self._gateway.call("/v3/lease/revoke", {"ID": str(lease_id)}, _Answer)
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise

    async def put(self, key: str, value: bytes, *, lease_id: int | None = None) -> int:
        """Set a key; return the revision. Raises `LeaseLostError` for a lease that is over."""
        body = self._put_body(key, value, lease_id)
        try:
            answer = await self._gateway.call("/v3/kv/put", body, _Answer)
        except EtcdError as error:
            raise _lease_error(error, lease_id) from error
        return answer.header.revision

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease_id: int | None = None,
    ) -> int | None:
        """Set a key if it is still the expected one; `None` if somebody else was first.

        A `RegistryError` leaves open whether it was set: read the key.
        """
        put = self._put_body(key, value, lease_id)
        condition = {
            "key": put["key"],
            "target": "MOD",
            "result": "EQUAL",
            "mod_revision": str(expected_revision or 0),
        }
        body = {"compare": [condition], "success": [{"request_put": put}]}
        try:
            answer = await self._gateway.call("/v3/kv/txn", body, _TxnAnswer, is_repeatable=False)
        except EtcdError as error:
            raise _lease_error(error, lease_id) from error
        return answer.header.revision if answer.succeeded else None

    async def delete(self, key: str) -> bool:
        """Delete a key; `False` if there was none."""
        body = {"key": self._key(key)}
        answer = await self._gateway.call("/v3/kv/deleterange", body, _DeleteAnswer)
        return answer.deleted > 0

    async def get(self, key: str) -> RegistryEntry | None:
        """Return a key's entry, as the cluster's majority has it."""
        answer = await self._gateway.call("/v3/kv/range", {"key": self._key(key)}, _RangeAnswer)
        return self._to_entry(answer.kvs[0]) if answer.kvs else None

    async def list_entries(self, prefix: str) -> Listing:
        """Return all entries whose key starts with `prefix`, as the cluster's majority has them."""
        body = self._range(prefix) | {"sort_order": "ASCEND", "sort_target": "KEY"}
        answer = await self._gateway.call("/v3/kv/range", body, _RangeAnswer)
        return Listing(
            entries=tuple(self._to_entry(kv) for kv in answer.kvs),
            revision=answer.header.revision,
        )

    async def watch(
        self, prefix: str, *, from_revision: int
    ) -> AsyncGenerator[RegistryChange, None]:
        """Yield every change from `from_revision` on. Raises `WatchLostError`."""
        while True:
            body = {"create_request": self._range(prefix) | {"start_revision": str(from_revision)}}
            stream = self._gateway.stream("/v3/watch", body, _WatchAnswer)
            async with aclosing(stream) as answers:
                async for answer in answers:
                    watched = answer.result
                    _check_watched(watched, from_revision)
                    if watched.created and watched.header.revision < from_revision - 1:
                        await self._check_not_ahead(from_revision)
                    for event in watched.events:
                        if event.kv.mod_revision >= from_revision:
                            yield self._to_change(event)
                    if watched.events:
                        from_revision = watched.events[-1].kv.mod_revision + 1
            await asyncio.sleep(REOPEN_S)

    async def _check_not_ahead(self, from_revision: int) -> None:
        """A revision that the majority has not reached is one of an etcd that is no more."""
        body = {"key": to_base64(self._prefix)}
        revision = (await self._gateway.call("/v3/kv/range", body, _RangeAnswer)).header.revision
        if from_revision > revision + 1:
            raise WatchLostError(f"revision {from_revision} is after {revision}; list again")

    async def close(self) -> None:
        """Close every connection; leases run on until they are over."""
        await self._gateway.close()

    # ---- ours and etcd's

    def _key(self, key: str) -> str:
        return to_base64(self._prefix + key.encode())

    def _range(self, prefix: str) -> dict[str, object]:
        start = self._prefix + prefix.encode()
        return {"key": to_base64(start), "range_end": to_base64(end_of_prefix(start))}

    def _put_body(self, key: str, value: bytes, lease_id: int | None) -> dict[str, object]:
        if not key or len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"key {key!r} with {len(value)} bytes; 1..{MAX_VALUE_BYTES} allowed")
        body: dict[str, object] = {"key": self._key(key), "value": to_base64(value)}
        return body if lease_id is None else body | {"lease": str(lease_id)}

    def _to_entry(self, kv: _KeyValue) -> RegistryEntry:
        return RegistryEntry(
            key=self._to_key(kv),
            value=kv.value,
            create_revision=kv.create_revision,
            mod_revision=kv.mod_revision,
            lease_id=kv.lease or None,
        )

    def _to_change(self, event: _Event) -> RegistryChange:
        is_deleted = event.type == "DELETE"
        return RegistryChange(
            kind=ChangeKind.DELETED if is_deleted else ChangeKind.PUT,
            key=self._to_key(event.kv),
            value=None if is_deleted else event.kv.value,
            revision=event.kv.mod_revision,
        )

    def _to_key(self, kv: _KeyValue) -> str:
        return kv.key[len(self._prefix) :].decode(errors="replace")


def end_of_prefix(prefix: bytes) -> bytes:
    """Return the first key after all that start with `prefix`.

    >>> end_of_prefix(b"/dsched/"), end_of_prefix(bytes([97, 255]))
    (b'/dsched0', b'b')
    """
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def _check_watched(watched: _Watched, from_revision: int) -> None:
    if watched.compact_revision:
        oldest = watched.compact_revision
        raise WatchLostError(f"revision {from_revision} is before {oldest}; list again")
    if watched.canceled:
        raise RegistryError(f"etcd ended the watch: {watched.cancel_reason or 'no reason given'}")


def _lease_error(error: EtcdError, lease_id: int | None) -> RegistryError:
    if lease_id is not None and error.code == NOT_FOUND:
        return LeaseLostError(f"lease {lease_id} is over")
    return error
