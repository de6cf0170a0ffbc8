"""Is the engine there, and what is it? One asyncio task that asks until told to stop.

Down: `/health` and `/v1/models` are asked with a growing pause until both answer; then the engine
is described from what its agents said, what it tells over HTTP, and the operator's hints, in this
order. An engine whose scheduler is not dsched's has no agents: after `HELLO_PATIENCE_S` it is
described without them, from `/metrics`, and reports no load.

Up: `/health` is asked once a second. A refused or reset connection and a status other than 200
count at once; an answer that does not come in time counts from the third time on, because a busy
server on a busy machine is slow long before it is dead. `wake` asks at once: the driver calls it
when a stream breaks or an agent says goodbye.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

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
"""vLLM's own default of `--max-num-seqs` on most devices; it tells nobody over HTTP."""
DEFAULT_KV_CAPACITY_TOKENS: Final = 1 << 17
"""For an engine that says nothing of its KV cache: small enough to be there on any device."""

log = structlog.get_logger("dsched.drivers.vllm")

_SAMPLE = re.compile(r"^vllm:(?P<name>[a-z_]+)\{(?P<labels>[^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(?P<name>[a-z_]+)="(?P<value>[^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHints:
    """What the operator says of an engine; used where the engine says nothing."""

    num_dp_ranks: int | None = None
    kv_capacity_tokens: int | None = None
    max_running_requests: int | None = None


class WatchHost(Protocol):
    """What the watch tells its driver."""

    def on_up(self, description: EngineDescription) -> None: ...

    def on_down(self, reason: str, evidence: Evidence) -> None: ...

    def hellos(self) -> Mapping[int, AgentHello]:
        """The present agents by DP rank."""
        ...


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class EngineWatch:
    """Watches one engine for one driver. `run` ends only by cancellation."""

    def __init__(
        self,
        *,
        engine_id: EngineId,
        url: str,
        model: str | None,
        hints: EngineHints,
        expects_agents: bool,
        host: WatchHost,
    ) -> None:
        self._engine_id = engine_id
        self._model = model
        self._hints = hints
        self._expects_agents = expects_agents
        self._host = host
        # Of its own: a thousand streams must not keep a health check waiting for a connection.
        self._pool = HttpPool(url, max_connections=2)
        self._is_woken = asyncio.Event()
        self._num_timeouts = 0
        self._is_up = False

    def wake(self) -> None:
        """Look now instead of at the next interval."""
        self._is_woken.set()

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
        """Ask `/health`; return what is wrong.

        Raises:
            EngineUnreachableError: no answer.
        """
        try:
            status, _, _ = await self._pool.fetch("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except EngineUnreachableError:
            raise
        except DriverError as error:
            return str(error)
        return None if status == 200 else f"/health answers with status {status}"

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

    async def _model_card(self) -> _ModelCard:
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

    async def _describe(self, card: _ModelCard) -> EngineDescription:
        hellos = self._host.hellos()
        if has_all_hellos(hellos):
            return describe_with_agents(self._engine_id, card.id, hellos)
        facts = await self._metrics_facts()
        hints = self._hints
        return EngineDescription(
            engine_id=self._engine_id,
            kind="vllm",
            model=card.id,
            max_model_len=card.max_model_len or DEFAULT_KV_CAPACITY_TOKENS,
            vocab_size=None,
            num_dp_ranks=hints.num_dp_ranks or facts.num_dp_ranks or 1,
            kv_capacity_tokens=(
                hints.kv_capacity_tokens or facts.kv_capacity_tokens or DEFAULT_KV_CAPACITY_TOKENS
            ),
            max_running_requests=hints.max_running_requests or DEFAULT_MAX_RUNNING,
            capabilities=capabilities(has_load_reports=False),
        )

    async def _metrics_facts(self) -> EngineHints:
        try:
            status, _, body = await self._pool.fetch("GET", "/metrics", timeout_s=HEALTH_TIMEOUT_S)
        except DriverError:
            return EngineHints()
        return read_metrics(body.decode(errors="replace")) if status == 200 else EngineHints()


def has_all_hellos(hellos: Mapping[int, AgentHello]) -> bool:
    """Whether every DP rank's agent has spoken."""
    num_ranks = max((hello.num_dp_ranks for hello in hellos.values()), default=0)
    return 0 < num_ranks <= len(hellos)


def describe_with_agents(
    engine_id: EngineId, model: str, hellos: Mapping[int, AgentHello]
) -> EngineDescription:
    """Describe an engine as its agents do; with unlike ranks, as the smallest of them."""
    ranks = [hellos[rank] for rank in sorted(hellos)]
    return EngineDescription(
        engine_id=engine_id,
        kind="vllm",
        model=model,
        max_model_len=min(hello.max_model_len for hello in ranks),
        vocab_size=None,
        num_dp_ranks=max(hello.num_dp_ranks for hello in ranks),
        kv_capacity_tokens=min(hello.kv_capacity_tokens for hello in ranks),
        max_running_requests=min(hello.max_running_requests for hello in ranks),
        capabilities=capabilities(
            has_load_reports=all("load_reports" in hello.features for hello in ranks)
        ),
    )


def capabilities(*, has_load_reports: bool) -> EngineCapabilities:
    """What every vLLM server can do over `/v1/completions`."""
    return EngineCapabilities(
        can_stream_logprobs=True,
        can_seed=True,
        can_structured_output=True,
        can_steer_dp_rank=True,
        can_migrate=False,
        has_load_reports=has_load_reports,
    )


def read_metrics(text: str) -> EngineHints:
    """Read ranks and KV capacity from vLLM's Prometheus page; `None` for what it lacks.

    >>> read_metrics('vllm:cache_config_info{engine="0",kv_cache_size_tokens="640"} 1.0')
    EngineHints(num_dp_ranks=1, kv_capacity_tokens=640, max_running_requests=None)
    """
    engines: dict[str, None] = {}
    capacities: list[int] = []
    for sample in _SAMPLE.finditer(text):
        labels: dict[str, Any] = dict(_LABEL.findall(sample["labels"]))
        engines[str(labels.get("engine", "0"))] = None
        if sample["name"] == "cache_config_info":
            capacities += _capacity(labels)
    return EngineHints(
        num_dp_ranks=len(engines) or None, kv_capacity_tokens=min(capacities, default=None)
    )


def _capacity(labels: Mapping[str, str]) -> list[int]:
    numbers = {
        name: int(labels[name])
        for name in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")
        if labels.get(name, "").isdecimal()
    }
    if "kv_cache_size_tokens" in numbers:
        return [numbers["kv_cache_size_tokens"]]
    if "num_gpu_blocks" in numbers and "block_size" in numbers:
        return [numbers["num_gpu_blocks"] * numbers["block_size"]]
    return []
