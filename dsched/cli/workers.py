"""`dsched workers`: engines and DP ranks with state and load.

The registry says which dsched processes there are; the first of them that answers on its admin port
gives the load of this moment. Without an answer, what the registry has is shown, and said to be so.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dsched.cli.options import with_config
from dsched.clock import SystemClock
from dsched.config import Config
from dsched.config_load import LoadedConfig
from dsched.errors import RegistryError
from dsched.registry import (
    EngineRow,
    RankRow,
    WorkersView,
    merge_workers,
    open_registry,
    read_workers,
)

WORKERS_PATH = "/admin/v1/workers"
ADMIN_TIMEOUT_S = 2.0
"""Time for a dsched to answer. Longer: the command hangs on a dead one. Shorter: busy ones miss."""
NS_PER_MS = 1_000_000
STATE_STYLES = {"up": "green", "suspect": "yellow", "draining": "cyan", "down": "red"}


class WorkersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the admin API answers."""

    workers: WorkersView


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWorkers:
    """What was found, and where."""

    view: WorkersView
    source: str
    """`live`, or `registry` when no dsched answered."""
    fault: str | None = None
    """Why the registry could not be read; the view is one dsched's own then."""


@with_config
def workers(
    loaded: LoadedConfig,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List engines and DP ranks with state and load.

    Reads the registry of the configuration (`registry.url`, by default in `state_dir`) and asks a
    running dsched for the load of this moment.
    """
    found = asyncio.run(find_workers(loaded.config))
    if json:
        document = {"source": found.source, "fault": found.fault, **msgspec.to_builtins(found.view)}
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    print_workers(found, Console())


async def find_workers(config: Config) -> FoundWorkers:
    """Read the registry, then ask the dsched processes in it.

    When the registry is away, the dsched that the configuration names is asked for what it knows.
    Raises `RegistryError` if that one does not answer either.
    """
    registry = open_registry(
        config.registry_url(), clock=SystemClock(), create=False, config=config.registry
    )
    timeout = aiohttp.ClientTimeout(total=ADMIN_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            view = read_workers(await registry.list_entries(""))
        except RegistryError as error:
            url = f"http://{config.admin.host}:{config.admin.port}"
            live = await _ask(session, url + WORKERS_PATH)
            if live is None:
                raise
            return FoundWorkers(view=live, source="live", fault=str(error))
        finally:
            await registry.close()
        for instance in view.instances:
            live = await _ask(session, instance.admin_url + WORKERS_PATH)
            if live is not None:
                return FoundWorkers(view=merge_workers(view, live), source="live")
    return FoundWorkers(view=view, source="registry")


async def _ask(session: aiohttp.ClientSession, url: str) -> WorkersView | None:
    try:
        async with session.get(url) as response:
            if response.status != 200:
                return None
            return msgspec.json.decode(await response.read(), type=WorkersAnswer).workers
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
        return None


def print_workers(found: FoundWorkers, console: Console) -> None:
    """Print a table of DP ranks for each pool, and a line for each dsched process."""
    if not found.view.instances and not found.view.engines:
        console.print("No dsched is registered. Start one with: dsched run")
        return
    for pool in sorted({engine.pool for engine in found.view.engines}):
        engines = [engine for engine in found.view.engines if engine.pool == pool]
        models = ", ".join(sorted({engine.model for engine in engines}))
        console.print(f"pool {pool}: {models}", highlight=False, style="bold")
        console.print(_to_table(engines))
        for engine in engines:
            for text in _remarks(engine):
                console.print(text, highlight=False, markup=False, soft_wrap=True)
    leader = found.view.leader
    for instance in found.view.instances:
        is_leader = leader is not None and leader.instance_id == instance.instance_id
        console.print(
            f"dsched {instance.version}: {instance.front_door_url}, admin {instance.admin_url}"
            f"{', leader' if is_leader else ''}",
            highlight=False,
            soft_wrap=True,
        )
    if found.source == "registry":
        console.print("No dsched answered; loads are those last written to the registry.")
    for key in found.view.unreadable:
        why = found.view.why_unreadable.get(key, "of another dsched version")
        text = f"Registry key {key} is left out: {why}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    for text in (*found.view.conflicts, *([found.fault] if found.fault else [])):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _remarks(engine: EngineRow) -> Iterator[str]:
    """What is to be said of an engine beside its numbers."""
    if engine.state != "up" and engine.reason:
        yield f"{engine.engine_id} is {engine.state}: {engine.reason}"
    if engine.missing:
        version = f" ({engine.kind} {engine.version})" if engine.version else ""
        yield f"{engine.engine_id}{version} runs without {', '.join(engine.missing)}"


def _to_table(engines: Sequence[EngineRow]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for name in ("engine", "rank", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "KV tokens", "capacity", "step ms", "report"):
        table.add_column(name, justify="right", no_wrap=True)
    for engine in engines:
        if not engine.ranks:
            table.add_row(engine.engine_id, "-", _state(engine.state))
        for rank in engine.ranks:
            table.add_row(
                engine.engine_id,
                str(rank.dp_rank),
                _state(rank.state),
                *_load_cells(rank),
            )
    return table


def _state(state: str) -> str:
    return f"[{STATE_STYLES[state]}]{state}[/]"


def _load_cells(rank: RankRow) -> tuple[str, ...]:
    capacity, age_ns = rank.kv_capacity_tokens, rank.report_age_ns
    return (
        str(rank.num_running),
        str(rank.num_waiting),
        f"{rank.num_kv_tokens:,}",
        f"{capacity:,}" if capacity is not None else "?",
        f"{rank.step_ns / NS_PER_MS:.1f}" if rank.step_ns else "idle",
        f"{age_ns / NS_PER_MS / 1_000:.1f} s" if age_ns is not None else "none",
    )
