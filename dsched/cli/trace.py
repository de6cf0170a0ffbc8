"""`dsched trace start | stop | status`: record the decisions of running dsched processes to files.

Each process of the registry is told, and writes a file of its own in its `state_dir`.
"""

import asyncio
from typing import Annotated, Any

import msgspec
import typer

from dsched.cli.drain import ask_every_dsched
from dsched.cli.options import with_config
from dsched.config_load import LoadedConfig

PATH = "/admin/v1/trace"


@with_config
def start(
    loaded: LoadedConfig,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="New file in state_dir, e.g. night.dtrace.")
    ],
) -> None:
    """Record every decision to a file from now on, until `dsched trace stop`."""
    body = msgspec.json.encode({"name": name})
    for answer in _ask(loaded, f"{PATH}/start", body):
        typer.echo(f"recording to {answer['file']}")


@with_config
def stop(loaded: LoadedConfig) -> None:
    """Close the file."""
    for answer in _ask(loaded, f"{PATH}/stop", b""):
        typer.echo(
            f"{answer['file']}: {answer['file_records']:,} records, {answer['file_bytes']:,} bytes"
        )


@with_config
def status(
    loaded: LoadedConfig,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is kept and what is being recorded."""
    answers = _ask(loaded, PATH, None)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answers), indent=2).decode())
        return
    for answer in answers:
        if not answer["enabled"]:
            typer.echo("tracing is off (trace.enabled)")
            continue
        recorded = "no file" if answer["file"] is None else f"recording to {answer['file']}"
        typer.echo(
            f"{answer['num_records']:,} records since the start, the last "
            f"{answer['ring_records']:,} kept; {recorded}"
        )


def _ask(loaded: LoadedConfig, path: str, body: bytes | None) -> list[dict[str, Any]]:
    config = loaded.config
    return asyncio.run(ask_every_dsched(config.registry_url(), path, body, access=config.registry))
