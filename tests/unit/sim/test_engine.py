"""SimEngine: one behaviour a test."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from dsched.costs.affine import AffineStepCost
from dsched.drivers.base import FinishReason
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.errors import EngineRefusedError, InvariantError
from dsched.sim.engine import KvPolicy, SimEngine, SimEngineConfig
from dsched.sim.model import SimModel

MODEL = SimModel(vocab_size=300)
COST = AffineStepCost(
    base_ns=1_000_000,
    per_decode_request_ns=10_000,
    per_kv_token_ns=100,
    per_prefill_token_ns=5_000,
    per_prefill_context_ns=0,
)


@dataclass
class Bench:
    """An engine, and everything it has handed out."""

    engine: SimEngine
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, FinishReason] = field(default_factory=dict)
    stop_token: dict[str, int | None] = field(default_factory=dict)
    durations_ns: list[int] = field(default_factory=list)

    def add(
        self, name: str, num_prompt: int, max_tokens: int, rank: int = 0, **sampling: object
    ) -> GenerateCommand:
        first = sum(name.encode()) % 300
        command = GenerateCommand(
            attempt_id=name,
            epoch=0,
            dp_rank=rank,
            prompt_token_ids=(first,) * num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        )
        self.engine.submit(command)
        return command

    def step(self) -> bool:
        duration_ns = self.engine.begin_step()
        if duration_ns is None:
            return False
        self.durations_ns.append(duration_ns)
        self.engine.validate()
        self.engine.complete_step()
        self.engine.validate()
        self.take()
        return True

    def take(self) -> None:
        for attempt in self.engine.take_output():
            self.tokens.setdefault(attempt.attempt_id, []).extend(attempt.output)
            attempt.output = []
            if attempt.finish is not None:
                self.finish[attempt.attempt_id] = attempt.finish
                self.stop_token[attempt.attempt_id] = attempt.stop_token_id

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        pytest.fail("the engine never came to rest")


def make(model: SimModel = MODEL, **fields: object) -> Bench:
    defaults: dict[str, object] = {
        "num_dp_ranks": 2,
        "kv_capacity_tokens": 1_000,
        "max_running_requests": 4,
        "max_step_tokens": 50,
        "max_model_len": 800,
    }
    config = SimEngineConfig(**(defaults | fields))  # type: ignore[arg-type]
    return Bench(SimEngine(config, model, COST))


def test_step_takes_as_long_as_the_slowest_rank() -> None:
    """Prefill of 40 tokens on rank 0, one decode with 11 KV tokens on rank 1."""
    bench = make()
    bench.add("b", 10, 50, rank=1)
    bench.step()
    bench.add("a", 40, 5, rank=0)

    bench.step()

    assert bench.engine.last_rank_ns.tolist() == [1_000_000 + 40 * 5_000, 1_011_100]
    assert bench.durations_ns[-1] == 1_200_000
    assert bench.engine.last_step_tokens.tolist() == [40, 1]


def test_first_token_comes_with_the_last_chunk() -> None:
    """120 prompt tokens in chunks of 50, 50 and 20; the third step yields the first token."""
    bench = make()
    command = bench.add("a", 120, 3)

    for expected in (0, 0, 1, 2, 3):
        bench.step()
        assert len(bench.tokens.get("a", [])) == expected

    assert bench.tokens["a"] == list(MODEL.stream(command.prompt_token_ids, 3))
    assert bench.finish == {"a": FinishReason.LENGTH}
    assert bench.durations_ns == [1_250_000, 1_250_000, 1_100_000, 1_022_100, 1_022_200]


def test_decodes_go_before_prefill() -> None:
    """Every decode runs in every step; a prompt gets what they leave of the token limit."""
    bench = make()
    for name in "abc":
        bench.add(name, 5, 30)
    bench.step()
    bench.add("long", 200, 5)

    bench.step()

    assert [len(bench.tokens[name]) for name in "abc"] == [2, 2, 2]
    assert bench.engine.last_step_tokens.tolist() == [50, 0]
    loads = bench.engine.loads()
    assert loads.num_waiting_prefill_tokens.tolist() == [200 - 47, 0]
    assert loads.num_kv_tokens.tolist() == [3 * 6 + 47, 0]


def test_prompts_share_a_step_in_order_of_arrival() -> None:
    bench = make()
    bench.add("first", 30, 5)
    bench.add("second", 30, 5)

    bench.step()

    assert list(bench.tokens) == ["first"]
    assert bench.engine.loads().num_waiting_prefill_tokens.tolist() == [10, 0]


def test_more_requests_than_may_run_wait() -> None:
    bench = make()
    for index in range(6):
        bench.add(f"r{index}", 2, 10)

    bench.step()
    loads = bench.engine.loads()

    assert loads.num_running.tolist() == [4, 0]
    assert loads.num_waiting.tolist() == [2, 0]
    bench.run()
    assert len(bench.finish) == 6


def test_request_waits_until_its_prompt_fits_the_kv() -> None:
    """KV is promised for a whole prompt at admission; nobody overtakes the head of the queue."""
    bench = make(max_step_tokens=900)
    bench.add("big", 700, 20)
    bench.add("next", 400, 5)
    bench.add("small", 10, 5)

    bench.step()

    assert bench.engine.loads().num_waiting.tolist() == [2, 0]
    bench.run()
    assert len(bench.finish) == 3
    assert bench.engine.num_preemptions == 0


def test_youngest_is_preempted_and_emits_nothing_twice() -> None:
    """Two requests outgrow the KV of a rank: the younger one starts again, its stream does not."""
    bench = make(max_step_tokens=900)
    old = bench.add("old", 490, 200)
    young = bench.add("young", 490, 200)

    bench.run()

    assert bench.engine.num_preemptions == 1
    assert bench.tokens["old"] == list(MODEL.stream(old.prompt_token_ids, 200))
    assert bench.tokens["young"] == list(MODEL.stream(young.prompt_token_ids, 200))
    assert list(bench.finish) == ["old", "young"]


def test_preempted_request_goes_before_those_that_wait() -> None:
    """It was admitted first, so it is also served again first."""
    bench = make(max_step_tokens=900)
    for name in ("old", "young"):
        bench.add(name, 490, 200)
    bench.step()
    bench.add("late", 700, 2)

    bench.run()

    assert bench.engine.num_preemptions == 1
    assert list(bench.finish) == ["old", "young", "late"]


def test_reserving_the_full_length_preempts_nobody() -> None:
    """Both would fit now, but not at their full length: the second waits."""
    bench = make(max_step_tokens=900, kv_policy=KvPolicy.RESERVE)
    bench.add("old", 490, 200)
    bench.add("young", 490, 200)

    bench.step()

    assert bench.engine.loads().num_waiting.tolist() == [1, 0]
    bench.run()
    assert bench.engine.num_preemptions == 0
    assert len(bench.finish) == 2


def test_answer_ends_at_the_models_context() -> None:
    bench = make(max_model_len=100)
    bench.add("a", 90, 50)

    bench.run()

    assert len(bench.tokens["a"]) == 10
    assert bench.finish == {"a": FinishReason.LENGTH}


def test_stop_token_is_named_and_not_handed_out() -> None:
    bench = make()
    whole = MODEL.stream((97,) * 5, 20)
    bench.add("a", 5, 20, stop_token_ids=(whole[6],))

    bench.run()

    assert bench.tokens["a"] == list(whole[: whole.index(whole[6])])
    assert bench.finish == {"a": FinishReason.STOP}
    assert bench.stop_token == {"a": whole[6]}


def test_stop_as_the_very_first_token_gives_no_output() -> None:
    bench = make()
    first = MODEL.stream((97,) * 5, 1)[0]
    bench.add("a", 5, 20, stop_token_ids=(first,))

    bench.run()

    assert bench.tokens["a"] == []
    assert bench.finish == {"a": FinishReason.STOP}
    assert bench.engine.loads().num_kv_tokens.tolist() == [0, 0]


def test_end_token_ends_unless_ignored() -> None:
    model = SimModel(vocab_size=300, eos_token_id=9, mean_output_tokens=8.0)
    bench = make(model)
    ends = bench.add("a", 5, 200)
    bench.add("b", 5, 200, ignore_eos=True)
    minimum = bench.add("c", 5, 200, min_tokens=60)

    bench.run()

    assert bench.tokens["a"] == list(model.stream(ends.prompt_token_ids, 200))
    assert bench.finish["a"] is FinishReason.STOP
    assert bench.stop_token["a"] == 9
    assert len(bench.tokens["b"]) == 200
    assert bench.finish["b"] is FinishReason.LENGTH
    assert bench.tokens["c"] == list(model.stream(minimum.prompt_token_ids, 200, minimum.sampling))
    assert len(bench.tokens["c"]) >= 60


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "in a step"])
def test_abort_frees_everything_in_every_state(when: str) -> None:
    bench = make(max_running_requests=1)
    neighbour = bench.add("n", 5, 40)
    if when != "waiting":
        bench.engine.abort("n")
    target = bench.add("t", 120, 40)
    if when == "prefilling":
        bench.step()
    elif when == "decoding":
        for _ in range(6):
            bench.step()
    elif when == "in a step":
        for _ in range(6):
            bench.step()
        bench.engine.begin_step()

    assert bench.engine.abort("t")
    assert not bench.engine.abort("t")

    if when == "in a step":
        bench.engine.complete_step()
    bench.engine.validate()
    bench.run()
    assert bench.engine.is_idle
    loads = bench.engine.loads()
    for array in (loads.num_running, loads.num_waiting, loads.num_kv_tokens):
        assert array.tolist() == [0, 0]
    assert "t" not in bench.finish
    if when == "waiting":
        assert bench.tokens["n"] == list(MODEL.stream(neighbour.prompt_token_ids, 40))
    assert len(bench.tokens.get("t", [])) < target.sampling.max_tokens


def test_output_of_several_steps_is_handed_out_at_once() -> None:
    """Who does not ask after each step gets the same tokens later."""
    bench = make()
    command = bench.add("a", 5, 30)
    other = bench.add("b", 9, 12)
    for _ in range(20):
        bench.engine.begin_step()
        bench.engine.complete_step()

    bench.take()

    assert bench.tokens["a"] == list(MODEL.stream(command.prompt_token_ids, 20))
    assert bench.tokens["b"] == list(MODEL.stream(other.prompt_token_ids, 12))
    assert bench.finish == {"b": FinishReason.LENGTH}


def test_news_is_a_first_token_or_an_end() -> None:
    bench = make()
    bench.add("a", 5, 3)
    news = []
    while bench.engine.begin_step() is not None:
        news.append(bench.engine.complete_step())

    assert news == [True, False, True]


def test_remembered_prefix_needs_no_computing() -> None:
    """The second request with the same 1,100 tokens computes what is beyond two whole blocks."""
    bench = make(
        kv_capacity_tokens=5_000,
        max_model_len=4_000,
        max_step_tokens=2_000,
        prefix_cache_tokens=4_096,
    )
    bench.add("a", 1_100, 1)
    bench.step()
    again = GenerateCommand(
        attempt_id="again",
        epoch=0,
        dp_rank=0,
        prompt_token_ids=(97,) * 1_100,
        sampling=SamplingParams(max_tokens=1),
    )
    bench.engine.submit(again)

    bench.engine.begin_step()
    bench.engine.validate()
    bench.engine.complete_step()

    assert bench.engine.last_step_tokens.tolist() == [1_100 - 1_024, 0]
    (attempt,) = bench.engine.take_output()
    assert attempt.num_cached_tokens == 1_024
    assert attempt.output == list(MODEL.stream((97,) * 1_100, 1))


def test_wholly_remembered_prompt_still_computes_its_last_token() -> None:
    """The first output token is the result of the last prompt token."""
    bench = make(
        kv_capacity_tokens=5_000,
        max_model_len=2_000,
        max_step_tokens=2_000,
        prefix_cache_tokens=4_096,
    )
    bench.add("a", 1_024, 1)
    bench.step()
    bench.add("a", 1_024, 1)

    bench.step()

    assert bench.engine.last_step_tokens.tolist() == [1, 0]
    assert bench.tokens["a"] == 2 * list(MODEL.stream((97,) * 1_024, 1))


def test_output_that_nobody_took_goes_with_its_abort() -> None:
    bench = make()
    bench.add("a", 5, 30)
    bench.add("b", 5, 30)
    for _ in range(4):
        bench.engine.begin_step()
        bench.engine.complete_step()

    bench.engine.abort("a")

    assert [attempt.attempt_id for attempt in bench.engine.take_output()] == ["b"]


@pytest.mark.parametrize(
    ("submit", "status", "message"),
    [
        (lambda bench: bench.add("x", 5, 5, rank=2), 400, "DP rank 2 does not exist; ranks are"),
        (lambda bench: bench.add("x", 800, 5), 400, "a prompt of 800 tokens does not fit"),
        (lambda bench: bench.add("x", 0, 5), 400, "a prompt of 0 tokens does not fit"),
        (lambda bench: bench.add("a", 5, 5), 409, "attempt id 'a' is in use"),
    ],
)
def test_what_cannot_run_is_refused(
    submit: Callable[[Bench], object], status: int, message: str
) -> None:
    bench = make()
    bench.add("a", 5, 5)

    with pytest.raises(EngineRefusedError, match=re.escape(message)) as caught:
        submit(bench)

    assert caught.value.status == status
    bench.run()
    assert list(bench.finish) == ["a"]


def test_request_longer_than_the_kv_of_a_rank_is_refused() -> None:
    """A request must fit by itself, or it would be preempted for ever."""
    bench = make(kv_capacity_tokens=100)
    with pytest.raises(EngineRefusedError, match="takes 1 to 99 prompt tokens"):
        bench.add("x", 100, 5)

    bench.add("y", 99, 50)
    bench.run()

    assert len(bench.tokens["y"]) == 1


def test_steps_must_alternate() -> None:
    bench = make()
    with pytest.raises(InvariantError):
        bench.engine.complete_step()
    bench.add("a", 5, 5)
    bench.engine.begin_step()
    with pytest.raises(InvariantError):
        bench.engine.begin_step()


def test_cleared_engine_is_empty_and_serves_again() -> None:
    bench = make()
    bench.add("a", 5, 50)
    bench.add("b", 500, 50)
    bench.step()
    bench.engine.begin_step()

    lost = bench.engine.clear()

    assert sorted(lost) == ["a", "b"]
    assert bench.engine.is_idle
    bench.engine.validate()
    bench.add("a", 5, 3)
    bench.run()
    assert bench.finish == {"a": FinishReason.LENGTH}


def test_rows_grow_beyond_their_first_size() -> None:
    bench = make(num_dp_ranks=40, max_running_requests=5)
    commands = [bench.add(f"r{index}", 3, 6, rank=index % 40) for index in range(200)]

    bench.run()

    for command in commands:
        assert bench.tokens[command.attempt_id] == list(MODEL.stream(command.prompt_token_ids, 6))


def test_cost_without_prefill_is_kept_beside_the_whole() -> None:
    bench = make()
    bench.add("a", 10, 9)
    bench.step()
    bench.add("b", 20, 9)

    bench.step()

    assert bench.engine.last_decode_ns.tolist() == [1_011_100, 1_000_000]
    assert np.all(bench.engine.last_rank_ns >= bench.engine.last_decode_ns)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_dp_ranks": 0}, "num_dp_ranks 0 must be at least 1"),
        ({"max_step_tokens": 4}, "max_step_tokens 4 must exceed max_running_requests 4"),
        ({"kv_capacity_tokens": 0}, "kv_capacity_tokens 0 must be at least 1"),
        ({"prefix_cache_tokens": -1}, "prefix_cache_tokens -1 is negative"),
    ],
)
def test_impossible_sizes_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**fields)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_cost_terms_are_checked(value: float) -> None:
    with pytest.raises(ValueError, match="per_kv_token_ns"):
        AffineStepCost(per_kv_token_ns=value)


def test_step_without_duration_is_refused() -> None:
    with pytest.raises(ValueError, match="a step takes time"):
        AffineStepCost(base_ns=0)
