"""An engine is lost at any token: the client's bytes say the same as without.

The real controller and the real front-door answer (detokenizer, stop strings, JSON, usage) over
engines that follow a script on virtual time. Every place of every script is tried: inside a
character of several bytes, inside a tool call's JSON, inside a stop string, before the first token,
and when only the end was missing.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from answer_client import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from dsched.controller import Controller, ControllerSettings, EngineSpec, PoolSpec
from dsched.controller.request import InferenceRequest
from dsched.drivers.wire import SamplingParams
from dsched.faults import MemoryJournal
from dsched.faults.progress import ProgressLimits
from dsched.frontdoor.answer import Answer
from dsched.frontdoor.format import AnswerFormat
from dsched.frontdoor.stats import Api, ModelStats
from dsched.frontdoor.text import StopFinder, TokenTexts
from dsched.ids import AttemptIds, EngineId, RequestId
from dsched.sim.cluster import SimHost
from dsched.sim.loop import SimLoop
from dsched.sim.tokenizer import build_sim_tokenizer
from dsched.testing.scripted_engine import ScriptedEngine

TOKENIZER = build_sim_tokenizer()
PROMPT = tuple(TOKENIZER.encode("the answer is").ids)
SECOND_NS = 1_000_000_000
GREEDY = SamplingParams(max_tokens=400, temperature=0.0)


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request and what the model says to it."""

    text: str
    stops: tuple[str, ...] = ()
    sampling: SamplingParams = GREEDY
    max_tokens: int | None = None
    """Cut the answer here; else it ends by itself."""

    @property
    def script(self) -> tuple[int, ...]:
        return ids(self.text)


TOOL_CALL = '{"name": "get_weather", "arguments": {"city": "Köln 日本", "units": ["c", "k"]}}'
CASES = {
    "bytes": Case(text=" a 日本語 😀é€ z", max_tokens=None),
    "tool_call": Case(text=f"<tool_call>{TOOL_CALL}</tool_call>"),
    "stop_string": Case(text=" one two END three", stops=("END", "NEVER")),
    "stop_almost": Case(text=" one EN two ENE three EN", stops=("END",)),
    "stop_of_bytes": Case(text=" left 日本 right", stops=("本",)),
    "length": Case(text=" old house by the sea", max_tokens=4),
    "length_in_character": Case(text=" x 😀 y", max_tokens=4),
    "replayed_grammar": Case(
        text=TOOL_CALL,
        sampling=SamplingParams(
            max_tokens=400, temperature=0.0, structured_output={"type": "json_object"}
        ),
    ),
    "replayed_penalty": Case(
        text=" red red blue 日 red",
        sampling=SamplingParams(max_tokens=400, temperature=0.0, presence_penalty=0.3),
    ),
    "min_tokens": Case(
        text=" a END b END c",
        stops=("END",),
        sampling=SamplingParams(max_tokens=400, temperature=0.0, min_tokens=6),
    ),
}


@dataclass(frozen=True)
class Heard:
    """What a client can tell about its answer."""

    text: str
    reasons: tuple[str, ...]
    usage: object
    num_done: int
    guarantee: str | None
    error: object


class Bench:
    """Controller, engines and one answer on virtual time."""

    def __init__(self, case: Case, *, num_engines: int = 3, is_stream: bool = True) -> None:
        self.case = case
        self.loop = SimLoop()
        scripts = {PROMPT: case.script}
        self.engines = [
            ScriptedEngine(engine_id=EngineId(f"e{index}"), loop=self.loop, scripts=scripts)
            for index in range(num_engines)
        ]
        host = SimHost(self.loop)
        self.controller = Controller(
            pools=[
                PoolSpec(
                    name="p",
                    model="m",
                    engines=tuple(
                        EngineSpec(engine_id=each.engine_id, model="m") for each in self.engines
                    ),
                )
            ],
            drivers={each.engine_id: each for each in self.engines},
            journal=MemoryJournal(),
            clock=self.loop.clock,
            host=host,
            attempt_ids=AttemptIds(process_tag=1),
            settings=ControllerSettings(
                max_attempts=4, progress=ProgressLimits(), is_validating=True
            ),
        )
        host.tick = self.controller.tick
        self.controller.start()
        self.loop.run_until(0)
        self.client = Client()
        self.is_stream = is_stream
        self.answer = self._ask()

    def _ask(self) -> Answer:
        case = self.case
        sampling = case.sampling
        if case.max_tokens is not None:
            sampling = SamplingParams(max_tokens=case.max_tokens, temperature=0.0)
        request = InferenceRequest(
            request_id=RequestId("r"), model="m", prompt_token_ids=PROMPT, sampling=sampling
        )
        answer = Answer(
            connection=self.client,  # type: ignore[arg-type]
            control=self.controller,
            clock=self.loop.clock,
            stats=ModelStats(),
            on_end=lambda *_: None,
            request_id=request.request_id,
            api=Api.CHAT,
            model="m",
            format=AnswerFormat(
                Api.CHAT, answer_id="a", model="m", created_s=0, has_usage=self.is_stream
            ),
            detokenizer=TokenTexts(TOKENIZER).detokenizer(PROMPT),
            finder=StopFinder(case.stops) if case.stops else None,
            logprobs=None,
            headers=[],
            is_stream=self.is_stream,
            has_usage=self.is_stream,
            has_token_ids=False,
            min_tokens=sampling.min_tokens,
            num_prompt_tokens=len(PROMPT),
            start_ns=0,
        )
        self.controller.submit(request, answer)
        return answer

    def run(self) -> Heard:
        self.loop.run_until(60 * SECOND_NS)
        assert self.client.num_ends == 1, f"{self.client.num_ends} ends"
        assert self.controller.num_open_requests == 0
        return self.heard()

    def heard(self) -> Heard:
        data = b"".join(self.client.chunks)
        documents = list(self._documents(data))
        num_done = data.count(b"data: [DONE]")
        text, reasons, usage, guarantee, error = "", [], None, None, None
        for document in documents:
            usage = document.get("usage") or usage
            error = document.get("error") or error
            guarantee = document.get("dsched", {}).get("guarantee", guarantee)
            for choice in document.get("choices", ()):
                message = choice.get("delta") or choice.get("message") or {}
                text += message.get("content") or ""
                if choice["finish_reason"] is not None:
                    reasons.append(choice["finish_reason"])
        return Heard(text, tuple(reasons), usage, num_done, guarantee, error)

    def _documents(self, data: bytes) -> Iterator[dict]:  # type: ignore[type-arg]
        if not self.is_stream:
            yield json.loads(data)
            return
        for event in data.split(b"\n\n"):
            if event and event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))


def undisturbed(case: Case, *, is_stream: bool = True) -> Heard:
    return Bench(case, is_stream=is_stream).run()


def same(heard: Heard, expected: Heard) -> None:
    assert heard.error is None
    assert (heard.text, heard.reasons, heard.usage, heard.num_done) == (
        expected.text,
        expected.reasons,
        expected.usage,
        expected.num_done,
    )


def lose_at(bench: Bench, places: Sequence[int], how: str = "kill") -> list[ScriptedEngine]:
    """Lose the engine that serves when it is about to send token `places[0]`, then the next."""
    left = list(places)
    lost: list[ScriptedEngine] = []

    def on_token(engine: ScriptedEngine, place: int) -> None:
        if left and place == left[0]:
            del left[0]
            lost.append(engine)
            getattr(engine, how)()

    for engine in bench.engines:
        engine.on_token = on_token
    return lost


EVERY_PLACE = [
    pytest.param(name, place, id=f"{name}-{place}")
    for name, case in CASES.items()
    for place in range(min(len(case.script), case.max_tokens or 400) + 1)
]


def test_cases_are_what_they_are_for() -> None:
    """Characters and stop strings do lie across tokens; every way of ending is there."""
    assert any("\N{REPLACEMENT CHARACTER}" in TOKENIZER.decode([t]) for t in CASES["bytes"].script)
    assert len(ids("END")) > 1
    ends = {name: undisturbed(case) for name, case in CASES.items()}
    assert ends["stop_string"].text == " one two "
    assert ends["stop_almost"].text == CASES["stop_almost"].text
    assert ends["length"].reasons == ("length",)
    assert json.loads(ends["replayed_grammar"].text)["name"] == "get_weather"
    assert {end.num_done for end in ends.values()} == {1}
    assert all(end.guarantee is None for end in ends.values())


@pytest.mark.parametrize(("name", "place"), EVERY_PLACE)
@pytest.mark.parametrize("is_stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_kill_at_every_token_changes_nothing(name: str, place: int, *, is_stream: bool) -> None:
    """Text, finish reason, usage and the number of ends equal those of the undisturbed run."""
    case = CASES[name]
    bench = Bench(case, is_stream=is_stream)
    lost = lose_at(bench, [place])

    heard = bench.run()

    same(heard, undisturbed(case, is_stream=is_stream))
    if lost:
        is_whole = place == 0 or heard.guarantee == "exact"
        assert is_whole, heard


@pytest.mark.parametrize(("name", "place"), EVERY_PLACE[::3])
def test_two_kills_change_nothing(name: str, place: int) -> None:
    """The engine that took over dies one token later."""
    case = CASES[name]
    bench = Bench(case)
    lose_at(bench, [place, place + 1])

    same(bench.run(), undisturbed(case))


@pytest.mark.parametrize(("name", "place"), EVERY_PLACE[::3])
def test_a_kill_during_the_handoff_changes_nothing(name: str, place: int) -> None:
    """The engine that takes over dies while it computes the prompt."""
    case = CASES[name]
    bench = Bench(case)
    lost = lose_at(bench, [place])
    killed = []

    def on_prefill(engine: ScriptedEngine) -> None:
        if lost and not killed and engine is not lost[0]:
            killed.append(engine)
            engine.kill()

    for engine in bench.engines:
        engine.on_prefill = on_prefill

    same(bench.run(), undisturbed(case))
    assert bool(killed) == bool(lost) or place >= 4


@pytest.mark.parametrize(("name", "place"), EVERY_PLACE[::4])
def test_a_freeze_and_a_wake_up_change_nothing(name: str, place: int) -> None:
    """Missing progress gives it away; when it wakes up its tokens are fenced."""
    case = CASES[name]
    bench = Bench(case)
    lost = lose_at(bench, [place], how="freeze")
    bench.loop.call_at(15 * SECOND_NS, lambda: [engine.thaw() for engine in lost])
    bench.loop.call_at(3_100_000_000, lambda: [engine.thaw() for engine in lost])

    same(bench.run(), undisturbed(case))


@pytest.mark.parametrize(("name", "place"), EVERY_PLACE[::5])
@pytest.mark.parametrize("after_ms", [0, 15, 35])
def test_a_client_that_leaves_during_the_handoff_leaves_nothing(
    name: str, place: int, after_ms: int
) -> None:
    """No byte after it left, no attempt, no booking, no open journal entry."""
    bench = Bench(CASES[name])

    def leave() -> None:
        bench.answer.on_disconnect()
        bench.client.is_writable = False

    def on_token(engine: ScriptedEngine, at: int) -> None:
        if at == place:
            engine.kill()
            bench.loop.call_at(bench.loop.now_ns() + after_ms * 1_000_000, leave)

    bench.engines[0].on_token = on_token
    bench.loop.run_until(20 * SECOND_NS)

    assert bench.client.num_ends <= 1
    assert bench.controller.num_open_requests == 0
    assert bench.controller._state.journal.status().num_open_requests == 0
    bench.controller.validate()
    loads = [status.ranks[0].num_running for status in bench.controller.engine_statuses()]
    assert sum(loads) == 0


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet='ab 日😀é"{}:,[]EN', min_size=1, max_size=30),
    stops=st.lists(st.sampled_from(["EN", "ENE", "日a", '"}', " "]), max_size=2),
    places=st.lists(st.integers(0, 40), min_size=1, max_size=2),
)
def test_any_text_survives_any_kills(text: str, stops: list[str], places: list[int]) -> None:
    """Whatever is said and wherever it is cut."""
    case = Case(text=f" {text}", stops=tuple(stops))
    bench = Bench(case)
    lose_at(bench, sorted(places))

    same(bench.run(), undisturbed(case))


def test_what_cannot_be_continued_is_refused_and_says_so() -> None:
    """Sampling without a seed under penalties: an error, no [DONE], no finish reason."""
    sampling = SamplingParams(max_tokens=400, temperature=1.0, presence_penalty=0.5)
    bench = Bench(Case(text=" red blue green", sampling=sampling))
    lose_at(bench, [2])

    heard = bench.run()

    assert heard.error is not None
    assert heard.error["guarantee"] == "refused"  # type: ignore[index]
    assert (heard.reasons, heard.num_done) == ((), 0)
    assert heard.text == TOKENIZER.decode(list(bench.case.script[:2]))


def test_sampled_answers_are_continued_and_say_so() -> None:
    """What was sent stands; the client is told that the rest was drawn anew."""
    sampling = SamplingParams(max_tokens=400, temperature=1.0)
    bench = Bench(Case(text=" red blue green", sampling=sampling))
    lose_at(bench, [2])

    heard = bench.run()

    assert (heard.text, heard.guarantee) == (" red blue green", "continuation")
