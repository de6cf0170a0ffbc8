"""Turns the counters of a running dsched into samples, at a scrape. Names: `metrics.catalog`."""

from collections.abc import Iterator, Mapping, Sequence

from dsched.controller import Controller, EngineStatus, HandoffGap, RankStatus
from dsched.controller.spare import UNKNOWN_CAPACITY
from dsched.drivers.keeper import EngineKeeper
from dsched.drivers.kv_follower import KvFollower
from dsched.drivers.reports import ReportReader
from dsched.faults import JournalStatus, MembershipView
from dsched.frontdoor.live_sampler import LiveSampler
from dsched.frontdoor.models import ServedModel
from dsched.frontdoor.stats import FrontDoorStats, LatencyHistogram
from dsched.metrics import Sample
from dsched.plugins import PolicySet
from dsched.registry.member import RegistryMember
from dsched.registry.peer_channel import PeerChannel

NS_PER_S = 1_000_000_000
GAP_PARTS = ("total", "detect", "dispatch", "prefill")
GAP_BOUNDS_NS = tuple(
    ms * 1_000_000
    for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 60_000)
)
STATES = ("up", "suspect", "down", "draining")


def front_door_samples(stats: FrontDoorStats) -> Iterator[Sample]:
    """What clients see."""
    for model, each in stats.per_model.items():
        label = (model,)
        for (api, outcome), count in each.num_requests.items():
            labels = (model, api.value, outcome.value)
            yield Sample(name="dsched_requests_total", value=count, labels=labels)
        yield Sample(name="dsched_open_streams", value=each.num_open, labels=label)
        counters = {
            "dsched_prompt_tokens_total": each.num_prompt_tokens,
            "dsched_cached_prompt_tokens_total": each.num_cached_tokens,
            "dsched_output_tokens_total": each.num_output_tokens,
        }
        for name, count in counters.items():
            yield Sample(name=name, value=count, labels=label)
        yield Sample(name="dsched_ttft_seconds", value=each.ttft, labels=label)
        yield Sample(name="dsched_itl_seconds", value=each.itl, labels=label)
        yield Sample(name="dsched_request_duration_seconds", value=each.duration, labels=label)
    for status, count in stats.num_refused.items():
        yield Sample(name="dsched_requests_refused_total", value=count, labels=(str(status),))


def token_cache_samples(models: Mapping[str, ServedModel]) -> Iterator[Sample]:
    """What of the prompts had been tokenised before."""
    for name, model in models.items():
        cache = model.token_cache
        if cache is None:
            continue
        outcomes = {"hit": cache.num_hit_tokens, "miss": cache.num_missed_tokens}
        for outcome, count in outcomes.items():
            labels = (name, outcome)
            yield Sample(name="dsched_token_cache_tokens_total", value=count, labels=labels)
        yield Sample(name="dsched_token_cache_bytes", value=cache.num_bytes, labels=(name,))


def controller_samples(controller: Controller) -> Iterator[Sample]:
    """Routing, engines and ranks."""
    for outcome, count in sorted(controller.num_prefills.items()):
        yield Sample(name="dsched_prefills_total", value=count, labels=(outcome,))
    yield Sample(name="dsched_admission_queue_depth", value=controller.num_waiting_requests)
    yield Sample(name="dsched_membership_epoch", value=controller.membership.epoch)
    for reason, count in controller.num_reports().items():
        if reason != "applied":
            yield Sample(name="dsched_reports_dropped_total", value=count, labels=(reason,))
    yield from _policy_samples(controller.policies)
    for engine in controller.engine_statuses():
        yield from _engine_samples(engine)


def _policy_samples(policies: PolicySet) -> Iterator[Sample]:
    for name, counts in policies.counts().items():
        yield Sample(name="dsched_policy_calls_total", value=counts.num_calls, labels=(name,))
        busy_s = counts.busy_ns / NS_PER_S
        yield Sample(name="dsched_policy_seconds_total", value=busy_s, labels=(name,))
        for reason, count in counts.num_failures.items():
            labels = (name, reason.value)
            yield Sample(name="dsched_policy_errors_total", value=count, labels=labels)


def reload_samples(num_reloads: Mapping[str, int]) -> Iterator[Sample]:
    """Answers to SIGHUP."""
    for outcome, count in num_reloads.items():
        yield Sample(name="dsched_policy_reloads_total", value=count, labels=(outcome,))


def placement_samples(num_placements: Mapping[str, int]) -> Iterator[Sample]:
    """Expert placements of the leader."""
    for cause, count in num_placements.items():
        yield Sample(name="dsched_placements_total", value=count, labels=(cause,))


def peer_samples(channel: PeerChannel) -> Iterator[Sample]:
    """What other dsched processes say, and are told."""
    yield Sample(name="dsched_peers_heard", value=len(channel.peers))
    for outcome, count in sorted(channel.num_messages.items()):
        yield Sample(name="dsched_peer_messages_total", value=count, labels=(outcome,))


def kv_event_samples(follower: KvFollower) -> Iterator[Sample]:
    """What engines say of their prefix caches."""
    if not follower.has_sources:
        return
    yield Sample(name="dsched_prefix_index_blocks", value=follower.index.num_blocks)
    for outcome, count in sorted(follower.num_batches.items()):
        yield Sample(name="dsched_kv_event_batches_total", value=count, labels=(outcome,))


def local_engine_samples(keepers: Sequence[EngineKeeper]) -> Iterator[Sample]:
    """Engines that were started here."""
    for keeper in keepers:
        for engine_id in keeper.servers:
            yield Sample(
                name="dsched_engine_restarts_total",
                value=keeper.num_restarts,
                labels=(engine_id,),
            )


class FaultStats:
    """Hears what the controller does about lost engines; read at a scrape."""

    def __init__(self) -> None:
        self.gaps = {part: LatencyHistogram(GAP_BOUNDS_NS) for part in GAP_PARTS}
        self.num_membership_changes = 0

    def on_handoff(self, method: str, gap: HandoffGap) -> None:  # noqa: ARG002
        values = (gap.total_ns, gap.detect_ns, gap.dispatch_ns, gap.prefill_ns)
        for part, value_ns in zip(GAP_PARTS, values, strict=True):
            self.gaps[part].observe(value_ns)

    def on_membership_changed(self, view: MembershipView) -> None:  # noqa: ARG002
        self.num_membership_changes += 1


def fault_samples(controller: Controller, faults: FaultStats) -> Iterator[Sample]:
    """Lost engines, and what the pools may run."""
    for (outcome, cause), count in controller.num_handoffs.items():
        yield Sample(name="dsched_handoff_total", value=count, labels=(outcome, cause))
    for part, histogram in faults.gaps.items():
        yield Sample(name="dsched_handoff_gap_seconds", value=histogram, labels=(part,))
    yield Sample(name="dsched_handoff_waiting_requests", value=controller.num_waiting_handoffs)
    yield Sample(name="dsched_held_up_seconds_total", value=controller.held_up_ns / NS_PER_S)
    yield Sample(name="dsched_fenced_tokens_total", value=controller.num_fenced_tokens)
    yield Sample(
        name="dsched_silent_losses_kept_total", value=controller.membership.num_capped_losses
    )
    for pool, (load, plan) in controller.capacities().items():
        values = {
            "dsched_pool_running_requests": load.num_running,
            "dsched_pool_kv_tokens": load.num_kv_tokens,
            "dsched_pool_absorbs_loss": int(plan.absorbs_loss),
        }
        if plan.max_running_requests < UNKNOWN_CAPACITY:
            values["dsched_pool_admissible_requests"] = plan.max_running_requests
        if plan.kv_capacity_tokens < UNKNOWN_CAPACITY:
            values["dsched_pool_admissible_kv_tokens"] = plan.kv_capacity_tokens
        for name, value in values.items():
            yield Sample(name=name, value=value, labels=(pool,))


def _engine_samples(engine: EngineStatus) -> Iterator[Sample]:
    now = engine.state.name.lower()
    for state in STATES:
        labels = (engine.engine_id, engine.pool, state)
        yield Sample(name="dsched_worker_state", value=int(state == now), labels=labels)
    for rank in engine.ranks:
        rank_labels = (engine.engine_id, str(rank.dp_rank))
        for name, value in _rank_values(rank).items():
            if value is not None:
                yield Sample(name=name, value=value, labels=rank_labels)


def _rank_values(rank: RankStatus) -> dict[str, float | None]:
    age_ns = rank.report_age_ns
    return {
        "dsched_rank_running_requests": rank.num_running,
        "dsched_rank_waiting_requests": rank.num_waiting,
        "dsched_rank_kv_tokens": rank.num_kv_tokens,
        "dsched_rank_kv_capacity_tokens": rank.kv_capacity_tokens,
        "dsched_rank_step_seconds": rank.step_ns / NS_PER_S,
        "dsched_rank_time_factor": rank.time_factor,
        "dsched_rank_report_age_seconds": None if age_ns is None else age_ns / NS_PER_S,
        "dsched_rank_dispatched_total": rank.num_dispatched,
    }


def journal_samples(status: JournalStatus) -> Iterator[Sample]:
    """The token journal."""
    values = {
        "dsched_journal_durable": int(status.is_durable),
        "dsched_journal_recorded_tokens_total": status.num_recorded_tokens,
        "dsched_journal_fenced_tokens_total": status.num_fenced_tokens,
        "dsched_journal_open_requests": status.num_open_requests,
        "dsched_journal_pending_requests": status.num_pending_requests,
        "dsched_journal_write_errors_total": status.num_write_errors,
        "dsched_journal_dropped_requests_total": status.num_dropped_requests,
    }
    for name, value in values.items():
        yield Sample(name=name, value=value)


def reader_samples(reader: ReportReader) -> Iterator[Sample]:
    """Agents as they are heard, and their messages before anybody looks at what they say."""
    for agent in reader.agents():
        labels = (agent.rank_id.engine_id, str(agent.rank_id.dp_rank))
        yield Sample(name="dsched_agent_up", value=int(agent.is_heard), labels=labels)
        for feature in agent.missing:
            name = "dsched_agent_features_missing"
            yield Sample(name=name, value=1, labels=(*labels, feature))
    yield Sample(name="dsched_agent_messages_total", value=reader.num_received)
    yield Sample(name="dsched_agent_commands_dropped_total", value=reader.num_commands_dropped)
    for reason, count in sorted(reader.drops.items()):
        yield Sample(name="dsched_reports_dropped_total", value=count, labels=(f"reader_{reason}",))


def live_samples(live: LiveSampler) -> Iterator[Sample]:
    """What the live picture costs, and what only it works out."""
    yield Sample(name="dsched_live_sample_seconds", value=live.cost_ns / NS_PER_S)
    for pool in live.snapshot.pools if live.snapshot is not None else ():
        if pool.balance is not None:
            yield Sample(name="dsched_pool_balance", value=pool.balance, labels=(pool.name,))


def registry_samples(member: RegistryMember, *, now_ns: int) -> Iterator[Sample]:
    """How this process is known to others, and who leads."""
    status = member.registration.status()
    yield Sample(name="dsched_registry_registered", value=int(status.is_registered))
    if status.renewed_ns is not None:
        lag_s = (now_ns - status.renewed_ns) / NS_PER_S
        yield Sample(name="dsched_registry_lag_seconds", value=lag_s)
    yield Sample(name="dsched_registry_failures_total", value=status.num_failures)
    yield Sample(name="dsched_registry_leases_lost_total", value=status.num_leases_lost)
    yield Sample(name="dsched_registry_following", value=int(member.cluster.is_following))
    view = member.cluster.workers()
    yield Sample(name="dsched_registry_instances", value=len(view.instances))
    yield Sample(name="dsched_registry_conflicts", value=len(view.conflicts))
    yield Sample(name="dsched_leader", value=int(member.election.epoch_now() is not None))
    if member.election.leader is not None:
        yield Sample(name="dsched_leader_epoch", value=member.election.leader.epoch)
