"""The errors that end a request, in words that a client can act on."""

from dsched.controller.events import AttemptLost
from dsched.controller.request import RequestError
from dsched.controller.run import RequestRun
from dsched.errors import DriverError, EngineRefusedError
from dsched.faults import RecoveryGuarantee, RecoveryPlan
from dsched.ids import EngineId
from dsched.routing import RoutingReason

RETRY_AFTER_S = 1
"""What a refused client is told to wait; engines come back or get room within seconds."""


def no_engine(model: str) -> RequestError:
    return RequestError(
        status=503,
        code="no_engine",
        message=f"no engine that serves {model!r} is up",
        retry_after_s=RETRY_AFTER_S,
    )


def overdue(run: RequestRun, *, is_pool_up: bool) -> RequestError:
    """The request has waited for as long as it may."""
    if run.num_handoffs:
        return RequestError(
            status=503,
            code="handoff_overdue",
            message=f"its engine was lost after {run.num_output_tokens} tokens, and no other one "
            "had room in time",
            retry_after_s=RETRY_AFTER_S,
        )
    if is_pool_up:
        return RequestError(
            status=503,
            code="overloaded",
            message="no engine had room in time",
            retry_after_s=RETRY_AFTER_S,
        )
    return no_engine(run.request.model)


def gave_up(run: RequestRun, event: AttemptLost) -> RequestError:
    """Too many ranks have failed it."""
    return RequestError(
        status=502 if event.is_engine_lost else 503,
        code="engine_lost" if event.is_engine_lost else "overloaded",
        message=f"gave up after {run.num_attempts} attempts: {event.reason}",
        retry_after_s=RETRY_AFTER_S,
    )


def cannot_go_on(run: RequestRun, plan: RecoveryPlan, engine_id: EngineId) -> RequestError:
    """Its answer had begun and cannot be continued honestly."""
    return RequestError(
        status=502,
        code="engine_lost",
        message=f"engine {engine_id} was lost after {run.num_output_tokens} "
        f"tokens, and {plan.reason}",
        guarantee=plan.guarantee.value,
    )


def replay_differs(run: RequestRun) -> RequestError:
    """Another engine does not repeat what the client has."""
    return RequestError(
        status=502,
        code="engine_lost",
        message=f"an engine was lost after {run.num_output_tokens} tokens, and another "
        "one does not repeat them",
        guarantee=RecoveryGuarantee.REFUSED.value,
    )


def engine_aborted() -> RequestError:
    return RequestError(status=502, code="engine_aborted", message="the engine aborted the request")


def full(num_held: int) -> RequestError:
    return RequestError(
        status=429,
        code="overloaded",
        message=f"{num_held} requests wait for an engine already",
        retry_after_s=RETRY_AFTER_S,
    )


def not_admitted() -> RequestError:
    """The operator's admission policy said no."""
    return RequestError(
        status=429,
        code="not_admitted",
        message="the cluster does not admit this request now",
        retry_after_s=RETRY_AFTER_S,
    )


def no_prefill(run: RequestRun) -> RequestError:
    """No prefill worker took its prompt, and its decode engine computes none."""
    if run.prefill_refusal is not None:
        return from_engine(run.prefill_refusal)
    return RequestError(
        status=503,
        code="no_engine",
        message=f"no engine that computes prompts for {run.request.model!r} is up",
        retry_after_s=RETRY_AFTER_S,
    )


def stopping() -> RequestError:
    return RequestError(
        status=503, code="stopping", message="dsched is stopping", retry_after_s=RETRY_AFTER_S
    )


def unknown_model(model: str) -> RequestError:
    return RequestError(
        status=404,
        code="model_not_found",
        message=f"model {model!r} is not served here",
        param="model",
    )


def id_in_use(request_id: str) -> RequestError:
    return RequestError(
        status=409,
        code="request_id_in_use",
        message=f"a request with id {request_id!r} is still running",
    )


def cannot_resume(reason: str) -> RequestError:
    return RequestError(status=409, code="cannot_resume", message=reason, param="Last-Event-ID")


def from_engine(error: DriverError) -> RequestError:
    if isinstance(error, EngineRefusedError) and 400 <= error.status < 500:
        return RequestError(status=400, code="engine_refused", message=str(error))
    return RequestError(status=502, code="engine_error", message=str(error))


def unroutable(run: RequestRun, reason: RoutingReason) -> RequestError:
    num_tokens = len(run.request.prompt_token_ids)
    if reason is RoutingReason.TOO_LARGE:
        return RequestError(
            status=400,
            code="context_length_exceeded",
            message=f"a prompt of {num_tokens} tokens does not fit the KV cache of any rank",
            param="prompt",
        )
    if reason is RoutingReason.NO_SUCH_RANK:
        return RequestError(
            status=400,
            code="no_such_rank",
            message=f"no engine has a DP rank {run.request.pinned_dp_rank}",
            param="X-data-parallel-rank",
        )
    return no_engine(run.request.model)
