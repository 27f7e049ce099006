"""What a reaper with a backlog costs the requests of the day: ``python -m benchmarks.reaping``.

A PostgreSQL with a million final keys, of which a hundred thousand are past their expiry. The app is loaded in turns,
with a reaper at work in another process (this one) and without, until nothing is left to reap; which of the two comes
first changes from round to round, so that what drifts, drifts for both. A round in which the reaper ran out of work
does not count. Exit status 1: the requests lost more than a fifth of their throughput.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psycopg

from benchmarks import load
from benchmarks.places import places
from benchmarks.quiet import NOISE, Patience
from benchmarks.serving import Served, serving
from oncekey.stores.registry import open_store
from oncekey.upkeep import Reaper

FLOOR = 0.8
FILL = """
INSERT INTO idempotency_keys (
    scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
    response_status, response_headers, response_body, response_schema_version, created_at, finished_at,
    retention_seconds, expires_at
)
SELECT
    'tenant-' || n %% 100, md5(n::text), 'POST /payments', sha256(n::text::bytea), 1, 'external', 'completed', 1,
    'owner-' || n, now() - interval '1 day', 201, '[["content-type","application/json"]]',
    convert_to(repeat('x', 90), 'UTF8'), 1, now() - interval '1 day', now() - interval '1 day', 86400,
    now() + CASE WHEN n <= %(due)s THEN interval '-1 minute' ELSE interval '1 day' END
FROM generate_series(1, %(keys)s) AS n
ORDER BY md5(n::text)
"""


class Run:
    """Pairs of rates, with and without a reaper, and how much it reaped."""

    def __init__(self, url: str, generator: Path, seconds: float, patience: float) -> None:
        self.store = open_store(url)
        self.generator = generator
        self.seconds = seconds
        self.patience = Patience(patience, lambda text: print(text, flush=True))
        self.rates: dict[bool, list[float]] = {True: [], False: []}
        self.reaped = 0
        self.over = False
        """Nothing is left to reap."""

    def pair(self, served: Served, number: int) -> None:
        measured: dict[bool, float] = {}
        for reaping in (False, True) if number % 2 else (True, False):
            before = self.reaped
            rate, others = self.patience.measure(partial(self._reaping if reaping else self._load, served))
            measured[reaping] = rate
            word = f"reaping {self.reaped - before:7,} keys" if reaping else "no reaper           "
            noise = f"  (others {others:.2f} cores)" if others > NOISE else ""
            print(f"round {number}  {word}  {rate:9,.0f} requests/s{noise}", flush=True)
        if self.over:
            print("       left out: the reaper ran out of work", flush=True)
            return
        for reaping, rate in measured.items():
            self.rates[reaping].append(rate)

    def _load(self, served: Served) -> float:
        return load.run(self.generator, served.port, "first", seconds=self.seconds, warmup=0.5).rps

    def _reaping(self, served: Served) -> float:
        stop = threading.Event()
        ended = threading.Event()

        def reap() -> None:
            self.reaped += Reaper(self.store).run(stop).deleted
            ended.set()
            self.store.disconnect()

        reaper = threading.Thread(target=reap)
        reaper.start()
        try:
            rate = self._load(served)
            self.over = ended.is_set()
        finally:
            stop.set()
            reaper.join()
        return rate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reaping", description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000, help="final keys in the table (1,000,000)")
    parser.add_argument("--due", type=int, default=100_000, help="of them past their expiry (100,000)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (3)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine (60)")
    options = parser.parse_args(arguments)
    with places({"postgres"}) as at:
        if "postgres" not in at.urls:
            raise SystemExit(f"no PostgreSQL: {at.missing['postgres']}")
        url = at.urls["postgres"]
        generator = load.compile_generator(at.folder)
        with serving(store=url) as served:
            began = time.monotonic()
            with psycopg.connect(url, autocommit=True) as own:
                own.execute(FILL, {"keys": options.keys, "due": options.due})
                own.execute("VACUUM ANALYZE idempotency_keys")
            print(f"{options.keys:,} keys, {options.due:,} to reap ({time.monotonic() - began:.0f} s)", flush=True)
            run = Run(url, generator, options.seconds, options.patience)
            number = 0
            while not run.over:
                number += 1
                run.pair(served, number)
            run.store.disconnect()
    if not run.rates[True]:
        raise SystemExit("the reaper was done before one measurement was: give it more with --due, or less --seconds")
    without, with_reaper = (statistics.median(run.rates[reaping]) for reaping in (False, True))
    pairs = [reaping / quiet for quiet, reaping in zip(run.rates[False], run.rates[True], strict=True)]
    ratio = statistics.median(pairs)
    print(
        f"reaped {run.reaped:,} keys; medians of {len(pairs)} pairs: {without:,.0f} requests/s without a reaper, "
        f"{with_reaper:,.0f} with one; ratio {ratio:.2f} (from {min(pairs):.2f} to {max(pairs):.2f}), "
        f"at least {FLOOR:.2f} is wanted: {'ok' if ratio >= FLOOR else 'MISSED'}"
    )
    return 0 if ratio >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
