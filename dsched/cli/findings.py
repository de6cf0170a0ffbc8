"""What an operator should know about a configuration before it is used, beyond what is impossible.

In:  a configuration that passed its checks. Out: findings, each with the key it is about, what is
wrong, and what to do. `static_findings` reads the configuration and this environment;
`engine_findings` asks the engines.

An error will keep something from working; a warning will surprise somebody later.
"""

import asyncio
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from dsched.config import Config, EngineConfig, PoolConfig
from dsched.config_yaml import key_path
from dsched.drivers.sglang.launcher import find_sglang_python
from dsched.drivers.vllm.launcher import find_vllm_python
from dsched.errors import ConfigError
from dsched.faults.spare import GroupCapacity, plan_spare

ASK_TIMEOUT_S = 3.0
"""Time for an engine to answer. Below: one that is busy looks unreachable. Above: a check of many
dead engines takes long."""
MAX_AT_ONCE = 64
"""Engines asked at the same time."""
LONG = 1 << 40
"""Room of what does not say how much it has: never the reason for a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to know."""

    path: str
    """Of the key, `$.pools.main.engines[1].url`."""
    message: str
    """What is wrong and what to do, on one line."""
    level: Literal["error", "warning"] = "warning"


# -- what the configuration says -------------------------------------------------------------------


def static_findings(
    config: Config, *, has_module: Callable[[str], bool] | None = None
) -> Iterator[Finding]:
    """Extras that are missing here, and capacity that cannot keep the spare rule."""
    yield from _missing_extras(config, has_module or _has_module)
    for name, pool in sorted(config.pools.items()):
        path = key_path("$.pools", name)
        yield from _spare_findings(config, path, name, pool)
        yield from _length_findings(path, pool)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _missing_extras(config: Config, has_module: Callable[[str], bool]) -> Iterator[Finding]:
    if config.otel.endpoint is not None and not has_module("opentelemetry.sdk"):
        yield Finding(
            path="$.otel.endpoint",
            message="spans need the extra `otel`: pip install 'dsched[otel]'",
            level="error",
        )
    for name, pool in sorted(config.pools.items()):
        if pool.model.chat_format != "template" and not has_module("deepseek_recipe"):
            yield Finding(
                path=f"{key_path('$.pools', name)}.model.chat_format",
                message=f"{pool.model.chat_format} needs the extra `deepseek`: "
                "pip install 'dsched[deepseek]'",
                level="error",
            )
    if not config.pools and config.launch.engine != "sim":
        find = find_vllm_python if config.launch.engine == "vllm" else find_sglang_python
        try:
            find(config.launch.python)
        except ConfigError as error:
            yield Finding(path="$.launch.engine", message=str(error), level="error")


def _spare_findings(config: Config, path: str, name: str, pool: PoolConfig) -> Iterator[Finding]:
    if config.faults.spare != "n-1" or pool.role == "prefill":
        return
    groups = _groups(config, name, pool)
    plan = plan_spare(groups, mode="n-1")
    if len(groups) == 1:
        yield Finding(
            path=f"{path}.engines",
            message=f"one EP group, {groups[0].name!r}: nothing can take over when it is lost; "
            "add an engine or a group, or say faults.spare: none",
        )
        return
    total = sum(group.kv_capacity_tokens for group in groups)
    largest = max(groups, key=lambda group: (group.kv_capacity_tokens, group.name))
    if largest.kv_capacity_tokens < LONG and plan.kv_capacity_tokens * 2 < total:
        yield Finding(
            path=f"{path}.engines",
            message=f"EP group {largest.name!r} holds {largest.kv_capacity_tokens:,} of "
            f"{total:,} KV tokens, so with faults.spare n-1 the pool may use only "
            f"{plan.kv_capacity_tokens:,}; make groups more alike, or say faults.spare: none",
        )


def _groups(config: Config, name: str, pool: PoolConfig) -> list[GroupCapacity]:
    """Capacity of each EP group, as far as the configuration says."""
    running: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for index, engine in enumerate(pool.engines):
        group = engine.ep_group or config.engine_id(name, index)
        num_ranks, max_running, kv_tokens = _size_of(config, engine)
        running[group] = running.get(group, 0) + num_ranks * max_running
        tokens[group] = tokens.get(group, 0) + num_ranks * kv_tokens
    return [
        GroupCapacity(
            name=group,
            is_up=True,
            max_running_requests=running[group],
            kv_capacity_tokens=tokens[group],
        )
        for group in sorted(running)
    ]


def _size_of(config: Config, engine: EngineConfig) -> tuple[int, int, int]:
    """DP ranks, requests of one, KV tokens of one."""
    sim = config.sim if engine.kind == "sim" else None
    return (
        engine.num_dp_ranks or (sim.num_dp_ranks if sim else 1),
        engine.max_running_requests or (sim.max_running_requests if sim else LONG),
        engine.kv_capacity_tokens or (sim.kv_capacity_tokens if sim else LONG),
    )


def _length_findings(path: str, pool: PoolConfig) -> Iterator[Finding]:
    longest = pool.model.max_model_len
    for index, engine in enumerate(pool.engines):
        held = engine.kv_capacity_tokens
        if longest is not None and held is not None and held < longest:
            yield Finding(
                path=f"{path}.engines[{index}].kv_capacity_tokens",
                message=f"{held:,} KV tokens are fewer than the model's max_model_len of "
                f"{longest:,}: longer requests never fit this engine",
            )


# -- what the engines say --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One engine and what it answered."""

    path: str
    engine: EngineConfig
    wanted_model: str
    max_model_len: int | None = None
    findings: tuple[Finding, ...] = ()


async def engine_findings(config: Config) -> list[Finding]:
    """Ask every engine that has a URL: does it answer, and does it serve what its pool says?"""
    at_once = asyncio.Semaphore(MAX_AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        findings: list[Finding] = []
        for name, pool in sorted(config.pools.items()):
            path = key_path("$.pools", name)
            asked = await asyncio.gather(
                *(
                    _ask_engine(session, at_once, f"{path}.engines[{index}]", engine, pool)
                    for index, engine in enumerate(pool.engines)
                    if engine.url is not None
                )
            )
            findings += [finding for each in asked for finding in each.findings]
            findings += _differing_lengths(path, asked)
    return findings


async def _ask_engine(
    session: aiohttp.ClientSession,
    at_once: asyncio.Semaphore,
    path: str,
    engine: EngineConfig,
    pool: PoolConfig,
) -> _Asked:
    wanted = engine.model or pool.model.name
    url_path = f"{path}.url"
    async with at_once:
        try:
            async with session.get(f"{engine.url}/v1/models") as answer:
                status = answer.status
                body: Any = await answer.json(content_type=None) if status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = (
                f"{engine.url} cannot be reached: {_why(error)}; start the engine, or correct "
                "the URL"
            )
            return _failed(url_path, engine, wanted, message)
        except ValueError:
            message = f"{engine.url} answers no JSON at /v1/models: is it an engine?"
            return _failed(url_path, engine, wanted, message)
    if status != 200:
        message = f"{engine.url} answers {status} at /v1/models: is it an engine, and is it up?"
        return _failed(url_path, engine, wanted, message)
    return _compare_models(path, engine, wanted, body)


def _failed(path: str, engine: EngineConfig, wanted: str, message: str) -> _Asked:
    finding = Finding(path=path, message=message, level="error")
    return _Asked(path=path, engine=engine, wanted_model=wanted, findings=(finding,))


def _compare_models(path: str, engine: EngineConfig, wanted: str, body: object) -> _Asked:
    cards = body.get("data") if isinstance(body, dict) else None
    lengths = {
        str(card.get("id")): card.get("max_model_len")
        for card in cards or ()
        if isinstance(card, dict)
    }
    if wanted not in lengths:
        served = ", ".join(sorted(lengths)) or "no model"
        message = (
            f"{engine.url} serves {served} and not {wanted!r}; correct the model's name, or start "
            f"the engine with --served-model-name {wanted}"
        )
        return _failed(f"{path}.model", engine, wanted, message)
    length = lengths[wanted]
    return _Asked(
        path=path,
        engine=engine,
        wanted_model=wanted,
        max_model_len=length if isinstance(length, int) else None,
    )


def _differing_lengths(path: str, asked: list[_Asked]) -> Iterator[Finding]:
    """Engines of a pool must be able to take each other's requests."""
    lengths: dict[int, str] = {}
    for each in asked:
        if each.max_model_len is not None:
            lengths.setdefault(each.max_model_len, each.path)
    if len(lengths) > 1:
        told = ", ".join(f"{length:,} at {where}" for length, where in sorted(lengths.items()))
        yield Finding(
            path=f"{path}.engines",
            message=f"max_model_len differs: {told}; longer requests than the least are refused",
        )


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ASK_TIMEOUT_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return (os.strerror(number) if number else str(error.os_error)).lower()
    return " ".join(str(error).split()) or type(error).__name__


def findings_as_json(findings: list[Finding]) -> list[Mapping[str, str]]:
    """For programs."""
    return [{"level": f.level, "path": f.path, "message": f.message} for f in findings]
