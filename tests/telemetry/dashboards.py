"""The queries of the dashboard that comes with oncekey."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from oncekey.telemetry import monitoring

VARIABLES = {"$__rate_interval": "1m", "$operation": ".*"}


def expressions() -> list[str]:
    """Each query, with a value for each variable."""
    return [filled(target["expr"]) for panel in panels() for target in panel.get("targets", [])]


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def panels() -> Iterator[dict[str, Any]]:
    yield from json.loads(monitoring.dashboard())["panels"]
