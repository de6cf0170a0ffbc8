"""What all dsched processes have written, kept as it was last heard.

One listing, then a watch from there on. When the registry is away the view stays as it is and says
that it is old (`is_following`); when it is back, the watch goes on at its revision, so what changed
meanwhile is seen in order. Only where that history is gone is everything listed again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import structlog

from dsched.errors import RegistryError
from dsched.registry.base import (
    ChangeKind,
    Listing,
    Registry,
    RegistryChange,
    RegistryEntry,
    WatchLostError,
)
from dsched.registry.records import (
    INSTANCES,
    InstanceRow,
    UnreadableRow,
    WorkersView,
    engine_key,
    instance_key,
    read_row,
    read_workers,
)

log = structlog.get_logger(__name__)

RETRY_S = 0.5
"""Between two tries while the registry is away."""


class ClusterView:
    """Entries of the registry. `run` as a task; the rest is read from the loop's thread."""

    def __init__(
        self,
        registry: Registry,
        *,
        retry_s: float = RETRY_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.is_following = False
        """Changes arrive; `False` before the first listing and while the registry is away."""
        self._registry = registry
        self._retry_s = retry_s
        self._sleep = sleep
        self._entries: dict[str, RegistryEntry] = {}
        self._next_revision: int | None = None
        """Where the watch goes on; `None`: list first."""

    def workers(self) -> WorkersView:
        """Return what was heard last. O(entries)."""
        entries = tuple(entry for _, entry in sorted(self._entries.items()))
        return read_workers(Listing(entries=entries, revision=(self._next_revision or 1) - 1))

    def drivers_of(self, engine_id: str) -> tuple[str, ...]:
        """The dsched processes that have registered this engine, by instance id. O(entries)."""
        prefix = engine_key(engine_id, "")
        return tuple(
            sorted(key.removeprefix(prefix) for key in self._entries if key.startswith(prefix))
        )

    def peer_endpoints(self) -> dict[str, str]:
        """Where dsched processes tell what they have booked, by instance id. O(entries).

        Those that do not tell, or have written what cannot be read, are left out.
        """
        found = {}
        for key, entry in sorted(self._entries.items()):
            if not key.startswith(INSTANCES):
                continue
            row = read_row(entry.value, InstanceRow)
            if isinstance(row, UnreadableRow) or row.peer_endpoint is None:
                continue
            if instance_key(row.instance_id) == key:
                found[row.instance_id] = row.peer_endpoint
        return found

    async def run(self) -> None:
        """Follow until cancelled; nothing that the registry does ends it."""
        while True:
            try:
                await self._follow()
            except WatchLostError:
                self._next_revision = None
            except RegistryError as error:
                if self.is_following:
                    log.warning("registry.watch_broken", reason=str(error))
                self.is_following = False
            await self._sleep(self._retry_s)

    async def _follow(self) -> None:
        if self._next_revision is None:
            listing = await self._registry.list_entries("")
            self._entries = {entry.key: entry for entry in listing.entries}
            self._next_revision = listing.revision + 1
            self.is_following = True
        watch = self._registry.watch("", from_revision=self._next_revision)
        async with aclosing(watch) as changes:
            async for change in changes:
                self.is_following = True
                self._apply(change)
                self._next_revision = change.revision + 1

    def _apply(self, change: RegistryChange) -> None:
        known = self._entries.pop(change.key, None)
        if change.kind is ChangeKind.DELETED or change.value is None:
            return
        self._entries[change.key] = RegistryEntry(
            key=change.key,
            value=change.value,
            create_revision=known.create_revision if known is not None else change.revision,
            mod_revision=change.revision,
            lease_id=None,
        )
