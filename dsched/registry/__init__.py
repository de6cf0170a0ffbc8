"""The registry: who is in the cluster, known to every dsched of it and kept while they are down.

`open_registry(url)` opens one; `Registry` is what all of them can do; `Registration` keeps entries
alive. Routing does not wait for a registry: without one, dsched serves on from its last view.
"""

from dsched.registry.base import (
    ChangeKind,
    LeaseLostError,
    Listing,
    Registry,
    RegistryChange,
    RegistryEntry,
    WatchLostError,
)
from dsched.registry.open import open_registry
from dsched.registry.records import (
    EngineRow,
    InstanceRow,
    RankRow,
    RankStateName,
    WorkersView,
    engine_key,
    instance_key,
    read_workers,
)
from dsched.registry.registration import Registration

__all__ = [
    "ChangeKind",
    "EngineRow",
    "InstanceRow",
    "LeaseLostError",
    "Listing",
    "RankRow",
    "RankStateName",
    "Registration",
    "Registry",
    "RegistryChange",
    "RegistryEntry",
    "WatchLostError",
    "WorkersView",
    "engine_key",
    "instance_key",
    "open_registry",
    "read_workers",
]
