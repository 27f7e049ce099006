"""Between values and columns: the parameters of each statement, and a row as a Record.

Pure: no connection, no clock. The order of columns here is the order in ``read.sql`` and ``moved.sql``.
"""

from __future__ import annotations

from typing import Any

import orjson

from oncekey.core.record import RESPONSE_SCHEMA_VERSION, Record, Reservation, StoredResponse, Swap
from oncekey.core.states import FINAL, Effects, State
from oncekey.errors import StoreError

Row = tuple[Any, ...]

# A dictionary is four times as fast as calling the enum, and rows are decoded on every replay.
_STATES = {state.value: state for state in State}
_EFFECTS = {effects.value: effects for effects in Effects}


def record(row: Row, response: StoredResponse | None, now: float) -> Record:
    try:
        effects, state = _EFFECTS[row[5]], _STATES[row[6]]
    except KeyError as error:
        raise StoreError(f"a row says {error}, which this version of oncekey does not know") from error
    return Record(
        row[0],  # scope
        row[1],  # key
        row[2],  # operation
        row[3],  # fingerprint
        row[4],  # fingerprint_version
        effects,
        state,
        row[7],  # attempt
        row[8],  # owner
        row[9],  # lease_until
        row[10],  # recovery_point
        response,
        row[11],  # last_error
        row[12],  # reconcile_at
        row[13],  # reconcile_tries
        row[14],  # created_at
        row[15],  # finished_at
        row[16],  # retention_seconds
        row[17],  # expires_at
        now,
    )


def response(row: Row) -> StoredResponse | None:
    status, headers, version, body = row[18:22]
    if status is None:
        return None
    if version != RESPONSE_SCHEMA_VERSION:
        # Written by another version of oncekey, who knows how: a tombstone, and the columns are not read.
        return StoredResponse(status, (), None, version)
    try:
        pairs = tuple((name, value) for name, value in orjson.loads(headers))
    except (TypeError, ValueError) as error:
        raise StoreError("the stored headers of a row are damaged") from error
    return StoredResponse(status, pairs, body, version)


def inserting(wanted: Reservation, now: float) -> Row:
    """The parameters of insert.sql."""
    return (
        wanted.scope,
        wanted.key,
        wanted.operation,
        wanted.fingerprint,
        wanted.fingerprint_version,
        wanted.effects.value,
        wanted.owner,
        now + wanted.lease_seconds,
        now,
        wanted.retention_seconds,
        now + wanted.retention_seconds,
    )


def comparing(change: Swap, now: float) -> Row:
    """?1 to ?7 of swap.sql, restart.sql and delete.sql: what the row must still be."""
    return (
        change.scope,
        change.key,
        change.from_state.value,
        change.owner,
        change.lease_over_by,
        change.past_expiry,
        now,
    )


def setting(change: Swap, to_state: State) -> Row:
    """?8 to ?20 of swap.sql: what the row becomes."""
    answer = change.response
    return (
        to_state.value,
        change.new_owner or None,
        change.attempt or None,
        change.lease_seconds,
        change.recovery_point or None,
        change.last_error,
        change.reconcile_in,
        to_state in FINAL,
        None if answer is None else answer.status,
        None if answer is None else _headers(answer),
        None if answer is None else answer.schema_version,
        None if answer is None else answer.body,
        None if change.effects is None else change.effects.value,
    )


def _headers(answer: StoredResponse) -> str:
    try:
        return orjson.dumps(answer.headers).decode()
    except TypeError as error:
        raise StoreError("a response header is not valid text, and cannot be stored") from error


def restarting(wanted: Reservation, now: float) -> Row:
    """?8 to ?15 of restart.sql."""
    return (
        wanted.operation,
        wanted.fingerprint,
        wanted.fingerprint_version,
        wanted.effects.value,
        wanted.owner,
        now + wanted.lease_seconds,
        wanted.retention_seconds,
        now + wanted.retention_seconds,
    )
