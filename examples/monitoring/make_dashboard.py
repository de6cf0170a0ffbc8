"""Writes `dashboard.json`, Grafana's picture of dsched: run this file.

Panels are a few lines each here; the JSON around them is Grafana's own form (schema 39, Grafana 10
and later). A test compares the file with what this writes, and every metric in it with the code.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).with_name("dashboard.json")
SOURCE = {"type": "prometheus", "uid": "${source}"}
HEIGHT = 8
NUM_COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """One panel: what it shows, in which unit, and what to look for."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """(PromQL, legend)."""
    help: str
    kind: str = "timeseries"
    width: int = 8


JOB = 'job="$job"'
MODEL = f'{JOB}, model=~"$model"'
POOL = f'{JOB}, pool=~"$pool"'
Query = tuple[str, str]
"""PromQL, legend."""


def rate(metric: str, legend: str, *, by: str = "", labels: str = JOB) -> Query:
    """Per second, summed up."""
    return _over("rate", metric, by=by, labels=labels), legend


def increase(metric: str, legend: str, *, by: str = "", labels: str = JOB) -> Query:
    """How many in the time between two points, summed up."""
    return _over("increase", metric, by=by, labels=labels), legend


def _over(function: str, metric: str, *, by: str, labels: str) -> str:
    group = f" by ({by}) " if by else ""
    return f"sum{group}({function}({metric}{{{labels}}}[$__rate_interval]))"


def now(metric: str, legend: str, *, how: str = "sum", by: str = "", labels: str = JOB) -> Query:
    """The value now, over several `how`."""
    group = f" by ({by}) " if by else ""
    return f"{how}{group}({metric}{{{labels}}})", legend


def share(part: str, whole: str, legend: str, *, labels: str = JOB) -> Query:
    """One metric over another of the same labels."""
    return f"{part}{{{labels}}} / {whole}{{{labels}}}", legend


def balance(metric: str, legend: str) -> Query:
    """Mean over largest of the DP ranks of an engine."""
    mean, largest = (f"{how} by (engine) ({metric}{{{JOB}}})" for how in ("avg", "max"))
    return f"{mean} / {largest}", legend


def quantile(value: float, metric: str, legend: str, *, labels: str = JOB) -> Query:
    """A percentile of a histogram."""
    inner = f"sum by (le) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({value}, {inner})", legend


def quantiles(metric: str, *, labels: str = JOB) -> tuple[Query, ...]:
    """Three percentiles of a histogram, over all models shown."""
    return tuple(
        quantile(value, metric, f"p{int(value * 100)}", labels=labels) for value in (0.5, 0.9, 0.99)
    )


CLIENTS = (
    Panel(
        "Requests",
        "reqps",
        (
            rate("dsched_requests_total", "{{outcome}}", by="outcome", labels=MODEL),
            rate("dsched_requests_refused_total", "refused {{status}}", by="status"),
        ),
        "How requests end. Errors and refusals should be flat at zero.",
    ),
    Panel(
        "Time to first token",
        "s",
        quantiles("dsched_ttft_seconds", labels=MODEL),
        "Arrival to first token. Rises when prompts wait: look at the queue and at KV.",
    ),
    Panel(
        "Time per later token",
        "s",
        quantiles("dsched_itl_seconds", labels=MODEL),
        "As clients see it. Rises with the load of the fullest rank.",
    ),
    Panel(
        "Tokens",
        "none",
        (
            rate("dsched_output_tokens_total", "output/s", labels=MODEL),
            rate("dsched_prompt_tokens_total", "prompt/s", labels=MODEL),
            rate("dsched_cached_prompt_tokens_total", "prompt from cache/s", labels=MODEL),
        ),
        "Counted when a request ends.",
    ),
    Panel(
        "In work",
        "none",
        (
            now("dsched_open_streams", "open {{model}}", by="model", labels=MODEL),
            now("dsched_admission_queue_depth", "held at the router"),
        ),
        "Held requests wait for room on a rank.",
    ),
    Panel(
        "Whole requests",
        "s",
        quantiles("dsched_request_duration_seconds", labels=MODEL),
        "Arrival to the end; long answers are long.",
    ),
)
POOLS = (
    Panel(
        "Running of what may run",
        "percentunit",
        (
            share(
                "dsched_pool_running_requests",
                "dsched_pool_admissible_requests",
                "{{pool}}",
                labels=POOL,
            ),
        ),
        "With room kept as faults.spare says. At 100 % requests are held.",
    ),
    Panel(
        "KV tokens of what may be used",
        "percentunit",
        (
            share(
                "dsched_pool_kv_tokens",
                "dsched_pool_admissible_kv_tokens",
                "{{pool}}",
                labels=POOL,
            ),
        ),
        "At 100 % requests are held.",
    ),
    Panel(
        "Engines by state",
        "none",
        (
            now("dsched_worker_state", "{{state}}", by="state", labels=POOL),
            now("dsched_membership_epoch", "epoch", how="max"),
        ),
        "The epoch rises at each change.",
    ),
    Panel(
        "A group may be lost",
        "bool_yes_no",
        (now("dsched_pool_absorbs_loss", "{{pool}}", how="min", by="pool", labels=POOL),),
        "Yes while the loss of the largest EP group would find room elsewhere.",
        kind="stat",
        width=6,
    ),
    Panel(
        "Balance of the DP ranks",
        "none",
        (
            now("dsched_pool_balance", "pool {{pool}}", how="min", by="pool", labels=POOL),
            balance("dsched_rank_running_requests", "requests {{engine}}"),
            balance("dsched_rank_kv_tokens", "KV {{engine}}"),
        ),
        "Mean over largest; 1 is even. The slowest rank of a group sets its step.",
        width=18,
    ),
)
RANKS = (
    Panel(
        "KV in use",
        "percentunit",
        (
            share(
                "dsched_rank_kv_tokens",
                "dsched_rank_kv_capacity_tokens",
                "{{engine}}/{{dp_rank}}",
            ),
        ),
        "One line a rank; lines apart are imbalance.",
    ),
    Panel(
        "Step time",
        "s",
        ((f"dsched_rank_step_seconds{{{JOB}}}", "{{engine}}/{{dp_rank}}"),),
        "Of the last step; 0 is idle.",
    ),
    Panel(
        "Running and waiting inside engines",
        "none",
        (
            now("dsched_rank_running_requests", "{{engine}}", by="engine"),
            now("dsched_rank_waiting_requests", "waiting {{engine}}", by="engine"),
        ),
        "What waits inside an engine cannot be moved; it should be near zero.",
    ),
    Panel(
        "Attempts sent",
        "reqps",
        (rate("dsched_rank_dispatched_total", "{{engine}}", by="engine"),),
        "By engine.",
    ),
    Panel(
        "Age of load reports",
        "s",
        (
            now("dsched_rank_report_age_seconds", "{{engine}}", how="max", by="engine"),
            (f"sum(dsched_agent_up{{{JOB}}} == bool 0)", "silent agents"),
        ),
        "Above a few seconds routing works with what dsched itself has sent.",
    ),
    Panel(
        "Agents",
        "none",
        (
            now("dsched_agent_features_missing", "missing {{feature}}", by="feature"),
            rate("dsched_agent_messages_total", "messages/s"),
            rate("dsched_reports_dropped_total", "dropped {{reason}}/s", by="reason"),
            rate("dsched_agent_commands_dropped_total", "commands dropped/s"),
        ),
        "Features that engines lack, and messages that nobody could use.",
    ),
)
LOSSES = (
    Panel(
        "Handoffs",
        "none",
        (increase("dsched_handoff_total", "{{outcome}}, {{cause}}", by="outcome, cause"),),
        "Requests that lost their engine. `refuse` cost a client its answer.",
    ),
    Panel(
        "Pause of their clients",
        "s",
        tuple(
            quantile(
                0.99,
                "dsched_handoff_gap_seconds",
                f"p99 {part}",
                labels=f'{JOB}, part="{part}"',
            )
            for part in ("total", "detect", "dispatch", "prefill")
        ),
        "By part: noticing the loss, asking another engine, its first new token.",
    ),
    Panel(
        "Signs of trouble",
        "none",
        (
            now("dsched_handoff_waiting_requests", "wait for re-prefill"),
            rate("dsched_fenced_tokens_total", "late tokens/s"),
            increase("dsched_silent_losses_kept_total", "silent engines kept"),
            rate("dsched_held_up_seconds_total", "dsched held up"),
        ),
        "Each has its line in docs/operations.md.",
    ),
)
ITSELF = (
    Panel(
        "Policies",
        "none",
        (
            rate("dsched_policy_errors_total", "{{policy}} {{reason}}/s", by="policy, reason"),
            rate("dsched_policy_calls_total", "{{policy}} calls/s", by="policy"),
            rate("dsched_policy_seconds_total", "{{policy}} busy", by="policy"),
            increase("dsched_policy_reloads_total", "reload {{outcome}}", by="outcome"),
        ),
        "Failures of policies of your own; the default decided instead.",
    ),
    Panel(
        "Token journal",
        "none",
        (
            now("dsched_journal_durable", "durable", how="min"),
            now("dsched_journal_open_requests", "open requests"),
            now("dsched_journal_pending_requests", "not in the file yet"),
            rate("dsched_journal_recorded_tokens_total", "tokens/s"),
            increase("dsched_journal_write_errors_total", "write errors"),
            increase("dsched_journal_dropped_requests_total", "dropped requests"),
            increase("dsched_journal_fenced_tokens_total", "fenced tokens"),
        ),
        "Not durable: a restart would not find the tokens.",
    ),
    Panel(
        "Registry",
        "none",
        (
            now("dsched_registry_lag_seconds", "seconds without an answer", how="max"),
            now("dsched_registry_instances", "dsched processes", how="max"),
            now("dsched_registry_registered", "registered", how="min"),
            now("dsched_registry_following", "following", how="min"),
            now("dsched_registry_conflicts", "conflicts", how="max"),
            now("dsched_leader", "leaders"),
            now("dsched_leader_epoch", "leader epoch", how="max"),
            increase("dsched_registry_failures_total", "failures"),
            increase("dsched_registry_leases_lost_total", "leases lost"),
        ),
        "Serving goes on without it.",
    ),
    Panel(
        "Processor and memory",
        "none",
        (
            rate("process_cpu_seconds_total", "cores {{instance}}", by="instance"),
            (f"process_resident_memory_bytes{{{JOB}}} / 1e9", "GB {{instance}}"),
            (f"process_open_fds{{{JOB}}} / 1000", "1000 descriptors {{instance}}"),
            now("dsched_live_sample_seconds", "live sample, seconds", how="max"),
        ),
        "dsched is one event loop: near one core it is full; run another one.",
        width=16,
    ),
    Panel(
        "Versions",
        "none",
        (now("dsched_build_info", "{{version}}", how="count", by="version"),),
        "More than one during an upgrade only.",
        kind="stat",
    ),
)
ROWS = (
    ("Clients", CLIENTS),
    ("Pools", POOLS),
    ("DP ranks", RANKS),
    ("Lost engines", LOSSES),
    ("dsched itself", ITSELF),
)


def make_dashboard() -> dict[str, Any]:
    """Return the whole dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        at = {"h": 1, "w": NUM_COLUMNS, "x": 0, "y": y}
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": at, "panels": []}
        )
        y += 1
        x = 0
        for panel in row:
            if x + panel.width > NUM_COLUMNS:
                x, y = 0, y + HEIGHT
            panels.append(_panel(panel, x=x, y=y))
            x += panel.width
        y += HEIGHT
    for number, panel_json in enumerate(panels, start=1):
        panel_json["id"] = number
    return {
        "uid": "dsched",
        "title": "dsched",
        "description": "Load balancing and scheduling for MoE serving; by make_dashboard.py.",
        "tags": ["dsched", "inference"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _panel(panel: Panel, *, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}
    options: dict[str, Any] = {"tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "stat":
        options = {"colorMode": "value", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": expr,
                "legendFormat": name,
            }
            for place, (expr, name) in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    def of_label(name: str, query: str, *, is_multi: bool) -> dict[str, Any]:
        variable: dict[str, Any] = {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": is_multi,
            "includeAll": is_multi,
        }
        if is_multi:
            variable["current"] = {"text": "All", "value": "$__all"}
        return variable

    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        of_label("job", "label_values(dsched_build_info, job)", is_multi=False),
        of_label("model", f"label_values(dsched_open_streams{{{JOB}}}, model)", is_multi=True),
        of_label("pool", f"label_values(dsched_worker_state{{{JOB}}}, pool)", is_multi=True),
    ]


def main() -> None:
    """Write the file."""
    DASHBOARD.write_text(json.dumps(make_dashboard(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
