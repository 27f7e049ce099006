"""Links to psycopg 3 connections, sync and async. PostgreSQL itself says whether it still is the same transaction.

``psycopg_watch.py`` has the guards. The last statement and its COMMIT are one message where that is possible
(``one_message.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from psycopg import AsyncConnection, Connection, generators, pq
from psycopg.errors import error_from_result
from psycopg.rows import tuple_row

from oncekey.engine.transactions.adapters.base import AT_ONCE, DOOM, AsyncLink, Link, Rows, Saw, for_format
from oncekey.engine.transactions.adapters.one_message import NO_ROW, SessionStatement, fits, session_statement
from oncekey.engine.transactions.adapters.psycopg_watch import NAME, Watch
from oncekey.engine.transactions.stages import Happened
from oncekey.errors import EnlistError
from oncekey.stores.api import TransactionStatements

IDLE, INTRANS, INERROR = pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR


def _exchange(connection: Any, message: bytes) -> Generator[Any, Any, list[Any]]:
    """Send statements as one message, and return their results."""
    connection.pgconn.send_query(message)
    results: list[Any] = yield from generators.execute(connection.pgconn)
    return results


class _Psycopg(Link):
    dialect = "postgresql"
    savepoint = "with connection.transaction():"
    _watch: Watch

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    _last: SessionStatement | None = None
    """The last statement, if it can be sent in one message with COMMIT."""

    def prepared_name(self) -> str:
        connection, text = self._connection, self.database.transaction_statements.complete_or_fail
        if not text or self.caller or connection.prepare_threshold is None or connection.closed:
            return ""
        if connection.info.encoding != "utf-8":
            return ""
        self._last = session_statement(text)
        return self._last.name

    def _to_prepare(self, rows: Rows) -> bytes | None:
        """The statement that must be prepared in this session; None: it is, or it is not used."""
        return self._last.prepare.encode() if rows and self._last is not None and not rows[0][2] else None

    def _message(self, parameters: Mapping[str, Any]) -> bytes | None:
        """The last statement and COMMIT; None: they must be two."""
        connection = self._connection
        if self._last is None or self.ended or self.end_refused or not fits(parameters):
            return None
        if not self._asks() or connection._num_transactions or connection._pipeline:
            return None
        return self._last.message(parameters).encode()

    def _is_over(self) -> bool:
        """Whether the message ended the transaction, or the connection is lost."""
        return self._connection.pgconn.transaction_status not in (INTRANS, INERROR)

    @staticmethod
    def _read(results: Sequence[Any]) -> None:
        """Raise the error of the statement that failed."""
        for each in results:
            if each.status == pq.ExecStatus.FATAL_ERROR:
                raise error_from_result(each, encoding="utf-8")

    def _failed(self, error: BaseException, saw: Saw) -> bool:
        """The message failed. True: the last statement found no row, and the transaction is still open."""
        sqlstate = getattr(error, "sqlstate", None)
        if self._is_over() or sqlstate is None:  # the answer is lost, or COMMIT was refused
            saw(Happened.CUT_OFF)
        return sqlstate == NO_ROW and not self._is_over()

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
        return self._connection.__dict__.get(NAME) is getattr(self, "_watch", None)

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

    def connection_lost(self, error: BaseException | None) -> bool:
        return bool(self._connection.broken) or super().connection_lost(error)

    def let_go(self) -> Any:
        self.end_allowed = True

    def free(self) -> None:
        self.end_allowed = True
        if hasattr(self, "_watch"):
            self._watch.stop()


class PsycopgLink(_Psycopg):
    what = "the psycopg connection"
    _connection: Connection[Any]

    def enlist(self, statements: Sequence[str], key: Mapping[str, Any], *, ends_elsewhere: bool) -> Rows:
        rows: Rows = super().enlist(statements, key, ends_elsewhere=ends_elsewhere)
        if (statement := self._to_prepare(rows)) is not None:
            self._connection.cursor().execute(statement)
        return rows

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

    def end(self, statements: TransactionStatements, parameters: Mapping[str, Any], saw: Saw) -> Rows:
        message = self._message(parameters)
        if message is None:
            rows: Rows = super().end(statements, parameters, saw)
            return rows
        try:
            self.complete_and_commit(message)
            self._check_after_commit()
        except BaseException as error:
            if self._failed(error, saw):
                return []
            raise
        finally:
            if self._is_over():
                self.free()
        return AT_ONCE

    def complete_and_commit(self, message: bytes) -> None:
        connection = self._connection
        with connection.lock:
            results = connection.wait(_exchange(connection, message))
        self._read(results)

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

    async def enlist(self, statements: Sequence[str], key: Mapping[str, Any], *, ends_elsewhere: bool) -> Rows:
        rows = await super().enlist(statements, key, ends_elsewhere=ends_elsewhere)
        if (statement := self._to_prepare(rows)) is not None:
            await self._connection.cursor().execute(statement)
        return rows

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

    async def end(self, statements: TransactionStatements, parameters: Mapping[str, Any], saw: Saw) -> Rows:
        message = self._message(parameters)
        if message is None:
            return await super().end(statements, parameters, saw)
        try:
            await self.complete_and_commit(message)
            self._check_after_commit()
        except BaseException as error:
            if self._failed(error, saw):
                return []
            raise
        finally:
            if self._is_over():
                self.free()
        return AT_ONCE

    async def complete_and_commit(self, message: bytes) -> None:
        connection = self._connection
        async with connection.lock:
            results = await connection.wait(_exchange(connection, message))
        self._read(results)

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
