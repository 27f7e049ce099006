"""Swaps, reservations and their commit in **one** call into SQLite.

Every call into SQLite releases the GIL, and then waits for a busy event loop to give it back. Row by row a batch makes
a hundred such calls. So a batch is one statement, an INSERT into a view (``batch.sql``) whose trigger does the work.
Outside of a transaction the statement is a transaction of its own: all of it and its fsync, or nothing.

The cost: the answer is only the number of changed rows. If it is less than the batch, the caller reads the rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import orjson

from oncekey.core.record import Reservation
from oncekey.core.swaps import End, Swap
from oncekey.core.values import value
from oncekey.errors import StoreError
from oncekey.stores.sql import queries
from oncekey.stores.sqlite import rows, schema

SCRIPT = tuple(schema.statements(queries.statement(schema.PACKAGE, "batch")))
APPLY = queries.statement(schema.PACKAGE, "batch_apply")


@value
class Packed:
    """A batch as the parameters of ``batch_apply.sql``."""

    ends: str
    begins: str
    bytes: bytes
    rows: int


def prepare(connection: sqlite3.Connection) -> None:
    """Create the view, for this connection alone."""
    for statement in SCRIPT:
        connection.execute(statement)


def pack(begins: Sequence[Reservation], ends: Sequence[End | Swap]) -> Packed:
    """``ends`` holds only swaps with ``Swap.ends``. StoreError if JSON cannot hold a value; a lane finds the row."""
    pieces = _Pieces()
    ending = [_ending(change, pieces) for change in rows.in_order(ends)]
    beginning = [_beginning(wanted, pieces) for wanted in rows.in_order(begins)]
    return Packed(_json(ending), _json(beginning), b"".join(pieces.all), len(ends) + len(begins))


def apply(connection: sqlite3.Connection, packed: Packed, now: float) -> bool:
    """Whether all rows of the batch were changed. It is committed when this returns."""
    before = connection.total_changes  # also counts changes by triggers
    connection.execute(APPLY, (packed.ends, packed.begins, packed.bytes, now))
    return connection.total_changes - before == packed.rows


class _Pieces:
    """Concatenated bytes, because JSON cannot hold them. Each piece is known by its start and its length."""

    def __init__(self) -> None:
        self.all: list[bytes] = [b"-"]  # substr() of empty bytes is NULL, and would turn an empty body into a tombstone
        self._next = 2  # substr() counts from 1

    def add(self, piece: bytes | None) -> tuple[int | None, int | None]:
        if piece is None:
            return None, None
        self.all.append(piece)
        at, self._next = self._next, self._next + len(piece)
        return at, len(piece)


def _ending(change: End | Swap, pieces: _Pieces) -> tuple[Any, ...]:
    answer = change.response
    to_state = change.to_state
    assert to_state is not None  # noqa: S101 - a move that ends has one
    start = (change.scope, change.key, change.owner, to_state.value, change.last_error)
    if answer is None:
        return (*start, None, None, None, None, None)
    return (*start, answer.status, rows.headers(answer), answer.schema_version, *pieces.add(answer.body))


def _beginning(wanted: Reservation, pieces: _Pieces) -> tuple[Any, ...]:
    return (
        wanted.scope,
        wanted.key,
        wanted.owner,
        wanted.operation,
        wanted.fingerprint_version,
        wanted.effects.value,
        *pieces.add(wanted.fingerprint),
        wanted.lease_seconds,
        wanted.retention_seconds,
        wanted.fingerprint_recipe,
        wanted.quarantine_seconds,
    )


def _json(batch: list[tuple[Any, ...]]) -> str:
    try:
        text = orjson.dumps(batch).decode()
    except TypeError as error:
        raise StoreError("a value is not valid text, and cannot be stored") from error
    if "\\u0000" in text:
        raise StoreError("SQLite ends text in JSON at a NUL: this batch is for the lanes")
    return text
