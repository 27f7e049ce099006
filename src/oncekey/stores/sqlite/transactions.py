"""What an enlisted transaction needs of a SQLite file: its statements, and a turn to write.

SQLite has one writer, so all other writers wait for an enlisted transaction. :class:`Hold` is its turn at the file's
gate (``gate.py``). It is taken before ``BEGIN IMMEDIATE`` and given back exactly once.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import ClassVar

from oncekey.errors import StoreUnavailable
from oncekey.stores.api import TransactionStatements
from oncekey.stores.sql import queries
from oncekey.stores.sqlite import schema
from oncekey.stores.sqlite.connections import is_busy
from oncekey.stores.sqlite.gate import Gate, gate_of

HELD_TOO_LONG = (
    "%s: %s held the database longer than %s s, a third of its lease, and SQLite has one writer, so every other one "
    "waits. It is rolled back, and the client gets 503. Call other services before it or after it, write less at once, "
    "raise Policy(lease=…), or use PostgreSQL (docs/transactions.md)"
)


class SqliteTransactions:
    """A part of :class:`oncekey.stores.sqlite.store.SqliteStore`."""

    dialect = "sqlite"
    transaction_statements: ClassVar = TransactionStatements(
        enlist=queries.bare(schema.PACKAGE, "transaction_lock", "transaction_enlist"),
        still=(),
        complete=queries.bare(schema.PACKAGE, "transaction_complete", "transaction_completed"),
        advance=queries.bare(schema.PACKAGE, "transaction_step", "transaction_advance", "transaction_advanced"),
    )
    path: Path
    gate: Gate

    @property
    def file(self) -> Path:
        return self.path

    def hold(self, timeout: float) -> Hold:
        return Hold(self.path, timeout)

    def fate(self, number: int | str) -> None:
        """SQLite gives transactions no number."""
        del number

    def locked_elsewhere(self) -> bool:
        if self.gate.held_by_user:
            return False
        name = f"{self.path.as_uri()}?mode=rw"  # never creates the file
        try:
            with closing(sqlite3.connect(name, timeout=0.0, isolation_level=None, uri=True)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            return is_busy(error)
        return False


class Hold:
    """A turn at the gate of one file, given back once."""

    too_long = HELD_TOO_LONG

    def __init__(self, path: Path, timeout: float) -> None:
        self._gate = gate_of(path)
        self._path = path
        self._timeout = timeout
        self._lock = threading.Lock()
        self._held = False

    def try_now(self) -> bool:
        """Take the turn if that needs no waiting."""
        self._held = self._held or self._gate.acquire(0.0, lane=False)
        return self._held

    def take(self) -> None:
        """Block until the turn comes."""
        self._held = self._held or self._gate.acquire(self._timeout, lane=False)
        if not self._held:
            raise self._busy()

    async def take_async(self) -> None:
        """Wait for the turn without a thread."""
        self._held = self._held or await self._gate.acquire_in_loop(self._timeout, lane=False)
        if not self._held:
            raise self._busy()

    def release(self) -> None:
        with self._lock:
            if self._held:
                self._gate.release()
                self._held = False

    def _busy(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._path} was held by other transactions for over {self._timeout:g} s: keep enlisted SQLite "
            "transactions short, or use PostgreSQL"
        )
