"""What came out: medians, spread, ratios within each round, PASS or FAIL, as a table and as JSON.

A ratio is taken inside one round, between neighbours in time, and the median is taken over the rounds: a
machine that was slow for a minute was slow for both sides of that ratio.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.contestants import TARGETS

RESULTS = Path(__file__).with_name("results") / "latest.json"
LIBRARIES = ("starlette", "fastapi", "uvicorn", "uvloop", "httptools", "psycopg", "orjson")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. ``against`` is the row that it is compared with, in the same round."""

    row: str
    round: int
    rate: float
    against: str | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    app_us: float | None = None
    """CPU time of the uvicorn process per request. Moves less with what else the machine does than the rate."""
    database_us: float | None = None
    """CPU time of PostgreSQL per request (or pair)."""
    generator_cpu: float | None = None
    others_cpu: float = 0.0
    """Cores that neither we nor our children used meanwhile."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table."""

    row: str
    rate: float
    least: float
    most: float
    p50_ms: float | None
    p99_ms: float | None
    app_us: float | None
    database_us: float | None
    ratio: float | None
    ratio_least: float | None
    ratio_most: float | None
    target: float | None

    @property
    def verdict(self) -> str:
        if self.target is None or self.ratio is None:
            return ""
        return "PASS" if self.ratio >= self.target else "FAIL"


def summary(samples: list[Sample]) -> list[Line]:
    """One line per row, in the order in which the rows first ran."""
    lines = []
    for row in dict.fromkeys(sample.row for sample in samples):
        mine = [sample for sample in samples if sample.row == row]
        rates = [sample.rate for sample in mine]
        ratios = list(_ratios(mine, samples))
        lines.append(
            Line(
                row=row,
                rate=statistics.median(rates),
                least=min(rates),
                most=max(rates),
                p50_ms=_median(sample.p50_ms for sample in mine),
                p99_ms=_median(sample.p99_ms for sample in mine),
                app_us=_median(sample.app_us for sample in mine),
                database_us=_median(sample.database_us for sample in mine),
                ratio=_median(ratios),
                ratio_least=min(ratios, default=None),
                ratio_most=max(ratios, default=None),
                target=TARGETS.get(row),
            )
        )
    return lines


def ratio_so_far(sample: Sample, samples: list[Sample]) -> float | None:
    """This sample to what it is compared with, as far as its round has got."""
    return next(iter(_ratios([sample], samples)), None)


def _ratios(mine: Iterable[Sample], samples: list[Sample]) -> Iterable[float]:
    for sample in mine:
        others = [s.rate for s in samples if s.row == sample.against and s.round == sample.round]
        if others:
            yield sample.rate / statistics.mean(others)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# ---------------------------------------------------------------- to read


HEADINGS = ("", "per second", "min..max", "p50 ms", "p99 ms", "app µs", "db µs", "ratio", "min..max", "target", "")


def table(lines: list[Line], title: str) -> None:
    """Print with rich where it is installed, else in plain columns."""
    cells = [_cells(line) for line in lines]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _plain(cells, title)
        return
    # Without a terminal rich would cut at 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=170)
    shown = Table(title=title, title_justify="left")
    for at, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="right" if at else "left", no_wrap=True)
    for row in cells:
        colour = {"PASS": "green", "FAIL": "red"}.get(row[-1])
        shown.add_row(*row[:-1], f"[{colour}]{row[-1]}[/]" if colour else row[-1])
    console.print(shown)


def _cells(line: Line) -> tuple[str, ...]:
    spread = "" if line.ratio_least is None else f"{line.ratio_least:.2f}..{line.ratio_most:.2f}"
    return (
        line.row,
        f"{line.rate:,.0f}",
        f"{line.least:,.0f}..{line.most:,.0f}",
        _number(line.p50_ms),
        _number(line.p99_ms),
        _number(line.app_us, 0),
        _number(line.database_us, 0),
        _number(line.ratio),
        spread,
        _number(line.target),
        line.verdict,
    )


def _number(value: float | None, places: int = 2) -> str:
    return "" if value is None else f"{value:.{places}f}"


def _plain(cells: list[tuple[str, ...]], title: str) -> None:
    rows = [HEADINGS, *cells]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADINGS))]
    print(title)
    for row in rows:
        first, *others = row
        print(
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
        )


# ---------------------------------------------------------------- to keep


def machine() -> dict[str, Any]:
    """What a number depends on, and nothing that names the machine."""
    versions = {}
    for name in LIBRARIES:
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


def write(samples: list[Sample], lines: list[Line], about: dict[str, Any], path: Path = RESULTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "summary": [{**asdict(line), "verdict": line.verdict} for line in lines],
        "samples": [asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
