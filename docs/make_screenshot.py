"""Takes the pictures of the web page in this folder: `python docs/make_screenshot.py`.

It starts `dsched run` over 8 simulated engines of 16 DP ranks each, lets clients come and go in
waves, takes one engine out of service and back, and photographs the page in Chromium after
`--seconds`, once dark and once light. What is on the picture is therefore simulated, and says so.
"""

import argparse
import asyncio
import io
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from PIL import Image

from dsched.testing.browser import Page, open_browser
from dsched.testing.sim_load import SimRun, keep_busy, run_simulated

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 1_380, 1_240
NUM_COLOURS = 256
ARGS = (
    *("--launch-replicas", "8", "--sim-num-dp-ranks", "16"),
    *("--sim-request-cost-us", "30000", "--routing-request-cost-us", "30000"),
    *("--sim-kv-capacity-tokens", "6000", "--sim-max-model-len", "5900"),
    *("--sim-kv-token-cost-ns", "4000", "--routing-kv-token-cost-ns", "4000"),
    *("--scheduler-step-budget-ms", "90"),
)
DRAINED = "sim-5"


async def main(seconds: float) -> None:
    """Run the cluster and take both pictures."""
    with (
        tempfile.TemporaryDirectory() as folder,
        run_simulated(Path(folder) / "run", *ARGS) as run,
    ):
        async with open_browser(Path(folder) / "chromium") as page:
            await take_pictures(run, page, seconds)


async def take_pictures(run: SimRun, page: Page, seconds: float) -> None:
    """Keep the cluster busy in waves; dark picture at the end, then the light one."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(keep_busy(run, num_clients=120, seed=1))
        wave = asyncio.create_task(make_waves(run, seconds))
        await page.open(run.admin_url, width=WIDTH, height=HEIGHT, scheme="dark")
        await page.wait_for("document.body?.dataset.ready", timeout_s=60)
        await asyncio.sleep(seconds)
        await page.wait_for("document.getElementById('status').innerText === 'live'", timeout_s=60)
        save(await page.screenshot(), FOLDER / "live_view.png")
        await page.evaluate("document.getElementById('theme').click()")
        await asyncio.sleep(1.5)
        save(await page.screenshot(), FOLDER / "live_view_light.png")
        wave.cancel()
        await asyncio.gather(wave, return_exceptions=True)


async def make_waves(run: SimRun, seconds: float) -> None:
    """Two waves of further clients, and an engine that is drained in the second."""
    await asyncio.sleep(seconds * 0.15)
    async with keep_busy(run, num_clients=110, seed=2):
        await asyncio.sleep(seconds * 0.25)
    await asyncio.sleep(seconds * 0.12)
    async with keep_busy(run, num_clients=170, seed=3):
        await asyncio.sleep(seconds * 0.08)
        await command(run, "drain")
        await asyncio.sleep(seconds * 0.14)
        await command(run, "undrain")
        await asyncio.sleep(seconds)


async def command(run: SimRun, word: str) -> None:
    url = f"{run.admin_url}/admin/v1/engines/{DRAINED}/{word}"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        response.raise_for_status()


def save(png: bytes, path: Path) -> None:
    """Write a picture with few colours: a screen has no more, and the file is a third."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    few = image.quantize(NUM_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    sys.stdout.write(f"{path.name}: {path.stat().st_size // 1_024} KiB\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of traffic before it")
    asyncio.run(main(parser.parse_args().seconds))
