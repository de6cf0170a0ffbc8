"""dsched top: what its lines say at every width, rows in order, clear words for what is wrong."""

import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsched.cli.live_rows import RowMode, SortKey, make_rows, order_rows
from dsched.cli.live_text import (
    ASCII,
    UNICODE,
    Glyphs,
    event_lines,
    head_lines,
    line_width,
    plain,
    row_columns,
    row_line,
    title_line,
)
from dsched.cli.main import main
from dsched.cli.top import check_terminal, once_lines
from dsched.errors import ConfigError
from dsched.frontdoor.live import LiveError, LiveSnapshot, decode_snapshot
from dsched.testing.live_snapshots import Shape, make_snapshot

GOOD = msgspec.json.encode(make_snapshot(Shape(states={1: 3})))


@contextmanager
def answering(body: bytes, *, status: int = 200) -> Iterator[str]:
    """A server that answers everything with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


RunTop = Callable[..., Done]


@pytest.fixture
def run_top(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunTop:
    """Run `dsched top` in this process, as the console script does."""

    def run(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["dsched", "top", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        status = ended.value.code or 0
        assert isinstance(status, int)
        return Done(status=status, stdout=written.out, stderr=written.err)

    return run


def all_lines(snapshot: LiveSnapshot, width: int, glyphs: Glyphs, mode: RowMode) -> list[str]:
    lines = once_lines(
        snapshot,
        width,
        glyphs,
        mode=mode,
        sort=SortKey.NAME,
        is_reversed=False,
        words=[],
        limit=0,
    )
    return [plain(line) for line in lines]


# ---- lines


@given(
    width=st.integers(20, 250),
    mode=st.sampled_from(RowMode),
    glyphs=st.sampled_from([ASCII, UNICODE]),
    num_engines=st.integers(0, 6),
)
def test_no_line_is_wider_than_the_screen(
    width: int, mode: RowMode, glyphs: Glyphs, num_engines: int
) -> None:
    """Head, rows and events, from 20 columns on; with ASCII signs nothing else."""
    shape = Shape(num_engines=num_engines, states={1: 1}, reason="r" * 300)
    lines = all_lines(make_snapshot(shape), width, glyphs, mode)

    assert max(len(line) for line in lines) <= width
    if glyphs is ASCII:
        assert all(line.isascii() for line in lines)


def test_forty_columns_say_what_matters() -> None:
    """State as a sign, running, KV and step time still fit."""
    lines = all_lines(make_snapshot(Shape(states={1: 3})), 40, UNICODE, RowMode.ENGINES)
    text = "\n".join(lines)

    assert "TTFT 120 ms p99 900 ms" in text
    assert "3/4 engines" in text
    assert "balance 0.87" in text
    (row,) = (line for line in lines if line.startswith("engine-1"))
    assert re.fullmatch(r"engine-1 +■ +\d+ [█▏▎▍▌▋▊▉ ]{8} +\d+% +\d+\.\d", row), row


def test_state_is_a_word_where_there_is_room() -> None:
    """Not a colour alone."""
    lines = all_lines(make_snapshot(Shape(states={1: 3, 2: 1})), 80, ASCII, RowMode.ENGINES)

    assert [line.split()[1:3] for line in lines if line.startswith("engine-")] == [
        ["+", "up"],
        ["!", "down"],
        ["?", "suspec"],
        ["+", "up"],
    ]


def test_text_of_engines_cannot_move_the_cursor() -> None:
    """Escape sequences in names and reasons are taken out."""
    snapshot = make_snapshot(Shape(states={0: 3}, reason="\x1b[2J\x07gone"))
    engines = msgspec.structs.replace(
        snapshot.engines, engine_id=["\x1b]0;x\x07", *snapshot.engines.engine_id[1:]]
    )
    snapshot = msgspec.structs.replace(snapshot, engines=engines)

    text = "".join(all_lines(snapshot, 80, UNICODE, RowMode.RANKS))
    assert text.isprintable()
    assert "?[2J?gone" in text


def test_columns_are_of_one_width() -> None:
    """Titles stand above their numbers."""
    table = make_rows(make_snapshot(), RowMode.RANKS)
    for width in (40, 60, 100, 160):
        columns = row_columns(width, mode=RowMode.RANKS)
        widths = {line_width(row_line(table, index, columns, UNICODE)) for index in range(16)}
        assert widths == {line_width(title_line(columns))}


def test_events_are_newest_first() -> None:
    """With their level as a sign and the clock in UTC."""
    lines = [plain(line) for line in event_lines(make_snapshot().events, 60, ASCII, limit=5)]

    assert lines == ["14:13:21 ! engine-1 no progress for 3.0 s", "14:13:20 - engine-0 up"]


def test_an_empty_cluster_has_a_head() -> None:
    """No engine, no model, no expert load: no division by zero."""
    snapshot = make_snapshot(Shape(num_engines=0, num_layers=0))
    lines = [plain(line) for line in head_lines(snapshot, 60, UNICODE)]

    assert any("0/0 engines" in line for line in lines)


# ---- rows


def test_rows_of_engines_sum_up_their_ranks() -> None:
    """Running, waiting, KV tokens and dispatched are sums; step time is the longest."""
    snapshot = make_snapshot(Shape(num_engines=3, ranks_per_engine=5))
    engines = make_rows(snapshot, RowMode.ENGINES)
    ranks = make_rows(snapshot, RowMode.RANKS)

    for index in range(3):
        part = slice(5 * index, 5 * index + 5)
        assert engines.running[index] == ranks.running[part].sum()
        assert engines.waiting[index] == ranks.waiting[part].sum()
        assert engines.dispatched[index] == ranks.dispatched[part].sum()
        assert engines.step_us[index] == ranks.step_us[part].max()
        assert engines.kv_share[index] == pytest.approx(ranks.kv_share[part].mean())


def test_equal_rows_keep_their_places() -> None:
    """Numbers largest first; ties by position, in both directions."""
    table = make_rows(make_snapshot(Shape(num_engines=1, ranks_per_engine=8)), RowMode.RANKS)
    waiting = [int(w) for w in table.waiting]

    assert waiting == [0, 1, 0, 1, 0, 1, 0, 1]
    assert order_rows(table, key=SortKey.WAITING).tolist() == [1, 3, 5, 7, 0, 2, 4, 6]
    assert order_rows(table, key=SortKey.WAITING, is_reversed=True).tolist() == [
        0, 2, 4, 6, 1, 3, 5, 7,
    ]  # fmt: skip


def test_filter_wants_every_word() -> None:
    """In name, state or pool, whatever the case."""
    table = make_rows(make_snapshot(Shape(states={2: 1})), RowMode.RANKS)

    def names(*words: str) -> list[str]:
        return [table.name[i] for i in order_rows(table, key=SortKey.NAME, words=words)]

    assert names("SUSPECT", "/3") == ["engine-2/3"]
    assert names("main") == table.name
    assert names("no-such") == []


# ---- answers that are none


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no live picture"),
        (b"<html>404</html>", "no live picture"),
        (b"\xff\xfe", "no live picture"),
        (b"[" * 100_000, "no live picture"),
        (b'{"version": 7}', "version 7, and this dsched reads version 1"),
        (b'{"version": 1}', "cannot be read"),
        (b'{"version": 1, "seq": "x"}', "cannot be read"),
        (GOOD[: len(GOOD) // 2], "no live picture"),
    ],
)
def test_garbage_is_one_line(data: bytes, message: str) -> None:
    """Whatever a server answers, `LiveError` names it and the server."""
    with pytest.raises(LiveError, match=r"^http://x ") as raised:
        decode_snapshot(data, source="http://x")

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def lengthen(snapshot: LiveSnapshot) -> LiveSnapshot:
    ranks = msgspec.structs.replace(snapshot.ranks, running=[1])
    return msgspec.structs.replace(snapshot, ranks=ranks)


def misdirect(snapshot: LiveSnapshot) -> LiveSnapshot:
    engines = msgspec.structs.replace(snapshot.engines, pool=[5] * 4)
    return msgspec.structs.replace(snapshot, engines=engines)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lengthen, "column running has 1 entries, the first one 16"),
        (misdirect, "engines.pool points outside 0..0"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    spoil: Callable[[LiveSnapshot], LiveSnapshot], message: str
) -> None:
    """Readers index by them."""
    data = msgspec.json.encode(spoil(make_snapshot()))

    with pytest.raises(LiveError, match=re.escape(message)):
        decode_snapshot(data, source="http://x")


# ---- the command


def test_once_prints_the_picture(run_top: RunTop) -> None:
    """As text, without a single escape sequence into a pipe."""
    with answering(GOOD) as url:
        done = run_top("--once", "--url", url, "--ranks", "--sort", "running", "--limit", "3")

    assert done.status == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "pool main" in done.stdout
    assert "13 more; --limit 0 prints all" in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("engine-")]) == 3


def test_once_json_is_the_snapshot(run_top: RunTop) -> None:
    """For scripts: the same fields as the admin API's."""
    with answering(GOOD) as url:
        done = run_top("--once", "--json", "--url", url)

    assert json.loads(done.stdout) == json.loads(GOOD)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"hello", 200, "answered something that is no live picture"),
        (b"{}", 404, "has no live picture: it is another port, or too old"),
        (b"{}", 503, "is starting and has nothing to show yet"),
        (b"{}", 500, "answered 500 to /admin/v1/live"),
    ],
)
def test_what_is_no_dsched_is_named(
    run_top: RunTop, body: bytes, status: int, message: str
) -> None:
    """One line on stderr, status 2, no traceback."""
    with answering(body, status=status) as url:
        done = run_top("--once", "--url", url)

    assert done.status == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "--url" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[::1", "ftp://x"])
def test_nobody_there(run_top: RunTop, url: str) -> None:
    """A closed port, and things that are no address."""
    done = run_top("--once", "--url", url)

    assert done.status == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "dsched run" in done.stderr


def test_no_terminal_is_told_what_to_do(run_top: RunTop) -> None:
    """The screen needs one; `--once` does not."""
    done = run_top("--url", "http://127.0.0.1:9")

    assert done.status == 2
    assert "dsched top --once" in done.stderr


def test_json_needs_once(run_top: RunTop) -> None:
    """A screen cannot be JSON."""
    done = run_top("--json", "--url", "http://127.0.0.1:9")

    assert done.status == 2
    assert "--once" in done.stderr


def on_a_terminal(url: str, **environment: str) -> str:
    """What `--once` writes to a terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dsched.cli.main", "top", "--once", "--url", url],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "COLUMNS": "40", "TERM": "xterm-256color", **environment},
    )
    os.close(follower)
    written = b""
    try:
        while chunk := os.read(leader, 65_536):
            written += chunk
    except OSError:  # the other side is closed
        pass
    os.close(leader)
    assert process.wait(30) == 0, written
    return written.decode()


@pytest.mark.slow
@pytest.mark.slow
def test_colours_only_where_they_are_wanted() -> None:
    """A terminal gets them, and none with NO_COLOR; 40 columns hold in both."""
    colour = re.compile(r"\x1b\[(?:[0-9;]*;)?3[0-7][;m]")
    escape = re.compile(r"\x1b\[[0-9;]*m")
    with answering(GOOD) as url:
        coloured = on_a_terminal(url)
        plain_text = on_a_terminal(url, NO_COLOR="1")

    assert colour.search(coloured)
    assert not colour.search(plain_text)
    for text in (coloured, plain_text):
        assert max(len(line) for line in escape.sub("", text).splitlines()) <= 40


def test_without_unicode_there_are_signs(run_top: RunTop, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoding that has no blocks gets ASCII instead of an error."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with answering(GOOD) as url:
        done = run_top("--once", "--url", url)
    sys.stdout.flush()

    assert done.status == 0, done.stderr
    assert "pool main" in written.getvalue().decode("ascii")


def test_missing_extra_is_named(run_top: RunTop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without textual: what to install, and what works without it."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "textual" else find_spec(name)
    )
    done = run_top("--url", "http://127.0.0.1:9")

    assert done.status == 2
    assert "pip install 'dsched[tui]'" in done.stderr
    assert "dsched top --once" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_dumb_terminal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot move its cursor gets no screen."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")

    with pytest.raises(ConfigError, match="TERM is dumb"):
        check_terminal()
