"""`dsched run` over simulated engines as a process of its own, and clients that keep it busy."""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np

from dsched.rng import stream

MODEL: Final = "dsched-sim"
LONGEST: Final = 8
"""Prompts and answers are at most so many times the mean, so that they fit small engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRun:
    """A running `dsched run`."""

    url: str
    admin_url: str
    pid: int


@contextlib.contextmanager
def run_simulated(folder: Path, *args: str) -> Iterator[SimRun]:
    """Start on free ports, with `args` added; it is told to stop at the end, and must."""
    command = [
        *(sys.executable, "-m", "dsched.cli.main", "run"),
        *("--front-door-port", "0", "--admin-port", "0", "--state-dir", str(folder)),
        *("--front-door-stop-grace-s", "0", "--logging-level", "warning", *args),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stderr.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield _read_addresses(process, folder)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _read_addresses(process: "subprocess.Popen[str]", folder: Path) -> SimRun:
    assert process.stdout is not None
    text = ""
    while "curl" not in text:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"dsched run ended early: {(folder / 'stderr.log').read_text()}")
        text += line
    url, admin_url = re.findall(r"http://127\.0\.0\.1:\d+", text)[:2]
    return SimRun(url=url, admin_url=admin_url, pid=process.pid)


@contextlib.asynccontextmanager
async def keep_busy(
    run: SimRun, *, num_clients: int, mean_tokens: int = 300, pause_s: float = 0.5, seed: int = 0
) -> AsyncIterator[None]:
    """Let so many clients ask one question after the other, of lengths like a chat's."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = [
            asyncio.create_task(
                _ask_for_ever(
                    session,
                    run.url,
                    rng=stream(seed, f"client-{index}"),
                    mean_tokens=mean_tokens,
                    pause_s=pause_s,
                )
            )
            for index in range(num_clients)
        ]
        try:
            yield
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def _ask_for_ever(
    session: aiohttp.ClientSession,
    url: str,
    *,
    rng: np.random.Generator,
    mean_tokens: int,
    pause_s: float,
) -> None:
    longest = LONGEST * mean_tokens
    while True:
        await asyncio.sleep(float(rng.exponential(pause_s)))
        body = {
            "model": MODEL,
            "prompt": "word " * min(int(1 + rng.lognormal(np.log(mean_tokens), 1.0)), longest),
            "max_tokens": min(int(1 + rng.exponential(mean_tokens)), longest),
            "stream": True,
            "ignore_eos": True,
        }
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                async for _ in response.content.iter_any():
                    pass
