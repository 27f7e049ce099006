"""``make matrix``: the tests of the web frameworks and drivers, on the oldest and newest versions that we support.

    python -m tests.matrix                      all cells, two at a time
    python -m tests.matrix oldest               this cell alone
    python -m tests.matrix --except newest      all others
    python -m tests.matrix --write docs/compatibility.md

A cell is a file of requirements/matrix. Its virtualenv is .venv-matrix/<cell>, made again when the pins change; the
output of its tests is .venv-matrix/<cell>.log. Tests that failed run once more when all cells have ended, alone on the
machine. The exit code is 1 where a test failed again, or a cell could not be made.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.matrix.cells import Cell, NotInstalled, WrongVersions, cells
from tests.matrix.report import print_table, write_table
from tests.matrix.runs import Run

AT_ONCE = 2


def main() -> int:
    options = _options()
    chosen = [cell for cell in cells() if cell.name in (options.names or [cell.name]) and cell.name not in options.but]
    unknown = {*options.names, *options.but} - {cell.name for cell in cells()}
    if unknown or not chosen:
        print(f"no such cell; there are: {', '.join(cell.name for cell in cells())}")
        return 2
    for cell in (cell for cell in chosen if cell.missing):
        print(cell.missing)
    chosen = [cell for cell in chosen if not cell.missing]
    try:
        for cell in chosen:
            _prepare(cell)
    except (NotInstalled, WrongVersions) as error:
        print(error)
        return 1
    runs = _run(chosen)
    for run in runs:
        if run.failed:
            run.repeat()
    print_table(runs)
    if options.write:
        write_table(options.write, runs)
    for run in runs:
        for name in run.passed_alone:
            print(f"{run.cell.name}: failed beside other tests, passed alone: {name}")
        for name in run.failed:
            print(f"{run.cell.name}: FAILED: {name}")
    return 1 if any(run.failed for run in runs) else 0


def _prepare(cell: Cell) -> None:
    began = time.monotonic()
    cell.prepare()
    told = ", ".join(f"{name} {version}" for name, version in cell.versions.items())
    print(f"{cell.name} ({time.monotonic() - began:.1f} s): {told}", flush=True)


def _run(chosen: list[Cell]) -> list[Run]:
    waiting, running, ended = list(chosen), list[Run](), list[Run]()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(Run(waiting.pop(0)))
            for run in [run for run in running if not run.going_on()]:
                running.remove(run)
                ended.append(run)
                print(f"{run.cell.name}: {run.passed:,} passed, {len(run.failed):,} failed, {run.seconds:.0f} s")
                print("".join(f"  {name}\n" for name in run.failed), end="", flush=True)
            time.sleep(0.1)
    finally:
        for run in running:
            run.kill()
    return sorted(ended, key=lambda run: chosen.index(run.cell))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.matrix", description="The version matrix.")
    parser.add_argument("names", nargs="*", help="only these cells")
    parser.add_argument("--except", dest="but", action="append", default=[], metavar="CELL", help="not this cell")
    parser.add_argument("--write", metavar="FILE", help="put the table between the markers of this document")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
