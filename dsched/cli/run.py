"""`dsched run`: the control plane as one process."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import structlog
import typer
import uvloop

from dsched.cli.options import with_config
from dsched.cli.service import Service
from dsched.cli.stopping import end_if_stuck
from dsched.config_load import LoadedConfig
from dsched.logs import configure_logging

log = structlog.get_logger(__name__)

EXIT_OK = 0

GC_THRESHOLDS = (10_000, 20, 50)
"""Objects, and younger passes, between passes of the garbage collector. Below (Python's own: 700):
every few requests wait for a look through objects that almost all live on, a tenth of the CPU of a
small request. Above: a pass of the young ones takes more than a millisecond."""


@with_config
def run(
    loaded: LoadedConfig,
    *,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Do not print the URL and the curl line.")
    ] = False,
) -> None:
    """Serve an OpenAI-compatible API over engines.

    Without a configuration it serves simulated engines, so that everything can be tried at once.
    With --engine vllm --model FOLDER it starts real vLLM servers on this machine; engines that run
    elsewhere are named in the file given with -c.
    """
    configure_logging(loaded.config.logging)
    uvloop.run(_serve(loaded, is_quiet=quiet))


async def _serve(loaded: LoadedConfig, *, is_quiet: bool) -> None:
    service = Service(loaded)
    stopping, reloading = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    terminal = Terminal()

    def hang_up() -> None:
        (stopping if terminal.is_lost() else reloading).set()

    # From the start on: without a handler the signal ends the process.
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)

    def end_at_once_from_now() -> None:
        """Leave a second Ctrl-C to Python."""
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    if not await _start_unless(service, stopping, on_told=end_at_once_from_now):
        return
    settle_garbage_collector()
    if not is_quiet:
        sys.stdout.write(welcome(service))
        sys.stdout.flush()
    reloader = asyncio.create_task(_reload_when_asked(service, reloading))
    await stopping.wait()
    reloader.cancel()
    end_at_once_from_now()
    await service.stop()
    end_if_stuck()


class Terminal:
    """The terminal that dsched was started in, if any. SIGHUP also says that it was closed."""

    def __init__(self) -> None:
        self._descriptors = [number for number in (0, 1, 2) if os.isatty(number)]

    def is_lost(self) -> bool:
        """Whether it was closed; what is written from then on goes nowhere, instead of failing."""
        lost = [number for number in self._descriptors if not os.isatty(number)]
        if lost:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for number in lost:
                os.dup2(nowhere, number)
            os.close(nowhere)
        return bool(lost)


async def _start_unless(
    service: Service, stopping: asyncio.Event, *, on_told: Callable[[], None]
) -> bool:
    """Start the service; false when it was told to stop before it was up, and has stopped.

    `on_told` is called before that stop begins.
    """
    starting = asyncio.create_task(service.start())
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if starting.done():
        await starting
        return True
    on_told()
    starting.cancel()
    try:
        await starting
    except asyncio.CancelledError:
        log.info("service.stopped")
    else:  # it was up before that came to it
        await service.stop()
    end_if_stuck()
    return False


async def _reload_when_asked(service: Service, reloading: asyncio.Event) -> None:
    while True:
        await reloading.wait()
        reloading.clear()
        await service.reload_policies()


def settle_garbage_collector() -> None:
    """Never look again through what was made at the start, and more seldom through the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def welcome(service: Service) -> str:
    """Where it is, and a line to try it with."""
    model = service.model_names[0]
    kind = "simulated engines" if service.is_simulated else "engines"
    body = (
        f'{{"model": "{model}", "stream": true, "max_tokens": 48, '
        f'"messages": [{{"role": "user", "content": "Tell me a story."}}]}}'
    )
    return (
        f"\ndsched serves {model} on {service.front_door_url} over {len(service.fleet.drivers)} "
        f"{kind}; watch it on {service.admin_url}\n\n"
        f"  curl -N {service.front_door_url}/v1/chat/completions "
        f"-H 'content-type: application/json' -d '{body}'\n\n{reload_line(service)}"
    )


def reload_line(service: Service) -> str:
    """How to change a policy while it runs, for who has one."""
    names = service.controller.policies.names
    if not names:
        return ""
    return f"policy {', '.join(names)}; to read it again: kill -HUP {os.getpid()}\n\n"
