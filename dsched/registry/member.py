"""One dsched process as a member of the cluster: registered, following the others, electing.

Everything that the registry is used for in `dsched run`, in one place; nothing here ever ends the
process. Only at the start an etcd that does not answer does, if `registry.required`: a wrong
address should be seen by the person who wrote it, and not weeks later.

An engine's row is written when its state changes, and otherwise now and then for its load: a row a
second while there are few, later at `MAX_ROWS_PER_S` together, so that a thousand engines do not
write a thousand times a second what hardly anybody reads (`dsched workers` asks a living dsched).
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable

import msgspec
import structlog

from dsched.clock import Clock
from dsched.config import Config
from dsched.config_checks import ETCD_SCHEME
from dsched.errors import ConfigError, RegistryError, task_fault
from dsched.registry.base import Registry
from dsched.registry.cluster import ClusterView
from dsched.registry.election import Election
from dsched.registry.etcd_gateway import EtcdError
from dsched.registry.open import open_registry
from dsched.registry.records import (
    EngineRow,
    InstanceRow,
    WorkersView,
    engine_key,
    instance_key,
    merge_workers,
)
from dsched.registry.registration import NS_PER_S, Registration

log = structlog.get_logger(__name__)

REFRESH_S = 1.0
"""Between two looks at the engines; a change of state is registered after that time at most."""
MAX_ROWS_PER_S = 20
"""Rows of load that one process writes in a second. More: etcd and every dsched's event loop (some
0.2 ms a row) are busy with it. Fewer: loads of a large cluster are older when no dsched answers."""
START_WAIT_S = 5.0
"""Time for a required etcd to answer at the start: they may have been started together."""
START_RETRY_S = 0.25


class RegistryMember:
    """This process in the registry. Made before the engines, started after the front door."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock,
        instance_id: str,
        start_wait_s: float = START_WAIT_S,
    ) -> None:
        """Raises `ConfigError` for a URL or credentials that cannot be used."""
        url, lease_s = config.registry_url(), config.registry.lease_s
        self.registry: Registry = open_registry(url, clock=clock, config=config.registry)
        self.registration = Registration(self.registry, clock=clock, ttl_s=lease_s)
        self.cluster = ClusterView(self.registry)
        self.election = Election(
            self.registry, clock=clock, candidate_id=instance_id, ttl_s=lease_s
        )
        self._clock = clock
        self._instance_id = instance_id
        self._is_remote = url.startswith(ETCD_SCHEME)
        self._is_required = config.registry.required
        self._start_wait_s = start_wait_s
        self._rows: dict[str, tuple[EngineRow, int]] = {}
        self._faulty = WorkersView()
        """The cluster as its faults were told last."""
        self._tasks: list[asyncio.Task[None]] = []

    async def check(self) -> None:
        """See that an etcd answers. Raises `ConfigError` that names every endpoint and its fault.

        A SQLite file needs none of this: a damaged one is mended, a locked one comes free.
        """
        if not self._is_remote:
            return
        deadline_ns = self._clock.now_ns() + int(self._start_wait_s * NS_PER_S)
        while True:
            try:
                await self.registry.get(instance_key(self._instance_id))
            except RegistryError as error:
                if not self._is_required:
                    log.warning("registry.unreachable", reason=str(error))
                    return
                # What etcd itself refuses, it will refuse again.
                if isinstance(error, EtcdError) or self._clock.now_ns() >= deadline_ns:
                    raise ConfigError(f"$.registry.url: {error}") from error
                await asyncio.sleep(START_RETRY_S)
            else:
                return

    def start(self, *, instance: InstanceRow, engines: Callable[[], Iterable[EngineRow]]) -> None:
        """Register, follow and take part in elections until `stop`."""
        self.registration.set(instance_key(self._instance_id), msgspec.json.encode(instance))
        self.refresh(engines())
        coroutines: tuple[Coroutine[None, None, None], ...] = (
            self.registration.run(),
            self.cluster.run(),
            self.election.run(),
            self._keep_fresh(engines),
        )
        self._tasks = [asyncio.create_task(each) for each in coroutines]
        for task in self._tasks:
            task.add_done_callback(_say_if_it_failed)

    async def stop(self) -> None:
        """Leave: the entries are deleted at once, if the registry can be reached."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the registry, after `stop`."""
        with contextlib.suppress(RegistryError):
            await self.registry.close()

    def workers(self, own: WorkersView) -> WorkersView:
        """Return the whole cluster as far as it is known: this process as it is now, others as they
        wrote last."""
        return merge_workers(self.cluster.workers(), own)

    def refresh(self, rows: Iterable[EngineRow]) -> None:
        """Register engines whose state changed, and those whose load was not written for long."""
        rows = tuple(rows)
        now_ns = self._clock.now_ns()
        for row in rows:
            if self._is_due(row, now_ns, load_interval_s=load_interval_s(len(rows))):
                self._rows[row.engine_id] = (row, now_ns)
                key = engine_key(row.engine_id, self._instance_id)
                self.registration.set(key, msgspec.json.encode(row))

    def _is_due(self, row: EngineRow, now_ns: int, *, load_interval_s: float) -> bool:
        written, written_ns = self._rows.get(row.engine_id, (None, 0))
        if written is None or _without_load(row) != _without_load(written):
            return True
        return now_ns - written_ns >= load_interval_s * NS_PER_S

    async def _keep_fresh(self, engines: Callable[[], Iterable[EngineRow]]) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self.refresh(engines())
            self.tell_faults(self.cluster.workers())

    def tell_faults(self, view: WorkersView) -> None:
        """Log what is wrong with the rows of the cluster and was not so when it was asked last."""
        for text in view.conflicts:
            if text not in self._faulty.conflicts:
                log.warning("registry.conflict_found", conflict=text)
        for key, reason in view.why_unreadable.items():
            if self._faulty.why_unreadable.get(key) != reason:
                log.warning("registry.row_unreadable", key=key, reason=reason)
        self._faulty = view


def _say_if_it_failed(task: "asyncio.Task[None]") -> None:
    """A fault of ours ends one of the tasks and nothing else; it must not do so unheard."""
    if (error := task_fault(task)) is not None:
        log.error("registry.task_failed", reason=repr(error))


def load_interval_s(num_engines: int) -> float:
    """Return how often an engine's load is written.

    >>> load_interval_s(4), load_interval_s(1_000)
    (0.0, 50.0)
    """
    return num_engines / MAX_ROWS_PER_S if num_engines > MAX_ROWS_PER_S * REFRESH_S else 0.0


def _without_load(row: EngineRow) -> tuple[object, ...]:
    states = tuple((rank.dp_rank, rank.state) for rank in row.ranks)
    return row.engine_id, row.pool, row.kind, row.model, row.state, row.url, row.reason, states
