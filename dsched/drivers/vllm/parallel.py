"""Which `vllm serve` processes make up one engine of several DP ranks, and with which arguments.

Two ways, after where requests are spread over the ranks:

- **internal**: one server in front of all ranks. It is one engine of dsched; the rank is named with
  each request (`X-data-parallel-rank`), so dsched decides and vLLM's own balancer has no say.
- **external**: one server for each rank. Each is an engine of its own with one rank, and all name
  one EP group, because they live and die together.

With expert parallelism the ranks share one set of experts and exchange tokens in every layer; then
the group is the failure domain. Arguments are those of vLLM 0.32 (`vllm/engine/arg_utils.py`).
Pure.
"""

from typing import Literal

from dsched.drivers.local import ServerPlan
from dsched.ids import EngineId

LoadBalancer = Literal["internal", "external"]


def plan_servers(
    engine_id: EngineId,
    *,
    num_dp_ranks: int,
    is_expert_parallel: bool,
    load_balancer: LoadBalancer,
    rpc_port: int,
) -> tuple[ServerPlan, ...]:
    """Return the servers of one engine, in order of rank.

    `rpc_port` is a free port of 127.0.0.1, through which servers of an external group find each
    other; the other kinds do not use it.

    Raises:
        ValueError: no rank at all.

    >>> [each.engine_id for each in plan_servers(EngineId("v"), num_dp_ranks=2,
    ...     is_expert_parallel=True, load_balancer="external", rpc_port=9)]
    ['v-dp0', 'v-dp1']
    """
    if num_dp_ranks < 1:
        raise ValueError(f"num_dp_ranks is {num_dp_ranks}; an engine has at least 1")
    expert_args = ("--enable-expert-parallel",) if is_expert_parallel else ()
    if num_dp_ranks == 1:
        return (ServerPlan(engine_id=engine_id, ep_group=None, args=expert_args),)
    size_args = ("--data-parallel-size", str(num_dp_ranks), *expert_args)
    if load_balancer == "internal":
        # One API server: by default vLLM starts one for each rank, and dsched needs none of them.
        args = (*size_args, "--api-server-count", "1")
        return (ServerPlan(engine_id=engine_id, ep_group=None, args=args),)
    return tuple(
        ServerPlan(
            engine_id=EngineId(f"{engine_id}-dp{rank}"),
            ep_group=str(engine_id),
            args=(
                *size_args,
                *("--data-parallel-rank", str(rank)),
                *("--data-parallel-address", "127.0.0.1"),
                *("--data-parallel-rpc-port", str(rpc_port)),
            ),
        )
        for rank in range(num_dp_ranks)
    )
