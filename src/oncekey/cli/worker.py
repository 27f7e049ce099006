"""``oncekey worker``: runs the jobs that requests put into the outbox."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

import typer

from oncekey.cli.loader import load
from oncekey.cli.logs import Format, Level, LogFormat, LogLevel, set_up
from oncekey.cli.metrics import MetricsHost, MetricsPort, metrics_page
from oncekey.cli.options import AsJson, StoreUrl, existing, print_json
from oncekey.errors import ConfigurationError
from oncekey.outbox.attempts import Counts
from oncekey.outbox.pump import Until
from oncekey.outbox.worker import GRACE_SECONDS, Worker

TERMINAL_SECONDS = 0.5
LOG_SECONDS = 10.0


def register(app: typer.Typer) -> None:
    app.command("worker")(worker)


def worker(
    path: Annotated[str, typer.Argument(metavar="MODULE:WORKER", help="Where the Worker with your tasks is.")],
    store: StoreUrl = "",
    concurrency: Annotated[int | None, typer.Option(min=1, help="How many jobs run at once.")] = None,
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a stop waits for running tasks.")
    ] = GRACE_SECONDS,
    once: Annotated[bool, typer.Option("--once", help="Run one batch, and end.")] = False,
    drain: Annotated[bool, typer.Option("--drain", help="End when nothing is due any more.")] = False,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    log_level: LogLevel = Level.WARNING,
    log_format: LogFormat = Format.TEXT,
    as_json: AsJson = False,
) -> None:
    """Run the jobs of the outbox, until SIGTERM or SIGINT.

    Any number of workers may run at once. Without --store the worker's own is used. The first signal lets running
    tasks end; the second does not wait. --json prints the counts at the end.
    """
    if once and drain:
        raise ConfigurationError("--once and --drain: give one of them")
    until: Until = "once" if once else "drained" if drain else "stopped"
    say = set_up(log_level, log_format)
    found = load(path, Worker, "the module and name of your Worker, such as app.jobs:worker")
    progress = _progress(say, on_terminal=log_format is Format.TEXT and sys.stderr.isatty())
    page = metrics_page(found, metrics_host, metrics_port, say)
    with page, existing(store) if store else nullcontext() as given, progress as (show, interval):
        counts = found.run(
            store=given, concurrency=concurrency, grace=grace, until=until, progress=show, interval=interval
        )
    if as_json:
        print_json(counts.as_json())
    else:
        print(_line(counts, counts.rate))


def _line(counts: Counts, rate: float) -> str:
    shown = f"{counts.done:,} done, {counts.failed:,} failed, {counts.dead:,} dead"
    if counts.lost or counts.released:
        shown += f", {counts.released:,} released, {counts.lost:,} lost"
    return f"{shown}, {rate:,.0f}/s, lag {counts.lag_seconds:.1f} s"


@contextmanager
def _progress(say: Callable[[str], None], *, on_terminal: bool) -> Iterator[tuple[Callable[[Counts], None], float]]:
    """Progress on standard error: on a terminal one line that changes, otherwise a new line every 10 seconds."""
    seen = [0.0, time.monotonic()]

    def line(counts: Counts) -> str:
        done, at = counts.done, time.monotonic()
        rate = (done - seen[0]) / max(at - seen[1], 1e-9)
        seen[:] = [done, at]
        return _line(counts, rate)

    if not on_terminal:
        yield lambda counts: say(f"oncekey worker: {line(counts)}"), LOG_SECONDS
        return
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        yield lambda counts: print(f"\r\033[K{line(counts)}", end="", file=sys.stderr, flush=True), TERMINAL_SECONDS
        print(file=sys.stderr)
        return
    with Console(stderr=True).status("waiting for jobs") as status:
        yield lambda counts: status.update(line(counts)), TERMINAL_SECONDS
