"""The screen of `dsched top`, over textual.

Only the rows in sight are drawn: the table is a `ScrollView` that is asked for one line at a time,
so ten thousand ranks cost what forty do. The picture is asked for once an interval; while nobody
answers, the last one stays, dimmed, with its age.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input, Static

from dsched.cli import live_text
from dsched.cli.live_client import LiveClient, open_session
from dsched.cli.live_rows import RowMode, RowTable, SortKey, make_rows, order_rows
from dsched.cli.live_text import Glyphs, Line, Span
from dsched.clock import Clock, SystemClock
from dsched.frontdoor.live import LiveError, LiveSnapshot

STYLES = {
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow", bold=True),
    "bad": Style(color="red", bold=True),
    "info": Style(color="cyan"),
    "bar": Style(color="cyan"),
    "head": Style(bold=True, underline=True),
}
NONE = Style()
S = 1_000_000_000
NUM_EVENTS = 4
"""Lines of events at the bottom of a tall screen."""
TALL_LINES = 24
SHORT_HELP = "q end  r ranks  s/S sort  / filter  space hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSettings:
    """How the screen starts."""

    urls: tuple[str, ...]
    interval_s: float
    mode: RowMode
    sort: SortKey
    is_reversed: bool
    filter_text: str
    glyphs: Glyphs


class Rows(ScrollView, can_focus=True):
    """The table: title line and one line a row."""

    DEFAULT_CSS = "Rows { height: 1fr; }"

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._table: RowTable | None = None
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)
        self.is_old = False

    @property
    def num_rows(self) -> int:
        return len(self._order)

    def show_rows(self, table: RowTable, order: NDArray[np.int64]) -> None:
        """Draw other rows; the place in the table stays."""
        self._table, self._order = table, order
        self.virtual_size = Size(self.size.width, len(order) + 1)
        self.refresh()

    def line_at(self, y: int) -> Line:
        """Line `y` of the screen; the title stays on top while the rest scrolls."""
        table = self._table
        if table is None:
            return []
        columns = live_text.row_columns(self.size.width, mode=table.mode)
        if y == 0:
            return live_text.title_line(columns)
        place = y - 1 + self.scroll_offset.y
        if place >= len(self._order):
            return []
        return live_text.row_line(table, int(self._order[place]), columns, self._glyphs)

    def render_line(self, y: int) -> Strip:
        return to_strip(self.line_at(y), self.size.width, is_old=self.is_old)


def to_strip(line: Line, width: int, *, is_old: bool) -> Strip:
    """A line for textual, filled up to the width."""
    segments = [
        Segment(span.text, STYLES["dim"] if is_old else STYLES.get(span.style, NONE))
        for span in line
    ]
    return Strip(segments).adjust_cell_length(width, NONE)


def to_text(lines: Sequence[Line], *, is_old: bool) -> Text:
    """Lines for a `Static`."""
    text = Text(no_wrap=True)
    for number, line in enumerate(lines):
        if number:
            text.append("\n")
        for span in line:
            text.append(span.text, STYLES["dim"] if is_old else STYLES.get(span.style))
    return text


class TopApp(App[None]):
    """Asks, draws, and answers keys."""

    CSS = """
    Screen { layers: base; }
    #status { height: 1; }
    #head { height: auto; max-height: 60%; }
    #events { height: auto; }
    #filter { display: none; height: 3; }
    #filter.open { display: block; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "end"),
        Binding("r", "toggle_mode", "engines or ranks"),
        Binding("s", "next_sort", "sort by the next column"),
        Binding("S", "turn_round", "turn the order round"),
        Binding("slash", "open_filter", "filter"),
        Binding("escape", "close_filter", "no filter"),
        Binding("space", "hold", "hold the picture"),
    ]

    def __init__(self, settings: TopSettings, *, clock: Clock | None = None) -> None:
        super().__init__()
        self._settings = settings
        self._clock = clock or SystemClock()
        self.mode = settings.mode
        self.sort = settings.sort
        self.is_reversed = settings.is_reversed
        self.words: list[str] = settings.filter_text.split()
        self.is_held = False
        self.snapshot: LiveSnapshot | None = None
        self.fault: str | None = None
        """Why there is no newer picture."""
        self._heard_ns = self._clock.now_ns()

    def compose(self) -> ComposeResult:
        yield Static(id="status", markup=False)
        yield Static(id="head", markup=False)
        yield Rows(self._settings.glyphs)
        yield Static(id="events", markup=False)
        yield Input(placeholder="words in name, state or pool", id="filter")

    @property
    def rows(self) -> Rows:
        return self.query_one(Rows)

    def on_mount(self) -> None:
        self.rows.focus()
        if self._settings.glyphs is live_text.ASCII:
            self.rows.styles.scrollbar_size_vertical = 0  # it is drawn with block signs
        self.run_worker(self._look_for_ever(), exclusive=True)
        self.draw()

    async def _look_for_ever(self) -> None:
        async with open_session() as session:
            client = LiveClient(session, self._settings.urls)
            while True:
                if not self.is_held:
                    await self._look(client)
                await asyncio.sleep(self._settings.interval_s)

    async def _look(self, client: LiveClient) -> None:
        try:
            snapshot = await client.read()
        except LiveError as error:
            self.fault = str(error)
        else:
            if self.is_held and self.snapshot is not None:  # since it was asked for
                return
            self.snapshot, self.fault = snapshot, None
            self._heard_ns = self._clock.now_ns()
        self.draw()

    # ---- drawing

    def draw(self) -> None:
        """Draw what is known; nothing while the screen is put up or taken down."""
        if len(self.query("#status, #head, #events")) < 3:
            return
        width = max(self.size.width, live_text.MIN_WIDTH)
        glyphs = self._settings.glyphs
        is_old = self.fault is not None
        status = live_text.cut(self.status_line(), width, glyphs)
        self.query_one("#status", Static).update(to_text([status], is_old=False))
        snapshot = self.snapshot
        if snapshot is None:
            message = self.fault or "asking for a first picture"
            self.query_one("#head", Static).update(Text(live_text.printable(message)))
            return
        head = live_text.head_lines(snapshot, width, glyphs)
        self.query_one("#head", Static).update(to_text(head, is_old=is_old))
        table = make_rows(snapshot, self.mode)
        order = order_rows(table, key=self.sort, is_reversed=self.is_reversed, words=self.words)
        self.rows.is_old = is_old
        self.rows.show_rows(table, order)
        limit = NUM_EVENTS if self.size.height >= TALL_LINES else 1
        events = live_text.event_lines(snapshot.events, width, glyphs, limit=limit)
        self.query_one("#events", Static).update(to_text(events, is_old=is_old))

    def status_line(self) -> Line:
        """Whether the picture is of now, and how it is sorted."""
        signs = self._settings.glyphs.states
        if self.fault is not None:
            age = live_text.duration((self._clock.now_ns() - self._heard_ns) / S)
            since = "no answer" if self.snapshot is None else f"no answer for {age}, picture is old"
            return [Span(f"{signs[3]} {since}", "bad"), Span(f"  {self.fault}", "dim")]
        word, style = ("held", "warn") if self.is_held else ("live", "good")
        turned = ", reversed" if self.is_reversed else ""
        order = f"  {self.mode.value} by {self.sort.value}{turned}"
        chosen = f"  filter: {' '.join(self.words)}" if self.words else ""
        return [
            Span(f"{signs[1] if self.is_held else signs[0]} {word}", style),
            Span(order),
            Span(chosen, "info"),
            Span(f"  {SHORT_HELP}", "dim"),
        ]

    def on_resize(self) -> None:
        self.draw()

    # ---- keys

    def action_toggle_mode(self) -> None:
        self.mode = RowMode.ENGINES if self.mode is RowMode.RANKS else RowMode.RANKS
        self.rows.scroll_to(y=0, animate=False)
        self.draw()

    def action_next_sort(self) -> None:
        keys = list(SortKey)
        self.sort = keys[(keys.index(self.sort) + 1) % len(keys)]
        self.draw()

    def action_turn_round(self) -> None:
        self.is_reversed = not self.is_reversed
        self.draw()

    def action_hold(self) -> None:
        self.is_held = not self.is_held
        self.draw()

    def action_open_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.value = " ".join(self.words)
        field.focus()

    def action_close_filter(self) -> None:
        self.words = []
        self._leave_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.has_class("open"):
            self.words = event.value.split()
            self.draw()

    def on_input_submitted(self) -> None:
        self._leave_filter()

    def _leave_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.rows.focus()
        self.draw()
