"""Finds the SQL that lies beside a store's code: one statement per file, and numbered migrations.

Owns the names of files and the order of migrations; runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_TABLE = re.compile(r"^CREATE TABLE (\w+)", re.MULTILINE)
_NUMBERED = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    sql: str


def statement(package: str, name: str) -> str:
    """The text of ``name.sql`` in ``package``, e.g. statement("oncekey.stores.sqlite", "reserve")."""
    return files(package).joinpath(f"{name}.sql").read_text("utf-8")


def migrations(package: str) -> list[Migration]:
    """The files ``NNNN_name.sql`` in the ``migrations`` folder of ``package``, in their order."""
    found = (
        Migration(int(match[1]), match[2], entry.read_text("utf-8"))
        for entry in files(package).joinpath("migrations").iterdir()
        if (match := _NUMBERED.fullmatch(entry.name))
    )
    return sorted(found, key=lambda migration: migration.number)


@cache
def tables(package: str) -> tuple[str, ...]:
    """The names of all tables that the migrations make."""
    return tuple(name for each in migrations(package) for name in _TABLE.findall(each.sql))


def outdated(package: str, applied: int | None, where: str, missing: Collection[str]) -> str | None:
    """One sentence that says what to run, or None when the tables are as this version wants them.

    ``applied`` is the number of the newest migration in the database; None when there is no table at all.
    ``missing``: those of :func:`tables` that are not there.
    """
    newest = migrations(package)[-1].number
    if applied is None:
        return f"{where} has no oncekey tables yet: run `oncekey migrate`, or open it with OnceKey(url, migrate=True)"
    if applied < newest:
        return f"{where} has oncekey schema {applied:04d} and this version needs {newest:04d}: run `oncekey migrate`"
    if applied > newest:
        return (
            f"{where} has oncekey schema {applied:04d}, newer than the {newest:04d} that this version knows: "
            "upgrade the oncekey package"
        )
    if missing:
        return (
            f"{where} has oncekey schema {applied:04d} without its {', '.join(sorted(missing))}: restore that from a "
            "backup; or, where every key may be forgotten, drop oncekey_schema and every idempotency_ table, and run "
            "`oncekey migrate`"
        )
    return None
