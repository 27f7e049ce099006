"""Links to connections of MySQL's drivers: PyMySQL, and aiomysql and asyncmy, which are made after it.

All three send every command through one method, ``_execute_command``: commits, statements of cursors, ``begin()``. So
one wrapper around it sees all that a handler sends. It refuses what would end the transaction, also what commits by
itself, as DDL does. After a rollback the connection is in a READ ONLY transaction: the handler can read on, not write.

A savepoint tells whether it still is the same transaction, because it ends with it (``transaction.sql`` of the store).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from oncekey.engine.transactions.adapters.base import AsyncLink, Link, Rows, for_format
from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction, writes
from oncekey.errors import EnlistError

READ_ONLY = "START TRANSACTION READ ONLY"
"""It ends a transaction that is open, so it is sent after a rollback only."""
NO_SUCH_SAVEPOINT = 1305
_QUERY = 3  # COM_QUERY
_IN_TRANSACTION = 1  # of server_status
_NOTHING = "DO 0"

_GAP = r"(?:\s|/\*(?:[^*]|\*(?!/))*\*/|--[^\n]*(?:\n|$)|#[^\n]*(?:\n|$))"
_COMMITS = re.compile(
    rf"(?:{_GAP}|;)*((?:begin|start{_GAP}+transaction|set{_GAP}+(?:session{_GAP}+|@@(?:session\.)?)?autocommit|xa|"
    rf"(?:create|drop)(?!{_GAP}+temporary)|alter|truncate|rename|grant|revoke|lock{_GAP}+tables?|"
    rf"analyze|optimize|repair|flush|install|uninstall)\b)",
    re.IGNORECASE,
).match


def commits_by_itself(sql: str) -> str | None:
    """The verb of a statement that commits the open transaction, without saying so; None for every other one."""
    found = _COMMITS(sql)
    return " ".join(found[1].upper().split()) if found else None


def prepared(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes as hexadecimal digits, which every driver and every character set leaves as they are."""
    return {name: each.hex() if isinstance(each, bytes) else each for name, each in parameters.items()}


def is_another(error: BaseException) -> bool:
    """Whether the error says that this is another transaction than the enlisted one."""
    errors = (error, getattr(error, "orig", None))
    return any(getattr(at, "args", ())[:1] == (NO_SUCH_SAVEPOINT,) for at in errors)


class _Mysql(Link):
    dialect = "mysql"
    savepoint = "SAVEPOINT name"
    _own = False
    """oncekey itself is sending."""
    _guarded = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.what = f"the {type(connection).__module__.partition('.')[0]} connection"

    def _check(self) -> None:
        connection = self._connection
        if not self._is_open():
            raise EnlistError(f"{self.what} is closed")
        if connection.get_autocommit() and not connection.server_status & _IN_TRANSACTION:
            raise EnlistError(
                f"{self.what} is in autocommit mode, where each statement is a commit of its own: open it with "
                "autocommit=False, or begin() a transaction before you enlist it"
            )

    def _is_open(self) -> bool:
        connection = self._connection
        for name, means_open in (("open", True), ("connected", True), ("closed", False)):
            if hasattr(connection, name):
                return bool(getattr(connection, name)) is means_open
        return True

    def _sees(self, command: int, sql: Any) -> Any:
        """What to send in place of what the handler sends. None: it ends the transaction, and is refused."""
        if self._own or command != _QUERY:
            return sql
        text = sql if isinstance(sql, str) else bytes(sql).decode("utf-8", "replace")
        verb = ends_transaction(text) or commits_by_itself(text)
        if verb is None:
            if self.ended and (verb := writes(text)) is not None:
                raise self.refuse_later(verb)
            if may_end_transaction(text):
                self.may_have_written_later = True
            return sql
        if self.ended:
            return _NOTHING  # a later transaction can only read, and goes on
        if self.end_allowed:
            return sql
        self._refused = verb
        return None

    def _may_complete(self) -> bool:
        return not self.ended and self._is_open()

    def _check_before_commit(self) -> None:
        if self.ended or not self._connection.server_status & _IN_TRANSACTION:
            raise EnlistError(f"the enlisted transaction of {self.what} was ended before oncekey could commit it")

    def free(self) -> None:
        self.end_allowed = self._own = True
        self._connection.__dict__.pop("_execute_command", None)

    def _holds(self) -> bool:
        """Whether the connection still belongs to this request, and not to its pool or to another request. Without a
        guard yet, enlist has failed: at REPEATABLE READ its statement has locked the row of another owner, too."""
        return getattr(self._connection.__dict__.get("_execute_command"), "link", None) is self._guarding

    @property
    def _guarding(self) -> Link | None:
        return self if self._guarded else None


class PymysqlLink(_Mysql):
    def open(self) -> None:
        self._check()

    def guard(self) -> None:
        connection, send = self._connection, self._connection._execute_command

        def watched(command: int, sql: Any) -> Any:
            instead = self._sees(command, sql)
            if instead is None:
                self._end()
                raise self.refuse(self._refused)
            return send(command, instead)

        watched.link = self  # type: ignore[attr-defined]
        connection.__dict__["_execute_command"] = watched
        self._guarded = True

    def _end(self) -> None:
        """Roll back, and let the handler only read from now on."""
        self.ended = self._own = True
        try:
            self._connection.rollback()
            self._connection.query(READ_ONLY)
        finally:
            self._own = False

    def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        values, before = prepared(parameters), self._own
        rows: Rows = []
        self._own = True
        try:
            for sql in statements:
                with self._connection.cursor(_plain_cursor(self._connection)) as cursor:
                    cursor.execute(for_format(sql), values)
                    rows = list(cursor.fetchall()) if cursor.description else []
        except Exception as error:
            if is_another(error):
                return []
            raise
        finally:
            self._own = before
        return rows

    def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        return self.execute(statements, parameters) if self._may_complete() else []

    def let_go(self) -> None:
        self.end_allowed = True

    def commit(self) -> None:
        try:
            self._check_before_commit()
            self._own = True
            self._connection.commit()
        finally:
            self.free()

    def roll_back(self) -> None:
        if self._holds() and not self.ended:
            with suppress(Exception):
                there = self.execute(*self.mark) == [(True,)]
                self._end()
                self.rollback_proven = there and not self.may_have_written_later
        self.ended = True
        if not self.caller:
            self.free()


class AsyncMysqlLink(_Mysql, AsyncLink):
    async def open(self) -> None:
        self._check()

    async def guard(self) -> None:
        connection, send = self._connection, self._connection._execute_command

        async def watched(command: int, sql: Any) -> Any:
            instead = self._sees(command, sql)
            if instead is None:
                await self._end()
                raise self.refuse(self._refused)
            return await send(command, instead)

        watched.link = self  # type: ignore[attr-defined]
        connection.__dict__["_execute_command"] = watched
        self._guarded = True

    async def _end(self) -> None:
        self.ended = self._own = True
        try:
            await self._connection.rollback()
            await self._connection.query(READ_ONLY)
        finally:
            self._own = False

    async def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        values, before = prepared(parameters), self._own
        rows: Rows = []
        self._own = True
        try:
            for sql in statements:
                async with self._connection.cursor(_plain_cursor(self._connection)) as cursor:
                    await cursor.execute(for_format(sql), values)
                    rows = [tuple(row) for row in await cursor.fetchall()] if cursor.description else []
        except Exception as error:
            if is_another(error):
                return []
            raise
        finally:
            self._own = before
        return rows

    async def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        return await self.execute(statements, parameters) if self._may_complete() else []

    async def let_go(self) -> None:
        self.end_allowed = True

    async def commit(self) -> None:
        try:
            self._check_before_commit()
            self._own = True
            await self._connection.commit()
        finally:
            self.free()

    async def roll_back(self) -> None:
        if self._holds() and not self.ended:
            with suppress(Exception):
                there = await self.execute(*self.mark) == [(True,)]
                await self._end()
                self.rollback_proven = there and not self.may_have_written_later
        self.ended = True
        if not self.caller:
            self.free()


def _plain_cursor(connection: Any) -> Any:
    """The driver's own cursor, whose rows are tuples, whatever cursors the app has chosen."""
    from importlib import import_module

    return import_module(f"{type(connection).__module__.partition('.')[0]}.cursors").Cursor
