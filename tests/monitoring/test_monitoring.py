"""Dashboard and alert rules: valid, firing for their cause, and about metrics that exist."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from dsched.frontdoor.stats import LatencyHistogram
from dsched.metrics import CATALOG, MetricsExporter, Sample
from dsched.metrics.catalog import MetricKind

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
OPERATIONS = ROOT / "docs" / "operations.md"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
METRIC = re.compile(r"\b(dsched_[a-z_]+)\b(?:\{([^}]*)\})?")
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool; on Debian: apt-get install prometheus"
)


def run_promtool(*args: str) -> None:
    done = subprocess.run(
        ["promtool", *args], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_dashboard", FOLDER / "make_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@promtool
def test_rules_are_valid() -> None:
    """By Prometheus' own check, as part of a whole configuration."""
    run_promtool("check", "rules", "alerts.yaml")
    run_promtool("check", "config", "prometheus.yaml")


@promtool
def test_rules_fire_for_their_cause() -> None:
    """And none of those that could on a quiet cluster."""
    run_promtool("test", "rules", "alerts_test.yaml")


def test_every_rule_is_tested() -> None:
    """Each fires in one of promtool's tests with its own text."""
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }

    assert {rule["alert"] for rule in ALERTS} == fired


@promtool
def test_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    """As recording rules, with Grafana's variables filled in."""
    filled = [
        expr.replace("$__rate_interval", "1m").replace("$job", "j").replace("$model", ".*")
        for expr in dashboard_queries()
    ]
    rules = [
        {"record": f"query:{number}", "expr": expr.replace("$pool", ".*")}
        for number, expr in enumerate(filled)
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))

    run_promtool("check", "rules", str(path))


def uses(expression: str) -> Iterator[tuple[str, list[str]]]:
    """(metric of the catalog, labels of its selector) of every metric in a query."""
    for name, selector in METRIC.findall(expression):
        base = name
        for suffix in ("_bucket", "_sum", "_count"):
            histogram = CATALOG.get(name.removesuffix(suffix))
            if histogram is not None and histogram.kind is MetricKind.HISTOGRAM:
                base = histogram.name
        yield base, re.findall(r'([a-z_]+)(?:=~|!~|!=|=)"', selector)


def test_uses_are_found() -> None:
    """With and without labels; parts of histograms are their histogram."""
    query = 'sum(rate(dsched_ttft_seconds_bucket{model="m", le=~"1"}[5m])) / dsched_leader'

    assert list(uses(query)) == [
        ("dsched_ttft_seconds", ["model", "le"]),
        ("dsched_leader", []),
    ]


@pytest.mark.parametrize("expression", [*(rule["expr"] for rule in ALERTS), *dashboard_queries()])
def test_metrics_and_labels_exist(expression: str) -> None:
    """In the code's catalog; `job`, `instance` and `le` are Prometheus' own."""
    for name, labels in uses(expression):
        assert name in CATALOG, f"no metric is called {name}"
        known = {*CATALOG[name].labels, "job", "instance", "le"}
        assert set(labels) <= known, f"{name} has no labels {set(labels) - known}"


def test_the_dashboard_is_what_its_script_writes() -> None:
    """After a change run `python examples/monitoring/make_dashboard.py`."""
    assert load_maker().make_dashboard() == DASHBOARD


def test_panels_have_their_place() -> None:
    """No two overlap, and each says what to look for."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_runbook(rule: dict[str, dict[str, str]]) -> None:
    """A heading of its name in docs/operations.md, where its annotation points."""
    anchor = str(rule["alert"]).lower()

    assert rule["annotations"]["runbook"] == f"docs/operations.md#{anchor}"
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert f"\n### {rule['alert']}\n" in OPERATIONS.read_text(encoding="utf-8")


def test_every_runbook_has_an_alert() -> None:
    """No page for a rule that is gone."""
    headings = re.findall(
        r"^### (Dsched\w+)$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE
    )

    assert sorted(headings) == sorted(str(rule["alert"]) for rule in ALERTS)


@promtool
def test_metrics_are_named_as_prometheus_likes_them() -> None:
    """Every metric of the catalog, as `/metrics` shows it, passes Prometheus' own linter."""
    exporter = MetricsExporter(show_process=False)
    samples = [
        Sample(
            name=metric.name,
            value=LatencyHistogram((1_000_000,)) if metric.kind is MetricKind.HISTOGRAM else 1,
            labels=tuple("x" for _ in metric.labels),
        )
        for metric in CATALOG.values()
        if metric.name != "dsched_build_info"
    ]
    exporter.add_source(lambda: samples)
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=exporter.render(),
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, b"")
