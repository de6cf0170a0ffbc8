"""A control plane without engines, for tests of the front door.

Its k-th token is a pure function of (prompt, k), so a test knows every answer beforehand. Tokens
come by themselves (`run` mode) or when the test says so (`hold`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from dsched.controller.request import (
    InferenceRequest,
    ModelInfo,
    RequestError,
    RequestFinish,
    RequestStream,
)
from dsched.drivers.base import EngineCapabilities, FinishReason
from dsched.drivers.wire import TokenLogprob
from dsched.ids import RequestId

ALL_CAPABILITIES = EngineCapabilities(
    can_stream_logprobs=True,
    can_seed=True,
    can_structured_output=True,
    can_steer_dp_rank=True,
)


@dataclass(slots=True, eq=False)
class FakeRun:
    """One submitted request, driven by hand or by the fake."""

    request: InferenceRequest
    stream: RequestStream
    answer: Sequence[int]
    num_sent: int = 0
    is_over: bool = False

    @property
    def num_left(self) -> int:
        return len(self.answer) - self.num_sent

    def send(self, count: int = 1) -> None:
        """Give the next `count` tokens of the answer to the client."""
        if self.is_over:
            return
        first = self.num_sent
        ids = list(self.answer[first : first + count])
        self.num_sent += len(ids)
        wanted = self.request.sampling.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = [
                TokenLogprob(
                    token_id=each,
                    logprob=-0.5,
                    top=tuple((each + place, -0.5 - place) for place in range(wanted)),
                )
                for each in ids
            ]
        self.stream.on_tokens(first, ids, logprobs)

    def finish(self, reason: FinishReason = FinishReason.LENGTH) -> None:
        if self.is_over:
            return
        self.is_over = True
        finish = RequestFinish(
            reason=reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=self.num_sent,
        )
        self.stream.on_finish(finish)

    def fail(self, error: RequestError) -> None:
        if not self.is_over:
            self.is_over = True
            self.stream.on_error(error)


@dataclass(slots=True, eq=False)
class FakeControlPlane:
    """Implements `ControlPlane`."""

    token_ids: Sequence[int]
    """Tokens that answers are made of."""
    infos: dict[str, ModelInfo] = field(default_factory=dict)
    is_holding: bool = False
    """Requests wait for the test instead of answering themselves."""
    chunk_tokens: int = 1
    delay_s: float = 0.0
    """Time between chunks."""
    reason: str | None = None
    runs: dict[RequestId, FakeRun] = field(default_factory=dict)
    cancelled: list[RequestId] = field(default_factory=list)
    num_submitted: int = 0
    last_request: InferenceRequest | None = None

    def add_model(
        self,
        name: str,
        *,
        max_model_len: int | None = 1_024,
        vocab_size: int | None = None,
        capabilities: EngineCapabilities = ALL_CAPABILITIES,
    ) -> None:
        self.infos[name] = ModelInfo(
            name=name,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            is_available=True,
            capabilities=capabilities,
        )

    def set_available(self, name: str, *, is_available: bool) -> None:
        self.infos[name] = replace(self.infos[name], is_available=is_available)

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the first tokens of the answer to `prompt`."""
        digest = crc32(b"".join(token.to_bytes(4, "little") for token in prompt))
        return [
            self.token_ids[crc32(k.to_bytes(4, "little"), digest) % len(self.token_ids)]
            for k in range(num_tokens)
        ]

    # ControlPlane.

    def submit(self, request: InferenceRequest, stream: RequestStream) -> None:
        assert request.request_id not in self.runs, "an id in use was submitted again"
        self.num_submitted += 1
        self.last_request = request
        answer = self.answer(request.prompt_token_ids, request.sampling.max_tokens)
        run = FakeRun(request, stream, answer)
        self.runs[request.request_id] = run
        if not self.is_holding:
            asyncio.get_running_loop().call_soon(self._go_on, run)

    def cancel(self, request_id: RequestId) -> None:
        run = self.runs.pop(request_id, None)
        if run is not None:
            run.is_over = True
            self.cancelled.append(request_id)

    def models(self) -> Mapping[str, ModelInfo]:
        return self.infos

    def not_ready_reason(self) -> str | None:
        return self.reason

    def _go_on(self, run: FakeRun) -> None:
        if run.num_left:
            run.send(self.chunk_tokens)
        if run.num_left == 0:
            self.runs.pop(run.request.request_id, None)
            run.finish()
        else:
            asyncio.get_running_loop().call_later(self.delay_s, self._go_on, run)
