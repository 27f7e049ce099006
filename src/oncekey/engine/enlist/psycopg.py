"""Links to psycopg 3 connections, sync and async. PostgreSQL itself says whether it still is the same transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from psycopg import AsyncConnection, Connection, pq
from psycopg.rows import tuple_row

from oncekey.engine.enlist.base import DOOM, Link, Rows, for_format
from oncekey.errors import EnlistError


class _Psycopg(Link):
    dialect = "postgresql"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def _check(self) -> None:
        connection = self._connection
        if connection.closed:
            raise EnlistError(f"{self.what} is closed")
        status = connection.info.transaction_status
        if status is pq.TransactionStatus.INERROR:
            raise EnlistError(f"{self.what} is in a failed transaction: roll it back before you enlist it")
        if connection.autocommit and status is pq.TransactionStatus.IDLE:
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

    def let_go(self) -> Any:
        self.ending = True
        self._unguard()

    def _unguard(self) -> None:
        for verb in ("commit", "rollback"):
            self._connection.__dict__.pop(verb, None)


class PsycopgLink(_Psycopg):
    what = "the psycopg connection"
    _connection: Connection[Any]

    def open(self) -> None:
        self._check()

    def guard(self) -> None:
        if self.caller:
            return  # its block has to roll back by itself when the handler raises

        def refused(verb: str) -> Any:
            def refuse() -> None:
                Connection.rollback(self._connection)
                raise self.refuse(verb)

            return refuse

        self._connection.__dict__.update(commit=refused("commit()"), rollback=refused("rollback()"))

    def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: Rows = []
        for sql in statements:
            cursor = self._connection.cursor(row_factory=tuple_row)
            cursor.execute(for_format(sql).encode(), parameters)
            rows = cursor.fetchall() if cursor.description else []
        return rows

    complete = execute

    def commit(self) -> None:
        self.let_go()
        self._connection.commit()

    def roll_back(self) -> None:
        self.let_go()
        with suppress(Exception):
            there = self.execute(*self.mark) == [(True,)]
            self._connection.rollback()  # refused inside a block of the app's own
            self.rolled_back = there
        if self.caller and not self.rolled_back:
            with suppress(Exception):
                self.execute(DOOM, {})


class AsyncPsycopgLink(_Psycopg):
    what = "the psycopg AsyncConnection"
    is_async = True
    _connection: AsyncConnection[Any]

    async def open(self) -> None:
        self._check()

    async def guard(self) -> None:
        if self.caller:
            return

        def refused(verb: str) -> Any:
            async def refuse() -> None:
                await AsyncConnection.rollback(self._connection)
                raise self.refuse(verb)

            return refuse

        self._connection.__dict__.update(commit=refused("commit()"), rollback=refused("rollback()"))

    async def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: Rows = []
        for sql in statements:
            cursor = self._connection.cursor(row_factory=tuple_row)
            await cursor.execute(for_format(sql).encode(), parameters)
            rows = await cursor.fetchall() if cursor.description else []
        return rows

    complete = execute

    async def let_go(self) -> None:
        super().let_go()

    async def commit(self) -> None:
        super().let_go()
        await self._connection.commit()

    async def roll_back(self) -> None:
        super().let_go()
        with suppress(Exception):
            there = await self.execute(*self.mark) == [(True,)]
            await self._connection.rollback()  # refused inside a block of the app's own
            self.rolled_back = there
        if self.caller and not self.rolled_back:
            with suppress(Exception):
                await self.execute(DOOM, {})
