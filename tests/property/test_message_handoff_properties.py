"""An engine is lost at any token of an answer, or a client comes back at any token: the
message, the calls and the ids of the calls are those of the undisturbed answer.

The front door's answer is driven directly: what the controller gives after a handoff, and after a
restart with `Last-Event-ID`, is the same tokens in other groups.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
from answer_client import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dsched.clock import ManualClock
from dsched.controller.request import RequestError, RequestFinish
from dsched.drivers.base import FinishReason
from dsched.frontdoor.answer import Answer
from dsched.frontdoor.deepseek import DeepseekRenderer
from dsched.frontdoor.deltas import MessageBuilder, call_id_prefix
from dsched.frontdoor.format import AnswerFormat
from dsched.frontdoor.parsed_answer import ParsedAnswer
from dsched.frontdoor.renderer import Renderer, TemplateRenderer
from dsched.frontdoor.schema import parse_chat
from dsched.frontdoor.stats import Api, ModelStats
from dsched.frontdoor.text import StopFinder, TokenTexts
from dsched.ids import RequestId
from dsched.sim.tokenizer import build_sim_tokenizer
from dsched.testing.chat_models import DEEPSEEK_EOS, HERMES_TEMPLATE, build_deepseek_tokenizer

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
HERMES_CALL = (
    '<tool_call>\n{"name": "find", "arguments": {"word": "日 <b>", "n": [1]}}\n</tool_call>'
)
FIND = {"type": "function", "function": {"name": "find"}}
FORCED_CALL = '{"name": "find", "parameters": {"word": "日 <b>", "n": [1]}}'
DSML_CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="find">\n<｜DSML｜ parameter name="word" '
    'string="true">日 "<b></｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="find">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


class Control:
    """Only hears that an answer is over."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request and the tokens that the model says to it."""

    tokenizer: Tokenizer
    renderer: Renderer
    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    reason: FinishReason = FinishReason.STOP

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = self.tokenizer.encode(self.text, add_special_tokens=False).ids
        return ids


SIM, DEEPSEEK = build_sim_tokenizer(), build_deepseek_tokenizer()
HERMES = TemplateRenderer(
    SIM, chat_template=HERMES_TEMPLATE, tool_call_format="hermes", reasoning_format="think"
)
BARE = TemplateRenderer(SIM, chat_template=HERMES_TEMPLATE)
V41 = DeepseekRenderer(DEEPSEEK, chat_format="deepseek-v4.1")
CASES = {
    "plain": Case(
        tokenizer=SIM,
        renderer=TemplateRenderer(SIM, chat_template=HERMES_TEMPLATE),
        text="one 😀 two EN",
        fields={"stop": "END"},
    ),
    "hermes": Case(
        tokenizer=SIM,
        renderer=HERMES,
        text=f"<think>\nso 😀</think>\n\nOne moment. {HERMES_CALL}\n{HERMES_CALL} and <tool<|eos|>",
        fields={"tools": TOOLS},
    ),
    "hermes_cut": Case(
        tokenizer=SIM,
        renderer=HERMES,
        text=HERMES_CALL[:-20],
        fields={"tools": TOOLS},
        reason=FinishReason.LENGTH,
    ),
    "hermes_stop": Case(
        tokenizer=SIM,
        renderer=HERMES,
        text="<think>no</think>yes END not",
        fields={"stop": "END", "min_tokens": 2},
    ),
    "hermes_single": Case(
        tokenizer=SIM,
        renderer=HERMES,
        text=f"{HERMES_CALL}{HERMES_CALL} after",
        fields={"tools": TOOLS, "parallel_tool_calls": False},
    ),
    "named": Case(
        tokenizer=SIM,
        renderer=HERMES,
        text='<think>\nso 😀</think>\n\n{"word": "日 <b>", "n": [1]}<|eos|>',
        fields={"tools": TOOLS, "tool_choice": FIND},
    ),
    "named_at_once": Case(
        tokenizer=SIM,
        renderer=HERMES,
        text='{"word": "日 <b>", "n": [1]}',
        fields={"tools": TOOLS, "tool_choice": FIND, "chat_template_kwargs": {"think": True}},
    ),
    "named_cut": Case(
        tokenizer=SIM,
        renderer=BARE,
        text='{"word": "日 <',
        fields={"tools": TOOLS, "tool_choice": FIND},
        reason=FinishReason.LENGTH,
    ),
    "named_stop": Case(
        tokenizer=SIM,
        renderer=BARE,
        text='{"word": "yes END not"}',
        fields={"tools": TOOLS, "tool_choice": FIND, "stop": "END"},
    ),
    "named_broken": Case(
        tokenizer=SIM,
        renderer=BARE,
        text="I call 😀 find.",
        fields={"tools": TOOLS, "tool_choice": FIND},
    ),
    "required": Case(
        tokenizer=SIM,
        renderer=HERMES,
        text=f"so 😀</think>[{FORCED_CALL}, {FORCED_CALL}]",
        fields={"tools": TOOLS, "tool_choice": "required", "chat_template_kwargs": {"think": True}},
    ),
    "required_cut": Case(
        tokenizer=SIM,
        renderer=BARE,
        text=f"[{FORCED_CALL}, {FORCED_CALL[:-12]}",
        fields={"tools": TOOLS, "tool_choice": "required"},
        reason=FinishReason.LENGTH,
    ),
    "required_stop": Case(
        tokenizer=SIM,
        renderer=BARE,
        text=f"[{FORCED_CALL}]",
        fields={"tools": TOOLS, "tool_choice": "required", "stop": "<b"},
    ),
    "required_single": Case(
        tokenizer=SIM,
        renderer=BARE,
        text=f"[{FORCED_CALL}, {FORCED_CALL}]",
        fields={"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "required_broken": Case(
        tokenizer=SIM,
        renderer=BARE,
        text="I call 😀 find.",
        fields={"tools": TOOLS, "tool_choice": "required"},
    ),
    "deepseek": Case(
        tokenizer=DEEPSEEK,
        renderer=V41,
        text=f"so 😀</think>One moment.\n\n{DSML_CALL}{DEEPSEEK_EOS}",
        fields={"tools": TOOLS},
    ),
    "deepseek_cut": Case(
        tokenizer=DEEPSEEK,
        renderer=V41,
        text=f"a</think>{DSML_CALL[:110]}",
        fields={"tools": TOOLS},
        reason=FinishReason.LENGTH,
    ),
    "deepseek_stop": Case(
        tokenizer=DEEPSEEK,
        renderer=V41,
        text="so</think>yes END not",
        fields={"stop": ["END", "x"]},
    ),
}


@dataclass(frozen=True)
class Heard:
    """What a client makes of its answer."""

    content: str
    reasoning: str
    calls: list[dict[str, str]]
    reasons: list[str]
    usage: Any
    num_cancelled: int


class Bench:
    """One answer, and who listens to it."""

    def __init__(
        self, case: Case, *, is_stream: bool = True, num_client_tokens: int | None = None
    ) -> None:
        document = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **case.fields}
        body = parse_chat(json.dumps(document).encode())
        rendered = case.renderer.render_chat(body)
        self.prompt = rendered.token_ids
        self.client, self.control = Client(), Control()
        self.is_stream = is_stream
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        make: Callable[..., Answer] = Answer
        if rendered.make_parser is not None:
            builder = MessageBuilder(
                call_id_prefix(RequestId("r"), self.prompt),
                max_calls=1 if body.parallel_tool_calls is False else None,
            )
            make = partial(ParsedAnswer, builder=builder, make_parser=rendered.make_parser)
        self.answer = make(
            connection=self.client,
            control=self.control,
            clock=ManualClock(),
            stats=ModelStats(),
            on_end=lambda *_: None,
            request_id=RequestId("r"),
            api=Api.CHAT,
            model="m",
            format=AnswerFormat(
                Api.CHAT, answer_id="a", model="m", created_s=0, has_usage=is_stream
            ),
            detokenizer=TokenTexts(case.tokenizer).detokenizer(self.prompt),
            finder=StopFinder(stops) if stops else None,
            logprobs=None,
            headers=[],
            is_stream=is_stream,
            has_usage=is_stream,
            has_token_ids=False,
            min_tokens=body.min_tokens or 0,
            num_prompt_tokens=len(self.prompt),
            start_ns=0,
            num_client_tokens=num_client_tokens,
        )

    def run(self, case: Case, cuts: Sequence[int] = ()) -> "Bench":
        """Give the tokens in groups that end at `cuts`, then the end."""
        ids = case.token_ids
        places = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
        for start, end in pairwise(places):
            self.answer.on_tokens(start, ids[start:end], None)
        self.answer.on_finish(
            RequestFinish(
                reason=case.reason, num_prompt_tokens=len(self.prompt), num_output_tokens=len(ids)
            )
        )
        assert self.client.num_ends == 1
        return self

    def events(self) -> list[tuple[int | None, Any]]:
        """Id and document of each event."""
        found = []
        for event in b"".join(self.client.chunks).split(b"\n\n"):
            *first, data = event.split(b"\n")
            if data and data != b"data: [DONE]":
                number = int(first[0].removeprefix(b"id: ")) if first else None
                found.append((number, json.loads(data.removeprefix(b"data: "))))
        return found

    def heard(self) -> Heard:
        if self.is_stream:
            return joined([document for _, document in self.events()], self.control)
        document = json.loads(b"".join(self.client.chunks))
        (choice,) = document["choices"]
        message = choice["message"]
        calls = [{"id": each["id"], **each["function"]} for each in message.get("tool_calls", ())]
        return Heard(
            message["content"] or "",
            message.get("reasoning_content", ""),
            calls,
            [choice["finish_reason"]],
            document["usage"],
            len(self.control.cancelled),
        )


def joined(documents: Sequence[Any], control: Control) -> Heard:
    content, reasoning, usage, reasons = "", "", None, []
    calls: dict[int, dict[str, str]] = {}
    for document in documents:
        assert "error" not in document, document
        usage = document.get("usage") or usage
        for choice in document["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                known = calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                known["id"] += call.get("id", "")
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    ordered = [calls[index] for index in sorted(calls)]
    return Heard(content, reasoning, ordered, reasons, usage, len(control.cancelled))


@cache
def undisturbed(name: str) -> Heard:
    """The answer whose tokens come at once; the same for every test."""
    return Bench(CASES[name]).run(CASES[name]).heard()


EVERY_PLACE = [
    pytest.param(name, place, id=f"{name}-{place}")
    for name, case in CASES.items()
    for place in range(len(case.token_ids) + 1)
]


def test_cases_are_what_they_are_for() -> None:
    heard = {name: Bench(case).run(case).heard() for name, case in CASES.items()}

    assert {name: each.reasons for name, each in heard.items()} == {
        "plain": ["stop"],
        "hermes": ["tool_calls"],
        "hermes_cut": ["length"],
        "hermes_stop": ["stop"],
        "hermes_single": ["tool_calls"],
        "named": ["stop"],
        "named_at_once": ["stop"],
        "named_cut": ["length"],
        "named_stop": ["stop"],
        "named_broken": ["stop"],
        "required": ["tool_calls"],
        "required_cut": ["length"],
        "required_stop": ["stop"],
        "required_single": ["tool_calls"],
        "required_broken": ["stop"],
        "deepseek": ["tool_calls"],
        "deepseek_cut": ["length"],
        "deepseek_stop": ["stop"],
    }
    assert heard["plain"].content == "one 😀 two EN"
    assert {name: len(each.calls) for name, each in heard.items()} == {
        "plain": 0,
        "hermes": 2,
        "hermes_cut": 1,
        "hermes_stop": 0,
        "hermes_single": 1,
        "named": 1,
        "named_at_once": 1,
        "named_cut": 1,
        "named_stop": 1,
        "named_broken": 1,
        "required": 2,
        "required_cut": 2,
        "required_stop": 1,
        "required_single": 1,
        "required_broken": 0,
        "deepseek": 2,
        "deepseek_cut": 1,
        "deepseek_stop": 0,
    }
    thinking = ("hermes", "deepseek", "named", "required")
    assert {heard[name].reasoning for name in thinking} == {"so 😀"}
    assert heard["hermes"].content == "One moment. and <tool"
    assert heard["deepseek"].content == "One moment."
    assert heard["hermes_stop"].content == heard["deepseek_stop"].content == "yes "
    forced = {name: each for name, each in heard.items() if name.startswith(("named", "required"))}
    contents = {name: each.content for name, each in forced.items() if each.content}
    assert contents == {"required_broken": "I call 😀 find."}
    assert heard["named_broken"].calls[0]["arguments"] == "I call 😀 find."
    assert heard["named_stop"].calls[0]["arguments"] == '{"word": "yes '
    details = {name: heard[name].usage["completion_tokens_details"] for name in thinking}
    assert all(each["reasoning_tokens"] > 0 for each in details.values())
    details = heard["named_at_once"].usage["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0}
    stopped = (
        *("hermes_stop", "hermes_single", "deepseek_stop"),
        *("named_stop", "required_stop", "required_single"),
    )
    assert {name for name, each in heard.items() if each.num_cancelled} == set(stopped)
    for name in ("named", "named_at_once", "required"):
        assert all(json.loads(call["arguments"])["n"] == [1] for call in heard[name].calls)
    for name in ("hermes", "deepseek", "required"):
        assert json.loads(heard[name].calls[0]["arguments"])["word"].startswith("日")
        assert len({call["id"] for call in heard[name].calls}) == 2


@pytest.mark.parametrize("name", CASES)
def test_whole_and_streamed_are_the_same(name: str) -> None:
    case = CASES[name]
    whole, streamed = (
        Bench(case, is_stream=is_stream).run(case).heard() for is_stream in (False, True)
    )
    single = Bench(case).run(case, range(len(case.token_ids))).heard()
    assert whole == streamed == single


@pytest.mark.parametrize(("name", "place"), EVERY_PLACE)
def test_tokens_of_two_engines_are_one_answer(name: str, place: int) -> None:
    """tokens[:k] from one engine, the rest from another."""
    case = CASES[name]
    assert Bench(case).run(case, [place]).heard() == undisturbed(name)


@settings(max_examples=30)
@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 200), max_size=8))
def test_any_groups_of_tokens_are_one_answer(name: str, cuts: list[int]) -> None:
    case = CASES[name]
    assert Bench(case).run(case, cuts).heard() == undisturbed(name)


@pytest.mark.parametrize("name", CASES)
def test_a_client_that_comes_back_gets_the_rest(name: str) -> None:
    """What it had up to any event, and what it gets after that one's id, join up to the whole; the
    calls keep their ids."""
    case = CASES[name]
    every = range(len(case.token_ids))
    first = Bench(case, num_client_tokens=0).run(case, every)
    read = [(number, each) for number, each in first.events() if number is not None]
    for num_had in range(len(read) + 1):
        had = read[:num_had]
        last = had[-1][0] if had else 0
        again = Bench(case, num_client_tokens=last).run(case, [last + 3])
        documents = [each for _, each in had] + [each for _, each in again.events()]
        assert joined(documents, first.control) == undisturbed(name)


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_a_client_that_does_not_read_become_one_event(name: str) -> None:
    case = CASES[name]
    bench = Bench(case)
    bench.client.is_writable = False
    ids = case.token_ids
    for place, token_id in enumerate(ids):
        bench.answer.on_tokens(place, [token_id], None)
    bench.answer.on_finish(
        RequestFinish(
            reason=case.reason,
            num_prompt_tokens=len(bench.prompt),
            num_output_tokens=len(ids),
        )
    )
    assert bench.client.chunks == []
    bench.client.is_writable = True
    bench.answer.on_writable()
    assert bench.heard() == undisturbed(name)


@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_fails_never_ends_well(name: str) -> None:
    """Whatever was said: an error is the end, without a finish reason and without `[DONE]`."""
    case = CASES[name]
    bench = Bench(case)
    bench.answer.on_tokens(0, case.token_ids[:12], None)
    if bench.client.num_ends:
        return  # a stop string came first
    bench.answer.on_error(RequestError(status=502, code="engine_lost", message="lost"))

    data = b"".join(bench.client.chunks)
    assert bench.client.num_ends == 1
    assert b'"error"' in data
    assert b"[DONE]" not in data
    assert all(
        choice["finish_reason"] is None
        for _, each in bench.events()
        for choice in each.get("choices", ())
    )
