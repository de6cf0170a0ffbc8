"""A stand-in for an SGLang server: the same HTTP shape and the same agents, without a model.

It serves what dsched's SGLang driver uses of SGLang 0.5.23: `/generate` with `input_ids`, streamed,
`/abort_request`, `/ready`, `/server_info` and `/v1/models`, in front of an `EngineDouble`. Odd
habits of the real one are kept, because the driver must live with them: tokens are repeated in
every event unless `is_incremental`, an abort takes every request whose id begins with the given
text, `ignore_eos` ignores stop token ids as well, refusals arrive in a stream with status 200, and
a token id outside of the vocabulary kills the server.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from aiohttp import web

from dsched.testing.engine_double import (
    DoubleRank,
    DoubleRun,
    Emitted,
    EngineDouble,
    open_stream,
    write_event,
)

RESERVED_TOKENS = 6
"""Of the context; SGLang refuses prompts that come so near to it."""


class KvRooms:
    """Where prefill servers hand over KV: the network between the servers of a test."""

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self.timeout_s = timeout_s
        """After which a decode server gives a room up."""
        self._arrivals: dict[tuple[str, int, int], asyncio.Event] = {}

    def arrival(self, body: dict[str, Any]) -> asyncio.Event:
        """Set once the KV of the room is there that both halves of a pair name."""
        room = (body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"])
        return self._arrivals.setdefault(room, asyncio.Event())


class SglangDouble(EngineDouble):
    """One server on 127.0.0.1, on the running event loop. `max_model_len` is what can be used.

    As half of a split (`disaggregation_mode`) it needs the `rooms` of the other half. A prefill
    server hands over the KV of a room, if the room's remainder is the rank that computed it; a
    decode server computes no prompt.
    """

    kind: ClassVar[str] = "sglang"
    version = "0.5.23"
    is_incremental = True
    """As `--incremental-streaming-output`."""
    is_paused = False
    is_deterministic = False
    has_ready = True
    """`/ready` is there."""
    is_own_router = False
    """Sends requests to other ranks than those that are named."""
    bootstrap_port = 8_998

    def __init__(
        self,
        *,
        disaggregation_mode: str = "null",
        rooms: KvRooms | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**options)
        self.disaggregation_mode = disaggregation_mode
        self.rooms = rooms

    def routes(self) -> list[web.RouteDef]:
        """See `EngineDouble.routes`."""
        ready = [web.get("/ready", self._ready)] if self.has_ready else []
        return [
            *ready,
            web.get("/health", self._ready),
            web.get("/v1/models", self._models),
            web.get("/server_info", self._server_info),
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
        ]

    @property
    def context_tokens(self) -> int:
        return self.max_model_len + RESERVED_TOKENS

    async def _ready(self, request: web.Request) -> web.Response:
        await self.pass_by(request)
        return web.Response(status=503 if self.is_paused else 200)

    async def _models(self, request: web.Request) -> web.Response:
        await self.pass_by(request)
        card = {"id": self.served_model_name, "max_model_len": self.context_tokens}
        return web.json_response({"object": "list", "data": [card]})

    async def _server_info(self, request: web.Request) -> web.Response:
        await self.pass_by(request)
        state = {"effective_max_running_requests_per_dp": self.max_running_requests}
        return web.json_response(
            {
                "version": self.version,
                "dp_size": len(self.ranks),
                "max_total_num_tokens": self.kv_capacity_tokens,
                "max_running_requests": None,
                "enable_deterministic_inference": self.is_deterministic,
                "grammar_backend": "xgrammar",
                "disaggregation_mode": self.disaggregation_mode,
                "disaggregation_bootstrap_port": self.bootstrap_port,
                "internal_states": [state for _ in self.ranks],
            }
        )

    async def _abort(self, request: web.Request) -> web.Response:
        await self.pass_by(request)
        prefix = (await request.json())["rid"]
        for rank in self.ranks:
            for run in [*rank.running, *rank.waiting]:
                if run.request_id.startswith(prefix):
                    rank.forget(run)
                    run.output.put_nowait(None)
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        await self.pass_by(request)
        body = await self.read_body(request)
        if not body.get("stream"):
            # Only questions that are refused are asked so.
            message = (
                f"token_ids_logprob contains out-of-vocabulary token id "
                f"{body['token_ids_logprob'][0]}; valid range is [0, {self.model.vocab_size})."
            )
            self.bodies.pop()
            self.headers.pop()
            return web.json_response({"error": {"message": message}}, status=400)
        response = await open_stream(request)
        refusal = self._refusal(body)
        if refusal is not None:
            error = {"message": refusal, "type": "invalid_request_error", "code": 400}
            await write_event(response, {"error": error})
            await response.write(b"data: [DONE]\n\n")
            return response
        if max(body["input_ids"]) >= self.model.vocab_size:
            self.abandon_agents()
            self.break_connections()
            return response
        sampling = body["sampling_params"]
        room = self.max_model_len - len(body["input_ids"])
        run = DoubleRun(
            request_id=body["rid"],
            prompt=body["input_ids"],
            max_tokens=min(sampling["max_new_tokens"], room),
            min_tokens=sampling.get("min_new_tokens", 0),
            stop_token_ids=() if sampling.get("ignore_eos") else sampling.get("stop_token_ids", ()),
        )
        rank = self.ranks[self._pick_rank(body.get("routed_dp_rank"))]
        try:
            if await self._has_kv(run, body):
                rank.add(run)
                await self._stream(run, rank, body, response)
            else:
                await self._give_up(run, response, "Decode transfer failed", status_code=500)
        finally:
            rank.forget(run)
        if self.rooms is not None and self.disaggregation_mode == "prefill":
            is_fit = body["bootstrap_room"] % len(self.ranks) == rank.dp_rank
            if is_fit and run.num_output:
                self.rooms.arrival(body).set()
        return response

    async def _has_kv(self, run: DoubleRun, body: dict[str, Any]) -> bool:
        """Whether the prompt can be computed here, or its KV has come."""
        if self.rooms is None or self.disaggregation_mode != "decode":
            return True
        if body.get("bootstrap_room") is None:
            return False
        try:
            async with asyncio.timeout(self.rooms.timeout_s):
                await self.rooms.arrival(body).wait()
        except TimeoutError:
            return False
        run.num_computed = len(run.prompt) - 1
        return True

    def _pick_rank(self, routed_dp_rank: int | None) -> int:
        if routed_dp_rank is not None:
            return (routed_dp_rank + self.is_own_router) % len(self.ranks)
        loads = [len(rank.running) + len(rank.waiting) for rank in self.ranks]
        return loads.index(min(loads))

    def _refusal(self, body: dict[str, Any]) -> str | None:
        num_prompt = len(body["input_ids"])
        if num_prompt >= self.context_tokens:
            return (
                f"The input ({num_prompt} tokens) is longer than the model's context length "
                f"({self.context_tokens} tokens)."
            )
        rank = body.get("routed_dp_rank")
        if rank is not None and not 0 <= rank < len(self.ranks):
            return f"routed_dp_rank={rank} out of range [0, {len(self.ranks)})"
        runs = [run for each in self.ranks for run in (*each.running, *each.waiting)]
        if any(run.request_id == body["rid"] for run in runs):
            return f"Duplicate request ID detected: {body['rid']}"
        return None

    async def _stream(
        self, run: DoubleRun, rank: DoubleRank, body: dict[str, Any], response: web.StreamResponse
    ) -> None:
        sent: list[int] = []
        while (item := await run.output.get()) is not None:
            sent.append(item[0])
            await write_event(response, self._event(run, rank, body, sent, item))
            if item[1] is not None:
                break
        else:
            await self._give_up(run, response, "Abort in waiting queue", sent=sent)
            return
        await response.write(b"data: [DONE]\n\n")

    async def _give_up(
        self,
        run: DoubleRun,
        response: web.StreamResponse,
        message: str,
        *,
        status_code: int | None = None,
        sent: Sequence[int] = (),
    ) -> None:
        """End an answer as SGLang does that aborts it: the last token comes again."""
        finish = {"type": "abort", "message": message, "status_code": status_code}
        meta = {"id": run.request_id, "finish_reason": finish, "completion_tokens": len(sent)}
        await write_event(response, {"output_ids": list(sent[-1:]), "meta_info": meta})
        await response.write(b"data: [DONE]\n\n")

    def _event(
        self,
        run: DoubleRun,
        rank: DoubleRank,
        body: dict[str, Any],
        sent: Sequence[int],
        item: Emitted,
    ) -> dict[str, Any]:
        token, finish_reason = item
        new = sent[-1:] if self.is_incremental else sent
        meta: dict[str, Any] = {
            "id": run.request_id,
            "finish_reason": None,
            "prompt_tokens": len(run.prompt),
            "completion_tokens": len(sent),
            "cached_tokens": 0,
        }
        if finish_reason is not None:
            meta["finish_reason"] = {"type": finish_reason}
            if finish_reason == "stop":
                meta["finish_reason"]["matched"] = token
        if len(self.ranks) > 1:
            meta["dp_rank"] = rank.dp_rank
        if body.get("return_logprob"):
            num_top = body.get("top_logprobs_num", 0)
            meta["output_token_logprobs"] = [[-0.5, each, None] for each in new]
            if num_top:
                meta["output_top_logprobs"] = [self._top(each, num_top) for each in new]
        return {"text": "", "output_ids": list(new), "meta_info": meta}

    def _top(self, token: int, num_top: int) -> list[list[Any]]:
        others = [each for each in range(num_top + 1) if each != token][: num_top - 1]
        return [[-0.5 - rank, each, None] for rank, each in enumerate([token, *others])]
