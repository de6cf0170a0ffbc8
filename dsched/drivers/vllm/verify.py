"""Verify lengths inside vLLM, for any drafter: `plan_verify_lengths` decides, vLLM keeps its books.

`VerifyLengthMixin` shortens each request's drafts before they are scheduled, so vLLM books,
computes and counts the shorter ones. Without a confidence head, how likely a token is accepted is
estimated from what was accepted before, by request and position; that is known before the tokens
are drafted. A drafter in the same process can give confidences (`VerifyControl.confidence_source`).
With asynchronous scheduling the drafts are not known yet when they are booked: then the number of
placeholders is planned.

Hooks of vLLM 0.32 (`vllm/v1/core/sched/scheduler.py`, `async_scheduler.py`): `schedule`,
`update_draft_token_ids`, `_update_after_schedule`, `update_from_output`, `_free_request`. An
exception switches the part off and leaves vLLM's own rule. DSpark on GPUs, which vLLM trims on the
device, is in `dsched.drivers.vllm.adaptive`.

This module imports nothing of vLLM, and numba only once it is asked to plan: with numba loaded, the
CPU worker of vLLM 0.32 cannot be made in the same process (its `_rebind_kernels` asks every object
of every module for its `__dict__`, and llvmlite's answers with a function).

Cost a step: the plan (`docs/spec_decode.md`) and about 1 us a request for the books.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dsched.clock import SystemClock
from dsched.config import VerifySettings, verify_settings_from_environment
from dsched.drivers.vllm.mixin import log

if TYPE_CHECKING:
    from dsched.drivers.vllm.verify_control import VerifyControl

VERIFY_LENGTHS: Final = "verify_lengths"


class VerifyLengthMixin:
    """Put before `SchedulerMixin`; on if `DSCHED_VERIFY_LENGTHS` is set."""

    _dsched_verify: "VerifyControl | None" = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            self._dsched_verify = make_verify_control(self, verify_settings_from_environment())
        except Exception as error:  # the door: vLLM must start without us
            self._dsched_switch_off(VERIFY_LENGTHS, error)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, with a note of when it began."""
        if self._dsched_verify is not None:
            self._dsched_verify.start_step()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_draft_token_ids(self, draft_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; then drafts are cut to their verify lengths."""
        result = super().update_draft_token_ids(draft_token_ids, *args, **kwargs)  # type: ignore[misc]
        if self._dsched_verify is not None:
            try:
                trim_drafts(self._dsched_verify, self, draft_token_ids.req_ids)
            except Exception as error:  # the door
                self._dsched_switch_off(VERIFY_LENGTHS, error)
        return result

    def _update_after_schedule(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; then placeholders of drafts to come are cut to their verify lengths."""
        result = super()._update_after_schedule(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._dsched_verify is not None and getattr(self, "_dsched_is_async", False):
            try:
                trim_drafts(self._dsched_verify, self, scheduler_output.num_scheduled_tokens)
            except Exception as error:  # the door
                self._dsched_switch_off(VERIFY_LENGTHS, error)
        return result

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's own; what was accepted, and how long it took, is learned from first."""
        if self._dsched_verify is not None:
            try:
                learn_outcome(self._dsched_verify, scheduler_output, model_runner_output)
            except Exception as error:  # the door
                self._dsched_switch_off(VERIFY_LENGTHS, error)
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output, *args, **kwargs
        )

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; the request is forgotten."""
        if self._dsched_verify is not None:
            try:
                self._dsched_verify.remove(request.request_id)
            except Exception as error:  # the door
                self._dsched_switch_off(VERIFY_LENGTHS, error)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _dsched_switch_off(self, feature: str, error: Exception) -> None:
        if feature == VERIFY_LENGTHS:
            self._dsched_verify = None
        super()._dsched_switch_off(feature, error)  # type: ignore[misc]


def make_verify_control(scheduler: Any, settings: VerifySettings) -> "VerifyControl | None":
    """Return the control of `scheduler`; None where none was asked for or nothing is drafted."""
    num_positions = int(getattr(scheduler, "num_spec_tokens", 0) or 0)
    if not settings.is_on or num_positions == 0:
        return None
    from dsched.costs import StepCostCurve
    from dsched.drivers.vllm.verify_control import VerifyControl

    step_cost = None
    if settings.step_cost is not None:
        step_cost = StepCostCurve.from_json(Path(settings.step_cost).read_text())
    log.info("verify.planned positions=%d step_cost=%s", num_positions, settings.step_cost)
    control = VerifyControl(
        num_positions=num_positions,
        max_requests=2 * scheduler.max_num_running_reqs,
        step_cost=step_cost,
        clock=SystemClock(),
    )
    control.warm_up()
    return control


def trim_drafts(control: "VerifyControl", scheduler: Any, request_ids: Iterable[str]) -> None:
    """Cut the drafts of these requests. Finished requests and prompts in progress have none."""
    requests = [
        request
        for name in request_ids
        if (request := scheduler.requests.get(name)) is not None
        and not request.is_finished()
        and not request.is_prefill_chunk
    ]
    lengths = control.plan({each.request_id: len(each.spec_token_ids) for each in requests})
    for request in requests:
        # A new list: with asynchronous scheduling all requests share one of placeholders.
        request.spec_token_ids = request.spec_token_ids[: lengths[request.request_id]]


def learn_outcome(
    control: "VerifyControl", scheduler_output: Any, model_runner_output: Any
) -> None:
    """Tell the control what a step verified, and accepted: all that was emitted but one token."""
    verified, accepted = {}, {}
    sampled = model_runner_output.sampled_token_ids
    for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
        index = model_runner_output.req_id_to_index.get(name)
        if index is None or not sampled or not sampled[index]:
            continue
        verified[name] = len(drafts)
        accepted[name] = min(len(sampled[index]) - 1, len(drafts))
    control.end_step(
        num_tokens=scheduler_output.total_num_scheduled_tokens,
        verified=verified,
        accepted=accepted,
    )
