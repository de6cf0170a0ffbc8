"""A headless Chromium for tests of the web page, driven over its own protocol.

Chromium is Debian's; the DevTools protocol is JSON over a web socket, which aiohttp speaks, so no
browser driver is needed. Only what the tests use: open a page, evaluate, type a key, resize, take a
picture, end.
"""

import asyncio
import base64
import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import msgspec

NO_CHROMIUM: Final = "no chromium; on Debian: apt-get install chromium"
START_TIMEOUT_S: Final = 30.0
FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers; the page is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)


class BrowserError(RuntimeError):
    """Chromium did not start, or a script in the page raised."""


def find_chromium() -> str | None:
    """The browser's command; `None` where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._num_calls = 0
        self._origin = ""
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        """Uncaught exceptions and console errors of the page."""
        self._trace: list[dict[str, Any]] = []
        self._trace_done = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """One command of the protocol. Raises `BrowserError` for what Chromium refuses."""
        self._num_calls += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._num_calls] = answer
        await self._socket.send_json(
            {"id": self._num_calls, "method": method, "params": parameters}
        )
        message = await answer
        if "error" in message:
            raise BrowserError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    async def open(
        self,
        url: str,
        *,
        width: int = 1_280,
        height: int = 900,
        scheme: str = "dark",
        script: str = "",
    ) -> None:
        """Show a page of that size; `script` runs before its own."""
        await self.call("Page.enable")
        await self.call("Runtime.enable")
        await self.call("Log.enable")
        await self.resize(width, height)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        self._origin = url
        self.errors.clear()
        if script:
            await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        """Change the size of the window, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - whatever the page answers
        """The value of an expression in the page, promises awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", str(details)))
        return result["result"].get("value")

    async def wait_for(self, expression: str, *, timeout_s: float = 20.0) -> Any:  # noqa: ANN401
        """Wait until an expression is true; raise `BrowserError` with its last value if never."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while not (value := await self.evaluate(expression)):
            if loop.time() > end_s:
                raise BrowserError(f"not within {timeout_s:g} s: {expression}, last {value!r}")
            await asyncio.sleep(0.05)
        return value

    async def press(self, key: str) -> None:
        """Press and release a key, by its name (`ArrowLeft`, `Tab`)."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def move(self, x: float, y: float) -> None:
        """Move the pointer to a place in the window."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self, *, whole: bool = False) -> bytes:
        """The window, or the whole page, as PNG."""
        result = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        return base64.b64decode(result["data"])

    async def start_trace(self) -> None:
        """Record what the page's main thread does."""
        self._trace = []
        self._trace_done.clear()
        categories = ["toplevel", "disabled-by-default-devtools.timeline", "__metadata"]
        await self.call(
            "Tracing.start",
            transferMode="ReportEvents",
            traceConfig={"includedCategories": categories},
        )

    async def stop_trace(self) -> list[dict[str, Any]]:
        """Return the events of the trace, in Chromium's form."""
        await self.call("Tracing.end")
        async with asyncio.timeout(60):
            await self._trace_done.wait()
        return self._trace

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            data = msgspec.json.decode(message.data)
            answer = self._answers.pop(data.get("id", 0), None)
            if answer is not None and not answer.done():
                answer.set_result(data)
            self._note(data)

    def _note(self, data: Mapping[str, Any]) -> None:
        parameters = data.get("params", MappingProxyType({}))
        if data.get("method") == "Tracing.dataCollected":
            self._trace += parameters["value"]
        elif data.get("method") == "Tracing.tracingComplete":
            self._trace_done.set()
        if data.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif data.get("method") == "Log.entryAdded":
            entry = parameters["entry"]
            # The page before may still complain of a server that is gone.
            if entry["level"] == "error" and entry.get("url", "").startswith(self._origin):
                self.errors.append(f"{entry['text']} {entry.get('url')}")


def main_thread_tasks(trace: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(duration, processor time) in milliseconds of every task of the page's main thread.

    Processor time does not count while another process has the core, so it says what the page
    itself does, on a busy machine too.
    """
    renderers = {
        (event["pid"], event["tid"])
        for event in trace
        if event.get("name") == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    return [
        (event["dur"] / 1_000, event["tdur"] / 1_000)
        for event in trace
        if event.get("name") in ("RunTask", "ThreadControllerImpl::RunTask")
        and (event["pid"], event["tid"]) in renderers
        and "tdur" in event
    ]


@contextlib.asynccontextmanager
async def open_browser(folder: Path) -> AsyncIterator[Page]:
    """A Chromium with an empty profile in `folder` and one tab; it ends with the block.

    Raises:
        BrowserError: there is no Chromium, or it does not start.
    """
    command = find_chromium()
    if command is None:
        raise BrowserError(NO_CHROMIUM)
    folder.mkdir(parents=True, exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        command,
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _debugging_port(folder, process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                tabs = await response.json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                try:
                    yield page
                finally:
                    await page.close()
    finally:
        await _end(process)


async def _debugging_port(folder: Path, process: asyncio.subprocess.Process) -> int:
    """Chromium writes the port it chose to a file of its profile."""
    path = folder / "DevToolsActivePort"
    loop = asyncio.get_running_loop()
    end_s = loop.time() + START_TIMEOUT_S
    while loop.time() < end_s:
        if process.returncode is not None:
            raise BrowserError(f"chromium ended with status {process.returncode}")
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) == 2:
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise BrowserError(f"chromium did not start within {START_TIMEOUT_S:g} s")


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(5):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
