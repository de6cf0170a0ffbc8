"""A process that does nothing but stay registered: `python -m dsched.testing.registry_worker`.

Arguments: URL, key, lease in seconds. Prints `registered` once it is; to be killed by a test.
"""

import asyncio
import sys

from dsched.clock import SystemClock
from dsched.config import LoggingConfig, RegistryConfig
from dsched.logs import configure_logging
from dsched.registry import Registration, open_registry


async def stay(url: str, key: str, lease_s: float) -> None:
    """Register under `key`, say so, and renew until killed."""
    clock = SystemClock()
    registry = open_registry(url, clock=clock, config=RegistryConfig(lease_s=lease_s))
    registration = Registration(registry, clock=clock, ttl_s=lease_s)
    registration.set(key, b"alive")
    await registration.step()
    if registration.status().is_registered:
        sys.stdout.write("registered\n")
        sys.stdout.flush()
    await registration.run()


if __name__ == "__main__":
    configure_logging(LoggingConfig())
    asyncio.run(stay(sys.argv[1], sys.argv[2], float(sys.argv[3])))
