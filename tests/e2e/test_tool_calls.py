"""Tool calls and reasoning through a whole dsched, read by the official client, which is strict.

The engines are doubles that say scripted lines. Both formats: a chat template with Hermes calls,
and DeepSeek V4.1.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from double_cluster import MODEL, Cluster
from openai.types.chat import ChatCompletionChunk
from test_run_process import RunningDsched, start, wait
from tokenizers import Tokenizer

from dsched.config import ModelConfig
from dsched.frontdoor import load_model
from dsched.sim.tokenizer import EOS_TOKEN_ID, build_sim_tokenizer
from dsched.testing.chat_models import (
    DEEPSEEK_EOS,
    HERMES_TEMPLATE,
    ScriptedModel,
    build_deepseek_tokenizer,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "<|end|><｜end▁of▁sentence｜>",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
MESSAGES = [{"role": "user", "content": "hello"}]
HERMES = {"tool_call_format": "hermes", "reasoning_format": "think"}
HERMES_CALL = '<tool_call>{"name": "find", "arguments": {"word": "日 <b>"}}</tool_call>'
DSML_CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="find">\n<｜DSML｜ parameter name="word" '
    'string="true">日 <b></｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way of writing calls, and the model that writes them."""

    tokenizer: Tokenizer
    eos_token_id: int
    model: dict[str, Any]
    call_line: str
    """Reasoning, text and one call."""
    last_line: str


SIM, DEEPSEEK = build_sim_tokenizer(), build_deepseek_tokenizer()
KINDS = {
    "hermes": Kind(
        tokenizer=SIM,
        eos_token_id=EOS_TOKEN_ID,
        model=HERMES,
        call_line=f"<think>\nso</think>\n\nOne moment.\n{HERMES_CALL}",
        last_line="<think>well</think>found it",
    ),
    "deepseek-v4.1": Kind(
        tokenizer=DEEPSEEK,
        eos_token_id=DEEPSEEK.token_to_id(DEEPSEEK_EOS),
        model={"chat_format": "deepseek-v4.1"},
        call_line=f"so</think>One moment.\n\n{DSML_CALL}",
        last_line="well</think>found it",
    ),
}


@dataclass
class Rig:
    """A cluster whose engines say the lines, and what they were asked."""

    cluster: Cluster
    kind: Kind
    model: ScriptedModel
    fields: dict[str, Any] = field(default_factory=dict)

    def chat(self, **fields: Any) -> Any:  # noqa: ANN401
        fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 400} | fields
        body = {"stop_token_ids": [self.kind.eos_token_id]} | fields.pop("extra_body", {})
        return self.cluster.client.chat.completions.create(model=MODEL, extra_body=body, **fields)

    def bodies(self) -> list[dict[str, Any]]:
        return [body for double in self.cluster.doubles for body in double.bodies]

    def prompt_text(self, index: int) -> str:
        return self.kind.tokenizer.decode(self.model.prompts[index], skip_special_tokens=False)


def write_model(cluster: Cluster, kind: Kind) -> None:
    kind.tokenizer.save(str(cluster.folder / "tokenizer.json"))
    if "chat_format" not in kind.model:
        (cluster.folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)


async def open_rig(
    cluster: Cluster, kind: Kind, lines: Sequence[str], *, num_doubles: int = 1
) -> Rig:
    write_model(cluster, kind)
    ids = [kind.tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
    model = ScriptedModel(ids, eos_token_id=kind.eos_token_id)
    for _ in range(num_doubles):
        await cluster.add_double(
            model=model, step_s=0.0005, max_model_len=8_192, max_step_tokens=8_192
        )
    engines = [{"url": double.url, "kind": double.kind} for double in cluster.doubles]
    section = {"name": MODEL, "tokenizer": str(cluster.folder), **kind.model}
    await cluster.start_service(pools={"p": {"model": section, "engines": engines}})
    await cluster.wait_until_up()
    return Rig(cluster, kind, model)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@dataclass
class Told:
    """What a client makes of a stream."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    usage: Any = None
    guarantee: str | None = None
    num_chunks: int = 0

    async def read(self, stream: AsyncIterator[ChatCompletionChunk]) -> "Told":
        async for chunk in stream:
            self.add(chunk)
        return self

    def add(self, chunk: ChatCompletionChunk) -> None:
        self.num_chunks += 1
        self.usage = chunk.usage or self.usage
        extra = (chunk.model_extra or {}).get("dsched") or {}
        self.guarantee = extra.get("guarantee", self.guarantee)
        for choice in chunk.choices:
            delta = choice.delta
            self.content += delta.content or ""
            self.reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
            for call in delta.tool_calls or ():
                known = self.calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                known["id"] += call.id or ""
                assert call.function is not None
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            if choice.finish_reason:
                self.reasons.append(choice.finish_reason)


def check_call(told: Told, *, reasoning: str = "so") -> None:
    assert (told.reasoning, told.content) == (reasoning, "One moment.")
    (call,) = told.calls.values()
    assert call["name"] == "find"
    assert json.loads(call["arguments"]) == {"word": "日 <b>"}
    assert told.reasons == ["tool_calls"]


@pytest.mark.slow
async def test_an_agent_calls_a_tool_and_goes_on(cluster: Cluster, kind: Kind) -> None:
    """A whole conversation: the call, its result, the answer; streamed and not."""
    rig = await open_rig(cluster, kind, [kind.call_line, kind.last_line])

    answer = await rig.chat()
    (choice,) = answer.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "One moment."
    assert message.model_extra["reasoning_content"] == "so"
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"word": "日 <b>"}
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0

    streamed = await Told().read(
        await rig.chat(stream=True, stream_options={"include_usage": True})
    )
    check_call(streamed)
    assert streamed.calls[0]["arguments"] == call.function.arguments
    assert streamed.num_chunks > 8
    assert streamed.usage.completion_tokens == answer.usage.completion_tokens
    assert streamed.usage.prompt_tokens == answer.usage.prompt_tokens == len(rig.model.prompts[0])

    result = {"role": "tool", "tool_call_id": call.id, "content": "it is <|end|> there"}
    history = [*MESSAGES, message.model_dump(exclude_none=True), result]
    last = await rig.chat(messages=history)
    assert last.choices[0].message.content == "found it"
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].finish_reason == "stop"
    assert "日 <b>" in rig.prompt_text(1)
    assert "it is <|end|> there" in rig.prompt_text(1)
    kept = {rig.kind.tokenizer.token_to_id(each) for each in ("<|end|>", DEEPSEEK_EOS)}
    typed = sum(token in kept for token in rig.model.prompts[1])
    frame = {"hermes": 4, "deepseek-v4.1": 1}  # the template's own: system, user, assistant, user
    name = next(name for name, each in KINDS.items() if each is kind)
    assert typed == frame[name]


@pytest.mark.slow
async def test_the_client_library_puts_the_stream_together(cluster: Cluster, kind: Kind) -> None:
    """The accumulator of the official client, which validates every event."""
    rig = await open_rig(cluster, kind, [kind.call_line])
    body = {"stop_token_ids": [kind.eos_token_id]}
    async with rig.cluster.client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=TOOLS, max_tokens=400, extra_body=body
    ) as stream:
        final = await stream.get_final_completion()
    (choice,) = final.choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.id.startswith("call_")) == ("find", True)
    assert json.loads(call.function.arguments) == {"word": "日 <b>"}


@pytest.mark.slow
async def test_a_call_cut_by_max_tokens_says_length(cluster: Cluster, kind: Kind) -> None:
    """At every length: what there is of the call begins the whole one; one end each."""
    rig = await open_rig(cluster, kind, [kind.call_line])
    whole = await Told().read(await rig.chat(stream=True))
    line = kind.tokenizer.encode(kind.call_line, add_special_tokens=False).ids
    limits = range(1, len(line), 3)
    answers = await asyncio.gather(*(rig.chat(max_tokens=limit) for limit in limits))
    streams = await asyncio.gather(*(rig.chat(max_tokens=limit, stream=True) for limit in limits))
    for answer, stream in zip(answers, streams, strict=True):
        told = await Told().read(stream)
        message = answer.choices[0].message
        assert told.reasons == [answer.choices[0].finish_reason] == ["length"]
        assert told.content == (message.content or "")
        calls = [call.function for call in message.tool_calls or ()]
        assert [(c["name"], c["arguments"]) for c in told.calls.values()] == [
            (each.name, each.arguments) for each in calls
        ]
        for each in calls:
            # A cut inside of DeepSeek's markup leaves its first sign.
            begun = each.arguments.removesuffix("<")
            assert whole.calls[0]["arguments"].startswith(begun)


async def read_losing_two(rig: Rig, **fields: Any) -> Told:  # noqa: ANN401
    """Read a stream whose engine is killed twice: in the reasoning, and inside of the call's
    arguments."""
    told = Told()
    num_lost = 0
    async for chunk in await rig.chat(stream=True, temperature=0, **fields):
        told.add(chunk)
        arguments = told.calls.get(0, {}).get("arguments", "")
        if (num_lost == 0 and told.reasoning) or (num_lost == 1 and len(arguments) > 4):
            num_lost += 1
            serving = next(double for double in rig.cluster.doubles if double.num_running)
            await serving.kill()
    assert num_lost == 2
    return told


@pytest.mark.slow
async def test_an_engine_lost_inside_of_a_call_is_a_pause(cluster: Cluster, kind: Kind) -> None:
    rig = await open_rig(cluster, kind, [kind.call_line], num_doubles=3)
    told = await read_losing_two(rig)
    check_call(told)
    assert told.guarantee in ("exact", "continuation")


FORCED = '{"name": "find", "parameters": {"word": "日 <b>"}}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "line", "reason"),
    [
        ({"type": "function", "function": {"name": "find"}}, '{"word": "日 <b>"}', "stop"),
        ("required", f"[{FORCED}]", "tool_calls"),
    ],
)
async def test_an_engine_lost_inside_of_a_demanded_call_is_a_pause(
    cluster: Cluster,
    choice: Any,  # noqa: ANN401
    line: str,
    reason: str,
) -> None:
    """The next engine computes the answer again from its first token, because the state of a
    grammar cannot be carried: every engine is told of the grammar, and no token comes twice."""
    rig = await open_rig(cluster, KINDS["hermes"], [f"<think>so</think>{line}"], num_doubles=3)
    told = await read_losing_two(rig, tool_choice=choice)

    (call,) = told.calls.values()
    assert (call["name"], json.loads(call["arguments"])) == ("find", {"word": "日 <b>"})
    assert (told.reasoning, told.content, told.reasons) == ("so", "", [reason])
    assert told.guarantee == "exact"
    formats = [body["response_format"] for body in rig.bodies()]
    assert [each["type"] for each in formats] == ["json_schema"] * 3
    assert formats[0] == formats[1] == formats[2]


@pytest.mark.slow
async def test_an_answer_that_cannot_go_on_ends_with_an_error(cluster: Cluster, kind: Kind) -> None:
    """Never a finish reason for a call that broke off."""
    rig = await open_rig(cluster, kind, [kind.call_line])
    told = Told()

    async def read() -> None:
        async for chunk in await rig.chat(
            stream=True, presence_penalty=0.5, temperature=1, extra_body={"top_k": 5}
        ):
            told.add(chunk)
            if told.calls:
                await cluster.doubles[0].kill()

    with pytest.raises(openai.APIError):
        await read()
    assert told.calls
    assert told.reasons == []


async def read_events(
    url: str, kind: Kind, *, name: str, last_event_id: int, max_events: int | None = None
) -> tuple[Told, int, bool]:
    """What was told, the id of the last event, and whether the stream came to its end."""
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": TOOLS,
        "max_tokens": 400,
        "stream": True,
        "temperature": 0,
        "thinking": {"type": "disabled"},
        "stop_token_ids": [kind.eos_token_id],
    }
    headers = {"x-request-id": name, "last-event-id": str(last_event_id)}
    told, event_id = Told(), last_event_id
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        async for raw in answer.content:
            line = raw.decode().rstrip("\n")
            if line.startswith("id: "):
                event_id = int(line[4:])
            if line == "data: [DONE]":
                return told, event_id, True
            if line.startswith("data: "):
                told.add(ChatCompletionChunk.model_validate_json(line[6:]))
                if told.num_chunks == max_events:
                    break
    return told, event_id, False


@pytest.mark.slow
async def test_a_client_comes_back_inside_of_a_call_after_a_restart(
    cluster: Cluster, kind: Kind
) -> None:
    """The stream breaks off and dsched is killed while the arguments are written: with
    `Last-Event-ID` the rest comes, under the same id of the call, from another process. Greedy, and
    so without thinking, which samples: of sampled answers the file may be behind the client."""
    write_model(cluster, kind)
    line = kind.call_line.partition("</think>")[2].lstrip()
    ids = kind.tokenizer.encode(line, add_special_tokens=False).ids
    model = ScriptedModel([ids], eos_token_id=kind.eos_token_id)
    await cluster.add_double(model=model, step_s=0.02, max_model_len=8_192, max_step_tokens=8_192)
    config = cluster.folder / "cluster.json"
    section = {"name": MODEL, "tokenizer": str(cluster.folder), **kind.model}
    pool = {"model": section, "engines": [{"url": cluster.doubles[0].url}]}
    document = {"agent": {"endpoint": cluster.agent_endpoint}, "pools": {"p": pool}}
    config.write_text(json.dumps(document))
    started: list[RunningDsched] = []

    async def start_again() -> str:
        for running in started:
            running.process.kill()
            await asyncio.to_thread(wait, running)
        started.append(await asyncio.to_thread(start, cluster.folder, "-c", str(config)))
        async with asyncio.timeout(20), aiohttp.ClientSession() as session:
            while (await session.get(f"{started[-1].url}/ready")).status != 200:
                await asyncio.sleep(0.02)
        return started[-1].url

    try:
        url = await start_again()
        whole, _, is_whole = await read_events(url, kind, name="whole", last_event_id=0)
        assert is_whole
        first, event_id, _ = await read_events(
            url, kind, name="again", last_event_id=0, max_events=whole.num_chunks - 5
        )
        url = await start_again()
        rest, _, is_whole = await read_events(url, kind, name="again", last_event_id=event_id)
    finally:
        for running in started:
            running.process.kill()
            await asyncio.to_thread(wait, running)

    check_call(whole, reasoning="")
    assert is_whole
    assert 0 < len(first.calls[0]["arguments"]) < len(whole.calls[0]["arguments"])
    joined = {key: first.calls[0][key] + rest.calls[0][key] for key in ("name", "arguments")}
    assert joined == {key: whole.calls[0][key] for key in joined}
    assert first.calls[0]["id"] != whole.calls[0]["id"]
    assert rest.calls[0]["id"] == ""
    assert first.content + rest.content == whole.content
    assert rest.reasons == ["tool_calls"]


@pytest.mark.slow
async def test_log_probabilities_cover_every_token(cluster: Cluster, kind: Kind) -> None:
    rig = await open_rig(cluster, kind, [kind.call_line])
    answer = await rig.chat(logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens

    stream = await rig.chat(logprobs=True, stream=True)
    num_entries = 0
    async for chunk in stream:
        for choice in chunk.choices:
            num_entries += len(choice.logprobs.content) if choice.logprobs else 0
    assert num_entries == len(entries)


@pytest.mark.slow
async def test_thinking_decides_what_engines_are_asked_for(cluster: Cluster) -> None:
    kind = KINDS["deepseek-v4.1"]
    rig = await open_rig(cluster, kind, [kind.call_line, "Yes."])
    await rig.chat(temperature=0.1, top_p=0.5)
    plain = await rig.chat(temperature=0.1, extra_body={"thinking": {"type": "disabled"}})
    first, second = rig.bodies()
    assert first["temperature"] == 1.0
    assert 0.9 < first["top_p"] <= 1.0
    assert second["temperature"] == 0.1
    assert plain.choices[0].message.content == "Yes."


@pytest.mark.slow
async def test_tools_need_a_format(cluster: Cluster) -> None:
    """A model that nobody said it of refuses tools and names the key; without tools it answers."""
    plain = KINDS["hermes"]
    rig = await open_rig(cluster, Kind(**{**vars_of(plain), "model": {}}), [plain.call_line])
    with pytest.raises(openai.BadRequestError) as refusal:
        await rig.chat()
    assert refusal.value.param == "tools"
    assert "tool_call_format" in refusal.value.message
    answer = await rig.chat(tool_choice="none")
    assert answer.choices[0].message.content == plain.call_line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages"),
    ],
)
async def test_what_a_template_model_cannot_honour_is_refused_by_name(
    cluster: Cluster, fields: dict[str, Any], param: str
) -> None:
    rig = await open_rig(cluster, KINDS["hermes"], ["x"])
    with pytest.raises(openai.BadRequestError) as refusal:
        await rig.chat(**fields)
    assert refusal.value.param == param


@pytest.mark.slow
async def test_a_prompt_that_ends_in_reasoning_begins_there(cluster: Cluster) -> None:
    rig = await open_rig(cluster, KINDS["hermes"], ["so</think>\n\nyes"])
    extra = {"chat_template_kwargs": {"think": True}}
    answer = await rig.chat(extra_body=extra, tools=openai.NOT_GIVEN)
    message = answer.choices[0].message
    assert (message.model_extra["reasoning_content"], message.content) == ("so", "yes")


def vars_of(kind: Kind) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in Kind.__dataclass_fields__}


def test_the_folder_needs_no_template_for_deepseek(tmp_path: Path) -> None:
    """Its tokenizer alone is enough: the format is the library's."""
    DEEPSEEK.save(str(tmp_path / "tokenizer.json"))
    config = ModelConfig(name="m", chat_format="deepseek-v4")
    assert load_model("m", tmp_path, config=config).name == "m"
