"""Engines that say what a test wrote down, token by token, on virtual time.

A `ScriptedEngine` implements the driver contract on a `SimLoop`. Its model knows by heart one
answer for each prompt, and goes on with it wherever a longer prompt has already got to, as a greedy
model does. It can be killed, frozen and woken up at any token; a woken engine also sends what it
still had for attempts that were taken from it, which the contract forbids and real ones do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dsched.drivers.base import (
    AttemptFinish,
    AttemptSink,
    EngineCapabilities,
    EngineDescription,
    EngineListener,
    FinishReason,
)
from dsched.drivers.wire import GenerateCommand
from dsched.errors import EngineUnreachableError
from dsched.ids import AttemptId, EngineId
from dsched.sim.loop import SimLoop

MS = 1_000_000
PREFILL_NS = 30 * MS
STEP_NS = 10 * MS


@dataclass(slots=True)
class _Attempt:
    sink: AttemptSink
    max_tokens: int
    position: int
    """Of the next token in the script."""
    script: tuple[int, ...]
    num_tokens: int = 0
    is_over: bool = False


@dataclass(slots=True, kw_only=True)
class ScriptedEngine:
    """One engine. `on_token(engine, n)` is called before the script's n-th token is sent."""

    engine_id: EngineId
    loop: SimLoop
    scripts: Mapping[tuple[int, ...], Sequence[int]]
    """Answer by prompt; an answer that is shorter than `max_tokens` ends by itself."""
    model: str = "m"
    on_token: Callable[["ScriptedEngine", int], None] = lambda *_: None
    on_prefill: Callable[["ScriptedEngine"], None] = lambda _: None
    listener: EngineListener | None = None
    num_aborted: int = 0
    _attempts: dict[AttemptId, _Attempt] = field(default_factory=dict)
    _is_dead: bool = False
    _is_frozen: bool = False

    # ---- Driver

    def start(self, listener: EngineListener) -> None:
        self.listener = listener
        self.loop.call_at(self.loop.now_ns(), self._say_up)

    def generate(self, command: GenerateCommand, sink: AttemptSink) -> None:
        attempt_id = AttemptId(command.attempt_id)
        if self._is_dead:
            error = EngineUnreachableError("connection refused")
            self._soon(lambda: sink.on_failure(attempt_id, error))
            return
        prompt = tuple(command.prompt_token_ids)
        base = next(each for each in self.scripts if prompt[: len(each)] == each)
        script = tuple(self.scripts[base])
        position = len(prompt) - len(base)
        if prompt[len(base) :] != script[:position]:
            raise ValueError(f"attempt {attempt_id} begins with tokens that nobody emitted")
        attempt = _Attempt(sink, command.sampling.max_tokens, position, script)
        self._attempts[attempt_id] = attempt
        self.loop.call_at(self.loop.now_ns() + PREFILL_NS // 2, lambda: self.on_prefill(self))
        self._next(attempt_id, PREFILL_NS)

    def abort(self, attempt_id: AttemptId) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and not attempt.is_over:
            attempt.is_over = True
            self.num_aborted += 1
            finish = AttemptFinish(reason=FinishReason.ABORT)
            self._soon(lambda: attempt.sink.on_finish(attempt_id, finish))

    def close(self) -> None:
        for attempt_id in list(self._attempts):
            self.abort(attempt_id)

    # ---- faults

    def kill(self) -> None:
        """Break every connection. What was sent before is still read."""
        self._is_dead = True
        attempts, self._attempts = self._attempts, {}

        def tell() -> None:
            if self.listener is not None:
                self.listener.on_engine_down(self.engine_id, "killed")
            for attempt_id, attempt in attempts.items():
                if not attempt.is_over:
                    attempt.is_over = True
                    error = EngineUnreachableError("connection reset")
                    attempt.sink.on_failure(attempt_id, error)

        self._soon(tell)

    def freeze(self) -> None:
        self._is_frozen = True

    def thaw(self) -> None:
        """Go on, with what was taken away as well."""
        self._is_frozen = False
        for attempt_id, attempt in list(self._attempts.items()):
            if attempt.is_over and attempt.position < len(attempt.script):
                attempt.sink.on_tokens(attempt_id, attempt.script[attempt.position :][:3], None)
            self._next(attempt_id, STEP_NS)

    # ---- steps

    def _next(self, attempt_id: AttemptId, delay_ns: int) -> None:
        self.loop.call_at(self.loop.now_ns() + delay_ns, lambda: self._step(attempt_id))

    def _step(self, attempt_id: AttemptId) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.is_over or self._is_frozen or self._is_dead:
            return
        if self._finish_if_over(attempt_id, attempt):
            return
        self.on_token(self, attempt.position)
        if self._is_dead or self._is_frozen:
            return
        token = attempt.script[attempt.position]
        attempt.position += 1
        attempt.num_tokens += 1
        attempt.sink.on_tokens(attempt_id, (token,), None)
        self._next(attempt_id, STEP_NS)

    def _finish_if_over(self, attempt_id: AttemptId, attempt: _Attempt) -> bool:
        is_full = attempt.num_tokens == attempt.max_tokens
        if not is_full and attempt.position < len(attempt.script):
            return False
        self.on_token(self, attempt.position)
        if not (self._is_dead or self._is_frozen):
            attempt.is_over = True
            reason = FinishReason.LENGTH if is_full else FinishReason.STOP
            attempt.sink.on_finish(attempt_id, AttemptFinish(reason=reason))
        return True

    def _say_up(self) -> None:
        if self.listener is not None:
            self.listener.on_engine_up(
                EngineDescription(
                    engine_id=self.engine_id,
                    kind="sim",
                    model=self.model,
                    max_model_len=10_000,
                    vocab_size=None,
                    num_dp_ranks=1,
                    kv_capacity_tokens=100_000,
                    max_running_requests=64,
                    capabilities=EngineCapabilities(can_structured_output=True),
                )
            )

    def _soon(self, call: Callable[[], None]) -> None:
        self.loop.call_at(self.loop.now_ns(), call)
