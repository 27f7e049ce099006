"""The values that encryption covers, in PostgreSQL: a page is one statement, and so is a batch of new values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, LiteralString

from oncekey.core.audit import Audit
from oncekey.stores.kept_api import BEFORE, OPERATORS_LINE
from oncekey.stores.postgres.arrays import Bytea, Column, Int4, Text
from oncekey.stores.postgres.statements import statement
from oncekey.stores.sql.kept import PLACES, KeptTables, Row

if TYPE_CHECKING:
    import psycopg

_KEPT = {table: statement(f"kept_{table}") for table in PLACES}
_REWRITE = {table: statement(f"rewrite_{table}") for table in PLACES}
_NOTE = statement("note_walk")
_COLUMNS: dict[str, dict[str, type[Column]]] = {
    "keys": {
        "scope": Text,
        "key": Text,
        "old_status": Int4,
        "old_headers": Text,
        "old_body": Bytea,
        "old_version": Int4,
        "old_error": Text,
        "headers": Text,
        "body": Bytea,
        "version": Int4,
        "error": Text,
    },
    "steps": {"scope": Text, "key": Text, "name": Text, "old_result": Text, "result": Text},
    "audit": {"id": Text, "old_why": Text, "why": Text},
    "jobs": {
        "id": Text,
        "old_payload": Text,
        "old_error": Text,
        "old_history": Text,
        "payload": Text,
        "error": Text,
        "history": Text,
    },
}
"""The parameters of ``rewrite_<table>``, in the order of a change."""


class PostgresKept(KeptTables):
    """A part of :class:`oncekey.stores.postgres.store.PostgresStore`, which has the connection."""

    if TYPE_CHECKING:

        def _start_clock(self) -> None: ...
        def _execute(self, statement: LiteralString, parameters: Any) -> psycopg.Cursor[tuple[Any, ...]]: ...

    def _kept_rows(self, table: str, after: Row, limit: int) -> Sequence[Row]:
        self._start_clock()
        asked = {f"after_{nth}": part for nth, part in enumerate(after)}
        return self._execute(_KEPT[table], {**asked, "limit": limit}).fetchall()

    def _rewrite_rows(self, table: str, changes: Sequence[Row]) -> Sequence[bool]:
        self._start_clock()
        values = [[str(change[0]), *change[1:]] for change in changes]  # the number of a line goes as text, too
        columns = zip(_COLUMNS[table].items(), zip(*values, strict=True), strict=True)
        asked = {name: kind(column) for (name, kind), column in columns}
        written = {number for (number,) in self._execute(_REWRITE[table], asked)}
        return [number in written for number in range(1, len(changes) + 1)]

    def note_walk(self, event: str, after: str, audit: Audit) -> None:
        self._start_clock()
        scope, key = OPERATORS_LINE
        words = {"who": audit.who, "event": event, "before": BEFORE, "after": after, "why": audit.why}
        self._execute(_NOTE, {"scope": scope, "key": key, **words})
