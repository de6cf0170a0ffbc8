"""`dsched drain ENGINE` and `dsched undrain ENGINE`: out of service and back, without an error.

The registry says which dsched processes there are; each is told on its admin port, because each
has requests of its own on the engine. `drain` returns when none of them has any left.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import quote

import aiohttp
import msgspec
import typer

from dsched.cli.options import with_config
from dsched.clock import SystemClock
from dsched.config import RegistryConfig
from dsched.config_load import LoadedConfig
from dsched.errors import ConfigError
from dsched.registry import open_registry, read_workers

ADMIN_TIMEOUT_S = 5.0
"""Time for a dsched to answer. Longer: the command hangs on a dead one. Shorter: busy ones miss."""
POLL_INTERVAL_S = 0.2

EngineName = Annotated[str, typer.Argument(metavar="ENGINE", help="Name, as `dsched workers` has.")]


@with_config
def drain(
    loaded: LoadedConfig,
    engine: EngineName,
    *,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            min=0,
            metavar="SECONDS",
            help="Hand what still runs to other engines after so long; 0 does so at once. Without "
            "it everything finishes where it is.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when nothing runs there any more.")
    ] = True,
) -> None:
    """Take an engine out of service without an error for any client.

    It gets nothing new and stays drained, also over its own restart, until `dsched undrain`.
    Requests that cannot be continued elsewhere honestly finish where they are.
    """
    config = loaded.config
    asyncio.run(
        _drain(
            config.registry_url(),
            engine,
            deadline_s=deadline,
            is_waiting=wait,
            access=config.registry,
        )
    )


@with_config
def undrain(loaded: LoadedConfig, engine: EngineName) -> None:
    """Put a drained engine back into service."""
    config = loaded.config
    asyncio.run(_undrain(config.registry_url(), engine, access=config.registry))


async def _drain(
    registry_url: str,
    engine: str,
    *,
    deadline_s: float | None,
    is_waiting: bool,
    access: RegistryConfig | None = None,
) -> None:
    urls = await admin_urls(registry_url, access=access)
    async with _session() as session:
        body = msgspec.json.encode({"deadline_s": deadline_s})
        answers = await _tell(session, urls, f"{_path(engine)}/drain", body)
        left = _num_requests(answers)
        typer.echo(f"{engine} gets nothing new; {left} requests run there")
        while is_waiting and left:
            await asyncio.sleep(POLL_INTERVAL_S)
            left = _num_requests(await _tell(session, urls, _path(engine), None))
    if is_waiting:
        typer.echo(f"{engine} is empty")


async def _undrain(registry_url: str, engine: str, *, access: RegistryConfig | None = None) -> None:
    urls = await admin_urls(registry_url, access=access)
    async with _session() as session:
        await _tell(session, urls, f"{_path(engine)}/undrain", b"")
    typer.echo(f"{engine} is back in service")


async def admin_urls(registry_url: str, *, access: RegistryConfig | None = None) -> list[str]:
    """Admin addresses of all dsched processes. Raises `ConfigError` where there is none."""
    registry = open_registry(registry_url, clock=SystemClock(), create=False, config=access)
    try:
        view = read_workers(await registry.list_entries(""))
    finally:
        await registry.close()
    urls = [instance.admin_url for instance in view.instances]
    if not urls:
        raise ConfigError("no dsched is registered; start one with: dsched run")
    return urls


async def ask_every_dsched(
    registry_url: str,
    path: str,
    body: bytes | None,
    *,
    access: RegistryConfig | None = None,
) -> list[dict[str, Any]]:
    """Ask every dsched of a registry; `None` as body asks, anything else tells.

    Raises:
        ConfigError: none is registered, or none answers well.
    """
    urls = await admin_urls(registry_url, access=access)
    async with _session() as session:
        return await _tell(session, urls, path, body)


async def _tell(
    session: aiohttp.ClientSession, urls: Sequence[str], path: str, body: bytes | None
) -> list[dict[str, Any]]:
    """Ask every dsched; at least one must answer. Raises `ConfigError`."""
    answers: list[dict[str, Any]] = []
    problems: list[str] = []
    for url in urls:
        method = "GET" if body is None else "POST"
        try:
            async with session.request(method, url + path, data=body) as response:
                document = msgspec.json.decode(await response.read(), type=dict[str, Any])
                if response.status == 200:
                    answers.append(document)
                else:
                    problems.append(str(document.get("error", response.status)))
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            problems.append(f"{url} does not answer: {error}")
    if not answers:
        raise ConfigError("; ".join(problems))
    return answers


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ADMIN_TIMEOUT_S))


def _path(engine: str) -> str:
    return f"/admin/v1/engines/{quote(engine, safe='')}"


def _num_requests(answers: Sequence[dict[str, Any]]) -> int:
    return sum(int(answer["num_requests"]) for answer in answers)
