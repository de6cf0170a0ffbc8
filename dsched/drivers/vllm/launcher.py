"""vLLM servers as child processes, for development on one machine.

In: a model folder and a port. Out: a running `vllm serve` with dsched's scheduler, whose whole
process tree ends with `stop`, and, because the kernel is asked for it, when dsched dies in any way.

The engine's Python is another one than dsched's where vLLM lives in an environment of its own; see
`find_vllm_python`. For a deployment that matters, start vLLM yourself and give dsched its URL.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from dsched.config import agent_environment, inherited_environment
from dsched.errors import ConfigError, DriverError
from dsched.ids import EngineId

SCHEDULER: Final = "dsched.drivers.vllm.DschedScheduler"
ASYNC_SCHEDULER: Final = "dsched.drivers.vllm.DschedAsyncScheduler"
VLLM_ENVIRONMENT: Final = ".venv-vllm"
"""Folder of the environment that the Makefile gives to vLLM's CPU build."""
STOP_GRACE_S: Final = 10.0
"""For a server to end by itself after SIGTERM; then its process group gets SIGKILL."""
LOG_TAIL_BYTES: Final = 2_000
"""Of an engine's log that an error message quotes."""
ENGINE_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_VARIABLES: Final = {
    # More threads than one fight over a small machine: 16 instead of 160 steps a second (measured).
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

log = structlog.get_logger("dsched.drivers.vllm")


class LocalEngine:
    """One `vllm serve` that was started here. Belongs to the event loop that started it."""

    def __init__(
        self, *, engine_id: EngineId, port: int, process: asyncio.subprocess.Process, log_path: Path
    ) -> None:
        self.engine_id = engine_id
        self.port = port
        self.log_path = log_path
        self._process = process
        self._is_stopping = False
        self._watcher: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the API server, which leads the process group."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def watch(self, on_death: Callable[["LocalEngine", int], None]) -> None:
        """Call `on_death(engine, exit_status)` when the server ends without `stop`."""

        async def wait() -> None:
            status = await self._process.wait()
            if not self._is_stopping:
                self._signal(signal.SIGKILL)
                log.error(
                    "engine.died", engine_id=self.engine_id, status=status, log=self.log_tail()
                )
                on_death(self, status)

        self._watcher = asyncio.get_running_loop().create_task(wait())

    def log_tail(self) -> str:
        """Return the end of what the engine wrote."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError as error:
            return f"({error})"

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the server and every process it started. Idempotent."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        # Also after a clean end: a core that hangs does not notice that its server has gone.
        self._signal(signal.SIGKILL)
        await self._process.wait()
        if self._watcher is not None:
            self._watcher.cancel()

    def kill(self) -> None:
        """SIGKILL the whole process group, now."""
        self._is_stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # The group has the server's pid as its id and outlives it as long as one member does.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def launch_vllm_engine(
    model_path: Path | str,
    *,
    engine_id: EngineId,
    port: int = 0,
    agent_endpoint: str | None,
    state_dir: Path,
    served_model_name: str,
    extra_args: Sequence[str] = (),
    python: Path | str | None = None,
    device: str = "cpu",
    step_budget_ms: float | None = None,
) -> LocalEngine:
    """Start `vllm serve` on 127.0.0.1 and return while it loads; a driver sees when it is up.

    `port` 0 chooses a free one. `extra_args` come last and so win over what dsched passes. With
    `agent_endpoint` `None` the server runs vLLM's own scheduler and reports nothing. On `cpu` the
    engine gets one thread and one GiB of KV cache, unless the environment says otherwise. With
    `step_budget_ms` dsched cuts the engine's prompt chunks to that time.

    Raises:
        ConfigError: no Python with vLLM, or no such model folder.
        DriverError: the process cannot be started.
    """
    interpreter = find_vllm_python(python)
    if not (Path(model_path) / "config.json").is_file():
        raise ConfigError(f"model folder {str(model_path)!r} has no config.json")
    port = port or free_port()
    log_path = state_dir / "engines" / f"{engine_id}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(str(interpreter), "-m", "dsched.drivers.vllm.serve_child", str(os.getpid())),
        *("serve", str(model_path)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", served_model_name),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        *(scheduler_args(device) if agent_endpoint is not None else ()),
        *extra_args,
    ]
    variables = dict(engine_environment(agent_endpoint, engine_id=engine_id, device=device))
    if step_budget_ms is not None:
        variables["DSCHED_STEP_BUDGET_MS"] = str(step_budget_ms)
    try:
        with log_path.open("wb") as log_file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=asyncio.subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
    except OSError as error:
        raise DriverError(
            f"engine {engine_id}: {interpreter} cannot be started: {error}"
        ) from error
    log.info("engine.started", engine_id=engine_id, pid=process.pid, port=port, log=str(log_path))
    return LocalEngine(engine_id=engine_id, port=port, process=process, log_path=log_path)


def scheduler_args(device: str) -> tuple[str, ...]:
    """Choose the scheduler class: vLLM forces asynchronous scheduling off on CPUs."""
    return ("--scheduler-cls", SCHEDULER if device == "cpu" else ASYNC_SCHEDULER)


def engine_environment(
    agent_endpoint: str | None, *, engine_id: EngineId, device: str
) -> Mapping[str, str]:
    """Return the environment of the engine: ours, with defaults that ours overrides."""
    inherited = inherited_environment()
    defaults = ENGINE_VARIABLES | (CPU_VARIABLES if device == "cpu" else {})
    agent = {}
    if agent_endpoint is not None:
        agent = agent_environment(endpoint=agent_endpoint, engine_id=engine_id)
    else:
        inherited.pop("DSCHED_ENDPOINT", None)
    return defaults | inherited | agent


def find_vllm_python(stated: Path | str | None = None) -> Path:
    """Return an interpreter that has vLLM: the stated one, our own, or the Makefile's.

    Raises:
        ConfigError: there is none; the message says what to do.
    """
    if stated is not None:
        path = Path(stated)
        if not path.is_file():
            raise ConfigError(f"engine Python {str(stated)!r} does not exist")
        return path
    own = Path(sys.executable)
    beside = Path(__file__).parents[3] / VLLM_ENVIRONMENT / "bin" / "python"
    for path in (own, beside):
        if path.is_file() and has_vllm(path):
            return path
    raise ConfigError(
        f"no vLLM in {own} and no {VLLM_ENVIRONMENT} beside the checkout; "
        f"run `make {VLLM_ENVIRONMENT}/.ready`, or name the engine's Python in `launch.python`"
    )


def has_vllm(python: Path) -> bool:
    """Whether an interpreter's environment holds vLLM; looks at files, imports nothing."""
    environment = python.parent.parent
    return any(environment.glob("lib/python3*/site-packages/vllm/__init__.py"))


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


async def make_tiny_model(folder: Path, *, python: Path | str | None = None) -> Path:
    """Make the tiny random model with the engine's Python, unless it is there; return `folder`.

    Raises:
        ConfigError: no Python with vLLM.
        DriverError: the model cannot be made.
    """
    process = await asyncio.create_subprocess_exec(
        *(str(find_vllm_python(python)), "-m", "dsched.drivers.vllm.tiny_model", str(folder)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=CPU_VARIABLES | inherited_environment(),
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        text = output[-LOG_TAIL_BYTES:].decode(errors="replace")
        raise DriverError(f"the tiny model cannot be made: {text}")
    return folder
