"""A link to an asyncpg connection, or to a pool's proxy of one. asyncpg begins no transaction by itself; the link does.

asyncpg shows statements to the link, but the link cannot refuse them. After a ROLLBACK by hand, asyncpg commits each
statement on its own. Then oncekey cannot tell what the handler wrote, and the key becomes ``unknown``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from oncekey.engine.transactions.adapters.base import DOOM, AsyncLink, Rows, numbered
from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction
from oncekey.errors import EnlistError


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
        self._beneath = getattr(self._connection, "_con", self._connection)
        self._beneath.add_query_logger(self._see)

    def _see(self, query: Any) -> None:
        """Called after each statement, in the order of statements, but not before the loop's next turn."""
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
        return getattr(self._connection, "_con", self._connection) is not self._beneath

    async def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: list[Any] = []
        for sql in statements:
            text, names = numbered(sql)
            rows = await self._connection.fetch(text, *(parameters[name] for name in names))
        return [tuple(row) for row in rows]

    complete = execute

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
