"""The two hot verbs on psycopg's async connection, in the caller's event loop: the same statements, without a thread.

Behind uvicorn a lane's thread and the loop share the GIL, and hand it to and fro in every batch. Here the loop sends
the statement itself and goes on with other requests while the database works. Only what goes well is handled:
whatever goes wrong is raised, the connection thrown away, and the tickets go to a lane's thread, which knows what to
do (``engine/express.py``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from psycopg import waiting

from oncekey.core.record import Found, Record, Reservation, Swap
from oncekey.stores.base import LostRace
from oncekey.stores.postgres import arrays, rows
from oncekey.stores.postgres.connection import NOTICE_LOST_CLIENTS, options, settings

if TYPE_CHECKING:
    from oncekey.stores.postgres.store import PostgresStore


class _Connection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Every wait on the wire ends at ``deadline``, and a cancelled one at once: the connection is thrown away then."""

    deadline: float = 0.0

    async def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if self.deadline:
            timeout = max(0.001, self.deadline - time.monotonic())
        return await waiting.wait_async(gen, self.pgconn.socket, interval=interval, timeout=timeout)


class InLoop:
    """One connection of one event loop."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._connection: _Connection | None = None
        self._pid = os.getpid()

    async def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        asked = {(wanted.scope, wanted.key): wanted for wanted in batch}
        answer = await self._execute(self._store.reserve_statement, rows.reservation_columns(batch))
        found: dict[tuple[str, str], Record] = {}
        for row in answer:
            at = (row[0], row[1])
            found[at] = rows.record(row) if row[2] is not None else rows.inserted(asked[at], row)
        return [Found(found.get(at)) for at in asked]

    async def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        asked = {(change.scope, change.key): change for change in batch}
        answer = await self._execute(self._store.swap_statement, rows.swap_columns(batch))
        moved = {(row[0], row[1]): rows.moved(asked[row[0], row[1]], row) for row in answer}
        return [moved.get(at) for at in asked]

    async def _execute(self, statement: LiteralString, columns: Any) -> list[tuple[Any, ...]]:
        try:
            deadline = time.monotonic() + self._store.timeout
            connection = self._connection
            if connection is None:
                connection = self._connection = await self._connect(deadline)
            connection.deadline = deadline
            cursor = await connection.execute(statement, columns, binary=True)
            return await cursor.fetchall()
        except psycopg.errors.UniqueViolation as error:
            raise LostRace from error
        except BaseException:
            # Cancelled and timed out included: the answer may still arrive, and is nobody's.
            self.abandon()
            raise

    async def _connect(self, deadline: float) -> _Connection:
        store = self._store
        connection = await _Connection.connect(store.url, **options(store.timeout))
        try:
            connection.deadline = deadline
            await connection.execute(settings(store.timeout, store.lock_timeout))
            arrays.register(connection.adapters)
            with suppress(psycopg.errors.UndefinedObject, psycopg.errors.InvalidParameterValue):
                await connection.execute(NOTICE_LOST_CLIENTS)
        except BaseException:
            connection.pgconn.finish()
            raise
        return connection

    def abandon(self) -> None:
        """Let go of the connection, from any thread; the next verb opens another."""
        connection, self._connection = self._connection, None
        if connection is not None and self._pid == os.getpid():
            connection._closed = True  # or it warns that nobody closed it
            connection.pgconn.finish()
