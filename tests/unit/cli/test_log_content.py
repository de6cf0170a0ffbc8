"""No word of a client reaches the log: a whole dsched over simulated engines, at level debug."""

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from dsched.cli.service import Service
from dsched.config import LoggingConfig
from dsched.config_load import load_config
from dsched.faults import read_unfinished
from dsched.faults.journal_file import read_request
from dsched.ids import RequestId
from dsched.logs import configure_logging
from dsched.metrics import CATALOG

SECRET = "xyzzyplugh"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging(LoggingConfig(level="debug"), stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
async def service(log: io.StringIO, tmp_path: Path) -> AsyncIterator[Service]:
    flags = {
        "front_door.port": "0",
        "admin.port": "0",
        "state_dir": str(tmp_path),
        "sim.step_base_us": "200",
    }
    made = Service(load_config(flags=flags))
    await made.start()
    yield made
    await made.stop()


BODIES: tuple[tuple[str, bytes], ...] = (
    ("chat/completions", json.dumps(
        {"model": "dsched-sim", "max_tokens": 4, "user": SECRET,
         "messages": [{"role": "user", "content": SECRET}]}).encode()),
    ("completions", json.dumps(
        {"model": "dsched-sim", "max_tokens": 4, "prompt": SECRET, "stop": [SECRET],
         "stream": True}).encode()),
    ("completions", json.dumps({"model": SECRET, "prompt": "a"}).encode()),
    ("completions", json.dumps({"model": "dsched-sim", "prompt": "a", "n": SECRET}).encode()),
    ("completions", b'{"model": "dsched-sim", "prompt": "' + SECRET.encode()),
    ("chat/completions", json.dumps({"model": "dsched-sim", "messages": SECRET}).encode()),
)  # fmt: skip


async def test_log_has_no_content(service: Service, log: io.StringIO) -> None:
    """Good requests and bad ones, prompts, stop strings, users, models that do not exist."""
    async with aiohttp.ClientSession() as session:
        for path, body in BODIES:
            url = f"{service.front_door_url}/v1/{path}"
            headers = {"content-type": "application/json"}
            async with session.post(url, data=body, headers=headers) as response:
                await response.read()
                assert response.status < 500

    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert "service.started" in [line["event"] for line in lines]
    assert SECRET not in log.getvalue()


async def test_metrics_are_those_of_the_catalog(service: Service) -> None:
    """A live scrape parses, has no series twice and no name that the catalog does not have."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{service.front_door_url}/metrics") as response,
    ):
        text = await response.text()
    series = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    names = {
        name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        for name, _ in series
        if name.startswith("dsched_")
    }

    assert len(set(series)) == len(series)
    assert names <= set(CATALOG)
    for prefix in ("dsched_rank_", "dsched_journal_", "dsched_registry_", "dsched_ttft_"):
        assert any(name.startswith(prefix) for name in names), prefix


async def test_journal_has_what_the_client_got(service: Service, tmp_path: Path) -> None:
    """After an answer the file has all its tokens and its end; nothing is left unfinished."""
    body = {"model": "dsched-sim", "prompt": "hello", "max_tokens": 6}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{service.front_door_url}/v1/completions",
            json=body,
            headers={"X-Request-Id": "mine"},
        ) as response,
    ):
        answer = await response.json()
    await service.stop()

    path = tmp_path / "journal.sqlite3"
    record = read_request(path, RequestId("mine")) or read_request(path, RequestId(answer["id"]))
    assert record is not None
    assert len(record.output_token_ids) == answer["usage"]["completion_tokens"] == 6
    assert record.num_prompt_tokens == answer["usage"]["prompt_tokens"]
    assert record.finish_reason == "length"
    assert list(read_unfinished(path)) == []
