"""The store in one SQLite file: every write is one ``BEGIN IMMEDIATE`` … ``COMMIT`` with an fsync at its end.

A batch is one transaction, so its fsync is shared; inside, row by row with prepared statements is as fast as
one set-based statement. What the rows mean is said in ``stores/memory.py``; the SQL beside this file does the
same. ``UPDATE`` then ``SELECT`` instead of ``RETURNING``: as fast, and it runs on the SQLite 3.34 of RHEL 9.

Reads take neither the gate nor a lock (WAL); but replays come through the lane, which may just be waiting for the
write lock with a new key, so they too can get a 503 while another process holds the file for long. Time
is the clock of this host, read inside the transaction. Nothing bounds a disk that hangs in fsync.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from oncekey.core.record import Found, Record, Reservation, Swap
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores import sqlfiles
from oncekey.stores.base import Capabilities, Duty
from oncekey.stores.sqlite import rows, schema
from oncekey.stores.sqlite.connections import Connections
from oncekey.stores.sqlite.gate import gate_of

_READ, _MOVED, _INSERT, _SWAP, _RESTART, _DELETE, _PURGE = (
    sqlfiles.statement(schema.PACKAGE, name)
    for name in ("read", "moved", "insert", "swap", "restart", "delete", "purge")
)
_DUE = {duty: sqlfiles.statement(schema.PACKAGE, f"due_{duty.value}") for duty in Duty}

_PATIENCE_STEP = 0.05
"""Seconds of waiting at the gate that are not worth a PRAGMA to take off the busy time-out."""


class SqliteStore:
    """One file. Threads and processes may share it; each thread has its own connection."""

    capabilities = Capabilities(durable=True, shared=True, server_clock=False, writers=1)

    def __init__(self, path: str | Path, *, timeout: float = 5.0, clock: Callable[[], float] = time.time) -> None:
        name = str(path)
        if name in ("", ".", ":memory:") or name.startswith("file:"):
            raise ConfigurationError(f"'{name}' is not the path of a file: without one, use memory://")
        if timeout <= 0:
            raise ConfigurationError(f"timeout={timeout} must be more than 0 seconds")
        self.path = Path(path).absolute()  # a later chdir must not lead to another file
        self._timeout = timeout
        self._clock = clock
        self._gate = gate_of(self.path)
        self._ran: list[str] = []
        self._connections = Connections(self.path, timeout, self._prepare)

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        found: list[Found | None] = [None] * len(batch)
        absent = []
        with self._connections.use() as connection:
            now = self._clock()
            for index in _in_order(batch):
                wanted = batch[index]
                there = _read(connection, wanted.scope, wanted.key, now)
                if there is None:
                    absent.append(index)
                else:
                    found[index] = Found(there)
        if absent:
            with self._writing() as connection:
                now = self._clock()
                for index in absent:
                    wanted = batch[index]
                    if connection.execute(_INSERT, rows.inserting(wanted, now)).rowcount == 1:
                        found[index] = Found(wanted.record(now))
                    else:  # another writer was faster; under the write lock its row is there (hazard 6)
                        found[index] = Found(_read(connection, wanted.scope, wanted.key, now))
        return [answer or Found(None) for answer in found]

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        moved: list[Record | None] = [None] * len(batch)
        with self._writing() as connection:
            now = self._clock()
            for index in _in_order(batch):
                moved[index] = _swap(connection, batch[index], now)
        return moved

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        with self._connections.use() as connection:
            now = self._clock()
            return [_read(connection, scope, key, now) for scope, key in keys]

    def due(self, duty: Duty, limit: int) -> list[Record]:
        with self._connections.use() as connection:
            connection.execute("BEGIN")  # one snapshot for the list and its rows; it never writes
            try:
                now = self._clock()
                keys = connection.execute(_DUE[duty], (now, limit)).fetchall()
                found = [_read(connection, scope, key, now) for scope, key in keys]
            finally:
                connection.execute("ROLLBACK")
            return [row for row in found if row is not None]

    def purge(self, limit: int) -> int:
        with self._writing() as connection:
            return connection.execute(_PURGE, (self._clock(), limit)).rowcount

    def migrate(self) -> list[str]:
        with self._connections.use() as connection:
            ran = self._migrate(connection)
        # Opening the file has upgraded it already: that is what the caller wants to hear of.
        ran, self._ran = self._ran + ran, []
        return ran

    def check(self) -> None:
        with self._connections.use() as connection:
            self._prepare(connection)

    def disconnect(self) -> None:
        self._connections.disconnect()

    def close(self) -> None:
        self._connections.close()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """SQLite creates and upgrades its tables by itself; only a newer schema is somebody else's work."""
        if schema.problem(connection, str(self.path)) is not None:
            self._ran += self._migrate(connection)

    def _migrate(self, connection: sqlite3.Connection) -> list[str]:
        with self._transaction(connection):
            return schema.migrate(connection, str(self.path), self._clock())

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._connections.use() as connection, self._transaction(connection):
            yield connection

    @contextmanager
    def _transaction(self, connection: sqlite3.Connection) -> Iterator[None]:
        """The gate, then SQLite's write lock, within the time limit; then all of the block, or nothing."""
        began = time.monotonic()
        if not self._gate.acquire(self._timeout, lane=True):
            raise StoreUnavailable(
                f"{self.path} was held by another transaction of this process for over {self._timeout:g} s"
            )
        try:
            waited = time.monotonic() - began
            if waited > _PATIENCE_STEP:
                _be_patient(connection, self._timeout - waited)
            # IMMEDIATE: a deferred transaction that reads and then writes fails at once, and no time-out
            # helps (hazard 23).
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            finally:
                if waited > _PATIENCE_STEP:
                    _be_patient(connection, self._timeout)
        finally:
            self._gate.release()


def _read(connection: sqlite3.Connection, scope: str, key: str, now: float) -> Record | None:
    row = connection.execute(_READ, (scope, key)).fetchone()
    return None if row is None else rows.record(row, rows.response(row), now)


def _swap(connection: sqlite3.Connection, change: Swap, now: float) -> Record | None:
    compared = rows.comparing(change, now)
    if change.to_state is None:
        was = _read(connection, change.scope, change.key, now)
        return was if connection.execute(_DELETE, compared).rowcount == 1 else None
    if change.restart is not None:
        wanted = change.restart
        restarted = connection.execute(_RESTART, compared + rows.restarting(wanted, now)).rowcount == 1
        return wanted.record(now) if restarted else None
    if connection.execute(_SWAP, compared + rows.setting(change, change.to_state)).rowcount != 1:
        return None
    row = connection.execute(_MOVED, (change.scope, change.key)).fetchone()
    return rows.record(row, change.response, now)


def _in_order(batch: Sequence[Reservation] | Sequence[Swap]) -> list[int]:
    """The places of a batch in the order of (scope, key), which is the order of the tree."""
    return sorted(range(len(batch)), key=lambda index: (batch[index].scope, batch[index].key))


def _be_patient(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {max(int(seconds * 1000), 1)}")
