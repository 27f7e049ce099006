"""What a reader sees of the campaign: one line per running fault, a line for each that has ended, and the table."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psycopg

from oncekey.testing.servers import find_postgres
from tests.faults.one_fault import Job

MARKERS = ("<!-- campaign -->", "<!-- /campaign -->")
_PLAIN_EVERY = 30.0
_HEAD = ("fault", "store", "hit", "requests", "violations", "seconds", "seed", "promises")


class Board:
    """On a terminal the lines of running faults are written over; elsewhere they come every half minute."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._lines = 0
        self._live = sys.stdout.isatty()
        self._shown_at = self._began = time.monotonic()

    def show(self, running: Sequence[Job], waiting: int) -> None:
        now = time.monotonic()
        if now - self._shown_at < (0.3 if self._live else _PLAIN_EVERY):
            return
        self._shown_at = now
        self._wipe()
        minutes, seconds = divmod(int(now - self._began), 60)
        lines = [f"{minutes}:{seconds:02d}  {self._done} of {self._total} done, {waiting} to come"]
        lines += [f"  {job.name} on {job.store}: {job.progress}, {job.seconds:.0f} s" for job in running]
        print("\n".join(line[: _width() - 1] if self._live else line for line in lines), flush=True)
        self._lines = len(lines) if self._live else 0

    def ended(self, job: Job) -> None:
        self._wipe()
        self._done += 1
        word = "BROKEN" if job.broken else f"{len(job.violations)} violations"
        also = f" ({'; '.join(job.notes)})" if job.notes else ""
        done = f"{job.hits:,} {job.unit}, {job.requests:,} requests, {word}, {job.seconds:.0f} s"
        print(f"{job.name} on {job.store}: {done}{also}", flush=True)
        for text in [*job.violations, *([job.broken] if job.broken else [])]:
            print(text, flush=True)

    def close(self) -> None:
        self._wipe()

    def _wipe(self) -> None:
        if self._lines:
            print(f"\x1b[{self._lines}A\x1b[J", end="", flush=True)
            self._lines = 0


def rows_of(jobs: Sequence[Job]) -> list[tuple[str, ...]]:
    return [
        (
            job.name,
            job.store,
            f"{job.hits:,} {job.unit}",
            f"{job.requests:,}" if job.requests else "-",
            "broken" if job.broken else str(len(job.violations)),
            f"{job.seconds:.0f}",
            str(job.seed or "-"),
            " ".join(job.promises) or "-",
        )
        for job in jobs
    ]


def print_table(jobs: Sequence[Job], seed: int) -> None:
    rows = [_HEAD, *rows_of(jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    print()
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n{_summary(jobs)}, seed {seed}", flush=True)


def write_table(path: str, jobs: Sequence[Job], seed: int) -> None:
    """Put it between the markers of a document."""
    document = Path(path)
    before, found, rest = document.read_text().partition(MARKERS[0])
    _, closed, after = rest.partition(MARKERS[1])
    if not found or not closed:
        raise SystemExit(f"{path} has no line {MARKERS[0]} followed by {MARKERS[1]}")
    lines = [f"Run on {datetime.now(UTC):%Y-%m-%d} with seed {seed}, {_machine()}: {_summary(jobs)}.", ""]
    lines += [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows_of(jobs)]
    document.write_text("\n".join([f"{before}{MARKERS[0]}", *lines, f"{MARKERS[1]}{after}"]))
    print(f"written to {path}")


def _summary(jobs: Sequence[Job]) -> str:
    violations = sum(len(job.violations) for job in jobs)
    broken = sum(job.broken is not None for job in jobs)
    requests = sum(job.requests for job in jobs)
    return f"{len(jobs)} runs, {requests:,} requests, {violations} violations, {broken} broken"


def _machine() -> str:
    told = subprocess.run([find_postgres() / "postgres", "--version"], capture_output=True, text=True, check=True)
    parts = (
        f"{os.cpu_count()} cores",
        f"{platform.system()}",
        f"Python {platform.python_version()}",
        f"SQLite {sqlite3.sqlite_version}",
        f"PostgreSQL {told.stdout.split()[2]}",
        f"psycopg {psycopg.__version__}",
    )
    return ", ".join(parts)


def _width() -> int:
    return os.get_terminal_size().columns
