"""vLLM: the scheduler classes that run inside the engine, and the driver that talks to it.

    vllm serve MODEL --scheduler-cls dsched.drivers.vllm.DschedAsyncScheduler

Importing this package imports neither vLLM nor the HTTP client: each name is loaded when it is
first asked for, so dsched's own process needs no vLLM and the engine needs no driver.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsched.drivers.local import LocalEngine
    from dsched.drivers.vllm.driver import VllmDriver
    from dsched.drivers.vllm.launcher import launch_vllm_engine
    from dsched.drivers.vllm.scheduler import DschedAsyncScheduler, DschedScheduler

__all__ = [
    "DschedAsyncScheduler",
    "DschedScheduler",
    "LocalEngine",
    "VllmDriver",
    "launch_vllm_engine",
]


def __getattr__(name: str) -> object:
    if name in ("DschedScheduler", "DschedAsyncScheduler"):
        return getattr(import_module("dsched.drivers.vllm.scheduler"), name)
    if name == "VllmDriver":
        return import_module("dsched.drivers.vllm.driver").VllmDriver
    if name in ("LocalEngine", "launch_vllm_engine"):
        return getattr(import_module("dsched.drivers.vllm.launcher"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
