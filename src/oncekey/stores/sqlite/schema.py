"""Brings the tables of one SQLite file to this version, or says why it cannot.

SQLite is embedded: no operator runs a migration before the first request, so opening the file runs it. Several
threads and processes may do so at once, because one ``BEGIN IMMEDIATE`` encloses every check and every change.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator

from oncekey.errors import SchemaError
from oncekey.stores.sql import queries

PACKAGE = "oncekey.stores.sqlite"

_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table'"
_NUMBERS = "SELECT number FROM oncekey_schema"
_RAISE = "UPDATE oncekey_schema SET number = :number WHERE number = -:number"
_NOTE = "INSERT INTO oncekey_schema (number, name, applied_at) VALUES (?, ?, ?)"


def applied(connection: sqlite3.Connection, there: Collection[str]) -> queries.Applied:
    """The migrations that ran here."""
    numbers = connection.execute(_NUMBERS).fetchall() if "oncekey_schema" in there else ()
    return queries.Applied(frozenset(number for (number,) in numbers))


def problem(connection: sqlite3.Connection, where: str) -> str | None:
    """One sentence that says what to do, or None if the tables are as this version needs them."""
    there = {name for (name,) in connection.execute(_TABLES)}
    return queries.outdated(PACKAGE, applied(connection, there), where, set(queries.tables(PACKAGE)) - there)


def migrate(connection: sqlite3.Connection, where: str, now: float) -> list[str]:
    """Run the migrations that have not run; the caller holds the write lock (BEGIN IMMEDIATE) and commits."""
    at = applied(connection, {name for (name,) in connection.execute(_TABLES)})
    ran = []
    for migration in queries.migrations(PACKAGE):
        if migration.number <= at.newest:
            continue
        for statement in statements(migration.sql):
            connection.execute(statement)
        connection.execute(_NOTE, (migration.noted_as, migration.name, now))
        connection.execute(_RAISE, {"number": migration.works_from})
        ran.append(str(migration))
    if (sentence := problem(connection, where)) is not None:
        raise SchemaError(sentence)
    return ran


def statements(script: str) -> Iterator[str]:
    """The statements of a script. (``executescript`` would commit the open transaction first.)"""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        raise SchemaError("a migration ends in the middle of a statement")
