"""SimDriver on virtual time: the contract, to the nanosecond, and its faults.

The same contract on wall time is in tests/conformance.
"""

import re

import numpy as np
import pytest

from dsched.costs.affine import AffineStepCost
from dsched.drivers.base import AttemptFinish, FinishReason
from dsched.drivers.wire import GenerateCommand, RankReport, SamplingParams
from dsched.errors import EngineRefusedError, EngineUnreachableError
from dsched.ids import AttemptId, EngineId
from dsched.rng import stream
from dsched.sim.driver import ReportFaults, SimDriver
from dsched.sim.engine import SimEngine, SimEngineConfig
from dsched.sim.loop import SimLoop
from dsched.sim.model import SimModel
from dsched.testing.recorders import RecordingListener, RecordingSink

MODEL = SimModel(vocab_size=300)
STEP_NS = 1_000_000
PROMPT = tuple(range(20))
ENGINE_ID = EngineId("sim-0")


class Stage:
    """One driver on a simulation loop; every step takes a millisecond."""

    def __init__(
        self,
        *,
        is_batching: bool = True,
        faults: ReportFaults | None = None,
        idle_report_ns: int | None = 1_000_000_000,
    ) -> None:
        self.loop = SimLoop()
        config = SimEngineConfig(
            num_dp_ranks=2,
            kv_capacity_tokens=10_000,
            max_running_requests=8,
            max_step_tokens=100,
            max_model_len=5_000,
        )
        cost = AffineStepCost(
            base_ns=STEP_NS,
            per_decode_request_ns=0,
            per_kv_token_ns=0,
            per_prefill_token_ns=0,
            per_prefill_context_ns=0,
        )
        self.driver = SimDriver(
            ENGINE_ID,
            SimEngine(config, MODEL, cost),
            self.loop,
            batch=self.loop.batch if is_batching else None,
            report_faults=faults,
            rng=stream(1, "reports"),
            idle_report_ns=idle_report_ns,
        )
        self.listener = RecordingListener()
        self.sinks: dict[str, RecordingSink] = {}
        self.times_ns: dict[str, list[int]] = {}

    def start(self) -> "Stage":
        self.driver.start(self.listener)
        self.loop.run_until(0)
        return self

    def generate(
        self, name: str, max_tokens: int, *, rank: int = 0, prompt: tuple[int, ...] = PROMPT
    ) -> RecordingSink:
        sink = TimedSink(AttemptId(name), self.loop)
        self.sinks[name] = sink
        command = GenerateCommand(
            attempt_id=name,
            epoch=1,
            dp_rank=rank,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
        self.driver.generate(command, sink)
        return sink


class TimedSink(RecordingSink):
    """Also remembers when it was called."""

    def __init__(self, attempt_id: AttemptId, loop: SimLoop) -> None:
        super().__init__(attempt_id)
        self._loop = loop
        self.chunk_times_ns: list[int] = []
        self.end_ns: int | None = None

    def on_tokens(self, attempt_id, token_ids, logprobs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        super().on_tokens(attempt_id, token_ids, logprobs)
        self.chunk_times_ns.append(self._loop.now_ns())

    def on_finish(self, attempt_id: AttemptId, finish: AttemptFinish) -> None:
        super().on_finish(attempt_id, finish)
        self.end_ns = self._loop.now_ns()


def test_first_token_and_end_come_at_their_own_times() -> None:
    """Also when the tokens between them are kept back: 20 steps of a millisecond each."""
    for is_batching in (True, False):
        stage = Stage(is_batching=is_batching).start()
        sink = stage.generate("a", 20)
        assert isinstance(sink, TimedSink)

        stage.loop.run_until(50 * STEP_NS)

        assert sink.token_ids == list(MODEL.stream(PROMPT, 20))
        assert sink.chunk_times_ns[0] == STEP_NS
        assert sink.end_ns == 20 * STEP_NS
        assert sink.num_chunks == (2 if is_batching else 20)
        assert sink.violations == []


def test_nobody_sees_a_difference_from_output_that_is_kept_back() -> None:
    """An event in the middle finds every token that had been computed by then."""
    seen: dict[bool, list[list[int]]] = {}
    for is_batching in (True, False):
        stage = Stage(is_batching=is_batching).start()
        sinks = [stage.generate("a", 40), stage.generate("b", 9, rank=1)]
        seen[is_batching] = []
        for time_ns in (STEP_NS * 3 // 2, 5 * STEP_NS, 5 * STEP_NS + 1, 17 * STEP_NS):
            stage.loop.call_at(
                time_ns,
                lambda stage=stage, sinks=sinks, kept=seen[is_batching]: kept.append(
                    [len(sink.token_ids) for sink in sinks]
                    + [stage.listener.reports[-1].num_kv_tokens]
                ),
            )
        stage.loop.run_until(100 * STEP_NS)

    assert seen[True][0] == [1, 1, 20]
    assert seen[True] == seen[False]


def test_nothing_is_kept_back_while_somebody_watches() -> None:
    """A router that holds requests acts on every report."""
    stage = Stage().start()
    stage.loop.batch.is_watched = lambda: 3 * STEP_NS < stage.loop.now_ns() < 6 * STEP_NS
    sink = stage.generate("a", 10)
    assert isinstance(sink, TimedSink)

    stage.loop.run_until(50 * STEP_NS)

    assert sink.chunk_times_ns == [number * STEP_NS for number in (1, 4, 5, 10)]


def test_output_is_not_kept_back_without_end() -> None:
    """With nothing else going on, it still comes out every few hundred steps."""
    stage = Stage(idle_report_ns=None).start()
    sink = stage.generate("a", 1_000)

    stage.loop.run_until(2_000 * STEP_NS)

    assert sink.num_chunks == 1 + 3 + 1
    assert sink.token_ids == list(MODEL.stream(PROMPT, 1_000))


def test_burst_enters_one_step_together() -> None:
    """Requests that are sent at one moment do not wait for the first one's step."""
    stage = Stage().start()
    sinks = [stage.generate(f"r{index}", 1, rank=index % 2) for index in range(4)]

    stage.loop.run_until(STEP_NS)

    assert all(sink.is_ended for sink in sinks)


def test_engine_that_is_up_says_what_it_is_with_the_next_event() -> None:
    stage = Stage()
    stage.driver.start(stage.listener)
    assert stage.listener.ups == []

    stage.loop.run_until(0)

    (description,) = stage.listener.ups
    assert description.engine_id == ENGINE_ID
    assert (description.kind, description.num_dp_ranks) == ("sim", 2)
    assert (description.kv_capacity_tokens, description.max_model_len) == (10_000, 5_000)


def test_abort_answers_later_and_once() -> None:
    stage = Stage().start()
    sink = stage.generate("a", 1_000)
    stage.loop.run_until(10 * STEP_NS)

    stage.driver.abort(AttemptId("a"))
    stage.driver.abort(AttemptId("a"))
    assert not sink.is_ended, "no answer from inside the call"
    stage.loop.run_until(2_000 * STEP_NS)

    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.ABORT
    assert len(sink.token_ids) == 10
    assert sink.violations == []


def test_abort_from_inside_a_token_call_ends_the_attempt_there() -> None:
    """A stop string is found while tokens are handed over; the rest of the chunk's end is moot."""
    stage = Stage().start()
    sink = stage.generate("a", 1)
    plain = sink.on_tokens

    def on_tokens(attempt_id, token_ids, logprobs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        plain(attempt_id, token_ids, logprobs)
        stage.driver.abort(attempt_id)

    sink.on_tokens = on_tokens  # type: ignore[method-assign]
    stage.loop.run_until(STEP_NS * 5)

    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.ABORT
    assert sink.violations == []


def test_refusal_answers_later() -> None:
    stage = Stage().start()
    sink = stage.generate("a", 5, prompt=(5,) * 5_000)
    assert not sink.is_ended

    stage.loop.run_until(0)

    assert isinstance(sink.error, EngineRefusedError)
    assert sink.error.status == 400


def test_close_ends_what_runs_and_is_silent_afterwards() -> None:
    stage = Stage().start()
    sink = stage.generate("a", 100)
    stage.loop.run_until(5 * STEP_NS)
    num_reports = len(stage.listener.reports)

    stage.driver.close()
    stage.driver.close()
    late = stage.generate("late", 5)
    stage.loop.run_until(5_000 * STEP_NS)

    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.ABORT
    assert isinstance(late.error, EngineUnreachableError)
    assert len(stage.listener.reports) == num_reports
    assert sink.violations == late.violations == []


def test_reports_carry_the_load_after_the_step() -> None:
    stage = Stage(is_batching=False).start()
    stage.generate("a", 3)
    stage.generate("b", 2, rank=1, prompt=PROMPT * 12)

    stage.loop.run_until(10 * STEP_NS)

    assert [load_of(report) for report in stage.listener.reports if report.dp_rank == 0] == [
        (1, 0, 20, 0, 20),
        (1, 0, 21, 0, 1),
        (0, 0, 0, 0, 1),
    ]
    assert [load_of(report) for report in stage.listener.reports if report.dp_rank == 1] == [
        (1, 0, 100, 140, 100),
        (1, 0, 200, 40, 100),
        (1, 0, 240, 0, 40),
        (0, 0, 0, 0, 1),
    ]
    assert {report.step_ns for report in stage.listener.reports} == {STEP_NS}


def load_of(report: RankReport) -> tuple[int, int, int, int, int]:
    return (
        report.num_running,
        report.num_waiting,
        report.num_kv_tokens,
        report.num_waiting_prefill_tokens,
        report.num_step_tokens,
    )


def test_idle_engine_reports_once_a_second() -> None:
    stage = Stage().start()
    stage.loop.run_until(3_500_000_000)

    assert [(report.dp_rank, report.seq) for report in stage.listener.reports] == [
        (rank, seq) for seq in (1, 2, 3) for rank in (0, 1)
    ]
    assert {report.step_ns for report in stage.listener.reports} == {0}


def test_reports_can_be_late_or_lost() -> None:
    late = Stage(faults=ReportFaults(delay_ns=5 * STEP_NS), idle_report_ns=None).start()
    late.generate("a", 4)
    late.loop.run_until(5 * STEP_NS + STEP_NS // 2)
    assert late.listener.reports == []
    late.loop.run_until(20 * STEP_NS)
    assert [report.num_kv_tokens for report in late.listener.reports if report.dp_rank == 0] == [
        20,
        21,
        22,
        0,
    ]

    lossy = Stage(faults=ReportFaults(loss_share=0.5), is_batching=False).start()
    lossy.generate("a", 400)
    lossy.loop.run_until(500 * STEP_NS)
    seqs = [report.seq for report in lossy.listener.reports if report.dp_rank == 0]
    assert 140 < len(seqs) < 260
    assert seqs == sorted(set(seqs))


def test_kill_fails_every_attempt_and_says_so_once() -> None:
    stage = Stage().start()
    sinks = [stage.generate("a", 100), stage.generate("b", 100, rank=1)]
    stage.loop.run_until(10 * STEP_NS)

    stage.driver.kill()
    stage.driver.kill()
    late = stage.generate("late", 5)
    stage.loop.run_until(5_000 * STEP_NS)

    for sink in (*sinks, late):
        assert isinstance(sink.error, EngineUnreachableError)
        assert sink.violations == []
    assert [len(sink.token_ids) for sink in sinks] == [10, 10]
    assert len(stage.listener.downs) == 1
    assert all(report.step <= 10 for report in stage.listener.reports)


def test_restarted_engine_is_empty_and_another_incarnation() -> None:
    stage = Stage().start()
    stage.generate("a", 100)
    stage.loop.run_until(10 * STEP_NS)
    stage.driver.kill()
    stage.loop.run_until(20 * STEP_NS)

    stage.driver.restart()
    stage.loop.run_until(20 * STEP_NS)
    sink = stage.generate("b", 5)
    stage.loop.run_until(40 * STEP_NS)

    assert len(stage.listener.ups) == 2
    assert sink.token_ids == list(MODEL.stream(PROMPT, 5))
    incarnations = [report.incarnation for report in stage.listener.reports]
    assert incarnations[0] != incarnations[-1]
    first_new = incarnations.index(incarnations[-1])
    assert stage.listener.reports[first_new].seq == 1


def test_frozen_engine_says_nothing_and_goes_on_where_it_stopped() -> None:
    stage = Stage(is_batching=False).start()
    sink = stage.generate("a", 20)
    assert isinstance(sink, TimedSink)
    stage.loop.run_until(5 * STEP_NS + 300_000)
    stage.driver.freeze()
    num_reports = len(stage.listener.reports)
    waiting = stage.generate("b", 3)

    stage.loop.run_until(3_000 * STEP_NS)
    assert (len(sink.token_ids), len(stage.listener.reports)) == (5, num_reports)
    assert stage.listener.downs == []
    stage.driver.thaw()
    stage.loop.run_until(4_000 * STEP_NS)

    assert sink.chunk_times_ns[5] == 3_000 * STEP_NS + 700_000
    assert sink.token_ids == list(MODEL.stream(PROMPT, 20))
    assert waiting.token_ids == list(MODEL.stream(PROMPT, 3))


def test_abort_reaches_a_frozen_engine_when_it_wakes() -> None:
    stage = Stage().start()
    sink = stage.generate("a", 20)
    stage.loop.run_until(5 * STEP_NS + 1)
    stage.driver.freeze()

    stage.driver.abort(AttemptId("a"))
    stage.driver.thaw()
    stage.loop.run_until(100 * STEP_NS)

    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.ABORT
    assert stage.driver.engine.is_idle
    assert not stage.driver.engine.is_stepping


def test_slow_engine_takes_longer_steps() -> None:
    stage = Stage().start()
    stage.driver.slow(2.5)
    sink = stage.generate("a", 4)
    assert isinstance(sink, TimedSink)

    stage.loop.run_until(100 * STEP_NS)

    assert sink.end_ns == 10 * STEP_NS


def test_wrong_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="factor 0 must be positive"):
        Stage().driver.slow(0)
    with pytest.raises(ValueError, match=re.escape("loss_share 1.5 is not within 0..1")):
        ReportFaults(loss_share=1.5)
    with pytest.raises(ValueError, match="delay_ns -1"):
        ReportFaults(delay_ns=-1)


def test_reused_attempt_id_is_the_callers_mistake() -> None:
    stage = Stage().start()
    stage.generate("a", 10)

    with pytest.raises(ValueError, match="'a' was used before"):
        stage.generate("a", 10)


def test_idle_reports_do_not_keep_steps_tokens() -> None:
    """A report of no step says that no token was computed."""
    stage = Stage().start()
    stage.generate("a", 3)
    stage.loop.run_until(2_000_000_000)

    last = stage.listener.reports[-1]

    assert (last.step_ns, last.num_step_tokens) == (0, 0)
    assert np.max([report.num_step_tokens for report in stage.listener.reports]) == 20
