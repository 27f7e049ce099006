"""The guards on one use of a SQLAlchemy session or connection, from enlist until the request is over.

They watch the enlisted **root** transaction by SQLAlchemy's events, and the driver's connection beneath it
(``sqlalchemy_beneath.py``). They refuse an early commit and allow a rollback. If a commit raises,
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
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session

from oncekey.engine.transactions.adapters import mysql, sqlite
from oncekey.engine.transactions.adapters.base import Link
from oncekey.engine.transactions.adapters.sqlalchemy_beneath import FAILED, IDLE, Beneath
from oncekey.engine.transactions.adapters.sqlalchemy_mysql import MysqlWatch
from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction, writes

# A SELECT, not SET TRANSACTION: it takes a snapshot, after which PostgreSQL refuses to make it READ WRITE again.
READ_ONLY = {
    "postgresql": "SELECT set_config('transaction_read_only', 'on', true)",
    "mysql": mysql.READ_ONLY,
}


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
        self._beneath: list[Beneath] = []
        self._authorizers: list[Authorizer] = []
        self._finalizers: list[tuple[Any, Callable[[Any], None]]] = []
        self._mysql: MysqlWatch | None = None

    def start(self) -> None:
        self._listen(self.connection, "commit", self._on_commit)
        self._listen(self.connection, "rollback", self._on_rollback)
        self._listen(self.connection, "begin", self._on_begin)
        if self._session is not None:
            self._listen(self._session, "after_begin", self._on_after_begin)
        self._watch(self.connection)
        if self.link.dialect == "sqlite":
            self.authorizer = self._authorize(self.connection)
        elif self.link.dialect == "mysql":
            self._mysql = MysqlWatch(self.connection, self.link)
            self._mysql.start()
            self.link.may_have_ended_unseen = not self._is_watched()

    def is_current(self) -> bool:
        """Whether the root is still the open transaction, as far as SQLAlchemy knows."""
        connection, root = self.connection, self.root
        return not connection.closed and root.is_active and connection.get_transaction() is root

    @property
    def committed(self) -> bool:
        """The root was asked to commit, and was not rolled back before or after."""
        return self._commits and not self.link.ended

    # -- the root --------------------------------------------------------------------------------------------------

    def _on_commit(self, connection: Connection) -> None:
        with self._listening():
            if self._freed or connection.get_transaction() is not self.root:
                return self._announce(connection)  # a later transaction, which can only read
            if not self.link.end_allowed:
                self._roll_back(connection)
                raise self.link.refuse("commit()")
            self._commits = True
            return self._stop_drivers()

    def _on_rollback(self, connection: Connection) -> None:
        with self._listening():
            if connection.get_transaction() is self.root and not (self._freed or self.own_rollback):
                self._end()
            self._announce(connection)

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
        self._look_for_mark()
        self.link.ended = True
        if self.authorizer is not None:
            with suppress(Exception):
                self.authorizer.read_on_in(self.connection)

    def look_for_kept_writes(self) -> None:
        if self._mysql is not None and not self.link.ended:
            self._mysql.look_for_kept_writes()

    def _look_for_mark(self) -> None:
        """If the driver cannot be watched, see whether it still is the enlisted transaction that is rolled back. One
        that has failed does not answer. (MySQL's mark: ``look_for_kept_writes``.)"""
        if self.link.ended or self.link.dialect != "postgresql" or self._is_watched():
            return
        with suppress(Exception), self._sending():
            if self.status() != FAILED and self.link.execute(*self.link.mark) != [(True,)]:
                self.link.mark_is_gone()

    def _roll_back(self, connection: Connection) -> None:
        self._end()
        self._announce(connection)
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
        self._watch_beneath(connection)
        with self._sending():
            connection.exec_driver_sql(READ_ONLY[self.link.dialect]).close()

    # -- statements ------------------------------------------------------------------------------------------------

    def _watch(self, connection: Connection) -> None:
        self._watch_beneath(connection)

        def before(at: Connection, _cursor: Any, statement: str, *_: Any) -> None:
            if self._own_statement or self._freed or self.committed:
                return None
            link = self.link
            verb = ends_transaction(statement)
            if verb is None and link.dialect == "mysql":
                verb = mysql.commits_by_itself(statement)
            if verb is not None:
                return self._by_hand(at, verb)
            if self.status(at) == IDLE:
                link.may_have_written_later = link.may_have_written_later or not link.ended
                link.ended = True
                raise link.refuse_later("a statement", "was ended, and not by SQLAlchemy")
            if link.ended and (verb := writes(statement)) is not None:
                raise link.refuse_later(verb)
            if may_end_transaction(statement):
                link.may_have_written_later = True
            return None

        self._watched.append(connection)
        self._listen(connection, "before_cursor_execute", before)
        if connection is not self.connection:
            self._listen(connection, "commit", self._on_commit)
            self._listen(connection, "rollback", self._on_rollback)

    def _by_hand(self, connection: Connection, verb: str) -> None:
        """The handler sent COMMIT or ROLLBACK as a statement."""
        with self.lock:
            if not self.link.end_allowed:
                self._roll_back(connection)
                raise self.link.refuse(verb)
        if verb in ("ROLLBACK", "ABORT") or verb.startswith("PREPARE"):
            self._end()
            self._announce(connection)
        else:
            self._commits = True

    # -- the driver's connection -----------------------------------------------------------------------------------

    def _watch_beneath(self, connection: Connection) -> None:
        if self.link.dialect == "sqlite" or any(each.watches(connection) for each in self._beneath):
            return
        beneath = Beneath(self.link, connection, self._allows)
        beneath.start()
        self._beneath.append(beneath)
        self._finalize(connection, lambda _: beneath.stop())

    def _allows(self) -> bool:
        """Whether oncekey itself is sending, or the guards are off."""
        return self._own_statement or self._freed or self.committed or (self.link.end_allowed and not self.link.ended)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        before, self._own_statement = self._own_statement, True
        try:
            yield
        finally:
            self._own_statement = before

    def _announce(self, connection: Connection) -> None:
        """SQLAlchemy will now send COMMIT or ROLLBACK."""
        for each in self._beneath:
            each.announced = each.announced or each.connection is connection

    def _is_watched(self) -> bool:
        return any(each.watches(self.connection) for each in self._beneath)

    def status(self, connection: Connection | None = None) -> int | None:
        """The transaction status of the driver beneath this connection, the root's by default. None: it has none."""
        at = connection or self.connection
        found = [each.status for each in self._beneath if each.connection is at]
        return found[-1]() if found and found[-1] is not None else None

    def look_beneath(self) -> None:
        """See what the watches have seen and could not refuse."""
        for each in self._beneath:
            each.look()

    @property
    def lost(self) -> bool:
        self.look_beneath()
        return any(each.lost for each in self._beneath)

    def _stop_drivers(self) -> None:
        for each in self._beneath:
            each.stop()
        if self._mysql is not None:
            self._mysql.stop()

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
        self._stop_drivers()
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
