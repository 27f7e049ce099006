"""Links to connections of MySQL's drivers: PyMySQL, aiomysql and asyncmy, which are made after it, and mysqlclient.

The link sees every statement before it is sent (``mysql_watch.py``). It refuses what would end the transaction, also
what commits by itself, as DDL does. After a rollback the connection is in a READ ONLY transaction: the handler can read
on, not write.

A savepoint tells whether it still is the same transaction, because it ends with it (``transaction.sql`` of the store).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from oncekey.engine.transactions.adapters import mysql_watch
from oncekey.engine.transactions.adapters.base import AsyncLink, Link, Rows, for_format
from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction, writes
from oncekey.errors import EnlistError

READ_ONLY = "START TRANSACTION READ ONLY"
"""It ends a transaction that is open, so it is sent after a rollback only."""
NO_SUCH_SAVEPOINT = 1305
_ASK_IF_BEGUN = "SET TRANSACTION READ WRITE"
"""Refused inside of a transaction. Outside of one it sets what is the default."""
_HAS_BEGUN = 1568
_IN_TRANSACTION = 1  # of server_status
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
_CALLS = re.compile(rf"(?:^|;)(?:{_GAP}|;)*+((?:call|execute)\b)?", re.IGNORECASE).finditer


def commits_by_itself(sql: str) -> str | None:
    """The verb of a statement that commits the open transaction, without saying so; None for every other one."""
    found = _COMMITS(sql)
    return " ".join(found[1].upper().split()) if found else None


def may_end_unseen(sql: str) -> bool:
    """Whether the statement may end the transaction and not show it: a procedure can. The call may also stand in a
    literal."""
    return any(found[1] for found in _CALLS(sql))


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
    _watch: mysql_watch.Watch | None = None
    _refused = ""
    """The verb of the statement that was refused last."""

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

    def _start_watch(self) -> None:
        # Without autocommit, what follows a rollback by the server is not committed before the guards see a COMMIT.
        self.may_have_ended_unseen = bool(self._connection.get_autocommit())
        self._watch = mysql_watch.watch(self._connection, self)

    def sees(self, sql: str) -> str | None:
        """See ``mysql_watch.Judge``."""
        if self._own:
            return sql
        verb = ends_transaction(sql) or commits_by_itself(sql)
        if verb is None:
            if self.ended and (verb := writes(sql)) is not None:
                raise self.refuse_later(verb)
            if may_end_transaction(sql):
                self.may_have_written_later = True
            if may_end_unseen(sql):
                self.may_have_ended_unseen = True
            return sql
        if self.ended:
            return mysql_watch.NOTHING  # a later transaction can only read, and goes on
        if self.end_allowed:
            return sql
        self._refused = verb
        return None

    def refused(self) -> Any:
        raise NotImplementedError

    def _may_complete(self) -> bool:
        return not self.ended and self._is_open()

    def _check_before_commit(self) -> None:
        if self.ended or not self.has_begun():
            raise EnlistError(f"the enlisted transaction of {self.what} was ended before oncekey could commit it")

    def free(self) -> None:
        self.end_allowed = self._own = True
        if self._watch is not None:
            self._watch.stop()

    def _holds(self) -> bool:
        """Whether the connection still belongs to this request, and not to its pool or to another request. Without a
        guard yet, enlist has failed: at REPEATABLE READ its statement has locked the row of another owner, too."""
        return self._connection.__dict__.get(mysql_watch.NAME) is self._watch

    def _note_bypass(self) -> None:
        if self._watch is not None and self._watch.bypassed():
            self.may_have_written_later = True

    def connection_lost(self, error: BaseException | None) -> bool:
        return super().connection_lost(error) or (self._watch is not None and self._watch.lost)


class PymysqlLink(_Mysql):
    def open(self) -> None:
        self._check()

    def ask_if_begun(self) -> bool:
        """As ``has_begun``, asked of the server. PyMySQL's ``server_status`` does not change with a statement that
        returns rows: SELECT, and on MariaDB the INSERT … RETURNING of Django."""
        try:
            self.execute((_ASK_IF_BEGUN,), {})
        except Exception as error:
            if error.args[:1] == (_HAS_BEGUN,):
                return True
            raise
        return False

    def guard(self) -> None:
        self._start_watch()

    def refused(self) -> EnlistError:
        self._end_it()
        return self.refuse(self._refused)

    def _end_it(self) -> bool:
        """Roll back, and tell whether it was the enlisted transaction."""
        note_kept_writes(self, self.execute((WARNINGS,), {}))  # of a deadlock, which ended it
        there = self.execute(*self.mark) == [(True,)]
        if not there:
            self.mark_is_gone()
        self._end()
        return there

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
        self._note_bypass()
        if self._holds() and not self.ended:
            with suppress(Exception):
                self.rollback_proven = self._end_it() and not self.may_have_written_later
        self.ended = True
        if not self.caller:
            self.free()


class MysqlclientLink(PymysqlLink):
    def has_begun(self) -> bool:
        return self.ask_if_begun()


class AsyncMysqlLink(_Mysql, AsyncLink):
    async def open(self) -> None:
        self._check()

    async def guard(self) -> None:
        self._start_watch()

    async def refused(self) -> EnlistError:
        await self._end_it()
        return self.refuse(self._refused)

    async def _end_it(self) -> bool:
        note_kept_writes(self, await self.execute((WARNINGS,), {}))  # of a deadlock, which ended it
        there = await self.execute(*self.mark) == [(True,)]
        if not there:
            self.mark_is_gone()
        await self._end()
        return there

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
        self._note_bypass()
        if self._holds() and not self.ended:
            with suppress(Exception):
                self.rollback_proven = await self._end_it() and not self.may_have_written_later
        self.ended = True
        if not self.caller:
            self.free()


def _plain_cursor(connection: Any) -> Any:
    """The driver's own cursor, whose rows are tuples, whatever cursors the app has chosen."""
    from importlib import import_module

    return import_module(f"{type(connection).__module__.partition('.')[0]}.cursors").Cursor
