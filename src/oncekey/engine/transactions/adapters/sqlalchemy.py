"""Links to SQLAlchemy sessions and connections, on PostgreSQL, MySQL and SQLite, sync and async.

A closed session silently begins another transaction, and the ``commit()`` of a closed session does nothing and raises
nothing. So the link reports a commit only if the transaction object that it saw at enlist has committed (hazard 32).
The guards are in ``sqlalchemy_guard.py``.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any

import sqlalchemy
from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.orm import Session

from oncekey.engine.transactions.adapters import link_to, mysql, sqlite
from oncekey.engine.transactions.adapters.base import ForwardingLink, Link, Rows, names_in
from oncekey.engine.transactions.adapters.sqlalchemy_beneath import FAILED
from oncekey.engine.transactions.adapters.sqlalchemy_guard import Guard, raw
from oncekey.errors import EnlistError

_DIALECTS = {"postgresql": "postgresql", "sqlite": "sqlite", "mysql": "mysql", "mariadb": "mysql"}
"""SQLAlchemy's names of databases -> ours."""


@cache
def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


class SqlAlchemyLink(Link):
    """A ``Session`` (also of a ``scoped_session``) or a ``Connection``."""

    _connection: Connection
    _transaction: Any

    def __init__(self, target: Session | Connection) -> None:
        if _numbers(sqlalchemy.__version__) < (2, 0, 43):
            raise EnlistError(
                f"SQLAlchemy {sqlalchemy.__version__} does not tell whether a connection commits each statement by "
                "itself, so its transactions cannot be enlisted: upgrade it to 2.0.43 or newer"
            )
        self._session = target if isinstance(target, Session) else None
        self._target = target
        self.what = "the SQLAlchemy session" if self._session is not None else "the SQLAlchemy connection"
        if self._session is None:
            self.savepoint = "with connection.begin_nested():"
        self._guard: Guard | None = None
        self._registry: tuple[Any, int] | None = None
        """The registry of the enlisted ``scoped_session``, and the thread that enlisted it."""
        self._thread: int | None = None
        self.dialect = self._dialect()

    def _dialect(self) -> str:
        try:
            bind = self._session.get_bind() if self._session is not None else self._target
            name: Any = bind.dialect.name  # type: ignore[union-attr]
        except UnboundExecutionError:
            raise EnlistError(
                f"{self.what} is bound to several databases: enlist the one connection that it uses, "
                "session.connection(bind_arguments=…)"
            ) from None
        if name not in _DIALECTS:
            raise EnlistError(f"{self.what} is on {name}: PostgreSQL, MySQL, MariaDB and SQLite can be enlisted")
        return _DIALECTS[name]

    # -- opening it ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        fresh = not self._target.in_transaction()
        self._refuse_blocks()
        self._connection = self._session.connection() if self._session is not None else self._connect()
        if self.dialect != "sqlite" and self._autocommits():
            raise EnlistError(
                f"{self.what} is in autocommit mode, where each statement is a commit of its own: take the isolation "
                "level AUTOCOMMIT away from this engine or connection"
            )
        self._transaction = self._connection.get_transaction()
        if self.dialect == "sqlite":
            raw(self._connection, self._begin_sqlite, fresh)

    def _autocommits(self) -> bool:
        pooled = self._connection.connection
        detect = getattr(self._connection.dialect, "detect_autocommit_setting", None)  # SQLAlchemy 2.0.43
        if detect is not None:
            with suppress(NotImplementedError):
                return bool(detect(pooled.dbapi_connection))
        return self._connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"

    def _connect(self) -> Connection:
        assert isinstance(self._target, Connection)  # noqa: S101 - open() calls this for no session
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
                f"{self.what} joins a transaction of the connection that it is bound to, so its commit would commit "
                "nothing: enlist that connection itself"
            )

    def _begin_sqlite(self, beneath: sqlite3.Connection, fresh: bool) -> None:
        sqlite.refuse_other_file(beneath, self.database.file, self.what)
        if not beneath.in_transaction:
            sqlite.begin(beneath)
        elif not fresh:
            raise EnlistError(f"{self.what} has written already: enlist it before its first statement")
        # Otherwise a "begin" listener of the app began it just now; the first statement takes the write lock.

    def usable_from_other_threads(self) -> bool:
        if self.dialect != "sqlite":
            return True
        result: bool = raw(self._connection, sqlite.usable_from_other_threads)
        return result

    def guard(self) -> None:
        self._thread = threading.get_ident()
        self._guard = Guard(self, self._session, self._connection)
        self._guard.start()

    # -- using it --------------------------------------------------------------------------------------------------

    def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: Rows = []
        if self.dialect == "mysql":
            parameters = mysql.prepared(parameters)
        try:
            for sql in statements:
                result = self._connection.execute(text(sql), {name: parameters[name] for name in names_in(sql)})
                rows = [tuple(row) for row in result] if result.returns_rows else []
        except DBAPIError as error:
            if self.dialect == "mysql" and mysql.is_another(error):
                return []
            raise
        return rows

    def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        with self._lock():
            if not self._still():
                return []
            if self._session is not None:
                self._session.flush()
            rows = self.execute(statements, parameters)
            return rows if self._still() else []  # a dependency may be closing the session at this moment

    def _lock(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._guard is None else self._guard.lock

    def _still(self) -> bool:
        guard = self._guard
        if guard is None or self.ended or self.end_refused or not guard.is_current():
            return False
        return guard.authorizer is None or guard.authorizer._still()

    # -- ending it -------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        self.end_allowed = True
        if self._guard is not None and self._guard.authorizer is not None:
            raw(self._connection, lambda _: self._guard.authorizer.let_go())  # type: ignore[union-attr]

    def free(self) -> None:
        if self._guard is None:
            return
        if self.caller:  # the app has returned
            self._guard.take_away()
        else:
            self._guard.free()

    def _unguard(self) -> None:
        if self._guard is None:
            return
        if self.ended:  # another thread may still be closing the session
            self._guard.free()
        else:
            self._guard.take_away()

    def commit(self) -> None:
        with self._lock():
            self._commit()

    def _commit(self) -> None:
        guard = self._guard
        try:
            if guard is None or not self._still():
                raise EnlistError(f"the enlisted transaction of {self.what} was ended before oncekey could commit it")
            self._allow()
            if self._session is not None:
                self._session.commit()
            else:
                guard.root.commit()
            if not guard.committed:
                raise EnlistError(f"{self.what} was closed or rolled back while oncekey committed it")
        except BaseException:
            self._allow()
            self._undo(always=True)  # for SQLAlchemy it has ended; in SQLite it may be open
            raise
        finally:
            self._unguard()
            self.ended = True

    def _allow(self) -> None:
        self.end_allowed = True
        if self._guard is not None and self._guard.authorizer is not None:
            self._guard.authorizer.allow()

    def watch_registry(self, registry: Any) -> None:
        self._registry = (registry, threading.get_ident())

    def _was_removed(self) -> bool:
        """Whether the handler called ``scoped_session.remove()``. The next use makes another session, without a guard.

        A registry answers for the thread that asks. If the request ends in another thread (a plain function under
        ASGI), a removal cannot be ruled out, and the answer is True.
        """
        if self._registry is None:
            return False
        registry, thread = self._registry
        return thread != threading.get_ident() or not registry.has() or registry() is not self._session

    def roll_back(self) -> None:
        with self._lock():
            self._roll_back()

    def _roll_back(self) -> None:
        if self.ended and self._was_removed():
            self.may_have_written_later = True
        proven = self._only_rolled_back() if self.dialect == "sqlite" else self._mark_is_there()
        if self._guard is not None:
            self._guard.look_for_kept_writes()
            self._guard.look_beneath()
        proven = proven and not self.may_have_written_later
        self._allow()
        self._undo(always=False)
        self.rollback_proven = proven
        if not self.caller:
            self._unguard()
        self.ended = True

    def _undo(self, *, always: bool) -> None:
        """Roll back, unless the handler, a guard or a dependency has done so. Then another thread may be closing the
        session at this moment, and a later transaction can only read."""
        if self.ended:
            return
        if self._guard is not None:
            self._guard.own_rollback = True
        if always:
            self._undo_driver()
        with suppress(Exception):
            if self._session is not None:
                self._session.rollback()
            elif not self._connection.closed:
                self._connection.rollback()
        if self._guard is None or self._guard.is_current():  # not rolled back: the session is in use elsewhere
            self._undo_driver()

    def _undo_driver(self) -> None:
        with suppress(Exception):
            self._connection.engine.dialect.do_rollback(self._connection.connection)

    def _mark_is_there(self) -> bool:
        guard = self._guard
        if guard is None or self.ended or not guard.is_current():
            return False
        there = False
        with suppress(Exception):  # a failed transaction does not answer: the server is asked later
            if guard.status() != FAILED:
                there = self.execute(*self.mark) == [(True,)]
                if not there:
                    self.mark_is_gone()
        return there

    def _only_rolled_back(self) -> bool:
        """SQLite: whether it can only have been rolled back. The authorizer allows no COMMIT and no later write."""
        guard = self._guard
        if guard is None or guard.authorizer is None:
            return False
        return self.ended or guard.authorizer._still() or guard.authorizer.rollback_proven

    def connection_lost(self, error: BaseException | None) -> bool:
        guard = self._guard
        return super().connection_lost(error) or (guard is not None and (guard.lost or self._connection.invalidated))

    def gone(self) -> None:
        self.rollback_proven = self.dialect == "sqlite" and self._only_rolled_back()
        self.free()

    def interrupt(self) -> None:
        guard = self._guard
        authorizer = None if guard is None else guard.authorizer
        if authorizer is not None:
            authorizer.interrupt()
            if self._thread == threading.get_ident():  # again in aiosqlite's thread, where it can roll back
                raw(self._connection, lambda _: authorizer.interrupt())


def async_link(target: Any) -> Link:
    """A link to an ``AsyncSession`` or ``AsyncConnection``: the same link, in a greenlet that can await the driver."""
    beneath = target.sync_session if hasattr(target, "sync_session") else target.sync_connection
    if beneath is None:
        raise EnlistError("the SQLAlchemy AsyncConnection is not open: enlist it inside `async with engine.connect()`")
    inner = SqlAlchemyLink(beneath)
    inner.what = f"the SQLAlchemy {type(target).__name__}"

    async def run(function: Callable[..., Any], *args: Any) -> Any:
        return await target.run_sync(lambda _: function(*args))

    return ForwardingLink(inner, run)


def scoped_link(target: Any) -> Link:
    """Link to the current session, not to the registry: another task may end the request, and the registry may return
    another session there."""
    link = link_to(target.registry())
    link.watch_registry(target.registry)
    return link
