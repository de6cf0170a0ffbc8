"""What a vLLM server says of itself, and how it is asked.

Sizes come from the agents in its scheduler where there are any, else from `/metrics`; the version
from `/version`. Checked against vLLM 0.32.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dsched.drivers import watch
from dsched.drivers.base import EngineCapabilities
from dsched.drivers.http import HttpPool
from dsched.drivers.watch import EngineFacts, EngineHints, ModelCard, ask_status, status_problem
from dsched.errors import DriverError

TRIED_VERSIONS: Final = ("0.32",)
CAPABILITIES: Final = EngineCapabilities(
    can_stream_logprobs=True,
    can_seed=True,
    can_structured_output=True,
    can_steer_dp_rank=True,
    can_migrate=False,
)
"""What every vLLM server can do over `/v1/completions`."""

_SAMPLE = re.compile(r"^vllm:(?P<name>[a-z_]+)\{(?P<labels>[^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(?P<name>[a-z_]+)="(?P<value>[^"]*)"')


class _Version(msgspec.Struct):
    version: str | None = None


class VllmInspector:
    """Implements `EngineInspector` for vLLM."""

    kind: str = "vllm"
    tried_versions: tuple[str, ...] = TRIED_VERSIONS

    async def health_problem(self, pool: HttpPool) -> str | None:
        """See `EngineInspector.health_problem`; 503 once the engine core has died."""
        return status_problem("/health", await ask_status(pool, "/health"))

    async def inspect(
        self,
        pool: HttpPool,
        card: ModelCard,  # noqa: ARG002
        *,
        has_agents: bool,
    ) -> EngineFacts:
        """See `EngineInspector.inspect`."""
        sizes = EngineHints() if has_agents else await _ask_metrics(pool)
        version = await _ask_version(pool)
        return EngineFacts(capabilities=CAPABILITIES, version=version, sizes=sizes)


async def _ask_version(pool: HttpPool) -> str | None:
    body = await _ask(pool, "/version")
    try:
        return msgspec.json.decode(body, type=_Version).version
    except msgspec.MsgspecError:
        return None


async def _ask_metrics(pool: HttpPool) -> EngineHints:
    return read_metrics((await _ask(pool, "/metrics")).decode(errors="replace"))


async def _ask(pool: HttpPool, path: str) -> bytes:
    """What `path` answers; nothing if it does not: a server may lack it."""
    try:
        status, _, body = await pool.fetch("GET", path, timeout_s=watch.HEALTH_TIMEOUT_S)
    except DriverError:
        return b""
    return body if status == 200 else b""


def read_metrics(text: str) -> EngineHints:
    """Read ranks and KV capacity from vLLM's Prometheus page; `None` for what it lacks.

    >>> read_metrics('vllm:cache_config_info{engine="0",kv_cache_size_tokens="640"} 1.0')
    EngineHints(num_dp_ranks=1, kv_capacity_tokens=640, max_running_requests=None)
    """
    engines: dict[str, None] = {}
    capacities: list[int] = []
    for sample in _SAMPLE.finditer(text):
        labels: dict[str, Any] = dict(_LABEL.findall(sample["labels"]))
        engines[str(labels.get("engine", "0"))] = None
        if sample["name"] == "cache_config_info":
            capacities += _capacity(labels)
    return EngineHints(
        num_dp_ranks=len(engines) or None, kv_capacity_tokens=min(capacities, default=None)
    )


def _capacity(labels: Mapping[str, str]) -> list[int]:
    numbers = {
        name: int(labels[name])
        for name in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")
        if labels.get(name, "").isdecimal()
    }
    if "kv_cache_size_tokens" in numbers:
        return [numbers["kv_cache_size_tokens"]]
    if "num_gpu_blocks" in numbers and "block_size" in numbers:
        return [numbers["num_gpu_blocks"] * numbers["block_size"]]
    return []
