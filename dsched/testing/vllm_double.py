"""A stand-in for a vLLM server: the same HTTP shape and the same agent, without a model.

It serves what dsched's vLLM driver uses of vLLM 0.32: `/v1/completions` with token ids, streamed,
`/v1/models`, `/health`, `/version` and `/metrics`, in front of an `EngineDouble`.

Faults of its own: `kill_core` (the API server lives on for a moment and says that its engine core
has died), and with `core_status` set, as by `--enable-fault-tolerance`, `break_group`: the core
aborts its requests and waits for `/fault_tolerance/apply`.
"""

import asyncio
from typing import Any, ClassVar, Final

from aiohttp import web

from dsched.testing.engine_double import (
    DoubleRank,
    DoubleRun,
    EngineDouble,
    open_stream,
    write_event,
)

ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class VllmDouble(EngineDouble):
    """One server on 127.0.0.1, on the running event loop."""

    kind: ClassVar[str] = "vllm"
    version = "0.32.0"
    core_status: dict[str, Any] | None = None
    """What `/fault_tolerance/status` lists; `None` answers 404, as without fault tolerance."""
    can_heal = True
    num_repairs = 0
    """Times that `/fault_tolerance/apply` was called."""
    kept_kv: dict[str, list[int]] | None = None
    """Prompts whose KV waits for another engine, as behind a connector: share one between doubles.
    `None` has no connector."""
    num_prompt_tokens_loaded = 0
    """KV of so many prompt tokens came from another engine."""
    _is_core_dead = False
    _is_healed: asyncio.Event | None = None

    def routes(self) -> list[web.RouteDef]:
        """See `EngineDouble.routes`."""
        return [
            web.get("/health", self._health),
            web.get("/version", self._version),
            web.get("/v1/models", self.models_answer),
            web.get("/metrics", self._metrics),
            web.post("/v1/completions", self._completions),
            web.get("/fault_tolerance/status", self._fault_status),
            web.post("/fault_tolerance/apply", self._repair),
        ]

    def kill_core(self) -> None:
        """Lose the engine core: open streams end with vLLM's error event, `/health` says 503."""
        self._is_core_dead = True
        self.abandon_agents()
        for rank in self.ranks:
            rank.drop_all()

    def break_group(self, status: str = "unhealthy", fault: str = "RuntimeError") -> None:
        """Abort all requests and wait to be repaired; `/health` goes on answering 200."""
        self.core_status = {"id": 0, "status": status, "fault_info": fault}
        self._is_healed = asyncio.Event()
        for rank in self.ranks:
            rank.drop_all()

    async def _fault_status(self, request: web.Request) -> web.Response:
        await self.pass_by(request)
        if self.core_status is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        document = {"schema_version": 1, "total_engines": 1, "engines": [self.core_status]}
        return web.json_response(document)

    async def _repair(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.core_status is None or body != {"instruction": "retry", "params": {}}:
            return web.json_response({"detail": "Invalid instruction"}, status=400)
        self.num_repairs += 1
        request_id = f"ft-{self.num_repairs}"
        asyncio.get_running_loop().call_later(0.05, self._end_repair, request_id)
        return web.json_response({"message": "accepted", "request_id": request_id}, status=202)

    def _end_repair(self, request_id: str) -> None:
        if self.core_status is None:
            return
        if self.core_status["status"] == "unhealthy" and self.can_heal:
            self.core_status = {"id": 0, "status": "healthy"}
            if self._is_healed is not None:
                self._is_healed.set()
        else:
            reason = f"Rejecting retry: status is {self.core_status['status']}"
            self.core_status |= {"last_ft_request_id": request_id, "ft_error": reason}

    async def _health(self, request: web.Request) -> web.Response:
        await self.pass_by(request)
        return web.Response(status=503 if self._is_core_dead else 200)

    async def _version(self, request: web.Request) -> web.Response:
        await self.pass_by(request)
        return web.json_response({"version": self.version})

    async def _metrics(self, request: web.Request) -> web.Response:
        await self.pass_by(request)
        labels = f'engine="0",kv_cache_size_tokens="{self.kv_capacity_tokens}"'
        return web.Response(text=f"# TYPE x gauge\nvllm:cache_config_info{{{labels}}} 1.0\n")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        await self.pass_by(request)
        body = await self.read_body(request)
        refusal = self._refusal(body)
        if refusal is not None:
            status, message = refusal
            error = {"message": message, "type": "BadRequestError", "code": status}
            return web.json_response({"error": error}, status=status)
        run = DoubleRun(
            request_id=body["request_id"],
            prompt=body["prompt"],
            max_tokens=min(body["max_tokens"], self.max_model_len - len(body["prompt"])),
            min_tokens=body.get("min_tokens", 0),
            stop_token_ids=body.get("stop_token_ids", ()),
        )
        if self._is_healed is not None:
            await self._is_healed.wait()  # the core takes requests in, and computes none
        rank = self.ranks[int(request.headers.get("x-data-parallel-rank", 0))]
        try:
            num_cached = self._load_kv(body)
        except KeyError:
            error = {"message": "KV load failure", "type": "InternalServerError", "code": 500}
            return web.json_response({"error": error}, status=500)
        run.num_computed = num_cached
        rank.add(run)
        if not body["stream"]:
            return await self._answer_whole(run, rank, body)
        try:
            response = await open_stream(request)
            await self._stream(run, body, response, num_cached=num_cached)
        finally:
            rank.forget(run)
        return response

    def _load_kv(self, body: dict[str, Any]) -> int:
        """Take over the KV that a prefill engine keeps; `KeyError` if it is gone."""
        params = body.get("kv_transfer_params") or {}
        if self.kept_kv is None or not params.get("do_remote_prefill"):
            return 0
        prompt = self.kept_kv.pop(params["remote_request_id"])
        if prompt != body["prompt"]:
            raise KeyError("the KV of another prompt")
        self.num_prompt_tokens_loaded += len(prompt) - 1
        return len(prompt) - 1  # the last token is computed for its result

    async def _answer_whole(
        self, run: DoubleRun, rank: DoubleRank, body: dict[str, Any]
    ) -> web.Response:
        """Answer without a stream; what waits for another engine is named."""
        token_ids = []
        finish_reason: str | None = None
        try:
            while finish_reason is None:
                item = await run.output.get()
                if item is None:
                    return web.json_response(self._broken_off(), status=500)
                token, finish_reason = item
                token_ids.append(token)
        finally:
            rank.forget(run)
        params = None
        if self.kept_kv is not None and (body.get("kv_transfer_params") or {}).get(
            "do_remote_decode"
        ):
            self.kept_kv[run.request_id] = run.prompt
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_request_id": run.request_id,
            }
        choice = {"index": 0, "text": "", "finish_reason": finish_reason, "token_ids": token_ids}
        usage = {"prompt_tokens": len(run.prompt), "prompt_tokens_details": None}
        answer = {"choices": [choice], "usage": usage, "kv_transfer_params": params}
        return web.json_response(answer)

    def _refusal(self, body: dict[str, Any]) -> tuple[int, str] | None:
        if self._is_core_dead:
            return 500, ENGINE_DEAD
        if body.get("model", self.served_model_name) != self.served_model_name:
            return 404, f"The model `{body['model']}` does not exist."
        prompt = body["prompt"]
        if not len(prompt) < self.max_model_len:
            return 400, f"{len(prompt)} prompt tokens exceed the {self.max_model_len} of the model"
        if max(prompt) >= self.model.vocab_size:
            return 400, f"Token id {max(prompt)} is out of vocabulary"
        return None

    async def _stream(
        self,
        run: DoubleRun,
        body: dict[str, Any],
        response: web.StreamResponse,
        *,
        num_cached: int,
    ) -> None:
        is_first = True
        while (item := await run.output.get()) is not None:
            token, finish_reason = item
            choice: dict[str, Any] = {
                "index": 0,
                "text": "",
                "finish_reason": finish_reason,
                "token_ids": [token],
            }
            if is_first:
                choice["prompt_token_ids"] = run.prompt
                is_first = False
            if body.get("logprobs") is not None:
                choice["logprobs"] = self._logprobs(token, body["logprobs"])
            await write_event(response, {"id": f"cmpl-{run.request_id}", "choices": [choice]})
            if finish_reason is not None:
                break
        else:
            await write_event(response, self._broken_off())
        if body.get("stream_options", {}).get("include_usage") and item is not None:
            details = {"cached_tokens": num_cached}
            usage = {"prompt_tokens": len(run.prompt), "prompt_tokens_details": details}
            await write_event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    def _broken_off(self) -> dict[str, Any]:
        if self.core_status is None or self._is_core_dead:
            return {"error": {"message": ENGINE_DEAD, "code": 500}}
        choice = {"index": 0, "text": "", "finish_reason": "abort", "token_ids": []}
        return {"choices": [choice]}

    def _logprobs(self, token: int, num_top: int) -> dict[str, Any]:
        others = [each for each in range(num_top + 1) if each != token][:num_top]
        top = {f"token_id:{each}": -0.5 - rank for rank, each in enumerate([token, *others])}
        name = f"token_id:{token}"
        return {"tokens": [name], "token_logprobs": [-0.5], "top_logprobs": [top]}
