"""The third driver: simulated engines on virtual or wall time, workloads, trace readers."""

from dsched.sim.traces import Trace, read_trace
from dsched.sim.workload import generate_workload

__all__ = ["Trace", "generate_workload", "read_trace"]
