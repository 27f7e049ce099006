"""Reserve and swap without a lane: reads in the event loop itself, and one call elsewhere for each written batch.

A read of a WAL file takes no lock and a few microseconds; handing it to a thread and back costs more than the read. So
the loop reads existing keys itself, and replays continue while a writer holds the file.

A write waits for the disk, so it never happens in the loop. The loop does all work before and after it: the thread gets
a packed batch (``batch.py``), makes one call, and returns whether all rows changed. So thread and loop rarely wait for
the GIL. With ``writer=process`` the call is in another process (``writer_process.py``), and they never do.

No verb here waits long: if another writer holds the file, the verb raises, and a lane, which can wait, does the work.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.api import LostRace
from oncekey.stores.sqlite import batch as batches
from oncekey.stores.sqlite.batch import Packed
from oncekey.stores.sqlite.connections import Connections
from oncekey.stores.sqlite.writer_process import ProcessWriter, writer_of

if TYPE_CHECKING:
    from oncekey.stores.sqlite.store import SqliteStore

_log = logging.getLogger("oncekey")

LOCK_SECONDS = 0.05
"""How long a batch waits for another writer. It is short, because replays are in the same batch and wait, too."""
_READ_SECONDS = 0.001


class SqliteInLoop:
    """Two connections of one event loop: one to read, in the loop; one to write, in a thread or a process."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._reading = Connections(store.path, _READ_SECONDS, store.check_schema, beside=store.connections)
        process = writer_of(store, self._reading, LOCK_SECONDS) if store.writer == "process" else None
        self._writer: ProcessWriter | ThreadWriter = process or ThreadWriter(store)

    async def reserve(self, batch: Sequence[Reservation]) -> list[float | Record | None]:
        found = self._read(batch)
        absent = [wanted for wanted in batch if (wanted.scope, wanted.key) not in found] if found else batch
        written: Sequence[float | Record] = ()
        if absent and self._can_write():
            written = (await self._write(absent, ()))[0]
            if not found:
                return [*written]
        new = {(wanted.scope, wanted.key): answer for wanted, answer in zip(absent, written, strict=False)}
        return [found.get(at) or new.get(at) for one in batch for at in ((one.scope, one.key),)]

    async def swap(self, batch: Sequence[End | Swap]) -> list[float | None]:
        return (await self.both((), batch))[1]

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[list[float | Record], list[float | None]]:
        if not self._can_write():
            raise LostRace("a transaction of the app has the file, or the writer process is starting")
        return await self._write(begins, ends)

    async def _write(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[list[float | Record], list[float | None]]:
        packed = batches.pack(begins, ends)
        try:
            async with asyncio.timeout(self._store.timeout):
                now, complete = await self._writer.write(packed)
        except TimeoutError:
            self._writer.timed_out()
            raise StoreUnavailable(f"{self._store.path} took over {self._store.timeout:g} s to commit") from None
        if complete:
            return [now] * len(begins), [now] * len(ends)
        # Some keys existed already, or some rows were no longer as their swaps say. The rows themselves tell.
        there = self._read([*begins, *ends])
        if not all((wanted.scope, wanted.key) in there for wanted in begins):
            raise LostRace("a key was deleted as soon as it was there")
        found: list[float | Record] = [there[wanted.scope, wanted.key] for wanted in begins]
        return found, [_moved(change, there.get((change.scope, change.key)), now) for change in ends]

    def _read(self, batch: Sequence[Reservation | End | Swap]) -> dict[tuple[str, str], Record]:
        with self._reading.use() as connection:
            return self._store.read_on(connection, [(work.scope, work.key) for work in batch])

    def _can_write(self) -> bool:
        return self._writer.ready() and not self._store.gate.held_by_user

    def abandon(self) -> None:
        try:
            self._writer.close()
        finally:
            self._reading.close()


def _moved(change: End | Swap, row: Record | None, now: float) -> float | None:
    """``now``, if this swap moved the row: the row has the swap's owner, state and time. Otherwise None."""
    if row is not None and (row.owner, row.state, row.finished_at) == (change.owner, change.to_state, now):
        return now
    return None


class ThreadWriter:
    """A thread that commits the batches of one event loop, one at a time. The first batch starts it."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._connections = Connections(
            store.path, store.timeout, self._prepare, beside=store.connections, lock_seconds=LOCK_SECONDS
        )
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ready(self) -> bool:
        return True

    def timed_out(self) -> None:
        """A batch took too long. The thread may still commit it; the lanes read its rows again."""

    async def write(self, packed: Packed) -> tuple[float, bool]:
        """Commit a batch: the time of its rows, and whether all of them changed."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="oncekey-writer", daemon=True)
            thread.start()
            self._thread = thread
        job = _Job(packed)
        self._queue.put(job)
        answer = await job.done
        self._connections.check_files()
        return answer

    def close(self) -> None:
        try:
            self._connections.close()  # waits for a running batch, up to the time-out
        finally:
            if self._thread is not None:
                self._thread = None
                self._queue.put(None)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        self._store.check_schema(connection)
        batches.prepare(connection)
        connection.execute(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000:.0f}")

    def _run(self) -> None:
        more = True
        while more:
            job: _Job | None = None
            try:
                job = self._queue.get()
                more = job is not None
                if job is not None:
                    job.tell(self._apply(job), None)
            except BaseException as error:  # noqa: BLE001 - the thread must go on, and the caller must get the error
                if job is not None:
                    job.tell(None, error)
                else:
                    _log.exception("the writer failed unexpectedly; it goes on")

    def _apply(self, job: _Job) -> tuple[float, bool]:
        """Runs in the thread. The caller must call ``check_files()`` before it trusts the result."""
        with self._connections.use(check=False) as connection, self._store.at_the_gate(connection, LOCK_SECONDS):
            if job.given_up():
                raise StoreUnavailable("the caller no longer waits for this batch")
            now = self._store.clock()
            return now, batches.apply(connection, job.packed, now)


class _Job:
    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[tuple[float, bool]] = self._loop.create_future()

    def given_up(self) -> bool:
        """The caller stopped waiting. A lane has the tickets now, and may have undone them."""
        return self.done.done()

    def tell(self, answer: tuple[float, bool] | None, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            self._loop.call_soon_threadsafe(self._set, answer, error)

    def _set(self, answer: tuple[float, bool] | None, error: BaseException | None) -> None:
        if self.done.done():  # the caller stopped waiting; a lane reads the rows
            return
        if answer is not None:
            self.done.set_result(answer)
        elif error is not None:
            self.done.set_exception(error)
