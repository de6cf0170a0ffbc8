"""Which servers make up a vLLM engine of several DP ranks."""

import pytest

from dsched.drivers.vllm.parallel import LoadBalancer, ServerPlan, plan_servers
from dsched.ids import EngineId


def plan(
    num_dp_ranks: int, *, load_balancer: LoadBalancer = "internal", is_expert_parallel: bool = True
) -> tuple[ServerPlan, ...]:
    return plan_servers(
        EngineId("v"),
        num_dp_ranks=num_dp_ranks,
        is_expert_parallel=is_expert_parallel,
        load_balancer=load_balancer,
        rpc_port=4_711,
    )


def test_internal_balancing_is_one_server() -> None:
    """One engine in front of all ranks; the number of API servers does not grow with them."""
    (server,) = plan(4)

    assert (server.engine_id, server.ep_group) == ("v", None)
    assert server.args == (
        *("--data-parallel-size", "4", "--enable-expert-parallel", "--api-server-count", "1"),
    )


def test_external_balancing_is_a_server_for_each_rank() -> None:
    """Servers of one group: they find each other at one port, and fail together."""
    servers = plan(2, load_balancer="external")

    assert [(each.engine_id, each.ep_group) for each in servers] == [("v-dp0", "v"), ("v-dp1", "v")]
    for rank, server in enumerate(servers):
        args = dict(zip(server.args, server.args[1:], strict=False))
        assert args["--data-parallel-size"] == "2"
        assert args["--data-parallel-rank"] == str(rank)
        assert args["--data-parallel-rpc-port"] == "4711"
        assert "--enable-expert-parallel" in server.args


@pytest.mark.parametrize("load_balancer", ["internal", "external"])
def test_one_rank_is_a_plain_server(load_balancer: LoadBalancer) -> None:
    """Without data parallelism there is nothing to balance."""
    assert plan(1, load_balancer=load_balancer) == (
        ServerPlan(engine_id=EngineId("v"), ep_group=None, args=("--enable-expert-parallel",)),
    )
    (server,) = plan(1, is_expert_parallel=False)
    assert server.args == ()


def test_an_engine_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_dp_ranks is 0"):
        plan(0)
