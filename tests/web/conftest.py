"""One Chromium for the whole folder, and a page over a made-up cluster for each test."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dsched.testing.browser import NO_CHROMIUM, Page, find_chromium, open_browser
from dsched.testing.live_page import Show, ShownPage, serve_live
from dsched.testing.live_snapshots import MadeUpSource, Shape


@pytest_asyncio.fixture(loop_scope="package", scope="package")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    if find_chromium() is None:
        pytest.skip(NO_CHROMIUM)
    async with open_browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="package")
async def show(browser: Page) -> AsyncIterator[Show]:
    shown: list[ShownPage] = []

    async def open_page(shape: Shape | None = None, **view: object) -> ShownPage:
        source = MadeUpSource(shape)
        server = await serve_live(source)
        await browser.open(f"http://127.0.0.1:{server.bound_port}/", **view)  # type: ignore[arg-type]
        each = ShownPage(page=browser, source=source, server=server, port=server.bound_port)
        shown.append(each)
        await each.push()
        return each

    yield open_page
    await browser.call("Page.navigate", url="about:blank")
    for each in shown:
        each.source.end()
        await each.server.stop()
