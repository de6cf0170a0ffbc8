"""What a registry is: keys with values, leases, revisions and watches.

The contract is etcd's, cut to what dsched needs, so that a SQLite file and an etcd cluster can
both keep it. A **revision** rises by each change of the whole registry and never goes back; the
revision at which a key was created fences (a leader's epoch is the creation of its election key;
`dsched.registry.election` is made of compare-and-set and a lease, so every registry has elections).
A **lease** is renewed or runs out; the keys put under it go with it.

Every method may raise `RegistryError`; the caller goes on with what it knew and tries again.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dsched.errors import RegistryError


class LeaseLostError(RegistryError):
    """The lease ran out or is unknown. Grant a new one and put the keys again."""


class WatchLostError(RegistryError):
    """The history from that revision on is gone. List again and watch from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryEntry:
    """One key as it is now."""

    key: str
    value: bytes
    create_revision: int
    """Revision that created the key; rises each time it is created anew."""
    mod_revision: int
    """Revision of its last change."""
    lease_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Entries of one moment, sorted by key."""

    entries: tuple[RegistryEntry, ...]
    revision: int
    """Watch from `revision + 1` to miss nothing."""


class ChangeKind(StrEnum):
    """What happened to a key."""

    PUT = "put"
    DELETED = "deleted"
    """By a delete, or with its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryChange:
    """One change of one key."""

    kind: ChangeKind
    key: str
    value: bytes | None
    """`None` when deleted."""
    revision: int


class Registry(Protocol):
    """A shared, small, consistent store. Values are a few kilobytes at most."""

    async def grant_lease(self, ttl_s: float) -> int:
        """Begin a lease of `ttl_s` seconds; return its id."""
        ...

    async def renew_lease(self, lease_id: int) -> None:
        """Start the lease's time anew. Raises `LeaseLostError` if it is over."""
        ...

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys. An ended one is ignored."""
        ...

    async def put(self, key: str, value: bytes, *, lease_id: int | None = None) -> int:
        """Set a key; return the revision. Raises `LeaseLostError` for a lease that is over."""
        ...

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease_id: int | None = None,
    ) -> int | None:
        """Set a key if its `mod_revision` is the expected one, or if it is missing for `None`.

        Returns the new revision, or `None` if somebody else was first.
        """
        ...

    async def delete(self, key: str) -> bool:
        """Delete a key; `False` if there was none."""
        ...

    async def get(self, key: str) -> RegistryEntry | None:
        """Return a key's entry."""
        ...

    async def list_entries(self, prefix: str) -> Listing:
        """Return all entries whose key starts with `prefix`."""
        ...

    def watch(self, prefix: str, *, from_revision: int) -> AsyncGenerator[RegistryChange, None]:
        """Yield every change from `from_revision` on, in order, each once, without end.

        Keys that went with one lease may have gone in one revision; go on after the last of them.
        Raises `WatchLostError` if that far back is no longer known.
        """
        ...

    async def close(self) -> None:
        """Release everything; leases run on until they are over."""
        ...
