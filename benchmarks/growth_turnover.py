"""A table whose keys are all replaced, many times over: whether it stays as large as its keys.

An hour, a day, a week simulated by volume: requests come as fast as the store takes them, the oldest keys are reaped as
fast as new ones come, and the server's own autovacuum does the rest. Only its nap is shortened, to one second, since a
day passes here in half a minute; the work between two vacuums is then still far more than in life. What is written
down after each turnover: sizes, dead rows, vacuums so far, and what a sweep and a reap take.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import psycopg

from benchmarks.growth_fill import Say
from benchmarks.growth_rounds import BATCH, spread
from benchmarks.store_alone import completion
from oncekey.core.record import Reservation
from oncekey.stores.postgres.store import PostgresStore
from oncekey.testing.servers import PostgresServer
from oncekey.upkeep import Sweeper

ROWS = 64
STEADY = 1.25
"""How much larger the table may be after the last turnover than after the second."""
VARIANTS = {
    "defaults": "",
    "vacuum at 2 %": "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000",
    "vacuum at 2 %, fillfactor 80": (
        "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, fillfactor = 80"
    ),
}
_LOOK = """
SELECT
    pg_relation_size('idempotency_keys'), pg_relation_size('idempotency_keys_pkey'),
    pg_relation_size('idempotency_keys_leases'), pg_relation_size('idempotency_keys_expired'),
    s.n_live_tup, s.n_dead_tup, s.autovacuum_count, s.n_tup_hot_upd
FROM pg_stat_user_tables AS s WHERE s.relname = 'idempotency_keys'
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """After one turnover."""

    table: int
    pkey: int
    leases: int
    expired: int
    live: int
    dead: int
    vacuums: int
    hot_updates: int
    pairs_per_second: float
    sweep_ms: float
    reap_ms: float

    @property
    def total(self) -> int:
        return self.table + self.pkey + self.leases + self.expired


def young() -> Reservation:
    """Expires at once: what is reaped is decided by volume, the oldest first."""
    return replace(spread(), retention_seconds=0.0)


def turn(store: PostgresStore, live: int, have: int) -> tuple[float, float, float]:
    """Replace as many keys as the table has; pairs per second, and the longest sweep and reap on the way."""
    sweeper = Sweeper(store)
    sweeps, reaps = [0.0], [0.0]
    began, done = time.perf_counter(), 0
    while done < live:
        for _ in range(BATCH // ROWS + 1):
            asked = [young() for _ in range(ROWS)]
            answers = store.reserve(asked)
            store.swap([completion(mine, found) for mine, found in zip(asked, answers, strict=True)])
            done += ROWS
            have += ROWS
        if have >= live:
            at = time.perf_counter()
            have -= store.purge(BATCH // ROWS * ROWS + ROWS)
            reaps.append(time.perf_counter() - at)
        if done % (live // 20) < BATCH:
            at = time.perf_counter()
            sweeper.run()
            sweeps.append(time.perf_counter() - at)
    return done / (time.perf_counter() - began), max(sweeps) * 1000, max(reaps) * 1000


def run(url: str, options: str, turnovers: int, live: int, say: Say) -> list[Turn]:
    store = PostgresStore(url, timeout=60.0)
    store.migrate()
    found: list[Turn] = []
    with psycopg.connect(url, autocommit=True) as own:
        if options:
            own.execute(f"ALTER TABLE idempotency_keys SET ({options})".encode())
        for number in range(turnovers + 1):
            rate, sweep, reap = turn(store, live, 0 if number == 0 else live)
            own.execute("SELECT pg_stat_clear_snapshot()")
            row = own.execute(_LOOK.encode()).fetchone()
            assert row is not None
            table, pkey, leases, expired, alive, dead, vacuums, hot = map(int, row)
            each = Turn(table, pkey, leases, expired, alive, dead, vacuums, hot, rate, sweep, reap)
            found.append(each)
            say(
                f"  turnover {number}: table {_mb(each.table)}, pkey {_mb(each.pkey)}, leases {_mb(each.leases)}, "
                f"expired {_mb(each.expired)}, dead {each.dead:,}, vacuums {each.vacuums}, {rate:,.0f} pairs/s, "
                f"longest sweep {sweep:.0f} ms, reap {reap:.0f} ms, {hot:,} HOT updates"
            )
    store.close()
    return found


def compare(server: PostgresServer, turnovers: int, live: int, say: Say) -> dict[str, Any]:
    """Every variant on a database of its own."""
    server.execute("ALTER SYSTEM SET autovacuum_naptime = '1s'")
    server.execute("SELECT pg_reload_conf()")
    results: dict[str, Any] = {}
    for number, (name, options) in enumerate(VARIANTS.items()):
        say(f"{name}: {live:,} keys, replaced {turnovers} times")
        turns = run(server.database(f"turnover_{number}"), options, turnovers, live, say)
        server.drop_database(f"turnover_{number}")
        grown = turns[-1].total / turns[min(2, len(turns) - 1)].total
        say(f"{name}: {grown:.2f} of its size after the second turnover: {'bounded' if grown <= STEADY else 'GROWING'}")
        results[name] = {"turns": [asdict(each) for each in turns], "grown": grown}
    return results


def _mb(size: int) -> str:
    return f"{size / 2**20:.1f} MB"
