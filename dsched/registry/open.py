"""Opens a registry by its URL."""

from dsched.clock import Clock
from dsched.errors import ConfigError
from dsched.registry.base import Registry
from dsched.registry.sqlite import SqliteRegistry


def open_registry(url: str, *, clock: Clock, create: bool = True) -> Registry:
    """Return the registry at `sqlite:///PATH` or `memory://`. Opens the file at the first call.

    With `create` false, a missing file is a `RegistryError` then: reading must not make one.
    Raises `ConfigError` for another URL.
    """
    if url == "memory://":
        return SqliteRegistry(":memory:", clock=clock)
    path = url.removeprefix("sqlite:///")
    if path == url or not path:
        raise ConfigError(f"$.registry.url: {url!r} is not sqlite:///PATH or memory://")
    return SqliteRegistry(path, clock=clock, create=create)
