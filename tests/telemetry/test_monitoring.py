"""The alerts and the dashboard that come with oncekey: checked with promtool, and against the metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from oncekey.telemetry import instruments, monitoring
from oncekey.telemetry.events import Misused
from oncekey.telemetry.prometheus import Prometheus, metric_name, page
from oncekey.testing.http.stack import until
from oncekey.testing.servers import HOST, PrometheusServer, ServerUnavailable, free_port
from oncekey.testing.servers.prometheus import promtool
from tests.telemetry.dashboards import expressions, filled, panels

RULES: list[dict[str, Any]] = yaml.safe_load(monitoring.rules())["groups"][0]["rules"]
TESTS = Path(__file__).with_name("rules_test.yml")
NAME = re.compile(r"api_idempotency_\w+")


def existing() -> set[str]:
    """Every series name that an exporter can show."""
    registry = CollectorRegistry()
    exporter = Prometheus(registry=registry)
    exporter.show_store(lambda: [(gauge, ("x",) * len(gauge.labels), 1.0) for gauge in instruments.STORE_GAUGES[1:]])
    declared = re.findall(r"^# TYPE (\w+) (\w+)$", page(registry=registry)[1].decode(), re.MULTILINE)
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    return {name + suffix for name, kind in declared for suffix in suffixes[kind]}


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yml"
    path.write_text(monitoring.rules())
    try:
        promtool("--version")
    except ServerUnavailable as missing:
        pytest.skip(str(missing))
    return path


def test_promtool_accepts_the_rules(rules: Path) -> None:
    checked = promtool("check", "rules", rules)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert f"{len(RULES)} rules found" in checked.stdout


def test_every_alert_fires_and_does_not_fire_too_early(rules: Path, tmp_path: Path) -> None:
    cases = tmp_path / "rules_test.yml"
    cases.write_text(TESTS.read_text("utf-8").replace("RULES", str(rules)))
    tested = promtool("test", "rules", cases)
    assert tested.returncode == 0, tested.stdout + tested.stderr


MISUSE = "api_idempotency_reserve_key_misuse_total"
SCRAPED = "on (job, instance) group_left () max by (job, instance) (sum_over_time(up[{}]))"


@pytest.mark.parametrize(
    ("here", "instead"),
    [
        ("api_idempotency_dead_letters) > 0", "api_idempotency_dead_letters) > 9"),
        (f"          unless {MISUSE} offset 5m)\n", "          )\n"),
        (SCRAPED.format("5m"), "9999"),
        (SCRAPED.format("5m"), "0"),
        (SCRAPED.format("15m"), "0"),
        ("sum_over_time(up[5m])", "count_over_time(up[5m])"),
        (") or vector(0))", "))"),
    ],
    ids=["no alert", "restart", "outage", "birth in 5 minutes", "birth in 15 minutes", "target down", "no new keys"],
)
def test_cases_notice_a_rule_without_one_of_its_parts(rules: Path, tmp_path: Path, here: str, instead: str) -> None:
    assert here in monitoring.rules()
    rules.write_text(monitoring.rules().replace(here, instead))
    cases = tmp_path / "rules_test.yml"
    cases.write_text(TESTS.read_text("utf-8").replace("RULES", str(rules)))
    assert promtool("check", "rules", rules).returncode == 0
    assert promtool("test", "rules", cases).returncode == 1


@pytest.mark.frameworks
def test_prometheus_fires_for_the_first_burst_of_a_tenant_between_two_scrapes(rules: Path) -> None:
    exporter = Prometheus(registry=CollectorRegistry(), tenants=5)
    exporter.expect(["POST /pay"])
    port = free_port()
    end = exporter.serve(HOST, port)
    try:
        with PrometheusServer([f"{HOST}:{port}"], rules=[rules]) as prometheus:
            until(lambda: prometheus.number("up") == 1, "Prometheus has not fetched the page")
            assert prometheus.alerts().get("OncekeyMisuseSpike") is None
            for _ in range(500):
                exporter.on_event(Misused("acme", "~1", "POST /pay", 1))
            until(lambda: prometheus.alerts().get("OncekeyMisuseSpike") == "firing", "the alert does not fire")
            until(lambda: prometheus.number(f"count_over_time({MISUSE}[1m])") == 3, "Prometheus does not fetch")
            assert prometheus.number(f"sum(increase({MISUSE}[1m]))") == 0
    finally:
        end()


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load(TESTS.read_text("utf-8"))["tests"]
    fired = {test["alertname"] for case in cases for test in case["alert_rule_test"] if test.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}


def test_rules_name_metrics_that_exist() -> None:
    named = {name for rule in RULES for name in NAME.findall(rule["expr"])}
    assert named
    assert named <= existing()


def test_dashboard_names_metrics_that_exist() -> None:
    queries = expressions()
    named = {name for query in queries for name in NAME.findall(query)}
    assert len(queries) > 50
    assert all(NAME.search(query) for query in queries)
    assert named <= existing()


def test_dashboard_shows_the_usual_counters_and_every_gauge() -> None:
    shown = " ".join(expressions())
    usual = {f"{metric_name(instruments.counter_name(kind))}_total" for kind in instruments.USUAL}
    gauges = {metric_name(each.name, each.unit) for each in (*instruments.PROCESS_GAUGES, *instruments.STORE_GAUGES)}
    assert {name for name in usual | gauges if name not in shown} == set()


def test_dashboard_shows_every_metric_of_an_alert() -> None:
    shown = {name for query in expressions() for name in NAME.findall(query)}
    assert {name for rule in RULES for name in NAME.findall(rule["expr"])} - shown == set()


@pytest.mark.parametrize("name", ["reserve_replay", "reserve_in_progress"])
def test_dashboard_shows_duplicates_by_tenant(name: str) -> None:
    """A tenant's duplicates may be a bug of its client, or an attack by recorded requests."""
    assert f"sum by (tenant) (rate(api_idempotency_{name}_total[1m]))" in expressions()


COUNTS = {
    "misuse by tenant": "reserve_key_misuse",
    "refused callers": "caller_refused",
    "store errors": "store_error",
    "leases": "zombie_key",
}
"""Panels that show single events: an alert may be about the first of them."""


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("title", [*COUNTS, "reconciliation"])
def test_panel_of_rare_events_counts_the_first_burst_of_a_new_series(title: str, tmp_path: Path) -> None:
    """The series is there from the scrape that shows 500 events on, and rate() of it is 0."""
    [panel] = [panel for panel in panels() if panel["title"].lower() == title]
    queries = [filled(target["expr"]) for target in panel["targets"]]
    names = [NAME.findall(query)[0] for query in queries]
    assert f"api_idempotency_{COUNTS.get(title, 'reconcile_failed')}_total" in names
    labels = 'job="api", instance="a", operation="POST /pay", tenant="new", verb="reserve", reason="signature"'
    grouped = [re.match(r"sum by \((\w+)\)", query) for query in queries]
    shown = [re.search(rf'{by[1]}="\w+"', labels) if by else None for by in grouped]
    case = {
        "interval": "15s",
        "input_series": [
            {"series": 'up{job="api", instance="a"}', "values": "1x60"},
            *({"series": f"{name}{{{labels}}}", "values": "_x40 500x20"} for name in names),
        ],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": "10m30s",
                "exp_samples": [{"labels": f"{{{label[0] if label else ''}}}", "value": 500}],
            }
            for query, label in zip(queries, shown, strict=True)
        ],
    }
    cases = tmp_path / "dashboard_test.yml"
    cases.write_text(yaml.safe_dump({"tests": [case]}))
    tested = promtool("test", "rules", cases)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    assert len({panel["id"] for panel in panels()}) == len(list(panels()))
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_alert_about_a_counter_has_a_case_whose_series_begins_above_0() -> None:
    cases = yaml.safe_load(TESTS.read_text("utf-8"))["tests"]
    late = [case for case in cases if any(re.match(r"_x\d+ [1-9]", each["values"]) for each in case["input_series"])]
    fired = {test["alertname"] for case in late for test in case["alert_rule_test"] if test.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES if "_total" in rule["expr"]}


def test_labels_of_alerts_exist() -> None:
    known = {label for kind in instruments.COUNTERS for label in kind.labels} | {"tenant", "kind", "state", "verb"}
    known |= {"job", "instance"}  # of Prometheus itself
    for rule in RULES:
        for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            assert set(labels.split(", ")) <= known, rule["alert"]
