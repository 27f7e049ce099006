"""Reads a metrics page, as Prometheus does."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def series(page: str, name: str) -> list[dict[str, str]]:
    """The labels of each series of this name."""
    return [sample.labels for sample in _samples(page) if sample.name == name]


def number(page: str, name: str, **labels: str) -> float:
    """The sum of a name's series that have these labels."""
    found = [sample for sample in _samples(page) if sample.name == name and labels.items() <= sample.labels.items()]
    return sum(sample.value for sample in found)


def _samples(page: str):
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]
