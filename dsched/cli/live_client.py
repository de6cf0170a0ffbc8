"""Asks a running dsched for its live picture, and says plainly when there is none."""

from collections.abc import Sequence

import aiohttp

from dsched.clock import SystemClock
from dsched.config import Config
from dsched.errors import RegistryError
from dsched.frontdoor.live import LiveError, LiveSnapshot, decode_snapshot
from dsched.registry import open_registry, read_workers

LIVE_PATH = "/admin/v1/live"
TIMEOUT_S = 3.0
"""Time for a dsched to answer. Longer: the screen stands still. Shorter: busy ones miss."""
MAX_ANSWER_BYTES = 64 << 20
"""A snapshot of 16 384 ranks has about 1 MB. More is not one."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LiveClient:
    """Reads snapshots from the first of some addresses that answers, and then from that one."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        self._session = session
        self._urls = list(dict.fromkeys(url.rstrip("/") for url in urls))

    @property
    def url(self) -> str:
        """The address that answered, or the first one."""
        return self._urls[0]

    async def read(self) -> LiveSnapshot:
        """The snapshot of this moment.

        Raises:
            LiveError: nobody answers with one.
        """
        faults = []
        for url in self._urls:
            try:
                snapshot = await self._ask(url)
            except LiveError as error:
                faults.append(str(error))
            else:
                self._urls = [url]
                return snapshot
        advice = "start one with: dsched run; or name its admin port with --url"
        raise LiveError(f"{'; '.join(faults)} ({advice})")

    async def _ask(self, url: str) -> LiveSnapshot:
        try:
            async with self._session.get(url + LIVE_PATH) as response:
                data = bytearray()
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > MAX_ANSWER_BYTES:
                        raise LiveError(f"{url} answered more than a live picture can have")
                if response.status == 404:
                    raise LiveError(f"{url} has no live picture: it is another port, or too old")
                if response.status == 503:
                    raise LiveError(f"{url} is starting and has nothing to show yet")
                if response.status != 200:
                    raise LiveError(f"{url} answered {response.status} to {LIVE_PATH}")
        except aiohttp.InvalidURL:
            raise LiveError(f"{url} is no address; write it as http://HOST:PORT") from None
        except TimeoutError:
            raise LiveError(f"{url} did not answer within {TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise LiveError(f"{url} cannot be reached: {_reason(error)}") from None
        return decode_snapshot(bytes(data), source=url)


def _reason(error: Exception) -> str:
    cause = getattr(error, "os_error", None) or error
    text = getattr(cause, "strerror", None) or str(cause)
    return " ".join(text.split())[:200] or type(error).__name__


def open_session() -> aiohttp.ClientSession:
    """A session with the time limit of a screen."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def admin_urls(config: Config) -> list[str]:
    """Where a dsched may be: those in the registry, then the configured address."""
    host = ANY_ADDRESS.get(config.admin.host, config.admin.host)
    configured = f"http://{host}:{config.admin.port}"
    return [*await _registered_urls(config), configured]


async def _registered_urls(config: Config) -> list[str]:
    try:
        registry = open_registry(
            config.registry_url(), clock=SystemClock(), create=False, config=config.registry
        )
    except RegistryError:
        return []
    try:
        view = read_workers(await registry.list_entries(""))
    except RegistryError:
        return []
    finally:
        await registry.close()
    return [instance.admin_url for instance in view.instances]
