"""Stores for one key that can be slow or fail, and the files that they are copied from."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import Event
from oncekey.core.swaps import Swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.stores.sqlite.in_loop import SqliteInLoop, ThreadWriter, _Job
from oncekey.stores.sqlite.store import SqliteStore

TABLES = ("orders", "receipts")


class Breakable:
    """A store that can be slow to reserve, and fail to swap, for a test to say."""

    slow_reserve = 0.0
    fail_swaps = 0

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        if self.slow_reserve:
            time.sleep(self.slow_reserve)
        return super().reserve(batch)  # type: ignore[misc]

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        if self.fail_swaps and any(change.event is not Event.RENEW for change in batch):
            self.fail_swaps -= 1
            raise StoreUnavailable("gone for a moment")
        return super().swap(batch)  # type: ignore[misc]


class BreakableMemory(Breakable, MemoryStore):
    pass


class BreakableSqlite(Breakable, SqliteStore):
    def in_loop(self) -> SqliteInLoop:
        return BreakableInLoop(self)


class BreakableInLoop(SqliteInLoop):
    def __init__(self, store: BreakableSqlite) -> None:
        super().__init__(store)
        self._writer = BreakableWriter(store)


class BreakableWriter(ThreadWriter):
    _store: BreakableSqlite

    def _apply(self, job: _Job) -> tuple[float, bool]:
        if self._store.slow_reserve and job.packed.begins != "[]":
            time.sleep(self._store.slow_reserve)
        if self._store.fail_swaps and job.packed.ends != "[]":
            self._store.fail_swaps -= 1
            raise StoreUnavailable("gone for a moment")
        return super()._apply(job)


def template(folder: Path) -> Path:
    """A SQLite file with all tables, to be copied: faster than to migrate one for each key."""
    path = folder / "template.db"
    store = SqliteStore(path)
    store.migrate()
    store.close()
    with closing(sqlite3.connect(path)) as own, own:
        for table in TABLES:
            own.execute(f"CREATE TABLE {table} (key text NOT NULL)")
        own.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


MEMORY = Path("/dev/shm")  # noqa: S108 - private folders are made inside


@contextmanager
def without_a_disk(folder: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: what a line or a message does is the same, and thousands of
    files that are synced one by one are not."""
    if not MEMORY.is_dir():
        yield folder
        return
    with TemporaryDirectory(prefix="oncekey-", dir=MEMORY) as name:
        yield Path(name)


def make_store(kept: Path | None, number: int) -> BreakableMemory | BreakableSqlite:
    """A store for one key: in memory, or a copy of the template beside it."""
    if kept is None:
        return BreakableMemory()
    path = kept.parent / f"{number}.db"
    shutil.copyfile(kept, path)
    return BreakableSqlite(path, timeout=1.0)
