"""Makes the operator's policies of a configuration: at the start, at a check, and at a reload.

Where the same class with the same arguments is named for several kinds, one object serves them all,
so that it can remember across them.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import msgspec
import structlog

from dsched.config import BUILTIN_ROUTING_POLICIES, Config, dsched_environment
from dsched.config_load import LoadedConfig, config_keys, load_config
from dsched.errors import ConfigError
from dsched.plugins import (
    ROUTING_KINDS,
    AdmissionPolicy,
    ChunkWeightsPolicy,
    HandoffPolicy,
    PolicyGuard,
    PolicySet,
    PriorityPolicy,
    RebalanceTrigger,
    RoutingPolicies,
    check_policy,
    fresh_modules,
    load_policy,
)
from dsched.plugins.guard import brief

AnyGuard = PolicyGuard[Any]
Result = TypeVar("Result")

log = structlog.get_logger(__name__)

RELOAD_TIMEOUT_S: Final = 60.0
"""Time for importing policies at a reload. Below: slow imports keep the old policies. Above: a
module that hangs is noticed late."""
DEFAULT_ROUTING_POLICY: Final = "two_term"
"""Whose prices decide where a policy of an operator does not."""

KINDS_OF_KEY: Mapping[str, tuple[type, ...]] = {
    "routing": ROUTING_KINDS,
    "admission": (AdmissionPolicy,),
    "priority": (PriorityPolicy,),
    "handoff": (HandoffPolicy,),
    "chunk_weights": (ChunkWeightsPolicy,),
    "rebalance": (RebalanceTrigger,),
}
"""By key of the configuration."""

ENGINE_KEYS = ("chunk_weights",)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPolicy:
    """One policy that a configuration names."""

    key: str
    reference: str
    arguments: Mapping[str, Any]
    path: str
    """Of the reference in the configuration."""
    arguments_path: str


def named_policies(config: Config) -> Iterator[NamedPolicy]:
    """The operator's policies, routing's first."""
    routing = config.routing
    if routing.policy not in BUILTIN_ROUTING_POLICIES:
        yield NamedPolicy(
            key="routing",
            reference=routing.policy,
            arguments=routing.policy_args,
            path="$.routing.policy",
            arguments_path="$.routing.policy_args",
        )
    for key in KINDS_OF_KEY:
        section = getattr(config.policies, key, None)
        if section is not None and section.policy is not None:
            yield NamedPolicy(
                key=key,
                reference=section.policy,
                arguments=section.args,
                path=f"$.policies.{key}.policy",
                arguments_path=f"$.policies.{key}.args",
            )


def make_policies(loaded: LoadedConfig) -> PolicySet:
    """Make and check every policy that a configuration names, those for engines too.

    Raises:
        ConfigError: one cannot be imported or made, or does not keep its contract; the message
            names its key and where that was set.
    """
    guards: dict[str, AnyGuard] = {}
    shared: dict[bytes, AnyGuard] = {}
    budget_ns = int(loaded.config.routing.policy_budget_ms * 1e6)
    for named in named_policies(loaded.config):
        try:
            guards[named.key] = _guard_of(named, shared, budget_ns=budget_ns)
        except ConfigError as error:
            path = str(error).split(": ", 1)[0]
            raise ConfigError(f"{error}{loaded.place(path)}") from error
    routing = guards.get("routing")
    return PolicySet(
        routing=None if routing is None else RoutingPolicies([(routing, 1.0)]),
        admission=guards.get("admission"),
        priority=guards.get("priority"),
        handoff=guards.get("handoff"),
        rebalance=guards.get("rebalance"),
    )


class PolicyReloader:
    """Reads the configuration again and makes its policies anew, for a running process.

    Modules of policies are imported again, so an edited file counts. Everything that can be wrong
    is found here, on a thread of its own: an import may take long, and must not hold a stream up.
    """

    def __init__(self, loaded: LoadedConfig) -> None:
        self._loaded = loaded
        self.num_reloads = dict.fromkeys(("loaded", "kept"), 0)

    async def reload(self, *, timeout_s: float = RELOAD_TIMEOUT_S) -> PolicySet | None:
        """Return the policies of the configuration as it is now; `None` when they cannot be used,
        which is logged and counted: then those in use stay."""
        try:
            loaded, policies = await _on_thread(self._read, timeout_s=timeout_s)
        except ConfigError as error:
            self._keep(str(error))
            return None
        except Exception as error:  # the door: policies may do anything when they are looked at
            self._keep(brief(error))
            return None
        ignored = sorted(set(_changed_keys(self._loaded.config, loaded.config)))
        if ignored:
            log.warning("config.ignored", keys=ignored, reason="needs a restart")
        self.num_reloads["loaded"] += 1
        log.info("policies.loaded", policies=list(policies.names))
        return policies

    def _keep(self, reason: str) -> None:
        self.num_reloads["kept"] += 1
        log.warning("policies.kept", reason=reason)

    def _read(self) -> tuple[LoadedConfig, PolicySet]:
        loaded = load_config(
            self._loaded.file, environment=dsched_environment(), flags=self._loaded.flags
        )
        references = [
            named.reference
            for each in (self._loaded, loaded)
            for named in named_policies(each.config)
        ]
        with fresh_modules(references):
            return loaded, make_policies(loaded)


def _changed_keys(old: Config, new: Config) -> Iterator[str]:
    """Keys outside policies that differ, and policies that only a restart can change."""
    for key in config_keys():
        values = [_value_of(config, key.path) for config in (old, new)]
        if values[0] == values[1]:
            continue
        is_policy = key.path[0] == "policies" and key.path[1] not in ENGINE_KEYS
        is_routing_policy = key.dotted in ("routing.policy_args", "routing.policy_budget_ms")
        if key.dotted == "routing.policy":
            # The prices of ours are given to routers at their start.
            prices = {
                value if value in BUILTIN_ROUTING_POLICIES else DEFAULT_ROUTING_POLICY
                for value in values
            }
            is_routing_policy = len(prices) == 1
        if not (is_policy or is_routing_policy):
            yield key.dotted


def _value_of(config: object, path: tuple[str, ...]) -> object:
    for name in path:
        config = getattr(config, name)
    return config


async def _on_thread(function: Callable[[], Result], *, timeout_s: float) -> Result:
    """Run `function` on a thread that nobody waits for longer than `timeout_s`, not even the end of
    the process. Raises `ConfigError` when it takes longer."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def tell(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("Result", result))

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="policy reload", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimeoutError:
        raise ConfigError(f"policies were not loaded within {timeout_s:.0f} s") from None


def _guard_of(named: NamedPolicy, shared: dict[bytes, AnyGuard], *, budget_ns: int) -> AnyGuard:
    kinds = KINDS_OF_KEY[named.key]
    identity = msgspec.json.encode((named.reference, named.arguments), order="deterministic")
    if identity in shared:
        guard = shared[identity]
        check_policy(guard.policy, kinds, where=f"{named.path}: {named.reference}")
        return guard
    policy = load_policy(
        kinds,
        named.reference,
        named.arguments,
        path=named.path,
        arguments_path=named.arguments_path,
        builtin_names=BUILTIN_ROUTING_POLICIES if named.key == "routing" else (),
    )
    guard = shared[identity] = PolicyGuard(policy, budget_ns=budget_ns)
    return guard
