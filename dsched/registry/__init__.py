"""The registry: who is in the cluster, known to every dsched of it and kept while they are down.

`open_registry(url)` opens one; `Registry` is what all of them can do; `Registration` keeps entries
alive, `ClusterView` follows those of others, `Election` chooses who may rebalance; `RegistryMember`
is all of it for one process. Routing does not wait for a registry: without one, dsched serves on
from its last view.
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
from dsched.registry.cluster import ClusterView
from dsched.registry.election import Election, Leader
from dsched.registry.member import RegistryMember
from dsched.registry.open import open_registry
from dsched.registry.records import (
    EngineRow,
    InstanceRow,
    LeaderRow,
    RankRow,
    RankStateName,
    WorkersView,
    engine_key,
    instance_key,
    merge_workers,
    read_workers,
)
from dsched.registry.registration import Registration

__all__ = [
    "ChangeKind",
    "ClusterView",
    "Election",
    "EngineRow",
    "InstanceRow",
    "Leader",
    "LeaderRow",
    "LeaseLostError",
    "Listing",
    "RankRow",
    "RankStateName",
    "Registration",
    "Registry",
    "RegistryChange",
    "RegistryEntry",
    "RegistryMember",
    "WatchLostError",
    "WorkersView",
    "engine_key",
    "instance_key",
    "merge_workers",
    "open_registry",
    "read_workers",
]
