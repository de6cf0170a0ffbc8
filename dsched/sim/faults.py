"""The real controller while everything breaks: one seed, one run, every promise checked.

Engines crash and come back, freeze and wake up, slow down and lose DP ranks; connections break in
the middle of an answer; load reports are lost, late, repeated and overtake each other; tokens come
late, also long after their attempt is over; engines fall silent all at once (what a registry outage
looks like); operators drain, clients leave. Only engines, clock and host are simulated.

After every tick the promises are checked (`_Checker`): each client has a prefix of the one right
answer, hears exactly one end and nothing after it; no request goes to an engine that is down;
silence alone never empties a pool; the controller's own invariants hold. Then faults stop and
everything must finish: what does not is "no progress".

`run_faults(seed)` is a function of its seed; `FaultReport.digest` covers what every client heard
and when.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from dsched.controller import Controller, ControllerSettings, EngineSpec, HandoffGap, PoolSpec
from dsched.controller.request import InferenceRequest, RequestError, RequestFinish
from dsched.controller.settings import MigrationMode, MigrationSettings
from dsched.costs.affine import AffineStepCost
from dsched.drivers.base import (
    AttemptFinish,
    AttemptSink,
    EngineDescription,
    EngineListener,
    FinishReason,
)
from dsched.drivers.wire import GenerateCommand, RankReport, SamplingParams, TokenLogprob
from dsched.errors import DriverError, DschedError, EngineUnreachableError, InvariantError
from dsched.faults import MembershipView, MemoryJournal
from dsched.faults.progress import ProgressLimits
from dsched.ids import AttemptId, AttemptIds, DpRank, EngineId, RankId, RequestId
from dsched.rng import stream
from dsched.sim.cluster import SimHost, no_greetings
from dsched.sim.driver import SimDriver
from dsched.sim.engine import SimEngine, SimEngineConfig
from dsched.sim.kv_store import KvLinkConfig, SimKvStore
from dsched.sim.loop import SimLoop
from dsched.sim.model import SimModel
from dsched.states import Evidence, PoolRole, RankState
from dsched.trace import Recorder

MS = 1_000_000
S = 1_000_000_000
MODEL = "sim"
PATIENCE_S = 300
"""Simulated time after the last fault within which everything must have ended."""
UNSERVED_CODES = ("no_engine", "overloaded")
"""How a request may end before its first token while nothing is up."""


class SafetyError(DschedError):
    """A promise was broken. The message names the seed that shows it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What goes wrong, and how often."""

    num_engines: int = 3
    num_prefill_engines: int = 0
    """Above 0: these compute prompts in a pool of their own, and the others decode."""
    migration: MigrationMode = "off"
    """Whether running requests move between ranks besides."""
    num_ranks: int = 2
    num_requests: int = 40
    duration_s: float = 20.0
    """Time in which requests come and things break."""
    faults_per_s: float = 1.0
    report_loss_share: float = 0.1
    report_repeat_share: float = 0.1
    max_report_delay_ms: int = 400
    max_token_delay_ms: int = 60
    broken_connection_share: float = 0.002
    """Of token chunks."""
    zombie_share: float = 0.1
    """Of attempts that send tokens after their end."""

    def __post_init__(self) -> None:
        for name in ("num_engines", "num_ranks", "num_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.num_prefill_engines < 0:
            raise ValueError(f"num_prefill_engines {self.num_prefill_engines} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """What one seed did."""

    seed: int
    digest: str
    num_requests: int
    num_finished: int
    num_refused: int
    """Ended with an error because they could not be continued honestly."""
    num_unserved: int
    """Ended with an error before their first token, because nothing was up."""
    num_cancelled: int
    num_tokens: int
    num_tokens_lost: int
    num_tokens_repeated: int
    num_fenced_tokens: int
    handoffs: dict[str, int]
    """By method."""
    prefills: dict[str, int]
    """Prompts of separate pools by what became of them."""
    faults: dict[str, int]
    """By kind."""
    max_gap_s: float
    """Longest pause of a continued answer."""
    end_s: float
    """Simulated time at the end."""


def run_faults(
    seed: int, plan: FaultPlan | None = None, *, recorder: Recorder | None = None
) -> FaultReport:
    """Run one seed to its end; `recorder` hears every decision.

    Raises:
        SafetyError: a promise was broken, or something never finished.
    """
    run = _Run(seed, plan or FaultPlan(), recorder)
    try:
        return run.run()
    except (InvariantError, SafetyError) as error:
        now_s = run.loop.now_ns() / S
        raise SafetyError(f"seed {seed}, at {now_s:.3f} s: {error}") from error


class _Client:
    """One request: what it must hear, and what it has heard."""

    def __init__(self, run: "_Run", index: int, request: InferenceRequest) -> None:
        self._run = run
        self.index = index
        self.request = request
        self.expected = run.model.stream(
            request.prompt_token_ids, request.sampling.max_tokens, request.sampling
        )
        self.tokens: list[int] = []
        self.ends: list[str] = []
        self.is_cancelled = False

    @property
    def has_ended(self) -> bool:
        return bool(self.ends) or self.is_cancelled

    def on_tokens(
        self,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,  # noqa: ARG002
    ) -> None:
        name = self.request.request_id
        if self.has_ended:
            raise SafetyError(f"request {name}: a token after its end")
        if first_index > len(self.tokens):
            self._run.num_tokens_lost += first_index - len(self.tokens)
            raise SafetyError(f"request {name}: tokens {len(self.tokens)}..{first_index} are lost")
        if first_index < len(self.tokens):
            self._run.num_tokens_repeated += len(self.tokens) - first_index
            raise SafetyError(f"request {name}: token {first_index} comes again")
        self.tokens += token_ids
        self._run.note("tokens", self.index, first_index, *token_ids)
        if tuple(self.tokens) != self.expected[: len(self.tokens)]:
            raise SafetyError(f"request {name}: token {first_index} or one after it is wrong")

    def on_finish(self, finish: RequestFinish) -> None:
        self._end(f"finish:{finish.reason.value}")
        name, sampling = self.request.request_id, self.request.sampling
        if tuple(self.tokens) != self.expected:
            raise SafetyError(f"request {name}: {len(self.tokens)} of {len(self.expected)} tokens")
        counts = (finish.num_prompt_tokens, finish.num_output_tokens)
        if counts != (len(self.request.prompt_token_ids), len(self.tokens)):
            raise SafetyError(f"request {name}: usage says {counts}")
        is_full = len(self.tokens) == sampling.max_tokens
        if (finish.reason is FinishReason.LENGTH) != is_full:
            raise SafetyError(f"request {name}: ended by {finish.reason} at {len(self.tokens)}")
        if finish.num_handoffs and finish.guarantee not in ("exact", "continuation"):
            raise SafetyError(f"request {name}: continued, and told {finish.guarantee!r}")

    def on_error(self, error: RequestError) -> None:
        self._end(f"error:{error.code}")
        if error.guarantee == "refused":
            self._run.num_refused += 1
        elif error.code in UNSERVED_CODES and not self.tokens:
            self._run.num_unserved += 1
        else:
            name = self.request.request_id
            raise SafetyError(f"request {name}: {error.code} after {len(self.tokens)} tokens")

    def _end(self, how: str) -> None:
        self.ends.append(how)
        self._run.note(how, self.index)
        if len(self.ends) > 1 or self.is_cancelled:
            raise SafetyError(f"request {self.request.request_id}: ends {self.ends}")


class _LateSink:
    """Brings an attempt's answer late, in order, and now and then breaks its connection."""

    def __init__(self, driver: "_ChaosDriver", attempt_id: AttemptId, sink: AttemptSink) -> None:
        self._driver = driver
        self._attempt_id = attempt_id
        self._sink = sink
        self._due_ns = 0
        self._is_over = False
        self._last: tuple[int, ...] = ()

    def on_tokens(
        self,
        attempt_id: AttemptId,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,  # noqa: ARG002
    ) -> None:
        chaos = self._driver.chaos
        if chaos.happens(chaos.plan.broken_connection_share):
            self._driver.count("broken_connection")
            error = EngineUnreachableError("connection reset")
            self._later(lambda: self._end(lambda: self._sink.on_failure(attempt_id, error)))
            self._driver.inner.abort(attempt_id)
            return
        self._last = tuple(token_ids)
        self._later(partial(self._give, attempt_id, list(token_ids)))

    def on_finish(self, attempt_id: AttemptId, finish: AttemptFinish) -> None:
        self._later(lambda: self._end(lambda: self._sink.on_finish(attempt_id, finish)))

    def on_failure(self, attempt_id: AttemptId, error: DriverError) -> None:
        self._later(lambda: self._end(lambda: self._sink.on_failure(attempt_id, error)))

    def _give(self, attempt_id: AttemptId, token_ids: list[int]) -> None:
        if not self._is_over:
            self._sink.on_tokens(attempt_id, token_ids, None)

    def _end(self, tell: Callable[[], None]) -> None:
        if self._is_over:
            return
        self._is_over = True
        tell()
        chaos = self._driver.chaos
        if self._last and chaos.happens(chaos.plan.zombie_share):
            # What an engine sends that was thought dead: old tokens of an attempt that is over.
            due_ns = chaos.loop.now_ns() + chaos.draw_ns(5_000)
            zombie = partial(self._sink.on_tokens, self._attempt_id, self._last, None)
            chaos.loop.call_at(due_ns, zombie)
            self._driver.count("zombie_tokens")

    def _later(self, call: Callable[[], None]) -> None:
        chaos = self._driver.chaos
        delay_ns = chaos.draw_ns(chaos.plan.max_token_delay_ms)
        self._due_ns = max(self._due_ns, chaos.loop.now_ns() + delay_ns)
        chaos.loop.call_at(self._due_ns, call)


class _LateListener:
    """Loses, delays and repeats load reports, so that they overtake each other."""

    def __init__(self, chaos: "_Run", listener: EngineListener) -> None:
        self._chaos = chaos
        self._listener = listener

    def on_engine_up(self, description: EngineDescription) -> None:
        self._listener.on_engine_up(description)

    def on_engine_down(
        self, engine_id: EngineId, reason: str, evidence: Evidence = Evidence.SOCKET
    ) -> None:
        self._listener.on_engine_down(engine_id, reason, evidence)

    def on_rank_lost(self, rank_id: RankId, reason: str) -> None:
        self._listener.on_rank_lost(rank_id, reason)

    def on_rank_back(self, rank_id: RankId) -> None:
        self._listener.on_rank_back(rank_id)

    def on_report(self, report: RankReport) -> None:
        chaos = self._chaos
        if chaos.happens(chaos.plan.report_loss_share):
            return
        copies = 1 + chaos.happens(chaos.plan.report_repeat_share)
        for _ in range(copies):
            due_ns = chaos.loop.now_ns() + chaos.draw_ns(chaos.plan.max_report_delay_ms)
            chaos.loop.call_at(due_ns, partial(self._listener.on_report, report))


class _ChaosDriver:
    """A `Driver` over a simulated engine whose messages suffer."""

    def __init__(self, chaos: "_Run", inner: SimDriver) -> None:
        self.chaos = chaos
        self.inner = inner

    @property
    def engine_id(self) -> EngineId:
        return self.inner.engine_id

    def start(self, listener: EngineListener) -> None:
        self.inner.start(_LateListener(self.chaos, listener))

    def generate(self, command: GenerateCommand, sink: AttemptSink) -> None:
        state = self.chaos.controller.membership.engines[self.engine_id].state
        if state >= RankState.DRAINING:
            raise SafetyError(f"attempt {command.attempt_id} goes to {self.engine_id}: {state!r}")
        attempt_id = AttemptId(command.attempt_id)
        self.inner.generate(command, _LateSink(self, attempt_id, sink))

    def abort(self, attempt_id: AttemptId) -> None:
        self.inner.abort(attempt_id)

    def close(self) -> None:
        self.inner.close()

    def count(self, kind: str) -> None:
        self.chaos.count(kind)


@dataclass(slots=True)
class _Observer:
    """Keeps the longest pause."""

    max_gap_ns: int = 0
    views: list[MembershipView] = field(default_factory=list)

    def on_handoff(self, method: str, gap: HandoffGap) -> None:  # noqa: ARG002
        if min(gap.detect_ns, gap.dispatch_ns, gap.prefill_ns) < 0:
            raise SafetyError(f"a part of a gap is negative: {gap}")
        self.max_gap_ns = max(self.max_gap_ns, gap.total_ns)

    def on_membership_changed(self, view: MembershipView) -> None:
        if self.views and view.epoch <= self.views[-1].epoch:
            raise SafetyError(f"epoch {view.epoch} after {self.views[-1].epoch}")
        self.views = [view]


class _Run:
    """One seed."""

    def __init__(self, seed: int, plan: FaultPlan, recorder: Recorder | None) -> None:
        self.seed = seed
        self._recorder = recorder
        self.plan = plan
        self.loop = SimLoop()
        self.model = SimModel(vocab_size=256)
        self._rng = stream(seed, "faults")
        self._messages = stream(seed, "messages")
        self._trace = hashlib.sha256()
        self.faults: dict[str, int] = {}
        self.num_refused = self.num_unserved = self.num_cancelled = 0
        self.num_tokens_lost = self.num_tokens_repeated = 0
        self._is_calm = False
        self._clients: list[_Client] = []
        self._observer = _Observer()
        config = SimEngineConfig(
            num_dp_ranks=plan.num_ranks,
            kv_capacity_tokens=1_500,
            max_running_requests=8,
            max_step_tokens=128,
            max_model_len=1_000,
        )
        cost = AffineStepCost(base_ns=15.0 * MS)
        self._kv_store = SimKvStore(KvLinkConfig(latency_ns=20 * MS))
        names = [f"e{number}" for number in range(plan.num_engines)]
        names += [f"p{number}" for number in range(plan.num_prefill_engines)]
        self._engines = [
            SimDriver(
                EngineId(name),
                SimEngine(config, self.model, cost),
                self.loop,
                model_name=MODEL,
                kv_store=self._kv_store,
            )
            for name in names
        ]
        self._host = SimHost(self.loop)
        self.controller = self._make_controller()
        self._host.tick = self._tick

    def _make_controller(self) -> Controller:
        is_elastic = bool(self._rng.integers(2))
        settings = ControllerSettings(
            max_attempts=1_000,
            queue_timeout_ns=1_000 * S,
            handoff_deadline_ns=1_000 * S,
            max_hold_ns=2 * S,
            progress=ProgressLimits(
                decode_timeout_ns=S,
                prefill_timeout_ns=2 * S,
                prefill_token_ns=MS,
                stream_timeout_ns=20 * S,
            ),
            reprefill_tokens_per_rank=(None, 64, 512)[int(self._rng.integers(3))],
            spare=("none", "n-1")[int(self._rng.integers(2))],
            migration=MigrationSettings(mode=self.plan.migration, interval_ns=300 * MS),
            is_validating=True,
        )
        specs = tuple(
            EngineSpec(engine_id=each.engine_id, model=MODEL, is_elastic=is_elastic)
            for each in self._engines
        )
        first_prefill = self.plan.num_engines
        pools = [PoolSpec(name="p", model=MODEL, engines=specs)]
        if self.plan.num_prefill_engines:
            decode, prefill = specs[:first_prefill], specs[first_prefill:]
            pools = [
                PoolSpec(name="d", role=PoolRole.DECODE, model=MODEL, engines=decode),
                PoolSpec(name="p", role=PoolRole.PREFILL, model=MODEL, engines=prefill),
            ]
        return Controller(
            pools=pools,
            drivers={each.engine_id: _ChaosDriver(self, each) for each in self._engines},
            journal=MemoryJournal(),
            clock=self.loop.clock,
            host=self._host,
            attempt_ids=AttemptIds(process_tag=self.seed % (1 << 64)),
            settings=settings,
            observer=self._observer,
            recorder=self._recorder,
        )

    # ---- randomness and notes

    def happens(self, share: float) -> bool:
        return not self._is_calm and bool(self._messages.random() < share)

    def draw_ns(self, max_ms: int) -> int:
        """A delay of a message; none once faults have stopped."""
        return 0 if self._is_calm else int(self._messages.integers(0, max_ms + 1)) * MS

    def note(self, *what: object) -> None:
        self._trace.update(f"{self.loop.now_ns()} {what}\n".encode())

    def count(self, kind: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1

    # ---- the run

    def run(self) -> FaultReport:
        with no_greetings(logging.CRITICAL):
            self.controller.start()
            self.loop.run_until(0)
            self._schedule()
            self.loop.run_until(int(self.plan.duration_s * S))
            self._calm()
            end_ns = self.loop.now_ns() + PATIENCE_S * S
            self.loop.run_while(
                lambda: not all(c.has_ended for c in self._clients) and self.loop.now_ns() < end_ns
            )
            self._check_end()
            end_s = self.loop.now_ns() / S
            self.controller.close()
        return self._report(end_s)

    def _schedule(self) -> None:
        """Choose all requests and faults beforehand, so that none depends on another."""
        rng, plan = self._rng, self.plan
        for index in range(plan.num_requests):
            due_ns = int(rng.uniform(0, plan.duration_s * 0.8) * S)
            client = _Client(self, index, self._make_request(index))
            self._clients.append(client)
            self.loop.call_at(due_ns, partial(self._send, client))
            if rng.random() < 0.1:
                leave_ns = due_ns + int(rng.uniform(0, 2) * S)
                self.loop.call_at(leave_ns, partial(self._leave, client))
        for _ in range(rng.poisson(plan.faults_per_s * plan.duration_s)):
            due_ns = int(rng.uniform(0, plan.duration_s) * S)
            engine = self._engines[int(rng.integers(len(self._engines)))]
            length_ns = int(rng.uniform(0.1, 6) * S)
            kinds = (self._crash, self._freeze, self._slow, self._lose_rank, self._drain)
            weights = np.array([3, 3, 1, 1, 1, 1], dtype=float)
            kind = int(rng.choice(6, p=weights / weights.sum()))
            if kind == 5:
                self.loop.call_at(due_ns, partial(self._silence, length_ns))
            else:
                self.loop.call_at(due_ns, partial(kinds[kind], engine, length_ns))
        if plan.num_prefill_engines:
            for _ in range(rng.poisson(plan.faults_per_s * plan.duration_s)):
                due_ns = int(rng.uniform(0, plan.duration_s) * S)
                self.loop.call_at(due_ns, self._lose_kv)

    def _make_request(self, index: int) -> InferenceRequest:
        rng = self._rng
        prompt = tuple(int(each) for each in rng.integers(0, 256, int(rng.integers(1, 60))))
        sampling = SamplingParams(max_tokens=int(rng.integers(1, 80)), temperature=0.0)
        changes: tuple[dict[str, object], ...] = (
            {},
            {},
            {"stop_token_ids": (int(rng.integers(256)), int(rng.integers(256))), "min_tokens": 3},
            {"temperature": 0.7},
            {"temperature": 0.7, "seed": 5},
            {"presence_penalty": 0.5},
            {"temperature": 0.7, "frequency_penalty": 0.5},
        )
        changed = changes[int(rng.integers(len(changes)))]
        sampling = msgspec.structs.replace(sampling, **changed)
        return InferenceRequest(
            request_id=RequestId(f"r{index:04d}"),
            model=MODEL,
            prompt_token_ids=prompt,
            sampling=sampling,
        )

    def _send(self, client: _Client) -> None:
        self.controller.submit(client.request, client)

    def _leave(self, client: _Client) -> None:
        if not client.has_ended:
            client.is_cancelled = True
            self.num_cancelled += 1
            self.controller.cancel(client.request.request_id)

    def _tick(self) -> None:
        self.controller.tick()

    # ---- faults

    def _begin(
        self, kind: str, engine: SimDriver, length_ns: int, undo: Callable[[], None]
    ) -> None:
        self.count(kind)
        self.note(kind, engine.engine_id)
        self.loop.call_at(self.loop.now_ns() + length_ns, undo)

    def _crash(self, engine: SimDriver, length_ns: int) -> None:
        engine.kill()
        self._begin("crash", engine, length_ns, engine.restart)

    def _freeze(self, engine: SimDriver, length_ns: int) -> None:
        engine.freeze()
        self._begin("freeze", engine, length_ns, engine.thaw)

    def _slow(self, engine: SimDriver, length_ns: int) -> None:
        engine.slow(float(self._messages.uniform(2, 30)))
        self._begin("slow", engine, length_ns, partial(engine.slow, 1.0))

    def _lose_rank(self, engine: SimDriver, length_ns: int) -> None:
        dp_rank = DpRank(int(self._messages.integers(self.plan.num_ranks)))
        engine.lose_rank(dp_rank, "injected")
        self._begin("rank_lost", engine, length_ns, partial(engine.restore_rank, dp_rank))

    def _drain(self, engine: SimDriver, length_ns: int) -> None:
        deadline_ns = int(self._messages.integers(0, 3)) * S // 2
        self.controller.drain(engine.engine_id, deadline_ns=deadline_ns)
        undo = partial(self.controller.drain, engine.engine_id, is_draining=False)
        self._begin("drain", engine, length_ns, undo)

    def _lose_kv(self) -> None:
        """What waits on prefill engines for decode engines is gone."""
        if len(self._kv_store):
            self.count("kv_lost")
            self._kv_store.clear()

    def _silence(self, length_ns: int) -> None:
        """Every lease runs out at once, whatever the engines do."""
        for engine in self._engines:
            self.controller.on_engine_down(engine.engine_id, "lease expired", Evidence.LEASE)
        self.count("silence")
        self.loop.call_at(self.loop.now_ns(), self._check_silence)
        for engine in self._engines:
            self.loop.call_at(self.loop.now_ns() + length_ns, partial(self._say_up, engine))

    def _say_up(self, engine: SimDriver) -> None:
        if not engine.is_dead:
            self.controller.on_engine_up(engine.describe())

    def _check_silence(self) -> None:
        members = self.controller.membership.engines.values()
        num_silent = sum(
            each.own_state is RankState.DOWN and each.evidence is Evidence.LEASE for each in members
        )
        if 2 * num_silent > len(self._engines):
            raise SafetyError(f"silence alone took down {num_silent} of {len(self._engines)}")

    def _calm(self) -> None:
        """No more faults: everything is repaired."""
        self._is_calm = True
        for engine in self._engines:
            engine.thaw()
            engine.slow(1.0)
            if engine.is_dead:
                engine.restart()
            else:
                self.controller.on_engine_up(engine.describe())
            self.controller.drain(engine.engine_id, is_draining=False)

    # ---- the end

    def _check_end(self) -> None:
        stuck = [c.request.request_id for c in self._clients if not c.has_ended]
        if stuck:
            raise SafetyError(f"no progress: {len(stuck)} requests never end, e.g. {stuck[0]}")
        if self.controller.num_open_requests:
            raise SafetyError(f"{self.controller.num_open_requests} requests are kept after all")

    def _report(self, end_s: float) -> FaultReport:
        return FaultReport(
            seed=self.seed,
            digest=self._trace.hexdigest(),
            num_requests=len(self._clients),
            num_finished=sum(bool(c.ends) and c.ends[0].startswith("fin") for c in self._clients),
            num_refused=self.num_refused,
            num_unserved=self.num_unserved,
            num_cancelled=self.num_cancelled,
            num_tokens=sum(len(c.tokens) for c in self._clients),
            num_tokens_lost=self.num_tokens_lost,
            num_tokens_repeated=self.num_tokens_repeated,
            num_fenced_tokens=self.controller.num_fenced_tokens,
            handoffs={
                method.value: count
                for method, count in sorted(self.controller.num_recoveries.items())
            },
            prefills=dict(sorted(self.controller.num_prefills.items())),
            faults=dict(sorted(self.faults.items())),
            max_gap_s=self._observer.max_gap_ns / S,
            end_s=end_s,
        )
