"""Decode routing rules of public systems, as formulas, for comparison in the simulator.

Each is the published formula written anew, with homogeneous ranks and no prefix reuse; none is the
project's own program, and what those add around the formula (retries, prefix affinity, queues in
front) is left out. The source of each is in `POLICIES`.

A rule sees, for every rank: requests running and waiting there, KV tokens of both, prompt tokens
of both, and prompt tokens that wait. It returns one rank. Ties end in the lowest number, except
where the origin rotates.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsched.jit import kernel
from dsched.routing import kernels as routing_kernels

ROUND_ROBIN = 0
RANDOM = 1
P2C_REQUESTS = 2
P2C_KV = 3
LEAST_REQUESTS = 4
LEAST_KV = 5
VLLM = 6
VLLM_OLD = 7
SGLANG_TOTAL_TOKENS = 8
DYNAMO = 9
DYNAMO_OUTPUT = 10
DYNAMO_TUNED = 11
SMG_LEAST_LOAD = 12
AIBRIX = 13
LLM_D = 14
TWO_TERM = 15

RUNNING = 0
"""Rows of the load view [5, D]: running requests."""
WAITING = 1
"""Requests bound to the rank that wait in its engine."""
KV = 2
"""KV tokens of running and waiting requests."""
PROMPT = 3
"""Prompt tokens of running and waiting requests."""
WAITING_TOKENS = 4
"""Prompt tokens of waiting requests."""
NUM_VIEW_ROWS = 5

DYNAMO_BLOCK_TOKENS = 64
SMG_KV_WEIGHT = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPolicy:
    """One rule that the decode simulator can follow."""

    name: str
    number: int
    source: str
    """Where the formula is published."""
    packs: bool = False
    """Keeps ranks free for long requests (`DecodeRouter(is_synchronised=True)`)."""
    is_late: bool = False
    """Holds requests at the router while no rank has room."""
    migrates: bool = False
    """Moves running sequences."""
    gathers: bool = False
    """Holds requests longer than the level to run them together."""


POLICIES: dict[str, SimPolicy] = {
    policy.name: policy
    for policy in (
        SimPolicy(
            name="round_robin",
            number=ROUND_ROBIN,
            source="next rank in turn; default of vllm-router 0.1.17 and sglang's DP controller",
        ),
        SimPolicy(name="random", number=RANDOM, source="uniform; sglang-router 0.3.2 `random`"),
        SimPolicy(
            name="p2c_requests",
            number=P2C_REQUESTS,
            source="two random ranks, fewer requests; sglang-router `power_of_two`, Ray Serve LLM",
        ),
        SimPolicy(name="p2c_kv", number=P2C_KV, source="two random ranks, fewer KV tokens"),
        SimPolicy(
            name="least_requests",
            number=LEAST_REQUESTS,
            source="argmin of running + waiting; sglang DP controller `total_requests`",
        ),
        SimPolicy(name="least_kv", number=LEAST_KV, source="argmin of KV tokens"),
        SimPolicy(
            name="vllm",
            number=VLLM,
            source="vLLM DPLB since PR #49204: w + r, plus 6 w (kv - 0.5) above half-full KV; "
            "rotating ties",
        ),
        SimPolicy(name="vllm_old", number=VLLM_OLD, source="vLLM DPLB before #49204: 4 w + r"),
        SimPolicy(
            name="sglang",
            number=SGLANG_TOTAL_TOKENS,
            source="sglang DP controller `total_tokens`: argmin of (tokens, requests)",
        ),
        SimPolicy(
            name="dynamo",
            number=DYNAMO,
            source="Dynamo 1.6.1 KvRouter, defaults: prompt blocks of active requests, request "
            "weight 0 (lib/kv-router/src/scheduling/selector.rs)",
        ),
        SimPolicy(
            name="dynamo_output",
            number=DYNAMO_OUTPUT,
            source="Dynamo KvRouter with router_track_output_blocks",
        ),
        SimPolicy(
            name="dynamo_tuned",
            number=DYNAMO_TUNED,
            source="Dynamo KvRouter, output blocks tracked, decode_active_request_weight "
            "(PR #12158) set to b / c / block tokens",
        ),
        SimPolicy(
            name="smg",
            number=SMG_LEAST_LOAD,
            source="sglang model gateway `least_load`: tokens / throughput + 0.15 k / (1 - k)",
        ),
        SimPolicy(
            name="aibrix",
            number=AIBRIX,
            source="AIBrix PD decode default: (norm running + 1 - norm throughput) / norm free KV",
        ),
        SimPolicy(
            name="llm_d",
            number=LLM_D,
            source="llm-d EPP: active-request and kv-cache-utilisation scorers, equal weights",
        ),
        SimPolicy(
            name="two_term",
            number=TWO_TERM,
            source="DeepSeek's rule: least b (running + 1) + c (KV + prompt), bound at arrival",
        ),
        SimPolicy(
            name="dsched",
            number=TWO_TERM,
            packs=True,
            source="dsched DecodeRouter: two_term; the fullest rank below the level of the longest "
            "running request, bound at arrival",
        ),
        SimPolicy(
            name="dsched_late",
            number=TWO_TERM,
            packs=True,
            is_late=True,
            source="dsched DecodeRouter: held at the router until a rank has room; what arrives "
            "within one step is placed together, longest first",
        ),
        SimPolicy(
            name="dsched_migrate",
            number=TWO_TERM,
            packs=True,
            is_late=True,
            migrates=True,
            source="dsched DecodeRouter and plan_migrations: dsched_late, moving sequences",
        ),
        SimPolicy(
            name="dsched_gather",
            number=TWO_TERM,
            packs=True,
            is_late=True,
            migrates=True,
            gathers=True,
            source="dsched_migrate; requests that would stretch every step by themselves are held "
            "for up to gather_ns to run together",
        ),
    )
}

DEFAULT_POLICY = "dsched_late"


@kernel
def pick_peer(
    policy: int,
    view: NDArray[np.float64],
    kv_capacity: float,
    request_weight_blocks: float,
    cursor: int,
    draws: NDArray[np.float64],
) -> int:
    """Choose a rank by a peer's formula. O(D).

    `cursor` counts decisions so far; `draws` are two uniform numbers in [0, 1).
    """
    num_ranks = view.shape[1]
    if policy == ROUND_ROBIN:
        return int(cursor % num_ranks)
    first = int(draws[0] * num_ranks)
    if policy == RANDOM:
        return first
    if policy in (P2C_REQUESTS, P2C_KV):
        second = int(draws[1] * (num_ranks - 1)) if num_ranks > 1 else 0
        if num_ranks > 1 and second >= first:
            second += 1
        better = _p2c_load(policy, view, second) < _p2c_load(policy, view, first)
        return int(second) if better else first

    most_running = 1.0
    most_free = 1e-9
    for rank in range(num_ranks):
        running = view[RUNNING, rank] + view[WAITING, rank]
        most_running = max(most_running, running)
        most_free = max(most_free, 1.0 - view[KV, rank] / kv_capacity)

    best = 0
    best_score = np.inf
    best_tie = np.inf
    rotates = policy in (VLLM, VLLM_OLD)
    for position in range(num_ranks):
        rank = (position + cursor) % num_ranks if rotates else position
        running = view[RUNNING, rank]
        waiting = view[WAITING, rank]
        kv = view[KV, rank]
        usage = kv / kv_capacity
        tie = 0.0
        if policy == LEAST_REQUESTS:
            score = running + waiting
        elif policy == LEAST_KV:
            score = kv
        elif policy == VLLM:
            score = running + waiting + waiting * 6.0 * max(0.0, min(1.0, usage) - 0.5)
        elif policy == VLLM_OLD:
            score = 4.0 * waiting + running
        elif policy == SGLANG_TOTAL_TOKENS:
            score = kv
            tie = running + waiting
        elif policy == DYNAMO:
            score = np.floor(view[PROMPT, rank] / DYNAMO_BLOCK_TOKENS)
        elif policy == DYNAMO_OUTPUT:
            score = np.floor(kv / DYNAMO_BLOCK_TOKENS)
        elif policy == DYNAMO_TUNED:
            score = np.floor(kv / DYNAMO_BLOCK_TOKENS) + request_weight_blocks * (running + waiting)
        elif policy == SMG_LEAST_LOAD:
            # Throughput is equal everywhere, so it only scales the first term; one second's worth
            # of tokens of a rank that emits 1 000 tokens/s is the unit.
            full = min(usage, 0.999)
            score = (view[WAITING_TOKENS, rank] + kv) / 1000.0 + SMG_KV_WEIGHT * full / (1.0 - full)
        elif policy == AIBRIX:
            free = max(1.0 - usage, 1e-3)
            score = ((running + waiting) / most_running) / (free / max(most_free, 1e-3))
        else:  # LLM_D: requests over the most of any rank, plus KV use; here lower is better
            score = (running + waiting) / most_running + usage
        if score < best_score or (score == best_score and tie < best_tie):
            best = rank
            best_score = score
            best_tie = tie
    return best


@kernel
def _p2c_load(policy: int, view: NDArray[np.float64], rank: int) -> float:
    if policy == P2C_REQUESTS:
        return float(view[RUNNING, rank] + view[WAITING, rank])
    return float(view[KV, rank])


@kernel
def fill_table(table: NDArray[np.int64], view: NDArray[np.float64]) -> None:
    """Write a load view into the table of `dsched.routing.kernels`."""
    for rank in range(view.shape[1]):
        table[routing_kernels.OWN_RUNNING, rank] = int(view[RUNNING, rank] + view[WAITING, rank])
        table[routing_kernels.OWN_KV, rank] = int(view[KV, rank])
