"""A whole dsched over engines that run already, in the test's own process."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from dsched.cli.service import Service
from dsched.config import Config
from dsched.config_load import LoadedConfig


@asynccontextmanager
async def serving(document: Mapping[str, Any]) -> AsyncIterator[Service]:
    """Serve with this configuration from when all its engines are up until the end of the block."""
    service = Service(LoadedConfig(config=msgspec.convert(document, Config), origins={}))
    await service.start()
    try:
        async with asyncio.timeout(30):
            while any(each.state.name != "UP" for each in service.controller.engine_statuses()):
                await asyncio.sleep(0.05)
        yield service
    finally:
        await service.stop()
