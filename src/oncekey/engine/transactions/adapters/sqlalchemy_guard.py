"""The guards on one use of a SQLAlchemy session or connection, from enlist until the request is over.

They watch the enlisted **root** transaction. They refuse an early commit and allow a rollback. If a commit raises,
SQLAlchemy counts the transaction as ended and gives the connection, still open, to the next request. So a guard that
refuses a commit also rolls back.

They also watch later transactions. A session silently begins another one, perhaps on another connection of its pool.
The guards make it read-only: reading on (``session.refresh(obj)``, a lazy load) is ordinary, but a write would be
committed without the key.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session

from oncekey.engine.transactions.adapters import mysql, sqlite
from oncekey.engine.transactions.adapters.base import Link
from oncekey.engine.transactions.adapters.sqlalchemy_mysql import MysqlWatch
from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction, writes

IDLE, FAILED = 0, 3
"""As libpq numbers the states of a transaction."""

# A SELECT, not SET TRANSACTION: it takes a snapshot, after which PostgreSQL refuses to make it READ WRITE again.
READ_ONLY = {
    "postgresql": "SELECT set_config('transaction_read_only', 'on', true)",
    "mysql": mysql.READ_ONLY,
}


class _Stoppable(Protocol):
    def stop(self) -> None: ...


class Guard:
    def __init__(self, link: Link, session: Session | None, connection: Connection) -> None:
        self.link = link
        self.connection = connection
        self.root: Any = connection.get_transaction()
        self.authorizer: Authorizer | None = None
        """SQLite's own guard, on the connection of the root."""
        self.lock = threading.RLock()
        """Held while oncekey uses the root. A thread that closes the session waits for it. Otherwise that thread would
        roll back, and return the connection to its pool, while oncekey's statement runs."""
        self._session = session
        self._commits = False
        self._own_statement = False
        self.own_rollback = False
        """oncekey itself is rolling back, in this thread."""
        self._freed = False
        self._dispatching = 0
        """Calls of our listeners that wait for the lock or hold it."""
        self._listeners: list[tuple[Any, str, Callable[..., Any]]] = []
        self._watched: list[Connection] = []
        self._drivers: list[_Stoppable] = []
        self._authorizers: list[Authorizer] = []
        self._finalizers: list[tuple[Any, Callable[[Any], None]]] = []
        self._mysql: MysqlWatch | None = None
        self.status: Callable[[], int] | None = None
        """Returns the transaction status of the driver; None: the driver has none."""

    def start(self) -> None:
        self._listen(self.connection, "commit", self._on_commit)
        self._listen(self.connection, "rollback", self._on_rollback)
        self._listen(self.connection, "begin", self._on_begin)
        if self._session is not None:
            self._listen(self._session, "after_begin", self._on_after_begin)
        self.status = self._watch(self.connection)
        if self.link.dialect == "sqlite":
            self.authorizer = self._authorize(self.connection)
        elif self.link.dialect == "mysql":
            self._mysql = MysqlWatch(self.connection, self.link)
            self._mysql.start()
            self._drivers.append(self._mysql)
        elif (watch := _watch_driver(self.connection, self.link)) is not None:
            self._drivers.append(watch)
            self._finalize(self.connection, lambda _: watch.stop())

    def is_current(self) -> bool:
        """Whether the root is still the open transaction, as far as SQLAlchemy knows."""
        connection, root = self.connection, self.root
        return not connection.closed and root.is_active and connection.get_transaction() is root

    @property
    def undone(self) -> bool:
        """The server has rolled the root back by itself, and SQLAlchemy does not know it."""
        return self._mysql is not None and self._mysql.undone

    @property
    def committed(self) -> bool:
        """The root was asked to commit, and was not rolled back before or after."""
        return self._commits and not self.link.ended

    # -- the root --------------------------------------------------------------------------------------------------

    def _on_commit(self, connection: Connection) -> None:
        with self._listening():
            if self._freed or connection.get_transaction() is not self.root:
                return  # a later transaction, which can only read
            if not self.link.end_allowed:
                self._roll_back(connection)
                raise self.link.refuse("commit()")
            self._commits = True
            for each in self._drivers:
                each.stop()

    def _on_rollback(self, connection: Connection) -> None:
        with self._listening():
            if connection.get_transaction() is self.root and not (self._freed or self.own_rollback):
                self._end()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        self._dispatching += 1
        try:
            with self.lock:
                yield
        finally:
            self._dispatching -= 1

    def _end(self) -> None:
        """The root is being rolled back."""
        self.look_for_kept_writes()
        self.link.ended = True
        if self.authorizer is not None:
            with suppress(Exception):
                self.authorizer.read_on_in(self.connection)

    def look_for_kept_writes(self) -> None:
        if self._mysql is not None and not self.link.ended:
            self._mysql.look_for_kept_writes()

    def _roll_back(self, connection: Connection) -> None:
        self._end()
        connection.engine.dialect.do_rollback(connection.connection)

    # -- later transactions ----------------------------------------------------------------------------------------

    def _on_begin(self, connection: Connection) -> None:
        if self._is_later():
            self._make_read_only(connection)

    def _on_after_begin(self, _session: Session, _transaction: Any, connection: Connection) -> None:
        if connection is self.connection or not self._is_later():
            return
        if all(connection is not each for each in self._watched):  # otherwise a savepoint in it
            self._make_read_only(connection)
            self._watch(connection)

    def _is_later(self) -> bool:
        if self._freed:
            return False
        if not self._commits and not self.is_current():
            self.link.ended = True
        return self.link.ended

    def _make_read_only(self, connection: Connection) -> None:
        if self.link.dialect == "sqlite":
            if connection is not self.connection:
                self._authorize(connection).read_on_in(connection)
            return
        self._own_statement = True
        try:
            connection.exec_driver_sql(READ_ONLY[self.link.dialect]).close()
        finally:
            self._own_statement = False

    # -- statements ------------------------------------------------------------------------------------------------

    def _watch(self, connection: Connection) -> Callable[[], int] | None:
        status = _status_of(connection)

        def before(at: Connection, _cursor: Any, statement: str, *_: Any) -> None:
            if self._own_statement or self._freed or self.committed:
                return None
            link = self.link
            verb = ends_transaction(statement)
            if verb is None and link.dialect == "mysql":
                verb = mysql.commits_by_itself(statement)
            if verb is not None:
                return self._by_hand(at, verb)
            if status is not None and status() == IDLE:  # ended on the driver's connection
                link.ended = True
                link.may_have_written_later = link.may_have_written_later or self.undone
                raise link.refuse_later("a statement", "was committed or rolled back on the driver's own connection")
            if link.ended and (verb := writes(statement)) is not None:
                raise link.refuse_later(verb)
            if may_end_transaction(statement):
                link.may_have_written_later = True
            return None

        self._watched.append(connection)
        self._listen(connection, "before_cursor_execute", before)
        return status

    def _by_hand(self, connection: Connection, verb: str) -> None:
        """The handler sent COMMIT or ROLLBACK as a statement."""
        with self.lock:
            if not self.link.end_allowed:
                self._roll_back(connection)
                raise self.link.refuse(verb)
        if verb in ("ROLLBACK", "ABORT") or verb.startswith("PREPARE"):
            self._end()
        else:
            self._commits = True

    # -- removing the guards ---------------------------------------------------------------------------------------

    def _listen(self, target: Any, name: str, function: Callable[..., Any]) -> None:
        event.listen(target, name, function)
        self._listeners.append((target, name, function))

    def _finalize(self, connection: Connection, function: Callable[[Any], None]) -> None:
        """Call ``function`` when the driver's connection goes back to its pool."""
        record: Any = connection.connection._connection_record
        if record is not None:
            record.finalize_callback.append(function)
            self._finalizers.append((record, function))

    def _authorize(self, connection: Connection) -> Authorizer:
        authorizer: Authorizer = raw(connection, Authorizer)
        authorizer.what, authorizer.savepoint = self.link.what, self.link.savepoint
        raw(connection, lambda _: authorizer.guard())
        self._authorizers.append(authorizer)
        self._finalize(connection, authorizer.stop_in)
        return authorizer

    def free(self) -> None:
        """Turn all guards off."""
        self._freed = True
        for driver in self._drivers:
            driver.stop()
        for authorizer in self._authorizers:
            authorizer.free()

    def take_away(self) -> None:
        """Remove the guards from the session and its connection, unless another thread or task is closing it.

        SQLAlchemy cannot remove a listener while it calls listeners. To set an authorizer while a statement is prepared
        can block the whole process (see ``SqliteLink.interrupt``). Guards that stay do nothing, and the pool removes
        them.
        """
        self.free()
        if self._dispatching:
            return
        for target, name, function in self._listeners:
            with suppress(InvalidRequestError):
                event.remove(target, name, function)
        self._listeners = []
        if self.authorizer is not None:
            with suppress(Exception):
                self.authorizer.stop_in(self.connection.connection.dbapi_connection)
        for record, finalizer in self._finalizers:
            with suppress(ValueError):
                record.finalize_callback.remove(finalizer)
        self._finalizers = []


class Authorizer(sqlite.SqliteLink):
    """SQLite's own guard beneath SQLAlchemy."""

    def read_on_in(self, connection: Connection) -> None:
        raw(connection, lambda _: self.read_on())

    def stop_in(self, adapted: Any) -> None:
        self.free()
        with suppress(Exception):
            _in_its_thread(adapted, lambda _: self._unguard())


def raw(connection: Connection, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` with the driver's sqlite3 connection, in the thread of that connection."""
    return _in_its_thread(connection.connection.dbapi_connection, function, *args)


def _in_its_thread(adapted: Any, function: Callable[..., Any], *args: Any) -> Any:
    if isinstance(adapted, sqlite3.Connection):
        return function(adapted, *args)
    return adapted.run_async(lambda connection: connection._execute(function, connection._conn, *args))


def _status_of(connection: Connection) -> Callable[[], int] | None:
    driver: Any = connection.connection.driver_connection
    if hasattr(driver, "pgconn"):  # psycopg
        pgconn = driver.pgconn
        return lambda: int(pgconn.transaction_status)
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return lambda: 2 if driver.is_in_transaction() else IDLE
    if hasattr(driver, "server_status"):  # PyMySQL, aiomysql, asyncmy
        return lambda: 2 if driver.server_status & 1 else IDLE
    if hasattr(driver, "get_transaction_status"):  # psycopg2
        return lambda: int(driver.get_transaction_status())
    return None


class _AsyncpgLater:
    """SQLAlchemy's asyncpg connection begins every later transaction READ ONLY."""

    def __init__(self, adapted: Any) -> None:
        self._adapted, self._before = adapted, adapted.readonly
        adapted.readonly = True

    def stop(self) -> None:
        if self._adapted is not None:
            self._adapted.readonly, self._adapted = self._before, None


def _watch_driver(connection: Connection, link: Link) -> _Stoppable | None:
    driver = connection.connection.driver_connection
    if type(driver).__module__.partition(".")[0] == "psycopg":
        from oncekey.engine.transactions.adapters.psycopg_watch import watch_beneath

        return watch_beneath(driver, link)
    adapted = connection.connection.dbapi_connection
    return _AsyncpgLater(adapted) if hasattr(driver, "is_in_transaction") and hasattr(adapted, "readonly") else None
