"""A story for people: at most 80 columns, read at night over ssh.

Each line begins with the time since the request arrived. Costs are modelled step times of a rank
after it took the request (`docs/routing.md`), in milliseconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from textwrap import wrap

from dsched.routing import RoutingReason
from dsched.trace.candidates import Candidate
from dsched.trace.records import (
    Arrived,
    Booked,
    Changed,
    Dropped,
    Ended,
    FirstToken,
    HandedOff,
    Header,
    Held,
    Lost,
    Picked,
    Preferred,
    PrefillChosen,
    Prefilled,
    Rationed,
    Recovered,
    Refused,
    Released,
    Stepped,
)
from dsched.trace.story import Decision, Moment, Story
from dsched.trace.view import prefill_view

WIDTH = 80
TIME_WIDTH = 12
"""Columns of the time and the space after it."""
MAX_SHOWN_CANDIDATES = 6
MAX_SHOWN_NAMES = 8
MS = 1_000_000
SECOND = 1_000_000_000

LAYERS = {
    "socket": "its connection broke",
    "progress": "neither a token nor a step in time",
    "stream": "no token for this request while its engine went on",
    "group": "its EP group was lost",
    "rank": "its DP rank was lost while the engine answers",
    "busy": "the engine is alive and had no room",
    "drain": "an operator drains the engine",
    "restart": "dsched itself was restarted, and the client asked again",
}
"""What noticed a loss, by layer."""

REASONS = {
    RoutingReason.LEAST_COST: "least cost of {count} with room",
    RoutingReason.HOLD_EXPIRED: "waited too long: least cost of all that are up, room or not",
    RoutingReason.SUSPECT_ONLY: "no rank is up: least cost of the suspect ones",
    RoutingReason.QUEUED: "no rank has room now",
    RoutingReason.TOO_LARGE: "no rank's KV could ever hold it",
    RoutingReason.NO_RANK_UP: "no rank may be used",
    RoutingReason.NO_SUCH_RANK: "no rank has the pinned number",
}

PREFILL_REASONS = {
    "least_finish": "done soonest in its group",
    "spilled": "its own group would be done much later",
}

METHODS = {
    "finish": "the answer was complete, only its end was missing",
    "restart": "the same request again: no token was out",
    "continue": "prompt and emitted tokens become the next prompt",
    "replay": "the same request again, checked against what the client has",
    "refuse": "cannot be continued honestly",
}


def as_text(story: Story, header: Header | None = None) -> str:
    """Write a story. `header` gives the time of day, where it is real."""
    start_ns = story.moments[0].record.time_ns
    first = story.moments[0].record
    if isinstance(first, Arrived):
        start_ns = first.arrival_ns
    lines = list(_head(story, start_ns, header))
    membership = story.membership_before
    for number, moment in enumerate(story.moments):
        before = story.moments[number - 1] if number else None
        details: Iterable[str] = ()
        if isinstance(moment.record, Changed):
            text = _told_membership(moment.record, membership)
            membership = moment.record
        else:
            text, details = _told(moment, before, start_ns)
        if text:
            lines += _entry(moment.record.time_ns - start_ns, text)
            lines += [" " * TIME_WIDTH + detail for detail in details]
    if not story.has_end:
        lines.append("It has not ended yet.")
    return "\n".join(lines) + "\n"


def _head(story: Story, start_ns: int, header: Header | None) -> Iterator[str]:
    yield f"request {story.request_id}"
    if header is not None and header.wall_s:
        seconds = header.wall_s + (start_ns - header.clock_ns) / SECOND
        moment = datetime.fromtimestamp(seconds, tz=UTC)
        yield f"arrived {moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d} UTC"
    else:
        kind = f" ({header.source})" if header is not None else ""
        yield f"arrived at {start_ns / SECOND:.6f} s of the trace's clock{kind}"
    if not story.has_start:
        yield "The trace no longer has its beginning."
    yield from wrap(summary(story, start_ns), WIDTH)
    yield ""


def summary(story: Story, start_ns: int) -> str:
    """The story in one line: the way, the end, and what the client felt."""
    way: list[str] = []
    gaps_ns: list[int] = []
    parts = []
    for moment in story.moments:
        record = moment.record
        if isinstance(record, Booked):
            way.append(f"{record.engine_id}/{record.dp_rank}")
        elif isinstance(record, FirstToken):
            parts.append(f"TTFT {_ms(record.time_ns - start_ns)}")
        elif isinstance(record, HandedOff):
            gaps_ns.append(record.detect_ns + record.dispatch_ns + record.prefill_ns)
        elif isinstance(record, Ended | Refused):
            parts.append(_told_end(record) if isinstance(record, Ended) else "refused")
    if gaps_ns:
        parts.append(f"longest gap {_ms(max(gaps_ns))}")
    return "; ".join([" -> ".join(way) or "no rank", *parts])


def _entry(time_ns: int, text: str) -> list[str]:
    """The time, and the text beside it, wrapped."""
    lines = wrap(text, WIDTH - TIME_WIDTH, break_long_words=True) or [""]
    return [
        f"{since(time_ns):>{TIME_WIDTH - 2}}  {lines[0]}",
        *(" " * TIME_WIDTH + line for line in lines[1:]),
    ]


def since(time_ns: int) -> str:
    """A time after the arrival.

    >>> since(41_260_000), since(12_345_678_900)
    ('+41.3 ms', '+12.346 s')
    """
    if abs(time_ns) < SECOND:
        return f"{time_ns / MS:+.1f} ms"
    return f"{time_ns / SECOND:+.3f} s"


def _ms(time_ns: float) -> str:
    """A duration that is as exact as it has to be.

    >>> _ms(41_260_000), _ms(170_900), _ms(3_012_000_000)
    ('41.3 ms', '0.171 ms', '3.012 s')
    """
    if time_ns == 0:
        return "0 ms"
    if abs(time_ns) >= SECOND:
        return f"{time_ns / SECOND:,.3f} s"
    return f"{time_ns / MS:.1f} ms" if abs(time_ns) >= 10 * MS else f"{time_ns / MS:.3f} ms"


def _told(moment: Moment, before: Moment | None, start_ns: int) -> tuple[str, Iterable[str]]:
    """The text of one moment, and lines below it."""
    record = moment.record
    if isinstance(record, Picked):
        return f"router: {_choice(record, moment.decision)}", _table(moment.decision)
    if isinstance(record, Released):
        waited = _ms(record.time_ns - record.held_ns)
        text = f"waited {waited} at the router; now {_choice(record, moment.decision)}"
        return text, _table(moment.decision)
    if isinstance(record, PrefillChosen):
        return _prefill_choice(record), _prefill_table(record)
    if isinstance(record, Held):
        return _told_held(record, before), ()
    if isinstance(record, Dropped):
        return ("" if record.is_served else "waits no longer"), ()
    if isinstance(record, Arrived):
        return _told_arrival(record), ()
    if isinstance(record, FirstToken):
        return f"first token: TTFT {_ms(record.time_ns - start_ns)}", ()
    return _told_fact(record), ()


def _told_fact(record: object) -> str:
    """Facts and decisions that one line says."""
    match record:
        case Refused():
            return f"refused: {record.code} (model {record.model})"
        case Preferred():
            if record.policy is None:
                return "policy: none had a preference, the router's choice stands"
            return f"policy {record.policy} chose among the ranks with room"
        case Booked():
            return (
                f"attempt {record.number} goes to {record.engine_id}/{record.dp_rank} with "
                f"{record.num_prompt_tokens:,} prompt tokens (epoch {record.epoch})"
            )
        case Prefilled():
            return (
                f"its prompt goes to {record.engine_id}/{record.dp_rank}: {_ms(record.work_ns)} of "
                f"work, done in about {_ms(record.finish_ns)}"
            )
        case Stepped():
            return (
                f"step {record.step} of {record.engine_id}/{record.dp_rank}: "
                f"{record.num_step_tokens:,} tokens in {_ms(record.step_ns)}, "
                f"{record.num_left_tokens:,} prompt tokens left there"
            )
        case Lost():
            layer = LAYERS.get(record.layer, record.layer)
            return (
                f"LOST {record.engine_id} after {record.num_output_tokens:,} tokens. Detection "
                f"layer {record.layer} ({layer}): {record.reason}"
            )
        case Recovered():
            return (
                f"goes on by {record.method}: {METHODS.get(record.method, record.method)}; "
                f"the client is told: {record.guarantee}"
            )
        case Rationed():
            return _told_ration(record)
        case HandedOff():
            total = record.detect_ns + record.dispatch_ns + record.prefill_ns
            return (
                f"handed off: the client saw a gap of {_ms(total)} = "
                f"detect {_ms(record.detect_ns)} + dispatch {_ms(record.dispatch_ns)} + "
                f"prefill {_ms(record.prefill_ns)}"
            )
        case Ended():
            return _told_end(record)
    return ""


def _told_membership(record: Changed, before: Changed | None) -> str:
    """What is different from the change before."""
    old = {} if before is None else {group[0]: group for group in before.groups}
    new = {group[0]: group for group in record.groups}
    parts = [
        f"EP group {name} is {state}" + (f" ({reason})" if reason else "")
        for name, _, state, reason in record.groups
        if old.get(name) != new[name]
    ]
    parts += [f"EP group {name} is up" for name in old if name not in new]
    return f"cluster, epoch {record.epoch}: {'; '.join(parts) or 'EP groups are as before'}"


def _told_arrival(record: Arrived) -> str:
    text = (
        f"arrived for pool {record.pool}: {record.num_prompt_tokens:,} prompt tokens, at most "
        f"{record.max_tokens:,} out"
    )
    if record.tenant:
        text += f", tenant {record.tenant}"
    if record.priority:
        text += f", priority {record.priority}"
    return text


def _told_held(record: Held, before: Moment | None) -> str:
    if not record.is_accepted:
        return "refused: too many requests wait at the router already"
    if before is not None and isinstance(before.record, Picked) and before.record.rank is not None:
        if before.decision is not None and before.decision.num_held == 0:
            return "waits at the router: what is free is kept for the loss of an EP group"
        return "waits at the router: others wait already and go first"
    return "waits at the router for the first room anywhere"


def _told_ration(record: Rationed) -> str:
    limit = record.tokens_per_rank
    allowed = (
        "no limit"
        if limit is None
        else f"at most {limit * max(1, record.num_ranks_up):,} on {record.num_ranks_up} ranks"
    )
    return (
        f"ration of re-prefill: {len(record.released)} of {len(record.waiting)} lost requests go "
        f"now ({record.num_tokens_under_way:,} tokens under way, {allowed})"
    )


def _told_end(record: Ended) -> str:
    text = f"ended: {record.outcome}" + (f" ({record.code})" if record.code else "")
    text += f" after {record.num_output_tokens:,} tokens"
    if record.num_handoffs:
        times = "once" if record.num_handoffs == 1 else f"{record.num_handoffs} times"
        text += f", handed off {times}, guarantee {record.guarantee}"
    return text


def _choice(record: Picked | Released, decision: Decision | None) -> str:
    reason = REASONS[RoutingReason(record.reason)].format(count=record.num_eligible)
    if record.rank is None:
        return reason
    name = f"rank {record.rank}" if decision is None else str(decision.chosen)
    text = f"{name}, {reason}"
    if decision is None:
        return text
    if decision.num_tied:
        others = "1 other" if decision.num_tied == 1 else f"{decision.num_tied} others"
        return f"{text}; {others} cost the same, it was its turn"
    if decision.margin_ns is None:
        return f"{text}; there was no other"
    second = next(each for each in decision.eligible if each.name != decision.chosen)
    margin = f"{_ms(abs(decision.margin_ns))}"
    if decision.margin_ns < 0:
        return f"{text}; {second.name} was {margin} cheaper but is kept for larger ones"
    share = decision.margin_ns / max(1e-9, second.cost.total_ns - decision.margin_ns)
    return f"{text}; next best {second.name} is {margin} ({share:.1%}) dearer"


def _prefill_choice(record: PrefillChosen) -> str:
    """The chosen prefill worker, and how much later the next would have been done."""
    if record.worker is None:
        return f"prefill: no worker is up (length bucket {record.bucket})"
    name = record.workers[record.worker]
    why = PREFILL_REASONS.get(record.reason, record.reason)
    text = f"prefill: {name}, length bucket {record.bucket}, {why}"
    others = [finish for worker, finish in _finish_times(record) if worker != record.worker]
    if not others:
        return f"{text}; there was no other"
    if min(others) == record.finish_ns:
        return f"{text}; others would be done as soon, it was its turn"
    return f"{text}; the next best ends {_ms(abs(min(others) - record.finish_ns))} " + (
        "later" if min(others) > record.finish_ns else "sooner, in another group"
    )


def _finish_times(record: PrefillChosen) -> list[tuple[int, int]]:
    """(worker, finish time) of those that could be chosen, soonest first."""
    view = prefill_view(record)
    best = view.states.min() if len(view.states) else 0
    finish = view.backlog_ns + view.work_ns
    usable = [worker for worker in range(len(finish)) if view.states[worker] == best]
    times = ((worker, int(finish[worker])) for worker in usable)
    return sorted(times, key=lambda each: (each[1], each[0] != record.worker))


def _prefill_table(record: PrefillChosen) -> Iterator[str]:
    view = prefill_view(record)
    times = _finish_times(record)
    if times:
        yield f"  {'worker':<16}{'bucket':>8}{'queue ms':>12}{'work ms':>10}{'end ms':>10}"
    for worker, finish_ns in times[:MAX_SHOWN_CANDIDATES]:
        mark = ">" if worker == record.worker else " "
        yield (
            f"{mark} {_cut(record.workers[worker], 16):<16}{int(view.worker_bucket[worker]):>8}"
            f"{view.backlog_ns[worker] / MS:>12,.1f}{view.work_ns[worker] / MS:>10,.1f}"
            f"{finish_ns / MS:>10,.1f}"
        )
    if len(times) > MAX_SHOWN_CANDIDATES:
        yield f"  and {len(times) - MAX_SHOWN_CANDIDATES} more, up to {times[-1][1] / MS:,.1f}"


def _table(decision: Decision | None) -> Iterator[str]:
    if decision is None:
        return
    eligible = decision.eligible
    if eligible:
        yield f"  {'rank':<16}{'running':>8}{'KV tokens':>12}{'cost ms':>10} = requests + KV"
    shown = _shown_of(eligible, decision.chosen)
    for candidate in shown:
        mark = ">" if candidate.name == decision.chosen else " "
        terms = candidate.cost
        base = f" + base {terms.base_ns / MS:.3f}" if terms.base_ns else ""
        home = f" + home {terms.home_ns / MS:.3f}" if terms.home_ns else ""
        yield (
            f"{mark} {_cut(candidate.name, 16):<16}{candidate.num_running:>8,}"
            f"{candidate.num_kv_tokens:>12,}{terms.total_ns / MS:>10.3f}"
            f" = {terms.requests_ns / MS:.3f} + {terms.kv_ns / MS:.3f}{base}{home}"
        )
    if len(eligible) > len(shown):
        dearest = max(each.cost.total_ns for each in eligible) / MS
        yield f"  and {len(eligible) - len(shown)} more, up to {dearest:.3f}"
    yield from _left_out(decision.candidates)


def _shown_of(eligible: Sequence[Candidate], chosen: str | None) -> list[Candidate]:
    """The cheapest few, and the chosen one if it is not among them."""
    shown = list(eligible[:MAX_SHOWN_CANDIDATES])
    return shown + [each for each in eligible[MAX_SHOWN_CANDIDATES:] if each.name == chosen]


def _left_out(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Ranks that were no candidates, by reason."""
    by_verdict: dict[str, list[str]] = {}
    for candidate in candidates:
        if not candidate.is_eligible:
            by_verdict.setdefault(candidate.verdict, []).append(candidate.name)
    for verdict, names in by_verdict.items():
        more = len(names) - MAX_SHOWN_NAMES
        text = f"out, {verdict}: {', '.join(names[:MAX_SHOWN_NAMES])}"
        text += f" and {more} more" if more > 0 else ""
        for number, line in enumerate(wrap(text, WIDTH - TIME_WIDTH - 4)):
            yield ("  " if number == 0 else "    ") + line


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else "…" + name[len(name) - width + 1 :]
