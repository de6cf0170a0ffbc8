"""A stand-in for an engine: requests run in steps on one or more DP ranks, without a model.

`VllmDouble` and `SglangDouble` put their engine's HTTP shape in front of it. Counts, waiting and
aborts behave as in an engine; `dsched.drivers.agent.Agent` publishes them for each rank. The k-th
token is a pure function of (prompt, k): `DoubleModel.stream` says what a stream must be.

Faults: `kill` (the process dies), `freeze` (nothing answers any more, no socket closes).
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar
from zlib import crc32

import msgspec
from aiohttp import web

from dsched.clock import SystemClock
from dsched.drivers.agent import Agent, StepRecord, new_incarnation
from dsched.drivers.wire import AgentHello

Emitted = tuple[int, str | None]
"""A token, and the reason if it is the last one."""


class DoubleModel:
    """A greedy model over `vocab_size` tokens; `eos_token_id` ends an answer.

    >>> model = DoubleModel(vocab_size=100)
    >>> model.stream([1, 2], 4)[2:] == model.stream([1, 2, *model.stream([1, 2], 2)], 2)
    True
    """

    def __init__(self, *, vocab_size: int = 512, eos_token_id: int = 2) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id

    def next_token(self, tokens: Sequence[int]) -> int:
        """The token that follows `tokens`; never the end of sequence, as in the tiny model."""
        digest = crc32(b"".join(token.to_bytes(4, "little") for token in tokens))
        return 5 + digest % (self.vocab_size - 5)

    def stream(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The first `num_tokens` of the answer to `prompt`."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]


class DoubleRun:
    """One request inside the double."""

    def __init__(
        self,
        *,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.tokens = list(prompt)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_token_ids = tuple(stop_token_ids)
        self.num_computed = 0
        self.output: asyncio.Queue[Emitted | None] = asyncio.Queue()
        """`None` ends it without a reason: the engine has died, or gave it up."""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)


class DoubleRank:
    """One DP rank: its queue, its running set and its agent."""

    def __init__(self, double: "EngineDouble", dp_rank: int) -> None:
        self.dp_rank = dp_rank
        self.waiting: deque[DoubleRun] = deque()
        self.running: list[DoubleRun] = []
        self.agent: Agent | None = None
        self.has_work = asyncio.Event()
        self._double = double
        self._step = 0
        self._clock = SystemClock()

    def add(self, run: DoubleRun) -> None:
        """Queue a request."""
        self.waiting.append(run)
        self.has_work.set()

    def forget(self, run: DoubleRun) -> None:
        """Free what a request holds, if it is still here."""
        for runs in (self.running, self.waiting):
            if run in runs:
                runs.remove(run)
                self.report(step_ns=0, num_step_tokens=0)

    async def step_forever(self) -> None:
        """Compute whatever is there, step by step."""
        double = self._double
        while True:
            if not (self.running or self.waiting):
                self.has_work.clear()
                await self.has_work.wait()
            start_ns = self._clock.now_ns()
            while self.waiting and len(self.running) < double.max_running_requests:
                self.running.append(self.waiting.popleft())
            await asyncio.sleep(double.step_s)
            if double.is_frozen:
                await asyncio.Event().wait()
            num_step_tokens = self._compute()
            self._step += 1
            self.report(step_ns=self._clock.now_ns() - start_ns, num_step_tokens=num_step_tokens)

    def _compute(self) -> int:
        """Compute one step; return how many tokens it took."""
        budget = max_step_tokens = self._double.max_step_tokens
        for run in list(self.running):
            num_new = min(len(run.tokens) - run.num_computed, budget)
            run.num_computed += num_new
            budget -= num_new
            if num_new and run.num_computed == len(run.tokens):
                self._emit(run)
        return max_step_tokens - budget

    def _emit(self, run: DoubleRun) -> None:
        token = self._double.model.next_token(run.tokens)
        run.tokens.append(token)
        finish_reason = None
        if token in run.stop_token_ids and run.num_output > run.min_tokens:
            finish_reason = "stop"
        elif run.num_output >= run.max_tokens:
            finish_reason = "length"
        run.output.put_nowait((token, finish_reason))
        if finish_reason is not None:
            self.running.remove(run)

    def report(self, *, step_ns: int, num_step_tokens: int) -> None:
        """Publish the counts."""
        if self._double.is_frozen:
            return  # a stopped process says nothing, whatever happens to its sockets
        if self.agent is None:
            return
        runs = [*self.running, *self.waiting]
        self.agent.record_step(
            StepRecord(
                step=self._step,
                num_running=len(self.running),
                num_waiting=len(self.waiting),
                num_kv_tokens=sum(run.num_computed for run in self.running),
                num_waiting_prefill_tokens=sum(
                    max(0, len(run.prompt) - run.num_computed) for run in runs
                ),
                step_ns=step_ns,
                num_step_tokens=num_step_tokens,
            )
        )

    def drop_all(self) -> None:
        """Lose every request, as an engine that dies does."""
        runs = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        for run in runs:
            run.output.put_nowait(None)


class EngineDouble(ABC):
    """One server on 127.0.0.1, on the running event loop."""

    kind: ClassVar[str]

    def __init__(
        self,
        *,
        served_model_name: str = "tiny",
        model: DoubleModel | None = None,
        max_model_len: int = 1_024,
        max_running_requests: int = 64,
        kv_capacity_tokens: int = 65_536,
        max_step_tokens: int = 512,
        step_s: float = 0.002,
        num_dp_ranks: int = 1,
        engine_id: str = "double-0",
        agent_endpoint: str | None = None,
    ) -> None:
        self.model = model or DoubleModel()
        self.max_model_len = max_model_len
        self.max_running_requests = max_running_requests
        self.max_step_tokens = max_step_tokens
        self.step_s = step_s
        self.bodies: list[dict[str, Any]] = []
        """Every request body, in order."""
        self.headers: list[dict[str, str]] = []
        """The headers of each, names in lower case."""
        self.port = 0
        self.served_model_name = served_model_name
        self.kv_capacity_tokens = kv_capacity_tokens
        self.ranks = [DoubleRank(self, dp_rank) for dp_rank in range(num_dp_ranks)]
        self.engine_id = engine_id
        self._agent_endpoint = agent_endpoint
        self._is_frozen = asyncio.Event()
        self._step_tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._transports: list[asyncio.Transport] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_running(self) -> int:
        return sum(len(rank.running) for rank in self.ranks)

    @property
    def num_waiting(self) -> int:
        return sum(len(rank.waiting) for rank in self.ranks)

    @property
    def is_frozen(self) -> bool:
        return self._is_frozen.is_set()

    @abstractmethod
    def routes(self) -> list[web.RouteDef]:
        """The paths that this kind of engine has."""

    async def start(self, port: int = 0) -> None:
        """Listen, and let the agents say hello."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(self.routes())
        # With cancellation a client that goes away ends its handler, as in uvicorn.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        loop = asyncio.get_running_loop()
        self._step_tasks = [loop.create_task(rank.step_forever()) for rank in self.ranks]
        if self._agent_endpoint is not None:
            for rank in self.ranks:
                rank.agent = Agent(endpoint=self._agent_endpoint, hello=self._hello(rank.dp_rank))
                rank.agent.start()

    async def stop(self) -> None:
        """End as a server that is told to: goodbye first, then every socket closes. Idempotent."""
        for rank in self.ranks:
            agent, rank.agent = rank.agent, None
            if agent is not None:
                await asyncio.to_thread(agent.close)
        await self._end_process()

    async def kill(self) -> None:
        """Die without a word: all sockets break at once."""
        self.abandon_agents()
        self.break_connections()
        await self._end_process()

    def break_connections(self) -> None:
        """Close every socket in the middle of what it says."""
        for transport in self._transports:
            transport.abort()

    def abandon_agents(self) -> None:
        """Silence the agents, as when their process is gone."""
        for rank in self.ranks:
            agent, rank.agent = rank.agent, None
            if agent is not None:
                agent.abandon()

    def freeze(self) -> None:
        """Stop in the middle of everything; sockets stay open."""
        self._is_frozen.set()

    async def _end_process(self) -> None:
        tasks, self._step_tasks = self._step_tasks, []
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _hello(self, dp_rank: int) -> AgentHello:
        return AgentHello(
            dsched_version="0",
            engine_id=self.engine_id,
            incarnation=new_incarnation(),
            engine=self.kind,
            engine_version="double",
            model=self.served_model_name,
            max_model_len=self.max_model_len,
            dp_rank=dp_rank,
            num_dp_ranks=len(self.ranks),
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_running_requests=self.max_running_requests,
            features=("load_reports", "waiting_prefill_tokens"),
        )

    # For the routes.

    async def pass_by(self, request: web.Request) -> None:
        """Remember the connection; hang if frozen."""
        transport = request.transport
        if transport is not None and transport not in self._transports:
            self._transports.append(transport)
        if self.is_frozen:
            await asyncio.Event().wait()

    async def read_body(self, request: web.Request) -> dict[str, Any]:
        """The body of a request for tokens, which is kept in `bodies`."""
        body = msgspec.json.decode(await request.read(), type=dict[str, Any])
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return body

    async def models_answer(self, request: web.Request) -> web.Response:
        """`/v1/models`."""
        await self.pass_by(request)
        card = {"id": self.served_model_name, "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Begin an answer of server-sent events."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


async def write_event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    """Send one event."""
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
