"""Runs the migrations of a MySQL database while apps use its tables.

DDL commits by itself, and in a Galera cluster ``GET_LOCK`` locks one node only. So a migration is not a transaction,
and there is no lock around it: every statement of a migration may run twice, and from two processes at once. "It is
there already" is a success, and the row in ``oncekey_schema``, which is inserted last, tells which process ran it.

A statement that waits for the lock of a table, for example behind the enlisted transaction of a slow handler, keeps
every later statement on that table waiting. So it waits for a second, gives up, and tries again later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pymysql
from pymysql.constants import ER

from oncekey.stores.mysql.connection import ALREADY_THERE, NOTHING_DONE, Connection, code_of
from oncekey.stores.mysql.packets import PACKAGE, literal
from oncekey.stores.sql import queries

MIGRATION_SECONDS = 600.0
"""A migration may rewrite a large table."""
PAUSE_SECONDS = 0.5

_SETTINGS = "SET SESSION lock_wait_timeout = 1, innodb_lock_wait_timeout = 1 /*M! , max_statement_time = 0 */"
_TABLE = (
    "CREATE TABLE IF NOT EXISTS oncekey_schema (number INTEGER NOT NULL PRIMARY KEY, name VARCHAR(255) NOT NULL, "
    "applied_at DATETIME(6) NOT NULL) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
)


def tables(connection: Connection, names: Sequence[str]) -> set[str]:
    """Those of these tables that the database has. Each is asked itself: the dictionary opens every table it lists."""
    return {name for name in names if _has(connection, name)}


def applied(connection: Connection) -> queries.Applied:
    """The migrations that ran here."""
    (numbers,) = connection.run("SELECT number FROM oncekey_schema")
    return queries.Applied(frozenset(number for (number,) in numbers))


def _has(connection: Connection, name: str) -> bool:
    try:
        connection.run(f"SELECT 1 FROM {name} LIMIT 0")  # noqa: S608 - the name of one of our tables
    except pymysql.ProgrammingError as error:
        if code_of(error) != ER.NO_SUCH_TABLE:
            raise
        return False
    return True


def run(connection: Connection) -> list[str]:
    """Run the migrations that have not run. Return the names of those that no other process has run meanwhile."""
    until = time.monotonic() + MIGRATION_SECONDS
    connection.run(_SETTINGS)
    connection.deadline = until  # the server has answered, so it is alive: now a statement may take long
    _patiently(connection, _TABLE, until)
    there = applied(connection)
    ran = []
    for migration in queries.migrations(PACKAGE):
        if migration.number <= there.newest:
            continue
        for text in statements(migration.sql):
            _patiently(connection, text, until)
        note = (
            "INSERT IGNORE INTO oncekey_schema (number, name, applied_at) "  # noqa: S608 - of our own file
            f"VALUES ({migration.noted_as}, {literal(migration.name)}, utc_timestamp(6))"
        )
        if _patiently(connection, note, until) == 1:
            ran.append(str(migration))
        raised = f"UPDATE IGNORE oncekey_schema SET number = {migration.works_from} "  # noqa: S608 - numbers
        _patiently(connection, f"{raised} WHERE number = -{migration.works_from}", until)
    return ran


def _patiently(connection: Connection, text: str, until: float) -> int:
    """Run one statement; return how many rows it matched. 0: what it makes is there already."""
    while True:
        try:
            return int(connection.run(text)[0])
        except pymysql.Error as error:
            if code_of(error) in ALREADY_THERE:
                return 0
            if code_of(error) not in NOTHING_DONE or time.monotonic() + PAUSE_SECONDS > until:
                raise
        time.sleep(PAUSE_SECONDS)


def statements(script: str) -> Iterator[str]:
    """The statements of a script. A semicolon ends one, and stands nowhere else but in comments."""
    code = "\n".join(line.partition(" -- ")[0] for line in script.splitlines() if not line.startswith("--"))
    return (text.strip() for text in code.split(";") if text.strip())
