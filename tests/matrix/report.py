"""The table of the version matrix: a column per cell, a line per package, and what its tests counted."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.matrix.cells import packages
from tests.matrix.runs import Run

MARKERS = ("<!-- matrix -->", "<!-- /matrix -->")


def rows_of(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    head = ("", *(run.cell.name for run in runs))
    versions = [(name, *(run.cell.versions[name] for run in runs)) for name in packages()]
    counts = [
        ("tests passed", *(f"{run.passed:,}" for run in runs)),
        ("tests failed", *(f"{len(run.failed):,}" for run in runs)),
        ("tests that passed only alone", *(f"{len(run.passed_alone):,}" for run in runs)),
        ("tests skipped", *(f"{run.skipped:,}" for run in runs)),
        ("seconds", *(f"{run.seconds:.0f}" for run in runs)),
    ]
    return [head, *versions, *counts]


def print_table(runs: Sequence[Run]) -> None:
    rows = rows_of(runs)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def write_table(path: str, runs: Sequence[Run]) -> None:
    """Put it between the markers of a document."""
    document = Path(path)
    before, found, rest = document.read_text().partition(MARKERS[0])
    _, closed, after = rest.partition(MARKERS[1])
    if not found or not closed:
        raise SystemExit(f"{path} has no line {MARKERS[0]} followed by {MARKERS[1]}")
    head, *rows = rows_of(runs)
    lines = [f"Run on {datetime.now(UTC):%Y-%m-%d} with Python {platform.python_version()}.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    document.write_text("\n".join([f"{before}{MARKERS[0]}", *lines, f"{MARKERS[1]}{after}"]))
    print(f"written to {path}")
