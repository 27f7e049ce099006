"""The alerts and the dashboard that come with oncekey: checked with promtool, and against the metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from oncekey.telemetry import instruments, monitoring
from oncekey.telemetry.prometheus import Prometheus, metric_name, page
from oncekey.testing.servers import ServerUnavailable
from oncekey.testing.servers.prometheus import promtool
from tests.telemetry.dashboards import expressions, panels

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


def test_test_of_promtool_fails_for_a_rule_that_never_fires(rules: Path, tmp_path: Path) -> None:
    rules.write_text(
        monitoring.rules().replace("api_idempotency_dead_letters) > 0", "api_idempotency_dead_letters) > 9")
    )
    cases = tmp_path / "rules_test.yml"
    cases.write_text(TESTS.read_text("utf-8").replace("RULES", str(rules)))
    assert promtool("test", "rules", cases).returncode == 1


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


@pytest.mark.parametrize("name", ["reserve_replay", "reserve_in_progress", "reserve_key_misuse"])
def test_dashboard_shows_duplicates_and_misuse_by_tenant(name: str) -> None:
    """A tenant's duplicates may be a bug of its client, or an attack by recorded requests."""
    assert f"sum by (tenant) (rate(api_idempotency_{name}_total[1m]))" in expressions()


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    assert len({panel["id"] for panel in panels()}) == len(list(panels()))
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_labels_of_alerts_exist() -> None:
    known = {label for kind in instruments.COUNTERS for label in kind.labels} | {"tenant", "kind", "state", "verb"}
    for rule in RULES:
        for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            assert set(labels.split(", ")) <= known, rule["alert"]
