"""Verify lengths of DSpark inside vLLM's GPU workers: our budget in the place of vLLM's.

vLLM chooses the budget on the host from confidences one step old and gives it to the best tokens on
the device. The second half stays. Of the first, `adaptive_budget` replaces the search: requests
whose confidences are not known yet count by what is usual instead of as certain, equal survivals
are settled the same way on every rank, and a cost that does not rise is not taken for free.

Hooks of vLLM 0.32: `AdaptiveVerificationManager.get_num_tokens` and `.set_cost_curves`
(`vllm/v1/worker/gpu/spec_decode/adaptive_verification.py`). **Untested on a GPU**: the tests run
`get_num_tokens` of vLLM's class and of ours over the same state on the CPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsched.costs import StepCostCurve
from dsched.drivers.vllm.mixin import log
from dsched.spec_decode import plan_verify_lengths


def adaptive_verification_class(base: Any) -> Any:
    """Return vLLM's `AdaptiveVerificationManager` with our budget.

    The device still gives the budget to the best tokens, as `plan_verify_lengths` does.
    """

    class DschedAdaptiveVerification(base):  # type: ignore[misc]
        _dsched_curve: StepCostCurve | None = None
        _batch_budget: Any

        def set_cost_curves(self, *args: Any, **kwargs: Any) -> None:
            super().set_cost_curves(*args, **kwargs)
            self._dsched_curve = None

        def get_num_tokens(
            self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
        ) -> int:
            num_tokens: int = super().get_num_tokens(num_tokens_per_req, draft_tokens)
            try:
                if self._dsched_curve is None:
                    self._dsched_curve = curve_of_table(self.cost_tables[1])
                budget = adaptive_budget(self, self._dsched_curve, num_tokens_per_req, draft_tokens)
            except Exception as error:  # the door: vLLM's own budget stands
                log.warning("verify.failed reason=%r; vLLM's budget is used", error)
                return num_tokens
            drafts, others, _ = self._batch_budget
            self._batch_budget = (drafts, others, budget)
            return int(sum(others.values())) + budget

    return DschedAdaptiveVerification


def adaptive_budget(
    manager: Any,
    step_cost: StepCostCurve,
    num_tokens_per_req: Mapping[str, int],
    draft_tokens: Mapping[str, Sequence[int]],
) -> int:
    """Return the draft tokens to verify, from the confidences that vLLM's manager has on the host.

    Requests whose confidences are all exactly 1 are those that vLLM has none of yet.
    """
    state = manager.req_states
    names = list(num_tokens_per_req)
    counts = np.array([len(draft_tokens.get(name, ())) for name in names], dtype=np.int64)
    num_tokens = np.array(list(num_tokens_per_req.values()), dtype=np.int64) - counts
    slots = np.array([state.req_id_to_index[name] for name in names], dtype=np.int64)
    # A prompt in progress samples nothing: its tokens are there, its emitted token is not.
    is_sampling = state.num_computed_tokens_np[slots] + num_tokens >= state.prefill_len.np[slots]
    stale = manager._stale_confidences[manager._stale_idx].np[slots[is_sampling]]
    is_unknown = (stale == 1.0).all(axis=1, keepdims=True)
    plan = plan_verify_lengths(
        stale,
        step_cost=step_cost,
        history=np.where(is_unknown, np.nan, stale),
        num_drafts=counts[is_sampling],
        num_other_tokens=int(num_tokens.sum()) - int(is_sampling.sum()),
        draft_seconds=float(manager.cost_tables[0][len(names)]) / 1e3,
    )
    room = int(manager._max_total_logits) - len(names) * int(manager.num_bonus_tokens)
    return max(0, min(int(plan.lengths.sum()), room))


def curve_of_table(verify_ms: NDArray[np.float64]) -> StepCostCurve:
    """Return the curve of vLLM's verify table: milliseconds of 0..B tokens."""
    tokens = np.arange(1, len(verify_ms))
    return StepCostCurve.from_samples(tokens, verify_ms[1:] / 1e3)


def replace_adaptive_verification() -> None:
    """Put our budget into vLLM's DSpark workers. For a `vllm.general_plugins` entry point, which
    runs in every worker before the model is made. Untested on a GPU."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    adaptive_verification.AdaptiveVerificationManager = adaptive_verification_class(
        adaptive_verification.AdaptiveVerificationManager
    )
