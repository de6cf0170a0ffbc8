"""Notice engines that have stopped without saying so.

A frozen process keeps its sockets and its health port may still answer (vllm-project/vllm#36451),
so nothing but missing progress gives it away. Evidence of progress is a token of any attempt on the
engine, or a load report with a new step. The limit follows the phase: an engine that has begun to
emit must go on within `decode_timeout_ns`; one that only prefills gets a bound that grows with the
prompt tokens it was given. Until the engine has shown how fast it is, that is a configured time and
a configured price of a token; then it is `decode_timeout_ns` and `prefill_factor` times what its
own cost model (`prefill_pace`) expects for these prompts.

A single attempt without progress on an engine that is otherwise alive may just be preempted; it has
a limit of its own, much longer.

When the sweep itself comes late (dsched was stopped, the machine slept, the clock jumped), nobody
can tell who stood still: the lost time is not counted against anyone.

State: mutable, owned by the controller. A sweep is O(attempts); nothing is done for a token.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from dsched.costs.prefill import PrefillCostModel
from dsched.faults.prefill_pace import PrefillPace
from dsched.ids import EngineId

SWEEP_INTERVAL_NS = 100_000_000
"""Between two looks. Longer: freezes are noticed later. Shorter: work for nothing."""
LATE_FACTOR = 10
"""A sweep that comes after so many intervals was held up itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLimits:
    """How long what may stand still, in nanoseconds."""

    decode_timeout_ns: int = 3_000_000_000
    """Below: a long step or a slow network looks like a freeze. Above: clients wait longer."""
    prefill_timeout_ns: int = 10_000_000_000
    """The part of the prefill bound that does not depend on the prompt."""
    prefill_token_ns: int = 1_000_000
    """What the bound grows by for each prompt token on the engine; many times its real cost."""
    prefill_factor: float = 4.0
    """What a learned estimate is multiplied by. Below: a prompt with less of its prefix cached
    than usual looks like a freeze. Above: a freeze amid long prompts is noticed late."""
    stream_timeout_ns: int = 60_000_000_000
    """For one attempt while its engine goes on. Below: preempted requests are moved needlessly."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledEngine:
    """An engine that should have progressed."""

    engine_id: EngineId
    silent_ns: int
    limit_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StallPlan:
    """Whom to take for frozen now."""

    engines: tuple[StalledEngine, ...] = ()
    """By id. Their attempts are not listed again below."""
    attempts: tuple[Hashable, ...] = ()
    """Attempts that stand still on engines that go on, in the order they were begun."""


class _Watched:
    __slots__ = (
        "begin_ns",
        "engine_id",
        "lone_start",
        "num_prompt_tokens",
        "num_tokens",
        "prefill_ns",
        "progress_ns",
    )

    def __init__(self, engine_id: EngineId, num_prompt_tokens: int, now_ns: int) -> None:
        self.engine_id = engine_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.progress_ns = now_ns
        self.begin_ns = now_ns
        self.lone_start: int | None = None
        """Number of the engine's attempts until and with this one, if it met an idle engine."""
        self.prefill_ns: int | None = None
        """Until its first token, if it had the engine for itself."""


class ProgressWatch:
    """Who has progressed when."""

    def __init__(
        self,
        limits: ProgressLimits | None = None,
        *,
        sweep_interval_ns: int = SWEEP_INTERVAL_NS,
        make_prefill_model: Callable[[], PrefillCostModel] | None = None,
    ) -> None:
        """`make_prefill_model` gives each engine a cost model to learn its pace with; without it,
        prefill bounds are those of `limits`."""
        if sweep_interval_ns <= 0:
            raise ValueError(f"sweep_interval_ns is {sweep_interval_ns}; it must be positive")
        self.limits = limits or ProgressLimits()
        self.sweep_interval_ns = sweep_interval_ns
        self._watched: dict[Hashable, _Watched] = {}
        self._num_on: dict[EngineId, int] = {}
        self._num_begun: dict[EngineId, int] = {}
        self._make_prefill_model = make_prefill_model
        self._paces: dict[EngineId, PrefillPace] = {}
        self._progress_ns: dict[EngineId, int] = {}
        self._last_sweep_ns: int | None = None
        self.forgiven_ns = 0
        """Time in which dsched itself was held up, and nobody was suspected for it."""

    def begin(
        self, key: Hashable, *, engine_id: EngineId, num_prompt_tokens: int, now_ns: int
    ) -> None:
        """Watch an attempt from now on."""
        if key in self._watched:
            raise ValueError(f"attempt {key!r} is watched already")
        watched = self._watched[key] = _Watched(engine_id, num_prompt_tokens, now_ns)
        self._num_begun[engine_id] = self._num_begun.get(engine_id, 0) + 1
        if not self._num_on.get(engine_id):
            self._progress_ns[engine_id] = now_ns  # an idle engine had nothing to show
            watched.lone_start = self._num_begun[engine_id]
        self._num_on[engine_id] = self._num_on.get(engine_id, 0) + 1

    def end(self, key: Hashable) -> None:
        """Watch it no longer. Unknown keys are ignored."""
        watched = self._watched.pop(key, None)
        if watched is not None:
            self._num_on[watched.engine_id] -= 1

    def note_cached(self, key: Hashable, num_cached_tokens: int) -> None:
        """An attempt ended well: what its prompt found cached makes its first token a sample."""
        watched = self._watched.get(key)
        if watched is None or watched.prefill_ns is None or self._make_prefill_model is None:
            return
        pace = self._paces.get(watched.engine_id)
        if pace is None:
            pace = self._paces[watched.engine_id] = PrefillPace(self._make_prefill_model())
        pace.observe(
            watched.prefill_ns,
            num_computed_tokens=watched.num_prompt_tokens - num_cached_tokens,
            num_cached_tokens=num_cached_tokens,
        )

    def note_prefilled(self, key: Hashable, *, num_cached_tokens: int, now_ns: int) -> int | None:
        """The half of a pair that computes a prompt ended well, which is its first token.

        Returns how long it took; `None` where that says nothing of the prompt, because others ran
        on the engine or dsched itself was held up.
        """
        watched = self._watched.get(key)
        if watched is None or self._late_ns(now_ns):
            return None
        self._note_first_token(watched, now_ns)
        self.note_cached(key, num_cached_tokens)
        return watched.prefill_ns

    def note_step(self, engine_id: EngineId, now_ns: int) -> None:
        """The engine reported a step that it had not reported before."""
        self._progress_ns[engine_id] = now_ns

    def next_sweep_ns(self, now_ns: int) -> int | None:
        """When `sweep` is due; `None` while nothing runs."""
        if not self._watched:
            self._last_sweep_ns = None
            return None
        if self._last_sweep_ns is None:
            self._last_sweep_ns = now_ns
        return self._last_sweep_ns + self.sweep_interval_ns

    def sweep(self, now_ns: int, num_tokens_of: Callable[[Hashable], int]) -> StallPlan:
        """Take note of progress since the last sweep, and name who made none for too long.

        Args:
            now_ns: the present.
            num_tokens_of: tokens that the attempt with this key has emitted so far.
        """
        late_ns = self._late_ns(now_ns)
        self._last_sweep_ns = now_ns
        if late_ns:
            self.forgiven_ns += max(0, late_ns)
            self._forgive(late_ns, now_ns)
        is_decoding: dict[EngineId, bool] = {}
        prompt_tokens: dict[EngineId, list[int]] = {}
        for key, watched in self._watched.items():
            engine_id = watched.engine_id
            num_tokens = num_tokens_of(key)
            if num_tokens != watched.num_tokens:
                if watched.num_tokens == 0 and not late_ns:
                    self._note_first_token(watched, now_ns)
                watched.num_tokens = num_tokens
                watched.progress_ns = now_ns
                self._progress_ns[engine_id] = now_ns
            is_decoding[engine_id] = is_decoding.get(engine_id, False) or num_tokens > 0
            if num_tokens == 0:
                prompt_tokens.setdefault(engine_id, []).append(watched.num_prompt_tokens)
        return self._find(now_ns, is_decoding, prompt_tokens)

    def _note_first_token(self, watched: _Watched, now_ns: int) -> None:
        if watched.lone_start == self._num_begun[watched.engine_id]:
            watched.prefill_ns = now_ns - watched.begin_ns

    def _prefill_limit_ns(self, engine_id: EngineId, prompt_tokens: list[int]) -> int:
        limits = self.limits
        pace = self._paces.get(engine_id)
        estimate_ns = pace.estimate_ns(prompt_tokens) if pace is not None else None
        if estimate_ns is not None:
            return limits.decode_timeout_ns + int(limits.prefill_factor * estimate_ns)
        configured_ns = limits.prefill_timeout_ns + limits.prefill_token_ns * sum(prompt_tokens)
        return max(limits.decode_timeout_ns, configured_ns)

    def _find(
        self,
        now_ns: int,
        is_decoding: dict[EngineId, bool],
        prompt_tokens: dict[EngineId, list[int]],
    ) -> StallPlan:
        limits = self.limits
        stalled = []
        for engine_id in sorted(is_decoding):
            silent_ns = now_ns - self._progress_ns[engine_id]
            limit_ns = limits.decode_timeout_ns
            if not is_decoding[engine_id] and silent_ns > limit_ns:
                limit_ns = self._prefill_limit_ns(engine_id, prompt_tokens[engine_id])
            if silent_ns > limit_ns:
                stalled.append(
                    StalledEngine(engine_id=engine_id, silent_ns=silent_ns, limit_ns=limit_ns)
                )
        frozen = {each.engine_id for each in stalled}
        attempts = tuple(
            key
            for key, watched in self._watched.items()
            if watched.num_tokens > 0
            and watched.engine_id not in frozen
            and now_ns - watched.progress_ns > limits.stream_timeout_ns
        )
        return StallPlan(engines=tuple(stalled), attempts=attempts)

    def _late_ns(self, now_ns: int) -> int:
        if self._last_sweep_ns is None:
            return 0
        since_ns = now_ns - self._last_sweep_ns
        if 0 <= since_ns <= LATE_FACTOR * self.sweep_interval_ns:
            return 0
        return since_ns

    def _forgive(self, late_ns: int, now_ns: int) -> None:
        """Move every mark by the time that was lost, never beyond the present."""
        for watched in self._watched.values():
            watched.progress_ns = min(now_ns, watched.progress_ns + late_ns)
        for engine_id, progress_ns in self._progress_ns.items():
            self._progress_ns[engine_id] = min(now_ns, progress_ns + late_ns)
