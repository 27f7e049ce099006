"""Counts the statements that the clients of one database had executed, with PostgreSQL's own ``pg_stat_statements``.

A statement counts when it has ended without an error; ``BEGIN``, ``COMMIT`` and ``SET`` count, too. Autovacuum's work
does not. The server loads the library for all databases, and only the watched one has it switched on: the other
contestants do not pay for it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from oncekey.testing.servers import PostgresServer

OLDEST = 14
"""Before it, the numbers of queries could not be switched off for the other databases."""
SETTINGS = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "none",
    "pg_stat_statements.save": "off",
    "compute_query_id": "off",
}
_COUNT = """
SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = %s)
"""


def missing(binaries: Path) -> str | None:
    """Why this PostgreSQL cannot count, or None."""
    folders = (binaries.parent / "lib", binaries.parent / "lib" / "postgresql")
    if not any((folder / "pg_stat_statements.so").exists() for folder in folders):
        return "this PostgreSQL has no pg_stat_statements"
    said = subprocess.run([binaries / "postgres", "--version"], check=True, capture_output=True, text=True).stdout
    version = re.search(r"\d+", said)
    if version is None or int(version[0]) < OLDEST:
        return f"it needs PostgreSQL {OLDEST} or newer"
    return None


def watch(server: PostgresServer, database: str, reader: str) -> None:
    """Count from now on in ``database``. ``reader``: another database, from which ``count`` reads."""
    server.execute("CREATE EXTENSION pg_stat_statements", database=reader)
    for setting in ("pg_stat_statements.track = 'top'", "compute_query_id = 'on'"):
        server.execute(f"ALTER DATABASE {database} SET {setting}")


def count(reader: str, database: str) -> int:
    """How many so far. ``reader``: the URL of the database from which is read."""
    with psycopg.connect(reader) as connection:
        found = connection.execute(_COUNT, (database,)).fetchone()
    return 0 if found is None else int(found[0])
