"""Replays without a thread: the event loop reads the file itself, and leaves everything that writes to the lane.

A read of a WAL file takes no lock and a few microseconds; handing it to a thread and back costs more than the read. A
write waits for the disk and for other writers, and never happens here. This connection waits for nobody: where SQLite
would have it wait, it raises, and the lane takes over. So replays also go on while a writer holds the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oncekey.core.record import Found, Record, Reservation, Swap
from oncekey.stores.sqlite.connections import Connections

if TYPE_CHECKING:
    from oncekey.stores.sqlite.store import SqliteStore


class SqliteInLoop:
    """One connection of one event loop, for reading."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._connections = Connections(store.path, 0.001, store.check_schema)

    async def reserve(self, batch: Sequence[Reservation]) -> list[Found | None]:
        with self._connections.use() as connection:
            found = self._store.read_on(connection, [(wanted.scope, wanted.key) for wanted in batch])
        return [
            Found(there) if (there := found.get((wanted.scope, wanted.key))) is not None else None for wanted in batch
        ]

    async def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        raise NotImplementedError  # capabilities.in_loop says "reads"

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[Swap]
    ) -> tuple[list[Found | None], list[Record | None]]:
        raise NotImplementedError

    def abandon(self) -> None:
        self._connections.close()
