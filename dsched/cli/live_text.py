"""The live picture as lines of text, for any width from 20 columns on, with or without colours.

Pure: a snapshot and a width in, lines of `Span`s out. Each span names what it means (`good`,
`warn`, `bar`), not a colour, and everything that matters is also a word or a sign, so the picture
says the same on a terminal without colours.

Things that do not fit move to the next line or are left out from the right; nothing is wrapped in
the middle of a word.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isnan
from typing import Final, NamedTuple

from dsched.cli.live_rows import RowMode, RowTable
from dsched.frontdoor.live import STATES, LiveEvent, LiveLatency, LivePool, LiveSnapshot

MIN_WIDTH: Final = 20
STATE_STYLES: Final = ("good", "warn", "info", "bad", "dim")
LEVEL_STYLES: Final = {"info": "info", "warning": "warn", "error": "bad"}
STATE_WIDTH: Final = 6


class Span(NamedTuple):
    """Some text and what it means."""

    text: str
    style: str = ""


Line = list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """Signs that the terminal can show."""

    states: tuple[str, ...]
    levels: tuple[str, str, str]
    """info, warning, error"""
    blocks: str
    """Eighths of a full cell, empty first."""
    dash: str
    ellipsis: str


UNICODE: Final = Glyphs(
    states=("●", "▲", "◐", "■", "○"),
    levels=("●", "▲", "■"),
    blocks=" ▏▎▍▌▋▊▉█",
    dash="–",
    ellipsis="…",
)
ASCII: Final = Glyphs(
    states=("+", "?", "~", "!", "-"),
    levels=("-", "?", "!"),
    blocks=" #",
    dash="-",
    ellipsis=".",
)


def head_lines(snapshot: LiveSnapshot, width: int, glyphs: Glyphs) -> list[Line]:
    """Process, traffic, pools, budgets and faults."""
    lines = pack([_process_items(snapshot)], width, glyphs)
    lines += pack([_traffic_items(snapshot, glyphs)], width, glyphs)
    lines += pack([_pool_items(pool, glyphs) for pool in snapshot.pools], width, glyphs)
    lines += pack([_budget_items(snapshot), _fault_items(snapshot, glyphs)], width, glyphs)
    lines += pack([_expert_items(snapshot)], width, glyphs)
    return lines


def _process_items(snapshot: LiveSnapshot) -> list[Line]:
    items: list[Line] = [
        [Span("dsched", "bold"), Span(f" {snapshot.dsched_version}", "dim")],
        [Span(f"{snapshot.instance_id[:8]}", "dim")],
        [Span(f"up {duration(snapshot.uptime_s)}", "dim")],
        [Span(f"epoch {snapshot.epoch}", "dim")],
    ]
    if snapshot.is_simulated:
        items.append([Span("simulated engines", "info")])
    return items


def _traffic_items(snapshot: LiveSnapshot, glyphs: Glyphs) -> list[Line]:
    traffic = snapshot.traffic
    items: list[Line] = [
        [Span("requests ", "dim"), Span(f"{sum(t.requests_per_s for t in traffic):.1f}/s")],
        [Span("tokens ", "dim"), Span(f"{short(sum(t.output_tokens_per_s for t in traffic))}/s")],
        [Span("open ", "dim"), Span(short(sum(t.num_open for t in traffic)))],
        [Span("held ", "dim"), Span(short(snapshot.num_held), _warn_if(snapshot.num_held > 0))],
    ]
    errors = sum(t.errors_per_s for t in traffic)
    if errors:
        items.append([Span("errors ", "dim"), Span(f"{errors:.1f}/s", "bad")])
    for each in traffic:
        name = f"{each.model} " if len(traffic) > 1 else ""
        items.append(_latency(f"{name}TTFT ", each.ttft, glyphs))
        items.append(_latency(f"{name}TPOT ", each.tpot, glyphs))
    return items


def _latency(name: str, latency: LiveLatency, glyphs: Glyphs) -> Line:
    return [
        Span(name, "dim"),
        Span(milliseconds(latency.p50_ms, glyphs)),
        Span(" p99 ", "dim"),
        Span(milliseconds(latency.p99_ms, glyphs)),
    ]


def _pool_items(pool: LivePool, glyphs: Glyphs) -> list[Line]:
    engines = f"{pool.num_engines_up}/{pool.num_engines} engines"
    ranks = f"{pool.num_ranks_up}/{pool.num_ranks} ranks"
    all_up = pool.num_ranks_up == pool.num_ranks and pool.num_engines_up == pool.num_engines
    role = "" if pool.role == "combined" else f" {pool.role}"
    limit = pool.max_running_requests
    running = short(pool.num_running) + ("" if limit is None else f"/{short(limit)}")
    items: list[Line] = [
        [Span("pool ", "dim"), Span(pool.name, "bold"), Span(role, "info")],
        [Span(engines, "" if all_up else "bad")],
        [Span(ranks, "" if all_up else "bad")],
        [Span("running ", "dim"), Span(running)],
        [Span("waiting ", "dim"), Span(short(pool.num_waiting))],
    ]
    if pool.kv_capacity_tokens:
        share = pool.num_kv_tokens / pool.kv_capacity_tokens
        items.append([Span("KV ", "dim"), Span(bar(share, 8, glyphs), "bar"), Span(percent(share))])
    else:
        items.append([Span("KV ", "dim"), Span(short(pool.num_kv_tokens))])
    balance = glyphs.dash if pool.balance is None else f"{pool.balance:.2f}"
    items.append([Span("balance ", "dim"), Span(balance)])
    spare = "a group may fail" if pool.absorbs_loss else "none"
    items.append([Span("spare ", "dim"), Span(spare, "" if pool.absorbs_loss else "warn")])
    return items


def _budget_items(snapshot: LiveSnapshot) -> list[Line]:
    budgets = snapshot.budgets
    budget = "engines' own" if budgets.step_budget_ms is None else f"{budgets.step_budget_ms:g} ms"
    items: list[Line] = [[Span("step budget ", "dim"), Span(budget)]]
    if budgets.num_agents:
        is_deaf = budgets.num_agents_heard < budgets.num_agents
        agents = f"{budgets.num_agents_heard}/{budgets.num_agents}"
        items.append([Span("agents ", "dim"), Span(agents, _warn_if(is_deaf))])
    for feature in budgets.features:
        missing = f", {feature.num_missing} missing" if feature.num_missing else ""
        style = _warn_if(feature.num_missing > 0)
        items.append(
            [Span(f"{feature.name} ", "dim"), Span(f"{feature.num_with} on{missing}", style)]
        )
    return items


def _fault_items(snapshot: LiveSnapshot, glyphs: Glyphs) -> list[Line]:
    faults = snapshot.faults
    num_handoffs = sum(each.count for each in faults.handoffs)
    handoffs = short(num_handoffs)
    if num_handoffs:
        handoffs += f", pause p99 {milliseconds(faults.gap.p99_ms, glyphs)}"
    items: list[Line] = [
        [Span("handed off ", "dim"), Span(handoffs, _warn_if(num_handoffs > 0))],
        [Span("refused ", "dim"), Span(short(faults.num_refused))],
    ]
    if faults.num_waiting_handoffs:
        waiting = short(faults.num_waiting_handoffs)
        items.append([Span("wait for re-prefill ", "dim"), Span(waiting, "warn")])
    if faults.num_policy_errors:
        errors = short(faults.num_policy_errors)
        items.append([Span("policy fallbacks ", "dim"), Span(errors, "warn")])
    if not faults.is_journal_durable:
        items.append([Span("journal not durable", "warn")])
    if not faults.is_registered:
        items.append([Span("not registered", "warn")])
    return items


def _expert_items(snapshot: LiveSnapshot) -> list[Line]:
    items: list[Line] = []
    for load in snapshot.expert_load[:1]:
        if not load.hottest:
            continue
        worst = max(range(len(load.hottest)), key=lambda layer: (load.hottest[layer], -layer))
        kind = "simulated experts" if load.is_simulated else "experts"
        text = f"hottest {load.hottest[worst]:.1f}x mean in layer {worst} of {load.engine_id}"
        items.append([Span(f"{kind} ", "dim"), Span(text)])
    return items


def event_lines(
    events: Sequence[LiveEvent], width: int, glyphs: Glyphs, *, limit: int
) -> list[Line]:
    """The latest events, newest first, a line each."""
    signs = dict(zip(("info", "warning", "error"), glyphs.levels, strict=True))
    lines = []
    for event in list(events)[::-1][:limit]:
        style = LEVEL_STYLES.get(event.level, "")
        sign = signs.get(event.level, glyphs.levels[0])
        clock = datetime.fromtimestamp(event.time_s, UTC).strftime("%H:%M:%S")
        line = [
            Span(f"{clock} ", "dim"),
            Span(f"{sign} ", style),
            Span(f"{event.subject} ", "bold"),
            Span(event.text),
        ]
        lines.append(cut(line, width, glyphs))
    return lines


# ---- rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the rows at one width of the screen."""

    key: str
    title: str
    width: int
    is_number: bool = True


def row_columns(width: int, *, mode: RowMode) -> list[Column]:
    """The columns that fit; the name takes what is left."""
    bar_width = 8 if width < 60 else min(30, 8 + (width - 60) // 3)
    wanted = [
        Column(key="state", title="state", width=STATE_WIDTH + 2, is_number=False),
        Column(key="running", title="run", width=5),
        Column(key="kv", title="KV", width=bar_width + 5, is_number=False),
        Column(key="step", title="step ms", width=7),
        Column(key="waiting", title="wait", width=5),
        Column(key="ranks", title="ranks", width=5),
        Column(key="dispatched", title="sent", width=7),
        Column(key="pool", title="pool", width=12, is_number=False),
    ]
    if width < 50:
        wanted[0] = Column(key="state", title="", width=1, is_number=False)
    if mode is RowMode.RANKS:
        wanted = [column for column in wanted if column.key != "ranks"]
    name_width = 10 if width < 50 else 18
    room = width - name_width
    chosen = []
    for column in wanted:
        if column.width + 1 > room:
            break
        chosen.append(column)
        room -= column.width + 1
    title = "rank" if mode is RowMode.RANKS else "engine"
    name = Column(key="name", title=title, width=min(name_width + room, 40), is_number=False)
    return [name, *chosen]


def title_line(columns: Sequence[Column]) -> Line:
    """The titles above the rows."""
    return _join(Span(_fit(column.title, column), "head") for column in columns)


def row_line(table: RowTable, index: int, columns: Sequence[Column], glyphs: Glyphs) -> Line:
    """One row."""
    line: Line = []
    for place, column in enumerate(columns):
        if place:
            line.append(Span(" "))
        line += _cell(table, index, column, glyphs)
    return line


def _cell(table: RowTable, index: int, column: Column, glyphs: Glyphs) -> Line:
    state = int(table.state[index])
    if column.key == "state":
        style = STATE_STYLES[state]
        if column.width == 1:
            return [Span(glyphs.states[state], style)]
        word = STATES[state][:STATE_WIDTH]
        return [Span(f"{glyphs.states[state]} {word:<{STATE_WIDTH}}", style)]
    if column.key == "kv":
        share = float(table.kv_share[index])
        if isnan(share):
            return [Span(_fit(short(int(table.kv_tokens[index])), column))]
        style = "warn" if share > 0.9 else "bar"
        return [Span(bar(share, column.width - 5, glyphs), style), Span(f"{percent(share):>5}")]
    texts = {
        "name": table.name[index],
        "pool": table.pool[index],
        "running": short(int(table.running[index])),
        "waiting": short(int(table.waiting[index])),
        "ranks": short(int(table.num_ranks[index])),
        "dispatched": short(int(table.dispatched[index])),
        "step": f"{table.step_us[index] / 1e3:.1f}" if table.step_us[index] else "idle",
    }
    style = "dim" if column.key == "pool" else ("bold" if column.key == "name" else "")
    return [Span(_fit(_shorten(texts[column.key], column.width, glyphs), column), style)]


def printable(text: str) -> str:
    r"""Names and reasons come from engines; a terminal must not obey them.

    >>> printable("a\x1b[2Jb\n")
    'a?[2Jb?'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text)


def _fit(text: str, column: Column) -> str:
    text = printable(text)[: column.width]
    return text.rjust(column.width) if column.is_number else text.ljust(column.width)


def _join(spans: Iterable[Span]) -> Line:
    line: Line = []
    for span in spans:
        if line:
            line.append(Span(" "))
        line.append(span)
    return line


# ---- pieces


def pack(rows: Sequence[Sequence[Line]], width: int, glyphs: Glyphs) -> list[Line]:
    """Put items side by side, two blanks apart, as many as fit a line; each row starts anew."""
    lines: list[Line] = []
    for items in rows:
        line: Line = []
        used = 0
        for item in items:
            length = line_width(item)
            if line and used + 2 + length > width:
                lines.append(line)
                line, used = [], 0
            if line:
                line.append(Span("  "))
                used += 2
            line += item
            used += length
        if line:
            lines.append(line)
    return [cut(line, width, glyphs) for line in lines]


def cut(line: Line, width: int, glyphs: Glyphs) -> Line:
    """Shorten a line that is too long, and take out what would move the cursor."""
    line = [Span(printable(text), style) for text, style in line]
    if line_width(line) <= width:
        return line
    kept: Line = []
    room = max(0, width - len(glyphs.ellipsis))
    for text, style in line:
        kept.append(Span(text[:room], style))
        room -= len(text)
        if room <= 0:
            break
    kept.append(Span(glyphs.ellipsis, "dim"))
    return kept


def line_width(line: Line) -> int:
    return sum(len(span.text) for span in line)


def plain(line: Line) -> str:
    """The text alone, without blanks at its end."""
    return "".join(span.text for span in line).rstrip()


def _shorten(text: str, width: int, glyphs: Glyphs) -> str:
    """Cut in the middle: names differ at their ends.

    >>> _shorten("decode-engine-0017/3", 12, UNICODE)
    'decod…0017/3'
    """
    if len(text) <= width:
        return text
    room = max(0, width - len(glyphs.ellipsis))
    tail = (room + 1) // 2
    return text[: room - tail] + glyphs.ellipsis + text[len(text) - tail :]


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    """A bar of `width` cells.

    >>> bar(0.5, 4, ASCII), bar(0.3125, 2, UNICODE), bar(2.0, 2, ASCII)
    ('##  ', '▋ ', '##')
    """
    steps = len(glyphs.blocks) - 1
    eighths = round(max(0.0, min(1.0, share)) * width * steps)
    full, rest = divmod(eighths, steps)
    text = glyphs.blocks[-1] * full + (glyphs.blocks[rest] if rest else "")
    return text.ljust(width)


def percent(share: float) -> str:
    return f"{share * 100:.0f}%"


def short(value: float) -> str:
    """A number in five characters or fewer.

    >>> [short(v) for v in (0, 999, 12_345, 3_210_000, 123_456_789, 4.2e9)]
    ['0', '999', '12.3k', '3.21M', '123M', '4.20G']
    """
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            number = value / (1e3 if sign == "k" else size)
            digits = 0 if number >= 100 else (1 if number >= 10 else 2)
            return f"{number:.{digits}f}{sign}"
    return f"{value:.0f}"


def milliseconds(value_ms: float | None, glyphs: Glyphs) -> str:
    """A latency for people.

    >>> [milliseconds(v, ASCII) for v in (None, 0.31, 22.4, 900.0, 12_300.0)]
    ['-', '0.31 ms', '22 ms', '900 ms', '12.3 s']
    """
    if value_ms is None:
        return glyphs.dash
    if value_ms >= 1_000:
        return f"{value_ms / 1_000:.1f} s"
    return f"{value_ms:.2g} ms" if value_ms < 10 else f"{value_ms:.0f} ms"


def duration(seconds: float) -> str:
    """A span of time for people.

    >>> [duration(v) for v in (12, 200, 9_000, 400_000)]
    ['12 s', '3 min', '2.5 h', '4.6 days']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5_400:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 86_400:.1f} days"


def _warn_if(condition: bool) -> str:  # noqa: FBT001 - reads as the sentence it is
    return "warn" if condition else ""
