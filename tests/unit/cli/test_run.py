"""`dsched run` that is told to stop while it starts."""

import asyncio
from typing import cast

from dsched.cli.run import _start_unless
from dsched.cli.service import Service


class LateService:
    """Comes up although it is told to stop."""

    def __init__(self) -> None:
        self.is_starting = asyncio.Event()
        self.num_stops = 0

    async def start(self) -> None:
        self.is_starting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    async def stop(self) -> None:
        self.num_stops += 1


async def test_a_service_that_comes_up_while_it_is_told_to_stop_is_stopped() -> None:
    """Its engines and its journal would be left as they are."""
    service = LateService()
    stopping = asyncio.Event()
    running = asyncio.create_task(_start_unless(cast(Service, service), stopping))
    await service.is_starting.wait()

    stopping.set()

    assert await running is False
    assert service.num_stops == 1
