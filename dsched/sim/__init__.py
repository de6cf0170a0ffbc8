"""The third driver: simulated engines on virtual or wall time, workloads, trace readers.

Importing this package loads numpy and the trace readers; `SimCluster` brings the controller with
it when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from dsched.sim.traces import Trace, read_trace
from dsched.sim.workload import generate_workload

if TYPE_CHECKING:
    from dsched.sim.cluster import SimCluster

__all__ = ["SimCluster", "Trace", "generate_workload", "read_trace"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == "SimCluster":
        from dsched.sim.cluster import SimCluster

        return SimCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
