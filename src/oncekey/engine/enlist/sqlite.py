"""Links to SQLite: a ``sqlite3`` connection, and ``aiosqlite``'s, which is one in a thread of its own.

SQLite has one writer, so an enlisted transaction is everybody's latency. :class:`Hold` is its turn at the file's gate
(``stores/sqlite/gate.py``), taken before ``BEGIN IMMEDIATE`` and given back exactly once.

COMMIT and ROLLBACK by the handler are refused by SQLite's authorizer, which sees every statement when it is prepared.
So a transaction that is no longer open was rolled back, by SQLite itself or by closing the connection: that is a proof.
Where it was rolled back with our leave (by SQLAlchemy, or by the app with ``commit="caller"``), the authorizer stays
and refuses whatever would write, until the request is over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from oncekey.engine.enlist.base import LEAVE_IT, Elsewhere, Link, Rows
from oncekey.errors import EnlistError, StoreUnavailable
from oncekey.stores.sqlite.gate import Gate, gate_of

_log = logging.getLogger("oncekey")


class Hold:
    """A turn at the gate of one file, given back once."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._gate: Gate = gate_of(path)
        self._path = path
        self._timeout = timeout
        self._lock = threading.Lock()
        self._held = False

    def try_now(self) -> bool:
        """Without waiting."""
        self._held = self._held or self._gate.acquire(0.0, lane=False)
        return self._held

    def take(self) -> None:
        """Block until it is our turn."""
        self._held = self._held or self._gate.acquire(self._timeout, lane=False)
        if not self._held:
            raise self._busy()

    async def take_async(self) -> None:
        """Wait for our turn without a thread: many may be waiting, and who has the gate must get on."""
        if self._held:
            return
        turn = _Turn(self._gate, asyncio.get_running_loop())
        self._held = self._gate.line_up(turn)
        if not self._held:
            try:
                await asyncio.wait_for(asyncio.shield(turn.come), self._timeout)
                self._held = True
            except BaseException as error:
                if not self._gate.leave(turn):
                    self._gate.release()  # it came at the last moment: somebody else's
                if isinstance(error, TimeoutError):
                    raise self._busy() from None
                raise

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


class _Turn:
    """A place in the gate's line for a coroutine."""

    def __init__(self, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        self._gate = gate
        self._loop = loop
        self.come: asyncio.Future[None] = loop.create_future()

    def release(self) -> None:
        """Called by the gate, in the thread of whoever leaves it."""
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # that loop is closed: pass it on, but not from within the gate
            threading.Thread(target=self._gate.release).start()

    def _set(self) -> None:
        if not self.come.done():
            self.come.set_result(None)


_READS = frozenset(
    {
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
        sqlite3.SQLITE_TRANSACTION,
        sqlite3.SQLITE_SAVEPOINT,
    }
)


class SqliteLink(Link):
    """A ``sqlite3.Connection``."""

    dialect = "sqlite"
    what = "the sqlite3 connection"
    _refused = False
    """The handler tried to end it. Whatever it wanted by that, it does not get a commit."""
    _overdue = False
    _freed = False
    """The request is over."""
    _asked_again = False
    """Since the transaction was rolled back, SQLite has asked about every statement."""
    savepoint = "SAVEPOINT a; …; ROLLBACK TO a"
    _rescues = False
    """An overdue transaction is being rolled back, in its own thread."""
    _thread: int | None = None
    """Where the connection is used."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._guarded = False

    def open(self) -> None:
        connection = self._connection
        refuse_other_file(connection, self.file, self.what)
        if connection.in_transaction:
            raise EnlistError(
                f"{self.what} is in a transaction already: enlist it before its first statement. (One that was opened "
                "with autocommit=False always is in one: leave that out.)"
            )
        begin(connection)

    def guard(self) -> None:
        self._guarded = True
        self._thread = threading.get_ident()
        self._connection.set_authorizer(self._allows)

    def read_on(self) -> None:
        """The transaction is over with our leave. From now on only reading is allowed."""
        self.ended, self._asked_again, self._overdue = True, True, False
        self.guard()  # again, so that SQLite asks about statements that it knows

    def _allows(self, action: int, what: str | None, value: str | None, *_: Any) -> int:
        if self._freed:
            return sqlite3.SQLITE_OK
        if self._overdue:
            return sqlite3.SQLITE_OK if self._rescues else sqlite3.SQLITE_DENY
        if self.ended:
            return self._allows_later(action, what, value)
        if action == sqlite3.SQLITE_TRANSACTION:
            return self._allows_end(what)
        return sqlite3.SQLITE_OK

    def _allows_end(self, verb: str | None) -> int:
        if not self.ending:
            self._refused = True
            _log.error("a COMMIT, ROLLBACK or BEGIN on %s was refused: %s", self.what, LEAVE_IT)
            return sqlite3.SQLITE_DENY
        self.ended = verb == "ROLLBACK"
        return sqlite3.SQLITE_OK

    def _allows_later(self, action: int, what: str | None, value: str | None) -> int:
        # BEGIN is refused where statements that SQLite knows already were not asked about again: one may write.
        if action in _READS and (what != "BEGIN" or self._asked_again):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA and value is None:
            return sqlite3.SQLITE_OK
        _log.error("%s", self.refuse_later("a write"))
        return sqlite3.SQLITE_DENY

    def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: list[Any] = []
        for sql in statements:
            cursor = self._connection.cursor()
            cursor.row_factory = None  # the app's own may make anything of a row
            rows = cursor.execute(sql, parameters).fetchall()
        return rows

    def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        return self.execute(statements, parameters) if self._still() else []

    def _still(self) -> bool:
        """The very transaction: it could not be committed, and BEGIN is refused as well."""
        if self._overdue or self._refused:
            self.rolled_back = True  # as good as: COMMIT does not pass, and roll_back() follows
            return False
        try:
            if self._connection.in_transaction:
                return True
        except sqlite3.ProgrammingError:  # closed
            self.rolled_back = True
            return False
        # Rolled back by SQLite, after an error or by OR ROLLBACK. Where Python begins no transaction before a write,
        # what came after that was committed on its own, statement by statement.
        self.rolled_back = self._connection.isolation_level is not None
        return False

    def usable_from_other_threads(self) -> bool:
        return usable_from_other_threads(self._connection)

    def gone(self) -> None:
        self._still()

    def let_go(self) -> None:
        self.ending = True
        self._connection.set_authorizer(self._allows)  # so that SQLite asks again about statements that it knows

    def free(self) -> None:
        self._freed = True
        if self._thread == threading.get_ident():
            self._unguard()

    def commit(self) -> None:
        self.ending = True
        try:
            self._connection.execute("COMMIT")
        finally:
            self._tidy()

    def roll_back(self) -> None:
        if self._still():
            self.rolled_back = True
        self.allow()
        self._tidy()

    def allow(self) -> None:
        """The transaction may be ended now."""
        self.ending, self._overdue = True, False

    def _tidy(self) -> None:
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._unguard()

    def _unguard(self) -> None:
        if self._guarded:
            self._guarded = False
            with suppress(sqlite3.Error):
                self._connection.set_authorizer(None)

    def interrupt(self) -> None:
        """Stop the statement that runs, let no other be prepared, and in the connection's own thread free the file.

        From another thread ``interrupt`` is all there is. SQLite has a lock for each connection, and calls the
        authorizer under it: whoever waits for that lock with Python's own in hand (set_authorizer does) while the
        handler prepares a statement stops the whole process for ever.
        """
        self._overdue = True
        try:
            self._connection.interrupt()
            if self._thread != threading.get_ident():
                return  # the event loop or the driver's thread comes by next; a handler's own, when it returns
            self._rescues = True
            self._connection.set_authorizer(self._allows)  # so that SQLite asks again about statements that it knows
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            return  # closed
        finally:
            self._rescues = False


def aiosqlite_link(connection: Any) -> Link:
    """A link to an ``aiosqlite.Connection``: the same link, in the connection's own thread."""
    inner = SqliteLink(connection._conn)
    inner.what = "the aiosqlite connection"
    return Elsewhere(inner, connection._execute)


def refuse_other_file(connection: sqlite3.Connection, file: str | None, what: str) -> None:
    """One file, or it is not one commit."""
    cursor = connection.cursor()
    cursor.row_factory = None
    path = next((row[2] for row in cursor.execute("PRAGMA database_list").fetchall() if row[1] == "main"), "")
    if not path or os.path.realpath(path) != os.path.realpath(file or ""):
        raise EnlistError(
            f"{what} is not open on the file that keeps the keys, so there can be no common commit: open the app's "
            "connections on the same file, or give OnceKey(url) theirs"
        )


def begin(connection: sqlite3.Connection) -> None:
    """A transaction that has the write lock from its start, and is on the disk when it ends (hazard 23)."""
    connection.execute("PRAGMA synchronous = FULL")
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        raise StoreUnavailable("the SQLite file is held by another process") from error


def usable_from_other_threads(connection: sqlite3.Connection) -> bool:
    """Whether it was opened with check_same_thread=False."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            connection.cursor().close()
            answers.append(True)
        except sqlite3.ProgrammingError:
            answers.append(False)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers == [True]
