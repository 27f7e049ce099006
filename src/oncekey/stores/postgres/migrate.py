"""Runs the migrations of a PostgreSQL database, beside apps that use its tables meanwhile.

Most of what a migration does (ALTER TABLE) needs the table for a moment for itself. While it waits for that, behind an
enlisted transaction of a slow handler, say, everybody else waits behind it. So it waits shorter than a lane does for a
row (``PostgresStore(lock_timeout=0.5)``), gives up, and tries again a little later: requests are delayed, not refused.
"""

from __future__ import annotations

import time

from psycopg import errors

from oncekey.stores import sqlfiles
from oncekey.stores.postgres.connection import DeadlineConnection
from oncekey.stores.postgres.statements import PACKAGE

MIGRATION_LOCK = 0x6F6E63656B6579  # "oncekey": one migration at a time, from however many deploys
MIGRATION_SECONDS = 600.0
"""A migration may rewrite a large table, and waits for the one that another deploy runs."""
TABLE_LOCK_SECONDS = 0.3
PAUSE_SECONDS = 0.5

_TABLE = (
    "CREATE TABLE IF NOT EXISTS oncekey_schema "
    "(number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
)


def applied(connection: DeadlineConnection) -> sqlfiles.Applied:
    """The migrations that ran here."""
    return sqlfiles.Applied(frozenset(row[0] for row in connection.execute("SELECT number FROM oncekey_schema")))


def run(connection: DeadlineConnection) -> list[str]:
    """Run what has not run: all of it, or nothing. Gives the names of what ran."""
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
        connection.deadline = until  # the server has answered: now it may take long
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
        connection.execute(f"SET LOCAL lock_timeout = '{TABLE_LOCK_SECONDS * 1000:.0f}ms'")
        connection.execute(_TABLE)
        there = applied(connection)
        for migration in sqlfiles.migrations(PACKAGE):
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
