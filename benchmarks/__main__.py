"""Runs the contestants in turns, round after round, and prints what protection costs, beside what the peers cost.

Everything it needs it starts itself, on loopback: a PostgreSQL with fsync on, a Redis, the web servers, the load
generator (compiled from ``load.c``), pgbench. Only one of them is under load at any moment.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import instructions, load, plot, report, targets
from benchmarks.contestants import ALL
from benchmarks.places import Places, places
from benchmarks.progress import clock
from benchmarks.rounds import Lengths, Run
from benchmarks.targets import Outcome
from benchmarks.workloads import NAMES, PARTS, WORKLOADS, chosen

WORDS = tuple(
    dict.fromkeys(
        [
            *NAMES,
            *(workload.id for workload in WORKLOADS),
            *PARTS,
            *(word for c in ALL for word in (c.guard, c.store, c.name) if word),
        ]
    )
)
"""What ``--only`` takes."""
PLOT = report.RESULTS.with_suffix(".svg")


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="only count instructions, by layer, and compare with the committed figure: 2 minutes (needs valgrind); "
        "with --targets, both: every row of docs/performance.md",
    )
    parser.add_argument("--targets", action="store_true", help="only what the targets need: about 9 minutes")
    parser.add_argument("--quick", action="store_true", help="1 round of 1 second: whether everything runs")
    parser.add_argument(
        "--only",
        action="append",
        choices=WORDS,
        default=[],
        metavar="NAME",
        help=f"a workload or a contestant, may be given several times: {', '.join(WORDS)}",
    )
    parser.add_argument("--rounds", type=_between(1, 50), help="how often each is measured (3; with --targets 4)")
    parser.add_argument("--seconds", type=_between(0.2, 60), help="length of one measurement (2.5)")
    parser.add_argument("--jobs", type=_between(100, 1_000_000), help="no-op jobs for the outbox (5000)")
    parser.add_argument(
        "--patience",
        type=_between(0, 3600),
        help="seconds, in all, for waiting and repeating while something else uses the machine (120)",
    )
    parser.add_argument("--json", type=Path, default=report.RESULTS, metavar="FILE", help="every sample")
    parser.add_argument("--svg", type=Path, default=PLOT, metavar="FILE", help="the plot of first requests and replays")
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed or was not measured")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.rounds = int(options.rounds or (1 if quick else 4 if options.targets else 3))
    options.seconds = options.seconds or (1.0 if quick else 2.5)
    options.jobs = int(options.jobs or (500 if quick else 5000))
    options.patience = (0.0 if quick else 120.0) if options.patience is None else options.patience
    return options


def _between(least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"it must lie between {least:g} and {most:g}")
        return value

    return number


def main(arguments: list[str] | None = None) -> int:
    asked = sys.argv[1:] if arguments is None else arguments
    if "--instructions" in asked and "--targets" not in asked:
        return instructions.main([word for word in asked if word != "--instructions"])
    options = read_options(asked)
    if options.instructions:
        return max(instructions.main([]), _run(options))
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended on the way out
    began = time.monotonic()
    only = set(options.only)
    plan = chosen(only, targets=options.targets)
    parts = set(PARTS) & only if only else set(PARTS)
    with places(_stores(plan, parts)) as at:
        generator = load.compile_generator(at.folder)
        lengths = Lengths(options.rounds, options.seconds, options.jobs, options.targets)
        run = Run(plan, parts, lengths, at, generator, options.patience)
        _announce(run, at)
        try:
            run.all_rounds()
        except KeyboardInterrupt:
            print("interrupted: what follows is what was measured until now", flush=True)
        about = {"machine": report.machine(), "options": _plain(vars(options)), "notes": at.notes}
    return _conclude(run, options, about, time.monotonic() - began)


def _stores(plan: Sequence[tuple[Any, list[Any]]], parts: set[str]) -> set[str]:
    """Which stores have to be there."""
    wanted = {server for _, contestants in plan for contestant in contestants for server in contestant.servers}
    if parts or any(workload.setting.inserts for workload, _ in plan):
        wanted.add("postgres")
    return wanted | ({"sqlite", "mysql"} if "store" in parts else set())


def _announce(run: Run, at: Places) -> None:
    expected = clock(run.progress.expected).strip()
    print(f"about {expected} minutes; {', '.join(f'{k}: {v}' for k, v in at.notes.items())}", flush=True)
    for name, reason in dict.fromkeys((name, reason) for (_, name), reason in run.left_out.items()):
        print(f"left out: {name}: {reason}", flush=True)


def _conclude(run: Run, options: argparse.Namespace, about: dict[str, Any], took: float) -> int:
    lines = report.summary(run.samples)
    report.tables(lines, run.left_out, {workload.id: workload.about for workload in WORKLOADS})
    reached = targets.outcomes(run.samples)
    rounds = "one round" if options.rounds == 1 else f"medians of {options.rounds} rounds"
    title = f"{rounds} of {options.seconds:g} s"
    report.show(targets.HEADINGS, [outcome.cells() for outcome in reached], title)
    missing = [{"workload": w, "contestant": c, "reason": reason} for (w, c), reason in run.left_out.items()]
    outcomes = [{name: getattr(one, name) for name in Outcome.__dataclass_fields__} for one in reached]
    written = report.write(run.samples, lines, {**about, "left_out": missing, "targets": outcomes}, options.json)
    drawn = plot.write(lines, f"oncekey beside the bare app and its peers, {title}", options.svg)
    print(
        f"{clock(took).strip()} minutes; every sample in {os.path.relpath(written)}, plot in {os.path.relpath(drawn)}"
    )
    return verdict(reached, set(run.failed), options.strict)


def verdict(reached: Sequence[Outcome], failed: set[tuple[str, str]], strict: bool) -> int:
    """Exit status: 1 when one of ours could not be measured; with ``--strict`` unless every target was met."""
    missed = [outcome.title for outcome in reached if outcome.reached == "no"]
    absent = [outcome.title for outcome in reached if outcome.reached not in {"yes", "no"}]
    ours = [f"{workload} {name}" for workload, name in sorted(failed) if name.split()[0] in {"oncekey", "bare"}]
    for word, titles in (("failed", ours), ("missed", missed), ("not measured", absent)):
        if titles:
            print(f"{word}: {'; '.join(titles)}")
    return 1 if ours or (strict and (missed or absent)) else 0


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """As JSON can hold them, and without the paths of this machine."""
    return {name: value for name, value in options.items() if not isinstance(value, Path)}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted before anything was measured")
