"""Whether anything grows with the number of keys: ``python -m benchmarks.growth``.

Fills stores of 10 thousand, 1 million and 10 million keys side by side on one server, and measures each of them in
turns: first request, replay, the store alone, one sweep and one reap of 500 keys, a health check. Printed as ratios to
the smallest, pair by pair, so that what drifts, drifts for all. Then what a key weighs in bytes, what every statement
reads (``growth_plans``), what a request writes (``growth_costs``), and what a table that turns over many times becomes
(``growth_turnover``). Exit status 1: a wanted ratio was missed.

Ten million keys need 25 GB of disk with their log, and many minutes to fill; ``--sizes 10000,1000000`` is a short form.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import growth_costs, growth_plans, growth_turnover
from benchmarks.growth_fill import Shape, fill
from benchmarks.growth_rounds import FINGERPRINT, Subject
from benchmarks.places import DURABLE
from benchmarks.quiet import others_seconds, tree_seconds
from oncekey.testing.servers import PostgresServer
from oncekey.web import tuning

SIZES = (10_000, 1_000_000, 10_000_000)
SETTINGS = {"shared_buffers": "4GB", "max_wal_size": "16GB", "checkpoint_timeout": "15min"}
"""Of a server with 16 GB of memory. Durability is the default, and is looked at before anything is measured."""
RESULTS = Path(__file__).with_name("results") / "growth.json"
FIRST, REPLAYS, PAIRS = 2_560, 2_560, 2_560
"""In one round, at each size."""
SLICES, REAPS, WARM = 8, 4, 320
WANTED = {"first request": 0.9, "sweep of 500": 1.2, "reap of 500": 1.2}
"""At the largest size / at the smallest: of rates at least, of times at most."""
RATES = ("first request", "replay", "store pairs")
TIMES = ("CPU of a first", "sweep of 500", "reap of 500", "health")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


async def in_turns(urls: dict[int, str], rounds: int, server: int | None) -> dict[int, list[dict[str, float]]]:
    """Every kind of work in thin slices, each size after the other, each time in another order: noise hits all alike.

    The small stores are filled anew for each round, or they would grow.
    """
    shapes = {size: Shape(size, FINGERPRINT) for size in urls}
    found: dict[int, list[dict[str, float]]] = {size: [] for size in urls}
    subjects = {size: Subject(url, shapes[size]) for size, url in urls.items()}
    tuning.settle()
    try:
        for number in range(rounds):
            for size in _small(urls) if number else ():
                subjects.pop(size).close()
                await asyncio.to_thread(fill, urls[size], shapes[size], lambda _: None)
                subjects[size] = Subject(urls[size], shapes[size])
            before, began = others_seconds(), time.monotonic()
            took = await one_round(subjects, number, server)
            others = (others_seconds() - before) / (time.monotonic() - began)
            for size, each in took.items():
                found[size].append(each | {"others": others})
                shown = ", ".join(f"{name} {_shown(name, value)}" for name, value in each.items())
                say(f"round {number + 1} of {rounds}, {size:>10,} keys: {shown} (others: {others:.2f} cores)")
    finally:
        for subject in subjects.values():
            subject.close()
    return found


def _small(urls: dict[int, str]) -> list[int]:
    """The sizes that a round changes beyond recognition: they are filled anew before whatever comes next."""
    return [size for size in urls if size < 100 * FIRST]


async def one_round(
    subjects: dict[int, Subject], number: int, server: int | None, slices: int = SLICES
) -> dict[int, dict[str, float]]:
    """Rates and times of every kind of work at every size; ``server``: whose CPU time belongs to it."""

    def cpu() -> float:
        return time.process_time() + (tree_seconds(server) if server else 0.0)

    sizes = sorted(subjects)
    for size in sizes:
        await subjects[size].first(WARM)
        await subjects[size].replay(WARM)
    took: dict[int, dict[str, list[float]]] = {size: {name: [] for name in [*RATES, *TIMES]} for size in sizes}
    for part in range(slices):
        turned = (number + part) % len(sizes)
        order = sizes[turned:] + sizes[:turned]
        for size in order:
            before = cpu()
            took[size]["first request"].append(await subjects[size].first(FIRST // SLICES))
            took[size]["CPU of a first"].append((cpu() - before) * SLICES / FIRST)
        for size in order:
            took[size]["replay"].append(await subjects[size].replay(REPLAYS // SLICES))
        for size in order:
            took[size]["store pairs"].append(subjects[size].pairs(PAIRS // SLICES))
        for size in order:
            took[size]["sweep of 500"].append(subjects[size].sweep())
        for size in order:
            if part < REAPS:
                took[size]["reap of 500"].append(subjects[size].reap())
        for size in order:
            took[size]["health"].append(subjects[size].health())
    middle = {"CPU of a first": statistics.fmean}  # ticks of 10 ms
    return {
        size: {name: middle.get(name, statistics.median)(values) for name, values in each.items()}
        for size, each in took.items()
    }


def _shown(name: str, value: float) -> str:
    if name in RATES:
        return f"{value:,.0f}/s"
    return f"{value * 1e6:.0f} µs" if value < 0.001 else f"{value * 1000:.1f} ms"


def report(store: str, found: dict[int, list[dict[str, float]]]) -> bool:
    """Print medians and ratios; whether all that is wanted of the largest was reached."""
    smallest, largest = min(found), max(found)
    reached = True
    print(
        f"\n{store}: medians of {len(found[smallest])} rounds; ratios to {smallest:,} keys, round by round (from..to)"
    )
    for name in [*RATES, *TIMES]:
        line = f"  {name:14}"
        for size, rounds in found.items():
            value = statistics.median(each[name] for each in rounds)
            pairs = [mine[name] / base[name] for mine, base in zip(rounds, found[smallest], strict=True)]
            ratio = statistics.median(pairs)
            line += f"   {_shown(name, value):>10}"
            if size != smallest:
                line += f" {ratio:5.2f} ({min(pairs):.2f}..{max(pairs):.2f})"
            if size == largest and name in WANTED and size != smallest:
                wanted = WANTED[name]
                ok = ratio >= wanted if name in RATES else ratio <= wanted
                reached &= ok
                line += f" {'ok' if ok else 'MISSED'}: {'>=' if name in RATES else '<='} {wanted}"
        print(line)
    return reached


def weights(url: str) -> dict[str, float]:
    """Bytes per key of the table and of each of its indexes."""
    with psycopg.connect(url, autocommit=True) as own:
        rows = own.execute(
            "SELECT relname, pg_relation_size(oid) / (SELECT count(*) FROM idempotency_keys)::float8 FROM pg_class "
            "WHERE relname LIKE 'idempotency_keys%' AND relkind IN ('r', 'i') ORDER BY 2 DESC"
        ).fetchall()
    return {name.removeprefix("idempotency_"): size for name, size in rows}


def warm(url: str) -> None:
    """The primary key in memory, where a server that has run for a day has it; without the extension it stays cold."""
    with psycopg.connect(url, autocommit=True) as own, suppress(psycopg.errors.FeatureNotSupported):
        own.execute("CREATE EXTENSION IF NOT EXISTS pg_prewarm")
        own.execute("SELECT pg_prewarm('idempotency_keys_pkey')")


@contextmanager
def postgres(settings: dict[str, str]) -> Iterator[PostgresServer]:
    with PostgresServer(settings=settings) as server:
        for name, value in DURABLE.items():
            [(actual,)] = server.execute(f"SHOW {name}")
            if actual != value:
                raise SystemExit(f"PostgreSQL has {name}={actual}: this benchmark counts only what is durable")
        yield server


def on_postgres(options: argparse.Namespace, settings: dict[str, str]) -> tuple[dict[str, Any], bool]:
    found: dict[str, Any] = {"settings": settings}
    ok = True
    with postgres(settings) as server:
        say(f"PostgreSQL with {settings}")
        if not {"rounds", "bytes", "plans", "costs"}.isdisjoint(options.parts):
            urls = {size: server.database(f"keys_{size}") for size in options.sizes}
            for size, url in urls.items():
                fill(url, Shape(size, FINGERPRINT), say)
                warm(url)
            if "bytes" in options.parts:
                found["bytes per key"] = {size: weights(url) for size, url in urls.items()}
                for size, each in found["bytes per key"].items():
                    words = ", ".join(f"{name} {value:.0f}" for name, value in each.items() if value >= 0.5)
                    say(f"{size:>10,} keys: {sum(each.values()):.0f} bytes a key ({words})")
            server.execute("CHECKPOINT", timeout=600.0)
            if "rounds" in options.parts:
                found["rounds"] = asyncio.run(in_turns(urls, options.rounds, server.pid))
                ok = report("PostgreSQL", found["rounds"])
            for size in _small(urls):
                fill(urls[size], Shape(size, FINGERPRINT), lambda _: None)
            if "plans" in options.parts:
                found["plans"] = {size: growth_plans.look_at(url, say) for size, url in urls.items()}
                ok &= growth_plans.report(found["plans"])
            if "costs" in options.parts:
                found["costs"] = growth_costs.measure(server, urls, say)
                found["lingering"] = {}
                for size, url in urls.items():
                    say(f"{size:,} keys:")
                    found["lingering"][size] = growth_costs.lingering(url, say)
        if "turnover" in options.parts:
            found["turnover"] = growth_turnover.compare(server, options.turnovers, options.live, say)
    return found, ok


def on_sqlite(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-growth-")))
        urls = {size: f"sqlite:///{folder / f'keys-{size}.db'}" for size in options.sizes}
        bytes_per_key = {}
        for size, url in urls.items():
            fill(url, Shape(size, FINGERPRINT), say)
            bytes_per_key[size] = (folder / f"keys-{size}.db").stat().st_size / size
            say(f"{size:>10,} keys: {bytes_per_key[size]:.0f} bytes a key")
        rounds = asyncio.run(in_turns(urls, options.rounds, None))
        return {"bytes per key": bytes_per_key, "rounds": rounds}, report("SQLite", rounds)


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument(
        "--sizes", type=_numbers, default=list(SIZES), help="keys of each store (10000,1000000,10000000)"
    )
    parser.add_argument("--stores", type=_words("postgres", "sqlite"), default=["postgres", "sqlite"])
    parts = ("rounds", "bytes", "plans", "costs", "turnover")
    parser.add_argument("--parts", type=_words(*parts), default=list(parts), help=f"some of {','.join(parts)}")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turnovers", type=int, default=8, help="how many times the table's keys are all replaced (8)")
    parser.add_argument("--live", type=int, default=100_000, help="keys alive in the table that turns over (100,000)")
    parser.add_argument("--setting", action="append", default=[], help="NAME=VALUE of PostgreSQL; repeatable")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return sorted(int(word) for word in text.split(","))


def _words(*known: str) -> Any:
    def read(text: str) -> list[str]:
        words = text.split(",")
        if not set(words) <= set(known):
            raise argparse.ArgumentTypeError(f"it takes {', '.join(known)}")
        return words

    return read


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    logging.getLogger("oncekey").setLevel(
        logging.CRITICAL
    )  # a line for every lease that is swept is not what is measured
    settings = SETTINGS | dict(word.split("=", 1) for word in options.setting)
    results: dict[str, Any] = {}
    reached = True
    if "postgres" in options.stores:
        results["postgres"], ok = on_postgres(options, settings)
        reached &= ok
    if "sqlite" in options.stores and "rounds" in options.parts:
        results["sqlite"], ok = on_sqlite(options)
        reached &= ok
    options.results.write_text(json.dumps(results, indent=1, default=asdict) + "\n")
    say(f"every sample is in {options.results.name}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
