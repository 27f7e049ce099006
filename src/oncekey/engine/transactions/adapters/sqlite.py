"""Links to SQLite: a ``sqlite3`` connection, and ``aiosqlite``'s, which is one in a thread of its own.

SQLite has one writer, so all other writers wait for an enlisted transaction. It takes its turn at the file's gate
(``stores/sqlite/transactions.py``) before ``BEGIN IMMEDIATE``.

SQLite's authorizer sees every statement when it is prepared, and refuses COMMIT and ROLLBACK by the handler. So a
transaction that is no longer open was rolled back, by SQLite itself or by closing the connection: that is a proof. If
the rollback was allowed (by SQLAlchemy, or by the app with ``commit="caller"``), the authorizer stays and refuses every
write until the request is over.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from oncekey.engine.transactions.adapters.base import ForwardingLink, Link, Rows
from oncekey.errors import EnlistError, StoreUnavailable

_log = logging.getLogger("oncekey")

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
    """The handler tried to end the transaction, so oncekey will not commit it."""
    _overdue = False
    _freed = False
    """The request is over."""
    _asked_again = False
    """The authorizer was set again after the rollback, so SQLite asks it about every statement."""
    savepoint = "SAVEPOINT a; …; ROLLBACK TO a"
    _rescues = False
    """The link is rolling back an overdue transaction, in the connection's own thread."""
    _thread: int | None = None
    """The thread that uses the connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._guarded = False

    def open(self) -> None:
        connection = self._connection
        refuse_other_file(connection, self.database.file, self.what)
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
        """The transaction was rolled back, and that was allowed. From now on only reading is allowed."""
        self.ended, self._asked_again, self._overdue = True, True, False
        self.guard()  # set again, SQLite asks also about statements that it prepared before

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
        if not self.end_allowed:
            self._refused = True
            _log.error("a COMMIT, ROLLBACK or BEGIN on %s was refused: %s", self.what, self.leave_it)
            return sqlite3.SQLITE_DENY
        self.ended = verb == "ROLLBACK"
        return sqlite3.SQLITE_OK

    def _allows_later(self, action: int, what: str | None, value: str | None) -> int:
        # Until the authorizer is set again, SQLite does not ask about statements that it prepared before. One of them
        # may write, so BEGIN is refused.
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
            cursor.row_factory = None  # the app's own may turn a row into anything
            rows = cursor.execute(sql, parameters).fetchall()
        return rows

    def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        return self.execute(statements, parameters) if self._still() else []

    def _still(self) -> bool:
        """Whether the enlisted transaction is open. An open one is the enlisted one: COMMIT and BEGIN are refused."""
        if self._overdue or self._refused:
            self.rollback_proven = True  # certain: COMMIT is refused, and roll_back() follows
            return False
        try:
            if self._connection.in_transaction:
                return True
        except sqlite3.ProgrammingError:  # closed
            self.rollback_proven = True
            return False
        # SQLite rolled it back, after an error or by OR ROLLBACK. If Python begins no transaction before a write, each
        # later statement was committed on its own.
        self.rollback_proven = self._connection.isolation_level is not None
        return False

    def usable_from_other_threads(self) -> bool:
        return usable_from_other_threads(self._connection)

    def gone(self) -> None:
        self._still()

    def let_go(self) -> None:
        self.end_allowed = True
        self._connection.set_authorizer(self._allows)  # SQLite asks again about statements that it prepared before

    def free(self) -> None:
        self._freed = True
        if self._thread == threading.get_ident():
            self._unguard()

    def commit(self) -> None:
        self.end_allowed = True
        try:
            self._connection.execute("COMMIT")
        finally:
            self._tidy()

    def roll_back(self) -> None:
        if self._still():
            self.rollback_proven = True
        self.allow()
        self._tidy()

    def allow(self) -> None:
        """Allow the end of the transaction."""
        self.end_allowed, self._overdue = True, False

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
        """Stop the running statement and refuse all others. In the connection's own thread, also roll back.

        Another thread may only call sqlite3's ``interrupt``. SQLite has a lock for each connection, and calls the
        authorizer under it. ``set_authorizer`` waits for that lock without releasing the GIL. If the handler prepares a
        statement at that moment, the whole process blocks for ever.
        """
        self._overdue = True
        try:
            self._connection.interrupt()
            if self._thread != threading.get_ident():
                return  # the event loop, the driver's thread or the end of the handler rolls back
            self._rescues = True
            self._connection.set_authorizer(self._allows)  # SQLite asks again about statements that it prepared before
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            return  # the connection is closed
        finally:
            self._rescues = False


def aiosqlite_link(connection: Any) -> Link:
    """A link to an ``aiosqlite.Connection``: the same link, run in the connection's own thread."""
    inner = SqliteLink(connection._conn)
    inner.what = "the aiosqlite connection"
    return ForwardingLink(inner, connection._execute)


def refuse_other_file(connection: sqlite3.Connection, file: Path | None, what: str) -> None:
    """Raise EnlistError unless the connection has the store's file open: one commit needs one file."""
    cursor = connection.cursor()
    cursor.row_factory = None
    path = next((row[2] for row in cursor.execute("PRAGMA database_list").fetchall() if row[1] == "main"), "")
    if not path or os.path.realpath(path) != os.path.realpath(file or ""):
        raise EnlistError(
            f"{what} is not open on the file that keeps the keys, so there can be no common commit: open the app's "
            "connections on the same file, or give OnceKey(url) theirs"
        )


def begin(connection: sqlite3.Connection) -> None:
    """Begin a transaction that has the write lock from its start, and is on the disk when it ends (hazard 23)."""
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
