"""Something else where dsched should be: a socket that agents connect to and nobody serves well."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import zmq


@contextmanager
def hostile_dsched(endpoint: str, **options: int) -> Iterator["zmq.Socket[bytes]"]:
    """Bind the agents' endpoint; what is done with the socket is the test's. It ends at once, like
    a killed process."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.sndhwm = 10
        for name, value in options.items():
            setattr(router, name, value)
        router.bind(endpoint)
        yield router
    finally:
        context.destroy(linger=0)


async def receive(router: "zmq.Socket[bytes]", timeout_s: float = 10.0) -> list[bytes]:
    """Wait for one message."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(0.005)
