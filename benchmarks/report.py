"""What came out: medians, spread, ratios within each round, as a table and as JSON.

A ratio is taken inside one round, between neighbours in time, and the median is taken over the rounds: a
machine that was slow for a minute was slow for both sides of that ratio.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import peers

RESULTS = Path(__file__).with_name("results") / "latest.json"
LIBRARIES = ("starlette", "fastapi", "uvicorn", "gunicorn", "uvloop", "httptools", "psycopg", "asyncpg", "redis")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. ``against`` is the contestant that it is compared with, in the same workload and round."""

    workload: str
    contestant: str
    round: int
    rate: float
    against: str | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    app_us: float | None = None
    """CPU time of the server's processes per request. Moves less with what else the machine does than the rate."""
    store_us: float | None = None
    """CPU time of PostgreSQL or Redis per request; with a cache, of both."""
    statements: int | None = None
    """How many PostgreSQL executed during the whole load (``statements.py``); only with a cache."""
    generator_cpu: float | None = None
    others_cpu: float = 0.0
    """Cores that neither we nor our children used meanwhile."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table."""

    workload: str
    contestant: str
    rate: float
    least: float
    most: float
    p50_ms: float | None
    p99_ms: float | None
    app_us: float | None
    store_us: float | None
    statements: int | None
    """The most of all rounds."""
    ratio: float | None
    ratio_least: float | None
    ratio_most: float | None
    against: str | None


def summary(samples: Sequence[Sample]) -> list[Line]:
    """One line per workload and contestant, workloads in the order in which they first ran, the bare app on top."""
    workloads = list(dict.fromkeys(sample.workload for sample in samples))
    pairs = dict.fromkeys((sample.workload, sample.contestant) for sample in samples)
    lines = []
    for workload, contestant in sorted(pairs, key=lambda pair: workloads.index(pair[0])):
        mine = [sample for sample in samples if (sample.workload, sample.contestant) == (workload, contestant)]
        rates = [sample.rate for sample in mine]
        ratios = list(_ratios(mine, samples))
        lines.append(
            Line(
                workload=workload,
                contestant=contestant,
                rate=statistics.median(rates),
                least=min(rates),
                most=max(rates),
                p50_ms=_median(sample.p50_ms for sample in mine),
                p99_ms=_median(sample.p99_ms for sample in mine),
                app_us=_median(sample.app_us for sample in mine),
                store_us=_median(sample.store_us for sample in mine),
                statements=max((s.statements for s in mine if s.statements is not None), default=None),
                ratio=_median(ratios),
                ratio_least=min(ratios, default=None),
                ratio_most=max(ratios, default=None),
                against=mine[0].against,
            )
        )
    return lines


def ratio_so_far(sample: Sample, samples: Sequence[Sample]) -> float | None:
    """This sample to what it is compared with, as far as its round has got."""
    return next(iter(_ratios([sample], samples)), None)


def _ratios(mine: Iterable[Sample], samples: Sequence[Sample]) -> Iterable[float]:
    for sample in mine:
        others = [
            s.rate
            for s in samples
            if (s.workload, s.contestant, s.round) == (sample.workload, sample.against, sample.round)
        ]
        if others:
            yield sample.rate / statistics.mean(others)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# ---------------------------------------------------------------- to read


HEADINGS = ("", "per second", "min..max", "p50 ms", "p99 ms", "app µs", "store µs", "SQL", "ratio", "min..max", "to")


def tables(lines: Sequence[Line], left_out: Mapping[tuple[str, str], str], abouts: Mapping[str, str]) -> None:
    """Print one table per workload; a contestant without any figure is a row with the reason."""
    measured = {(line.workload, line.contestant) for line in lines}
    left_out = {row: reason for row, reason in left_out.items() if row not in measured}
    for workload in dict.fromkeys([*(line.workload for line in lines), *(workload for workload, _ in left_out)]):
        rows = [_cells(line) for line in lines if line.workload == workload]
        blank = ("",) * (len(HEADINGS) - 2)
        rows += [(name, reason, *blank) for (other, name), reason in left_out.items() if other == workload]
        used = [at for at in range(len(HEADINGS)) if at < 2 or any(row[at] for row in rows)]
        about = abouts.get(workload)
        title = workload + (f": {about}" if about else "")
        show([HEADINGS[at] for at in used], [[row[at] for at in used] for row in rows], title)


def show(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    """Print with rich where it is installed, else in plain columns."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        _plain([headings, *rows], title)
        return
    # Without a terminal rich would cut at 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=170)
    shown = Table(title=escape(title), title_justify="left")
    for at, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        colours = {"yes": "green", "no": "red"}
        shown.add_row(*(f"[{colours[cell]}]{cell}[/]" if cell in colours else escape(cell) for cell in row))
    console.print(shown)


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.contestant,
        f"{line.rate:,.0f}",
        f"{line.least:,.0f}..{line.most:,.0f}",
        number(line.p50_ms),
        number(line.p99_ms),
        number(line.app_us, 0),
        number(line.store_us, 0),
        number(line.statements, 0),
        number(line.ratio),
        "" if line.ratio_least is None else f"{line.ratio_least:.2f}..{line.ratio_most:.2f}",
        line.against if line.against and line.ratio is not None else "",
    )


def number(value: float | None, places: int = 2) -> str:
    return "" if value is None else f"{value:.{places}f}"


def _plain(rows: Sequence[Sequence[str]], title: str) -> None:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    print(title)
    for first, *others in rows:
        print(
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
        )


# ---------------------------------------------------------------- to keep


def machine() -> dict[str, Any]:
    """What a number depends on, and nothing that names the machine."""
    versions = {}
    for name in (*LIBRARIES, *peers.PACKAGES.values()):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "libraries": versions,
    }


def write(samples: Sequence[Sample], lines: Sequence[Line], about: Mapping[str, Any], path: Path = RESULTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "summary": [asdict(line) for line in lines],
        "samples": [asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
