"""``oncekey metrics``: the alerts and the dashboard that come with oncekey, to be written into your own files."""

from __future__ import annotations

import typer

from oncekey.telemetry import monitoring

app = typer.Typer(
    help="Print the alerts and the dashboard that come with oncekey.", no_args_is_help=True, add_completion=False
)


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="metrics")


@app.command("rules")
def rules() -> None:
    """Print the rules of alerts, for the rule_files of your server.

    oncekey metrics rules > oncekey.rules.yml
    """
    print(monitoring.rules(), end="")


@app.command("dashboard")
def dashboard() -> None:
    """Print the dashboard as JSON, to be imported.

    oncekey metrics dashboard > oncekey.json
    """
    print(monitoring.dashboard(), end="")
