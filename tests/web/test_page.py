"""The web page in a real Chromium, over made-up clusters: what it shows, and when it admits not to
know."""

import asyncio

import pytest

from dsched.testing.browser import main_thread_tasks
from dsched.testing.live_page import Show, ShownPage, serve_live
from dsched.testing.live_snapshots import Shape

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]


async def colours(shown: ShownPage, canvas: str) -> set[tuple[int, ...]]:
    """The colours of a canvas, alpha left out."""
    pixels = await shown.page.evaluate(
        f"""(() => {{
          const c = document.getElementById('{canvas}');
          const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
          const seen = new Set();
          for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] === 255) seen.add(data[i] * 65536 + data[i + 1] * 256 + data[i + 2]);
          return [...seen];
        }})()"""
    )
    return {(each >> 16, each >> 8 & 255, each & 255) for each in pixels}


async def test_the_picture_is_that_of_the_snapshot(show: Show) -> None:
    """Tiles, pools, engines, events and facts; nothing is loaded from elsewhere."""
    shown = await show(Shape(states={1: 3}))

    assert "12.5" in await shown.text("#tiles")
    assert "120 ms" in await shown.text("#tiles")
    assert "3 of 4 up" in await shown.text("#pools")
    assert "7" in await shown.text("#facts")
    assert "engine-1 no progress for 3.0 s" in await shown.text("#events")
    assert await shown.text("#status") == "live"
    assert await shown.page.evaluate("!document.getElementById('simulated').hidden")
    rows = await shown.page.evaluate(
        "[...document.querySelectorAll('#grid-body .row:not([hidden])')]"
        ".map(r => [r.children[0].innerText, r.children[1].innerText])"
    )
    assert rows == [
        ["engine-0", "up"],
        ["engine-1", "down"],
        ["engine-2", "up"],
        ["engine-3", "up"],
    ]
    hosts = await shown.page.evaluate(
        "performance.getEntriesByType('resource').map(e => new URL(e.name).host)"
    )
    assert set(hosts) <= {f"127.0.0.1:{shown.port}"}
    assert shown.page.errors == []


async def test_heat_maps_are_drawn(show: Show) -> None:
    """Ranks in many shades, those that are down in red; experts in many shades."""
    shown = await show(Shape(num_engines=8, ranks_per_engine=16, states={2: 3}))
    for _ in range(3):
        await shown.push()
    await shown.page.wait_for("past.count === 4")
    await shown.page.evaluate("drawHeat()")

    ranks = await colours(shown, "heat")
    assert (190, 42, 50) in ranks
    assert len(ranks) > 20
    assert len(await colours(shown, "experts")) > 20
    label = await shown.page.evaluate("document.getElementById('heat').ariaLabel")
    assert "112 up, 16 down" in label


async def test_a_gap_in_what_was_heard_is_a_gap(show: Show) -> None:
    """Samples that were missed are not painted over."""
    shown = await show()
    shown.source.seq += 3
    await shown.push()

    states = await shown.page.evaluate(
        "Array.from({length: past.count}, (_, t) => past.state[t * past.keys.length])"
    )
    assert states == [0, 255, 255, 255, 0]


async def test_silence_is_shown_as_silence(show: Show) -> None:
    """A server that went away: when the picture is from, and grey; live again when it is back."""
    shown = await show()
    shown.source.end()
    await shown.server.stop()

    await shown.page.wait_for("document.getElementById('status').innerText === 'disconnected'")
    banner = await shown.text("#banner")
    assert "No word from dsched for" in banner
    assert "What you see is from" in banner
    assert await shown.page.evaluate("document.body.classList.contains('old')")

    again = type(shown.source)(shown.source.shape)
    server = await serve_live(again, port=shown.port)
    again.seq = 40
    again.push()
    await shown.page.wait_for("document.getElementById('status').innerText === 'live'")
    assert await shown.page.evaluate("document.getElementById('banner').hidden")
    again.end()
    await server.stop()


async def test_a_stream_that_stalls_is_called_old(show: Show) -> None:
    """The connection is open and says nothing: the page notices by itself."""
    shown = await show()
    await shown.page.wait_for("document.getElementById('status').innerText === 'disconnected'")

    assert "No word from dsched for" in await shown.text("#banner")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not json", "no live picture"),
        (b"null", "no live picture"),
        (b'{"version": 99}', "version 99, this page reads 1: reload it"),
        (b'{"version": 1}', "without its parts"),
    ],
)
async def test_garbage_is_named_and_survived(show: Show, data: bytes, message: str) -> None:
    """One line, no exception, and the next good snapshot is shown."""
    shown = await show()
    await shown.push(data)
    await shown.page.wait_for("document.getElementById('status').innerText === 'cannot read'")

    assert message in await shown.text("#banner")
    assert shown.page.errors == []
    await shown.push()
    assert await shown.text("#status") == "live"


async def test_thousands_of_ranks(show: Show) -> None:
    """4 000 ranks: only the rows in sight exist; filter, modes and sorting work on all."""
    shown = await show(Shape(num_engines=500, ranks_per_engine=8, states={77: 1}))
    page = shown.page
    await page.evaluate("document.querySelector('#row-modes [data-mode=ranks]').click()")

    assert await shown.text("#row-count") == "4000"
    assert await page.evaluate("document.querySelectorAll('#grid-body .row').length") < 40
    await page.evaluate(
        "(() => { const f = document.getElementById('filter'); f.value = 'engine-77/ suspect';"
        " f.dispatchEvent(new Event('input')); })()"
    )
    assert await shown.text("#row-count") == "8 of 4000"
    await page.evaluate(
        "[...document.querySelectorAll('#grid-head button')]"
        ".find(b => b.innerText.startsWith('running')).click()"
    )
    running = await page.evaluate(
        "[...document.querySelectorAll('#grid-body .row:not([hidden])')]"
        ".sort((a, b) => a.ariaRowIndex - b.ariaRowIndex).map(r => Number(r.children[4].innerText))"
    )
    assert running == sorted(running, reverse=True)
    assert len(running) == 8
    await page.start_trace()
    for _ in range(4):
        await shown.push()
    tasks = main_thread_tasks(await page.stop_trace())
    assert len(tasks) > 20
    assert max(cpu_ms for _, cpu_ms in tasks) < 50
    assert page.errors == []


async def test_text_of_engines_stays_text(show: Show) -> None:
    """A reason is not markup, whatever it holds."""
    shown = await show(Shape(states={0: 3}, reason="<img src=x onerror=boom()><b>x</b>"))

    assert "<img src=x" in await shown.text("#events")
    assert await shown.page.evaluate("document.querySelectorAll('img').length") == 0


async def test_works_by_keyboard(show: Show) -> None:
    """The cursor of a heat map moves with the arrow keys and is read out; it leaves with focus."""
    shown = await show(Shape(num_engines=2, ranks_per_engine=2))
    await shown.page.evaluate("document.getElementById('heat').focus()")
    await shown.page.press("ArrowDown")
    await shown.page.press("ArrowDown")

    assert (await shown.text("#heat-tip")).startswith("engine-1/0, up,")
    await shown.page.evaluate("document.getElementById('experts').focus()")
    await shown.page.press("ArrowLeft")
    assert (await shown.text("#experts-tip")).startswith("layer 0, expert 14")
    assert await shown.page.evaluate("document.getElementById('heat-tip').hidden")


async def test_every_control_has_a_name(show: Show) -> None:
    """By Chromium's own accessibility tree."""
    shown = await show()
    await shown.page.call("Accessibility.enable")
    tree = await shown.page.call("Accessibility.getFullAXTree")
    await shown.page.call("Accessibility.disable")
    wanted = ("button", "searchbox", "combobox", "img", "image", "table", "columnheader")
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree["nodes"]
        if not node.get("ignored") and node["role"]["value"] in wanted
    ]

    assert len(found) > 15
    assert [role for role, name in found if not name.strip()] == []


CONTRAST = """(() => {
  const style = getComputedStyle(document.documentElement), probe = document.createElement('i');
  document.body.append(probe);
  const light = (name) => {
    probe.style.color = style.getPropertyValue('--' + name);
    const rgb = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2];
  };
  const found = {};
  for (const text of ['ink', 'soft', 'faint', 'good', 'warn', 'bad', 'info', 'accent'])
    for (const ground of ['card', 'bg']) {
      const [a, b] = [light(text), light(ground)].sort((x, y) => y - x);
      found[text + ' on ' + ground] = (a + 0.05) / (b + 0.05);
    }
  probe.remove();
  return found;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_can_be_read(show: Show, scheme: str) -> None:
    """WCAG AA, 4.5 to 1, for every colour of text on both grounds; the button changes sides."""
    shown = await show(scheme=scheme)
    contrast = await shown.page.evaluate(CONTRAST)

    assert {pair: ratio for pair, ratio in contrast.items() if ratio < 4.5} == {}
    before = await shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    await shown.page.evaluate("document.getElementById('theme').click()")
    after = await shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    await shown.page.evaluate("localStorage.clear()")
    assert before != after


@pytest.mark.parametrize("width", [360, 800, 1_600])
async def test_fits_the_window(show: Show, width: int) -> None:
    """Nothing sticks out, on a telephone either."""
    shown = await show(width=width, height=800)
    await asyncio.sleep(0)

    assert await shown.page.evaluate("document.documentElement.scrollWidth") <= width
