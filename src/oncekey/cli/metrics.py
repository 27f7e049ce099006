"""``oncekey metrics``: the alerts and the dashboard that come with oncekey, to be written into your own files.

Also the metrics page of commands that go on, ``--metrics-port``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Protocol

import typer

from oncekey.telemetry import monitoring
from oncekey.telemetry.exporter import Exporter
from oncekey.telemetry.registry import serving

MetricsPort = Annotated[
    int | None,
    typer.Option("--metrics-port", metavar="PORT", min=1, max=65535, help="Serve the metrics page on this port."),
]
MetricsHost = Annotated[
    str,
    typer.Option("--metrics-host", metavar="ADDRESS", help="Where --metrics-port listens; 0.0.0.0: everywhere."),
]


def register(parent: typer.Typer) -> None:
    group = typer.Typer(help="Print the alerts and the dashboard that come with oncekey.", no_args_is_help=True)
    group.command("rules")(rules)
    group.command("dashboard")(dashboard)
    parent.add_typer(group, name="metrics")


def rules() -> None:
    """Print the rules of alerts, for the rule_files of your server.

    oncekey metrics rules > oncekey.rules.yml
    """
    print(monitoring.rules(), end="")


def dashboard() -> None:
    """Print the dashboard as JSON, to be imported.

    oncekey metrics dashboard > oncekey.json
    """
    print(monitoring.dashboard(), end="")


class Observed(Protocol):
    """What a command runs: an Upkeep or a Worker."""

    @property
    def exporters(self) -> tuple[Exporter, ...]: ...
    def export_to(self, exporter: Exporter) -> None: ...


@contextmanager
def metrics_page(observed: Observed, host: str, port: int | None, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the metrics page in this block, if a port is given. An exporter that the app has is not added again."""
    if port is None:
        yield
        return
    exporter = serving(observed.exporters)
    observed.export_to(exporter)
    end = exporter.serve(host, port)
    say(f"oncekey: metrics on http://{host}:{port}/metrics")
    try:
        yield
    finally:
        end()
