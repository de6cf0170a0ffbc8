"""Watches over the EP groups of the vLLM engines of a running dsched; see `drivers.rank_watch`."""

import asyncio
from collections.abc import Callable

import structlog

from dsched.cli.engines import Fleet
from dsched.drivers.rank_watch import POLL_INTERVAL_S, GroupWatch, RankListener
from dsched.drivers.recovery import VllmRecovery
from dsched.drivers.vllm.driver import VllmDriver
from dsched.errors import task_fault
from dsched.ids import EngineId

log = structlog.get_logger(__name__)


class RankWatches:
    """One `GroupWatch` for each EP group with vLLM engines."""

    def __init__(
        self,
        fleet: Fleet,
        listener: RankListener,
        *,
        can_repair: Callable[[], bool],
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self.groups: dict[str, GroupWatch] = {
            group: GroupWatch(
                group,
                {engine_id: VllmRecovery(fleet.urls[engine_id]) for engine_id in engine_ids},
                listener,
                can_repair=can_repair,
                poll_interval_s=poll_interval_s,
            )
            for group, engine_ids in vllm_groups(fleet).items()
        }
        self._tasks: list[asyncio.Task[None]] = []
        fleet.on_moved.append(self._move)

    def _move(self, engine_id: EngineId, url: str) -> None:
        for _, watch in sorted(self.groups.items()):
            watch.move(engine_id, VllmRecovery(url))

    def start(self) -> None:
        """Watch on the running event loop until `stop`."""
        for _, watch in sorted(self.groups.items()):
            task = asyncio.get_running_loop().create_task(watch.run())
            task.add_done_callback(_say_if_it_failed)
            self._tasks.append(task)

    async def stop(self) -> None:
        """Stop watching; a repair that runs is left to the engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(
            *self._tasks, return_exceptions=True
        )  # faults were said when they came


def vllm_groups(fleet: Fleet) -> dict[str, list[EngineId]]:
    """Return the vLLM engines of each EP group, by id."""
    groups: dict[str, list[EngineId]] = {}
    for pool in fleet.pools:
        for spec in pool.engines:
            if isinstance(fleet.drivers[spec.engine_id], VllmDriver):
                groups.setdefault(spec.group, []).append(spec.engine_id)
    return groups


def _say_if_it_failed(task: "asyncio.Task[None]") -> None:
    """A fault of ours ends the watch and nothing else; it must not do so unheard."""
    if (error := task_fault(task)) is not None:
        log.error("ranks.watch_failed", reason=repr(error))
