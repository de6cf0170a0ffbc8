"""`dsched check`: what it finds beyond mistakes of one value, and says where and what to do."""

import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from dsched.cli.findings import ASK_TIMEOUT_S, Finding, engine_findings, static_findings
from dsched.cli.main import main
from dsched.config_load import parse_config
from dsched.testing.ports import refusing_port

ONE_LINE = "pools: {{main: {{model: {model}, engines: [{engines}]}}}}"


def config_of(engines: str, *, model: str = "{name: m}", more: str = "") -> str:
    return ONE_LINE.format(model=model, engines=engines) + more


def findings_of(text: str, **options: object) -> list[Finding]:
    return list(static_findings(parse_config(text), **options))  # type: ignore[arg-type]


# -- without asking anybody


def test_the_defaults_and_two_alike_engines_are_fine() -> None:
    assert findings_of("{}") == []
    assert findings_of(config_of("{url: 'http://a'}, {url: 'http://b'}")) == []
    assert findings_of(config_of("{kind: sim}, {kind: sim}")) == []


@pytest.mark.parametrize("engines", ["{url: 'http://a'}", "{kind: sim}"])
def test_one_group_cannot_keep_the_spare_rule(engines: str) -> None:
    (finding,) = findings_of(config_of(engines))

    assert (finding.path, finding.level) == ("$.pools.main.engines", "warning")
    assert "one EP group, 'main-0': nothing can take over" in finding.message
    assert findings_of(config_of(engines, more="\nfaults: {spare: none}")) == []


def test_a_group_that_holds_most_leaves_little_to_use() -> None:
    """Capacity below the spare rule: two small engines beside a large one."""
    engines = ", ".join(
        f"{{url: 'http://{name}', kv_capacity_tokens: {size}, ep_group: {group}}}"
        for name, size, group in (("a", 700, "big"), ("b", 700, "big"), ("c", 300, "small"))
    )
    (finding,) = findings_of(config_of(engines))

    assert "EP group 'big' holds 1,400 of 1,700 KV tokens" in finding.message
    assert "may use only 300" in finding.message


def test_a_request_that_the_model_takes_must_fit_an_engine() -> None:
    engines = "{url: 'http://a', kv_capacity_tokens: 1000}, {url: 'http://b'}"
    (finding,) = findings_of(config_of(engines, model="{name: m, max_model_len: 2000}"))

    assert finding.path == "$.pools.main.engines[0].kv_capacity_tokens"
    assert "1,000 KV tokens are fewer than the model's max_model_len of 2,000" in finding.message


def test_missing_extras_are_named_with_their_remedy(tmp_path: Path) -> None:
    (otel,) = findings_of("otel: {endpoint: 'http://c:4318/v1/traces'}", has_module={}.get)
    missing = tmp_path / "python"
    (engine,) = findings_of(f"launch: {{engine: vllm, model: tiny, python: '{missing}'}}")

    engines = "{url: 'http://a'}, {url: 'http://b'}"
    chat = config_of(engines, model="{name: m, chat_format: deepseek-v4.1}")
    (deepseek,) = findings_of(chat, has_module={}.get)

    assert (deepseek.path, deepseek.level) == ("$.pools.main.model.chat_format", "error")
    assert "pip install 'dsched[deepseek]'" in deepseek.message
    assert (otel.path, otel.level) == ("$.otel.endpoint", "error")
    assert "pip install 'dsched[otel]'" in otel.message
    assert (engine.path, engine.level) == ("$.launch.engine", "error")
    assert str(missing) in engine.message


# -- asking the engines


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[object], Awaitable[str]]]:
    """Start an engine that answers so at /v1/models; its URL."""
    runners: list[web.AppRunner] = []

    async def start(answer: object) -> str:
        async def models(request: web.Request) -> web.StreamResponse:
            if isinstance(answer, int):
                return web.Response(status=answer)
            if isinstance(answer, str):
                return web.Response(text=answer)
            return web.json_response(answer)

        app = web.Application()
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def card(name: str, length: int | None = 100) -> dict[str, object]:
    return {"data": [{"id": name, "max_model_len": length}]}


async def ask(*urls: str, model: str = "m") -> list[Finding]:
    engines = ", ".join(f"{{url: '{url}'}}" for url in urls)
    return await engine_findings(parse_config(config_of(engines, model=f"{{name: {model}}}")))


async def test_engines_that_serve_the_model_are_fine(
    serve: Callable[[object], Awaitable[str]],
) -> None:
    assert await ask(await serve(card("m")), await serve(card("m", None))) == []


async def test_an_unreachable_engine_is_named_by_its_key() -> None:
    """A closed port: at once, with what to do."""
    with refusing_port() as port:
        url = f"http://127.0.0.1:{port}"
        (finding,) = await ask(url)

    assert (finding.path, finding.level) == ("$.pools.main.engines[0].url", "error")
    assert finding.message == (
        f"{url} cannot be reached: connection refused; start the engine, or correct the URL"
    )


async def test_an_engine_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It accepts and says nothing."""
    monkeypatch.setattr("dsched.cli.findings.ASK_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        (finding,) = await ask(f"http://127.0.0.1:{silent.getsockname()[1]}")

    assert "no answer within 0.2 s" in finding.message
    assert ASK_TIMEOUT_S > 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (503, "answers 503 at /v1/models: is it an engine, and is it up?"),
        ("<html>", "answers no JSON at /v1/models: is it an engine?"),
        ({"data": []}, "serves no model and not 'm'"),
        ([], "serves no model and not 'm'"),
        (card("other"), "serves other and not 'm'; correct the model's name, or start the engine "),
    ],
)
async def test_an_engine_that_serves_something_else(
    serve: Callable[[object], Awaitable[str]], answer: object, message: str
) -> None:
    """Models that differ, and things that are no engines."""
    (finding,) = await ask(await serve(answer))

    assert finding.level == "error"
    assert message in finding.message


async def test_lengths_that_differ_are_a_warning(
    serve: Callable[[object], Awaitable[str]],
) -> None:
    (finding,) = await ask(await serve(card("m", 100)), await serve(card("m", 4_000)))

    assert finding.level == "warning"
    assert finding.message.startswith(
        "max_model_len differs: 100 at $.pools.main.engines[0], 4,000 at $.pools.main.engines[1]"
    )


# -- the command


def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dsched", "check", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_command_says_where_and_exits_2_for_errors_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(config_of("{url: 'http://127.0.0.1:9'}"))

    offline = run(monkeypatch, capfd, "-c", str(path))
    online = run(monkeypatch, capfd, "-c", str(path), "--online", "--json")

    assert offline[0] == 0
    assert offline[2].startswith("dsched: warning: $.pools.main.engines: one EP group")
    assert offline[2].endswith(f"({path}:1)\n")
    assert online[0] == 2
    assert [f["level"] for f in json.loads(online[1])["findings"]] == ["warning", "error"]
    assert "Traceback" not in online[2]
