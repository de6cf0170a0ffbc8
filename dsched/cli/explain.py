"""`dsched explain REQUEST_ID`: tell why a request went where it went.

Live, every dsched of the registry is asked on its admin port, because each has a ring of its own;
with `--trace FILE` the file is read here. Exit status 1 where nothing is known of the request.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import aiohttp
import msgspec
import typer

from dsched.cli.drain import admin_urls
from dsched.cli.options import with_config
from dsched.config import RegistryConfig
from dsched.config_load import LoadedConfig
from dsched.errors import ConfigError
from dsched.trace import TraceReader, as_document, as_text, newest_request_ids, tell

ADMIN_TIMEOUT_S = 15.0
"""Time for a dsched to answer. Shorter: a busy one with a full ring misses it."""
EXIT_UNKNOWN = 1
NUM_HINTS = 3


@with_config
def explain(
    loaded: LoadedConfig,
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="As in X-Request-Id of the answer.")
    ],
    *,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Read this file instead of asking a dsched."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what happened to a request: each choice, what else there was, and every handoff.

    Asks the running dsched processes, which remember the last requests (trace.ring_records).
    Nothing of a prompt or an answer is in a trace, only counts.
    """
    if trace is not None:
        text = _from_file(trace, request_id, as_json=json)
    else:
        config = loaded.config
        text = asyncio.run(
            _from_live(config.registry_url(), request_id, as_json=json, access=config.registry)
        )
    typer.echo(text.rstrip("\n"))


def _from_file(path: Path, request_id: str, *, as_json: bool) -> str:
    reader = TraceReader(path)
    records = list(reader)
    if reader.damage is not None:
        typer.echo(f"dsched: warning: {reader.damage}", err=True)
    story = tell(records, request_id)
    if story is None:
        hint = ", ".join(newest_request_ids(records, NUM_HINTS))
        _end_unknown(
            f"request {request_id!r} is not in {path}"
            + (f"; the last it has are {hint}" if hint else ", which has no request")
        )
    return _format(as_document(story)) if as_json else as_text(story, reader.header)


async def _from_live(
    registry_url: str, request_id: str, *, as_json: bool, access: RegistryConfig
) -> str:
    urls = await admin_urls(registry_url, access=access)
    path = f"/admin/v1/explain/{quote(request_id, safe='')}"
    timeout = aiohttp.ClientTimeout(total=ADMIN_TIMEOUT_S)
    answers: list[str] = []
    problems: list[str] = []
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for url in urls:
            try:
                query = "" if as_json else "?format=text"
                async with session.get(url + path + query) as response:
                    body = await response.read()
                    if response.status == 200:
                        return _format(msgspec.json.decode(body)) if as_json else body.decode()
                    answers.append(_error_of(body, response.status))
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
                problems.append(f"{url} does not answer: {error}")
    if answers:
        return _end_unknown("; ".join([*answers, *problems]))
    raise ConfigError("; ".join(problems))


def _error_of(body: bytes, status: int) -> str:
    document = msgspec.json.decode(body, type=dict[str, Any])
    return str(document.get("error", status))


def _format(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _end_unknown(text: str) -> NoReturn:
    typer.echo(f"dsched: {text}", err=True)
    raise typer.Exit(EXIT_UNKNOWN)
