"""What ``oncekey doctor`` asks an SQLite file. It only reads, and its cost does not grow with the number of keys."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.stores.sql import diagnosis, queries
from oncekey.stores.sqlite import schema
from oncekey.stores.sqlite.in_loop import LOCK_SECONDS
from oncekey.stores.sqlite.writer_helper import trial

if TYPE_CHECKING:
    from oncekey.stores.sqlite.store import SqliteStore

_INDEXES = "SELECT name FROM sqlite_master WHERE type = 'index'"
_TIMES = queries.statement(schema.PACKAGE, "probe_times")
_USED = re.compile(r"USING (?:COVERING )?INDEX (\w+)")
_PLACES = re.compile(r"\?\d+")
_SYNCHRONOUS = ("off", "normal", "full", "extra")


class Probes:
    """A part of :class:`oncekey.stores.sqlite.store.SqliteStore`, which has the connection."""

    if TYPE_CHECKING:
        clock: Callable[[], float]
        writer: str

        def _reading(self) -> AbstractContextManager[sqlite3.Connection]: ...

    def diagnose(self) -> list[Diagnosis]:
        with self._reading() as connection:
            found = list(_diagnoses(connection, self.clock()))
        return [*found, self._writer()]

    def _writer(self) -> Diagnosis:
        if self.writer == "thread":
            return Diagnosis("writer", Level.OK, "a thread of each event loop")
        why = trial(cast("SqliteStore", self), LOCK_SECONDS)
        if why is None:
            return Diagnosis("writer", Level.OK, "a process of each app process; one was started, and opened the file")
        return Diagnosis(
            "writer",
            Level.WARN,
            f"a process of each app process, but it {why}; the lanes write in its place, which is slower",
            "mend that, or leave ?writer=process out of the URL (docs/stores.md)",
        )


def _diagnoses(connection: sqlite3.Connection, now: float) -> Iterator[Diagnosis]:
    yield diagnosis.schema(schema.PACKAGE, None)  # opening the file has upgraded it, or has raised
    there = {name for (name,) in connection.execute(_INDEXES)}
    missing = diagnosis.indexes(schema.PACKAGE, there)
    yield missing
    yield diagnosis.plans({name: _indexes_used(connection, name, now) for name in diagnosis.USES})
    if missing.level is Level.OK:
        yield diagnosis.leases(connection.execute(_TIMES, (diagnosis.SAMPLE,)))
    yield Diagnosis("clock", Level.OK, "this host's: an SQLite file has no other")
    yield durability(
        str(connection.execute("PRAGMA journal_mode").fetchone()[0]),
        _SYNCHRONOUS[connection.execute("PRAGMA synchronous").fetchone()[0]],
    )
    yield Diagnosis("connections", Level.OK, "no limit; one writer at a time, and any number of readers")


def _indexes_used(connection: sqlite3.Connection, name: str, now: float) -> set[str]:
    asked = queries.statement(schema.PACKAGE, name)
    parameters = (now,) * len(set(_PLACES.findall(asked)))  # any values: EXPLAIN does not run the statement
    plan = connection.execute(f"EXPLAIN QUERY PLAN {asked}", parameters).fetchall()
    return {index for *_, line in plan for index in _USED.findall(line)}


def durability(journal_mode: str, synchronous: str) -> Diagnosis:
    shown = f"journal_mode {journal_mode}, synchronous {synchronous}"
    if journal_mode == "wal" and synchronous in ("full", "extra"):
        return Diagnosis("durability", Level.OK, shown)
    return Diagnosis(
        "durability",
        Level.FAIL,
        f"{shown}: a loss of power can lose answers that clients have seen",
        "find the code that changes oncekey's connection: it must keep journal_mode=WAL and synchronous=FULL",
    )
