"""``oncekey demo``: a payments API to try it on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oncekey.demo import DEFAULT_STORE
from oncekey.errors import ConfigurationError
from oncekey.stores.registry import STORES, WITH_TRANSACTIONS, find, open_store, plain_url

SHARED = ", ".join(entry.example for entry in STORES if entry.extra or entry.transactions)


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    port: Annotated[int, typer.Option(help="Where to listen, on the loopback address.", min=0, max=65535)] = 8080,
    store: Annotated[
        str, typer.Option("--store", envvar="ONCEKEY_STORE", metavar="URL", help="Where keys and payments are kept.")
    ] = DEFAULT_STORE,
    background: Annotated[
        bool, typer.Option("--background", help="Payments answer 202, and a worker process makes them.")
    ] = False,
    honours: Annotated[
        bool,
        typer.Option("--provider-honours/--no-provider-honours", help="Whether the provider honours idempotency keys."),
    ] = True,
    ledger: Annotated[
        Path | None,
        typer.Option("--provider-ledger", metavar="FILE", help="Where the provider keeps what it has charged."),
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Show the metrics of all its processes on /metrics.")
    ] = False,
    ttl: Annotated[float, typer.Option("--ttl", metavar="SECONDS", min=1, help="How long answers are kept.")] = 86_400,
) -> None:
    """Run a payments API, to retry it, kill it, and see one charge.

    It prints what to try. Its tables are created by itself; a store without tables gets a SQLite file for payments. The
    provider that it asks for charges is a process of its own, with a ledger of its own: GET /provider/charges shows it.
    """
    try:
        from oncekey.demo.server import run
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the demo needs {error.name}, which is not installed: pip install 'oncekey[demo]'"
        ) from error
    store = plain_url(store)
    entry = find(store)
    if entry is None or not open_store(store).capabilities.shared:
        raise ConfigurationError(f"the demo runs in several processes, which share its keys: give it one of {SHARED}")
    if background and not entry.transactions:
        raise ConfigurationError(
            f"--background commits payments together with jobs: give it one of {WITH_TRANSACTIONS}"
        )
    code = run(store, port, background=background, honours=honours, ledger=ledger, metrics=metrics, ttl=ttl)
    raise typer.Exit(code)
