"""Lost, drained and restarted: what clients of a whole dsched see (cases FA-01, FA-03, FA-07)."""

import asyncio
import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from double_cluster import MODEL, PROMPT, Cluster
from test_run_process import SIM_MODEL, RunningDsched, dsched, start, stop

from dsched.cli.drain import _drain, _undrain


async def ask(
    cluster: Cluster, *, is_stream: bool, max_tokens: int = 8, **fields: object
) -> tuple[int, list[Any], dict[str, str]]:
    """Status, documents of the answer (with `[DONE]` as a string) and headers."""
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": is_stream,
        "ignore_eos": True,
        "return_token_ids": True,
        **({"stream_options": {"include_usage": True}} if is_stream else {}),
        **fields,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{cluster.url}/v1/completions", json=body) as answer,
    ):
        raw = await answer.read()
        headers = {name.lower(): value for name, value in answer.headers.items()}
    if not is_stream or answer.status != 200:
        return answer.status, [json.loads(raw)], headers
    events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    return answer.status, [e.decode() if e == b"[DONE]" else json.loads(e) for e in events], headers


def token_ids(documents: list[Any]) -> list[int]:
    return [
        token
        for document in documents
        if isinstance(document, dict)
        for choice in document.get("choices", ())
        for token in choice.get("token_ids") or ()
    ]


def finish_reasons(documents: list[Any]) -> list[str]:
    return [
        choice["finish_reason"]
        for document in documents
        if isinstance(document, dict)
        for choice in document.get("choices", ())
        if choice["finish_reason"] is not None
    ]


def usage(documents: list[Any]) -> tuple[int, int]:
    (found,) = [d["usage"] for d in documents if isinstance(d, dict) and d.get("usage")]
    return found["prompt_tokens"], found["completion_tokens"]


async def lose_server_after(cluster: Cluster, num_tokens: int, how: str) -> None:
    """Lose the engine that serves once dsched has so many of its tokens."""
    journal = cluster.service.journal
    await cluster.wait_until(
        lambda: (
            any(double.num_running for double in cluster.doubles)
            and journal.status().num_recorded_tokens >= num_tokens
        )
    )
    (victim,) = [double for double in cluster.doubles if double.num_running]
    await getattr(victim, how)()


@pytest.mark.parametrize("is_stream", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("after", "how"), [(0, "kill"), (1, "kill"), (4, "stop"), (7, "kill")])
async def test_losing_the_server_changes_nothing(
    cluster: Cluster, after: int, how: str, *, is_stream: bool
) -> None:
    """Killed or ended by SIGTERM: text, usage, one reason, one [DONE], and the class (FA-01)."""
    for _ in range(2):
        await cluster.add_double(step_s=0.02)
    await cluster.start_service()
    await cluster.wait_until_up()

    answer = asyncio.create_task(ask(cluster, is_stream=is_stream))
    await lose_server_after(cluster, after, how)
    status, documents, headers = await answer

    assert status == 200
    assert token_ids(documents) == cluster.model.stream(PROMPT, 8)
    assert usage(documents) == (len(PROMPT), 8)
    assert finish_reasons(documents) == ["length"]
    assert documents.count("[DONE]") == is_stream
    told = [d["dsched"]["guarantee"] for d in documents if isinstance(d, dict) and "dsched" in d]
    if after >= 1:
        assert told == ["exact"]
        assert is_stream or headers["x-dsched-guarantee"] == "exact"


@pytest.mark.parametrize("after", [0, 3])
async def test_a_grammar_is_replayed_from_its_root(cluster: Cluster, after: int) -> None:
    """The second engine gets the first prompt again, never the grammar in its middle (FA-03)."""
    for _ in range(2):
        await cluster.add_double(step_s=0.02)
    await cluster.start_service()
    await cluster.wait_until_up()
    schema = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "object"}}}

    answer = asyncio.create_task(ask(cluster, is_stream=True, response_format=schema))
    await lose_server_after(cluster, after, "kill")
    _, documents, _ = await answer

    assert token_ids(documents) == cluster.model.stream(PROMPT, 8)
    prompts = [body["prompt"] for double in cluster.doubles for body in double.bodies]
    assert prompts == [PROMPT, PROMPT]


async def test_what_cannot_be_continued_ends_with_one_error(cluster: Cluster) -> None:
    """Sampling without a seed under penalties: the class in the error, no [DONE] (FA-03)."""
    for _ in range(2):
        await cluster.add_double(step_s=0.02)
    await cluster.start_service()
    await cluster.wait_until_up()

    answer = asyncio.create_task(
        ask(cluster, is_stream=True, temperature=0.8, presence_penalty=0.5)
    )
    await lose_server_after(cluster, 3, "kill")
    _, documents, _ = await answer

    assert documents[-1]["error"]["guarantee"] == "refused"
    assert documents[-1]["error"]["code"] == "engine_lost"
    assert finish_reasons(documents) == []
    assert "[DONE]" not in documents


@pytest.mark.slow
async def test_engines_that_come_back_are_served_again_without_a_restart(cluster: Cluster) -> None:
    """All engines die and one returns on the same address; dsched restarts, they do not (FA-07)."""
    double = await cluster.add_double()
    await cluster.start_service()
    await cluster.wait_until_up()
    port = double.port
    await double.kill()
    await cluster.wait_until_up(0)
    status, _, headers = await ask(cluster, is_stream=False)
    assert (status, headers["retry-after"]) == (503, "1")

    await double.start(port=port)
    await cluster.wait_until_up(1)
    _, documents, _ = await ask(cluster, is_stream=False)
    assert token_ids(documents) == cluster.model.stream(PROMPT, 8)

    await cluster.services[-1].stop()
    cluster.services.pop()
    await cluster.start_service()
    async with asyncio.timeout(8):
        await cluster.wait_until_up(1)
    _, documents, _ = await ask(cluster, is_stream=False)
    assert token_ids(documents) == cluster.model.stream(PROMPT, 8)


@pytest.mark.slow
async def test_a_drain_lets_requests_finish_where_they_are(two_engines: Cluster) -> None:
    """Nothing new, nothing cut; back in service after undrain."""
    cluster = two_engines
    registry_url = cluster.service.config.registry_url()
    tasks = [
        asyncio.create_task(cluster.complete([5 + index, *PROMPT], max_tokens=100))
        for index in range(8)
    ]
    await cluster.wait_until(lambda: all(double.num_running for double in cluster.doubles))
    await asyncio.sleep(1.2)  # the registry entry
    before = [len(double.bodies) for double in cluster.doubles]

    await _drain(registry_url, "p-0", deadline_s=None, is_waiting=True)
    assert cluster.doubles[0].num_running == 0
    answers = await asyncio.gather(*tasks)
    for index, (ids, _) in enumerate(answers):
        assert ids == cluster.model.stream([5 + index, *PROMPT], 100)
    await cluster.complete(PROMPT, max_tokens=2)
    assert len(cluster.doubles[0].bodies) == before[0]
    assert not cluster.service.controller.num_recoveries

    await _undrain(registry_url, "p-0")
    await asyncio.gather(*(cluster.complete([9, *PROMPT], max_tokens=4) for _ in range(4)))
    assert len(cluster.doubles[0].bodies) > before[0]


@pytest.mark.slow
async def test_a_drain_with_a_deadline_hands_over_what_is_left(cluster: Cluster) -> None:
    """Long answers go on elsewhere, exact, with no error."""
    for _ in range(2):
        await cluster.add_double(step_s=0.02)
    await cluster.start_service()
    await cluster.wait_until_up()
    tasks = [
        asyncio.create_task(cluster.complete([5 + index, *PROMPT], max_tokens=150))
        for index in range(6)
    ]
    await cluster.wait_until(lambda: sum(len(double.bodies) for double in cluster.doubles) == 6)
    num_on_first = len(cluster.doubles[0].bodies)
    journal = cluster.service.journal
    await cluster.wait_until(lambda: journal.status().num_recorded_tokens >= 60)

    url = f"{cluster.service.admin_url}/admin/v1/engines/p-0"
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/drain", json={"deadline_s": 0.2}) as answer:
            assert answer.status == 200
        await cluster.wait_until(lambda: cluster.doubles[0].num_running == 0, timeout_s=2.0)
        async with session.get(url) as answer:
            status = await answer.json()
    assert (status["state"], status["num_requests"]) == ("draining", 0)
    answers = await asyncio.gather(*tasks)

    for index, (ids, _) in enumerate(answers):
        assert ids == cluster.model.stream([5 + index, *PROMPT], 150)
    assert cluster.service.controller.num_handoffs == {("continue", "drained"): num_on_first}


async def test_admin_refuses_what_it_cannot_drain(two_engines: Cluster) -> None:
    """An unknown engine, a negative deadline, a field that does not exist: named, and 4xx."""
    base = f"{two_engines.service.admin_url}/admin/v1/engines"
    async with aiohttp.ClientSession() as session:
        for path, body, status, what in (
            ("/nope/drain", {}, 404, "no engine is called 'nope'"),
            ("/p-0/drain", {"deadline_s": -1}, 400, "deadline_s"),
            ("/p-0/drain", {"deadline": 1}, 400, "unknown field `deadline`"),
        ):
            async with session.post(base + path, json=body) as answer:
                assert answer.status == status
                assert what in (await answer.json())["error"]
    states = {s.state.name for s in two_engines.service.controller.engine_statuses()}
    assert states == {"UP"}


async def test_capacity_says_what_a_pool_may_run(two_engines: Cluster) -> None:
    """With n-1 two engines of 64 requests run 64; metrics and admin agree."""
    admin = f"{two_engines.service.admin_url}/admin/v1/capacity"
    async with aiohttp.ClientSession() as session:
        async with session.get(admin) as answer:
            pool = (await answer.json())["pools"]["p"]
        async with session.get(f"{two_engines.url}/metrics") as answer:
            metrics = await answer.text()
    assert (pool["max_running_requests"], pool["absorbs_loss"]) == (64, True)
    assert 'dsched_pool_admissible_requests{pool="p"} 64.0' in metrics
    assert 'dsched_pool_absorbs_loss{pool="p"} 1.0' in metrics


async def test_the_gap_is_a_metric_with_its_parts(two_engines: Cluster) -> None:
    """One handoff is one observation of each part."""
    answer = asyncio.create_task(ask(two_engines, is_stream=True, max_tokens=60))
    await lose_server_after(two_engines, 3, "kill")
    await answer
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{two_engines.url}/metrics") as page,
    ):
        metrics = await page.text()
    for part in ("total", "detect", "dispatch", "prefill"):
        assert f'dsched_handoff_gap_seconds_count{{part="{part}"}} 1.0' in metrics
    assert 'dsched_handoff_total{cause="engine_lost",outcome="continue"} 1.0' in metrics


# -- dsched itself dies


def stream_events(
    running: RunningDsched, request_id: str, *, last_event_id: int | None, max_events: int | None
) -> tuple[str, int, bool]:
    """Text, id of the last event that was read, and whether the stream came to its end."""
    body = {"model": SIM_MODEL, "prompt": "go on", "max_tokens": 120, "temperature": 0}
    headers = {"content-type": "application/json", "x-request-id": request_id}
    if last_event_id is not None:
        headers["last-event-id"] = str(last_event_id)
    request = urllib.request.Request(
        f"{running.url}/v1/completions", msgspec.json.encode(body | {"stream": True}), headers
    )
    text, event_id, num_events = "", last_event_id or 0, 0
    with urllib.request.urlopen(request, timeout=30) as answer:
        for raw in answer:
            line = raw.decode().rstrip("\n")
            if line.startswith("id: "):
                event_id = int(line[4:])
            if line == "data: [DONE]":
                return text, event_id, True
            if line.startswith("data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
                num_events += 1
                if num_events == max_events:
                    return text, event_id, False
    return text, event_id, False


def kill(running: RunningDsched) -> None:
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait(timeout=10)
    assert running.process.stdout is not None
    running.process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("has_event_ids", [True, False])
def test_a_repeated_request_goes_on_after_dsched_was_killed(
    tmp_path: Path, *, has_event_ids: bool
) -> None:
    """With Last-Event-ID the rest alone, else all of it; never a token twice, never one missing."""
    first = start(tmp_path)
    whole, _, is_whole = stream_events(first, "whole", last_event_id=None, max_events=None)
    assert is_whole
    begun = 0 if has_event_ids else None
    head, event_id, _ = stream_events(first, "again", last_event_id=begun, max_events=20)
    kill(first)

    second = start(tmp_path)
    last = event_id if has_event_ids else None
    tail, _, is_whole = stream_events(second, "again", last_event_id=last, max_events=None)
    assert stop(second) == 0
    resumed = [e for e in second.log_events() if e["event"] == "request.resumed"]

    assert is_whole
    assert (head + tail if has_event_ids else tail) == whole
    assert whole.startswith(head)
    assert head
    # The file is at most the flush interval behind what the client had read.
    assert resumed
    assert int(str(resumed[0]["num_output_tokens"])) >= (event_id - 3 if has_event_ids else 10)


@pytest.mark.slow
def test_drain_is_a_command(tmp_path: Path) -> None:
    """`dsched drain`, `workers`, `undrain`; an unknown engine is one line and status 2."""
    running = start(tmp_path)
    args = ("--state-dir", str(running.state_dir))

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            dsched(*command, *args), capture_output=True, text=True, check=False, timeout=60
        )

    drained = run("drain", "sim-0")
    workers = json.loads(run("workers", "--json").stdout)
    back = run("undrain", "sim-0")
    wrong = run("drain", "nope")
    assert stop(running) == 0

    assert (drained.returncode, drained.stdout.splitlines()[-1]) == (0, "sim-0 is empty")
    states = {engine["engine_id"]: engine["state"] for engine in workers["engines"]}
    assert states == {"sim-0": "draining", "sim-1": "up"}
    assert (back.returncode, back.stdout) == (0, "sim-0 is back in service\n")
    assert wrong.returncode == 2
    assert wrong.stderr == "dsched: no engine is called 'nope'\n"
