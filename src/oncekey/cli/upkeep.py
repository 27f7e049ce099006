"""``oncekey upkeep``: sweeper, reaper, reconciler and resumer, until a signal or once.

Exit codes: 0 for a clean end, 1 where with ``--once`` a duty failed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, cast

import typer

from oncekey.cli.loader import load
from oncekey.cli.logs import Format, Level, LogFormat, LogLevel, set_up
from oncekey.cli.metrics import MetricsHost, MetricsPort, metrics_page
from oncekey.cli.options import AsJson, StoreUrl, existing, print_json
from oncekey.cli.prompts import seconds
from oncekey.core.states import State
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError, OperatorError
from oncekey.stores.api import Store
from oncekey.upkeep.health import Health
from oncekey.upkeep.reaper import AUDIT_RETENTION
from oncekey.upkeep.service import (
    REAP_SECONDS,
    RECONCILE_SECONDS,
    RESUME_SECONDS,
    SWEEP_SECONDS,
    Turn,
    Upkeep,
)

SHOW_SECONDS = 60.0
"""The pause between two progress lines."""


def register(app: typer.Typer) -> None:
    app.command("upkeep")(upkeep)


def _every(what: str) -> typer.models.OptionInfo:
    help_text = f"Between two turns of the {what}."
    return cast("typer.models.OptionInfo", typer.Option(min=0.01, metavar="SECONDS", help=help_text))


def upkeep(
    context: typer.Context,
    path: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:ONCE]", help="Where your OnceKey is, for its store and functions."),
    ] = None,
    store: StoreUrl = "",
    once: Annotated[bool, typer.Option("--once", help="One turn of each duty, and end: for cron.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what is due, change nothing, and end.")] = False,
    soft: Annotated[
        bool, typer.Option("--soft", help="Keep expired keys for as long again, without their answers.")
    ] = False,
    audit_retention: Annotated[
        str, typer.Option(metavar="TIME", help="Keep the lines of the audit for so long: 90d, 400d, or forever.")
    ] = f"{AUDIT_RETENTION.days}d",
    sweep_every: Annotated[float, _every("sweeper (expired leases)")] = SWEEP_SECONDS,
    reap_every: Annotated[float, _every("reaper (expired keys)")] = REAP_SECONDS,
    reconcile_every: Annotated[float, _every("reconciler (unknown outcomes)")] = RECONCILE_SECONDS,
    resume_every: Annotated[float, _every("resumer (half-done requests)")] = RESUME_SECONDS,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    log_level: LogLevel = Level.WARNING,
    log_format: LogFormat = Format.TEXT,
    as_json: AsJson = False,
) -> None:
    """Keep keys from getting stuck: sweeper, reaper, reconciler and resumer, until SIGTERM or SIGINT.

    Any number may run at once. Without MODULE:ONCE it runs on --store: it says which
    outcomes are unknown, but asks no resolver, and counts no tries. Half-done
    requests then wait for their clients.
    --json prints what was done and the health at the end, as one document.

    Exit codes: 0 a clean end, 1 an error; with --once also where a duty failed.
    """
    if path is not None and getattr(context.get_parameter_source("store"), "name", "") == "COMMANDLINE":
        raise ConfigurationError(f"--store and {path}: give one of them, an OnceKey has a store of its own")
    if metrics_port is not None and (once or dry_run):
        raise ConfigurationError("--metrics-port is for an upkeep that goes on: leave out --once and --dry-run")
    say = set_up(log_level, log_format)
    with _target(path, store) as target:
        service = Upkeep(
            target,
            sweep_every=sweep_every,
            reap_every=reap_every,
            reconcile_every=reconcile_every,
            resume_every=resume_every,
            soft=soft,
            audit_retention=_retention(audit_retention),
        )
        if once or dry_run:
            turns = service.run_once(dry_run=dry_run)
        else:
            with metrics_page(service, metrics_host, metrics_port, say):
                turns = _serve(service, say)
        health = _health(service)
    if as_json:
        done = {turn.duty: turn.result.as_json() if turn.result else {"error": turn.error} for turn in turns}
        shown = {"ok": False, "problems": [health]} if isinstance(health, str) else health.as_json()
        print_json({"dry_run": dry_run, "done": done, "health": shown})
    else:
        _print(turns, health, "would be" if dry_run else "were")
    if any(turn.error for turn in turns):
        raise typer.Exit(1)


def _retention(text: str) -> timedelta | None:
    """``400d``, or ``forever``."""
    return None if text == "forever" else timedelta(seconds=seconds(text))


def _health(service: Upkeep) -> Health | str:
    """The health, or why it cannot be read. Such an error must not hide what was done."""
    try:
        return service.health()
    except OperatorError as error:
        return str(error)


@contextmanager
def _target(path: str | None, store: str) -> Iterator[OnceKey | Store]:
    """The app's OnceKey, or a store, after a check of its tables."""
    if path is not None:
        once = load(path, OnceKey, "the module and name of your OnceKey, such as app.main:once")
        once.start()
        try:
            yield once
        finally:
            once.close()
    else:
        with existing(store) as target:
            target.check()
            yield target


def _serve(service: Upkeep, say: Callable[[str], None]) -> list[Turn]:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with service:
        say("oncekey upkeep: running")
        while not ended.wait(SHOW_SECONDS):
            say(f"oncekey upkeep: {_line(_health(service))}")
    return []


def _print(turns: list[Turn], health: Health | str, verb: str) -> None:
    for turn in turns:
        if turn.result is None:
            print(f"{turn.duty}: failed: {turn.error}")
        else:
            done = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in turn.result.as_json().items())
            print(f"{turn.duty}: {verb} {done}")
    print(_line(health))
    for problem in [] if isinstance(health, str) else health.problems:
        print(f"! {problem}")


def _line(health: Health | str) -> str:
    if isinstance(health, str):
        return health
    keys, outbox = health.keys, health.outbox
    return (
        f"{keys.counts[State.IN_PROGRESS]:,} in progress, oldest expired lease {keys.lease_over_seconds:.0f} s; "
        f"{keys.counts[State.UNKNOWN]:,} unknown, oldest {keys.oldest_unknown_seconds:.0f} s; "
        f"dead letters: {keys.dead:,} keys, {outbox.dead:,} jobs; outbox lag {outbox.lag_seconds:.1f} s"
    )
