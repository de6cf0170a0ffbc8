"""Verify lengths of DSpark inside SGLang: our budget in the place of SGLang's.

SGLang chooses the budget on the host from survivals two steps old and gives it to the best tokens
on the device. The second half stays. Of the first, `VerifyBudget` replaces
`compute_verify_token_budget`: requests whose survivals are not known yet (SGLang sets them to 1)
count by what is usual instead of as certain, a step's cost is looked up at the next graph tier
instead of the one below, and a table that does not rise is said to be flat instead of being
verified on in silence.

Hook of SGLang 0.5.23: AROUND on the module function
`sglang.srt.speculative.dspark_components.dspark_planner.compute_verify_token_budget`. An exception
leaves SGLang's own budget. **Untested inside an engine**: DSpark's draft worker needs a GPU; the
tests call the wrapper as SGLang does. This module imports nothing of SGLang.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsched.costs import StepCostCurve
from dsched.spec_decode import plan_verify_lengths

TARGET: Final = (
    "sglang.srt.speculative.dspark_components.dspark_planner.compute_verify_token_budget"
)
MAX_ERRORS: Final = 16
"""Failed plans after which SGLang's own budget is used for good."""

log = logging.getLogger("sglang.dsched")


@dataclass(slots=True)
class VerifyBudget:
    """State: the curve of SGLang's table, and how often something went wrong."""

    num_plans: int = 0
    num_errors: int = 0
    _table: Any = None
    _curve: StepCostCurve | None = None

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand around SGLang's function: same arguments, same kind of answer."""
        decision = original(*args, **kwargs)
        if self.num_errors >= MAX_ERRORS:
            return decision
        try:
            budget, seconds, rate = self._plan(**kwargs)
        except Exception as error:  # the door: SGLang's own budget stands
            self.num_errors += 1
            log.warning("verify.failed reason=%r; SGLang's budget is used", error)
            return decision
        if isinstance(decision, int):
            return budget
        return msgspec.structs.replace(
            decision, budget=budget, predicted_step_seconds=seconds, predicted_theta=rate
        )

    def _plan(
        self, *, history_survival_probs: Any, sps_table: Any, cfg: Any
    ) -> tuple[int, float, float]:
        """(budget, seconds, tokens a second)"""
        if self._curve is None or self._table is not sps_table:
            self._curve, self._table = curve_of_table(sps_table), sps_table
            if self._curve.is_flat:
                log.warning("verify.cost_flat; everything is verified until a table is profiled")
        survival = np.asarray(history_survival_probs, dtype=np.float64)
        confidence = confidence_of(survival[:, : cfg.resolved_max_verify_len()])
        is_unknown = (confidence == 1.0).all(axis=1, keepdims=True)
        plan = plan_verify_lengths(
            confidence,
            step_cost=self._curve,
            history=np.where(is_unknown, np.nan, confidence),
        )
        self.num_plans += 1
        return plan.budget, plan.expected_seconds, plan.expected_emitted / plan.expected_seconds


def confidence_of(survival: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the confidences [R, K] whose products are `survival` [R, K]; 0 behind a zero."""
    before = np.concatenate((np.ones((len(survival), 1)), survival[:, :-1]), axis=1)
    ratio = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0.0)
    return np.clip(ratio, 0.0, 1.0)


def curve_of_table(table: Any) -> StepCostCurve:
    """Return the curve of SGLang's `SpsCostTable` or `SpsAdditiveCostTable` object."""
    if hasattr(table, "bias_seconds"):
        names: tuple[str, ...] = (
            "bias_seconds",
            "bs_probes",
            "alpha_seconds",
            "m_probes",
            "theta_seconds",
        )
    else:
        names = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
        if len(table.sample_batch_tokens) == 1:
            # What SGLang makes without a profile: it says nothing about more tokens.
            return StepCostCurve(
                tier_tokens=np.array([table.max_batch_tokens], dtype=np.int64),
                tier_ns=np.array([round(1e9 / table.sample_steps_per_sec[0])], dtype=np.int64),
                slope_ns=1.0,
                is_flat=True,
            )
    return StepCostCurve.from_json(
        msgspec.json.encode({name: getattr(table, name) for name in names})
    )


def register_verify_budget(budget: VerifyBudget) -> None:
    """Put `budget` around SGLang's function; call it from the `sglang.srt.plugins` entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, budget, HookType.AROUND)
