"""Controller: one behaviour a test, over fake engines that do what the test tells them."""

from dataclasses import dataclass, field

import pytest

from dsched.clock import ManualClock
from dsched.controller import (
    Controller,
    ControllerObserver,
    ControllerSettings,
    EngineSpec,
    HandoffGap,
    PoolSpec,
)
from dsched.controller.request import InferenceRequest, RequestFinish
from dsched.drivers.base import (
    AttemptFinish,
    AttemptSink,
    EngineCapabilities,
    EngineDescription,
    EngineListener,
    FinishReason,
)
from dsched.drivers.wire import GenerateCommand, RankReport, SamplingParams
from dsched.errors import EngineRefusedError, EngineUnreachableError
from dsched.faults import MembershipView, MemoryJournal, RecoveryMethod
from dsched.faults.progress import ProgressLimits
from dsched.ids import AttemptId, AttemptIds, DpRank, EngineId, RankId, RequestId
from dsched.routing.peers import PeerMessage, PeerRankLoad
from dsched.states import Evidence
from dsched.testing.recorders import RecordingStream

SECOND_NS = 1_000_000_000
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)


@dataclass
class FakeEngine:
    """A driver that records what it is asked and answers when the test says so."""

    engine_id: EngineId
    model: str = "m"
    num_dp_ranks: int = 1
    kv_capacity_tokens: int = 1_000
    max_running_requests: int = 8
    commands: dict[AttemptId, GenerateCommand] = field(default_factory=dict)
    sinks: dict[AttemptId, AttemptSink] = field(default_factory=dict)
    aborted: list[AttemptId] = field(default_factory=list)
    listener: EngineListener | None = None
    is_closed: bool = False

    def start(self, listener: EngineListener) -> None:
        self.listener = listener

    def come_up(self) -> None:
        assert self.listener is not None
        self.listener.on_engine_up(
            EngineDescription(
                engine_id=self.engine_id,
                kind="sim",
                model=self.model,
                max_model_len=500,
                vocab_size=100,
                num_dp_ranks=self.num_dp_ranks,
                kv_capacity_tokens=self.kv_capacity_tokens,
                max_running_requests=self.max_running_requests,
                capabilities=EngineCapabilities(can_steer_dp_rank=True),
            )
        )

    def go_down(self) -> None:
        assert self.listener is not None
        self.listener.on_engine_down(self.engine_id, "killed")

    def generate(self, command: GenerateCommand, sink: AttemptSink) -> None:
        attempt_id = AttemptId(command.attempt_id)
        assert attempt_id not in self.commands
        self.commands[attempt_id] = command
        self.sinks[attempt_id] = sink

    def abort(self, attempt_id: AttemptId) -> None:
        self.aborted.append(attempt_id)

    def close(self) -> None:
        self.is_closed = True

    # What the test makes the engine do.

    def emit(self, *token_ids: int, attempt: int = -1) -> None:
        attempt_id = list(self.commands)[attempt]
        self.sinks[attempt_id].on_tokens(attempt_id, token_ids, None)

    def finish(self, reason: FinishReason = FinishReason.STOP, attempt: int = -1) -> None:
        attempt_id = list(self.commands)[attempt]
        self.sinks[attempt_id].on_finish(attempt_id, AttemptFinish(reason=reason))

    def fail(self, error: Exception, attempt: int = -1) -> None:
        attempt_id = list(self.commands)[attempt]
        self.sinks[attempt_id].on_failure(attempt_id, error)  # type: ignore[arg-type]


class Bench:
    """A controller over fake engines, ticked by hand."""

    def __init__(
        self,
        *engines: FakeEngine,
        settings: ControllerSettings | None = None,
        observer: ControllerObserver | None = None,
    ) -> None:
        self.engines = engines
        self.clock = ManualClock()
        self.journal = MemoryJournal()
        self.num_asked = 0
        self.times: list[int] = []
        self.controller = Controller(
            pools=[
                PoolSpec(
                    name="p",
                    model="m",
                    engines=tuple(EngineSpec(engine_id=e.engine_id, model="m") for e in engines),
                )
            ],
            drivers={engine.engine_id: engine for engine in engines},
            journal=self.journal,
            clock=self.clock,
            host=self,
            attempt_ids=AttemptIds(process_tag=1),
            settings=settings or ControllerSettings(is_validating=True),
            observer=observer,
        )
        self.controller.start()
        for engine in engines:
            engine.come_up()
        self.controller.tick()

    def request_tick(self) -> None:
        self.num_asked += 1

    def request_tick_at(self, time_ns: int) -> None:
        self.times.append(time_ns)

    def ask(
        self,
        request_id: str,
        *,
        prompt_len: int = 10,
        pin: int | None = None,
        sampling: SamplingParams = GREEDY,
    ) -> RecordingStream:
        heard = RecordingStream()
        self.controller.submit(
            InferenceRequest(
                request_id=RequestId(request_id),
                model="m",
                prompt_token_ids=tuple(range(prompt_len)),
                sampling=sampling,
                pinned_dp_rank=None if pin is None else DpRank(pin),
            ),
            heard,
        )
        return heard

    def wait(self, duration_ns: int) -> None:
        self.clock.advance_to(self.clock.now_ns() + duration_ns)
        self.controller.tick()


def engines(count: int = 2, **options: int) -> list[FakeEngine]:
    return [FakeEngine(EngineId(f"e{index}"), **options) for index in range(count)]  # type: ignore[arg-type]


def test_a_burst_is_spread_before_any_report() -> None:
    """Eight requests of one tick over four idle engines: two each (RT-01)."""
    bench = Bench(*engines(4))

    for index in range(8):
        bench.ask(f"r{index}")
    bench.controller.tick()

    assert [len(engine.commands) for engine in bench.engines] == [2, 2, 2, 2]


def test_tokens_reach_the_client_after_the_journal() -> None:
    """What the client hears is what the journal has, and the end comes once."""
    (engine,) = engines(1)
    bench = Bench(engine)
    heard = bench.ask("r")
    bench.controller.tick()

    engine.emit(1, 2)
    engine.emit(3)
    recorded = bench.journal.output_token_ids(RequestId("r"))
    engine.finish()

    assert heard.token_ids == [1, 2, 3]
    assert recorded == (1, 2, 3)
    assert heard.ends == [
        RequestFinish(reason=FinishReason.STOP, num_prompt_tokens=10, num_output_tokens=3)
    ]
    assert bench.controller.num_open_requests == 0


def test_a_request_killed_before_its_first_token_is_tried_elsewhere() -> None:
    """Nothing was sent, so a restart is exact; the engine that failed is not asked again."""
    bench = Bench(*engines(2))
    heard = bench.ask("r")
    bench.controller.tick()
    first = next(engine for engine in bench.engines if engine.commands)
    other = next(engine for engine in bench.engines if engine is not first)

    first.fail(EngineUnreachableError("reset"))
    bench.controller.tick()
    other.emit(7)
    other.finish()

    assert heard.token_ids == [7]
    assert len(heard.ends) == 1
    assert bench.controller.num_recoveries == {RecoveryMethod.RESTART: 1}


def test_a_greedy_request_goes_on_where_it_was_lost() -> None:
    """The next attempt starts from prompt and emitted tokens, with what is left of the limits."""
    bench = Bench(*engines(2))
    heard = bench.ask("r")
    bench.controller.tick()
    first = next(engine for engine in bench.engines if engine.commands)
    other = next(engine for engine in bench.engines if engine is not first)

    first.emit(71, 72)
    first.fail(EngineUnreachableError("reset"))
    bench.controller.tick()
    (command,) = other.commands.values()
    other.emit(73)
    other.finish()

    assert command.prompt_token_ids == (*range(10), 71, 72)
    assert command.sampling.max_tokens == 48
    assert heard.token_ids == [71, 72, 73]
    assert heard.ends == [
        RequestFinish(
            reason=FinishReason.STOP,
            num_prompt_tokens=10,
            num_output_tokens=3,
            num_handoffs=1,
            guarantee="exact",
        )
    ]


def test_a_request_that_only_misses_its_end_gets_it() -> None:
    """All tokens were out: finish reason length, no further token (FA-01, k = 8)."""
    bench = Bench(*engines(2))
    heard = bench.ask("r", sampling=SamplingParams(max_tokens=2, temperature=0.0))
    bench.controller.tick()
    first = next(engine for engine in bench.engines if engine.commands)

    first.emit(1, 2)
    first.fail(EngineUnreachableError("reset"))
    bench.controller.tick()

    (end,) = heard.ends
    assert isinstance(end, RequestFinish)
    assert (end.reason, end.num_output_tokens) == (FinishReason.LENGTH, 2)
    assert sum(len(engine.commands) for engine in bench.engines) == 1


GRAMMAR = SamplingParams(max_tokens=9, temperature=0.0, structured_output={"type": "json_object"})


def test_a_request_with_hidden_state_is_replayed_and_not_sent_twice() -> None:
    """The grammar starts at its root again, and so does the answer (FA-03)."""
    bench = Bench(*engines(2))
    heard = bench.ask("r", sampling=GRAMMAR)
    bench.controller.tick()
    first = next(engine for engine in bench.engines if engine.commands)
    other = next(engine for engine in bench.engines if engine is not first)

    first.emit(1, 2, 3)
    first.fail(EngineUnreachableError("reset"))
    bench.controller.tick()
    (command,) = other.commands.values()
    other.emit(1, 2)
    other.emit(3, 4)
    other.emit(5)
    other.finish()

    assert command.prompt_token_ids == tuple(range(10))
    assert command.sampling == GRAMMAR
    assert heard.token_ids == [1, 2, 3, 4, 5]
    assert len(heard.ends) == 1


@pytest.mark.parametrize("answer", [(1, 9), (1,)], ids=["other token", "shorter"])
def test_a_replay_that_differs_is_an_honest_error(answer: tuple[int, ...]) -> None:
    """Better one error than an answer made of two."""
    bench = Bench(*engines(2))
    heard = bench.ask("r", sampling=GRAMMAR)
    bench.controller.tick()
    first = next(engine for engine in bench.engines if engine.commands)
    other = next(engine for engine in bench.engines if engine is not first)

    first.emit(1, 2)
    first.fail(EngineUnreachableError("reset"))
    bench.controller.tick()
    other.emit(*answer)
    other.finish()

    assert heard.token_ids == [1, 2]
    assert heard.error.code == "engine_lost"


def test_what_cannot_be_continued_honestly_is_refused() -> None:
    """Sampling without a seed, with penalties: the counts died with the engine."""
    bench = Bench(*engines(2))
    heard = bench.ask("r", sampling=SamplingParams(max_tokens=9, presence_penalty=0.5))
    bench.controller.tick()
    first = next(engine for engine in bench.engines if engine.commands)

    first.emit(1)
    first.fail(EngineUnreachableError("reset"))
    bench.controller.tick()

    assert heard.error.status == 502
    assert "penalty counts" in heard.error.message


def test_a_late_attempt_adds_nothing() -> None:
    """Tokens of an attempt that was replaced are counted and dropped."""
    bench = Bench(*engines(2))
    heard = bench.ask("r")
    bench.controller.tick()
    first = next(engine for engine in bench.engines if engine.commands)
    other = next(engine for engine in bench.engines if engine is not first)
    first.fail(EngineUnreachableError("frozen"))
    bench.controller.tick()

    first.emit(1, 2, 3)
    other.emit(9)

    assert heard.token_ids == [9]
    assert bench.controller.num_fenced_tokens == 3


def test_cancel_aborts_in_the_engine_and_says_nothing_more() -> None:
    """The booking stays until the engine lets go, then the rank is empty."""
    (engine,) = engines(1)
    bench = Bench(engine)
    heard = bench.ask("r")
    bench.controller.tick()
    (attempt_id,) = engine.commands

    bench.controller.cancel(RequestId("r"))
    engine.emit(5)
    before = bench.controller.engine_statuses()[0].ranks[0].num_running
    engine.finish(FinishReason.ABORT)
    after = bench.controller.engine_statuses()[0].ranks[0]

    assert engine.aborted == [attempt_id]
    assert not heard.token_ids
    assert not heard.ends
    assert before == 1
    assert (after.num_running, after.num_kv_tokens) == (0, 0)


def test_cancel_before_the_tick_reaches_no_engine() -> None:
    """A client that leaves at once costs nothing."""
    (engine,) = engines(1)
    bench = Bench(engine)

    bench.ask("r")
    bench.controller.cancel(RequestId("r"))
    bench.controller.tick()

    assert not engine.commands


def test_full_ranks_hold_requests_and_take_them_when_room_appears() -> None:
    """Late binding: the ninth request waits, and goes to whoever frees a place."""
    bench = Bench(*engines(2, max_running_requests=2))
    for index in range(5):
        bench.ask(f"r{index}")
    bench.controller.tick()
    assert bench.controller.num_waiting_requests == 1

    bench.engines[1].finish(attempt=0)
    bench.controller.tick()

    assert bench.controller.num_waiting_requests == 0
    assert [len(engine.commands) for engine in bench.engines] == [2, 3]


def test_too_many_held_requests_are_refused_with_429() -> None:
    """The queue is bounded; who comes too late is told when to return."""
    settings = ControllerSettings(max_held_requests=1, is_validating=True)
    bench = Bench(*engines(1, max_running_requests=1), settings=settings)

    streams = [bench.ask(f"r{index}") for index in range(3)]
    bench.controller.tick()

    assert [len(heard.ends) for heard in streams] == [0, 0, 1]
    assert (streams[2].error.status, streams[2].error.retry_after_s) == (429, 1)


def test_a_held_request_goes_to_a_full_rank_after_the_bounded_wait() -> None:
    """The engine's own queue decides when the router has held for too long."""
    settings = ControllerSettings(max_hold_ns=5 * SECOND_NS, is_validating=True)
    bench = Bench(*engines(1, max_running_requests=1), settings=settings)
    bench.ask("r0")
    bench.ask("r1")
    bench.controller.tick()
    assert bench.times[-1] == 5 * SECOND_NS

    bench.wait(5 * SECOND_NS)

    assert len(bench.engines[0].commands) == 2


def test_no_engine_up_is_503_for_a_known_model_and_404_for_another() -> None:
    """A model whose engines are down is not unknown (FA-07)."""
    (engine,) = engines(1)
    bench = Bench(engine)
    engine.go_down()
    bench.controller.tick()

    known = bench.ask("r0")
    bench.controller.submit(
        InferenceRequest(
            request_id=RequestId("r1"),
            model="other",
            prompt_token_ids=(1,),
            sampling=SamplingParams(max_tokens=1),
        ),
        unknown := RecordingStream(),
    )
    bench.controller.tick()

    assert (known.error.status, known.error.retry_after_s) == (503, 1)
    assert (unknown.error.status, unknown.error.param) == (404, "model")
    assert not bench.controller.models()["m"].is_available
    assert bench.controller.not_ready_reason() == "pool 'p' has no engine up"


def test_an_engine_that_comes_back_serves_again() -> None:
    """No restart of dsched is needed, and the epoch tells the two lives apart."""
    (engine,) = engines(1)
    bench = Bench(engine)
    epoch = bench.controller.membership.epoch
    engine.go_down()
    bench.controller.tick()
    engine.come_up()
    bench.controller.tick()

    bench.ask("r")
    bench.controller.tick()

    (command,) = engine.commands.values()
    assert command.epoch == epoch + 2
    assert bench.controller.not_ready_reason() is None


def test_an_engine_with_another_model_is_kept_out() -> None:
    """Two models in one pool would mix answers."""
    right, wrong = engines(2)
    wrong.model = "other"
    bench = Bench(right, wrong)

    for index in range(4):
        bench.ask(f"r{index}")
    bench.controller.tick()

    assert len(right.commands) == 4
    status = bench.controller.engine_statuses()[1]
    assert status.reason == "serves model 'other', but pool 'p' needs 'm'"


def test_the_pinned_dp_rank_is_used_and_a_missing_one_is_refused() -> None:
    """`X-data-parallel-rank` narrows the candidates, nothing else."""
    (engine,) = engines(1, num_dp_ranks=3)
    bench = Bench(engine)

    for index in range(4):
        bench.ask(f"r{index}", pin=2)
    refused = bench.ask("r9", pin=3)
    bench.controller.tick()

    assert {command.dp_rank for command in engine.commands.values()} == {2}
    assert (refused.error.status, refused.error.param) == (400, "X-data-parallel-rank")


def test_a_prompt_larger_than_any_kv_cache_is_refused_at_once() -> None:
    """It could wait for ever; the message says how large it is."""
    bench = Bench(*engines(2, kv_capacity_tokens=100))

    heard = bench.ask("r", prompt_len=100)
    bench.controller.tick()

    assert heard.error.status == 400
    assert "100 tokens" in heard.error.message


def test_an_engine_that_is_full_passes_the_request_on() -> None:
    """503 of one engine is no reason to fail while another has room."""
    bench = Bench(*engines(2))
    heard = bench.ask("r")
    bench.controller.tick()
    first = next(engine for engine in bench.engines if engine.commands)
    other = next(engine for engine in bench.engines if engine is not first)

    first.fail(EngineRefusedError(503, "no room"))
    bench.controller.tick()

    assert len(other.commands) == 1
    assert not heard.ends


def test_engines_that_all_refuse_end_the_request_after_the_last_attempt() -> None:
    """Attempts are bounded."""
    (engine,) = engines(1)
    bench = Bench(engine)
    heard = bench.ask("r")
    bench.controller.tick()

    for _ in range(3):
        engine.fail(EngineRefusedError(503, "no room"))
        bench.controller.tick()

    assert heard.error.status == 503
    assert "3 attempts" in heard.error.message


def test_bad_input_that_only_the_engine_sees_is_a_400() -> None:
    """The engine's words reach the client."""
    (engine,) = engines(1)
    bench = Bench(engine)
    heard = bench.ask("r")
    bench.controller.tick()

    engine.fail(EngineRefusedError(422, "bad grammar"))

    assert (heard.error.status, heard.error.message) == (400, "bad grammar")


def test_a_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    """Two streams must not share a journal entry."""
    (engine,) = engines(1)
    bench = Bench(engine)
    first = bench.ask("r")
    second = bench.ask("r")
    bench.controller.tick()

    engine.emit(1)

    assert second.error.status == 409
    assert first.token_ids == [1]


def test_a_request_without_any_engine_ends_after_the_queue_timeout() -> None:
    """A retry that finds nothing waits, but not for ever."""
    settings = ControllerSettings(queue_timeout_ns=30 * SECOND_NS, is_validating=True)
    (engine,) = engines(1)
    bench = Bench(engine, settings=settings)
    heard = bench.ask("r")
    bench.controller.tick()
    engine.go_down()
    engine.fail(EngineUnreachableError("killed"))
    bench.controller.tick()
    assert not heard.ends

    bench.wait(30 * SECOND_NS)

    assert heard.error.status == 503


def test_a_long_answer_that_loses_its_engine_gets_the_whole_handoff_deadline() -> None:
    """The wait counts from the loss, not from the arrival."""
    settings = ControllerSettings(
        queue_timeout_ns=30 * SECOND_NS, handoff_deadline_ns=60 * SECOND_NS, is_validating=True
    )
    (engine,) = engines(1)
    bench = Bench(engine, settings=settings)
    heard = bench.ask("r")
    bench.controller.tick()
    engine.emit(1)
    bench.wait(3_600 * SECOND_NS)
    engine.go_down()
    engine.fail(EngineUnreachableError("killed"))
    bench.controller.tick()

    bench.wait(59 * SECOND_NS)
    assert not heard.ends
    bench.wait(SECOND_NS)

    assert heard.error.status == 503


@pytest.mark.parametrize("engine_id", ["e0", "nobody"])
def test_reports_correct_the_ledger_or_are_counted(engine_id: str) -> None:
    """Load that dsched did not send shows up; an unknown engine's report is dropped."""
    (engine,) = engines(1)
    bench = Bench(engine)

    bench.controller.on_report(
        RankReport(
            engine_id=engine_id,
            incarnation="i",
            dp_rank=0,
            seq=0,
            step=1,
            num_running=3,
            num_waiting=0,
            num_kv_tokens=300,
            num_waiting_prefill_tokens=0,
            kv_capacity_tokens=1_000,
            step_ns=5,
        )
    )

    (rank,) = bench.controller.engine_statuses()[0].ranks
    counts = bench.controller.num_reports()
    assert (rank.num_running, counts["unknown_engine"]) == ((3, 0) if engine_id == "e0" else (0, 1))


def test_a_drained_engine_gets_nothing_new_and_finishes_what_it_has() -> None:
    """Drain costs no client anything."""
    bench = Bench(*engines(2))
    heard = [bench.ask("r0"), bench.ask("r1")]
    bench.controller.tick()

    bench.controller.drain(EngineId("e0"))
    for index in range(2, 6):
        bench.ask(f"r{index}")
    bench.controller.tick()
    bench.engines[0].emit(4)
    bench.engines[0].finish()

    assert [len(engine.commands) for engine in bench.engines] == [1, 5]
    assert sum(bool(each.ends) for each in heard) == 1


def test_close_ends_every_stream_once_and_releases_drivers() -> None:
    """A stopping dsched tells its clients."""
    (engine,) = engines(1)
    bench = Bench(engine)
    heard = bench.ask("r")
    bench.controller.tick()

    bench.controller.close()
    late = bench.ask("r2")
    bench.controller.tick()

    assert heard.error.code == "stopping"
    assert late.error.code == "stopping"
    assert engine.is_closed


def frozen_bench() -> tuple[Bench, RecordingStream, FakeEngine, FakeEngine]:
    """A request that has two tokens from `first`, which then stops without a word."""
    bench = Bench(
        *engines(2),
        settings=ControllerSettings(
            progress=ProgressLimits(decode_timeout_ns=3 * SECOND_NS), is_validating=True
        ),
    )
    heard = bench.ask("r")
    bench.controller.tick()
    first = next(engine for engine in bench.engines if engine.commands)
    other = next(engine for engine in bench.engines if engine is not first)
    first.emit(1, 2)
    bench.wait(SECOND_NS // 4)
    return bench, heard, first, other


def test_a_frozen_engine_loses_its_requests_after_the_progress_timeout() -> None:
    """Nothing broke, nothing answers: the request goes on elsewhere, the engine is suspect."""
    bench, heard, first, other = frozen_bench()

    for _ in range(14):
        bench.wait(SECOND_NS // 4)
    other.emit(3)
    other.finish()

    assert heard.token_ids == [1, 2, 3]
    assert first.aborted == list(first.commands)
    assert [status.state.name for status in bench.controller.engine_statuses()].count(
        "SUSPECT"
    ) == 1


def test_a_frozen_engine_that_wakes_up_adds_no_token_and_rejoins() -> None:
    """Its late tokens are fenced; a new step makes it trusted again under a new epoch."""
    bench, heard, first, other = frozen_bench()
    for _ in range(14):
        bench.wait(SECOND_NS // 4)
    epoch = bench.controller.membership.epoch

    first.emit(8, 9)
    bench.controller.on_report(
        RankReport(
            engine_id=first.engine_id,
            incarnation="i",
            dp_rank=0,
            seq=0,
            step=7,
            num_running=0,
            num_waiting=0,
            num_kv_tokens=0,
            num_waiting_prefill_tokens=0,
            kv_capacity_tokens=1_000,
            step_ns=5,
        )
    )
    bench.controller.tick()
    other.emit(3)
    other.finish()

    assert heard.token_ids == [1, 2, 3]
    assert bench.controller.num_fenced_tokens == 2
    assert all(s.state.name == "UP" for s in bench.controller.engine_statuses())
    assert bench.controller.membership.epoch == epoch + 1


def test_a_freeze_amid_prompts_is_noticed_by_the_pace_of_the_engine() -> None:
    """Eight prompts taught that they take a quarter of a second: the ninth has not ten."""
    (engine,) = engines(1)
    limits = ProgressLimits(decode_timeout_ns=3 * SECOND_NS, prefill_timeout_ns=10 * SECOND_NS)
    bench = Bench(engine, settings=ControllerSettings(progress=limits, is_validating=True))

    def state_after(quarters: int) -> str:
        for _ in range(quarters):
            bench.wait(SECOND_NS // 4)
        (status,) = bench.controller.engine_statuses()
        return status.state.name

    bench.ask("first")
    bench.controller.tick()
    is_patient = state_after(24) == "UP"
    for number in range(9):
        if number:
            bench.ask(f"r{number}")
            bench.controller.tick()
            bench.wait(SECOND_NS // 4)
        engine.emit(1)
        bench.wait(SECOND_NS // 4)
        engine.finish()
        bench.controller.tick()
    bench.ask("last")
    bench.controller.tick()

    assert is_patient
    assert state_after(24) == "SUSPECT"


def test_the_gap_of_a_handoff_is_measured_by_part() -> None:
    """Detection, dispatch and prefill add up to what the client saw."""
    gaps: list[HandoffGap] = []

    class Observer:
        def on_handoff(self, method: str, gap: HandoffGap) -> None:
            gaps.append(gap)

        def on_membership_changed(self, view: MembershipView) -> None:
            pass

    (first, other) = engines(2)
    bench = Bench(first, other, observer=Observer())
    bench.ask("r")
    bench.controller.tick()
    if not first.commands:
        first, other = other, first
    first.emit(1)
    bench.wait(5)
    first.fail(EngineUnreachableError("reset"))
    bench.wait(7)
    bench.wait(11)
    other.emit(2)

    assert [(gap.detect_ns, gap.dispatch_ns, gap.prefill_ns) for gap in gaps] == [(5, 7, 11)]


# -- drains with a deadline, EP groups, the ration, spare room


def open_requests(bench: Bench, count: int, **options: object) -> list[RecordingStream]:
    heard = [bench.ask(f"r{index}", **options) for index in range(count)]  # type: ignore[arg-type]
    bench.controller.tick()
    return heard


def test_a_drain_without_a_deadline_moves_nothing() -> None:
    """What runs finishes where it is."""
    (first, other) = engines(2)
    bench = Bench(first, other)
    heard = open_requests(bench, 2)

    bench.controller.drain(first.engine_id)
    bench.wait(100 * SECOND_NS)
    first.emit(1)
    first.finish()

    assert len(first.commands) == 1
    assert heard[0].token_ids == [1]
    assert first.aborted == []
    assert bench.controller.num_requests_on(first.engine_id) == 0


def test_a_drain_hands_over_what_is_left_at_its_deadline() -> None:
    """Prompt and emitted tokens go to another engine; the late token of the old one is fenced."""
    (first, other) = engines(2)
    bench = Bench(first, other)
    heard = open_requests(bench, 2)
    first.emit(7)

    bench.controller.drain(first.engine_id, deadline_ns=SECOND_NS)
    bench.wait(SECOND_NS - 1)
    assert first.aborted == []
    bench.wait(1)
    first.emit(8)
    other.emit(9)
    other.finish(FinishReason.STOP)

    assert len(first.aborted) == 1
    assert list(other.commands.values())[-1].prompt_token_ids == (*range(10), 7)
    assert heard[0].token_ids == [7, 9]
    finish = heard[0].ends[0]
    assert isinstance(finish, RequestFinish)
    assert (finish.guarantee, finish.num_handoffs) == ("exact", 1)
    assert bench.controller.num_handoffs == {("continue", "drained"): 1}


def test_a_drain_never_makes_an_error() -> None:
    """What cannot be continued honestly stays, and nothing moves while nobody else is up."""
    (first, other) = engines(2)
    bench = Bench(first, other)
    sampling = SamplingParams(max_tokens=50, temperature=1.0, presence_penalty=0.5)
    open_requests(bench, 2, sampling=sampling)
    first.emit(7)

    bench.controller.drain(first.engine_id, deadline_ns=0)
    bench.controller.tick()
    assert first.aborted == []

    (alone,) = engines(1)
    bench = Bench(alone)
    open_requests(bench, 1)
    bench.controller.drain(alone.engine_id, deadline_ns=0)
    bench.controller.tick()
    assert alone.aborted == []


def test_moves_do_not_use_up_attempts() -> None:
    """A request that was drained away often still survives a crash."""
    fleet = engines(4)
    settings = ControllerSettings(max_attempts=2, is_validating=True)
    bench = Bench(*fleet, settings=settings)
    heard = open_requests(bench, 1)[0]
    for _ in range(3):
        serving = next(e for e in fleet if bench.controller.num_requests_on(e.engine_id))
        bench.controller.drain(serving.engine_id, deadline_ns=0)
        bench.controller.tick()

    serving = next(e for e in fleet if bench.controller.num_requests_on(e.engine_id))
    for engine in fleet:
        bench.controller.drain(engine.engine_id, is_draining=False)
    serving.fail(EngineUnreachableError("reset"))
    bench.controller.tick()

    assert heard.ends == []


def make_group_bench(*fleet: FakeEngine, is_elastic: bool = False) -> Bench:
    """The first two engines are one EP group, or each is an elastic one."""
    bench = Bench(*fleet)
    specs = tuple(
        EngineSpec(
            engine_id=e.engine_id,
            model="m",
            ep_group="g" if index < 2 and not is_elastic else None,
            is_elastic=is_elastic,
        )
        for index, e in enumerate(fleet)
    )
    bench.controller = Controller(
        pools=[PoolSpec(name="p", model="m", engines=specs)],
        drivers={engine.engine_id: engine for engine in fleet},
        journal=bench.journal,
        clock=bench.clock,
        host=bench,
        attempt_ids=AttemptIds(process_tag=2),
        settings=ControllerSettings(is_validating=True),
    )
    bench.controller.start()
    for engine in fleet:
        engine.come_up()
    bench.controller.tick()
    return bench


def test_a_dead_engine_takes_its_groups_requests_along() -> None:
    """Its group's other engine has said nothing yet, and is left in the same tick."""
    (first, mate, other) = engines(3)
    bench = make_group_bench(first, mate, other)
    heard = open_requests(bench, 3)
    assert [len(e.commands) for e in (first, mate, other)] == [1, 1, 1]

    first.go_down()
    first.fail(EngineUnreachableError("reset"))
    bench.controller.tick()

    assert len(mate.aborted) == 1
    assert len(other.commands) == 3
    assert all(not each.ends for each in heard)


def test_a_lost_rank_of_an_elastic_group_moves_its_own_requests_only() -> None:
    """Routing stops using it in the same tick."""
    (engine,) = engines(1, num_dp_ranks=2)
    bench = make_group_bench(engine, is_elastic=True)
    open_requests(bench, 4)

    bench.controller.on_rank_lost(RankId(engine.engine_id, DpRank(0)), "device lost")
    bench.controller.tick()

    assert len(engine.aborted) == 2
    assert [command.dp_rank for command in engine.commands.values()][4:] == [1, 1]
    (status,) = bench.controller.engine_statuses()
    assert [rank.state.name for rank in status.ranks] == ["DOWN", "UP"]


def test_a_lost_rank_said_again_or_unknown_changes_nothing() -> None:
    """Watches repeat themselves; one that is out of date must not stop the tick."""
    (engine,) = engines(1, num_dp_ranks=2)
    bench = make_group_bench(engine, is_elastic=True)
    lost = RankId(engine.engine_id, DpRank(0))
    bench.controller.on_rank_lost(lost, "device lost")
    bench.controller.tick()
    epoch = bench.controller.membership.epoch

    bench.controller.on_rank_lost(lost, "device lost")
    bench.controller.on_rank_lost(RankId(engine.engine_id, DpRank(9)), "?")
    bench.controller.on_rank_back(RankId(engine.engine_id, DpRank(1)))
    bench.controller.on_rank_back(RankId(EngineId("nobody"), DpRank(0)))
    bench.controller.tick()

    assert bench.controller.membership.epoch == epoch


def test_a_rank_that_came_back_is_used_again() -> None:
    """Without a restart of its engine; the epoch rises once more."""
    (engine,) = engines(1, num_dp_ranks=2)
    bench = make_group_bench(engine, is_elastic=True)
    lost = RankId(engine.engine_id, DpRank(0))
    bench.controller.on_rank_lost(lost, "device lost")
    bench.controller.tick()
    epoch = bench.controller.membership.epoch

    bench.controller.on_rank_back(lost)
    bench.controller.tick()
    open_requests(bench, 4)

    assert bench.controller.membership.epoch == epoch + 1
    assert sorted(command.dp_rank for command in engine.commands.values()) == [0, 0, 1, 1]


def test_the_observer_hears_in_the_tick_that_lost_the_engine() -> None:
    """Before anything is sent for the new epoch."""
    views: list[MembershipView] = []

    class Observer:
        def on_handoff(self, method: str, gap: HandoffGap) -> None:
            pass

        def on_membership_changed(self, view: MembershipView) -> None:
            views.append(view)

    (first, other) = engines(2)
    bench = Bench(first, other, observer=Observer())
    first.go_down()
    bench.controller.tick()

    assert [each.group("e0").state.name for each in views] == ["UP", "DOWN"]
    assert views[-1].epoch == bench.controller.membership.epoch


def test_lost_requests_go_on_as_the_ration_allows() -> None:
    """Forty tokens at a time; the first new token of one makes room for the next."""
    (first, other) = engines(2, max_running_requests=20)
    settings = ControllerSettings(reprefill_tokens_per_rank=25, is_validating=True)
    bench = Bench(first, other, settings=settings)
    open_requests(bench, 12)
    for attempt in range(6):
        first.emit(1, attempt=attempt)

    first.go_down()
    for attempt in range(6):
        first.fail(EngineUnreachableError("reset"), attempt=attempt)
    bench.controller.tick()
    sent = len(other.commands) - 6
    assert sent == 2  # 11 tokens each: a third would be 33 of 25
    assert bench.controller.num_waiting_handoffs == 4

    fresh = bench.ask("new")
    bench.controller.tick()
    assert len(other.commands) == 6 + sent + 1, "a new request does not wait for the ration"

    other.emit(5, attempt=6)
    bench.controller.tick()
    assert bench.controller.num_waiting_handoffs == 3
    assert not fresh.ends


def test_spare_room_is_kept_for_the_largest_group() -> None:
    """Three groups of two: four run, the fifth waits; after a loss its place is used."""
    fleet = engines(3, max_running_requests=2)
    settings = ControllerSettings(spare="n-1", is_validating=True)
    bench = Bench(*fleet, settings=settings)
    open_requests(bench, 5)

    assert sum(len(engine.commands) for engine in fleet) == 4
    assert bench.controller.num_waiting_requests == 1
    load, plan = bench.controller.capacities()["p"]
    assert (load.num_running, plan.max_running_requests, plan.absorbs_loss) == (4, 4, True)

    victim = max(fleet, key=lambda engine: len(engine.commands))
    victim.go_down()
    for attempt in range(len(victim.commands)):
        victim.fail(EngineUnreachableError("reset"), attempt=attempt)
    bench.controller.tick()
    _, plan = bench.controller.capacities()["p"]
    assert (plan.max_running_requests, plan.absorbs_loss) == (4, False)
    running = sum(bench.controller.num_requests_on(e.engine_id) for e in fleet if e is not victim)
    assert running == 4


def test_what_is_above_the_spare_limit_is_refused_when_nothing_may_wait() -> None:
    """429 with Retry-After."""
    fleet = engines(2, max_running_requests=2)
    settings = ControllerSettings(spare="n-1", max_held_requests=0, is_validating=True)
    bench = Bench(*fleet, settings=settings)

    heard = open_requests(bench, 3)

    error = heard[2].error
    assert (error.status, error.retry_after_s) == (429, 1)


def test_requests_that_wait_for_spare_room_do_not_make_the_controller_spin() -> None:
    """No timer in the past is asked for."""
    fleet = engines(2, max_running_requests=1)
    settings = ControllerSettings(spare="n-1", max_hold_ns=SECOND_NS, is_validating=True)
    bench = Bench(*fleet, settings=settings)
    open_requests(bench, 3)
    bench.times.clear()

    bench.wait(5 * SECOND_NS)

    assert all(time_ns > bench.clock.now_ns() + SECOND_NS for time_ns in bench.times)


def test_a_lost_request_waits_no_longer_than_its_deadline() -> None:
    """Then one error says what happened."""
    (first, other) = engines(2, max_running_requests=1)
    settings = ControllerSettings(handoff_deadline_ns=3 * SECOND_NS, max_hold_ns=10 * SECOND_NS)
    bench = Bench(first, other, settings=settings)
    heard = open_requests(bench, 2)[0]
    first.emit(1)
    first.go_down()
    first.fail(EngineUnreachableError("reset"))
    bench.controller.tick()

    bench.wait(3 * SECOND_NS)

    assert heard.error.code == "handoff_overdue"
    assert heard.error.retry_after_s == 1
    assert bench.controller.num_handoffs[("overdue", "no_room")] == 1


def test_silence_alone_does_not_empty_a_pool() -> None:
    """Both engines are silent: one counts as down, the other still serves."""
    (first, other) = engines(2)
    bench = Bench(first, other)
    for engine in (first, other):
        bench.controller.on_engine_down(engine.engine_id, "lease expired", Evidence.LEASE)
    bench.controller.tick()

    heard = bench.ask("r")
    bench.controller.tick()

    assert not heard.ends
    states = [status.state.name for status in bench.controller.engine_statuses()]
    assert states == ["DOWN", "SUSPECT"]
    assert bench.controller.membership.num_capped_losses == 1


def test_a_repeated_request_goes_on_from_the_journal() -> None:
    """The same controller lost its client; under the same id it gets what was and the rest."""
    (engine,) = engines(1)
    bench = Bench(engine)
    request = InferenceRequest(
        request_id=RequestId("r"),
        model="m",
        prompt_token_ids=(1, 2, 3),
        sampling=GREEDY,
        may_resume=True,
    )
    bench.journal.open_request(
        request.request_id, model="m", prompt_token_ids=(1, 2, 3), sampling=GREEDY
    )
    entry = bench.journal._entries[request.request_id]
    entry.tokens.extend([7, 8])
    bench.journal._entries.clear()
    bench.journal._finished[request.request_id] = entry  # as a file that another process left

    heard = RecordingStream()
    bench.controller.submit(request, heard)
    bench.controller.tick()
    engine.emit(9)
    engine.finish()

    (command,) = engine.commands.values()
    assert command.prompt_token_ids == (1, 2, 3, 7, 8)
    assert command.sampling.max_tokens == GREEDY.max_tokens - 2
    assert heard.token_ids == [7, 8, 9]
    (finish,) = heard.ends
    assert isinstance(finish, RequestFinish)
    assert (finish.num_prompt_tokens, finish.num_output_tokens) == (3, 3)
    assert finish.guarantee == "exact"


def test_a_suspect_engine_without_reports_is_tried_again() -> None:
    """It cannot show progress, so after ten seconds it gets requests again."""
    limits = ProgressLimits(decode_timeout_ns=SECOND_NS)
    settings = ControllerSettings(progress=limits, is_validating=True)
    (first, other) = engines(2)
    bench = Bench(first, other, settings=settings)
    open_requests(bench, 2)
    first.emit(1)
    for _ in range(12):
        other.emit(1)
        bench.wait(250_000_000)
    states = {s.engine_id: s.state.name for s in bench.controller.engine_statuses()}
    assert states["e0"] == "SUSPECT"

    for _ in range(40):
        other.emit(1, attempt=0)
        bench.wait(250_000_000)

    states = {s.engine_id: s.state.name for s in bench.controller.engine_statuses()}
    assert states["e0"] == "UP"


def message_of(peer: str, *, running: int, kv: int, seq: int = 1) -> PeerMessage:
    """What another dsched process says of the first engine."""
    load = PeerRankLoad(
        rank_id=RankId(EngineId("e0"), DpRank(0)), num_running=running, num_kv_tokens=kv
    )
    return PeerMessage(peer=peer, seq=seq, is_full=False, ranks=(load,), longest_tokens=kv)


def test_a_burst_goes_where_other_dscheds_have_less() -> None:
    """Load of another process counts before any report, until that process is gone."""
    bench = Bench(*engines(2))
    peering = bench.controller.peering

    assert peering.apply("p", message_of("other", running=4, kv=400))
    assert not peering.apply("p", message_of("other", running=4, kv=400)), "the same again"
    assert not peering.apply("nowhere", message_of("other", running=4, kv=400, seq=2))
    for index in range(4):
        bench.ask(f"r{index}")
    bench.controller.tick()
    counts = [len(engine.commands) for engine in bench.engines]
    peering.forget("other")
    bench.ask("last")
    bench.controller.tick()

    assert counts == [0, 4]
    assert [len(engine.commands) for engine in bench.engines] == [1, 4]


def test_what_begins_and_ends_is_told_once_and_everything_when_asked() -> None:
    bench = Bench(*engines(2))
    peering = bench.controller.peering
    assert list(peering.news(is_full=False)) == []

    bench.ask("r", prompt_len=10)
    bench.controller.tick()
    ((pool, (load,), longest),) = peering.news(is_full=False)
    again = list(peering.news(is_full=False))
    ((_, in_full, _),) = peering.news(is_full=True)
    busy = next(engine for engine in bench.engines if engine.commands)
    busy.emit(1, 2)
    busy.finish()
    ((_, (ended,), none_left),) = peering.news(is_full=False)

    assert (pool, load.num_running, load.num_kv_tokens) == ("p", 1, 10)
    assert load.rank_id.engine_id == busy.engine_id
    assert again == []
    assert in_full == (load,), "idle ranks need no word"
    assert (ended.rank_id, ended.num_running, ended.num_kv_tokens) == (load.rank_id, 0, 0)
    assert (longest, none_left) == (0, 0), "only pools that step together ask for it"


@pytest.mark.parametrize("is_listened_to", [False, True])
def test_an_end_is_told_in_a_tick_where_somebody_listens(*, is_listened_to: bool) -> None:
    (engine,) = engines(1)
    bench = Bench(engine)
    bench.controller.peering.set_listened_to(is_listened_to=is_listened_to)
    bench.ask("r")
    bench.controller.tick()
    bench.num_asked = 0

    engine.emit(1)
    engine.finish()

    assert (bench.num_asked > 0) == is_listened_to


def test_a_request_that_waits_looks_again_when_a_peer_may_have_made_room() -> None:
    (engine,) = engines(1, max_running_requests=1)
    bench = Bench(engine)
    peering = bench.controller.peering
    peering.apply("p", message_of("other", running=1, kv=10))
    bench.ask("r")
    bench.controller.tick()
    assert not engine.commands
    bench.num_asked = 0

    peering.apply("p", message_of("other", running=0, kv=0, seq=2))

    assert bench.num_asked == 1
    bench.controller.tick()
    assert len(engine.commands) == 1
