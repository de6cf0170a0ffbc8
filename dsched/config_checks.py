"""Checks that look at several values at once, before any port is opened.

In: a `Config` whose values each have the right type and range. Out: the same with its URLs
normalised, or `ConfigError` that starts with a path. Imports nothing and contacts nobody.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from msgspec.structs import replace

from dsched.config import (
    BUILTIN_ROUTING_POLICIES,
    Config,
    EngineConfig,
    LaunchConfig,
    ModelConfig,
    PoolConfig,
)
from dsched.config_yaml import key_path
from dsched.errors import ConfigError

MAX_ENDPOINT_LENGTH = 4_096
DEFAULT_PORTS = {"http": 80, "https": 443}
CHAT_KEYS = ("chat_format", "tool_call_format", "reasoning_format")
_RANKS_KEY = "say it in $.launch.data_parallel_size"
LAUNCH_OWN_ARGS = {
    "--host": "dsched talks to its engines on 127.0.0.1",
    "--port": "dsched chooses a free one for each engine",
    "--data-parallel-size": _RANKS_KEY,
    "-dp": _RANKS_KEY,
    "--dp-size": _RANKS_KEY,
    "--dp": _RANKS_KEY,
}
"""Arguments by which dsched would look for an engine or its ranks where they are not. Everything
else that it passes may be overridden."""
ETCD_SCHEME = "etcd://"
ETCD_PORT = 2_379
ETCD_PREFIX = "dsched"


def check_config(config: Config) -> Config:
    """Check what spans several values; return the configuration with normalised URLs."""
    _check_addresses(config)
    _check_policy(config.routing.policy, config.routing.policy_args)
    _check_endpoint("$.agent.endpoint", config.agent.endpoint)
    _check_peer_endpoint(config.routing.peer_endpoint)
    _check_registry_url(config)
    _check_otel_endpoint(config.otel.endpoint)
    config = replace(
        config,
        pools={
            name: replace(
                pool,
                engines=tuple(
                    _normalise_engine(f"{key_path('$.pools', name)}.engines[{index}]", engine)
                    for index, engine in enumerate(pool.engines)
                ),
            )
            for name, pool in config.pools.items()
        },
    )
    _check_pools(config)
    _check_launch(config)
    return config


def _check_addresses(config: Config) -> None:
    for path, host in (
        ("$.front_door.host", config.front_door.host),
        ("$.admin.host", config.admin.host),
    ):
        if not host or any(c.isspace() or c in "/@" for c in host):
            raise ConfigError(f"{path}: {host!r} is not a host name or address")
    same_host = config.front_door.host == config.admin.host
    if same_host and config.front_door.port == config.admin.port != 0:
        raise ConfigError(
            f"$.admin.port: {config.admin.port} is also the front door's port on "
            f"{config.admin.host}"
        )


def _check_endpoint(path: str, endpoint: str) -> None:
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not address or len(endpoint) > MAX_ENDPOINT_LENGTH:
        raise ConfigError(f"{path}: {endpoint!r} is not tcp://host:port or ipc://path")
    if scheme == "tcp":
        _, colon, port = address.rpartition(":")
        is_port = port.isdecimal() and int(port) <= 65_535
        if not colon or not (is_port or port == "*"):
            raise ConfigError(f"{path}: {endpoint!r} needs a port, as in tcp://127.0.0.1:8002")


def _check_peer_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    _check_endpoint("$.routing.peer_endpoint", endpoint)
    host = endpoint.partition("://")[2].rpartition(":")[0]
    if endpoint.startswith("tcp://") and host in ("*", "0.0.0.0", "[::]", "::"):
        raise ConfigError(
            f"$.routing.peer_endpoint: {endpoint!r} names no address that others could connect to"
        )


def _check_otel_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"$.otel.endpoint: {endpoint!r} is not http://HOST:4318/v1/traces")


def _check_registry_url(config: Config) -> None:
    registry = config.registry
    url = registry.url
    is_etcd = url is not None and url.startswith(ETCD_SCHEME)
    if is_etcd:
        parse_etcd_url("$.registry.url", url or "")
    elif url not in (None, "memory://") and not _is_sqlite_url(url or ""):
        raise ConfigError(
            f"$.registry.url: {url!r} is not sqlite:///PATH, memory:// or "
            "etcd://HOST:PORT,HOST:PORT/PREFIX"
        )
    for name in ("user", "password_file", "ca_file"):
        if getattr(registry, name) is not None and not is_etcd:
            raise ConfigError(f"$.registry.{name}: only an etcd:// registry has one")
    if (registry.user is None) is not (registry.password_file is None):
        raise ConfigError("$.registry.user: goes together with $.registry.password_file")


def _is_sqlite_url(url: str) -> bool:
    return url.startswith("sqlite:///") and url != "sqlite:///"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """Where an etcd cluster is, and which of its keys are ours."""

    endpoints: tuple[str, ...]
    """`host:port` of each member, at least one, in the order of the URL."""
    prefix: str
    """Every key starts with it; begins and ends with `/`."""


def parse_etcd_url(path: str, url: str) -> EtcdAddress:
    """Read `etcd://HOST:PORT,HOST:PORT/PREFIX`; port and prefix have defaults.

    Raises `ConfigError` that starts with `path` and shows the endpoint that cannot be used.

    >>> parse_etcd_url("$", "etcd://a,b:1,[::1]:2379/prod")
    EtcdAddress(endpoints=('a:2379', 'b:1', '[::1]:2379'), prefix='/prod/')
    >>> parse_etcd_url("$", "etcd://a").prefix
    '/dsched/'
    """
    hosts, _, prefix = url.removeprefix(ETCD_SCHEME).partition("/")
    if "@" in hosts:
        raise ConfigError(f"{path}: no user in the URL; use registry.user and password_file")
    endpoints = [_etcd_endpoint(path, url, host) for host in hosts.split(",")]
    twice = [each for index, each in enumerate(endpoints) if each in endpoints[:index]]
    if twice:
        raise ConfigError(f"{path}: {url!r} names {twice[0]} twice")
    prefix = prefix.strip("/")
    if not prefix.isprintable() or any(c.isspace() or c in "?#" for c in prefix):
        raise ConfigError(f"{path}: {url!r} has a prefix with a space, `?` or `#`")
    return EtcdAddress(endpoints=tuple(endpoints), prefix=f"/{prefix or ETCD_PREFIX}/")


def _etcd_endpoint(path: str, url: str, text: str) -> str:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{path}: {url!r}: {text!r}: {error}") from error
    is_plain = parts.netloc == text and not any(c.isspace() for c in text)
    if not host or not is_plain or port == 0 or text.endswith(":"):
        raise ConfigError(f"{path}: {url!r}: {text!r} is not HOST:PORT")
    return f"{_host_text(host)}:{port or ETCD_PORT}"


# -- policies --------------------------------------------------------------------------------------


def _check_policy(policy: str, arguments: Mapping[str, object]) -> None:
    """Operators' own are imported and checked where they are made, in `dsched.plugins`."""
    if policy in BUILTIN_ROUTING_POLICIES and arguments:
        raise ConfigError(
            f"$.routing.policy_args: {policy} takes no arguments, got {sorted(arguments)}"
        )


# -- pools -----------------------------------------------------------------------------------------


def _check_pools(config: Config) -> None:
    ids: dict[str, str] = {}
    urls: dict[str, str] = {}
    for name, pool in config.pools.items():
        path = key_path("$.pools", name)
        _check_name(path, name)
        if not pool.engines:
            raise ConfigError(f"{path}.engines: pool {name!r} has no engine")
        if not pool.model.name:
            raise ConfigError(f"{path}.model.name: must not be empty")
        _check_model_names(path, pool)
        is_real = any(engine.kind != "sim" for engine in pool.engines)
        has_tokenizer = is_real or pool.model.tokenizer is not None
        _check_chat(f"{path}.model", pool.model, has_tokenizer=has_tokenizer)
        for index, engine in enumerate(pool.engines):
            engine_path = f"{path}.engines[{index}]"
            _check_unique(f"{engine_path}.id", config.engine_id(name, index), ids, "engine id")
            _check_kv_events(engine_path, pool, engine)
            if engine.url is not None:
                _check_unique(f"{engine_path}.url", engine.url, urls, "engine URL")
    _check_roles(config.pools)


def _check_kv_events(path: str, pool: PoolConfig, engine: EngineConfig) -> None:
    """Only prefill routing asks who has a prompt's beginning cached."""
    if engine.kv_events is None:
        if engine.kv_events_replay is not None:
            raise ConfigError(f"{path}.kv_events_replay: goes together with kv_events")
        return
    if pool.role != "prefill" or engine.kind == "sim":
        raise ConfigError(f"{path}.kv_events: only real engines of a prefill pool have one")
    _check_endpoint(f"{path}.kv_events", engine.kv_events)
    if engine.kv_events_replay is not None:
        _check_endpoint(f"{path}.kv_events_replay", engine.kv_events_replay)


def _check_name(path: str, name: str) -> None:
    """Names end up in metrics, registry keys and `engine/rank`."""
    if not name or not name.isprintable() or any(c.isspace() or c == "/" for c in name):
        raise ConfigError(f"{path}: {name!r} is no name: it is empty or has a space or `/`")


def _check_unique(path: str, value: str, seen: dict[str, str], what: str) -> None:
    if value in seen:
        raise ConfigError(f"{path}: {what} {value!r} is already at {seen[value]}")
    seen[value] = path


def _check_model_names(path: str, pool: PoolConfig) -> None:
    """Engines name their model each, or none does: a list that is short by one is a mistake."""
    stated = [engine.model for engine in pool.engines if engine.model is not None]
    if stated and len(stated) != len(pool.engines):
        raise ConfigError(
            f"{path}.engines: {len(stated)} of {len(pool.engines)} engines name a model; "
            "name it for every engine, or only once as the pool's model"
        )
    if "" in stated:
        raise ConfigError(f"{path}.engines[{stated.index('')}].model: must not be empty")


def _check_roles(pools: Mapping[str, PoolConfig]) -> None:
    """A model has one combined pool, or one prefill and one decode pool that understand it."""
    by_model: dict[str, dict[str, str]] = {}
    for name, pool in pools.items():
        path, model = key_path("$.pools", name), pool.model.name
        roles = by_model.setdefault(model, {})
        if pool.role in roles:
            known = roles[pool.role]
            raise ConfigError(
                f"{path}.role: pool {known!r} is the {pool.role} pool of {model!r} already"
            )
        if roles and "combined" in (pool.role, *roles):
            other = next(iter(roles.values()))
            raise ConfigError(
                f"{path}.role: pools {other!r} and {name!r} both serve {model!r}; one pool is "
                "combined, or one is prefill and the other decode"
            )
        roles[pool.role] = name
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        for name, pool in pools.items():
            if pool.role == role and other not in by_model[pool.model.name]:
                raise ConfigError(
                    f"{key_path('$.pools', name)}.role: a {role} pool needs a {other} pool for "
                    f"model {pool.model.name!r}"
                )
    for roles in by_model.values():
        if "prefill" in roles:
            _check_pair(pools, roles["prefill"], roles["decode"])


def _check_pair(pools: Mapping[str, PoolConfig], prefill: str, decode: str) -> None:
    """Engines of one kind hand KV to each other; other kinds would not know what it is."""
    kinds = {engine.kind for name in (prefill, decode) for engine in pools[name].engines}
    if len(kinds) > 1:
        raise ConfigError(
            f"{key_path('$.pools', prefill)}.engines: kinds {', '.join(sorted(kinds))} cannot hand "
            f"KV to each other; prefill pool {prefill!r} and decode pool {decode!r} need one kind"
        )


def _check_chat(path: str, settings: ModelConfig | LaunchConfig, *, has_tokenizer: bool) -> None:
    """The keys that say how chats are rendered and read."""
    stated = [key for key in CHAT_KEYS if getattr(settings, key) not in (None, "template")]
    if stated and not has_tokenizer:
        raise ConfigError(f"{path}.{stated[0]}: simulated engines answer with text alone")
    if settings.chat_format == "template":
        return
    for key in ("chat_template", "tool_call_format", "reasoning_format"):
        if getattr(settings, key, None) is not None:
            raise ConfigError(
                f"{path}.{key}: has no meaning with chat_format {settings.chat_format}"
            )


def _check_launch(config: Config) -> None:
    launch = config.launch
    if config.pools:
        return
    if launch.engine != "sim" and not launch.model:
        raise ConfigError(f"$.launch.model: engine {launch.engine!r} needs a model folder")
    _check_chat("$.launch", launch, has_tokenizer=launch.engine != "sim")
    for index, arg in enumerate(launch.args):
        # Both engines take underscores for hyphens.
        name = arg.partition("=")[0].replace("_", "-")
        if name in LAUNCH_OWN_ARGS:
            raise ConfigError(
                f"$.launch.args[{index}]: {arg!r} is not for engines that dsched starts; "
                f"{LAUNCH_OWN_ARGS[name]}"
            )
    if launch.engine == "sim" and launch.data_parallel_size > 1:
        raise ConfigError(
            f"$.launch.data_parallel_size: {launch.data_parallel_size} is for real engines; "
            "simulated ones take $.sim.num_dp_ranks"
        )
    if launch.engine == "sglang" and launch.load_balancer == "external":
        raise ConfigError(
            "$.launch.load_balancer: external is for vllm; an sglang engine has one server"
        )


# -- engines ---------------------------------------------------------------------------------------


def _normalise_engine(path: str, engine: EngineConfig) -> EngineConfig:
    if engine.id is not None:
        _check_name(f"{path}.id", engine.id)
    if engine.kind == "sim":
        if engine.url is not None:
            raise ConfigError(f"{path}.url: a simulated engine runs inside dsched and has no URL")
        return engine
    if engine.url is None:
        raise ConfigError(f"{path}.url: missing; an engine of kind {engine.kind!r} needs one")
    return replace(engine, url=normalise_url(f"{path}.url", engine.url))


def normalise_url(path: str, url: str) -> str:
    """Return `scheme://host:port[/prefix]` without a trailing `/` or `/v1`.

    >>> normalise_url("$", "HTTP://Host:8000/v1/")
    'http://host:8000'
    >>> normalise_url("$", "http://[::1]")
    'http://[::1]:80'
    """
    if any(character.isspace() for character in url):
        raise ConfigError(f"{path}: {url!r} contains a space")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{path}: {url!r}: {error}") from error
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ConfigError(f"{path}: {url!r} is not of the form http://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{path}: {url!r} may not have a user, a query or a fragment")
    if port == 0:
        raise ConfigError(f"{path}: {url!r} has port 0")
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    host = _host_text(parts.hostname)
    return f"{parts.scheme}://{host}:{port or DEFAULT_PORTS[parts.scheme]}{prefix}"


def _host_text(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return f"[{address}]" if address.version == 6 else str(address)
