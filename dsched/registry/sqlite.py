"""`SqliteRegistry`: the registry in a SQLite file, as the event loop may call it.

A thread of its own makes the calls, one after the other, so a file that another process holds never
stops the loop. Watches ask for news every `poll_interval_s`; SQLite has no way to tell.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from dsched.clock import Clock, boot_id
from dsched.registry.base import Listing, RegistryChange, RegistryEntry
from dsched.registry.sqlite_file import RegistryFile

P = ParamSpec("P")
Result = TypeVar("Result")

POLL_INTERVAL_S = 0.2
"""Time between looks at the file. Shorter: more idle work. Longer: changes are noticed later."""


class SqliteRegistry:
    """A `Registry` for the processes of one host; `:memory:` for one process alone."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock,
        poll_interval_s: float = POLL_INTERVAL_S,
        create: bool = True,
    ) -> None:
        self._file = RegistryFile(path, clock=clock, boot_id=boot_id(), create=create)
        self._poll_interval_s = poll_interval_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsched-registry")
        self._is_closed = False

    async def grant_lease(self, ttl_s: float) -> int:
        """Begin a lease of `ttl_s` seconds; return its id."""
        return await self._call(self._file.grant_lease, ttl_s)

    async def renew_lease(self, lease_id: int) -> None:
        """Start the lease's time anew. Raises `LeaseLostError` if it is over."""
        await self._call(self._file.renew_lease, lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys."""
        await self._call(self._file.revoke_lease, lease_id)

    async def put(self, key: str, value: bytes, *, lease_id: int | None = None) -> int:
        """Set a key; return the revision."""
        return await self._call(self._file.put, key, value, lease_id=lease_id)

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease_id: int | None = None,
    ) -> int | None:
        """Set a key if it is still the expected one; `None` if somebody else was first."""
        return await self._call(
            self._file.compare_and_set,
            key,
            value,
            expected_revision=expected_revision,
            lease_id=lease_id,
        )

    async def delete(self, key: str) -> bool:
        """Delete a key; `False` if there was none."""
        return await self._call(self._file.delete, key)

    async def get(self, key: str) -> RegistryEntry | None:
        """Return a key's entry."""
        return await self._call(self._file.get, key)

    async def list_entries(self, prefix: str) -> Listing:
        """Return all entries whose key starts with `prefix`."""
        return await self._call(self._file.list_entries, prefix)

    async def watch(
        self, prefix: str, *, from_revision: int
    ) -> AsyncGenerator[RegistryChange, None]:
        """Yield every change from `from_revision` on. Raises `WatchLostError`."""
        while True:
            changes, from_revision = await self._call(
                self._file.read_changes, prefix, from_revision=from_revision
            )
            for change in changes:
                yield change
            await asyncio.sleep(self._poll_interval_s)

    async def close(self) -> None:
        """Close the file and end the thread. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await self._call(self._file.close)
            self._thread.shutdown()

    async def _call(
        self, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
