"""Is the engine there, and what is it? One asyncio task that asks until told to stop.

Down: the engine's health and `/v1/models` are asked with a growing pause until both answer; then
the engine is described from what its agents said, what it tells over HTTP, and the operator's
hints, in this order. An engine without dsched's agents is described without them after
`HELLO_PATIENCE_S`, and reports no load. How an engine is asked is its `EngineInspector`'s.

Up: health is asked once a second. A refused or reset connection and a status other than 200 count
at once; an answer that does not come in time counts from the third time on, because a busy server
on a busy machine is slow long before it is dead. `wake` asks at once: the driver calls it when a
stream breaks or an agent says goodbye.

An engine of a version that was never tried is used with what is there, and named in the log.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec
import structlog

from dsched.drivers.base import EngineCapabilities, EngineDescription
from dsched.drivers.http import HttpPool
from dsched.drivers.wire import AgentHello
from dsched.errors import DriverError, EngineUnreachableError
from dsched.ids import EngineId
from dsched.states import Evidence

HEALTH_INTERVAL_S: Final = 1.0
HEALTH_TIMEOUT_S: Final = 3.0
MAX_TIMEOUTS: Final = 3
"""Unanswered health checks in a row that make an engine down."""
FIRST_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 2.0
"""Between two looks at an engine that is down. Engines load for minutes; a look costs nothing."""
HELLO_PATIENCE_S: Final = 4.0
"""For agents to say hello once the server answers. They reconnect within 2 s of dsched's start
and greet once a second."""
DEFAULT_MAX_RUNNING: Final = 256
"""vLLM's own default of `--max-num-seqs` on most devices, for an engine that does not tell."""
DEFAULT_KV_CAPACITY_TOKENS: Final = 1 << 17
"""For an engine that says nothing of its KV cache: small enough to be there on any device."""
WATCH_CONNECTIONS: Final = 2
"""Of the watch's own: a thousand streams must not keep a health check waiting for a connection."""
MAX_VERSION_CHARS: Final = 64
"""Of a version that are logged."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHints:
    """What the operator says of an engine; used where the engine says nothing."""

    num_dp_ranks: int | None = None
    kv_capacity_tokens: int | None = None
    max_running_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine tells over HTTP; `None` for what it does not."""

    capabilities: EngineCapabilities
    """`has_load_reports` is not looked at: agents say it."""
    version: str | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    sizes: EngineHints = EngineHints()
    kv_meeting: tuple[str, int] | None = None
    """See `EngineDescription.kv_meeting`."""


class ModelCard(msgspec.Struct):
    """One model of `/v1/models`."""

    id: str
    max_model_len: int | None = None


class EngineInspector(Protocol):
    """How one kind of engine is asked what it is. Every method asks over `pool` and keeps nothing.

    Methods raise `EngineUnreachableError` when there is no answer, `DriverError` for an odd one.
    """

    kind: str
    """`vllm` or `sglang`."""
    tried_versions: tuple[str, ...]
    """Versions, or beginnings of them up to a dot, that the tests run."""

    async def health_problem(self, pool: HttpPool) -> str | None:
        """Return what is wrong with an engine that answers; `None` if it can serve."""
        ...

    async def inspect(self, pool: HttpPool, card: ModelCard, *, has_agents: bool) -> EngineFacts:
        """Return what the engine tells. With agents, sizes are theirs and need not be asked."""
        ...


class WatchHost(Protocol):
    """What the watch tells its driver."""

    def on_up(self, description: EngineDescription) -> None: ...

    def on_down(self, reason: str, evidence: Evidence) -> None: ...

    def hellos(self) -> Mapping[int, AgentHello]:
        """The present agents by DP rank."""
        ...


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


class EngineWatch:
    """Watches one engine for one driver. `run` ends only by cancellation."""

    def __init__(
        self,
        *,
        engine_id: EngineId,
        url: str,
        model: str | None,
        inspector: EngineInspector,
        hints: EngineHints,
        expects_agents: bool,
        host: WatchHost,
    ) -> None:
        self._engine_id = engine_id
        self._model = model
        self._inspector = inspector
        self._hints = hints
        self._expects_agents = expects_agents
        self._host = host
        self._pool = HttpPool(url, max_connections=WATCH_CONNECTIONS)
        self._is_woken = asyncio.Event()
        self._num_timeouts = 0
        self._is_up = False
        self._version: str | None = None

    @property
    def version(self) -> str | None:
        """The engine's version, as it was told last."""
        return self._version

    def wake(self) -> None:
        """Look now instead of at the next interval."""
        self._is_woken.set()

    def move(self, url: str) -> None:
        """Look at another URL from now on; the engine is down until it answers there."""
        old, self._pool = self._pool, HttpPool(url, max_connections=WATCH_CONNECTIONS)
        self._set_down(f"it is started anew at {url}")
        self.wake()
        old.close()

    def note_hello(self, *, is_restart: bool) -> None:
        """An agent that was not known greets: after a restart, or late."""
        if is_restart:
            self._set_down("its agent has restarted")
        elif self._is_up and self._expects_agents and has_all_hellos(self._host.hellos()):
            # Described without agents before: look again, for what they know better.
            self._is_up = False
        self.wake()

    def note_goodbye(self) -> None:
        """An agent says that its engine stops."""
        self._set_down("it says goodbye")
        self.wake()

    async def run(self) -> None:
        """Watch until cancelled."""
        retry_s = FIRST_RETRY_S
        try:
            while True:
                if self._is_up:
                    await self._pause(HEALTH_INTERVAL_S)
                    await self._check_up()
                    retry_s = FIRST_RETRY_S
                elif not await self._try_up():
                    await self._pause(retry_s)
                    retry_s = min(2 * retry_s, MAX_RETRY_S)
        finally:
            self._pool.close()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._is_woken.wait()
        except TimeoutError:
            pass
        self._is_woken.clear()

    async def _check_up(self) -> None:
        evidence = Evidence.SOCKET
        try:
            reason = await self._health_problem()
        except EngineUnreachableError as error:
            is_slow = isinstance(error.__cause__, TimeoutError)
            evidence = Evidence.LEASE if is_slow else Evidence.SOCKET
            self._num_timeouts += is_slow
            reason = None if is_slow and self._num_timeouts < MAX_TIMEOUTS else str(error)
        else:
            self._num_timeouts = 0
        if reason is not None:
            self._set_down(reason, evidence)

    def _set_down(self, reason: str, evidence: Evidence = Evidence.SOCKET) -> None:
        if not self._is_up:
            return
        self._is_up = False
        self._num_timeouts = 0
        self._host.on_down(reason, evidence)

    async def _health_problem(self) -> str | None:
        """Ask for its health; return what is wrong.

        Raises:
            EngineUnreachableError: no answer.
        """
        try:
            return await self._inspector.health_problem(self._pool)
        except EngineUnreachableError:
            raise
        except DriverError as error:
            return str(error)

    async def _try_up(self) -> bool:
        try:
            if await self._health_problem() is not None:
                return False
            card = await self._model_card()
            if self._expects_agents and not has_all_hellos(self._host.hellos()):
                await self._wait_for_hellos()
                if await self._health_problem() is not None:
                    return False
            description = await self._describe(card)
        except DriverError:
            return False
        self._is_up = True
        self._host.on_up(description)
        return True

    async def _model_card(self) -> ModelCard:
        status, _, body = await self._pool.fetch("GET", "/v1/models", timeout_s=HEALTH_TIMEOUT_S)
        try:
            cards = msgspec.json.decode(body, type=_ModelList).data if status == 200 else []
        except msgspec.MsgspecError:
            cards = []
        for card in cards:
            if card.id == self._model:
                return card
        if not cards:
            raise DriverError(f"/v1/models answers with status {status} and names no model")
        return cards[0]

    async def _wait_for_hellos(self) -> None:
        """Give the agents of all ranks time to say hello; go on without them if they do not."""
        deadline_s = asyncio.get_running_loop().time() + HELLO_PATIENCE_S
        while not has_all_hellos(self._host.hellos()):
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                log.warning("agent.missed", engine_id=self._engine_id, patience_s=HELLO_PATIENCE_S)
                return
            await self._pause(left_s)

    async def _describe(self, card: ModelCard) -> EngineDescription:
        hellos = self._host.hellos()
        has_agents = has_all_hellos(hellos)
        facts = await self._inspector.inspect(self._pool, card, has_agents=has_agents)
        if not has_agents:
            hellos = {}
        self._check_version(facts.version, hellos)
        return describe(
            self._engine_id,
            kind=self._inspector.kind,
            card=card,
            facts=facts,
            hints=self._hints,
            hellos=hellos,
        )

    def _check_version(self, told: str | None, hellos: Mapping[int, AgentHello]) -> None:
        """Name an engine of a version that was never tried, once for each version it has."""
        version = told or next((hellos[rank].engine_version for rank in sorted(hellos)), None)
        if version == self._version or version is None:
            return
        self._version = version
        if not is_tried(version, self._inspector.tried_versions):
            log.warning(
                "engine.version_unknown",
                engine_id=self._engine_id,
                kind=self._inspector.kind,
                engine_version=version[:MAX_VERSION_CHARS],
                tried=self._inspector.tried_versions,
            )


def has_all_hellos(hellos: Mapping[int, AgentHello]) -> bool:
    """Whether every DP rank's agent has spoken."""
    num_ranks = max((hello.num_dp_ranks for hello in hellos.values()), default=0)
    return 0 < num_ranks <= len(hellos)


def describe(
    engine_id: EngineId,
    *,
    kind: str,
    card: ModelCard,
    facts: EngineFacts,
    hints: EngineHints,
    hellos: Mapping[int, AgentHello],
) -> EngineDescription:
    """Describe an engine as its agents do, then as it does itself, then as the operator does.

    With unlike ranks it is as small as the smallest of them. A hint of the operator goes before
    what an engine without agents tells: it says more of itself than it tells over HTTP.
    """
    ranks = [hellos[rank] for rank in sorted(hellos)]
    sizes = facts.sizes
    lengths = [hello.max_model_len for hello in ranks]
    told = facts.max_model_len or card.max_model_len
    if told is not None:
        lengths.append(told)
    return EngineDescription(
        engine_id=engine_id,
        kind=kind,
        model=card.id,
        max_model_len=min(lengths, default=DEFAULT_KV_CAPACITY_TOKENS),
        vocab_size=facts.vocab_size,
        kv_meeting=facts.kv_meeting,
        num_dp_ranks=max((hello.num_dp_ranks for hello in ranks), default=None)
        or hints.num_dp_ranks
        or sizes.num_dp_ranks
        or 1,
        kv_capacity_tokens=min((hello.kv_capacity_tokens for hello in ranks), default=None)
        or hints.kv_capacity_tokens
        or sizes.kv_capacity_tokens
        or DEFAULT_KV_CAPACITY_TOKENS,
        max_running_requests=min((hello.max_running_requests for hello in ranks), default=None)
        or hints.max_running_requests
        or sizes.max_running_requests
        or DEFAULT_MAX_RUNNING,
        capabilities=replace(
            facts.capabilities,
            has_load_reports=bool(ranks)
            and all("load_reports" in hello.features for hello in ranks),
        ),
    )


def is_tried(version: str, tried: tuple[str, ...]) -> bool:
    """Whether a version is one of `tried`, or one that differs behind a dot or a sign only.

    >>> is_tried("0.32.1+cpu", ("0.32",)), is_tried("0.5.23", ("0.5.23",))
    (True, True)
    >>> is_tried("0.320", ("0.32",)), is_tried("0.6.0", ("0.5.23",))
    (False, False)
    """
    return any(version == each or version.startswith((f"{each}.", f"{each}+")) for each in tried)


async def ask_status(pool: HttpPool, path: str) -> int:
    """Ask `path` within the time of a health check; return the status.

    Raises:
        EngineUnreachableError: no answer.
        DriverError: an answer that is no HTTP.
    """
    status, _, _ = await pool.fetch("GET", path, timeout_s=HEALTH_TIMEOUT_S)
    return status


def status_problem(path: str, status: int) -> str | None:
    """What is wrong with an engine whose health has this status."""
    return None if status == 200 else f"{path} answers with status {status}"
