"""Keeps a process's entries in the registry alive, through outages of the registry.

A renewal is due at half of the time that is *left* of the lease, not at half of its length: after a
failed one, the next tries come closer together while there is time (10 s: at 5, 7.5, 8.75, 9.375),
so an outage shorter than the lease does not lose it. A lost lease is granted anew and everything is
put again, under the same keys. Many entries over a slow registry are written in several rounds with
a renewal in each. Nothing here ever ends the process or its streams.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from dsched.clock import Clock
from dsched.errors import RegistryError
from dsched.registry.base import LeaseLostError, Registry

log = structlog.get_logger(__name__)

NS_PER_S = 1_000_000_000
MIN_RETRY_NS = 200_000_000
"""Shortest time between two tries. Shorter: an unreachable registry is hammered."""


def next_renewal_ns(now_ns: int, *, expires_ns: int, min_retry_ns: int = MIN_RETRY_NS) -> int:
    """Return when to try next: at half of what is left of the lease, but not at once.

    >>> next_renewal_ns(0, expires_ns=10_000_000_000)
    5000000000
    """
    return now_ns + max((expires_ns - now_ns) // 2, min_retry_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationStatus:
    """How the registration is doing, for metrics and `/health`."""

    is_registered: bool
    """Every entry was written, under a lease that cannot be over; perhaps not yet its last value,
    as a load is always on its way."""
    failed_reason: str | None
    """Why the last try failed; `None` when it did not."""
    num_failures: int
    num_leases_lost: int
    renewed_ns: int | None
    """When the registry answered last."""


class Registration:
    """Entries under one lease. `set` from the loop's thread; `run` as a task."""

    def __init__(
        self,
        registry: Registry,
        *,
        clock: Clock,
        ttl_s: float,
        sleep: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._ttl_s = ttl_s
        self._news = asyncio.Event()
        self._is_complete = asyncio.Event()
        self._sleep = sleep or self._sleep_until_news
        self._wanted: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        self._unsure: set[str] = set()
        """Keys that were last written or deleted without an answer: it may be so or not."""
        self._lease_id: int | None = None
        self._expires_ns = 0
        self._renewed_ns: int | None = None
        self._failed_reason: str | None = None
        self._num_failures = 0
        self._num_leases_lost = 0

    def set(self, key: str, value: bytes) -> None:
        """Want `key` to have `value`; it is written soon, and again whenever it got lost."""
        if self._wanted.get(key) != value:
            self._wanted[key] = value
            self._news.set()

    def remove(self, key: str) -> None:
        """Want `key` no more."""
        if self._wanted.pop(key, None) is not None:
            self._news.set()

    def status(self) -> RegistrationStatus:
        """Return how it is doing."""
        is_leased = self._lease_id is not None and self._clock.now_ns() < self._expires_ns
        return RegistrationStatus(
            is_registered=is_leased and self._wanted.keys() <= self._written.keys(),
            failed_reason=self._failed_reason,
            num_failures=self._num_failures,
            num_leases_lost=self._num_leases_lost,
            renewed_ns=self._renewed_ns,
        )

    async def wait(self, timeout_s: float) -> bool:
        """Wait until everything was written for the first time; `False` if that took longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_complete.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Register and renew until cancelled; then leave, which deletes the entries."""
        try:
            while True:
                delay_ns = await self.step() - self._clock.now_ns()
                await self._sleep(max(delay_ns, 0) / NS_PER_S)
        finally:
            await self._leave()

    async def step(self) -> int:
        """Try once to bring the registry up to date; return when to try again."""
        self._news.clear()
        started_ns = self._clock.now_ns()
        try:
            await self._renew(started_ns)
            await self._write()
        except LeaseLostError:  # between the renewal and a put
            self._lose_lease()
            return started_ns + MIN_RETRY_NS
        except RegistryError as error:
            self._note_failure(error)
        else:
            if self._failed_reason is not None:
                log.info("registry.recovered")
            self._failed_reason = None
            if self._written != self._wanted or self._unsure:
                return self._clock.now_ns()
            self._is_complete.set()
        return next_renewal_ns(self._clock.now_ns(), expires_ns=self._expires_ns)

    async def _renew(self, started_ns: int) -> None:
        if self._lease_id is not None:
            try:
                await self._registry.renew_lease(self._lease_id)
            except LeaseLostError:
                self._lose_lease()
        if self._lease_id is None:
            self._written.clear()
            self._unsure.clear()
            self._lease_id = await self._registry.grant_lease(self._ttl_s)
        # From before the call: the registry cannot have started the lease's time earlier.
        self._expires_ns = started_ns + int(self._ttl_s * NS_PER_S)
        self._renewed_ns = started_ns

    async def _write(self) -> None:
        """Write what differs, until it is done or a renewal is due."""
        due_ns = next_renewal_ns(self._clock.now_ns(), expires_ns=self._expires_ns)
        for key in sorted((self._written.keys() | self._unsure) - self._wanted.keys()):
            self._unsure.add(key)
            await self._registry.delete(key)
            self._unsure.discard(key)
            self._written.pop(key, None)
        for key, value in sorted(self._wanted.items()):
            if self._written.get(key) != value or key in self._unsure:
                self._unsure.add(key)
                await self._registry.put(key, value, lease_id=self._lease_id)
                self._unsure.discard(key)
                self._written[key] = value
                if self._clock.now_ns() >= due_ns:
                    return

    def _lose_lease(self) -> None:
        log.warning("registry.lease_lost", lease_id=self._lease_id)
        self._num_leases_lost += 1
        self._lease_id = None

    def _note_failure(self, error: RegistryError) -> None:
        self._num_failures += 1
        if self._failed_reason is None:
            log.warning("registry.unreachable", reason=str(error))
        self._failed_reason = str(error)

    async def _leave(self) -> None:
        if self._lease_id is None:
            return
        try:
            await self._registry.revoke_lease(self._lease_id)
        except RegistryError as error:
            log.warning("registry.unreachable", reason=str(error))

    async def _sleep_until_news(self, delay_s: float) -> None:
        """Sleep, but not past a `set`; unless the registry is away, then news can wait."""
        if self._failed_reason is not None:
            await asyncio.sleep(delay_s)
            return
        try:
            async with asyncio.timeout(delay_s):
                await self._news.wait()
        except TimeoutError:
            return
