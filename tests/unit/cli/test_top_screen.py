"""The screen of dsched top, run without a terminal by textual's own pilot."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest

from dsched.cli.live_client import LiveClient
from dsched.cli.live_rows import RowMode, SortKey
from dsched.cli.live_text import ASCII, UNICODE, plain
from dsched.frontdoor.admin import AdminServer
from dsched.frontdoor.live import LiveSnapshot
from dsched.testing.live_page import serve_live
from dsched.testing.live_snapshots import MadeUpSource, Shape, make_snapshot

pytest.importorskip("textual", reason="the screen needs the extra tui")

from textual.pilot import Pilot
from textual.widgets import Static

from dsched.cli.top_app import TopApp, TopSettings

Serve = Callable[[MadeUpSource], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serve made-up snapshots; all ports are closed at the end."""
    servers: list[AdminServer] = []

    async def serve_one(source: MadeUpSource) -> str:
        server = await serve_live(source)
        servers.append(server)
        return f"http://127.0.0.1:{server.bound_port}"

    yield serve_one
    for server in servers:
        await server.stop()


def make_app(
    url: str,
    *,
    mode: RowMode = RowMode.ENGINES,
    is_ascii: bool = False,
    interval_s: float = 0.02,
) -> TopApp:
    return TopApp(
        TopSettings(
            urls=(url,),
            interval_s=interval_s,
            mode=mode,
            sort=SortKey.NAME,
            is_reversed=False,
            filter_text="",
            glyphs=ASCII if is_ascii else UNICODE,
        )
    )


async def settle(pilot: "Pilot[None]", condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    for _ in range(500):
        if condition():
            await pilot.pause()
            return
        await pilot.pause(0.01)
    raise AssertionError("the screen did not get there")


def screen(app: TopApp) -> list[str]:
    """What is drawn, line by line."""
    return [
        "".join(segment.text for segment in strip).rstrip()
        for strip in app.screen._compositor.render_strips()
    ]


def status(app: TopApp) -> str:
    return str(app.query_one("#status", Static).content)


def names(app: TopApp) -> list[str]:
    """The first word of each row in sight."""
    lines = [plain(app.rows.line_at(y)) for y in range(1, app.rows.size.height)]
    return [line.split()[0] for line in lines if line]


async def test_shows_the_picture(serve: Serve) -> None:
    """Head, rows and events; and what happens next is seen."""
    source = MadeUpSource(Shape(states={1: 3}))
    source.push()
    app = make_app(await serve(source))
    async with app.run_test(size=(100, 40)) as pilot:
        await settle(pilot, lambda: app.snapshot)
        lines = screen(app)
        assert any("3/4 engines" in line for line in lines)
        assert any(re.match(r"engine-1 +■ down", line) for line in lines)
        assert any("no progress for 3.0 s" in line for line in lines)
        assert status(app).startswith("● live")
        source.push()
        await settle(pilot, lambda: app.snapshot and app.snapshot.seq == 2)


@pytest.mark.parametrize("size", [(40, 20), (20, 8), (300, 80)])
async def test_every_size(serve: Serve, size: tuple[int, int]) -> None:
    """40 columns and less: nothing is wider than the screen, and rows are in sight."""
    source = MadeUpSource(Shape(num_engines=40))
    source.push()
    app = make_app(await serve(source), is_ascii=True)
    async with app.run_test(size=size) as pilot:
        await settle(pilot, lambda: app.snapshot)
        lines = screen(app)
        assert len(lines) == size[1]
        assert max(len(line) for line in lines) <= size[0]
        assert names(app)[0] == "engine-0"
        assert all(line.isascii() for line in lines)


@pytest.mark.slow
async def test_ten_thousand_ranks_are_paged(serve: Serve) -> None:
    """Only lines in sight are asked for; the end is one key away; sorting holds the place."""
    source = MadeUpSource(Shape(num_engines=1_250, ranks_per_engine=8))
    source.push()
    app = make_app(await serve(source), mode=RowMode.RANKS, interval_s=60)
    async with app.run_test(size=(80, 30)) as pilot:
        await settle(pilot, lambda: app.snapshot)
        assert app.rows.num_rows == 10_000
        assert names(app)[0] == "engine-0/0"
        await pilot.press("end")
        await settle(pilot, lambda: names(app)[-1] == "engine-1249/7")
        await pilot.press("home")
        await settle(pilot, lambda: names(app)[0] == "engine-0/0")
        await pilot.press("s", "s")
        assert app.sort is SortKey.RUNNING
        running = [int(plain(app.rows.line_at(y)).split()[3]) for y in range(1, 10)]
        assert running == sorted(running, reverse=True)
        await pilot.press("S")
        assert "reversed" in status(app)


@pytest.mark.slow
async def test_filter_and_modes(serve: Serve) -> None:
    """Typed words narrow the rows at once; escape shows all again."""
    source = MadeUpSource(Shape(states={2: 1}))
    source.push()
    app = make_app(await serve(source), interval_s=60)
    async with app.run_test(size=(80, 30)) as pilot:
        await settle(pilot, lambda: app.snapshot)
        await pilot.press("r", "slash", *"suspect")
        await settle(pilot, lambda: app.rows.num_rows == 4)
        assert names(app)[0] == "engine-2/0"
        await pilot.press("enter")
        assert app.focused is app.rows
        await pilot.press("escape")
        await settle(pilot, lambda: app.rows.num_rows == 16)


async def test_a_picture_that_was_asked_for_before_the_hold_is_not_shown() -> None:
    """The first is: there would be nothing to hold."""

    class LateClient:
        def __init__(self, seq: int) -> None:
            self.seq = seq

        async def read(self) -> LiveSnapshot:
            app.is_held = True
            return make_snapshot(seq=self.seq)

    app = make_app("http://127.0.0.1:9")
    async with app.run_test(size=(80, 30)) as pilot:
        app.workers.cancel_all()
        for seq in (1, 2):
            await app._look(cast(LiveClient, LateClient(seq)))
        await pilot.pause()

    assert app.snapshot is not None
    assert app.snapshot.seq == 1


async def test_hold_keeps_the_picture(serve: Serve) -> None:
    """Space stops it and lets it go on."""
    source = MadeUpSource()
    source.push()
    app = make_app(await serve(source))
    async with app.run_test(size=(80, 30)) as pilot:
        await settle(pilot, lambda: app.snapshot)
        await pilot.press("space")
        assert "held" in status(app)
        source.push()
        await pilot.pause(0.1)
        assert app.snapshot is not None
        assert app.snapshot.seq == 1
        await pilot.press("space")
        await settle(pilot, lambda: app.snapshot and app.snapshot.seq == 2)


async def test_old_picture_is_called_old(serve: Serve) -> None:
    """Garbage in the middle: the last picture stays, dimmed, with the reason; then live again."""
    source = MadeUpSource()
    source.push()
    app = make_app(await serve(source))
    async with app.run_test(size=(160, 30)) as pilot:
        await settle(pilot, lambda: app.snapshot)
        source.push(b"<html>")
        await settle(pilot, lambda: app.fault)
        assert "picture is old" in status(app)
        assert "no live picture" in status(app)
        assert app.rows.is_old
        assert names(app)[0] == "engine-0"
        source.push()
        await settle(pilot, lambda: app.fault is None)
        assert not app.rows.is_old


@pytest.mark.slow
async def test_nobody_answers() -> None:
    """From the start: the address, the reason and what to do, and q still ends it."""
    app = make_app("http://127.0.0.1:9")
    async with app.run_test(size=(80, 20)) as pilot:
        await settle(pilot, lambda: app.fault)
        text = " ".join(" ".join(screen(app)).split())
        assert "http://127.0.0.1:9 cannot be reached" in text
        assert "dsched run" in text
        await pilot.press("q")
    assert app.return_code == 0


async def test_no_color_is_grey(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR leaves no hue on the screen; the words and signs stay."""
    monkeypatch.setenv("NO_COLOR", "1")
    source = MadeUpSource(Shape(states={1: 3}))
    source.push()
    app = make_app(await serve(source))
    async with app.run_test(size=(80, 30)) as pilot:
        await settle(pilot, lambda: app.snapshot)
        assert any("■ down" in line for line in screen(app))
        strips = app.screen._compositor.render_strips()
        colours = {
            colour.triplet
            for strip in strips
            for segment in strip.apply_filter(app._filters[0], app.screen.background_colors[1])
            if segment.style
            for colour in (segment.style.color, segment.style.bgcolor)
            if colour is not None and colour.triplet is not None
        }
        assert {each for each in colours if len(set(each)) > 1} == set()
