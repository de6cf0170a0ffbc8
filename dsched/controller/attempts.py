"""What every attempt goes through: from a booked rank to a command in its engine's hands.

An attempt is booked first (`Dispatcher`), so that the next decision counts it. It begins when its
command is made: at once, or when another engine has computed its prompt (`prefills`). Beginning it
opens it in the journal and puts it under watch.
"""

import msgspec

from dsched.controller.run import Attempt, Phase, RequestRun
from dsched.controller.state import ControllerState
from dsched.drivers.wire import GenerateCommand
from dsched.errors import DriverError, EngineRefusedError, InvariantError
from dsched.ids import AttemptId, EngineId

ENGINE_BUSY_STATUSES = (429, 503, 529)
"""Answers of an engine that is alive and has no room: another rank may have."""


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """One command to hand out: this run goes to this engine."""

    run: RequestRun
    command: GenerateCommand
    engine_id: EngineId


def begin_attempt(state: ControllerState, run: RequestRun, now_ns: int) -> Dispatch:
    """Open the attempt whose rank is booked, and make its command."""
    attempt = attempt_of(run)
    rank_id = run.router.rank_id(attempt.rank)
    run.phase = Phase.RUNNING
    run.is_handed_out = True
    state.runs.begin_attempt(run, attempt.attempt_id)
    if state.watch is not None:
        state.watch.begin(
            attempt.attempt_id,
            engine_id=attempt.engine_id,
            num_prompt_tokens=attempt.num_prompt_tokens,
            now_ns=now_ns,
        )
    state.journal.begin_attempt(
        run.request.request_id,
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        target=rank_id,
        prefill=run.prefilled_by,
    )
    state.counts.add_dispatch(rank_id)
    return Dispatch(
        run=run,
        engine_id=attempt.engine_id,
        command=GenerateCommand(
            attempt_id=attempt.attempt_id,
            epoch=state.membership.epoch,
            dp_rank=rank_id.dp_rank,
            prompt_token_ids=attempt.prompt_token_ids,
            sampling=attempt.sampling,
            priority=run.request.priority,
            trace=run.request.trace,
            kv_transfer=None if run.transfer is None else run.transfer.params,
            kv_meeting=run.prefill.meeting if run.prefill is not None else None,
        ),
    )


def is_busy(error: DriverError) -> bool:
    """Whether an engine is alive and has no room."""
    return isinstance(error, EngineRefusedError) and error.status in ENGINE_BUSY_STATUSES


def attempt_of(run: RequestRun) -> Attempt:
    """The attempt of a run that must have one."""
    if run.attempt is None:
        raise InvariantError(f"request {run.request.request_id} has no attempt")
    return run.attempt


def is_wanted(dispatch: Dispatch) -> bool:
    """Whether the run still waits for this very command."""
    run, attempt_id = dispatch.run, AttemptId(dispatch.command.attempt_id)
    if dispatch.command.is_prefill:
        return run.prefill is not None and run.prefill.attempt_id == attempt_id
    return run.attempt is not None and run.attempt.attempt_id == attempt_id
