"""ProgressWatch: who is taken for frozen, and who is not."""

from collections.abc import Hashable

import pytest

from dsched.costs.prefill import PrefillCostModel
from dsched.faults.progress import ProgressLimits, ProgressWatch, StalledEngine
from dsched.ids import EngineId

MS = 1_000_000
S = 1_000 * MS
A, B = EngineId("a"), EngineId("b")
LIMITS = ProgressLimits(
    decode_timeout_ns=3 * S, prefill_timeout_ns=5 * S, prefill_token_ns=MS, stream_timeout_ns=20 * S
)


class Bench:
    """A watch that is swept every 250 ms of a time line."""

    def __init__(self) -> None:
        self.watch = ProgressWatch(LIMITS)
        self.now_ns = 0
        self.counts: dict[Hashable, int] = {}
        self.stalled: list[StalledEngine] = []
        self.attempts: list[Hashable] = []
        self.watch.next_sweep_ns(0)

    def begin(self, key: str, engine_id: EngineId, *, num_prompt_tokens: int = 10) -> None:
        self.counts[key] = 0
        self.watch.begin(
            key, engine_id=engine_id, num_prompt_tokens=num_prompt_tokens, now_ns=self.now_ns
        )
        self.watch.next_sweep_ns(self.now_ns)

    def pass_time(self, seconds: float, *, emitting: tuple[str, ...] = ()) -> None:
        for _ in range(round(seconds * 4)):
            self.now_ns += 250 * MS
            for key in emitting:
                self.counts[key] += 1
            plan = self.watch.sweep(self.now_ns, self.counts.__getitem__)
            self.stalled += plan.engines
            self.attempts += plan.attempts


def test_a_decoding_engine_that_stops_is_noticed_within_a_sweep_of_its_limit() -> None:
    """3 s of silence plus at most one sweep."""
    bench = Bench()
    bench.begin("x", A)
    bench.pass_time(2, emitting=("x",))

    bench.pass_time(3)
    assert not bench.stalled
    bench.pass_time(0.25)

    assert bench.stalled == [StalledEngine(engine_id=A, silent_ns=3_250 * MS, limit_ns=3 * S)]


def test_a_long_prefill_gets_the_time_its_prompt_needs() -> None:
    """5 s and 1 ms a token: 20 000 tokens may take 25 s."""
    bench = Bench()
    bench.begin("x", A, num_prompt_tokens=20_000)

    bench.pass_time(25)
    assert not bench.stalled
    bench.pass_time(0.25)

    assert [each.engine_id for each in bench.stalled] == [A]


def test_a_step_in_a_report_is_progress() -> None:
    """A prefill behind others emits nothing, but its engine steps."""
    bench = Bench()
    bench.begin("x", A)

    for _ in range(30):
        bench.pass_time(1)
        bench.watch.note_step(A, bench.now_ns)

    assert not bench.stalled


def test_one_engine_does_not_vouch_for_another() -> None:
    """Tokens of b say nothing about a."""
    bench = Bench()
    bench.begin("x", A)
    bench.begin("y", B)
    bench.pass_time(1, emitting=("x", "y"))

    bench.pass_time(4, emitting=("y",))

    assert {each.engine_id for each in bench.stalled} == {A}


def test_an_idle_engine_that_gets_work_starts_its_clock_then() -> None:
    """An hour without work is not an hour of silence."""
    bench = Bench()
    bench.begin("x", A)
    bench.pass_time(1, emitting=("x",))
    bench.watch.end("x")
    bench.now_ns += 3_600 * S

    bench.begin("y", A)
    bench.pass_time(2)

    assert not bench.stalled


def test_one_stream_that_stands_still_alone_is_moved_after_its_own_limit() -> None:
    """Preemption is normal for a while."""
    bench = Bench()
    bench.begin("x", A)
    bench.begin("y", A)
    bench.pass_time(1, emitting=("x", "y"))

    bench.pass_time(20, emitting=("y",))
    assert not bench.attempts
    bench.pass_time(0.25, emitting=("y",))

    assert bench.attempts == ["x"]
    assert not bench.stalled


@pytest.mark.parametrize("jump_s", [60, -60], ids=["slept", "clock went back"])
def test_time_that_dsched_itself_lost_is_nobodys_fault(jump_s: int) -> None:
    """A stopped dsched must not take the whole cluster for frozen when it wakes up."""
    bench = Bench()
    bench.now_ns = 100 * S
    bench.begin("x", A)
    bench.pass_time(1, emitting=("x",))

    bench.now_ns += jump_s * S
    bench.pass_time(2.75)
    assert not bench.stalled
    bench.pass_time(1)

    assert [each.engine_id for each in bench.stalled][:1] == [A]


def test_limits_are_checked() -> None:
    """The message names the limit and its value."""
    with pytest.raises(ValueError, match="decode_timeout_ns is -1"):
        ProgressLimits(decode_timeout_ns=-1)


def prefill_model() -> PrefillCostModel:
    """10 ms and 0.1 ms a token, as a start that is right only in proportion."""
    return PrefillCostModel.from_coefficients(fixed_s=0.01, token_s=1e-4, attention_s=1e-12)


class PaceBench(Bench):
    """The same with a watch that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = ProgressWatch(LIMITS, make_prefill_model=prefill_model)
        self.watch.next_sweep_ns(0)

    def serve(
        self, key: str, *, seconds: float, num_prompt_tokens: int, num_cached: int = 0
    ) -> None:
        """One request from its start to its end."""
        self.begin(key, A, num_prompt_tokens=num_prompt_tokens)
        self.pass_time(seconds)
        self.counts[key] = 1
        self.pass_time(0.25)
        self.end(key, num_cached=num_cached)

    def end(self, key: str, *, num_cached: int = 0) -> None:
        self.watch.note_cached(key, num_cached)
        self.watch.end(key)

    def prefilled(self, key: str) -> float | None:
        """A prefill half ends; how many seconds it showed."""
        elapsed_ns = self.watch.note_prefilled(key, num_cached_tokens=0, now_ns=self.now_ns)
        self.watch.end(key)
        return None if elapsed_ns is None else elapsed_ns / S

    def seconds_until_noticed(self, **prompts: int) -> float:
        """How long it may stand still over these prompts."""
        for key, num_tokens in prompts.items():
            self.begin(key, A, num_prompt_tokens=num_tokens)
        start_ns = self.now_ns
        while not self.stalled and self.now_ns - start_ns < 100 * S:
            self.pass_time(0.25)
        return (self.now_ns - start_ns) / S


def test_a_learned_pace_replaces_the_configured_bound() -> None:
    """0.2 ms a token were seen, so 20 000 tokens get 3 s and 4 times 4 s, not 5 s and 20 s."""
    bench = PaceBench()
    for number in range(20):
        bench.serve(f"w{number}", seconds=2, num_prompt_tokens=11_250)  # 2.25 s at the sweep

    assert 18 <= bench.seconds_until_noticed(x=20_000) <= 20.5


def test_a_slow_engine_gets_the_time_that_it_needs() -> None:
    """2 ms a token, more than the configured price: its long prompts are no freeze."""
    bench = PaceBench()
    for number in range(20):
        bench.serve(f"w{number}", seconds=2, num_prompt_tokens=1_125)

    assert bench.seconds_until_noticed(x=5_000, y=5_000) > 70


def test_a_pace_is_learned_from_what_was_computed() -> None:
    """10 000 of 11 000 tokens were cached: 1 000 took the time, and a fresh prompt may too."""
    bench = PaceBench()
    for number in range(20):
        bench.serve(f"w{number}", seconds=2, num_prompt_tokens=11_000, num_cached=10_000)

    assert bench.seconds_until_noticed(x=5_000) > 40


def test_a_prefill_half_teaches_with_its_end() -> None:
    """Nobody hears its token; how long it took is told to whoever routes prompts, too."""
    bench = PaceBench()
    shown = []
    for number in range(20):
        key = f"w{number}"
        bench.begin(key, A, num_prompt_tokens=11_250)
        bench.pass_time(2.25)
        shown.append(bench.prefilled(key))

    assert shown == [2.25] * 20
    assert 18 <= bench.seconds_until_noticed(x=20_000) <= 20.5


def test_a_prefill_half_among_others_teaches_nothing() -> None:
    """Nor does one whose end dsched heard late, nor one that is not watched."""
    bench = PaceBench()
    bench.begin("a", A, num_prompt_tokens=10_000)
    bench.begin("b", A, num_prompt_tokens=10_000)
    bench.pass_time(1)
    shown = [bench.prefilled("a"), bench.prefilled("b")]
    bench.begin("c", A, num_prompt_tokens=10_000)
    bench.pass_time(1)
    bench.now_ns += 60 * S
    shown += [bench.prefilled("c"), bench.prefilled("nobody")]

    assert shown == [None] * 4


def test_a_few_prompts_teach_nothing_yet() -> None:
    """Until then the configured bound holds: 5 s and 1 ms a token."""
    bench = PaceBench()
    for number in range(7):
        bench.serve(f"w{number}", seconds=0, num_prompt_tokens=20_000)

    assert bench.seconds_until_noticed(x=20_000) == 25.25


def test_prompts_that_shared_their_engine_teach_nothing() -> None:
    """How long they took says nothing of any of them."""
    bench = PaceBench()
    for number in range(20):
        pair = (f"a{number}", f"b{number}")
        for key in pair:
            bench.begin(key, A, num_prompt_tokens=20_000)
        bench.pass_time(0.25, emitting=pair)
        for key in pair:
            bench.end(key)

    assert bench.seconds_until_noticed(x=20_000) == 25.25
