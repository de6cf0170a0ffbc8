"""Registries of each kind, for the contract."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dsched.registry import Registry


@dataclass(slots=True, kw_only=True)
class RegistryCase:
    """An empty registry, and what a test needs beside its contract."""

    registry: Registry
    open_again: Callable[[], Registry]
    """Open the same registry as another process would."""
    forget_history: Callable[[int], Awaitable[None]]
    """Forget all changes before a revision."""
    is_shared: bool = True
    """Other processes can open it."""
