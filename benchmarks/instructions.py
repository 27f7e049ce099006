"""How many instructions a request takes, by layer, and whether it is more than the committed figure.

``make bench ARGS=--instructions``, about 2 minutes. Rates on a shared machine differ by a third from one minute to the
next, and instructions by less than one in a hundred: this is the gate of CI, and the way to compare two versions of a
line. ``in_process.py`` says what runs, and ``callgrind.py`` how it is counted, with a real PostgreSQL; or with a real
Redis (``--store redis``), which the gate does not look at.

It is no time: the kernel, waiting, and what misses the caches are not in it.

The gate compares ``first / bare`` and ``replay / bare`` with those of ``instructions.json``, if that was made with the
same minor version of Python. More than ``SLACK`` above is a failure. After a change that is worth its cost, or that
saves some, ``UPDATE`` writes the file anew, and the new file is part of that change.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import callgrind, report
from benchmarks.apps import CACHE
from benchmarks.callgrind import LOOP, OURS, CannotCount, Counted
from benchmarks.in_process import AT_ONCE, DOCUMENTS, INSERTS, MODES, PEERS, REQUESTS, WITH_OPTIONS, place_of
from benchmarks.places import places

FIGURES = Path(__file__).with_suffix(".json")
GATED = ("first", "replay")
SLACK = 0.03
UPDATE = 'make bench ARGS="--instructions --update"'
NUMBER = {"requests": 24 * AT_ONCE, "documents": 3}
WORTH_A_LINE = 2_000
"""Instructions of a layer below which it is added to the other ones."""
VERSIONS = ("uvicorn", "uvloop", "httptools", "starlette", "psycopg", "orjson")


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    try:
        counted = _count(options)
    except CannotCount as reason:
        print(f"skipped: {reason}")
        return 0
    if options.layers and (modes := [mode for mode in (*REQUESTS, *WITH_OPTIONS, *PEERS, *INSERTS) if mode in counted]):
        report.show(("instructions a request", *modes), table(counted, modes), "by layer of Python code")
    if options.store != "postgres" or not set(REQUESTS) <= set(counted):
        return 0
    if options.update:
        FIGURES.write_text(json.dumps(figures(counted), indent=2) + "\n")
        print(f"{FIGURES.name} is written: commit it with the change that it belongs to")
        return 0
    failures = gate(counted, json.loads(FIGURES.read_text()))
    for line in failures:
        print(line)
    return 1 if any(line.startswith("failed") for line in failures) else 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("modes", nargs="*", help=f"of {', '.join(MODES)}; bare, replay and first where none is named")
    parser.add_argument("--no-layers", dest="layers", action="store_false", help="only the sums, in half the time")
    parser.add_argument("--update", action="store_true", help=f"write {FIGURES.name}, which the gate compares with")
    parser.add_argument("--store", choices=("postgres", "redis"), default="postgres", help="no gate with redis")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help=f"requests under way at a time ({AT_ONCE})")
    options = parser.parse_args(arguments)
    options.modes = options.modes or list(REQUESTS)
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"{', '.join(sorted(unknown))}: it takes {', '.join(MODES)}")
    if options.store != "postgres" and (only := set(options.modes) & {*INSERTS, *DOCUMENTS}):
        parser.error(f"{', '.join(sorted(only))}: not with --store {options.store}")
    if options.store != "redis" and (only := set(options.modes) & {*PEERS}):
        parser.error(f"{', '.join(sorted(only))}: only with --store redis")
    if options.store != "postgres" and options.update:
        parser.error(f"{FIGURES.name} has the figures of PostgreSQL")
    if options.at_once != AT_ONCE and set(REQUESTS) <= set(options.modes):
        parser.error(f"the gate's figures are of {AT_ONCE} requests at a time: name the modes that you want")
    return options


def _count(options: argparse.Namespace) -> dict[str, Counted]:
    counted: dict[str, Counted] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        library = callgrind.build(Path(folder))  # first, since it is what most machines lack
        store = options.store
        caches = any(mode.endswith("+cache") for mode in options.modes)
        at = stack.enter_context(places({store, "redis"} if caches else {store}))
        os.environ[CACHE] = at.urls.get("redis", "")
        if store not in at.urls:
            raise CannotCount(f"{store} cannot run here: {at.missing[store]}")
        for mode in [mode for mode in MODES if mode in options.modes]:
            documents = mode in DOCUMENTS
            number = NUMBER["documents" if documents else "requests"]
            settings: dict[str, Any] = {
                "url": at.urls[place_of(mode, store)],
                "library": library,
                "at_once": options.at_once,
            }
            once = callgrind.count(mode, number, by_layer=False, **settings)
            layers: Mapping[str, float] = {}
            if options.layers and not documents:
                layers = callgrind.count(mode, number, by_layer=True, **settings).layers
            counted[mode] = Counted(once.all, dict(layers))
            plain = mode.partition("+")[0]
            beside = "parsing" if documents else "insert-bare" if mode in INSERTS else "bare"
            beside = plain if plain != mode else beside
            part = f"   {beside} / {mode} {counted[beside].all / once.all:.3f}" if beside in counted else ""
            what = "document" if documents else "request"
            print(f"{mode:9} {once.all:13,.0f} instructions a {what}{part}", flush=True)
    return counted


def table(counted: Mapping[str, Counted], modes: Sequence[str]) -> list[tuple[str, ...]]:
    """One row for each layer, the dearest on top; then the sums."""
    layers = [counted[mode].layers for mode in modes]
    dearest: dict[str, float] = {}
    for costs in layers:
        for name, cost in costs.items():
            dearest[name] = max(cost, dearest.get(name, 0))
    names = sorted(dearest, key=lambda name: -dearest[name])
    own = [name for name in names if name.startswith(OURS)]
    small = [name for name in own if dearest[name] < WORTH_A_LINE]
    others = [name for name in names if name not in own and name != LOOP]

    def row(title: str, of: Sequence[str]) -> tuple[str, ...]:
        return title, *(f"{sum(costs.get(name, 0) for name in of):,.0f}" for costs in layers)

    return [
        *(row(name, [name]) for name in own if name not in small),
        row("oncekey/ other modules", small),
        row("oncekey in all", own),
        *(row(name, [name]) for name in others),
        row(LOOP, [LOOP]),
        ("in all, without the hook for frames", *(f"{counted[mode].all:,.0f}" for mode in modes)),
    ]


def figures(counted: Mapping[str, Counted]) -> dict[str, Any]:
    """What is committed: the counts, and what they were made with."""
    return {
        "instructions": {mode: round(counted[mode].all) for mode in REQUESTS},
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in VERSIONS},
    }


def gate(counted: Mapping[str, Counted], committed: Mapping[str, Any]) -> list[str]:
    """What is to be said of the counts beside the committed ones; a line that begins with "failed" fails the run."""
    if _minor(committed["python"]) != _minor(platform.python_version()):
        return [f"not compared: {FIGURES.name} was made with Python {committed['python']}"]
    now = figures(counted)
    changed = [
        f"{name} {version}, here {now['packages'].get(name)}"
        for name, version in committed["packages"].items()
        if version != now["packages"].get(name)
    ]
    said = [f"{FIGURES.name} was made with {', '.join(changed)}"] if changed else []
    for mode in GATED:
        was, costs = (of["instructions"][mode] / of["instructions"]["bare"] for of in (committed, now))
        change = costs / was - 1
        words = f"{mode}: {costs:.3f} of the bare app, {FIGURES.name} has {was:.3f}: {change:+.1%}"
        if change > SLACK:
            said.append(f"failed: {words}, more than {SLACK:.0%}. If the change is worth it: {UPDATE}")
        elif change < -SLACK:
            said.append(f"{words}. So that it stays so: {UPDATE}")
        else:
            said.append(words)
    return said


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


if __name__ == "__main__":
    sys.exit(main())
