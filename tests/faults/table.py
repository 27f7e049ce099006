"""Every fault of the campaign, in the order of the table."""

from __future__ import annotations

from importlib import import_module

from tests.faults.campaign import Fault

MODULES: tuple[str, ...] = (
    "kills",
    "writer_kills",
    "points",
    "pauses",
    "outbox",
    "commits",
    "restarts",
    "redis_servers",
    "dynamo_servers",
    "outages",
    "clocks",
    "disks",
    "exhaustion",
    "crowds",
    "lines",
    "disconnects",
    "middleware_answers",
    "redeployed",
    "own_transactions",
    "model",
    "fuzz",
    "schema",
    "agreeing",
    "mutants",
)
"""Modules of this package with a tuple ``FAULTS``. Each has its short form in ``test_short_forms.py`` by being here."""


def faults() -> tuple[Fault, ...]:
    return tuple(fault for name in MODULES for fault in import_module(f"tests.faults.{name}").FAULTS)
