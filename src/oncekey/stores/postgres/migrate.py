"""Runs the migrations of a PostgreSQL database while apps use its tables.

Most migrations (ALTER TABLE) need an exclusive lock on a table for a moment. While a migration waits for that lock,
for example behind the enlisted transaction of a slow handler, every other statement waits behind the migration. So a
migration waits for its lock for less time than a lane waits for a row (``PostgresStore(lock_timeout=0.5)``), gives
up, and tries again later. Requests are delayed, not refused.
"""

from __future__ import annotations

import time

from psycopg import errors

from oncekey.stores.postgres.connection import DeadlineConnection
from oncekey.stores.postgres.statements import PACKAGE
from oncekey.stores.sql import queries

MIGRATION_LOCK = 0x6F6E63656B6579  # "oncekey": one migration at a time, also if several deploys run at once
MIGRATION_SECONDS = 600.0
"""A migration may rewrite a large table, and it waits for a migration that another deploy runs."""
TABLE_LOCK_SECONDS = 0.3
PAUSE_SECONDS = 0.5

_TABLE = (
    "CREATE TABLE IF NOT EXISTS oncekey_schema "
    "(number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
)


def applied(connection: DeadlineConnection) -> queries.Applied:
    """The migrations that ran here."""
    return queries.Applied(frozenset(row[0] for row in connection.execute("SELECT number FROM oncekey_schema")))


def run(connection: DeadlineConnection) -> list[str]:
    """Run the migrations that have not run: all of them, or none. Return their names."""
    until = time.monotonic() + MIGRATION_SECONDS
    while True:
        try:
            return _try(connection, until)
        except errors.LockNotAvailable:
            if time.monotonic() + PAUSE_SECONDS > until:
                raise
        time.sleep(PAUSE_SECONDS)


def _try(connection: DeadlineConnection, until: float) -> list[str]:
    ran = []
    with connection.transaction():
        connection.execute(f"SET LOCAL statement_timeout = '{MIGRATION_SECONDS:.0f}s'; SET LOCAL lock_timeout = 0")
        connection.deadline = until  # the server has answered, so it is alive: now a statement may take long
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
        connection.execute(f"SET LOCAL lock_timeout = '{TABLE_LOCK_SECONDS * 1000:.0f}ms'")
        connection.execute(_TABLE)
        there = applied(connection)
        for migration in queries.migrations(PACKAGE):
            if migration.number <= there.newest:
                continue
            connection.execute(migration.sql)
            connection.execute(
                "INSERT INTO oncekey_schema (number, name) VALUES (%s, %s)", [migration.noted_as, migration.name]
            )
            connection.execute(
                "UPDATE oncekey_schema SET number = %(number)s WHERE number = -%(number)s",
                {"number": migration.works_from},
            )
            ran.append(str(migration))
    return ran
