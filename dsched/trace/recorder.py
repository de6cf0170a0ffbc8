"""What the controller tells a trace, and the bounded ring that keeps the last of it.

The controller calls a `Recorder` at each fact and each decision: right after the fact was applied,
and right after a decision was made and before it is booked. `null_recorder` stands for "off".

`RingRecorder` costs a request a few microseconds: it makes one small struct a call and looks for
the cells of the load table that changed since the last decision (`dsched.routing.snapshot`).
Nothing is done for a token; nothing is encoded before somebody asks. The ring is made of segments
that each begin with a keyframe of every router, so that dropping the oldest segment leaves a trace
that can be decided again from its start.

A file takes the same records: `start_taking` begins to collect them (with a keyframe first), and
whoever writes calls `take` now and then. Between two calls at most `max_untaken` are kept; a writer
that is too slow loses the file (`overflowed`), never the service.

State: mutable, owned by the controller's thread; `records` may be called from another one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np

from dsched.drivers.wire import RankReport, SamplingParams
from dsched.faults import MembershipView, RationView, RecoveryPlan
from dsched.ids import AttemptId, EngineId, RankId, RequestId
from dsched.routing import DecodeRouter, RoutingDecision, RoutingRequest
from dsched.routing.decode import HeldDecision
from dsched.routing.prefill import PrefillDecision, PrefillView
from dsched.routing.snapshot import RouterSnapshot, ViewWatch, settings_fields
from dsched.states import RankState
from dsched.trace.records import (
    MAX_REASON_CHARS,
    Arrived,
    Booked,
    Changed,
    Dropped,
    Ended,
    FirstToken,
    HandedOff,
    Held,
    Keyframe,
    Lost,
    Picked,
    Preferred,
    PrefillChosen,
    Prefilled,
    Ranks,
    Rationed,
    Record,
    Recovered,
    Refused,
    Released,
    Stepped,
)

NUM_SEGMENTS = 8
"""Parts of the ring; the oldest is dropped whole. Fewer: more is forgotten at once. More: more
keyframes, each as large as the table of all ranks."""
MIN_SEGMENT_RECORDS = 32
RECORDS_OF_A_FRAME = 2_048
"""Records that are written together. Fewer: worse compression. More: more is lost by a cut."""
DEFAULT_MAX_UNTAKEN = 262_144
"""Records that wait for a slow disk before the file is given up. More: memory."""
MAX_STEPS_OF_PREFILL = 8
"""Steps of a rank that are kept after a request was sent there, until its first token. More: long
queues inside engines push everything else out of the ring."""


class Recorder(Protocol):
    """Hears every fact and decision. Methods must not raise and must not block."""

    def watch(self, pool: str, router: DecodeRouter) -> None:
        """A pool's decisions come from this router."""
        ...

    def on_peers(self, pool: str, now_ns: int) -> None:
        """The pool is shared with more or fewer dsched processes than before."""
        ...

    def on_arrival(
        self,
        request_id: RequestId,
        *,
        pool: str,
        arrival_ns: int,
        num_prompt_tokens: int,
        max_tokens: int,
        tenant: str,
        priority: int,
        now_ns: int,
    ) -> None: ...

    def on_refusal(self, request_id: RequestId, *, model: str, code: str, now_ns: int) -> None: ...

    def on_pick(
        self,
        pool: str,
        request_id: RequestId,
        request: RoutingRequest,
        decision: RoutingDecision,
        now_ns: int,
    ) -> None:
        """After `pick`, before anything is booked."""
        ...

    def on_release(self, pool: str, held: HeldDecision, now_ns: int) -> None:
        """After `next_held` named a request, before it is dropped and booked."""
        ...

    def on_preference(
        self, request_id: RequestId, decision: RoutingDecision, policy: str | None, now_ns: int
    ) -> None: ...

    def on_booking(
        self,
        request_id: RequestId,
        *,
        attempt_id: AttemptId,
        number: int,
        rank_id: RankId,
        num_prompt_tokens: int,
        epoch: int,
        now_ns: int,
    ) -> None: ...

    def on_prefill_choice(
        self,
        request_id: RequestId,
        workers: tuple[str, ...],
        view: PrefillView,
        decision: PrefillDecision,
        now_ns: int,
    ) -> None:
        """A prefill worker was chosen, or none was there; before anything is booked."""
        ...

    def on_prefill(
        self,
        request_id: RequestId,
        *,
        attempt_id: AttemptId,
        rank_id: RankId,
        bucket: int,
        work_ns: int,
        finish_ns: int,
        reason: str,
        now_ns: int,
    ) -> None:
        """The prompt of the attempt that was just booked goes to a prefill worker."""
        ...

    def on_hold(
        self,
        pool: str,
        request_id: RequestId,
        request: RoutingRequest,
        *,
        is_accepted: bool,
        now_ns: int,
    ) -> None:
        """After `hold`."""
        ...

    def on_drop(self, pool: str, request_id: RequestId, *, is_served: bool, now_ns: int) -> None:
        """After `drop_held`."""
        ...

    def on_report(self, report: RankReport, now_ns: int) -> None: ...

    def on_first_token(self, request_id: RequestId, now_ns: int) -> None: ...

    def on_loss(
        self,
        request_id: RequestId,
        *,
        engine_id: EngineId,
        layer: str,
        reason: str,
        num_output_tokens: int,
        now_ns: int,
    ) -> None: ...

    def on_recovery(
        self,
        request_id: RequestId,
        sampling: SamplingParams,
        plan: RecoveryPlan,
        *,
        num_output_tokens: int,
        now_ns: int,
    ) -> None: ...

    def on_ration(
        self,
        pool: str,
        view: RationView,
        *,
        tokens_per_rank: int | None,
        released: Sequence[RequestId],
        now_ns: int,
    ) -> None: ...

    def on_handoff(
        self,
        request_id: RequestId,
        *,
        method: str,
        detect_ns: int,
        dispatch_ns: int,
        prefill_ns: int,
        now_ns: int,
    ) -> None: ...

    def on_end(
        self,
        request_id: RequestId,
        *,
        outcome: str,
        code: str | None,
        num_output_tokens: int,
        num_handoffs: int,
        guarantee: str | None,
        now_ns: int,
    ) -> None: ...

    def on_membership(self, view: MembershipView, now_ns: int) -> None: ...


class _NullRecorder:
    """Hears nothing."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("on_") or name == "watch":
            self.__dict__[name] = _ignore  # found at once the next time
            return _ignore
        raise AttributeError(name)


def _ignore(*_: object, **__: object) -> None:
    """Do nothing."""


def null_recorder() -> Recorder:
    """Return a recorder that hears nothing: tracing is off."""
    return cast(Recorder, _NullRecorder())


class _Prefill:
    """A request whose prompt a rank computes."""

    __slots__ = ("request_id", "steps_left")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.steps_left = MAX_STEPS_OF_PREFILL


class RingRecorder:
    """Keeps about the last `max_records` records."""

    def __init__(
        self,
        *,
        max_records: int = 65_536,
        max_untaken: int = DEFAULT_MAX_UNTAKEN,
        write: Callable[[Sequence[Record]], None] | None = None,
    ) -> None:
        """`write`, after `start_taking`, gets full frames as they come: for hosts without a thread
        to write on.

        Raises `ValueError` for a ring that holds no segment.
        """
        if max_records < NUM_SEGMENTS * MIN_SEGMENT_RECORDS:
            raise ValueError(
                f"max_records is {max_records}; it must be at least "
                f"{NUM_SEGMENTS * MIN_SEGMENT_RECORDS}"
            )
        self._segment_records = max_records // NUM_SEGMENTS
        self._segment: list[Record] = []
        self._segments: deque[list[Record]] = deque([self._segment], maxlen=NUM_SEGMENTS)
        self._watches: dict[str, ViewWatch] = {}
        self._prefills: dict[tuple[str, int], _Prefill] = {}
        """By rank: the request that was sent there last."""
        self._prefill_of: dict[str, tuple[str, int]] = {}
        """The rank that computes the prompt of each request without a token."""
        self._untaken: list[Record] | None = None
        self._max_untaken = max_untaken
        self._write = write
        self.overflowed = False
        """Records came faster than they were taken; the file lacks what followed."""
        self.num_records = 0
        """Since the start."""

    # ---- reading

    def records(self) -> list[Record]:
        """What the ring holds, oldest first; it begins with keyframes. A copy: O(records)."""
        return [record for segment in tuple(self._segments) for record in tuple(segment)]

    def start_taking(self, now_ns: int) -> None:
        """Keep every record from here on for `take`, beginning with keyframes."""
        self._untaken = []
        self.overflowed = False
        self._add_keyframes(now_ns)

    def take(self) -> list[Record]:
        """What came since the last call."""
        taken = self._untaken
        if taken is None:
            return []
        self._untaken = []
        return taken

    def stop_taking(self) -> list[Record]:
        """Return what is left, and keep nothing further."""
        taken, self._untaken = self._untaken or [], None
        return taken

    # ---- Recorder

    def watch(self, pool: str, router: DecodeRouter) -> None:
        self._watches[pool] = ViewWatch(router)
        self._add_keyframe(pool, 0)

    def on_peers(self, pool: str, now_ns: int) -> None:
        self._add_keyframe(pool, now_ns)

    def on_arrival(
        self,
        request_id: RequestId,
        *,
        pool: str,
        arrival_ns: int,
        num_prompt_tokens: int,
        max_tokens: int,
        tenant: str,
        priority: int,
        now_ns: int,
    ) -> None:
        self._add(
            Arrived(
                now_ns,
                request_id,
                pool,
                arrival_ns,
                num_prompt_tokens,
                max_tokens,
                tenant,
                priority,
            )
        )

    def on_refusal(self, request_id: RequestId, *, model: str, code: str, now_ns: int) -> None:
        self._add(Refused(now_ns, request_id, model, code))

    def on_pick(
        self,
        pool: str,
        request_id: RequestId,
        request: RoutingRequest,
        decision: RoutingDecision,
        now_ns: int,
    ) -> None:
        watch = self._fresh_watch(pool, now_ns)
        self._add(
            Picked(
                now_ns,
                pool,
                request_id,
                request.num_prompt_tokens,
                request.pinned_dp_rank,
                request.excluded_ranks,
                request.num_reserved_tokens,
                watch.changes(),
                watch.tie_offset,
                watch.longest_tokens,
                decision.rank,
                decision.reason.value,
                decision.cost_ns,
                decision.num_eligible,
            )
        )

    def on_release(self, pool: str, held: HeldDecision, now_ns: int) -> None:
        watch = self._fresh_watch(pool, now_ns)
        decision = held.decision
        self._add(
            Released(
                now_ns,
                pool,
                str(held.request_key),
                held.held_ns,
                watch.changes(),
                watch.tie_offset,
                watch.longest_tokens,
                decision.rank,
                decision.reason.value,
                decision.cost_ns,
                decision.num_eligible,
            )
        )

    def on_preference(
        self, request_id: RequestId, decision: RoutingDecision, policy: str | None, now_ns: int
    ) -> None:
        self._add(Preferred(now_ns, request_id, policy, decision.rank, decision.cost_ns))

    def on_booking(
        self,
        request_id: RequestId,
        *,
        attempt_id: AttemptId,
        number: int,
        rank_id: RankId,
        num_prompt_tokens: int,
        epoch: int,
        now_ns: int,
    ) -> None:
        engine_id, dp_rank = rank_id
        self._expect_prefill(request_id, (engine_id, dp_rank))
        self._add(
            Booked(
                now_ns,
                request_id,
                attempt_id,
                number,
                engine_id,
                dp_rank,
                num_prompt_tokens,
                epoch,
            )
        )

    def on_prefill_choice(
        self,
        request_id: RequestId,
        workers: tuple[str, ...],
        view: PrefillView,
        decision: PrefillDecision,
        now_ns: int,
    ) -> None:
        arrays = (view.states, view.worker_bucket, view.backlog_ns, view.work_ns)
        self._add(
            PrefillChosen(
                now_ns,
                request_id,
                workers,
                b"".join(array.tobytes() for array in arrays),
                view.bucket,
                view.tie_offset,
                view.spill_ratio,
                view.spill_ns,
                decision.worker,
                decision.reason.value,
                decision.finish_ns,
            )
        )

    def on_prefill(
        self,
        request_id: RequestId,
        *,
        attempt_id: AttemptId,
        rank_id: RankId,
        bucket: int,
        work_ns: int,
        finish_ns: int,
        reason: str,
        now_ns: int,
    ) -> None:
        engine_id, dp_rank = rank_id
        self._expect_prefill(request_id, (engine_id, dp_rank))
        self._add(
            Prefilled(
                now_ns,
                request_id,
                attempt_id,
                engine_id,
                dp_rank,
                bucket,
                work_ns,
                finish_ns,
                reason,
            )
        )

    def on_hold(
        self,
        pool: str,
        request_id: RequestId,
        request: RoutingRequest,
        *,
        is_accepted: bool,
        now_ns: int,
    ) -> None:
        self._add(
            Held(
                now_ns,
                pool,
                request_id,
                request.num_prompt_tokens,
                request.num_prompt_tokens + request.num_reserved_tokens,
                request.tenant,
                request.pinned_dp_rank,
                request.excluded_ranks,
                request.priority,
                is_accepted,
            )
        )

    def on_drop(self, pool: str, request_id: RequestId, *, is_served: bool, now_ns: int) -> None:
        self._add(Dropped(now_ns, pool, request_id, is_served))

    def on_report(self, report: RankReport, now_ns: int) -> None:
        key = (report.engine_id, report.dp_rank)
        prefill = self._prefills.get(key)
        if prefill is None or report.num_step_tokens <= report.num_running:
            return
        prefill.steps_left -= 1
        if prefill.steps_left == 0:
            del self._prefills[key]
        self._add(
            Stepped(
                now_ns,
                report.engine_id,
                report.dp_rank,
                report.step,
                report.step_ns,
                report.num_step_tokens,
                report.num_running,
                report.num_waiting_prefill_tokens,
            )
        )

    def on_first_token(self, request_id: RequestId, now_ns: int) -> None:
        self._end_prefill(request_id)
        self._add(FirstToken(now_ns, request_id))

    def on_loss(
        self,
        request_id: RequestId,
        *,
        engine_id: EngineId,
        layer: str,
        reason: str,
        num_output_tokens: int,
        now_ns: int,
    ) -> None:
        self._add(Lost(now_ns, request_id, engine_id, layer, _short(reason), num_output_tokens))

    def on_recovery(
        self,
        request_id: RequestId,
        sampling: SamplingParams,
        plan: RecoveryPlan,
        *,
        num_output_tokens: int,
        now_ns: int,
    ) -> None:
        self._add(
            Recovered(
                now_ns,
                request_id,
                num_output_tokens,
                sampling.max_tokens,
                sampling.min_tokens,
                sampling.temperature,
                sampling.top_k,
                sampling.seed is not None,
                bool(sampling.presence_penalty or sampling.frequency_penalty),
                sampling.structured_output is not None,
                plan.method.value,
                plan.guarantee.value,
            )
        )

    def on_ration(
        self,
        pool: str,
        view: RationView,
        *,
        tokens_per_rank: int | None,
        released: Sequence[RequestId],
        now_ns: int,
    ) -> None:
        waiting = tuple((lost.request_id, lost.lost_ns, lost.num_tokens) for lost in view.waiting)
        self._add(
            Rationed(
                now_ns,
                pool,
                waiting,
                view.num_tokens_under_way,
                view.num_ranks_up,
                tokens_per_rank,
                tuple(released),
            )
        )

    def on_handoff(
        self,
        request_id: RequestId,
        *,
        method: str,
        detect_ns: int,
        dispatch_ns: int,
        prefill_ns: int,
        now_ns: int,
    ) -> None:
        self._end_prefill(request_id)
        self._add(HandedOff(now_ns, request_id, method, detect_ns, dispatch_ns, prefill_ns))

    def on_end(
        self,
        request_id: RequestId,
        *,
        outcome: str,
        code: str | None,
        num_output_tokens: int,
        num_handoffs: int,
        guarantee: str | None,
        now_ns: int,
    ) -> None:
        self._end_prefill(request_id)
        self._add(
            Ended(now_ns, request_id, outcome, code, num_output_tokens, num_handoffs, guarantee)
        )

    def on_membership(self, view: MembershipView, now_ns: int) -> None:
        self._add(
            Changed(
                now_ns,
                view.epoch,
                tuple(
                    (group.name, group.pool, group.state.name.lower(), _short(group.reason))
                    for group in view.groups
                    if group.state is not RankState.UP
                ),
            )
        )

    # ---- inside

    def _expect_prefill(self, request_id: str, key: tuple[str, int]) -> None:
        """Keep the next steps of a rank: they compute this request's prompt."""
        self._prefill_of[request_id] = key
        self._prefills[key] = _Prefill(request_id)

    def _end_prefill(self, request_id: str) -> None:
        key = self._prefill_of.pop(request_id, None)
        if key is None:
            return
        prefill = self._prefills.get(key)
        if prefill is not None and prefill.request_id == request_id:
            del self._prefills[key]

    def _add(self, record: Record) -> None:
        segment = self._segment
        segment.append(record)
        self.num_records += 1
        if self._untaken is not None:
            self._keep_for_file(record)
        if len(segment) >= self._segment_records:
            self._segment = []
            self._add_keyframes(record.time_ns)
            # Last, so that a reader on another thread never sees a segment without its keyframes.
            self._segments.append(self._segment)

    def _add_keyframes(self, now_ns: int) -> None:
        """Add what later views are built from; on the way the watches forget what they told."""
        for pool in self._watches:
            self._add_keyframe(pool, now_ns)

    def _add_keyframe(self, pool: str, now_ns: int) -> None:
        keyframe = _keyframe(pool, self._watches[pool].snapshot(), now_ns)
        self._segment.append(keyframe)
        self.num_records += 1
        if self._untaken is not None:
            self._keep_for_file(keyframe)

    def _keep_for_file(self, record: Record) -> None:
        assert self._untaken is not None
        if len(self._untaken) >= self._max_untaken:
            self.overflowed = True
            self._untaken = None
            return
        self._untaken.append(record)
        if self._write is not None and len(self._untaken) >= RECORDS_OF_A_FRAME:
            self._write(self.take())

    def _fresh_watch(self, pool: str, now_ns: int) -> ViewWatch:
        """The watch of a pool, after telling of ranks that have got other numbers."""
        watch = self._watches[pool]
        if watch.has_new_ranks():
            self._add(Ranks(now_ns, pool, watch.tell_ranks()))
        return watch


def _keyframe(pool: str, snapshot: RouterSnapshot, now_ns: int) -> Keyframe:
    return Keyframe(
        now_ns,
        pool,
        settings_fields(snapshot.settings),
        snapshot.rank_ids,
        np.ascontiguousarray(snapshot.table).tobytes(),
        np.ascontiguousarray(snapshot.prices).tobytes(),
        snapshot.tie_offset,
        tuple(
            (
                str(held.request_key),
                held.num_prompt_tokens,
                held.num_wanted_tokens,
                held.tenant,
                held.pinned_dp_rank,
                held.excluded_ranks,
                held.held_ns,
                held.number,
                held.priority,
            )
            for held in snapshot.held
        ),
        snapshot.served_tokens,
        snapshot.next_number,
        snapshot.hears_peers,
    )


def _short(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 1] + "…"
