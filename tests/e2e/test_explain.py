"""Explain and the trace file of a whole running dsched, over engine doubles."""

import asyncio
import json
import urllib.request
from pathlib import Path

import aiohttp
import msgspec
import pytest
import typer
from command_line import run_dsched
from double_cluster import MODEL, PROMPT, Cluster
from test_faults import ask, lose_server_after
from test_run_process import SIM_MODEL, start, stop

from dsched.cli.drain import ask_every_dsched
from dsched.cli.explain import _from_live
from dsched.errors import ConfigError
from dsched.trace import TraceReader, TraceWriter, replay
from dsched.trace.records import Ended, HandedOff


async def explain(cluster: Cluster, request_id: str, *, as_json: bool = False) -> str:
    config = cluster.service.config
    return await _from_live(
        config.registry_url(), request_id, as_json=as_json, access=config.registry
    )


async def tell(cluster: Cluster, path: str, body: bytes | None) -> dict[str, object]:
    config = cluster.service.config
    (answer,) = await ask_every_dsched(
        config.registry_url(), f"/admin/v1/trace{path}", body, access=config.registry
    )
    return answer


async def start_recording(cluster: Cluster, name: str) -> Path:
    answer = await tell(cluster, "/start", msgspec.json.encode({"name": name}))
    return Path(str(answer["file"]))


@pytest.mark.slow
async def test_a_handoff_is_explained_live(cluster: Cluster) -> None:
    """The dead engine, the detection layer, the gap's parts, the new rank, and the end."""
    for _ in range(2):
        await cluster.add_double(step_s=0.02)
    await cluster.start_service()
    await cluster.wait_until_up()
    answer = asyncio.create_task(ask(cluster, is_stream=True))
    await lose_server_after(cluster, 3, "kill")
    _, _, headers = await answer
    request_id = headers["x-request-id"]

    text = " ".join((await explain(cluster, request_id)).split())
    document = json.loads(await explain(cluster, request_id, as_json=True))

    moments = {moment["kind"]: moment for moment in document["moments"]}
    dead = moments["lost"]["engine_id"]
    survivor = {"p-0": "p-1", "p-1": "p-0"}[dead]
    assert moments["lost"]["layer"] == "socket"
    assert f"LOST {dead} after " in text
    assert "Detection layer socket" in text
    gap = moments["handed_off"]
    parts = [gap[f"{name}_ns"] for name in ("detect", "dispatch", "prefill")]
    assert min(parts) >= 0
    assert 0 < sum(parts) < 10e9
    assert "handed off: the client saw a gap of " in text
    after_loss = text[text.index("LOST") :]
    assert f"router: {survivor}/0, least cost" in after_loss
    assert f"{dead}/0" in after_loss
    assert f"attempt 2 goes to {survivor}/0" in after_loss
    assert "ended: length after 8 tokens, handed off once, guarantee exact" in text
    assert "UTC" in text


async def test_an_unknown_request_is_one_line(
    two_engines: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1, and what the ring has."""
    await ask(two_engines, is_stream=False)

    with pytest.raises(typer.Exit) as end:
        await explain(two_engines, "no/such id?")

    assert end.value.exit_code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("dsched: request 'no/such id?' is not in the trace, which has the last ")


async def test_a_recorded_file_replays_and_has_no_text(two_engines: Cluster) -> None:
    """Start, serve, stop: a whole file, no difference, and nothing of what was said."""
    path = await start_recording(two_engines, "night.dtrace")
    await asyncio.gather(*(ask(two_engines, is_stream=True) for _ in range(5)))
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{two_engines.url}/v1/completions",
            json={"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0},
        ) as answer,
    ):
        words = (await answer.json())["choices"][0]["text"].split()
    assert words

    stopped = await tell(two_engines, "/stop", b"")

    assert path.parent == Path(two_engines.service.config.state_dir).absolute()
    assert stopped["file_bytes"] == path.stat().st_size
    reader = TraceReader(path)
    records = list(reader)
    assert reader.damage is None
    assert reader.header.source == "run"
    assert sum(isinstance(record, Ended) for record in records) == 6
    result = replay(records)
    assert result.first is None
    assert result.num_decisions["route"] == 6
    said = msgspec.msgpack.encode(records)
    for word in words:
        assert len(word) < 4 or word.encode() not in said
    for ids in (PROMPT, two_engines.model.stream(PROMPT, 8)):
        assert b"".join(map(msgspec.msgpack.encode, ids[:4])) not in said


async def test_a_file_is_not_begun_twice_nor_outside_nor_over_another(
    two_engines: Cluster,
) -> None:
    """Each with the reason; then it stops once."""
    await start_recording(two_engines, "one.dtrace")

    with pytest.raises(ConfigError, match="is being recorded already"):
        await start_recording(two_engines, "two.dtrace")
    await tell(two_engines, "/stop", b"")
    with pytest.raises(ConfigError, match="exists; choose another name"):
        await start_recording(two_engines, "one.dtrace")
    for name in ("../out", "/etc/x", ".hidden", ""):
        with pytest.raises(ConfigError, match="matching regex"):
            await start_recording(two_engines, name)
    with pytest.raises(ConfigError, match="nothing is being recorded"):
        await tell(two_engines, "/stop", b"")


@pytest.mark.slow
async def test_a_file_of_the_configuration_is_kept_over_a_restart(cluster: Cluster) -> None:
    """Recorded from the start to the end of the process; the one before is kept aside."""
    await cluster.add_double()
    path = cluster.folder / "all.dtrace"
    for _ in range(2):
        await cluster.start_service(trace={"file": str(path)})
        await cluster.wait_until_up()
        await ask(cluster, is_stream=False)
        await cluster.service.stop()
        cluster.services.clear()

    for each in (path, path.with_name("all.dtrace.old")):
        records = list(TraceReader(each))
        assert sum(isinstance(record, Ended) for record in records) == 1
        assert replay(records).num_passed == 0


async def test_a_file_that_cannot_be_written_is_refused_at_the_start(cluster: Cluster) -> None:
    """Full disk or no folder: the key and the reason."""
    await cluster.add_double()

    with pytest.raises(ConfigError, match=r"\$\.trace\.file: /dev/full: No space left"):
        await cluster.start_service(trace={"file": "/dev/full"})


async def test_a_disk_that_fills_up_ends_the_file_and_nothing_else(
    two_engines: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests go on, the ring goes on, and another file can be begun."""
    await start_recording(two_engines, "full.dtrace")

    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TraceWriter, "write", write)
        status, _, headers = await ask(two_engines, is_stream=False)
        await two_engines.wait_until(lambda: two_engines.service.trace.status()["file"] is None)

    assert status == 200
    assert "ended: length" in await explain(two_engines, headers["x-request-id"])
    await start_recording(two_engines, "next.dtrace")
    await tell(two_engines, "/stop", b"")


async def test_tracing_can_be_off(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is served; explain and start say which key to set."""
    await cluster.add_double()
    await cluster.start_service(trace={"enabled": False})
    await cluster.wait_until_up()
    status, _, headers = await ask(cluster, is_stream=False)

    assert status == 200
    with pytest.raises(typer.Exit):
        await explain(cluster, headers["x-request-id"])
    assert "tracing is off here (trace.enabled)" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"tracing is off; set trace\.enabled"):
        await start_recording(cluster, "x")


async def test_a_small_ring_forgets_whole_requests_first(cluster: Cluster) -> None:
    """The oldest is not known any more, the newest is told from its arrival."""
    await cluster.add_double()
    await cluster.start_service(trace={"ring_records": 256})
    await cluster.wait_until_up()
    ids = []
    for _ in range(90):
        _, _, headers = await ask(cluster, is_stream=False, max_tokens=1)
        ids.append(headers["x-request-id"])

    newest = json.loads(await explain(cluster, ids[-1], as_json=True))

    assert (newest["has_start"], newest["has_end"]) == (True, True)
    with pytest.raises(typer.Exit):
        await explain(cluster, ids[0])
    ring = cluster.service.trace.recorder.records()  # type: ignore[attr-defined]
    assert len(ring) <= 256 + 8
    assert replay(ring).first is None
    assert not any(isinstance(record, HandedOff) for record in ring)


@pytest.mark.slow
def test_the_commands_as_a_person_types_them(tmp_path: Path) -> None:
    """Over a process with simulated engines: start, ask, explain, status, stop, replay."""
    running = start(tmp_path)
    state = ("--state-dir", str(running.state_dir))

    def command(*args: str) -> str:
        done = run_dsched(*args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        assert "recording to " in command("trace", "start", "night.dtrace", *state)
        body = {"model": SIM_MODEL, "prompt": "one two three", "max_tokens": 5}
        request = urllib.request.Request(
            f"{running.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", "x-request-id": "my-request-1"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.headers["x-request-id"] == "my-request-1"
            answer.read()

        story = command("explain", "my-request-1", *state)
        status = command("trace", "status", *state)
        stopped = command("trace", "stop", *state)
        path = running.state_dir / "night.dtrace"
        again = command("replay", str(path))
        from_file = command("explain", "my-request-1", "--trace", str(path))
    finally:
        assert stop(running) == 0

    assert "attempt 1 goes to " in story
    assert "ended: " in story
    assert story == from_file
    assert "recording to " in status
    assert f"{path}: " in stopped
    assert "differences: 0" in again
