"""Links to connections of MySQL's drivers: PyMySQL, aiomysql and asyncmy, which are made after it, and mysqlclient.

The first three send every command through one method, ``_execute_command``: commits, statements of cursors,
``begin()``. So one wrapper around it sees all that a handler sends. mysqlclient has several such methods, and each gets
a wrapper. It refuses what would end the transaction, also what commits by itself, as DDL does. After a rollback the
connection is in a READ ONLY transaction: the handler can read on, not write.

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
ASK_IF_BEGUN = "SET TRANSACTION READ WRITE"
"""Refused inside of a transaction. Outside of one it sets what is the default."""
_HAS_BEGUN = 1568
_QUERY = 3  # COM_QUERY
_IN_TRANSACTION = 1  # of server_status
_NOTHING = "DO 0"
TO_THE_MARK = "ROLLBACK TO SAVEPOINT oncekey"
WARNINGS = "SHOW WARNINGS"
NOT_ROLLED_BACK = 1196
"""The warning of a rollback after which tables without transactions have kept what was written to them."""

_GAP = r"(?:\s|/\*(?:[^*]|\*(?!/))*+(?:\*/|$)|--[^\n]*+(?:\n|$)|#[^\n]*+(?:\n|$))"
_COMMITS = re.compile(
    rf"(?:{_GAP}|;)*+((?:begin|start{_GAP}+transaction|set{_GAP}+(?:session{_GAP}+|@@(?:session\.)?)?autocommit|xa|"
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


def note_kept_writes(link: Link, warnings: Sequence[Sequence[Any]]) -> None:
    """Remember that a rollback did not undo everything, from the answer to ``WARNINGS``. The key's row, which is in
    InnoDB, was rolled back, so the server's word about the transaction proves nothing."""
    if any(code == NOT_ROLLED_BACK for _, code, *_ in warnings):
        link.kept_writes = link.may_have_written_later = True


class _Mysql(Link):
    dialect = "mysql"
    savepoint = "SAVEPOINT name"
    _own = False
    """oncekey itself is sending."""
    _guarded = False
    _watches: tuple[str, ...] = ("_execute_command",)
    """The methods of the connection that get a wrapper."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.what = f"the {type(connection).__module__.partition('.')[0]} connection"

    def _check(self) -> None:
        connection = self._connection
        if not self._is_open():
            raise EnlistError(f"{self.what} is closed")
        if connection.get_autocommit() and not self.has_begun():
            raise EnlistError(
                f"{self.what} is in autocommit mode, where each statement is a commit of its own: open it with "
                "autocommit=False, or begin() a transaction before you enlist it"
            )

    def has_begun(self) -> bool:
        """Whether a statement has read or written in a transaction that is open."""
        return bool(self._connection.server_status & _IN_TRANSACTION)

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
        if self.ended or not self.has_begun():
            raise EnlistError(f"the enlisted transaction of {self.what} was ended before oncekey could commit it")

    def free(self) -> None:
        self.end_allowed = self._own = True
        for name in self._watches:
            self._connection.__dict__.pop(name, None)

    def _holds(self) -> bool:
        """Whether the connection still belongs to this request, and not to its pool or to another request. Without a
        guard yet, enlist has failed: at REPEATABLE READ its statement has locked the row of another owner, too."""
        return getattr(self._connection.__dict__.get(self._watches[0]), "link", None) is self._guarding

    @property
    def _guarding(self) -> Link | None:
        return self if self._guarded else None


class PymysqlLink(_Mysql):
    def open(self) -> None:
        self._check()

    def ask_if_begun(self) -> bool:
        """As ``has_begun``, asked of the server. PyMySQL's ``server_status`` does not change with a statement that
        returns rows: SELECT, and on MariaDB the INSERT … RETURNING of Django."""
        try:
            self.execute((ASK_IF_BEGUN,), {})
        except Exception as error:
            if error.args[:1] == (_HAS_BEGUN,):
                return True
            raise
        return False

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
            note_kept_writes(self, self.execute((WARNINGS,), {}))
            self.execute((READ_ONLY,), {})
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
                note_kept_writes(self, self.execute((WARNINGS,), {}))  # of a deadlock, which ended it
                there = self.execute(*self.mark) == [(True,)]
                self._end()
                self.rollback_proven = there and not self.may_have_written_later
        self.ended = True
        if not self.caller:
            self.free()


class MysqlclientLink(PymysqlLink):
    """mysqlclient. Its methods are written in C, but the connection is a Python object, whose attributes come first."""

    _watches = ("query", "send_query", "commit", "rollback", "autocommit", "change_user")
    _session = 0
    """The server's number of this connection."""

    def has_begun(self) -> bool:
        return self.ask_if_begun()

    def guard(self) -> None:
        self._session = self._connection.thread_id()
        for name in self._watches:
            self._connection.__dict__[name] = self._watched(name, getattr(self._connection, name))
        self._guarded = True

    def _watched(self, name: str, send: Any) -> Any:
        is_query = name.endswith("query")

        def watched(*given: Any) -> Any:
            if name == "autocommit" and bool(given[0]) == self._connection.get_autocommit():
                return None  # it is so already
            # ``commit()`` and the like are judged by the statement that does the same.
            text = given[0] if is_query else _SAME_AS.get(name, name)
            instead = self._sees(_QUERY, text)
            if instead is None:
                self._end()
                raise self.refuse(self._refused)
            if is_query:
                return send(instead, *given[1:])
            return None if instead is _NOTHING else send(*given)

        watched.link = self  # type: ignore[attr-defined]
        return watched

    def roll_back(self) -> None:
        with suppress(Exception):  # closed
            # The library connects again by itself after ping(True). A new session is in autocommit mode.
            if self._guarded and self._connection.thread_id() != self._session:
                self.may_have_written_later = True
        super().roll_back()


_SAME_AS = {"autocommit": "SET autocommit", "change_user": "ROLLBACK"}


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
            note_kept_writes(self, await self.execute((WARNINGS,), {}))
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
                note_kept_writes(self, await self.execute((WARNINGS,), {}))  # of a deadlock, which ended it
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
