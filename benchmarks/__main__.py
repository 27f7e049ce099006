"""Runs the contestants in turns, round after round, and prints what protection costs.

Everything it needs it starts itself, on loopback: a PostgreSQL with fsync on, one uvicorn process at a time,
the load generator (compiled from ``load.c``), pgbench. Only one of them is under load at any moment.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import load, pgbench, report, store_alone
from benchmarks.contestants import (
    LANES_ROW,
    PGBENCH_ROW,
    RAW_ROW,
    SQLITE_LANES_ROW,
    STORES,
    TARGETS,
    WORDS,
    Contestant,
    chosen,
    order,
)
from benchmarks.places import Places, places, protected_is_there
from benchmarks.quiet import NOISE, Patience, tree_seconds
from benchmarks.report import Sample
from benchmarks.serving import Served, serving


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=_between(1, 50), default=None, help="how often each is measured (5)")
    parser.add_argument("--seconds", type=_between(0.2, 60), default=None, help="length of one measurement (4)")
    parser.add_argument("--connections", type=_between(1, 1024), default=64, help="keep-alive connections (64)")
    parser.add_argument("--only", action="append", choices=WORDS, default=[], help="may be given several times")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 1.5 seconds, Starlette only")
    parser.add_argument(
        "--patience",
        type=_between(0, 3600),
        default=None,
        help="seconds, in all, for waiting and repeating while something else uses the machine (120)",
    )
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed or was not measured")
    options = parser.parse_args(arguments)
    options.rounds = int(options.rounds or (2 if options.quick else 5))
    options.seconds = options.seconds or (1.5 if options.quick else 4.0)
    options.patience = (20.0 if options.quick else 120.0) if options.patience is None else options.patience
    options.connections = int(options.connections)
    return options


def _between(least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"it must lie between {least:g} and {most:g}")
        return value

    return number


class Run:
    """One run of the benchmark: what is measured, in which order, and what has come out so far."""

    def __init__(self, options: argparse.Namespace, at: Places, apps: list[Contestant], generator: Path) -> None:
        self.options = options
        self.at = at
        self.apps = apps
        self.generator = generator
        self.samples: list[Sample] = []
        self.patience = Patience(options.patience, lambda text: print(text, flush=True))
        self.store_steps = self._store_steps() if not options.only or "store" in options.only else []
        per_round = sum(len(app.modes) for app in order(apps, 0)) + len(self.store_steps)
        self.total = per_round * options.rounds

    def all_rounds(self) -> None:
        for number in range(self.options.rounds):
            for app in order(self.apps, number):
                self._app(app, number)
            for row, against, step in self.store_steps:
                rate, others = self.patience.measure(step)
                self._took(Sample(row, number, rate, against, others_cpu=others))

    def _app(self, app: Contestant, number: int) -> None:
        url = self.at.urls[app.store] if app.store else None
        with serving(app.framework, url) as served:
            for mode in app.modes:
                (measured, app_us, database_us), others = self.patience.measure(
                    partial(self._load, served, mode, database=app.store == "postgres")
                )
                self._took(
                    Sample(
                        row=app.row(mode),
                        round=number,
                        rate=measured.rps,
                        against=Contestant(app.framework, None).name if app.store else None,
                        p50_ms=measured.p50_ms,
                        p99_ms=measured.p99_ms,
                        app_us=app_us,
                        database_us=database_us,
                        generator_cpu=measured.generator_cpu,
                        others_cpu=others,
                    )
                )

    def _load(self, served: Served, mode: load.Mode, *, database: bool) -> tuple[load.Measured, float, float | None]:
        """One measurement, with the CPU time per request of the app and, where there is one, its database."""
        seconds = self.options.seconds
        pids = [served.pid, *([self.at.postgres_pid] if database and self.at.postgres_pid else [])]
        before = [tree_seconds(pid) for pid in pids]
        measured = load.run(
            self.generator,
            served.port,
            mode,
            connections=self.options.connections,
            seconds=seconds,
            warmup=min(1.0, seconds / 2),
        )
        spent = [(tree_seconds(pid) - was) / measured.answered * 1e6 for pid, was in zip(pids, before, strict=True)]
        return measured, spent[0], spent[1] if len(spent) > 1 else None

    def _store_steps(self) -> list[tuple[str, str | None, Callable[[], float]]]:
        """Rows without HTTP: name, what it is compared with, how to measure it."""
        seconds: float = self.options.seconds
        steps: list[tuple[str, str | None, Callable[[], float]]] = []
        only = set(self.options.only) & set(STORES) or set(STORES)
        if "postgres-store" in self.at.urls and "postgres" in only:
            url, other = self.at.urls["postgres-store"], self.at.urls["postgres-pgbench"]
            program = pgbench.find(self.at.postgres_bin)
            against = PGBENCH_ROW if program else None
            for database in (url, other):
                store_alone.prepare(database)
            if program:
                whole = max(1, round(seconds))  # pgbench counts in whole seconds
                steps.append((PGBENCH_ROW, None, lambda: pgbench.run(program, other, self.at.folder, whole)))
            else:
                self.at.missing["pgbench"] = "no pgbench beside the server or on PATH"
            steps.append((RAW_ROW, against, lambda: store_alone.run(url, "raw", seconds)))
            steps.append((LANES_ROW, against, lambda: store_alone.run(url, "lanes", seconds)))
        if "sqlite" in self.at.urls and "sqlite" in only:
            file = f"sqlite:///{self.at.folder / 'store.db'}"
            steps.append((SQLITE_LANES_ROW, None, lambda: store_alone.run(file, "lanes", seconds)))
        return steps

    def _took(self, sample: Sample) -> None:
        self.samples.append(sample)
        ratio = report.ratio_so_far(sample, self.samples)
        latency = "" if sample.p50_ms is None else f"  p50 {sample.p50_ms:6.2f} ms  p99 {sample.p99_ms:7.2f} ms"
        spent = "" if sample.app_us is None else f"  app {sample.app_us:4.0f} µs"
        noise = f"  (others {sample.others_cpu:.2f} cores)" if sample.others_cpu > NOISE else ""
        compared = "" if ratio is None else f"  {ratio:.2f} of {sample.against}"
        done = f"[{len(self.samples):3}/{self.total}] round {sample.round + 1}"
        print(f"{done}  {sample.row:34} {sample.rate:9,.0f}/s{latency}{spent}{compared}{noise}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended on the way out
    began = time.monotonic()
    about: dict[str, Any] = {"machine": report.machine(), "options": vars(options).copy()}
    apps = chosen(set(options.only), options.quick)
    wanted = {app.store for app in apps if app.store} | ({*STORES} if _store_part(options) else set())
    with places(wanted) as at:
        generator = load.compile_generator(at.folder)
        apps = _runnable(apps, at)
        run = Run(options, at, apps, generator)
        print(f"{run.total} measurements; {', '.join(f'{k}: {v}' for k, v in at.notes.items())}", flush=True)
        for what, why in at.missing.items():
            print(f"left out: {what}: {why}", flush=True)
        try:
            run.all_rounds()
        except KeyboardInterrupt:
            print("interrupted: what follows is what was measured until now", flush=True)
        about |= {"notes": at.notes, "left_out": at.missing}
    lines = report.summary(run.samples)
    title = f"{options.connections} connections, {options.rounds} rounds of {options.seconds:g} s"
    report.table(lines, title)
    written = report.write(run.samples, lines, about)
    print(f"{time.monotonic() - began:.0f} s; every sample in {os.path.relpath(written)}")
    return verdict(lines, options.strict)


def verdict(lines: list[report.Line], strict: bool) -> int:
    """Exit status: with ``--strict`` 1 unless every target was measured and met."""
    missed = [line.row for line in lines if line.verdict == "FAIL"]
    absent = sorted(TARGETS.keys() - {line.row for line in lines if line.verdict})
    for word, rows in (("missed", missed), ("not measured", absent)):
        if rows:
            print(f"{word}: {', '.join(rows)}")
    return 1 if strict and (missed or absent) else 0


def _store_part(options: argparse.Namespace) -> bool:
    return not options.only or "store" in options.only


def _runnable(apps: list[Contestant], at: Places) -> list[Contestant]:
    """Leave out what cannot run, with its reason; the bare apps always can."""
    if any(app.store for app in apps) and (reason := protected_is_there()):
        at.missing["protected apps"] = reason
        return [app for app in apps if app.store is None]
    return [app for app in apps if app.store is None or app.store in at.urls]


if __name__ == "__main__":
    sys.exit(main())
