"""What one decision of Dynamo's in-process router costs, without engines: one JSON line.

Run by `benchmarks/routing.py` with the Python of an environment that has `ai-dynamo-runtime`:

    python benchmarks/_dynamo_router.py RANKS PROMPT_TOKENS DECISIONS

`SelectionService.select_and_reserve` takes the whole prompt; reservations are freed in between.
"""

import asyncio
import json
import statistics
import sys
import time

from dynamo._core import SelectionService

BLOCK_TOKENS = 64


async def main(num_ranks: int, num_tokens: int, num_decisions: int) -> None:
    """Print the median time of a decision in microseconds."""
    service = SelectionService()
    for index in range(num_ranks):
        worker = {
            "worker_id": index + 1,
            "model_name": "model",
            "endpoint": f"http://127.0.0.1:{20_000 + index}",
            "block_size": BLOCK_TOKENS,
            "total_kv_blocks": 1_000_000 // BLOCK_TOKENS,
            "max_num_batched_tokens": 8192,
            "kv_events_endpoint": f"tcp://127.0.0.1:{30_000 + index}",
        }
        await _call(service.upsert_worker(worker))
    times = []
    for index in range(num_decisions):
        request = {
            "model_name": "model",
            "selection_id": f"r{index}",
            "token_ids": [(index * 7919 + at) % 50_000 for at in range(num_tokens)],
        }
        start = time.perf_counter()
        await _call(service.select_and_reserve(request))
        times.append(time.perf_counter() - start)
    print(json.dumps({"p50_us": statistics.median(times) * 1e6}))


async def _call(result: object) -> object:
    return await result if asyncio.iscoroutine(result) or hasattr(result, "__await__") else result


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:4])))
