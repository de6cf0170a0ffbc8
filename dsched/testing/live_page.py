"""The web page over a made-up cluster, as tests hold it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dsched.config import AdminConfig
from dsched.frontdoor.admin import AdminServer, make_admin_app
from dsched.testing.browser import Page
from dsched.testing.live_snapshots import MadeUpSource


@dataclass
class ShownPage:
    """A page that shows what `source` says."""

    page: Page
    source: MadeUpSource
    server: AdminServer
    port: int

    async def push(self, data: bytes | None = None) -> None:
        """Send a snapshot; wait until the page has it, unless it is one of the test's own."""
        self.source.push(data)
        if data is None:
            await self.page.wait_for(f"document.body?.dataset.seq === '{self.source.seq}'")
            # The tables follow in tasks of their own.
            await self.page.wait_for("document.body.dataset.drawn === document.body.dataset.seq")

    async def text(self, selector: str) -> str:
        """The text of an element, as it is shown."""
        return str(await self.page.evaluate(f"document.querySelector('{selector}').innerText"))


Show = Callable[..., Awaitable[ShownPage]]


async def serve_live(source: MadeUpSource, port: int = 0) -> AdminServer:
    """An admin port over made-up snapshots."""
    app = make_admin_app(workers=list, config=dict, live=source)
    server = AdminServer(app, AdminConfig(port=port))
    await server.start()
    return server
