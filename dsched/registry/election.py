"""Elects one dsched process of a cluster: the one that may rebalance experts and place engines.

Requests are routed by every process for itself; nobody waits for a leader, and a change of leader
touches no stream. What only one may do at a time carries the **leader epoch**: the revision that
created the election's key. Every later leader has a higher one, and an agent refuses a command with
a lower one than it has seen, so a leader that was frozen and wakes up changes nothing.

A process leads from the moment its compare-and-set created the key until its lease *may* be over,
counted from before the last renewal was sent. It stops by its own clock, without hearing from the
registry; the others see the key go at that moment or later. A lease that an outage did not end
goes on under the same epoch, because nobody can have created the key in between.
"""

import asyncio
from dataclasses import dataclass

import msgspec
import structlog

from dsched.clock import Clock
from dsched.errors import RegistryError
from dsched.registry.base import LeaseLostError, Registry, RegistryEntry
from dsched.registry.records import ELECTION_KEY, LeaderRow, UnreadableRow, read_row
from dsched.registry.registration import MIN_RETRY_NS, NS_PER_S, next_renewal_ns

log = structlog.get_logger(__name__)

LOOKS_PER_LEASE = 4
"""How often one who does not lead looks in the time of a lease. Fewer: the cluster is longer
without a leader. More: idle work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Who leads, as it was last heard."""

    instance_id: str
    epoch: int
    """Rises with every new leader."""


class Election:
    """One candidate. `step` or `run` from one task; the rest is read from its thread."""

    def __init__(
        self,
        registry: Registry,
        *,
        clock: Clock,
        candidate_id: str,
        ttl_s: float,
        key: str = ELECTION_KEY,
    ) -> None:
        self.leader: Leader | None = None
        """`None` while nobody is known to lead."""
        self._registry = registry
        self._clock = clock
        self._candidate_id = candidate_id
        self._ttl_s = ttl_s
        self._ttl_ns = int(ttl_s * NS_PER_S)
        self._key = key
        self._lease_id: int | None = None
        self._expires_ns = 0
        self._epoch: int | None = None
        self._is_said = False

    def epoch_now(self) -> int | None:
        """Return the epoch to put into commands; `None` while this process does not lead."""
        return self._epoch if self._clock.now_ns() < self._expires_ns else None

    async def run(self) -> None:
        """Take part until cancelled; then step down, so that others need not wait."""
        try:
            while True:
                delay_ns = await self.step() - self._clock.now_ns()
                await asyncio.sleep(max(delay_ns, 0) / NS_PER_S)
        finally:
            await self._step_down()

    async def step(self) -> int:
        """Renew, or try to become leader; return when to do it again."""
        started_ns = self._clock.now_ns()
        try:
            if self._lease_id is not None:
                await self._registry.renew_lease(self._lease_id)
                self._expires_ns = started_ns + self._ttl_ns
            await self._look(started_ns)
        except LeaseLostError:
            self._forget_lease()
            self.leader = None
            return started_ns + MIN_RETRY_NS
        except RegistryError as error:
            log.debug("leader.unknown", reason=str(error))
        self._say()
        now_ns = self._clock.now_ns()
        if self._lease_id is not None:
            return next_renewal_ns(now_ns, expires_ns=self._expires_ns)
        return now_ns + max(self._ttl_ns // LOOKS_PER_LEASE, MIN_RETRY_NS)

    async def _look(self, started_ns: int) -> None:
        entry = await self._registry.get(self._key)
        if entry is None:
            await self._stand(started_ns)
        elif entry.lease_id is not None and entry.lease_id == self._lease_id:
            self._lead(entry.create_revision)
        else:
            self.leader = _read_leader(entry)
            await self._give_up_lease()

    async def _stand(self, started_ns: int) -> None:
        if self._lease_id is None:
            self._lease_id = await self._registry.grant_lease(self._ttl_s)
            self._expires_ns = started_ns + self._ttl_ns
        # Should the answer get lost, the next look finds our lease at the key.
        epoch = await self._registry.compare_and_set(
            self._key,
            msgspec.json.encode(LeaderRow(instance_id=self._candidate_id)),
            expected_revision=None,
            lease_id=self._lease_id,
        )
        if epoch is not None:
            self._lead(epoch)

    def _lead(self, epoch: int) -> None:
        self._epoch = epoch
        self.leader = Leader(instance_id=self._candidate_id, epoch=epoch)

    def _say(self) -> None:
        is_leading = self.epoch_now() is not None
        if is_leading and not self._is_said:
            log.info("leader.elected", epoch=self._epoch)
        elif self._is_said and not is_leading:
            log.warning("leader.lost", epoch=self._epoch)
        self._is_said = is_leading

    def _forget_lease(self) -> None:
        self._lease_id, self._expires_ns = None, 0
        self._say()
        self._epoch = None

    async def _give_up_lease(self) -> None:
        lease_id = self._lease_id
        if lease_id is not None:
            self._forget_lease()
            await self._registry.revoke_lease(lease_id)

    async def _step_down(self) -> None:
        try:
            await self._give_up_lease()
        except RegistryError as error:
            log.debug("leader.unknown", reason=str(error))


def _read_leader(entry: RegistryEntry) -> Leader:
    row = read_row(entry.value, LeaderRow)
    # Whatever it says, its key is held, and the epoch counts.
    name = "?" if isinstance(row, UnreadableRow) else row.instance_id
    return Leader(instance_id=name, epoch=entry.create_revision)
