"""Engines as child processes, for development on one machine: what is the same for every engine.

In: a command of the engine's own Python. Out: a running server on 127.0.0.1 whose whole process
tree ends with `stop`, and, because the kernel is asked for it, when dsched dies in any way. One
that ends by itself is started again by its `dsched.drivers.keeper`.

The engine's Python is another one than dsched's where the engine lives in an environment of its
own; see `find_engine_python`. For a deployment that matters, start the engine yourself and give
dsched its URL.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from dsched.config import agent_environment, inherited_environment
from dsched.errors import ConfigError, DriverError
from dsched.ids import EngineId

STOP_GRACE_S: Final = 10.0
"""For a server to end by itself after SIGTERM; then its process group gets SIGKILL."""
KILL_GRACE_S: Final = 5.0
"""For the kernel to end a server after SIGKILL; one that waits for a device may take for ever."""
KILL_POLL_S: Final = 0.02
"""Between two looks at what is left of a server's process group; nothing tells of its end."""
LOG_TAIL_BYTES: Final = 2_000
"""Of an engine's log that an error message quotes."""
PORTS: Final = range(10_000, 20_000)
"""For local servers: below what Linux takes for outgoing connections (32768 and up), and below
where SGLang looks for further ports (22000 to 29999)."""
PORT_STRIDE: Final = 37
"""Ports between those of processes with neighbouring ids."""
_num_ports_given = itertools.count()

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePackage:
    """Where one kind of engine is found on this machine."""

    name: str
    """Of the Python package, and to a reader."""
    environment: str
    """Folder of the environment that the Makefile makes beside the checkout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One server to start, beyond what every server of its kind is told."""

    engine_id: EngineId
    ep_group: str | None = None
    """Named where the group has other servers too."""
    args: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """On top of the environment."""


class LocalEngine:
    """One engine that was started here. Belongs to the event loop that started it."""

    def __init__(
        self, *, engine_id: EngineId, port: int, process: asyncio.subprocess.Process, log_path: Path
    ) -> None:
        self.engine_id = engine_id
        self.port = port
        self.log_path = log_path
        self._process = process
        self._is_gone = False

    @property
    def url(self) -> str:
        return local_url(self.port)

    @property
    def pid(self) -> int:
        """Of the API server, which leads the process group."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def exit_status(self) -> int | None:
        """Of the API server; minus the signal that ended it; `None` while it runs."""
        return self._process.returncode

    @property
    def is_gone(self) -> bool:
        """Whether every process of it has ended. Looks at all processes of the machine."""
        if not self.is_alive and not self._is_gone:
            self._is_gone = not is_group_alive(self._process.pid)
        return self._is_gone

    async def wait(self) -> int:
        """Wait until the API server ends, by itself or by `stop`; return its exit status."""
        return await self._process.wait()

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
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        # Also after a clean end: a core that hangs does not notice that its server has gone.
        self._signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_GRACE_S):
                await self._process.wait()
                while not self.is_gone:
                    await asyncio.sleep(KILL_POLL_S)
        except TimeoutError:
            log.warning("engine.not_ended", engine_id=self.engine_id, pid=self.pid)

    def kill(self) -> None:
        """SIGKILL the whole process group, now."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # The group has the server's pid as its id and outlives it as long as one member does; once
        # all have gone, the number may be somebody else's.
        if self._is_gone:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def start_engine(
    command: Sequence[str],
    *,
    engine_id: EngineId,
    port: int,
    python: Path,
    environment: Mapping[str, str],
    step_budget_ms: float | None,
    variables: Mapping[str, str] | None,
    state_dir: Path,
) -> LocalEngine:
    """Run `python -m COMMAND` in a process group of its own; return while it loads.

    It gets `environment`, the time budget of its steps if there is one, and `variables` on top. Its
    log is `engines/ENGINE.log`; that of its last start stays as `ENGINE.previous.log`.

    Raises:
        DriverError: the process cannot be started.
    """
    budget = {} if step_budget_ms is None else {"DSCHED_STEP_BUDGET_MS": str(step_budget_ms)}
    log_path = state_dir / "engines" / f"{engine_id}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if log_path.exists():
            log_path.replace(log_path.with_suffix(".previous.log"))
        with log_path.open("wb") as log_file:
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-m", "dsched.drivers.serve_child", str(os.getpid())),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=asyncio.subprocess.STDOUT,
                env={**numba_variables(python), **environment, **budget, **(variables or {})},
                start_new_session=True,
            )
    except OSError as error:
        raise DriverError(f"engine {engine_id}: {python} cannot be started: {error}") from error
    log.info("engine.started", engine_id=engine_id, pid=process.pid, port=port, log=str(log_path))
    return LocalEngine(engine_id=engine_id, port=port, process=process, log_path=log_path)


def check_model_folder(model_path: Path | str) -> None:
    """Refuse a folder that no engine can load.

    Raises:
        ConfigError: it holds no `config.json`.
    """
    if not (Path(model_path) / "config.json").is_file():
        raise ConfigError(f"model folder {str(model_path)!r} has no config.json")


def engine_variables(
    agent_endpoint: str | None, *, engine_id: EngineId, defaults: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of an engine: ours, with defaults that ours overrides, and where its
    agents find dsched. Without an endpoint they find nothing, whatever we inherited."""
    inherited = inherited_environment()
    agent = {}
    if agent_endpoint is not None:
        agent = agent_environment(endpoint=agent_endpoint, engine_id=engine_id)
    else:
        inherited.pop("DSCHED_ENDPOINT", None)
    return {**defaults, **inherited, **agent}


def numba_variables(python: Path) -> dict[str, str]:
    """Where an engine's Python keeps compiled kernels: in its environment, where that is not ours.

    Beside the modules, as is numba's way, environments with other numba versions throw away each
    other's, and each start of an engine compiles for half a minute.
    """
    folder = python.parent.parent
    if python == Path(sys.executable) or not os.access(folder, os.W_OK):
        return {}
    return {"NUMBA_CACHE_DIR": str(folder / "numba")}


def find_engine_python(package: EnginePackage, stated: Path | str | None = None) -> Path:
    """Return an interpreter that has the engine: the stated one, our own, or the Makefile's.

    Raises:
        ConfigError: there is none; the message says what to do.
    """
    if stated is not None:
        path = Path(stated)
        if not path.is_file():
            raise ConfigError(f"engine Python {str(stated)!r} does not exist")
        return path
    own = Path(sys.executable)
    beside = Path(__file__).parents[2] / package.environment / "bin" / "python"
    for path in (own, beside):
        if path.is_file() and has_package(path, package.name):
            return path
    raise ConfigError(
        f"no {package.name} in {own} and no {package.environment} beside the checkout; "
        f"run `make {package.environment}/.ready`, or name the engine's Python in `launch.python`"
    )


def has_package(python: Path, name: str) -> bool:
    """Whether an interpreter's environment holds a package; looks at files, imports nothing."""
    environment = python.parent.parent
    return any(environment.glob(f"lib/python3*/site-packages/{name}/__init__.py"))


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now, another one at each call.

    Of those that the kernel gives to nobody by itself: a server binds its port half a minute after
    it was told, and until then any outgoing connection might have got one of the kernel's.

    Raises:
        DriverError: all are taken.
    """
    for _ in PORTS:
        # From where this process begins, so that two at once do not meet.
        port = PORTS[(os.getpid() * PORT_STRIDE + next(_num_ports_given)) % len(PORTS)]
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise DriverError(f"every port of {PORTS.start}-{PORTS.stop - 1} is taken")


def is_port_free(port: int) -> bool:
    """Whether a server could listen on a TCP port of 127.0.0.1 now.

    Connections of a server that has gone do not count, as they do for `free_port`.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def local_url(port: int) -> str:
    """Return the URL of a server on this machine."""
    return f"http://127.0.0.1:{port}"


def is_group_alive(group_id: int) -> bool:
    """Whether a process group has a process that runs; one that only waits to be reaped does not.

    The orphans of an engine are reaped by the machine's first process, in some containers never.
    """
    try:
        os.killpg(group_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # there is one, and it is not ours
        return True
    statuses = list(Path("/proc").glob("[0-9]*/stat"))
    return any(_is_running_member(each, group_id) for each in statuses) if statuses else True


def _is_running_member(status: Path, group_id: int) -> bool:
    try:
        # PID (NAME) STATE PARENT GROUP ...; the name may hold anything.
        state, _, group = status.read_bytes().rpartition(b")")[2].split()[:3]
    except OSError:  # it has just ended
        return False
    return int(group) == group_id and state not in b"ZX"


async def make_tiny_model(folder: Path, *, python: Path) -> Path:
    """Make the tiny random model with an engine's Python, unless it is there; return `folder`.

    Raises:
        DriverError: the model cannot be made.
    """
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-m", "dsched.drivers.vllm.tiny_model", str(folder)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"OMP_NUM_THREADS": "1"} | inherited_environment(),
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        text = output[-LOG_TAIL_BYTES:].decode(errors="replace")
        raise DriverError(f"the tiny model cannot be made: {text}")
    return folder
