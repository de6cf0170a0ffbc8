"""A task that ended by a fault of ours: it is said once, and its part can be stopped."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from dsched.cli.engines import Fleet
from dsched.cli.rank_watches import RankWatches
from dsched.cli.rebalancing import Rebalancing
from dsched.clock import SystemClock
from dsched.config import PlacementConfig
from dsched.drivers.rank_watch import GroupWatch
from dsched.frontdoor.live_sampler import LiveSampler


async def fail(*_: object) -> None:
    raise ZeroDivisionError("a fault")


async def fail_rebalancing() -> Callable[[], Any]:
    part = Rebalancing(
        PlacementConfig(interval_s=1.0), {}, leader_epoch=lambda: 1, is_due=lambda _: True
    )
    part._rebalance = fail  # type: ignore[method-assign]
    part.start()
    return part.stop


async def fail_rank_watches() -> Callable[[], Any]:
    fleet = Fleet(pools=(), drivers={}, models={}, urls={}, keepers=[])
    part = RankWatches(fleet, cast(Any, None), can_repair=lambda: False)
    part.groups = dict.fromkeys("ab", cast(GroupWatch, SimpleNamespace(run=fail)))
    part.start()
    return part.stop


async def fail_live_sampler() -> Callable[[], Any]:
    part = LiveSampler(clock=SystemClock(), environment=cast(Any, None))
    part.events.note_membership = lambda *_: None  # type: ignore[method-assign]
    part.sample = fail  # type: ignore[method-assign]
    part.start(cast(Any, SimpleNamespace(membership=None)))
    return part.close


@pytest.mark.parametrize(
    ("make", "events"),
    [
        (fail_rebalancing, ["placement.task_failed"]),
        (fail_rank_watches, 2 * ["ranks.watch_failed"]),
        (fail_live_sampler, ["live.task_failed"]),
    ],
)
async def test_a_fault_is_said_once_and_does_not_come_up_again_at_the_stop(
    make: Callable[[], Any], events: list[str]
) -> None:
    """There it would pass for a fault of the stop, and end the process with a traceback."""
    with capture_logs() as lines:
        stop = await make()
        for _ in range(3):
            await asyncio.sleep(0)
        await stop()

    assert [line["event"] for line in lines] == events
