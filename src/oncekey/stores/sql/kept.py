"""The values that encryption covers, for every SQL store: one table after another, in the order of primary keys.

Owns the order of tables and columns, and what a cursor says. A store runs the statements of its ``sql/kept.sql``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from oncekey.core.states import State
from oncekey.errors import StoreError
from oncekey.stores.kept_api import Kept, KeptJob, KeptKey, KeptLine, KeptPage, KeptStep, Rewrite

_STARTS: dict[str, tuple[Any, ...]] = {"keys": ("", ""), "steps": ("", "", ""), "audit": (0,), "jobs": ("",)}
"""The tables in their order, and what is before the first row of each."""
_TABLES = list(_STARTS)
_OF_KIND: dict[type[Kept], str] = {KeptKey: "keys", KeptStep: "steps", KeptLine: "audit", KeptJob: "jobs"}
PLACES = {table: len(start) for table, start in _STARTS.items()}
"""How many columns name a row; they are the first of each row and of each change."""

Row = Sequence[Any]


class KeptTables(ABC):
    """The verbs of :class:`oncekey.stores.api.KeptValues` but the note; a store has the connection."""

    @abstractmethod
    def _kept_rows(self, table: str, after: Row, limit: int) -> Sequence[Row]:
        """The first ``limit`` rows after this place: the columns of ``kept_<table>``."""

    @abstractmethod
    def _rewrite_rows(self, table: str, changes: Sequence[Row]) -> Sequence[bool]:
        """Run ``rewrite_<table>`` for these changes, which are in the order of the table: place, old, new."""

    def kept(self, after: str, limit: int) -> KeptPage:
        table, *place = orjson.loads(after) if after else (_TABLES[0], *_STARTS[_TABLES[0]])
        rows = self._kept_rows(table, place, limit)
        kept = [each for row in rows if (each := _kept(table, row)) is not None]
        return KeptPage(kept, self._next(table, rows, limit))

    def _next(self, table: str, rows: Sequence[Row], limit: int) -> str:
        if len(rows) >= limit:
            return _cursor(table, [_text(part) for part in rows[-1][: PLACES[table]]])
        later = _TABLES[_TABLES.index(table) + 1 :]
        return _cursor(later[0], _STARTS[later[0]]) if later else ""

    def rewrite(self, batch: Sequence[Rewrite]) -> list[bool]:
        done: dict[Any, bool] = {}
        for kind, table in _OF_KIND.items():
            changes = sorted((_change(work) for work in batch if type(work.old) is kind), key=_place_of(table))
            if changes:
                places = [tuple(change[: PLACES[table]]) for change in changes]
                done |= zip(((table, *place) for place in places), self._rewrite_rows(table, changes), strict=True)
        return [done[_name(work)] for work in batch]


def _cursor(table: str, place: Row) -> str:
    return orjson.dumps([table, *place]).decode()


def _place_of(table: str) -> Any:
    """Rows are locked in the order of their bytes, as those of every other statement are."""
    size = PLACES[table]
    return lambda change: [part.encode() if isinstance(part, str) else part for part in change[:size]]


def _name(work: Rewrite) -> tuple[Any, ...]:
    table = _OF_KIND[type(work.old)]
    return (table, *_change(work)[: PLACES[table]])


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _kept(table: str, row: Row) -> Kept | None:
    match table, [*row]:
        case "keys", [scope, key, status, headers, body, version, error, state, fingerprint_version, expires_at]:
            response = (status, headers, body, version)
            known = (error, State(state), fingerprint_version, float(expires_at))
            return KeptKey(_text(scope), _text(key), *response, *known)
        case "steps", [scope, key, name, result]:
            return None if result is None else KeptStep(_text(scope), _text(key), _text(name), result.encode())
        case "audit", [number, scope, key, event, why]:
            return KeptLine(_text(scope), _text(key), str(number), event, why)
        case "jobs", [job_id, scope, key, payload, error, history]:
            return KeptJob(_text(job_id), _text(scope), _text(key), payload.encode(), error, history.encode())
    raise StoreError(f"a row of {table} has other columns than this version of oncekey reads")


def _change(work: Rewrite) -> Row:
    """What names the row, its old values, and the new ones."""
    match work.old, work.new:
        case KeptKey() as old, KeptKey() as new:
            was = (old.status, old.headers, old.body, old.schema_version, old.last_error)
            return (old.scope, old.key, *was, new.headers, new.body, new.schema_version, new.last_error)
        case KeptStep() as old, KeptStep() as new:
            return (old.scope, old.key, old.name, old.result.decode(), new.result.decode())
        case KeptLine() as old, KeptLine() as new:
            return (int(old.number), old.why, new.why)
        case KeptJob() as old, KeptJob() as new:
            was_job = (old.payload.decode(), old.last_error, old.history.decode())
            return (old.id, *was_job, new.payload.decode(), new.last_error, new.history.decode())
    raise StoreError("a value can be replaced by one of its own kind only")
