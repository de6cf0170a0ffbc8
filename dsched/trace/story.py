"""What happened to one request, and why: the part of a trace that `dsched explain` tells.

`tell` finds the records of a request and rebuilds, for each decision about it, the view that it was
made from: every rank with its cost or the reason why it was out, the choice, and how close the
second best came. Only the stretch from the last keyframe to each decision is rebuilt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dsched.routing import RankState, RoutingReason, RoutingRequest
from dsched.trace.candidates import Candidate, list_candidates
from dsched.trace.records import (
    AnyRecord,
    Booked,
    Changed,
    Held,
    Keyframe,
    Picked,
    PrefillChosen,
    Rationed,
    Refused,
    Released,
    Stepped,
)
from dsched.trace.view import (
    TraceViews,
    held_request,
    picked_request,
    prefill_view,
    snapshot_of,
)

NAMED_KINDS = {
    "Picked": "decided",
    "Released": "released",
    "Preferred": "preferred",
    "FirstToken": "first_token",
    "HandedOff": "handed_off",
    "Changed": "membership_changed",
    "PrefillChosen": "prefill_chosen",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a decision was made from, and how close it was."""

    candidates: tuple[Candidate, ...]
    """Those that could be chosen first, by cost."""
    chosen: str | None
    """Name of the rank."""
    margin_ns: float | None
    """Cost of the second best less that of the chosen one; `None` without a second."""
    num_tied: int
    """Others that cost exactly as much: the order among equals decided."""
    num_held: int
    """Requests that waited at the router then."""

    @property
    def eligible(self) -> tuple[Candidate, ...]:
        return tuple(each for each in self.candidates if each.is_eligible)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One record of the story, with what was found out about it."""

    record: AnyRecord
    decision: Decision | None = None
    """Of a routing decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Everything that a trace has of one request."""

    request_id: str
    moments: tuple[Moment, ...]
    membership_before: Changed | None
    """What was not up when it began, as far as the trace has it."""
    has_start: bool
    """Its arrival is among them: the ring has not dropped it."""
    has_end: bool


def tell(records: Sequence[AnyRecord], request_id: str) -> Story | None:
    """Tell of a request; `None` if nothing in the trace is about it. O(records).

    An id that was used more than once gets the last request that had it.
    """
    places = [number for number, record in enumerate(records) if _is_about(record, request_id)]
    if not places:
        return None
    starts = [n for n in places if type(records[n]).__name__ in ("Arrived", "Refused")]
    if starts:
        places = [number for number in places if number >= starts[-1]]
    places = sorted({*places, *_steps(records, places), *_membership(records, places)})
    return Story(
        request_id=request_id,
        moments=tuple(_moment(records, number) for number in places),
        membership_before=_last_change(records, places[0]),
        has_start=bool(starts),
        has_end=any(isinstance(records[n], Refused) or _is_end(records[n]) for n in places),
    )


def newest_request_ids(records: Sequence[AnyRecord], count: int) -> list[str]:
    """The ids of the last requests that a trace has, newest first: for a hint."""
    found: dict[str, None] = {}
    for record in reversed(records):
        if len(found) == count:
            break
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            found.setdefault(request_id)
    return list(found)


def as_document(story: Story) -> dict[str, object]:
    """Plain values for JSON; times in ns of the trace's clock."""
    return {
        "request_id": story.request_id,
        "has_start": story.has_start,
        "has_end": story.has_end,
        "moments": [_moment_document(moment) for moment in story.moments],
    }


def kind_of(record: AnyRecord) -> str:
    """The name of a kind of record in JSON.

    >>> kind_of(Refused(0, "r", "m", "full"))
    'refused'
    """
    name = type(record).__name__
    return NAMED_KINDS.get(name, name.lower())


def _is_about(record: AnyRecord, request_id: str) -> bool:
    if isinstance(record, Rationed):
        return any(waiting[0] == request_id for waiting in record.waiting)
    return getattr(record, "request_id", None) == request_id


def _is_end(record: AnyRecord) -> bool:
    return type(record).__name__ == "Ended"


def _steps(records: Sequence[AnyRecord], places: Sequence[int]) -> list[int]:
    """Steps of the rank that computed the prompt, between its booking and the first token."""
    found = []
    for position, place in enumerate(places):
        booked = records[place]
        if not isinstance(booked, Booked):
            continue
        end = places[position + 1] if position + 1 < len(places) else len(records)
        for number in range(place + 1, end):
            step = records[number]
            if (
                isinstance(step, Stepped)
                and step.engine_id == booked.engine_id
                and step.dp_rank == booked.dp_rank
            ):
                found.append(number)
    return found


def _membership(records: Sequence[AnyRecord], places: Sequence[int]) -> list[int]:
    """Changes of the membership while the request was there."""
    return [
        number for number in range(places[0], places[-1]) if isinstance(records[number], Changed)
    ]


def _last_change(records: Sequence[AnyRecord], place: int) -> Changed | None:
    """The last change of the membership before a record."""
    for number in range(place - 1, -1, -1):
        record = records[number]
        if isinstance(record, Changed):
            return record
    return None


def _moment(records: Sequence[AnyRecord], number: int) -> Moment:
    record = records[number]
    if not isinstance(record, Picked | Released):
        return Moment(record=record)
    views = TraceViews()
    for place in range(_keyframe_before(records, number, record.pool), number + 1):
        views.apply(records[place])
    router = views.router(record.pool)
    if router is None:
        return Moment(record=record)
    request = _request_of(records, number)
    is_expired = record.reason == RoutingReason.HOLD_EXPIRED
    candidates = list_candidates(router, request, ignores_room=is_expired)
    chosen = next((each for each in candidates if each.rank == record.rank), None)
    others = [each for each in candidates if each.is_eligible and each is not chosen]
    margin_ns = None
    if chosen is not None and others:
        margin_ns = others[0].cost.total_ns - chosen.cost.total_ns
    return Moment(
        record=record,
        decision=Decision(
            candidates=tuple(candidates),
            chosen=None if chosen is None else chosen.name,
            margin_ns=margin_ns,
            num_tied=0
            if chosen is None
            else sum(each.cost.total_ns == chosen.cost.total_ns for each in others),
            num_held=router.num_held,
        ),
    )


def _request_of(records: Sequence[AnyRecord], number: int) -> RoutingRequest:
    """What was to be placed; of a released request, as it was held."""
    record = records[number]
    if isinstance(record, Picked):
        return picked_request(record)
    assert isinstance(record, Released)
    for place in range(number - 1, -1, -1):
        held = records[place]
        if isinstance(held, Held) and held.request_id == record.request_id:
            return held_request(held)
        if isinstance(held, Keyframe) and held.pool == record.pool:
            for each in snapshot_of(held).held:
                if each.request_key == record.request_id:
                    return RoutingRequest(
                        num_prompt_tokens=each.num_prompt_tokens,
                        num_reserved_tokens=each.num_wanted_tokens - each.num_prompt_tokens,
                        pinned_dp_rank=each.pinned_dp_rank,
                        excluded_ranks=each.excluded_ranks,
                    )
    return RoutingRequest(num_prompt_tokens=0)


def _keyframe_before(records: Sequence[AnyRecord], number: int, pool: str) -> int:
    for place in range(number, -1, -1):
        keyframe = records[place]
        if isinstance(keyframe, Keyframe) and keyframe.pool == pool:
            return place
    return number


def _prefill_fields(record: AnyRecord) -> dict[str, object]:
    """The view of a prefill choice as lists, in the order of `workers`."""
    assert isinstance(record, PrefillChosen)
    view = prefill_view(record)
    return {
        "states": [RankState(int(state)).name.lower() for state in view.states],
        "worker_buckets": view.worker_bucket.tolist(),
        "backlog_ns": view.backlog_ns.tolist(),
        "work_ns": view.work_ns.tolist(),
    }


def _moment_document(moment: Moment) -> dict[str, object]:
    fields = msgspec.structs.asdict(moment.record)
    fields.pop("cells", None)
    if fields.pop("arrays", None) is not None:
        fields |= _prefill_fields(moment.record)
    document: dict[str, object] = {"kind": kind_of(moment.record), **fields}
    if moment.decision is not None:
        document["decision"] = {
            "chosen": moment.decision.chosen,
            "margin_ns": moment.decision.margin_ns,
            "num_tied": moment.decision.num_tied,
            "num_held": moment.decision.num_held,
            "candidates": [
                {
                    "name": each.name,
                    "verdict": each.verdict,
                    "num_running": each.num_running,
                    "num_kv_tokens": each.num_kv_tokens,
                    "cost_ns": each.cost.total_ns,
                    "requests_ns": each.cost.requests_ns,
                    "kv_ns": each.cost.kv_ns,
                    "base_ns": each.cost.base_ns,
                    "home_ns": each.cost.home_ns,
                }
                for each in moment.decision.candidates
            ],
        }
    return document
