"""Fills a store with very many keys, in the shape that traffic leaves: ``fill(url, shape)``.

Keys are random UUIDs of a thousand tenants; rows stand in the order in which they came, and so in the order in which
they expire. Nearly all are completed, with a stored response of about 300 bytes; a few are unknown, retryable or
leased. Some keys are ``replayable``: their names can be worked out again, and their fingerprint is the one that
``growth_rounds`` sends. Everything else in a row is random, so that nothing compresses better than it would in life.

PostgreSQL gets its rows first and its indexes after, with the room in them that random inserts leave: a twentieth of
the time.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from oncekey.stores.registry import open_store

TENANTS = 1000
RETENTION = 86_400.0
OPERATION = "POST /payments"
STEP = 250_000
"""Rows of one statement: what a progress line is about."""
ROOM = 70
"""Per cent of an index page that are in use when keys came in random order."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Shape:
    keys: int
    fingerprint: bytes = bytes(32)
    """Of the request that replayable keys answer."""

    @property
    def due(self) -> int:
        """How many are past their expiry: the oldest."""
        return min(20_000, self.keys // 4)

    @property
    def replayable(self) -> int:
        return min(10_000, self.keys // 4)

    @property
    def odd(self) -> int:
        """How many are unknown, as many retryable, and as many leased."""
        return min(3_000, self.keys // 100)

    @property
    def stride(self) -> int:
        return max(1, (self.keys - self.due) // self.replayable)

    def tenant_of(self, number: int) -> str:
        """Of the replayable key with this number, from 0."""
        return f"tenant-{(self.due + 1 + number * self.stride) % TENANTS}"


def replayable_key(number: int) -> str:
    return str(UUID(hashlib.md5(f"replayable-{number}".encode()).hexdigest()))  # noqa: S324 - spreads keys, hides nothing


_COLUMNS = """
    scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
    reconcile_tries, reconcile_at, created_at, finished_at, retention_seconds, expires_at,
    response_status, response_headers, response_schema_version, response_body
"""

# n: the row's number · odd: which of the odd states it has, or none · at: when it came, in seconds from now
_POSTGRES = f"""
INSERT INTO idempotency_keys ({_COLUMNS})
SELECT
    'tenant-' || n %% {TENANTS}, key, '{OPERATION}',
    CASE WHEN replays THEN %(fingerprint)s ELSE sha256(n::text::bytea) END, 2, 'external', state, 1,
    left(md5(n::text), 24) || '-' || to_hex(n),
    CASE WHEN state = 'in_progress' THEN now() + interval '1 day' ELSE came + interval '1 minute' END, 0,
    CASE WHEN state = 'unknown' THEN now() + interval '1 day' END, came,
    CASE WHEN state = 'completed' THEN came END, {RETENTION}, came + {RETENTION} * interval '1 second',
    CASE WHEN state = 'completed' THEN 201 END,
    CASE WHEN state = 'completed' THEN '[["content-type","application/json"],["location","/payments/' || n || '"]]' END,
    CASE WHEN state = 'completed' THEN 1 END,
    CASE WHEN state = 'completed' THEN convert_to(
        '{{"id":"' || gen_random_uuid() || '","amount":' || n || ',"currency":"EUR","status":"created","reference":"'
        || md5(n::text) || md5((n + 1)::text) || md5((n + 2)::text) || md5((n + 3)::text) || '"}}', 'UTF8'
    ) END
FROM (
    SELECT
        n, replays,
        CASE
            WHEN replays THEN md5('replayable-' || number)::uuid::text ELSE gen_random_uuid()::text
        END AS key,
        CASE
            WHEN replays OR n <= %(due)s OR n %% %(every)s > 2 THEN 'completed'
            ELSE (ARRAY['unknown', 'failed_retryable', 'in_progress'])[1 + n %% %(every)s]
        END AS state,
        now() - interval '1 day' + CASE
            WHEN n <= %(due)s THEN (n - %(due)s - 60) * interval '1 millisecond' - interval '1 minute'
            ELSE interval '1 hour' + (n - %(due)s)::double precision / %(keys)s * interval '22 hours'
        END AS came
    FROM (
        SELECT
            n, (n - %(due)s - 1) / %(stride)s AS number,
            n > %(due)s AND (n - %(due)s - 1) %% %(stride)s = 0 AND (n - %(due)s - 1) / %(stride)s < %(replayable)s
            AS replays
        FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
    ) AS numbered
) AS k
"""

_SQLITE = f"""
WITH RECURSIVE series (n) AS (SELECT :first UNION ALL SELECT n + 1 FROM series WHERE n < :last),
numbered AS (
    SELECT
        n, (n - :due - 1) / :stride AS number,
        n > :due AND (n - :due - 1) % :stride = 0 AND (n - :due - 1) / :stride < :replayable AS replays,
        lower(hex(randomblob(16))) AS random
    FROM series
),
k AS (
    SELECT
        n, replays,
        CASE
            WHEN replays THEN replayable_key(number)
            ELSE substr(random, 1, 8) || '-' || substr(random, 9, 4) || '-4' || substr(random, 14, 3) || '-8'
                || substr(random, 18, 3) || '-' || substr(random, 21, 12)
        END AS key,
        CASE
            WHEN replays OR n <= :due OR n % :every > 2 THEN 'completed'
            ELSE CASE n % :every WHEN 0 THEN 'unknown' WHEN 1 THEN 'failed_retryable' ELSE 'in_progress' END
        END AS state,
        :now - 86400.0 + CASE
            WHEN n <= :due THEN (n - :due - 60) / 1000.0 - 60.0
            ELSE 3600.0 + 1.0 * (n - :due) / :keys * 79200.0
        END AS came
    FROM numbered
)
INSERT INTO idempotency_keys ({_COLUMNS})
SELECT
    'tenant-' || (n % {TENANTS}), key, '{OPERATION}', CASE WHEN replays THEN :fingerprint ELSE randomblob(32) END, 2,
    'external', state, 1, lower(hex(randomblob(12))) || '-' || n,
    CASE WHEN state = 'in_progress' THEN :now + 86400.0 ELSE came + 60.0 END, 0,
    CASE WHEN state = 'unknown' THEN :now + 86400.0 END, came, CASE WHEN state = 'completed' THEN came END,
    {RETENTION}, came + {RETENTION}, CASE WHEN state = 'completed' THEN 201 END,
    CASE WHEN state = 'completed' THEN '[["content-type","application/json"],["location","/payments/' || n || '"]]' END,
    CASE WHEN state = 'completed' THEN 1 END,
    CASE WHEN state = 'completed' THEN CAST(
        '{{"id":"' || key || '","amount":' || n || ',"currency":"EUR","status":"created","reference":"'
        || hex(randomblob(64)) || '"}}' AS BLOB
    ) END
FROM k
"""


def fill(url: str, shape: Shape, say: Say = print) -> None:
    """Leave the store with these keys and no others."""
    store = open_store(url)
    store.migrate()
    store.close()
    began = time.monotonic()
    if url.startswith("sqlite"):
        _fill_sqlite(Path(url.removeprefix("sqlite:///")), shape, say)
    else:
        _fill_postgres(url, shape, say)
    say(f"{shape.keys:,} keys in {time.monotonic() - began:.0f} s")


def _numbers(shape: Shape) -> dict[str, Any]:
    return {
        "due": shape.due,
        "stride": shape.stride,
        "replayable": shape.replayable,
        "fingerprint": shape.fingerprint,
        "every": shape.keys // max(1, shape.odd),
        "keys": shape.keys,
    }


def _steps(shape: Shape, say: Say) -> Any:
    for first in range(1, shape.keys + 1, STEP):
        last = min(first + STEP - 1, shape.keys)
        yield {**_numbers(shape), "first": first, "last": last}
        if shape.keys > 2 * STEP:
            say(f"filled {last:,} of {shape.keys:,} keys")


def _fill_postgres(url: str, shape: Shape, say: Say) -> None:
    with psycopg.connect(url, autocommit=True) as own:
        own.execute("SET maintenance_work_mem = '1GB'")
        own.execute("TRUNCATE idempotency_keys, idempotency_steps, idempotency_outbox, idempotency_audit")
        indexes = own.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'idempotency_keys' ORDER BY 1"
        ).fetchall()
        for name, _ in indexes:
            drop = "ALTER TABLE idempotency_keys DROP CONSTRAINT {}" if name.endswith("_pkey") else "DROP INDEX {}"
            own.execute(drop.format(name).encode())
        for numbers in _steps(shape, say):
            own.execute(_POSTGRES.encode(), numbers)
        for name, definition in indexes:
            if name.endswith("_pkey"):
                own.execute(
                    f"ALTER TABLE idempotency_keys ADD PRIMARY KEY (scope, key) WITH (fillfactor = {ROOM})".encode()
                )
                own.execute("ALTER INDEX idempotency_keys_pkey RESET (fillfactor)")
            else:
                own.execute(definition.encode())
            if shape.keys > 2 * STEP:
                say(f"built {name}")
        own.execute("VACUUM (ANALYZE) idempotency_keys")


def _fill_sqlite(path: Path, shape: Shape, say: Say) -> None:
    own = sqlite3.connect(path, isolation_level=None)
    try:
        own.create_function("replayable_key", 1, replayable_key, deterministic=True)
        own.execute("PRAGMA synchronous = OFF")  # the loader's own connection: what is measured later is durable
        own.execute("PRAGMA cache_size = -4000000")
        own.execute("DELETE FROM idempotency_keys")
        for numbers in _steps(shape, say):
            own.execute(_SQLITE, {**numbers, "now": time.time()})
        own.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        own.close()
