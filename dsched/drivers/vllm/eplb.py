"""Expert placement inside vLLM: dsched decides which expert fills each slot, vLLM moves weights.

`DschedEplbPolicy` has the signature of vLLM's `distributed/eplb/policy/abstract.py`.
vLLM 0.32 has no way to name a policy of one's own: `activate`, called in every worker by the
`vllm.general_plugins` entry point, puts it into vLLM's table under the name "default" if
`DSCHED_EPLB=1`. Load counting, the step counter, asynchronous migration and its communication stay
vLLM's. If a plan fails, vLLM's own policy plans that time.

Profiling at start asks for a plan without load; that first call compiles dsched's planner, and
returns the placement in use.

What only a GPU can show: vLLM's EPLB needs CUDA, ROCm or XPU, so the CPU tests call the policy as
vLLM does, with vLLM's tensors and table, but no weights move.
"""

import logging
from typing import TYPE_CHECKING, Any, Final

from dsched.config import (
    EplbSettings,
    agent_settings_from_environment,
    eplb_settings_from_environment,
)
from dsched.drivers.eplb import plan_slots, report_plan
from dsched.drivers.expert_report import ExpertReporter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsched.eplb import ExpertPlacement, Planner

POLICY_NAME: Final = "default"
"""The only name that vLLM's configuration allows."""

log = logging.getLogger("vllm.dsched")


def make_policy(settings: EplbSettings, reporter: ExpertReporter | None = None) -> type[Any]:
    """Return a policy class for vLLM's table; `fallback` is the one it replaces.

    The first rank of the EP group tells `reporter` the load of each plan.
    """
    import torch
    from vllm.distributed.eplb.policy import AbstractEplbPolicy, DefaultEplbPolicy

    class DschedEplbPolicy(AbstractEplbPolicy):  # type: ignore[misc]
        """dsched's planner with vLLM's signature."""

        fallback = DefaultEplbPolicy

        @classmethod
        def rebalance_experts(
            cls,
            weight: Any,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: Any = None,
        ) -> Any:
            """Return the logical expert of each slot, [layers, num_replicas], int64 on the CPU."""
            old = old_global_expert_indices
            try:
                load = weight.detach().cpu().numpy()
                slots = plan_slots(
                    load,
                    num_slots=num_replicas,
                    num_ranks=num_ranks,
                    num_nodes=num_nodes,
                    num_groups=num_groups,
                    current=None if old is None else old.detach().cpu().numpy(),
                    settings=settings,
                )
            except Exception as error:  # the door: vLLM's own policy plans instead
                log.warning("eplb.failed reason=%r; vLLM's policy is used", error)
                return cls.fallback.rebalance_experts(
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old
                )
            report_plan(reporter, load, slots, num_ranks=num_ranks, log=log)
            return torch.from_numpy(slots)

    return DschedEplbPolicy


def activate() -> None:
    """Entry point `vllm.general_plugins`: install the policy if `DSCHED_EPLB=1`. Safe to repeat."""
    settings = eplb_settings_from_environment()
    if not settings.is_on:
        return
    from vllm.distributed.eplb import eplb_state, policy

    if hasattr(policy.EPLB_POLICIES[POLICY_NAME], "fallback"):
        return
    ours = make_policy(settings, ExpertReporter(agent_settings_from_environment()))
    policy.EPLB_POLICIES[POLICY_NAME] = ours
    # The state starts with the class it imported, before it looks into the table.
    eplb_state.DefaultEplbPolicy = ours
    log.info("eplb.activated trigger=%s stop=%s", settings.trigger, settings.stop)


def vllm_planner(*, num_slots: int, num_ranks: int) -> "Planner | None":
    """Return vLLM's own planner in its global mode for comparisons; None without vLLM."""
    try:
        import torch
        from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
    except ImportError:
        return None
    from dsched.eplb import ExpertPlacement

    def plan(load: "NDArray[Any]", current: "ExpertPlacement | None") -> "ExpertPlacement":
        old = None if current is None else torch.from_numpy(current.slot_expert.copy()).long()
        slots = DefaultEplbPolicy.rebalance_experts(
            torch.from_numpy(load), num_slots, 1, 1, num_ranks, old
        )
        return ExpertPlacement(
            slot_expert=slots.numpy(), num_ranks=num_ranks, num_experts=load.shape[1]
        )

    return plan
