"""A link to an asyncpg connection, or to a pool's proxy of one. It has no implicit transaction: we begin it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from oncekey.engine.enlist.base import DOOM, Link, Rows, numbered
from oncekey.errors import EnlistError


class AsyncpgLink(Link):
    dialect = "postgresql"
    is_async = True
    what = "the asyncpg connection"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._transaction: Any = None

    async def open(self) -> None:
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
        return None  # a COMMIT by hand cannot be refused here; the last statement notices it

    async def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: list[Any] = []
        for sql in statements:
            text, names = numbered(sql)
            rows = await self._connection.fetch(text, *(parameters[name] for name in names))
        return [tuple(row) for row in rows]

    complete = execute

    async def let_go(self) -> None:
        self.ending = True

    async def commit(self) -> None:
        await self._transaction.commit()

    async def roll_back(self) -> None:
        if self._transaction is None:
            with suppress(Exception):
                await self.execute(DOOM, {})
            return
        with suppress(Exception):
            there = await self.execute(*self.mark) == [(True,)]
            await self._transaction.rollback()
            self.rolled_back = there
