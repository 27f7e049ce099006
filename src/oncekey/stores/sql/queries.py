"""Finds the SQL files beside a store's code: one statement per file, and numbered migrations.

Owns the names of files, the order of migrations, and which versions of oncekey can work with which tables
(``works_from``). Runs nothing.

A migration that only adds something (a column that may be NULL, an index, a table) says so in its first lines::

    -- Works with: schema 0002 (oncekey 0.1.0) and later.

A version of oncekey that knows the migrations up to 0002 then keeps working with these tables: beside a newer version
during a deploy, and after a rollback. Without that line, every version that does not know the migration refuses the
tables. An older version does not write a new column: it inserts NULL, and when a key starts over after its expiry
(the query ``restart``) the old value stays. So a reader must check a new column against one that older versions do
write.

The table ``oncekey_schema`` has one row for each migration that ran. Version 0.1.0 refuses tables whose highest
``number`` it does not know. So a migration that older versions can work with has a **negative** number there. Older
versions ignore it, and the highest number is the oldest schema that a version must know.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_TABLE = re.compile(r"^CREATE TABLE (\w+)", re.MULTILINE)
_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_NUMBERED = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_WORKS_WITH = re.compile(r"^-- Works with: schema (\d{4}) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    sql: str

    def __str__(self) -> str:
        return f"{self.number:04d}_{self.name}"

    @property
    def works_from(self) -> int:
        """The newest migration that a version of oncekey must know to work with tables on which this one ran."""
        comment = _WORKS_WITH.search(self.sql)
        return int(comment[1]) if comment else self.number

    @property
    def noted_as(self) -> int:
        """Its number in ``oncekey_schema``."""
        return self.number if self.works_from == self.number else -self.number


@dataclass(frozen=True, slots=True)
class Applied:
    """The numbers in ``oncekey_schema`` of a database."""

    numbers: frozenset[int]

    @property
    def newest(self) -> int:
        return max(map(abs, self.numbers), default=0)

    @property
    def works_from(self) -> int:
        """A version that does not know this migration must not touch these tables."""
        return max(self.numbers, default=0)


def statement(package: str, name: str) -> str:
    """The query of this name in the ``sql`` folder of ``package``: ``statement("oncekey.stores.sqlite", "read")``."""
    return names(package)[name]


def bare(package: str, *names: str) -> tuple[str, ...]:
    """Queries without their comments: they run on the app's own connection, and may show in the app's logs."""
    texts = (statement(package, name).splitlines() for name in names)
    return tuple("\n".join(line for line in lines if not line.startswith("--")) for lines in texts)


@cache
def names(package: str) -> dict[str, str]:
    """All queries of a store, by name. In the files of its ``sql`` folder, a line ``-- name: read`` begins one."""
    found: dict[str, str] = {}
    for entry in files(package).joinpath("sql").iterdir():
        if entry.name.endswith(".sql"):
            _, *pairs = _NAME.split(entry.read_text("utf-8"))
            for name, text in zip(pairs[::2], pairs[1::2], strict=True):
                if name in found:
                    raise ValueError(f"{package} has two queries of the name {name}")
                found[name] = text.strip("\n") + "\n"
    return found


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
    """The names of all tables that the migrations create."""
    return tuple(name for each in migrations(package) for name in _TABLE.findall(each.sql))


TABLE_GONE = (
    "has not all tables of oncekey. If they were there before, keys are lost, and their retries would run again: "
    "`oncekey doctor` names the tables, restore them from a backup. Only for a new database run `oncekey migrate`"
)
"""About a statement that found no table. The store checks the tables of a connection first, so most likely one was
dropped under a running app."""


def outdated(package: str, applied: Applied, where: str, missing: Collection[str]) -> str | None:
    """One sentence that says what to run, or None when this version can work with the tables.

    ``missing``: those of :func:`tables` that the database does not have.
    """
    newest = migrations(package)[-1].number
    if not applied.numbers:
        return f"{where} has no oncekey tables yet: run `oncekey migrate`, or open it with OnceKey(url, migrate=True)"
    if applied.newest < newest:
        found = f"{where} has oncekey schema {applied.newest:04d} and this version needs {newest:04d}"
        return f"{found}: run `oncekey migrate`"
    if applied.works_from > newest:
        return (
            f"{where} has oncekey schema {applied.works_from:04d}, newer than the {newest:04d} that this version "
            "knows: upgrade the oncekey package"
        )
    if missing:
        return (
            f"{where} has oncekey schema {applied.newest:04d} without its {', '.join(sorted(missing))}: restore that "
            "from a backup; or, where every key may be forgotten, drop oncekey_schema and every idempotency_ table and "
            "run `oncekey migrate`"
        )
    return None
