"""What one request costs the database: commits, round trips, bytes and records of WAL, page images, CPU.

Read from the server's own log (``pg_walinspect``, PostgreSQL 15 and later) over thousands of pairs of reserve and
complete in batches of 1, 8 and 64, of replays, of leases that a sweeper ends, and of keys that a reaper deletes.
``fresh``: right after a checkpoint, when the first touch of a page writes all of it; the larger the table, the more
often a touch is a first one. That is the one cost that grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import psycopg

from benchmarks.growth_fill import Say, Shape, replayable_key
from benchmarks.growth_rounds import BATCH, chance, spread
from benchmarks.quiet import tree_seconds
from benchmarks.store_alone import PairFailed, completion
from oncekey.core.states import Effects
from oncekey.stores.api import Duty
from oncekey.stores.postgres.store import PostgresStore
from oncekey.testing.servers import PostgresServer
from oncekey.upkeep import Sweeper

PAIRS = 12_800
ONES = 1_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request, one replay or one reaped key."""

    what: str
    keys: int
    batch: int
    wal_bytes: float
    image_bytes: float
    """Of them, in images of whole pages."""
    wal_records: float
    page_images: float
    commits: float
    statements: float
    """Round trips: every verb is one statement, and every statement its own commit."""
    server_us: float
    """CPU of all processes of the server, the background's included."""


class Counting(PostgresStore):
    statements = 0

    def _execute(self, statement: Any, parameters: Any) -> Any:
        self.statements += 1
        return super()._execute(statement, parameters)


class Meter:
    """The server's log, before and after: exact, where the statistics of a backend come a second late."""

    def __init__(self, server: PostgresServer, store: Counting) -> None:
        self._server, self._store = server, store
        self._watch = psycopg.connect(server.url, autocommit=True)
        self._watch.execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect")

    def read(self) -> tuple[str, float, float]:
        row = self._watch.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return row[0], float(self._store.statements), tree_seconds(self._server.pid)

    def between(self, first: str, last: str) -> tuple[float, float, float, float, float]:
        """Bytes, of them in page images; records, page images, commits."""
        if first == last:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        sums = self._watch.execute(
            "SELECT sum(record_length), sum(fpi_length), count(*), count(*) FILTER (WHERE fpi_length > 0), "
            "count(*) FILTER (WHERE record_type = 'COMMIT') FROM pg_get_wal_records_info(%s, %s)",
            [first, last],
        ).fetchone()
        assert sums is not None
        return tuple(map(float, sums))  # type: ignore[return-value]

    def close(self) -> None:
        self._watch.close()


def measure(server: PostgresServer, urls: dict[int, str], say: Say) -> list[dict[str, Any]]:
    found: list[Cost] = []
    for size, url in urls.items():
        store = Counting(url)
        store.check()
        meter = Meter(server, store)
        try:
            for cost in _costs(server, store, meter, size):
                say(_line(cost))
                found.append(cost)
        finally:
            meter.close()
            store.close()
    return [asdict(each) for each in found]


def _costs(server: PostgresServer, store: Counting, meter: Meter, size: int) -> Iterator[Cost]:
    server.execute("CHECKPOINT", timeout=600.0)
    yield _counted(meter, "first request, fresh", size, 64, PAIRS, lambda: _pairs(store, 64, PAIRS))
    for batch, pairs in ((64, PAIRS), (8, PAIRS // 4), (1, ONES)):
        yield _counted(meter, "first request", size, batch, pairs, partial(_pairs, store, batch, pairs))
    yield _counted(meter, "replay", size, 64, PAIRS, lambda: _replays(store, Shape(size)))
    store.reserve([replace(spread(), lease_seconds=0.0, effects=Effects.REPEATABLE) for _ in range(BATCH)])
    yield _counted(meter, "sweep", size, BATCH, BATCH, lambda: _sweep(store))
    reaped = 2 * BATCH
    yield _counted(meter, "reap", size, BATCH, reaped, lambda: _reap(store, reaped))


def _counted(meter: Meter, what: str, keys: int, batch: int, count: int, work: Callable[[], None]) -> Cost:
    first, statements, seconds = meter.read()
    work()
    last, statements_after, seconds_after = meter.read()
    wal, images_bytes, records, images, commits = (each / count for each in meter.between(first, last))
    trips, spent = (statements_after - statements) / count, (seconds_after - seconds) / count
    return Cost(what, keys, batch, wal, images_bytes, records, images, commits, trips, spent * 1e6)


def _line(cost: Cost) -> str:
    return (
        f"{cost.keys:>10,} keys, {cost.what:20} batches of {cost.batch:3}: {cost.wal_bytes:7,.0f} bytes of WAL "
        f"({cost.image_bytes:,.0f} in page images), "
        f"{cost.wal_records:5.2f} records, {cost.page_images:5.2f} page images, {cost.commits:.4f} commits, "
        f"{cost.statements:.4f} round trips, {cost.server_us:5.0f} µs of the server"
    )


def _pairs(store: PostgresStore, batch: int, pairs: int, lease: float = 60.0) -> None:
    for _ in range(pairs // batch):
        asked = [replace(spread(), lease_seconds=lease) for _ in range(batch)]
        answers = store.reserve(asked)
        store.swap([completion(mine, found) for mine, found in zip(asked, answers, strict=True)])


def _replays(store: PostgresStore, shape: Shape, count: int = PAIRS) -> None:
    for _ in range(count // 64):
        numbers = chance.sample(range(shape.replayable), 64)
        found = store.reserve([replace(spread(), scope=shape.tenant_of(n), key=replayable_key(n)) for n in numbers])
        if any(each.record is None or each.record.response is None for each in found):
            raise PairFailed("a key that is there was not replayed")


def lingering(url: str, say: Say, steps: int = 4, ended: int = 12_800) -> list[dict[str, float]]:
    """What a sweep takes while the leases of requests that have ended wait for a vacuum in its index.

    Their entries are dead, but stand before those that are due: the first look goes through each of them once, later
    ones only through their pages.
    """
    store = PostgresStore(url, timeout=60.0)
    found: list[dict[str, float]] = []
    with psycopg.connect(url, autocommit=True) as own:
        own.execute("ALTER TABLE idempotency_keys SET (autovacuum_enabled = off)")
        own.execute("VACUUM (INDEX_CLEANUP ON) idempotency_keys")
        for step in range(steps + 1):
            if step:
                _pairs(store, 64, ended, lease=0.0)
            looks = []
            for _ in range(2):
                began = time.perf_counter()
                store.due(Duty.LEASES, BATCH)
                looks.append((time.perf_counter() - began) * 1000)
            found.append({"dead": step * ended, "first look ms": looks[0], "later look ms": looks[1]})
            say(
                f"  sweep's look with {step * ended:,} ended leases in its index: "
                f"{looks[0]:.1f} ms, again {looks[1]:.1f} ms"
            )
        began = time.perf_counter()
        own.execute("VACUUM (INDEX_CLEANUP ON) idempotency_keys")
        found.append({"vacuum ms": (time.perf_counter() - began) * 1000})
        say(f"  the vacuum that ends it: {found[-1]['vacuum ms']:,.0f} ms")
        own.execute("ALTER TABLE idempotency_keys RESET (autovacuum_enabled)")
    store.close()
    return found


def _sweep(store: PostgresStore) -> None:
    if Sweeper(store, batch=BATCH).run().released != BATCH:
        raise PairFailed("the sweeper did not release them all")


def _reap(store: PostgresStore, count: int) -> None:
    for _ in range(count // BATCH):
        if store.purge(BATCH) != BATCH:
            raise PairFailed("there was not enough to reap: give the store a larger shape")
