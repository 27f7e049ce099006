"""Links to psycopg 3 connections, sync and async. PostgreSQL itself says whether it still is the same transaction.

:class:`Watch` holds the guards. They stay on the connection after the handler has ended its transaction, until the
request is over or the connection goes back to its pool. Until then a later transaction can only read. That costs no
round trip: psycopg sends the BEGIN itself, and :class:`Watch` makes it a BEGIN READ ONLY.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from psycopg import AsyncConnection, Connection, pq
from psycopg.errors import ReadOnlySqlTransaction
from psycopg.rows import tuple_row

from oncekey.engine.transactions.adapters.base import DOOM, AsyncLink, Link, Rows, for_format
from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction
from oncekey.errors import EnlistError

IDLE, INTRANS, INERROR = pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR
_NAME = "_oncekey_watch"


class Watch:
    """The guards on one use of a psycopg connection."""

    def __init__(self, connection: Any, link: Link) -> None:
        self._connection = connection
        self.link = link
        self._class: type = type(connection)
        self._factory: Any = None
        self._begin = b""

    def start(self) -> None:
        connection = self._connection
        connection.__dict__[_NAME] = self
        read_only, connection._read_only, connection._begin_statement = connection._read_only, True, b""
        self._begin = connection._get_tx_start_command()  # psycopg caches it in _begin_statement
        connection._read_only = read_only
        if hasattr(connection, "_pool"):
            connection.__class__ = _pooled(self._class)

    def see_statements(self) -> None:
        self._factory = self._connection.cursor_factory
        self._connection.cursor_factory = _watched(self._factory)

    def replace(self, **methods: Callable[..., Any]) -> None:
        self._connection.__dict__.update(methods)

    def later_may_write(self) -> None:
        """Undo READ ONLY: the enlisted transaction is committed, so the app may write again."""
        if self._connection._begin_statement == self._begin:
            self._connection._begin_statement = b""

    def bypassed(self) -> bool:
        """Whether a later transaction could write: the app reset READ ONLY, or turned autocommit on."""
        connection = self._connection
        mine = connection.__dict__.get(_NAME) is self
        return mine and (connection._begin_statement != self._begin or connection.autocommit)

    def sees(self, query: bytes) -> None:
        sql = query.decode("utf-8", "replace")
        verb = ends_transaction(sql)
        if verb is not None and not self.link.end_allowed:
            self.link.end_refused = True  # type: ignore[attr-defined]
            raise self.link.refuse(verb)
        if may_end_transaction(sql):
            self.link.may_have_written_later = True

    def stop(self) -> None:
        connection = self._connection
        if connection.__dict__.get(_NAME) is not self:
            return
        for name in (_NAME, "commit", "rollback"):
            connection.__dict__.pop(name, None)
        if connection.__class__ is _pooled(self._class):
            connection.__class__ = self._class
        if self._factory is not None and connection.cursor_factory is _watched(self._factory):
            connection.cursor_factory = self._factory
        self.later_may_write()


def watch_beneath(connection: Any, link: Link) -> Watch:
    """Guard the driver's connection beneath SQLAlchemy, against commits of which SQLAlchemy's events do not tell."""
    kind = type(connection)
    watch = Watch(connection, link)
    watch.start()

    def commit() -> None:
        if link.end_allowed or link.ended:
            return kind.commit(connection)  # type: ignore[no-any-return]
        link.ended = True
        kind.rollback(connection)
        raise link.refuse("commit()")

    async def commit_async() -> None:
        if link.end_allowed or link.ended:
            return await kind.commit(connection)  # type: ignore[no-any-return]
        link.ended = True
        await kind.rollback(connection)
        raise link.refuse("commit()")

    watch.replace(commit=commit_async if isinstance(connection, AsyncConnection) else commit)
    return watch


@cache
def _pooled(kind: type) -> type:
    class Pooled(kind):  # type: ignore[misc]
        """Stops the watch when the pool takes the connection back: the pool sets ``_pool`` to None."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_pool" and value is None and (watch := self.__dict__.get(_NAME)) is not None:
                watch.stop()

    Pooled.__qualname__ = Pooled.__name__ = kind.__name__
    return Pooled


@cache
def _watched(factory: type) -> type:
    class Watched(factory):  # type: ignore[misc]
        """A cursor that shows each statement to the guards before it is sent."""

        def _convert_query(self, query: Any, params: Any = None) -> Any:
            converted = super()._convert_query(query, params)
            watch: Watch | None = self._conn.__dict__.get(_NAME)
            if watch is not None:
                watch.sees(converted.query)
            return converted

        def _raise_for_result(self, result: Any) -> Any:
            try:
                super()._raise_for_result(result)
            except ReadOnlySqlTransaction as error:
                watch: Watch | None = self._conn.__dict__.get(_NAME)
                if watch is None:
                    raise
                raise watch.link.refuse_later("a write") from error

    Watched.__qualname__ = Watched.__name__ = factory.__name__
    return Watched


class _Psycopg(Link):
    dialect = "postgresql"
    savepoint = "with connection.transaction():"
    end_refused = False
    """A guard refused a COMMIT or ROLLBACK in SQL. The transaction is still open, and oncekey will not commit it."""
    _watch: Watch

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def _check(self) -> None:
        connection = self._connection
        if connection.closed:
            raise EnlistError(f"{self.what} is closed")
        status = connection.info.transaction_status
        if status is INERROR:
            raise EnlistError(f"{self.what} is in a failed transaction: roll it back before you enlist it")
        if connection.autocommit and status is IDLE:
            raise EnlistError(
                f"{self.what} is in autocommit mode, where each statement is a commit of its own: open it without, or "
                "set autocommit = False before you enlist it"
            )
        if connection._num_transactions and not self.caller:
            raise EnlistError(
                f"{self.what} is inside `with connection.transaction()`, which commits by itself at its end, before "
                "there is a response to store: leave the block out, or use enlist(connection, commit='caller') where "
                "the block ends after the response is sent"
            )

    def _guard(self, **methods: Callable[..., Any]) -> None:
        self._watch = Watch(self._connection, self)
        self._watch.start()
        self._watch.see_statements()
        self._watch.replace(**methods)

    def _holds(self) -> bool:
        """Whether the connection still belongs to this request, and not to its pool or to another request."""
        return self._connection.__dict__.get(_NAME) is getattr(self, "_watch", None)

    def _asks(self) -> bool:
        """Whether the mark can be queried: the transaction is open and has not failed."""
        return not self.ended and self._connection.pgconn.transaction_status == INTRANS

    def _check_before_commit(self) -> None:
        if self.end_refused or not self._asks():
            raise EnlistError(f"the enlisted transaction of {self.what} was ended before oncekey could commit it")

    def _check_after_commit(self) -> None:
        if self.ended:
            raise EnlistError(f"{self.what} was rolled back while oncekey committed it")

    def _note_bypass(self) -> None:
        """Call this before the guards are removed."""
        if hasattr(self, "_watch") and self._watch.bypassed():
            self.may_have_written_later = True

    def _after_roll_back(self) -> None:
        self.ended = True
        if not self.caller:
            self.free()

    def let_go(self) -> Any:
        self.end_allowed = True

    def free(self) -> None:
        self.end_allowed = True
        if hasattr(self, "_watch"):
            self._watch.stop()


class PsycopgLink(_Psycopg):
    what = "the psycopg connection"
    _connection: Connection[Any]

    def open(self) -> None:
        self._check()

    def guard(self) -> None:
        connection, kind = self._connection, type(self._connection)

        def commit() -> None:
            if self.end_allowed or self.ended:
                kind.commit(connection)
                if not self.ended:  # commit='caller'
                    self._watch.later_may_write()
                return
            self.ended = True
            kind.rollback(connection)
            raise self.refuse("commit()")

        def rollback() -> None:
            already, self.ended = self.ended, True
            kind.rollback(connection)
            # With ``caller``, the app's own block rolls back when the handler raises: that is allowed.
            if not (self.caller or already):
                raise self.refuse("rollback()")

        self._guard(commit=commit, rollback=rollback)

    def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: Rows = []
        for sql in statements:
            cursor = self._connection.cursor(row_factory=tuple_row)
            cursor.execute(for_format(sql).encode(), parameters)
            rows = cursor.fetchall() if cursor.description else []
        return rows

    def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        return [] if self.ended or self.end_refused else self.execute(statements, parameters)

    def commit(self) -> None:
        try:
            self._check_before_commit()
            type(self._connection).commit(self._connection)
            self._check_after_commit()
        finally:
            self.free()

    def roll_back(self) -> None:
        self._note_bypass()
        if self._holds():
            with suppress(Exception):
                there = self._asks() and self.execute(*self.mark) == [(True,)]
                type(self._connection).rollback(self._connection)  # psycopg refuses it in a block of the app
                self.rollback_proven = there
            if self.caller and not self.rollback_proven:
                with suppress(Exception):
                    self.execute(DOOM, {})
        self._after_roll_back()


class AsyncPsycopgLink(_Psycopg, AsyncLink):
    what = "the psycopg AsyncConnection"
    savepoint = "async with connection.transaction():"
    _connection: AsyncConnection[Any]

    async def open(self) -> None:
        self._check()

    async def guard(self) -> None:
        connection, kind = self._connection, type(self._connection)

        async def commit() -> None:
            if self.end_allowed or self.ended:
                await kind.commit(connection)
                if not self.ended:  # commit='caller'
                    self._watch.later_may_write()
                return
            self.ended = True
            await kind.rollback(connection)
            raise self.refuse("commit()")

        async def rollback() -> None:
            already, self.ended = self.ended, True
            await kind.rollback(connection)
            if not (self.caller or already):
                raise self.refuse("rollback()")

        self._guard(commit=commit, rollback=rollback)

    async def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: Rows = []
        for sql in statements:
            cursor = self._connection.cursor(row_factory=tuple_row)
            await cursor.execute(for_format(sql).encode(), parameters)
            rows = await cursor.fetchall() if cursor.description else []
        return rows

    async def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        return [] if self.ended or self.end_refused else await self.execute(statements, parameters)

    async def let_go(self) -> None:
        super().let_go()

    async def commit(self) -> None:
        try:
            self._check_before_commit()
            await type(self._connection).commit(self._connection)
            self._check_after_commit()
        finally:
            self.free()

    async def roll_back(self) -> None:
        self._note_bypass()
        if self._holds():
            with suppress(Exception):
                there = self._asks() and await self.execute(*self.mark) == [(True,)]
                await type(self._connection).rollback(self._connection)  # psycopg refuses it in a block of the app
                self.rollback_proven = there
            if self.caller and not self.rollback_proven:
                with suppress(Exception):
                    await self.execute(DOOM, {})
        self._after_roll_back()
