"""A stand-in for a vLLM server: the same HTTP shape and the same agent, without a model.

It serves what dsched's vLLM driver uses of vLLM 0.32: `/v1/completions` with token ids, streamed,
`/v1/models`, `/health` and `/metrics`. Requests run in steps, so counts, waiting and aborts behave
as in an engine; `dsched.drivers.agent.Agent` publishes them. The k-th token is a pure function of
(prompt, k): `DoubleModel.stream` says what a stream must be.

Faults: `kill` (the process dies), `kill_core` (the API server lives on for a moment and says that
its engine core has died), `freeze` (nothing answers any more, no socket closes).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final
from zlib import crc32

import msgspec
from aiohttp import web

from dsched.clock import SystemClock
from dsched.drivers.agent import Agent, StepRecord, new_incarnation
from dsched.drivers.wire import AgentHello

ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."


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


class _Run:
    """One request inside the double."""

    def __init__(self, body: dict[str, Any], *, max_tokens: int) -> None:
        self.body = body
        self.prompt: list[int] = body["prompt"]
        self.tokens = list(self.prompt)
        self.max_tokens = max_tokens
        self.num_computed = 0
        self.output: asyncio.Queue[tuple[int, str | None] | None] = asyncio.Queue()

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)


class VllmDouble:
    """One server on 127.0.0.1, on the running event loop."""

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
        engine_id: str = "double-0",
        agent_endpoint: str | None = None,
    ) -> None:
        self.model = model or DoubleModel()
        self.max_model_len = max_model_len
        self.bodies: list[dict[str, Any]] = []
        """Every request body, in order."""
        self.headers: list[dict[str, str]] = []
        """The headers of each, names in lower case."""
        self.port = 0
        self._served_model_name = served_model_name
        self._max_running_requests = max_running_requests
        self._kv_capacity_tokens = kv_capacity_tokens
        self._max_step_tokens = max_step_tokens
        self._step_s = step_s
        self._engine_id = engine_id
        self._agent_endpoint = agent_endpoint
        self._agent: Agent | None = None
        self._waiting: deque[_Run] = deque()
        self._running: list[_Run] = []
        self._has_work = asyncio.Event()
        self._is_core_dead = False
        self._is_frozen = asyncio.Event()
        self._step = 0
        self._step_task: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._transports: list[asyncio.Transport] = []
        self._clock = SystemClock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def start(self, port: int = 0) -> None:
        """Listen, and let the agent say hello."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/v1/completions", self._completions),
            ]
        )
        # With cancellation a client that goes away ends its handler, as in uvicorn.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._step_task = asyncio.get_running_loop().create_task(self._step_forever())
        if self._agent_endpoint is not None:
            self._agent = Agent(endpoint=self._agent_endpoint, hello=self._hello())
            self._agent.start()

    async def stop(self) -> None:
        """End as a server that is told to: goodbye first, then every socket closes. Idempotent."""
        if self._agent is not None:
            await asyncio.to_thread(self._agent.close)
            self._agent = None
        await self._end_process()

    async def kill(self) -> None:
        """Die without a word: all sockets break at once."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.abandon()
        for transport in self._transports:
            transport.abort()
        await self._end_process()

    def kill_core(self) -> None:
        """Lose the engine core: open streams end with vLLM's error event, `/health` says 503."""
        self._is_core_dead = True
        if self._agent is not None:
            self._agent.abandon()
            self._agent = None
        for run in [*self._running, *self._waiting]:
            run.output.put_nowait(None)
        self._running.clear()
        self._waiting.clear()

    def freeze(self) -> None:
        """Stop in the middle of everything; sockets stay open."""
        self._is_frozen.set()

    async def _end_process(self) -> None:
        if self._step_task is not None:
            self._step_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._step_task
            self._step_task = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _hello(self) -> AgentHello:
        return AgentHello(
            dsched_version="0",
            engine_id=self._engine_id,
            incarnation=new_incarnation(),
            engine="vllm",
            engine_version="double",
            model=self._served_model_name,
            max_model_len=self.max_model_len,
            dp_rank=0,
            num_dp_ranks=1,
            kv_capacity_tokens=self._kv_capacity_tokens,
            max_running_requests=self._max_running_requests,
            features=("load_reports", "waiting_prefill_tokens"),
        )

    # Routes.

    async def _pass(self, request: web.Request) -> None:
        """Remember the connection; hang if frozen."""
        transport = request.transport
        if transport is not None and transport not in self._transports:
            self._transports.append(transport)
        if self._is_frozen.is_set():
            await asyncio.Event().wait()

    async def _health(self, request: web.Request) -> web.Response:
        await self._pass(request)
        return web.Response(status=503 if self._is_core_dead else 200)

    async def _models(self, request: web.Request) -> web.Response:
        await self._pass(request)
        card = {"id": self._served_model_name, "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._pass(request)
        labels = f'engine="0",kv_cache_size_tokens="{self._kv_capacity_tokens}"'
        return web.Response(text=f"# TYPE x gauge\nvllm:cache_config_info{{{labels}}} 1.0\n")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        await self._pass(request)
        body = msgspec.json.decode(await request.read(), type=dict[str, Any])
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        refusal = self._refusal(body)
        if refusal is not None:
            status, message = refusal
            error = {"message": message, "type": "BadRequestError", "code": status}
            return web.json_response({"error": error}, status=status)
        room = self.max_model_len - len(body["prompt"])
        run = _Run(body, max_tokens=min(body["max_tokens"], room))
        self._waiting.append(run)
        self._has_work.set()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(request)
            await self._stream(run, response)
        finally:
            self._forget(run)
        return response

    def _refusal(self, body: dict[str, Any]) -> tuple[int, str] | None:
        if self._is_core_dead:
            return 500, ENGINE_DEAD
        if body.get("model", self._served_model_name) != self._served_model_name:
            return 404, f"The model `{body['model']}` does not exist."
        prompt = body["prompt"]
        if not len(prompt) < self.max_model_len:
            return 400, f"{len(prompt)} prompt tokens exceed the {self.max_model_len} of the model"
        if max(prompt) >= self.model.vocab_size:
            return 400, f"Token id {max(prompt)} is out of vocabulary"
        return None

    async def _stream(self, run: _Run, response: web.StreamResponse) -> None:
        while (item := await run.output.get()) is not None:
            token, finish_reason = item
            choice: dict[str, Any] = {
                "index": 0,
                "text": "",
                "finish_reason": finish_reason,
                "token_ids": [token],
            }
            if run.num_output <= 1:
                choice["prompt_token_ids"] = run.prompt
            if run.body.get("logprobs") is not None:
                choice["logprobs"] = self._logprobs(token, run.body["logprobs"])
            await self._write(
                response, {"id": f"cmpl-{run.body['request_id']}", "choices": [choice]}
            )
            if finish_reason is not None:
                break
        else:
            await self._write(response, {"error": {"message": ENGINE_DEAD, "code": 500}})
        if run.body.get("stream_options", {}).get("include_usage") and item is not None:
            details = {"cached_tokens": 0}
            usage = {"prompt_tokens": len(run.prompt), "prompt_tokens_details": details}
            await self._write(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _write(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    def _logprobs(self, token: int, num_top: int) -> dict[str, Any]:
        others = [each for each in range(num_top + 1) if each != token][:num_top]
        top = {f"token_id:{each}": -0.5 - rank for rank, each in enumerate([token, *others])}
        name = f"token_id:{token}"
        return {"tokens": [name], "token_logprobs": [-0.5], "top_logprobs": [top]}

    def _forget(self, run: _Run) -> None:
        if run in self._running:
            self._running.remove(run)
            self._report(step_ns=0, num_step_tokens=0)
        elif run in self._waiting:
            self._waiting.remove(run)
            self._report(step_ns=0, num_step_tokens=0)

    # Steps.

    async def _step_forever(self) -> None:
        while True:
            if not (self._running or self._waiting):
                self._has_work.clear()
                await self._has_work.wait()
            start_ns = self._clock.now_ns()
            while self._waiting and len(self._running) < self._max_running_requests:
                self._running.append(self._waiting.popleft())
            await asyncio.sleep(self._step_s)
            if self._is_frozen.is_set():
                await asyncio.Event().wait()
            num_step_tokens = self._compute()
            self._step += 1
            self._report(step_ns=self._clock.now_ns() - start_ns, num_step_tokens=num_step_tokens)

    def _compute(self) -> int:
        """Compute one step; return how many tokens it took."""
        budget = self._max_step_tokens
        for run in list(self._running):
            num_new = min(len(run.tokens) - run.num_computed, budget)
            run.num_computed += num_new
            budget -= num_new
            if num_new and run.num_computed == len(run.tokens):
                self._emit(run)
        return self._max_step_tokens - budget

    def _emit(self, run: _Run) -> None:
        token = self.model.next_token(run.tokens)
        run.tokens.append(token)
        finish_reason = None
        if token in run.body.get("stop_token_ids", ()) and run.num_output > run.body.get(
            "min_tokens", 0
        ):
            finish_reason = "stop"
        elif run.num_output >= run.max_tokens:
            finish_reason = "length"
        run.output.put_nowait((token, finish_reason))
        if finish_reason is not None:
            self._running.remove(run)

    def _report(self, *, step_ns: int, num_step_tokens: int) -> None:
        if self._is_frozen.is_set():
            return  # a stopped process says nothing, whatever happens to its sockets
        if self._agent is None:
            return
        runs = [*self._running, *self._waiting]
        num_prefill = sum(max(0, len(run.prompt) - run.num_computed) for run in runs)
        self._agent.record_step(
            StepRecord(
                step=self._step,
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                num_kv_tokens=sum(run.num_computed for run in self._running),
                num_waiting_prefill_tokens=num_prefill,
                step_ns=step_ns,
                num_step_tokens=num_step_tokens,
            )
        )
