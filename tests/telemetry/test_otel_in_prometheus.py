"""What a collector makes of OpenTelemetry's metrics in Prometheus: the names and labels of docs/metrics.md.

The rules of translation are those of OpenTelemetry's specification (compatibility/prometheus_and_openmetrics.md), which
its exporters, its collector and Prometheus follow by default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from opentelemetry.sdk.metrics.export import Histogram, Metric, Sum
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from oncekey.telemetry import instruments
from oncekey.telemetry.exporter import Metrics
from oncekey.telemetry.instruments import Reading
from oncekey.telemetry.prometheus import Prometheus, page
from tests.telemetry.sdk import Sdk

TRACING = Path(__file__).parents[2] / "docs" / "tracing.md"
UNITS = {"s": "_seconds"}
ANNOTATION = re.compile(r"\{[!-~]*\}")
Series = set[tuple[str, str, frozenset[str]]]
"""Name, type and labels of each metric."""


def fill(exporter: Metrics) -> None:
    """Each metric once."""
    for kind in instruments.COUNTERS:
        exporter.add(kind, ("x",) * len(exporter.label_names(kind)), 1)
    for histogram in instruments.HISTOGRAMS:
        exporter.record(histogram, ("x",) * len(histogram.labels), 1.0)
    for gauge in instruments.PROCESS_GAUGES:
        exporter.shift(gauge, ("x",) * len(gauge.labels), 1)
    exporter.show_store(_store_gauges)


def _store_gauges() -> Iterator[Reading]:
    for gauge in instruments.STORE_GAUGES[1:]:
        yield gauge, ("x",) * len(gauge.labels), 1.0


def on_the_page(tenants: int) -> Series:
    registry = CollectorRegistry()
    fill(Prometheus(registry=registry, tenants=tenants))
    families = text_string_to_metric_families(page(registry=registry)[1].decode())
    return {
        (f"{family.name}_total" if family.type == "counter" else family.name, family.type, frozenset(sample.labels))
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def translated(metric: Metric) -> tuple[str, str]:
    """The name and the type of a metric in Prometheus."""
    assert metric.unit
    name = re.sub(r"[^a-zA-Z0-9:]+", "_", metric.name)
    unit = ANNOTATION.sub("", metric.unit)
    name += UNITS[unit] if unit else ""
    if isinstance(metric.data, Histogram):
        return name, "histogram"
    if isinstance(metric.data, Sum) and metric.data.is_monotonic:
        return f"{name}_total", "counter"
    return name, "gauge"


def relabelled(attribute: str) -> str:
    """The label of an attribute, after the relabelling of the page."""
    [source] = re.findall(r"^```yaml\n(.*?)^```", TRACING.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    [rule] = yaml.safe_load(source)["scrape_configs"][0]["metric_relabel_configs"]
    assert rule.keys() == {"action", "regex"}
    assert rule["action"] == "labelmap"
    label = re.sub(r"[^a-zA-Z0-9]+", "_", attribute)
    found = re.fullmatch(rule["regex"], label)
    return found[1] if found else label


def through_a_collector(tenants: int) -> Series:
    sdk = Sdk()
    fill(sdk.exporter(tenants=tenants))
    return {
        (*translated(metric), frozenset(map(relabelled, point.attributes or ())))
        for metric in sdk.metrics()
        for point in metric.data.data_points
    }


def test_metrics_through_a_collector_have_the_names_and_labels_of_the_page() -> None:
    for tenants in (0, 5):
        there = on_the_page(tenants)
        assert len(there) == len(instruments.COUNTERS) + len(instruments.HISTOGRAMS) + len(
            (*instruments.PROCESS_GAUGES, *instruments.STORE_GAUGES)
        )
        assert through_a_collector(tenants) == there


def test_attributes_of_metrics_have_the_namespace_of_the_spans() -> None:
    sdk = Sdk()
    fill(sdk.exporter(tenants=5))
    names = {name for metric in sdk.metrics() for point in metric.data.data_points for name in point.attributes or ()}
    assert {"idempotency.operation", "idempotency.task", "idempotency.tenant"} <= names
    assert all(re.fullmatch(r"idempotency\.[a-z]+", name) for name in names)
