"""Every metric of dsched: name, kind, labels, meaning. `docs/operations.md` lists the same.

Names follow Prometheus: base units, `_total` for counters. Label values are bounded by the
configuration (models, pools, engines) or by code (outcomes, reasons); never a request id, a prompt
or anything else that a client chooses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class MetricKind(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    """Only rises."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, help: str, *labels: str) -> Metric:  # noqa: A002 - Prometheus' word
    return Metric(name=name, kind=MetricKind.COUNTER, help=help, labels=labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:  # noqa: A002
    return Metric(name=name, kind=MetricKind.GAUGE, help=help, labels=labels)


def _histogram(name: str, help: str, *labels: str) -> Metric:  # noqa: A002
    return Metric(name=name, kind=MetricKind.HISTOGRAM, help=help, labels=labels)


_METRICS = (
    _gauge("dsched_build_info", "Always 1; the version is a label.", "version"),
    # What clients see.
    _counter(
        "dsched_requests_total", "Ended requests, by how they ended.", "model", "api", "outcome"
    ),
    _counter(
        "dsched_requests_refused_total",
        "Requests refused before they reached a model, by HTTP status.",
        "status",
    ),
    _gauge("dsched_open_streams", "Requests in work.", "model"),
    _counter("dsched_prompt_tokens_total", "Prompt tokens of accepted requests.", "model"),
    _counter(
        "dsched_cached_prompt_tokens_total", "Prompt tokens that came from prefix reuse.", "model"
    ),
    _counter(
        "dsched_token_cache_tokens_total",
        "Prompt tokens that were looked for in the token cache, by whether they were there.",
        "model",
        "outcome",
    ),
    _gauge("dsched_token_cache_bytes", "Memory that the token cache uses.", "model"),
    _counter("dsched_output_tokens_total", "Tokens sent to clients.", "model"),
    _histogram(
        "dsched_ttft_seconds",
        "Arrival of a request to its first token; counted when it is there.",
        "model",
    ),
    _histogram("dsched_itl_seconds", "Time per later token, as the client sees it.", "model"),
    _histogram("dsched_request_duration_seconds", "Arrival of a request to its end.", "model"),
    # Routing.
    _gauge("dsched_admission_queue_depth", "Requests that wait at the router for a rank."),
    _counter("dsched_policy_calls_total", "Questions to a policy of an operator.", "policy"),
    _counter("dsched_policy_seconds_total", "Time inside a policy of an operator.", "policy"),
    _counter(
        "dsched_policy_reloads_total",
        "Times SIGHUP was answered, by whether new policies were loaded or the old ones kept.",
        "outcome",
    ),
    _counter(
        "dsched_policy_errors_total",
        "Times a policy of an operator failed and the default decided, by reason.",
        "policy",
        "reason",
    ),
    # Separate pools.
    _counter(
        "dsched_prefills_total",
        "Prompts of separate pools by what became of them: `remote` (a prefill engine computed "
        "it), `short` (left to the decode rank), `no_worker`, `failed` (the half was lost or "
        "refused), `expired` (its KV was too old), `transfer_failed` (its KV did not arrive), "
        "`missed` (the decode engine did not find it and computed the prompt).",
        "outcome",
    ),
    _gauge(
        "dsched_prefix_index_blocks",
        "KV blocks that prefill engines are known to have cached, summed over their ranks.",
    ),
    _counter(
        "dsched_kv_event_batches_total",
        "Messages about KV caches by what became of them: `applied`, `repeated`, `gap` (one before "
        "it is missing), `restarted`, `given_up` (what is missing cannot be had), `unreadable`.",
        "outcome",
    ),
    # Lost engines.
    _counter(
        "dsched_handoff_total",
        "Requests that lost their engine, by what was done with them and why it was needed.",
        "outcome",
        "cause",
    ),
    _histogram(
        "dsched_handoff_gap_seconds",
        "Pause that a lost engine made in an answer: in total, until the loss was noticed, until "
        "another engine was asked, until its first new token.",
        "part",
    ),
    _gauge(
        "dsched_handoff_waiting_requests",
        "Requests that lost their engine and wait for the ration of prompts computed again.",
    ),
    _counter(
        "dsched_held_up_seconds_total",
        "Time in which dsched itself did not run while requests did; freezes are noticed so much "
        "later.",
    ),
    _counter(
        "dsched_fenced_tokens_total",
        "Tokens of attempts that were over when they came, dropped before the journal.",
    ),
    _counter(
        "dsched_silent_losses_kept_total",
        "Engines kept although silent, because silence alone takes down half of a pool at most.",
    ),
    _gauge("dsched_pool_running_requests", "Requests that run in a pool.", "pool"),
    _gauge("dsched_pool_kv_tokens", "KV tokens in use in a pool.", "pool"),
    _gauge(
        "dsched_pool_admissible_requests",
        "Requests that a pool may run, with room kept as `faults.spare` says.",
        "pool",
    ),
    _gauge(
        "dsched_pool_admissible_kv_tokens",
        "KV tokens that a pool may use, with room kept as `faults.spare` says.",
        "pool",
    ),
    _gauge(
        "dsched_pool_absorbs_loss",
        "1 while the loss of the pool's largest EP group would find room elsewhere.",
        "pool",
    ),
    _gauge(
        "dsched_pool_balance",
        "Mean load of a pool's DP ranks over the largest, as routing prices it; 1 is even, missing "
        "while nothing runs.",
        "pool",
    ),
    # Engines and ranks.
    _gauge(
        "dsched_worker_state",
        "1 for the state an engine is in, 0 for the others.",
        "engine",
        "pool",
        "state",
    ),
    _counter(
        "dsched_engine_restarts_total",
        "Times that an engine which dsched started itself was started again after its end.",
        "engine",
    ),
    _gauge("dsched_membership_epoch", "Rises at each change of the live engines."),
    _gauge("dsched_rank_running_requests", "Requests running on a DP rank.", "engine", "dp_rank"),
    _gauge(
        "dsched_rank_waiting_requests",
        "Requests waiting inside the engine for a DP rank.",
        "engine",
        "dp_rank",
    ),
    _gauge("dsched_rank_kv_tokens", "KV tokens in use on a DP rank.", "engine", "dp_rank"),
    _gauge("dsched_rank_kv_capacity_tokens", "KV tokens a DP rank holds.", "engine", "dp_rank"),
    _gauge("dsched_rank_step_seconds", "Duration of a DP rank's last step.", "engine", "dp_rank"),
    _gauge(
        "dsched_rank_time_factor",
        "Step time of a DP rank's engine over that of its pool's middle engine at the same load, "
        "as routing prices it; 1 while no difference is sure.",
        "engine",
        "dp_rank",
    ),
    _gauge(
        "dsched_rank_report_age_seconds",
        "Age of a DP rank's last load report; missing before the first.",
        "engine",
        "dp_rank",
    ),
    _counter("dsched_rank_dispatched_total", "Attempts sent to a DP rank.", "engine", "dp_rank"),
    # Load reports of the agents inside engines.
    _gauge(
        "dsched_agent_up",
        "1 while a DP rank's agent is heard; 0 after three silent seconds or a goodbye.",
        "engine",
        "dp_rank",
    ),
    _gauge(
        "dsched_agent_features_missing",
        "1 for each feature that a DP rank's agent could not attach or has lost.",
        "engine",
        "dp_rank",
        "feature",
    ),
    _counter("dsched_agent_messages_total", "Messages received from agents."),
    _counter("dsched_agent_commands_dropped_total", "Commands to agents that were not connected."),
    _counter("dsched_reports_dropped_total", "Load reports dropped, by reason.", "reason"),
    # The token journal.
    _gauge(
        "dsched_journal_durable",
        "1 while a restarted dsched would find the tokens, up to the flush interval.",
    ),
    _counter("dsched_journal_recorded_tokens_total", "Tokens recorded before their client."),
    _counter(
        "dsched_journal_fenced_tokens_total", "Tokens dropped because their attempt was over."
    ),
    _gauge("dsched_journal_open_requests", "Requests in the journal without an end."),
    _gauge("dsched_journal_pending_requests", "Requests with something not yet in the file."),
    _counter("dsched_journal_write_errors_total", "Failed writes of the journal's file."),
    _counter("dsched_journal_dropped_requests_total", "Requests whose end never reached the file."),
    # The live picture.
    _gauge(
        "dsched_live_sample_seconds",
        "Time on the event loop that the last sample for `dsched top` and the web page took.",
    ),
    # The registry.
    _gauge(
        "dsched_registry_registered",
        "1 while the registry knows this process: its lease lives and every entry was written, if "
        "not yet the last load.",
    ),
    _gauge("dsched_registry_lag_seconds", "Time since the registry last answered."),
    _counter("dsched_registry_failures_total", "Failed calls of the registry."),
    _counter("dsched_registry_leases_lost_total", "Leases that ran out while dsched was alive."),
    _gauge("dsched_registry_following", "1 while changes by other processes are heard."),
    _gauge("dsched_registry_instances", "dsched processes in the registry, this one included."),
    _gauge("dsched_peers_heard", "Other dsched processes that tell this one what they booked."),
    _counter(
        "dsched_peer_messages_total",
        "Messages between dsched processes by what became of them: `sent`, `unsent`, `applied`, "
        "`old`, `malformed`, `version` or `foreign`.",
        "outcome",
    ),
    _gauge("dsched_registry_conflicts", "Engine ids that processes use for different engines."),
    _counter(
        "dsched_placements_total",
        "Expert placements that this process commanded as the leader, by what made it necessary.",
        "cause",
    ),
    _gauge("dsched_leader", "1 while this process is the one that may rebalance."),
    _gauge("dsched_leader_epoch", "Epoch of the leader heard of last; rises with every new one."),
)

CATALOG: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _METRICS})
"""Every metric, by name."""
