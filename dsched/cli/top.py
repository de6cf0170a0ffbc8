"""`dsched top`: the live picture in a terminal.

`--once` prints it once, as text or JSON, and needs nothing but dsched; without it the screen is
textual's, from the extra `dsched[tui]`.
"""

import asyncio
import importlib.util
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from dsched.cli import live_text
from dsched.cli.live_client import LiveClient, admin_urls, open_session
from dsched.cli.live_rows import RowMode, SortKey, make_rows, order_rows
from dsched.cli.live_text import ASCII, UNICODE, Glyphs, Line, Span
from dsched.cli.options import with_config
from dsched.config_load import LoadedConfig
from dsched.errors import ConfigError
from dsched.frontdoor.live import LiveSnapshot

MIN_INTERVAL_S = 0.2
MAX_ONCE_ROWS = 40
"""Rows that `--once` prints unless told otherwise; a terminal's worth, the most loaded first."""
MAX_ONCE_EVENTS = 5
PIPE_WIDTH = 100
"""Where standard output is no terminal."""
RICH_STYLES = {
    "bold": "bold",
    "dim": "dim",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "info": "cyan",
    "bar": "cyan",
    "head": "bold",
}


@with_config
def top(
    loaded: LoadedConfig,
    *,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Admin port of the dsched to watch, as http://HOST:PORT."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
    ranks: Annotated[bool, typer.Option("--ranks", help="A row for each DP rank.")] = False,
    sort: Annotated[
        SortKey, typer.Option("--sort", help="Order of the rows; numbers come largest first.")
    ] = SortKey.NAME,
    reverse: Annotated[bool, typer.Option("--reverse", help="Turn the order round.")] = False,
    filter_text: Annotated[
        str, typer.Option("--filter", help="Only rows with these words in name, state or pool.")
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", help="With --once: rows to print; 0 is all.", min=0)
    ] = MAX_ONCE_ROWS,
    interval: Annotated[
        float, typer.Option("--interval", help="Seconds between two looks.", min=MIN_INTERVAL_S)
    ] = 1.0,
    ascii_only: Annotated[
        bool, typer.Option("--ascii", help="Only ASCII signs, for old terminals.")
    ] = False,
) -> None:
    """Watch pools, engines and DP ranks live.

    Finds the dsched of the configuration (registry, then admin.host and admin.port) or the one of
    --url. Keys: q ends, r switches between engines and ranks, s and S sort, / filters, space holds
    the picture.
    """
    if json and not once:
        raise ConfigError("--json prints one picture; give it together with --once")
    glyphs = ASCII if ascii_only or not _speaks_unicode() else UNICODE
    mode = RowMode.RANKS if ranks else RowMode.ENGINES
    urls = [url] if url else asyncio.run(admin_urls(loaded.config))
    if not once:
        check_terminal()
        from dsched.cli.top_app import TopApp, TopSettings

        settings = TopSettings(
            urls=tuple(urls),
            interval_s=interval,
            mode=mode,
            sort=sort,
            is_reversed=reverse,
            filter_text=filter_text,
            glyphs=glyphs,
        )
        TopApp(settings).run()
        return
    snapshot = asyncio.run(_read_once(urls))
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(snapshot), indent=2).decode())
        return
    console = Console(highlight=False, soft_wrap=True)
    width = console.width if console.is_terminal else PIPE_WIDTH
    lines = once_lines(
        snapshot,
        max(width, live_text.MIN_WIDTH),
        glyphs,
        mode=mode,
        sort=sort,
        is_reversed=reverse,
        words=filter_text.split(),
        limit=limit,
    )
    for line in lines:
        console.print(to_rich(line))


def check_terminal() -> None:
    """Refuse where a screen cannot be drawn, with what to do instead.

    Raises:
        ConfigError: no textual, no terminal, or one that cannot move its cursor.
    """
    once = "dsched top --once prints the same picture as text"
    if importlib.util.find_spec("textual") is None:
        raise ConfigError(f"dsched top needs textual: pip install 'dsched[tui]'; {once}")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(f"dsched top needs a terminal; {once}")
    if Console().is_dumb_terminal:
        raise ConfigError(f"the terminal cannot move its cursor (TERM is dumb); {once}")


def _speaks_unicode() -> bool:
    encoding = (sys.stdout.encoding or "ascii").lower()
    try:
        "●▲◐■█…".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


async def _read_once(urls: list[str]) -> LiveSnapshot:
    async with open_session() as session:
        return await LiveClient(session, urls).read()


def once_lines(
    snapshot: LiveSnapshot,
    width: int,
    glyphs: Glyphs,
    *,
    mode: RowMode,
    sort: SortKey,
    is_reversed: bool,
    words: list[str],
    limit: int,
) -> list[Line]:
    """Everything that `--once` prints."""
    lines = live_text.head_lines(snapshot, width, glyphs)
    table = make_rows(snapshot, mode)
    order = order_rows(table, key=sort, is_reversed=is_reversed, words=words)
    columns = live_text.row_columns(width, mode=mode)
    shown = order[:limit] if limit else order
    lines += [[], live_text.title_line(columns)]
    lines += [live_text.row_line(table, int(index), columns, glyphs) for index in shown]
    if not len(order):
        lines.append([Span(f"no {mode.value} to show", "dim")])
    num_more = len(order) - len(shown)
    if num_more:
        lines.append([Span(f"{num_more} more; --limit 0 prints all", "dim")])
    if snapshot.events:
        events = live_text.event_lines(snapshot.events, width, glyphs, limit=MAX_ONCE_EVENTS)
        lines += [[], *events]
    return lines


def to_rich(line: Line) -> Text:
    """A line for rich, which leaves colours out where the terminal or NO_COLOR wants none."""
    text = Text(no_wrap=True, end="\n")
    for span in line:
        text.append(span.text, RICH_STYLES.get(span.style))
    text.rstrip()
    return text
