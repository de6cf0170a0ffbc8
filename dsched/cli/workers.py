"""`dsched workers`: engines and DP ranks with state and load.

The registry says which dsched processes there are; the first of them that answers on its admin port
gives the load of this moment. Without an answer, what the registry has is shown, and said to be so.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dsched.cli.options import with_config
from dsched.clock import SystemClock
from dsched.config_load import LoadedConfig
from dsched.registry import EngineRow, RankRow, WorkersView, open_registry, read_workers

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
    found = asyncio.run(find_workers(loaded.config.registry_url()))
    if json:
        document = {"source": found.source, **msgspec.to_builtins(found.view)}
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    print_workers(found, Console())


async def find_workers(registry_url: str) -> FoundWorkers:
    """Read the registry, then ask the dsched processes in it. Raises `RegistryError`."""
    registry = open_registry(registry_url, clock=SystemClock(), create=False)
    try:
        view = read_workers(await registry.list_entries(""))
    finally:
        await registry.close()
    timeout = aiohttp.ClientTimeout(total=ADMIN_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for instance in view.instances:
            live = await _ask(session, instance.admin_url + WORKERS_PATH)
            if live is not None:
                engines = tuple(
                    sorted(
                        {e.engine_id: e for e in (*view.engines, *live.engines)}.values(),
                        key=lambda engine: engine.engine_id,
                    )
                )
                return FoundWorkers(
                    view=msgspec.structs.replace(view, engines=engines), source="live"
                )
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
            if engine.state != "up" and engine.reason:
                console.print(
                    f"{engine.engine_id} is {engine.state}: {engine.reason}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
    for instance in found.view.instances:
        console.print(
            f"dsched {instance.version}: {instance.front_door_url}, admin {instance.admin_url}",
            highlight=False,
            soft_wrap=True,
        )
    if found.source == "registry":
        console.print("No dsched answered; loads are those last written to the registry.")
    for key in found.view.unreadable:
        console.print(f"Registry key {key} is of another dsched version; left out.")


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
