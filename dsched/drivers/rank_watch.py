"""Watches the DP ranks of one EP group through the engines' own fault API, and may repair them.

vLLM with fault tolerance does not die with one of its ranks: the core whose group broke says
`unhealthy`, aborts its requests and waits to be told, while `/health` goes on answering 200. So
nothing but `/fault_tolerance/status` tells, and this asks it: once a second for a server that has
it, once a minute for one that has not. A server that does not answer is the engine watch's
business.

A rank that is not healthy is told to the listener at every look, because what it knows ends with
each restart of an engine; a rank that is healthy again is told once.

While `can_repair()` (the operator allows it, and this dsched leads), `retry` goes to every server
of the group at once (the repair is collective) as soon as all their cores say `unhealthy`: vLLM
refuses it before, and cannot do it with a dead core. Each fault is repaired under one operation id;
one that could not be repaired is left to the operator until it changes.

Runs on one event loop. Time: a call a second and server.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from dsched.drivers.recovery import (
    EngineHealth,
    OperationOutcome,
    OperationResult,
    RankHealth,
    VllmRecovery,
)
from dsched.errors import DriverError, EngineRefusedError
from dsched.ids import DpRank, EngineId, RankId

POLL_INTERVAL_S: Final = 1.0
"""Below: calls for nothing. Above: requests go to a group that aborts them."""
ABSENT_INTERVAL_S: Final = 60.0
"""For a server that has no such endpoint: it may be started anew with one."""
ABSENT_STATUSES: Final = (403, 404, 405, 501)

log = structlog.get_logger(__name__)


class RankListener(Protocol):
    """Hears of ranks. Methods must not raise and must not block."""

    def on_rank_lost(self, rank_id: RankId, reason: str) -> None: ...

    def on_rank_back(self, rank_id: RankId) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Server:
    """One server of the group."""

    engine_id: EngineId
    client: VllmRecovery
    pause_s: float = 0.0
    """Until it is asked again."""
    ranks: dict[int, RankHealth] | None = None
    """By DP rank of the engine, as it said last; `None` while it says nothing."""


class GroupWatch:
    """Watches one EP group. `run` ends only by cancellation."""

    def __init__(
        self,
        group: str,
        clients: Mapping[EngineId, VllmRecovery],
        listener: RankListener,
        *,
        can_repair: Callable[[], bool],
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._group = group
        self._servers = [
            _Server(engine_id=engine_id, client=client)
            for engine_id, client in sorted(clients.items())
        ]
        self._listener = listener
        self._can_repair = can_repair
        self._poll_interval_s = poll_interval_s
        self._lost: dict[RankId, None] = {}
        self._num_faults = 0
        self._is_tried = False
        """The present fault was repaired, or could not be."""
        self.results: list[OperationResult] = []
        """Of the last repair, one a server."""

    def move(self, engine_id: EngineId, client: VllmRecovery) -> None:
        """Ask a server of the group at another URL from now on: over `client`."""
        for server in self._servers:
            if server.engine_id == engine_id:
                server.client.close()
                server.client, server.pause_s, server.ranks = client, 0.0, None

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(self._poll_interval_s)
        finally:
            for server in self._servers:
                server.client.close()

    async def look(self) -> None:
        """Ask every server once, tell the listener, and repair what can be."""
        await asyncio.gather(*(self._ask(server) for server in self._servers))
        for server in self._servers:
            self._tell(server)
        if not self._lost:
            self._is_tried = False
        elif not self._is_tried and self._can_repair() and self._is_whole_group_in_fault():
            self._is_tried = True
            await self._repair()

    async def _ask(self, server: _Server) -> None:
        server.pause_s -= self._poll_interval_s
        if server.pause_s > 0:
            return
        try:
            found = await server.client.status()
        except EngineRefusedError as error:
            server.ranks = None
            if error.status in ABSENT_STATUSES:
                server.pause_s = ABSENT_INTERVAL_S
        except DriverError as error:
            server.ranks = None
            log.debug("ranks.unknown", engine_id=server.engine_id, reason=str(error))
        else:
            # vLLM counts cores over the whole group; a server's first is its DP rank 0.
            server.ranks = dict(enumerate(found.values()))

    def _tell(self, server: _Server) -> None:
        for index, rank in (server.ranks or {}).items():
            rank_id = RankId(server.engine_id, DpRank(index))
            if rank.health is not EngineHealth.HEALTHY:
                self._lost[rank_id] = None
                reason = f"its engine core says {rank.health.value}"
                self._listener.on_rank_lost(
                    rank_id, f"{reason}: {rank.reason}" if rank.reason else reason
                )
            elif rank_id in self._lost:
                del self._lost[rank_id]
                self._listener.on_rank_back(rank_id)

    def _is_whole_group_in_fault(self) -> bool:
        return all(
            server.ranks is not None
            and all(rank.health is EngineHealth.UNHEALTHY for rank in server.ranks.values())
            for server in self._servers
        )

    async def _repair(self) -> None:
        self._num_faults += 1
        operation_id = f"{self._group}-repair-{self._num_faults}"
        log.warning("group.repairing", ep_group=self._group, operation_id=operation_id)
        self.results = list(
            await asyncio.gather(
                *(each.client.retry(operation_id=operation_id) for each in self._servers)
            )
        )
        failed = [each.reason for each in self.results if each.outcome is not OperationOutcome.DONE]
        if failed:
            log.error(
                "group.not_repaired",
                ep_group=self._group,
                operation_id=operation_id,
                reason="; ".join(failed),
            )
        else:
            log.warning("group.repaired", ep_group=self._group, operation_id=operation_id)
