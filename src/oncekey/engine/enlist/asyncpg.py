"""A link to an asyncpg connection, or to a pool's proxy of one. It has no implicit transaction: we begin it.

asyncpg lets us see statements, and not refuse them. After a ROLLBACK by hand it commits each statement on its own, so
nothing can be said about what the handler wrote then: the key becomes ``unknown``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from oncekey.engine.enlist.base import DOOM, Link, Rows, numbered
from oncekey.engine.enlist.texts import ends_transaction, may_end_transaction
from oncekey.errors import EnlistError


class AsyncpgLink(Link):
    dialect = "postgresql"
    is_async = True
    what = "the asyncpg connection"
    savepoint = "async with connection.transaction():"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._transaction: Any = None
        self._beneath: Any = None
        """The connection itself, where a pool's proxy was enlisted."""
        self._endings = 0
        """Statements seen that end a transaction."""
        self._later = False
        """A statement was seen after one of them."""
        self._suspected = False
        """The text of several statements was seen that may have ended it, or the mark was gone."""

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
        """After a statement, in the order of statements, but not before the loop's next turn."""
        if self._released():
            return  # another request's
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
        # The one ROLLBACK that is not the handler's: of the app's own block, or of a pool that took it back.
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
        self.ending = True

    def free(self) -> None:
        if self._beneath is not None:
            self._beneath.remove_query_logger(self._see)

    async def commit(self) -> None:
        await asyncio.sleep(0)  # for _see
        self.free()  # before our own COMMIT is seen
        if not self._connection.is_in_transaction():
            raise EnlistError(f"the enlisted transaction of {self.what} was ended before oncekey could commit it")
        await self._transaction.commit()

    async def roll_back(self) -> None:
        await asyncio.sleep(0)  # for _see
        with suppress(Exception):
            if self._transaction is None:
                if self._connection.is_in_transaction():
                    await self.execute(DOOM, {})
                return
            self.free()
            there = await self._mark_is_there()
            await self._transaction.rollback()
            self.rolled_back = there

    async def _mark_is_there(self) -> bool:
        there = False
        with suppress(Exception):  # a failed transaction does not answer: what was seen of it has to do
            there = await self.execute(*self.mark) == [(True,)]
            self._suspected = self._suspected or not there
        return there
