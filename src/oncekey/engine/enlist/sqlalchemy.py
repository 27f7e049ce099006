"""Links to SQLAlchemy sessions and connections, on PostgreSQL and SQLite, sync and async.

A closed session silently begins another transaction, so the transaction object that was seen at enlist is compared at
the end. Early commits are refused by an event of the Connection (a session's ``before_commit`` fires for savepoints
too). SQLAlchemy takes a commit that raised for the end of the transaction, and would hand the connection to the next
request as it is, open: so the refusal rolls back itself.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import Session

from oncekey.engine.enlist import sqlite
from oncekey.engine.enlist.base import Dialect, Elsewhere, Link, Rows, ends_transaction, names_in
from oncekey.errors import EnlistError


class SqlAlchemyLink(Link):
    """A ``Session`` (also of a ``scoped_session``) or a ``Connection``."""

    _connection: Connection
    _transaction: Any

    def __init__(self, target: Session | Connection) -> None:
        self._session = target if isinstance(target, Session) else None
        self._target = target
        self.what = "the SQLAlchemy session" if self._session is not None else "the SQLAlchemy connection"
        self._listeners: list[tuple[str, Callable[..., Any]]] = []
        self._authorizer: sqlite.SqliteLink | None = None
        self._thread: int | None = None
        self.dialect = self._dialect()

    def _dialect(self) -> Dialect:
        try:
            bind = self._session.get_bind() if self._session is not None else self._target
            name: Any = bind.dialect.name  # type: ignore[union-attr]
        except UnboundExecutionError:
            raise EnlistError(
                f"{self.what} is bound to several databases: enlist the one connection that it uses, "
                "session.connection(bind_arguments=…)"
            ) from None
        if name not in ("postgresql", "sqlite"):
            raise EnlistError(f"{self.what} is on {name}: PostgreSQL and SQLite can be enlisted")
        dialect: Dialect = name
        return dialect

    # -- taking hold -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        fresh = not self._target.in_transaction()
        self._refuse_blocks()
        self._connection = self._session.connection() if self._session is not None else self._connect()
        if self.dialect == "postgresql" and self._autocommits():
            raise EnlistError(
                f"{self.what} is in autocommit mode, where each statement is a commit of its own: take the isolation "
                "level AUTOCOMMIT away from this engine or connection"
            )
        self._transaction = self._connection.get_transaction()
        if self.dialect == "sqlite":
            self._raw(self._begin_sqlite, fresh)

    def _autocommits(self) -> bool:
        pooled = self._connection.connection
        detect = getattr(self._connection.dialect, "detect_autocommit_setting", None)  # SQLAlchemy 2.0.43
        if detect is not None:
            with suppress(NotImplementedError):
                return bool(detect(pooled.dbapi_connection))
        return self._connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"

    def _connect(self) -> Connection:
        assert isinstance(self._target, Connection)  # noqa: S101 - the other half of open()
        if not self._target.in_transaction():
            self._target.begin()
        return self._target

    def _refuse_blocks(self) -> None:
        target = self._target
        if target.in_nested_transaction():
            raise EnlistError(f"{self.what} is inside a savepoint: enlist it before begin_nested()")
        if self.caller:
            return
        if getattr(target, "_trans_context_manager", None) is not None:
            raise EnlistError(
                f"{self.what} is inside a `with ….begin()` block, which commits by itself at its end, before there is "
                "a response to store: leave the block out, or use enlist(…, commit='caller') where the block ends "
                "after the response is sent"
            )
        if getattr(target, "twophase", False):
            raise EnlistError(f"{self.what} uses two-phase commits, which oncekey cannot end: leave twophase out")
        bind = self._session.get_bind() if self._session is not None else None
        if isinstance(bind, Connection) and not target.in_transaction() and bind.in_transaction():
            raise EnlistError(
                f"{self.what} joins a transaction of the connection that it is bound to, so its commit would not be "
                "one: enlist that connection itself"
            )

    def _begin_sqlite(self, raw: sqlite3.Connection, fresh: bool) -> None:
        sqlite.refuse_other_file(raw, self.file, self.what)
        if not raw.in_transaction:
            sqlite.begin(raw)
        elif not fresh:
            raise EnlistError(f"{self.what} has written already: enlist it before its first statement")
        # Else the engine's own "begin" event began it just now; the first statement takes the write lock.

    def _raw(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run this with the sqlite3 connection beneath, in the thread where it lives."""
        pooled = self._connection.connection
        driver = pooled.driver_connection
        if isinstance(driver, sqlite3.Connection):
            return function(driver, *args)
        adapted: Any = pooled.dbapi_connection
        return adapted.run_async(lambda connection: connection._execute(function, connection._conn, *args))

    def usable_from_other_threads(self) -> bool:
        if self.dialect != "sqlite":
            return True
        result: bool = self._raw(sqlite.usable_from_other_threads)
        return result

    def guard(self) -> None:
        self._listen("commit", self._on_commit)
        self._listen("rollback", self._on_rollback)
        self._listen("before_cursor_execute", self._on_execute)
        if self.dialect == "sqlite":
            self._thread = threading.get_ident()
            self._raw(self._authorize)

    def _authorize(self, raw: sqlite3.Connection) -> None:
        self._authorizer = sqlite.SqliteLink(raw)
        self._authorizer.what = self.what
        self._authorizer.guard()

    def _listen(self, name: str, function: Callable[..., Any]) -> None:
        event.listen(self._connection, name, function)
        self._listeners.append((name, function))

    def _on_commit(self, _: Connection) -> None:
        if not self.ending:
            self._roll_back_driver()
            self.rolled_back = True
            raise self.refuse("commit()")

    def _on_rollback(self, _: Connection) -> None:
        if not self._same():
            return  # a transaction after ours
        # By the handler, by a session that is closed, or by ours: through here nothing can have been committed.
        self._allow()
        self.rolled_back = True

    def _on_execute(self, _connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if not self.ending and ends_transaction(statement):
            self._roll_back_driver()
            self.rolled_back = True
            raise self.refuse(statement.split(maxsplit=1)[0].upper())

    def _roll_back_driver(self) -> None:
        self._allow()
        self._connection.engine.dialect.do_rollback(self._connection.connection)

    def _allow(self) -> None:
        if self._authorizer is not None:
            self._authorizer.allow()

    # -- using it --------------------------------------------------------------------------------------------------

    def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: Rows = []
        for sql in statements:
            result = self._connection.execute(text(sql), {name: parameters[name] for name in names_in(sql)})
            rows = [tuple(row) for row in result] if result.returns_rows else []
        return rows

    def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        if not self._still():
            return []
        if self._session is not None:
            self._session.flush()
        return self.execute(statements, parameters)

    def _still(self) -> bool:
        if self._authorizer is not None and not self._authorizer._still():
            self.rolled_back = self.rolled_back or self._authorizer.rolled_back
            return False
        return not self.rolled_back and self._same()

    def _same(self) -> bool:
        """As far as SQLAlchemy knows."""
        connection, transaction = self._connection, self._transaction
        return not connection.closed and transaction.is_active and connection.get_transaction() is transaction

    # -- ending it -------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        self.ending = True
        self._unguard()

    def _unguard(self) -> None:
        for name, function in self._listeners:
            with suppress(InvalidRequestError):
                event.remove(self._connection, name, function)
        self._listeners = []
        if self._authorizer is not None:
            authorizer, self._authorizer = self._authorizer, None
            authorizer.allow()
            with suppress(Exception):
                self._raw(lambda raw: authorizer._unguard())

    def commit(self) -> None:
        self.ending = True
        self._allow()
        try:
            if self._session is not None:
                self._session.commit()
            else:
                self._transaction.commit()
        except BaseException:
            with suppress(Exception):  # SQLAlchemy thinks that it has ended; SQLite may not
                self._roll_back_driver()
            with suppress(Exception):
                (self._session or self._transaction).rollback()
            raise
        finally:
            self._unguard()

    def roll_back(self) -> None:
        self.ending = True
        with suppress(Exception):
            self._still()  # for the proof, before anything is touched
        self._allow()
        with suppress(Exception):
            if self._session is not None:
                self._session.rollback()  # also one that the handler began after it had ended ours
            elif not self._connection.closed:
                self._connection.rollback()
        self._unguard()

    def interrupt(self) -> None:
        authorizer = self._authorizer
        if authorizer is not None:
            authorizer.interrupt()
            if self._thread == threading.get_ident():
                self._raw(
                    lambda raw: authorizer.interrupt()
                )  # and again where aiosqlite has it: there it may roll back


def async_link(target: Any) -> Link:
    """A link to an ``AsyncSession`` or ``AsyncConnection``: the same link, where its driver may be awaited."""
    beneath = target.sync_session if hasattr(target, "sync_session") else target.sync_connection
    if beneath is None:
        raise EnlistError("the SQLAlchemy AsyncConnection is not open: enlist it inside `async with engine.connect()`")
    inner = SqlAlchemyLink(beneath)
    inner.what = f"the SQLAlchemy {type(target).__name__}"

    async def run(function: Callable[..., Any], *args: Any) -> Any:
        return await target.run_sync(lambda _: function(*args))

    return Elsewhere(inner, run)
