"""Reads the parts of a running dsched: as metrics for a scrape, and as rows for the registry.

Every function is called now and then (a scrape, once a second), never while tokens flow.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from dsched.clock import Clock
from dsched.controller.controller import Controller, EngineStatus, RankStatus
from dsched.drivers.reports import ReportReader
from dsched.faults import TokenJournal
from dsched.frontdoor.stats import FrontDoorStats
from dsched.ids import EngineId
from dsched.metrics import Sample
from dsched.registry import EngineRow, RankRow, RankStateName, Registration
from dsched.routing import RankState

NS_PER_S = 1_000_000_000

STATE_NAMES: Mapping[RankState, RankStateName] = {
    RankState.UP: "up",
    RankState.SUSPECT: "suspect",
    RankState.DRAINING: "draining",
    RankState.DOWN: "down",
}


def front_door_samples(stats: FrontDoorStats) -> Iterator[Sample]:
    """Yield what clients see."""
    for model, counts in stats.per_model.items():
        labels = (model,)
        for (api, outcome), number in sorted(counts.num_requests.items()):
            yield Sample(
                name="dsched_requests_total",
                value=number,
                labels=(model, api.value, outcome.value),
            )
        yield Sample(name="dsched_open_streams", value=counts.num_open, labels=labels)
        for name, value in (
            ("dsched_prompt_tokens_total", counts.num_prompt_tokens),
            ("dsched_cached_prompt_tokens_total", counts.num_cached_tokens),
            ("dsched_output_tokens_total", counts.num_output_tokens),
        ):
            yield Sample(name=name, value=value, labels=labels)
        yield Sample(name="dsched_ttft_seconds", value=counts.ttft, labels=labels)
        yield Sample(name="dsched_itl_seconds", value=counts.itl, labels=labels)
        yield Sample(name="dsched_request_duration_seconds", value=counts.duration, labels=labels)
    for status, number in sorted(stats.num_refused.items()):
        yield Sample(name="dsched_requests_refused_total", value=number, labels=(str(status),))


def controller_samples(controller: Controller) -> Iterator[Sample]:
    """Yield what the controller knows of requests, engines and DP ranks."""
    yield Sample(name="dsched_admission_queue_depth", value=controller.num_waiting_requests)
    yield Sample(name="dsched_membership_epoch", value=controller.cluster.epoch)
    for method, number in sorted(controller.num_recoveries.items()):
        yield Sample(name="dsched_handoff_total", value=number, labels=(method.value,))
    for engine in controller.engine_statuses():
        for state, name in STATE_NAMES.items():
            yield Sample(
                name="dsched_worker_state",
                value=int(engine.state is state),
                labels=(engine.engine_id, engine.pool, name),
            )
        for rank in engine.ranks:
            yield from _rank_samples(engine.engine_id, rank)


def _rank_samples(engine_id: EngineId, rank: RankStatus) -> Iterator[Sample]:
    values: dict[str, float | None] = {
        "dsched_rank_running_requests": rank.num_running,
        "dsched_rank_waiting_requests": rank.num_waiting,
        "dsched_rank_kv_tokens": rank.num_kv_tokens,
        "dsched_rank_kv_capacity_tokens": rank.kv_capacity_tokens,
        "dsched_rank_step_seconds": rank.step_ns / NS_PER_S,
        "dsched_rank_report_age_seconds": (
            rank.report_age_ns / NS_PER_S if rank.report_age_ns is not None else None
        ),
        "dsched_rank_dispatched_total": rank.num_dispatched,
    }
    for name, value in values.items():
        if value is not None:
            yield Sample(name=name, value=value, labels=(engine_id, str(rank.dp_rank)))


def report_samples(controller: Controller, reader: ReportReader | None) -> Iterator[Sample]:
    """Yield what became of load reports: at the socket, then in the controller's ledger."""
    dropped: Counter[str] = Counter(controller.num_reports())
    del dropped["applied"]
    if reader is not None:
        yield Sample(name="dsched_agent_messages_total", value=reader.num_received)
        yield Sample(name="dsched_agent_commands_dropped_total", value=reader.num_commands_dropped)
        dropped.update(reader.drops)  # adds; some reasons exist in both places
    for reason, number in sorted(dropped.items()):
        yield Sample(name="dsched_reports_dropped_total", value=number, labels=(reason,))


def journal_samples(journal: TokenJournal) -> Iterator[Sample]:
    """Yield how the token journal keeps up."""
    status = journal.status()
    for name, value in (
        ("dsched_journal_durable", int(status.is_durable)),
        ("dsched_journal_recorded_tokens_total", status.num_recorded_tokens),
        ("dsched_journal_fenced_tokens_total", status.num_fenced_tokens),
        ("dsched_journal_open_requests", status.num_open_requests),
        ("dsched_journal_pending_requests", status.num_pending_requests),
        ("dsched_journal_write_errors_total", status.num_write_errors),
        ("dsched_journal_dropped_requests_total", status.num_dropped_requests),
    ):
        yield Sample(name=name, value=value)


def registration_samples(registration: Registration, *, clock: Clock) -> Iterator[Sample]:
    """Yield whether the registry knows this process."""
    status = registration.status()
    yield Sample(name="dsched_registry_registered", value=int(status.is_registered))
    if status.renewed_ns is not None:
        lag_s = (clock.now_ns() - status.renewed_ns) / NS_PER_S
        yield Sample(name="dsched_registry_lag_seconds", value=lag_s)
    yield Sample(name="dsched_registry_failures_total", value=status.num_failures)
    yield Sample(name="dsched_registry_leases_lost_total", value=status.num_leases_lost)


def engine_rows(controller: Controller, *, urls: Mapping[EngineId, str]) -> tuple[EngineRow, ...]:
    """Return every engine with its ranks, as the registry and `/admin/v1/workers` show them."""
    return tuple(
        _engine_row(status, urls.get(status.engine_id)) for status in controller.engine_statuses()
    )


def _engine_row(status: EngineStatus, url: str | None) -> EngineRow:
    state = STATE_NAMES[status.state]
    return EngineRow(
        engine_id=status.engine_id,
        pool=status.pool,
        kind=status.kind,
        model=status.model,
        state=state,
        url=url,
        reason=status.reason or None,
        ranks=tuple(
            RankRow(
                dp_rank=rank.dp_rank,
                state=state,
                num_running=rank.num_running,
                num_waiting=rank.num_waiting,
                num_kv_tokens=rank.num_kv_tokens,
                kv_capacity_tokens=rank.kv_capacity_tokens,
                step_ns=rank.step_ns,
                report_age_ns=rank.report_age_ns,
            )
            for rank in status.ranks
        ),
    )
