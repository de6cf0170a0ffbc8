"""What one decision of vLLM's own data-parallel balancer costs, without engines: one JSON line.

Run by `benchmarks/routing.py` with the Python of vLLM's environment:

    python benchmarks/_vllm_router.py RANKS DECISIONS

The real `DPLBAsyncMPClient.get_core_engine_for_request`, on an object that has its state and no
sockets; CPU time of this thread.
"""

import json
import statistics
import sys
import time
from collections import Counter
from types import SimpleNamespace

from vllm.v1.engine.core_client import DPLBAsyncMPClient

BATCH = 50


def main(num_ranks: int, num_decisions: int) -> None:
    """Print the median time of a decision in microseconds."""
    client = object.__new__(DPLBAsyncMPClient)
    client.client_count = 1
    client.client_index = 0
    client.reqs_in_flight = {}
    client.engine_inflight = Counter()
    client.core_engines = [index.to_bytes(2, "little") for index in range(num_ranks)]
    client.lb_engines = [[index % 3, 40 + index % 7, 0.6] for index in range(num_ranks)]
    client.eng_start_index = 0
    times = []
    for first in range(0, num_decisions, BATCH):
        requests = [
            SimpleNamespace(request_id=f"r{index}", data_parallel_rank=None, pooling_params=None)
            for index in range(first, first + BATCH)
        ]
        start = time.thread_time()
        for request in requests:
            client.get_core_engine_for_request(request)
        times.append((time.thread_time() - start) / BATCH)
    client.resources = None
    print(json.dumps({"p50_us": statistics.median(times) * 1e6}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
