"""The values that encryption covers, in one SQLite file. A batch of new values is one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from oncekey.core.audit import Audit
from oncekey.stores.kept_api import BEFORE, OPERATORS_LINE
from oncekey.stores.sql import queries
from oncekey.stores.sql.kept import PLACES, KeptTables, Row
from oncekey.stores.sqlite import schema

_KEPT = {table: queries.statement(schema.PACKAGE, f"kept_{table}") for table in PLACES}
_REWRITE = {table: queries.statement(schema.PACKAGE, f"rewrite_{table}") for table in PLACES}
_NOTE = queries.statement(schema.PACKAGE, "note")


class SqliteKept(KeptTables):
    """A part of :class:`oncekey.stores.sqlite.store.SqliteStore`, which has the connections."""

    if TYPE_CHECKING:
        clock: Callable[[], float]

        def _reading(self) -> AbstractContextManager[sqlite3.Connection]: ...
        def _writing(self) -> AbstractContextManager[sqlite3.Connection]: ...

    def _kept_rows(self, table: str, after: Row, limit: int) -> Sequence[Row]:
        with self._reading() as connection:
            return connection.execute(_KEPT[table], (*after, limit)).fetchall()

    def _rewrite_rows(self, table: str, changes: Sequence[Row]) -> Sequence[bool]:
        with self._writing() as connection:
            return [connection.execute(_REWRITE[table], tuple(change)).rowcount == 1 for change in changes]

    def note_walk(self, event: str, after: str, audit: Audit) -> None:
        with self._writing() as connection:
            line = (self.clock(), audit.who, event, *OPERATORS_LINE, None, BEFORE, after, audit.why)
            connection.execute(_NOTE, line)
