"""A link to an asyncpg connection, or to a pool's proxy of one. asyncpg begins no transaction by itself; the link does.

asyncpg shows statements to the link, but the link cannot refuse them. After a ROLLBACK by hand, asyncpg commits each
statement on its own. Then oncekey cannot tell what the handler wrote, and the key becomes ``unknown``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from oncekey.engine.transactions.adapters.base import AT_ONCE, DOOM, AsyncLink, Rows, Saw, numbered
from oncekey.engine.transactions.adapters.lost import says_connection_lost
from oncekey.engine.transactions.adapters.one_message import NO_ROW, SessionStatement, fits, session_statement
from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction
from oncekey.engine.transactions.stages import Happened
from oncekey.errors import EnlistError
from oncekey.stores.api import TransactionStatements


class AsyncpgLink(AsyncLink):
    dialect = "postgresql"
    what = "the asyncpg connection"
    savepoint = "async with connection.transaction():"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._transaction: Any = None
        self._beneath: Any = None
        """The connection itself: behind the proxy, if a pool's proxy was enlisted."""
        self._endings = 0
        """How many statements were seen that end a transaction."""
        self._later = False
        """A statement was seen after one that ends a transaction."""
        self._suspected = False
        """A text of several statements may have ended the transaction, or the mark was gone."""
        self._last: SessionStatement | None = None
        """The last statement, if it can be sent in one message with COMMIT."""
        self._over = False
        """The transaction has ended with that message, or the answer to it was lost."""
        self._lost = False
        """A statement has failed because the connection was lost."""

    def prepared_name(self) -> str:
        text, beneath = self.database.transaction_statements.complete_or_fail, self._driver_connection()
        if not text or self.caller or beneath is None or beneath._config.statement_cache_size == 0:
            return ""
        if beneath.get_settings().client_encoding not in ("UTF8", "utf-8"):
            return ""
        self._last = session_statement(text)
        return self._last.name

    async def enlist(self, statements: Sequence[str], key: Mapping[str, Any], *, ends_elsewhere: bool) -> Rows:
        rows = await super().enlist(statements, key, ends_elsewhere=ends_elsewhere)
        if rows and self._last is not None and not rows[0][2]:
            await self._connection.execute(self._last.prepare)
        return rows

    def _driver_connection(self) -> Any:
        """The connection itself, behind the proxy of a pool. None: the pool has it back."""
        return getattr(self._connection, "_con", self._connection)

    async def open(self) -> None:
        if not hasattr(self._connection, "add_query_logger"):
            raise EnlistError(f"{self.what} cannot be watched: asyncpg 0.29 or newer is needed to enlist it")
        if not self._connection.is_in_transaction():
            if self.caller:
                raise EnlistError(
                    f"{self.what} is not in a transaction, and with commit='caller' it is yours to begin: enlist it "
                    "inside `async with connection.transaction()`"
                )
            self._transaction = self._connection.transaction()
            await self._transaction.start()
        elif not self.caller:
            raise EnlistError(
                f"{self.what} is in a transaction of its own, which commits by itself at the end of its block, before "
                "there is a response to store: enlist before you begin one, and oncekey begins it; a transaction() "
                "inside is a savepoint then. Or use enlist(connection, commit='caller') where the block ends after the "
                "response is sent"
            )

    async def guard(self) -> None:
        self._beneath = self._driver_connection()
        self._beneath.add_query_logger(self._see)

    def _see(self, query: Any) -> None:
        """Called after each statement, in the order of statements, but not before the loop's next turn."""
        self._lost = self._lost or says_connection_lost(query.exception)
        if self._released():
            return  # the connection serves another request by now
        if ends_transaction(query.query) is not None:
            self._endings += 1
        elif self._endings and query.query != self._beneath.get_reset_query():
            self._later = True
        if may_end_transaction(query.query):
            self._suspected = True

    @property
    def may_have_written_later(self) -> bool:  # type: ignore[override]
        if self._suspected or self._later or self._endings > 1:
            return True
        # One ROLLBACK need not be the handler's: the app's own block sends one, and so does a pool.
        return self._endings == 1 and not (self.caller or self._released())

    def _released(self) -> bool:
        return self._driver_connection() is not self._beneath

    def connection_lost(self, error: BaseException | None) -> bool:
        if self._beneath is not None and self._released() and self._beneath.is_closed():
            return True  # its pool has noticed it
        return self._lost or super().connection_lost(error)

    async def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: list[Any] = []
        for sql in statements:
            text, names = numbered(sql)
            rows = await self._connection.fetch(text, *(parameters[name] for name in names))
        return [tuple(row) for row in rows]

    complete = execute

    async def end(self, statements: TransactionStatements, parameters: Mapping[str, Any], saw: Saw) -> Rows:
        last = self._last
        if last is None or not fits(parameters):
            return await super().end(statements, parameters, saw)
        await asyncio.sleep(0)  # let _see run
        self.free()  # _see must not count our own COMMIT
        if not self._connection.is_in_transaction():
            return []
        message = last.message(parameters)
        try:
            await self.complete_and_commit(message)
        except BaseException as error:
            sqlstate, connection = getattr(error, "sqlstate", None), self._beneath
            self._over = connection.is_closed() or not connection.is_in_transaction()
            if self._over or sqlstate is None:  # the answer is lost, or COMMIT was refused
                saw(Happened.CUT_OFF)
            elif sqlstate == NO_ROW:
                self._suspected = True  # the mark is gone
                return []
            raise
        self._over = True
        self._beneath._top_xact = None  # asyncpg did not see this COMMIT
        return AT_ONCE

    async def complete_and_commit(self, message: str) -> None:
        await self._beneath.execute(message)

    async def let_go(self) -> None:
        self.end_allowed = True

    def free(self) -> None:
        if self._beneath is not None:
            self._beneath.remove_query_logger(self._see)

    async def commit(self) -> None:
        await asyncio.sleep(0)  # let _see run
        self.free()  # _see must not count our own COMMIT
        if not self._connection.is_in_transaction():
            raise EnlistError(f"the enlisted transaction of {self.what} was ended before oncekey could commit it")
        await self._transaction.commit()

    async def roll_back(self) -> None:
        if self._over:
            self._beneath._top_xact = None
            return
        await asyncio.sleep(0)  # let _see run
        with suppress(Exception):
            if self._transaction is None:
                if self._connection.is_in_transaction():
                    await self.execute(DOOM, {})
                return
            self.free()
            there = await self._mark_is_there()
            await self._transaction.rollback()
            self.rollback_proven = there

    async def _mark_is_there(self) -> bool:
        there = False
        with suppress(Exception):  # a failed transaction does not answer: then only what _see saw counts
            there = await self.execute(*self.mark) == [(True,)]
            self._suspected = self._suspected or not there
        return there
