"""The alerts and the dashboard that come with oncekey: ``oncekey metrics rules`` and ``oncekey metrics dashboard``."""

from __future__ import annotations

from importlib.resources import files


def rules() -> str:
    """Rules of alerts, as Prometheus reads them."""
    return _text("rules.yml")


def dashboard() -> str:
    """A dashboard of Grafana, as JSON."""
    return _text("dashboard.json")


def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text("utf-8")
