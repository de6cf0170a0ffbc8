"""Real engines over the tiny model, for tests: started together, stopped together.

One engine needs half a minute to load and about 3 GB, so a test session shares them. They end with
the session, also when it fails or is interrupted: each runs in a process group of its own that the
launcher ends, and the kernel ends it if Python dies.

`vllm_engines` and `sglang_engines` say how their kind is started and asked.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from dsched.config import inherited_environment
from dsched.drivers.http import HttpPool
from dsched.drivers.http_driver import JSON_HEADERS
from dsched.drivers.local import LocalEngine, free_port, numba_variables
from dsched.errors import DriverError
from dsched.ids import EngineId

MODEL_NAME: Final = "tiny"
MAX_MODEL_LEN: Final = 1_024
MAX_RUNNING: Final = 64
READY_TIMEOUT_S: Final = 300.0
ASK_TIMEOUT_S: Final = 120.0

Ask = Callable[[HttpPool, Sequence[int], int], Awaitable[list[int]]]
"""(pool, prompt, number of tokens) to the greedy answer of a server, without dsched."""
Launch = Callable[[EngineId, str, Path], Awaitable[LocalEngine]]
"""(engine id, agent endpoint, model folder) to a server that loads."""


def run_engine_python(
    python: Path,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> str:
    """Run an engine's Python to its end; return what it printed. Fails with the end of its errors.

    `variables` are put on top of ours.
    """
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | numba_variables(python)
    done = subprocess.run(
        [str(python), *arguments],
        env=inherited_environment() | defaults | dict(variables or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        raise AssertionError(f"{arguments} ended with {done.returncode}: {done.stderr[-3_000:]}")
    return done.stdout


class TinyEngines:
    """Running servers, and what is needed to talk to them."""

    def __init__(
        self,
        *,
        kind: str,
        engines: Sequence[LocalEngine],
        agent_endpoint: str,
        model_path: Path,
        ask: Ask,
    ) -> None:
        self.kind = kind
        """`vllm` or `sglang`."""
        self.engines = tuple(engines)
        self.agent_endpoint = agent_endpoint
        """Bind a `ReportReader` here; the agents reconnect within two seconds."""
        self.model_path = model_path
        self.ask = ask


class SharedEngines:
    """Engines that many tests use and some kill: started at the first use, and again after a death.

    `close` ends them; call it once nobody needs them.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[TinyEngines]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self._engines: TinyEngines | None = None

    def get(self) -> TinyEngines:
        """Return the engines, all alive."""
        if self._engines is None or not all(is_running(each.pid) for each in self._engines.engines):
            self.close()
            self._engines = self._stack.enter_context(self._start())
        return self._engines

    def close(self) -> None:
        """End them. Idempotent."""
        self._engines = None
        self._stack.close()


@contextmanager
def running_together(
    *,
    kind: str,
    engine_ids: Sequence[EngineId],
    make_model: Callable[[], Awaitable[Path]],
    launch: Launch,
    ask: Ask,
) -> Iterator[TinyEngines]:
    """Start servers, wait until each has answered a request, and stop them at the end.

    If one does not come up, all are started once more.
    """
    engines: list[LocalEngine] = []
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def start() -> Path:
        model_path = await make_model()
        try:
            await launch_all(model_path)
        except DriverError as error:
            # Servers look for further free ports near their own, and others may take them first.
            sys.stderr.write(f"{error}\nThe servers are started once more.\n")
            await stop()
            engines.clear()
            await launch_all(model_path)
        return model_path

    async def launch_all(model_path: Path) -> None:
        for engine_id in engine_ids:
            engines.append(await launch(engine_id, endpoint, model_path))  # noqa: PERF401
        await asyncio.gather(*(wait_until_ready(engine, ask) for engine in engines))

    async def stop() -> None:
        await asyncio.gather(*(engine.stop() for engine in engines))

    with asyncio.Runner() as runner:
        try:
            model_path = runner.run(start())
            yield TinyEngines(
                kind=kind,
                engines=engines,
                agent_endpoint=endpoint,
                model_path=model_path,
                ask=ask,
            )
        finally:
            runner.run(stop())


async def wait_until_ready(
    engine: LocalEngine, ask: Ask, timeout_s: float = READY_TIMEOUT_S
) -> None:
    """Wait until the server has computed something: its first step may compile for long.

    Raises:
        DriverError: it died, or is not ready in time; the message has the end of its log.
    """
    pool = HttpPool(engine.url)
    try:
        async with asyncio.timeout(timeout_s):
            while engine.is_alive:
                try:
                    await ask(pool, [5, 6, 7], 2)
                except DriverError:
                    await asyncio.sleep(0.5)
                else:
                    return
    except TimeoutError:
        pass
    finally:
        pool.close()
    raise DriverError(f"engine {engine.engine_id} is not ready: {engine.log_tail()}")


async def post_json(pool: HttpPool, path: str, body: object) -> Any:  # noqa: ANN401
    """Ask a server; return what its answer says.

    Raises:
        DriverError: no answer, or one that is not 200.
    """
    status, _, answer = await pool.fetch(
        "POST",
        path,
        headers=JSON_HEADERS,
        body=msgspec.json.encode(body),
        timeout_s=ASK_TIMEOUT_S,
    )
    if status != 200:
        raise DriverError(f"status {status}: {answer[:500]!r}")
    return msgspec.json.decode(answer)


def is_running(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
