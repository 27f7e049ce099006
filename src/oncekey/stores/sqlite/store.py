"""The store in one SQLite file: every write is one ``BEGIN IMMEDIATE`` … ``COMMIT`` with an fsync at its end.

A batch is one transaction, so its rows share one fsync. ``stores/memory/store.py`` says what the verbs do; the queries
in ``sql/`` do the same. It uses ``UPDATE`` then ``SELECT`` instead of ``RETURNING``, which is as fast, and runs on the
SQLite 3.34 of RHEL 9. One call runs a statement for the whole batch (``executemany``, or keys as one JSON list), since
each call into SQLite releases the GIL, and then waits for the event loop to give it back.

Reads take neither the gate nor a lock (WAL), and async apps read without the lane (``in_loop.py``). Time is the
clock of this host, read inside the transaction. There is no time limit for a disk that hangs in fsync.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from oncekey.core.record import Found, Record, Reservation
from oncekey.core.swaps import Swap
from oncekey.errors import ConfigurationError, SchemaError, StoreError
from oncekey.stores.api import Capabilities, Duty
from oncekey.stores.duties import FAIR, JobTurns, Turns
from oncekey.stores.sql import queries
from oncekey.stores.sqlite import rows, schema
from oncekey.stores.sqlite.checks import Probes
from oncekey.stores.sqlite.connections import Connections
from oncekey.stores.sqlite.gate import GateHeld, gate_of
from oncekey.stores.sqlite.in_loop import SqliteInLoop
from oncekey.stores.sqlite.kept import SqliteKept
from oncekey.stores.sqlite.lookups import Lookups
from oncekey.stores.sqlite.outbox import SqliteOutbox
from oncekey.stores.sqlite.transactions import SqliteTransactions

_READ, _MOVED, _INSERT, _SWAP, _RESTART, _DELETE, _PURGE = (
    queries.statement(schema.PACKAGE, name)
    for name in ("read", "moved", "insert", "swap", "restart", "delete", "purge")
)
_STEP, _FORGET_STEPS, _NOTE, _DOOMED_KEYS, _DOOMED_TOMBSTONES = (
    queries.statement(schema.PACKAGE, name)
    for name in ("step", "forget_steps", "note", "doomed_keys", "doomed_tombstones")
)
_READ_MANY, _MOVED_MANY, _PURGE_AUDIT = (
    queries.statement(schema.PACKAGE, name) for name in ("read_many", "moved_many", "audit_purge")
)
_DUE = {duty: queries.statement(schema.PACKAGE, f"due_{duty.value}") for duty in Duty}
_FAIR_SCOPES, _FAIR_KEYS = (queries.statement(schema.PACKAGE, name) for name in ("fair_scopes", "fair_keys"))

_PATIENCE_STEP = 0.05
"""A shorter wait at the gate is not subtracted from the busy time-out: the PRAGMA for it costs more."""


Writer = Literal["thread", "process"]
WRITERS: tuple[Writer, ...] = get_args(Writer)
"""How an event loop commits a batch: in a thread of its own, or in a process (``writer_process.py``)."""


class SqliteStore(Lookups, SqliteKept, SqliteOutbox, SqliteTransactions, Probes):
    """One file. Threads and processes may share it; each thread has its own connection."""

    capabilities = Capabilities(durable=True, shared=True, server_clock=False, writers=1, embedded=True)

    def __init__(
        self,
        path: str | Path,
        *,
        timeout: float = 5.0,
        clock: Callable[[], float] = time.time,
        writer: Writer = "thread",
    ) -> None:
        name = str(path)
        if name in ("", ".", ":memory:") or name.startswith("file:"):
            raise ConfigurationError(f"'{name}' is not the path of a file: without one, use memory://")
        if timeout <= 0:
            raise ConfigurationError(f"timeout={timeout} must be more than 0 seconds")
        if writer not in WRITERS:
            raise ConfigurationError(f"writer={writer} is not known: use one of {', '.join(WRITERS)}")
        self.path = Path(path).absolute()  # a later chdir must not lead to another file
        self.timeout = timeout
        self.clock = clock
        self.writer = writer
        self.gate = gate_of(self.path)
        self._ran: list[str] = []
        self._turns = Turns()
        self._job_turns = JobTurns()
        self.connections = Connections(self.path, timeout, self._prepare)

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        found = self._read([(wanted.scope, wanted.key) for wanted in batch])
        if len(found) < len(batch):
            with self._writing() as connection:
                _insert(connection, batch, found, self.clock())
        return [Found(found[wanted.scope, wanted.key]) for wanted in batch]

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        with self._writing() as connection:
            moved = _swap_all(connection, batch, self.clock())
        return [moved[change.scope, change.key] for change in batch]

    def both(self, begins: Sequence[Reservation], ends: Sequence[Swap]) -> tuple[list[Found], list[Record | None]]:
        with self._writing() as connection:
            now = self.clock()
            moved = _swap_all(connection, ends, now)
            found = _read_many(connection, [(wanted.scope, wanted.key) for wanted in begins], now)
            _insert(connection, begins, found, now)
        return (
            [Found(found[wanted.scope, wanted.key]) for wanted in begins],
            [moved[change.scope, change.key] for change in ends],
        )

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        found = self._read(keys)
        return [found.get(at) for at in keys]

    def _read(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Record]:
        with self.connections.use() as connection:
            return self.read_on(connection, keys)

    def read_on(self, connection: sqlite3.Connection, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Record]:
        return _read_many(connection, keys, self.clock())

    def check_schema(self, connection: sqlite3.Connection) -> None:
        """SchemaError unless the tables exist: for connections that must not create them."""
        if (sentence := schema.problem(connection, str(self.path))) is not None:
            raise SchemaError(sentence)

    def in_loop(self) -> SqliteInLoop:
        return SqliteInLoop(self)

    def due(self, duty: Duty, limit: int) -> list[Record]:
        with self._reading() as connection:
            now = self.clock()

            def records(keys: Iterable[tuple[str, str]]) -> list[Record]:
                return [rows.record(connection.execute(_MOVED, at).fetchone(), None, now) for at in keys]

            def visit(after: str, most: int) -> list[tuple[str, bool]]:
                visited = connection.execute(_FAIR_SCOPES, (FAIR[duty], after, most))
                return [(scope, due <= now) for scope, due in visited]

            def take(scopes: Sequence[str], most: int) -> list[Record]:
                each = (connection.execute(_FAIR_KEYS, (FAIR[duty], scope, now, most)).fetchall() for scope in scopes)
                return records(at for keys in each for at in keys)

            oldest = records(connection.execute(_DUE[duty], (now, limit)).fetchall())
            return self._turns.hand_out(duty, limit, oldest, visit, take)

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        with self._writing() as connection:
            now = self.clock()
            doomed = [] if expired_state_only else connection.execute(_DOOMED_KEYS, (now, limit)).fetchall()
            doomed += connection.execute(_DOOMED_TOMBSTONES, (now, limit - len(doomed))).fetchall()
            connection.executemany(_FORGET_STEPS, [(scope, key) for _, scope, key in doomed])
            connection.executemany(_PURGE, [(rowid,) for rowid, _, _ in doomed])
            return len(doomed)

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        with self._writing() as connection:
            return connection.execute(_PURGE_AUDIT, (self.clock() - keep_seconds, limit)).rowcount

    def migrate(self) -> list[str]:
        with self.connections.use() as connection:
            ran = self._migrate(connection)
        # Opening the file has already upgraded it: report those migrations too.
        ran, self._ran = self._ran + ran, []
        return ran

    def check(self) -> None:
        with self.connections.use() as connection:
            self._prepare(connection)

    def disconnect(self) -> None:
        self.connections.disconnect()

    def close(self) -> None:
        self.connections.close()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create or upgrade the tables when the file is opened; a newer schema raises SchemaError."""
        if schema.problem(connection, str(self.path)) is not None:
            self._ran += self._migrate(connection)

    def _migrate(self, connection: sqlite3.Connection) -> list[str]:
        with self._transaction(connection):
            return schema.migrate(connection, str(self.path), self.clock())

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self.connections.use() as connection, self._transaction(connection):
            yield connection

    @contextmanager
    def _transaction(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Take the gate, then SQLite's write lock, within the time limit; commit all of the block, or nothing."""
        with self.at_the_gate(connection, self.timeout):
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

    @contextmanager
    def at_the_gate(self, connection: sqlite3.Connection, timeout: float) -> Iterator[None]:
        """Hold the gate. The time spent waiting for it is subtracted from the connection's wait for SQLite's lock."""
        began = time.monotonic()
        if not self.gate.acquire(timeout, lane=True):
            raise GateHeld(f"{self.path} was held by another transaction of this process for over {timeout:g} s")
        try:
            waited = time.monotonic() - began
            if waited > _PATIENCE_STEP:
                _be_patient(connection, timeout - waited)
            try:
                yield
            finally:
                if waited > _PATIENCE_STEP:
                    _be_patient(connection, timeout)
        finally:
            self.gate.release()


def _read(connection: sqlite3.Connection, scope: str, key: str, now: float) -> Record | None:
    row = connection.execute(_READ, (scope, key)).fetchone()
    return None if row is None else rows.record(row, rows.response(row), now)


def _insert(
    connection: sqlite3.Connection, batch: Sequence[Reservation], found: dict[tuple[str, str], Record], now: float
) -> None:
    """Insert the reservations that are not in ``found``, and add their rows to it: our own, or a faster writer's."""
    absent = [wanted for wanted in rows.in_order(batch) if (wanted.scope, wanted.key) not in found]
    inserted = connection.executemany(_INSERT, [rows.inserting(wanted, now) for wanted in absent]).rowcount
    there: dict[tuple[str, str], Record] = {}
    if inserted < len(absent):  # we hold the write lock, so the rows of a faster writer are visible
        there = _read_many(connection, [(wanted.scope, wanted.key) for wanted in absent], now)
    for wanted in absent:
        at = (wanted.scope, wanted.key)
        if inserted == len(absent) or (at in there and there[at].owner == wanted.owner):
            found[at] = wanted.record(now)
        elif at in there:
            found[at] = there[at]
        else:
            raise StoreError("a reservation was neither inserted nor found: the request must not run")


def _swap_all(
    connection: sqlite3.Connection, batch: Sequence[Swap], now: float
) -> dict[tuple[str, str], Record | None]:
    moved = _swap_alike(connection, batch, now) if all(map(_is_plain, batch)) else None
    return moved or {(change.scope, change.key): _swap(connection, change, now) for change in rows.in_order(batch)}


def _swap(connection: sqlite3.Connection, change: Swap, now: float) -> Record | None:
    moved = _move(connection, change, now)
    if moved is not None:
        if change.forgets_steps:
            connection.execute(_FORGET_STEPS, (change.scope, change.key))
        if change.step is not None:
            connection.execute(_STEP, rows.writing_step(change, change.step, now))
        if change.audit is not None:
            connection.execute(_NOTE, rows.auditing(change, change.audit, now))
    return moved


def _move(connection: sqlite3.Connection, change: Swap, now: float) -> Record | None:
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


def _read_many(
    connection: sqlite3.Connection, keys: Sequence[tuple[str, str]], now: float
) -> dict[tuple[str, str], Record]:
    answer = connection.execute(_READ_MANY, (rows.keys_as_json(keys),)).fetchall()
    return {(row[0], row[1]): rows.record(row, rows.response(row), now) for row in answer}


def _is_plain(change: Swap) -> bool:
    """A move of a row that the caller has read, with no step, audit line or deletion."""
    return change.seen is not None and change.plain


def _swap_alike(
    connection: sqlite3.Connection, batch: Sequence[Swap], now: float
) -> dict[tuple[str, str], Record | None] | None:
    """Move all rows by one statement, and read the answers by another. None: some row differs, and nothing was done."""
    if len(batch) == 1:
        return None
    changes = rows.in_order(batch)
    connection.execute("SAVEPOINT alike")
    parameters = [
        rows.comparing(change, now) + rows.setting(change, change.to_state)
        for change in changes
        if change.to_state is not None
    ]
    if connection.executemany(_SWAP, parameters).rowcount < len(changes):
        connection.execute("ROLLBACK TO alike")  # the caller moves them one by one, to see which row differs
        return None
    answer = connection.execute(
        _MOVED_MANY, (rows.keys_as_json([(change.scope, change.key) for change in changes]),)
    ).fetchall()
    times = {(scope, key): (lease_until, point) for scope, key, lease_until, point in answer}
    return {(c.scope, c.key): rows.moved(c, *times[c.scope, c.key], now) for c in changes}


def _be_patient(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {max(int(seconds * 1000), 1)}")
