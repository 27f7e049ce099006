"""Reserve and swap in the caller's event loop, on libpq's pipeline: the store's own statements, without a thread.

Under uvicorn a lane's thread and the loop share the GIL, and pass it to each other in every batch. Here the loop sends
the statements itself, and serves other requests while the database works. Swaps and reservations go out together as
**one transaction**: one round trip and one fsync for both. It is committed when the server answers the Sync, not
before: the answer to a statement only says that the statement ran.

This module uses psycopg's ``pq`` layer, because a cursor is too expensive for each batch. It handles only success.
After any error it raises and closes the connection. The tickets then go to a lane's thread, which handles the error
(``engine/batching/loop_lane.py``).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import abc, pq
from psycopg.adapt import Transformer

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.api import LostRace
from oncekey.stores.postgres import packing, rows
from oncekey.stores.postgres.connection import NOT_NOTICED, NOTICE_LOST_CLIENTS, options, settings
from oncekey.stores.postgres.statements import END, RESERVE

if TYPE_CHECKING:
    from oncekey.stores.postgres.store import PostgresStore

Rows = list[tuple[Any, ...]]

_RACES = (b"23505", b"55P03", b"40P01")
"""A rival inserted a key, or is about to: unique violation, lock not available, deadlock."""
_GOOD = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)
_FAILED = pq.ExecStatus.FATAL_ERROR  # libpq's word for any error
_SEVERITY = pq.DiagnosticField.SEVERITY_NONLOCALIZED
_LAST_WORDS = (b"FATAL", b"PANIC")
LOCK_SECONDS = 0.05
"""How long a batch waits for a rival's uncommitted key. It is short, because the batch's swaps wait too. A lane can
wait longer."""


class _Statement:
    """A statement with numbered parameters, prepared when the connection opens. ``columns``, of any batch, give their
    order and their types."""

    def __init__(self, name: str, text: str, columns: rows.Parameters) -> None:
        self.name = name.encode()
        self.kinds = [column.array_oid for column in columns.values()]
        for number, parameter in enumerate(columns, 1):
            text = text.replace(f"%({parameter})s", f"${number}")
        self.text = text.encode()
        self.formats = [pq.Format.BINARY] * len(columns)


_RESERVE = _Statement("oncekey_reserve", RESERVE, rows.reservation_columns([]))
_END = _Statement("oncekey_end", END, rows.end_columns([]))


class InLoop:
    """One connection of one event loop."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._pipeline: _Pipeline | None = None
        self._readers: dict[_Statement, abc.Transformer] = {}
        self._pid = os.getpid()

    async def reserve(self, batch: Sequence[Reservation]) -> list[float | Record | None]:
        (found,) = await self._ask((_RESERVE, packing.reservations(batch)))
        return rows.found(batch, found)

    async def swap(self, batch: Sequence[End | Swap]) -> list[float | None]:
        (ended,) = await self._ask((_END, packing.ends(batch)))
        return rows.times_ended(ended, len(batch))

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[list[float | Record | None], list[float | None]]:
        # Swaps come first, so that a reservation of the same key finds the response.
        ended, found = await self._ask((_END, packing.ends(ends)), (_RESERVE, packing.reservations(begins)))
        return rows.found(begins, found), rows.times_ended(ended, len(ends))

    async def _ask(self, *questions: tuple[_Statement, list[bytes]]) -> list[Rows]:
        try:
            deadline = time.monotonic() + self._store.timeout
            pipeline = self._pipeline
            if pipeline is None:
                pipeline = self._pipeline = await self._connect()
                self._connection = pipeline.connection
            for statement, values in questions:
                pipeline.execute(statement, values)
            results = await pipeline.run(deadline - time.monotonic())
            return [self._rows(question[0], result) for question, result in zip(questions, results, strict=True)]
        except LostRace:
            raise  # the connection is still good
        except BaseException:
            # Also when cancelled or timed out: the answer may still arrive, and the next batch must not read it.
            self.abandon()
            raise

    def _rows(self, statement: _Statement, result: pq.abc.PGresult) -> Rows:
        """The rows as Python values. The first answer of a connection decides the loader of each column."""
        reader = self._readers.get(statement)
        if reader is None:
            reader = self._readers[statement] = Transformer(self._connection)
            reader.set_pgresult(result)
        else:
            reader.set_pgresult(result, set_loaders=False)
        read: Rows = reader.load_rows(0, result.ntuples, tuple)
        reader.set_pgresult(None, set_loaders=False)  # free the response bodies before the next batch
        return read

    async def _connect(self) -> _Pipeline:
        store = self._store
        async with asyncio.timeout(store.timeout):
            connection = await psycopg.AsyncConnection.connect(store.url, **options(store.timeout))
            try:
                await connection.execute(settings(store.timeout, min(store.lock_timeout, LOCK_SECONDS)))
                with suppress(*NOT_NOTICED):
                    await connection.execute(NOTICE_LOST_CLIENTS)
                connection.pgconn.nonblocking = 1
                connection.pgconn.enter_pipeline_mode()
            except BaseException:
                connection.pgconn.finish()
                raise
            pipeline = _Pipeline(connection, self.abandon)
            try:
                pipeline.prepare(_RESERVE)
                pipeline.prepare(_END)
                await pipeline.run(store.timeout)
            except BaseException:
                pipeline.close()
                raise
        return pipeline

    def abandon(self) -> None:
        """Drop the connection. Any thread may call this while no verb runs; the next verb opens another."""
        pipeline, self._pipeline, self._connection, self._readers = self._pipeline, None, None, {}
        if pipeline is not None and self._pid == os.getpid():
            pipeline.close()


class _Pipeline:
    """A connection in pipeline mode: statements that are sent together, and their answers up to the Sync that commits
    them.

    Its reader stays in the event loop while the connection is open, because to add and remove one costs 20 µs a batch
    (docs/performance.md). So it also hears from the server when nothing was asked. Then the server is ending the
    connection, and ``lost`` is called.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any], lost: Callable[[], None]) -> None:
        self.connection = connection
        self._pgconn = connection.pgconn
        self._socket = self._pgconn.socket
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] | None = None
        self._results: list[pq.abc.PGresult] = []
        self._loop.add_reader(self._socket, self._read)

    def close(self) -> None:
        """Close the connection, in its loop: a loop that still watches a closed socket may watch another one's next."""
        if asyncio._get_running_loop() is self._loop:
            self._finish()
            return
        try:
            self._loop.call_soon_threadsafe(self._finish)
        except RuntimeError:  # the loop is closed, and watches nothing
            self._finish()

    def _finish(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
        self.connection._closed = True  # otherwise psycopg warns that it was not closed
        self._pgconn.finish()

    def prepare(self, statement: _Statement) -> None:
        self._pgconn.send_prepare(statement.name, statement.text, statement.kinds)

    def execute(self, statement: _Statement, values: list[bytes]) -> None:
        self._pgconn.send_query_prepared(statement.name, values, statement.formats, pq.Format.BINARY)

    async def run(self, timeout: float) -> list[pq.abc.PGresult]:
        """The answer to each statement, when all are committed."""
        self._pgconn.pipeline_sync()
        loop, socket = self._loop, self._socket
        over = self._over = loop.create_future()
        results = self._results = []
        timer = loop.call_later(max(0.001, timeout), self._time_out)
        writes = False
        try:
            if writes := self._pgconn.flush() != 0:  # the socket did not take all of it
                loop.add_writer(socket, self._write)
            await over
        finally:
            timer.cancel()
            self._over = None
            if writes:
                loop.remove_writer(socket)
        for result in results:
            if result.status not in _GOOD:
                state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
                if state in _RACES:
                    raise LostRace
                raise StoreUnavailable(f"PostgreSQL refused a statement: SQLSTATE {state.decode()}")
        return results

    def _write(self) -> None:
        try:
            if self._pgconn.flush() == 0:
                self._loop.remove_writer(self._socket)
        except psycopg.Error as error:
            self._end(error)

    def _read(self) -> None:
        if self._over is None:
            self._lost()  # nothing was asked: these are the server's last words, or the end of the stream
            return None
        pgconn, ended = self._pgconn, False
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:  # the end of one statement's answer; twice in a row: there is no more to read
                    if ended:
                        break
                    ended = True
                    continue
                ended = False
                if result.status == pq.ExecStatus.PIPELINE_SYNC:
                    return self._end(None)
                self._results.append(result)
                if result.status == _FAILED and result.error_field(_SEVERITY) in _LAST_WORDS:
                    # The server closes the stream next. uvloop may not call the reader for that, so end here.
                    return self._end(StoreUnavailable("the server has ended the connection"))
            if pgconn.status == pq.ConnStatus.BAD:
                self._end(StoreUnavailable("the connection was lost"))
        except psycopg.Error as error:
            self._end(error)
        return None

    def _time_out(self) -> None:
        self._read()  # if the loop was busy, the answer may have arrived
        self._end(StoreUnavailable("the store did not answer in time"))

    def _end(self, error: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)
