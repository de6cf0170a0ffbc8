"""Opens a registry by its URL."""

from pathlib import Path

from dsched.clock import Clock
from dsched.config import RegistryConfig
from dsched.config_checks import ETCD_SCHEME, parse_etcd_url
from dsched.errors import ConfigError
from dsched.registry.base import Registry
from dsched.registry.etcd import EtcdRegistry
from dsched.registry.etcd_gateway import EtcdAccess, EtcdGateway
from dsched.registry.sqlite import SqliteRegistry

MIN_ATTEMPT_S, MAX_ATTEMPT_S = 0.5, 2.0
ATTEMPTS_PER_LEASE = 8
"""So that a renewal at half of the lease can ask three dead endpoints and still be in time."""


def open_registry(
    url: str, *, clock: Clock, create: bool = True, config: RegistryConfig | None = None
) -> Registry:
    """Return the registry at `url`; connects or opens the file at the first call.

    With `create` false, a missing file is a `RegistryError` then: reading must not make one.
    `config` has what etcd needs besides the URL. Raises `ConfigError` for a URL or a file of
    credentials that cannot be used.
    """
    if url == "memory://":
        return SqliteRegistry(":memory:", clock=clock)
    if url.startswith(ETCD_SCHEME):
        return _open_etcd(url, config or RegistryConfig())
    path = url.removeprefix("sqlite:///")
    if path == url or not path:
        raise ConfigError(
            f"$.registry.url: {url!r} is not sqlite:///PATH, memory:// or etcd://HOST:PORT/PREFIX"
        )
    return SqliteRegistry(path, clock=clock, create=create)


def attempt_timeout_s(lease_s: float) -> float:
    """Return how long one endpoint may take for a call.

    >>> attempt_timeout_s(10), attempt_timeout_s(3), attempt_timeout_s(60)
    (1.25, 0.5, 2.0)
    """
    return min(max(lease_s / ATTEMPTS_PER_LEASE, MIN_ATTEMPT_S), MAX_ATTEMPT_S)


def _open_etcd(url: str, config: RegistryConfig) -> EtcdRegistry:
    address = parse_etcd_url("$.registry.url", url)
    password = None
    if config.password_file is not None:
        password = _read("$.registry.password_file", config.password_file).strip()
    if config.ca_file is not None:
        _read("$.registry.ca_file", config.ca_file)
    gateway = EtcdGateway(
        address.endpoints,
        access=EtcdAccess(user=config.user, password=password, ca_file=config.ca_file),
        attempt_timeout_s=attempt_timeout_s(config.lease_s),
    )
    return EtcdRegistry(gateway, prefix=address.prefix)


def _read(path: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
