"""Turns values into the parameters of each statement, and rows into Records.

Pure: no connection, no clock. The order of columns here is the order in ``read.sql`` and ``moved.sql``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import orjson

from oncekey.core.audit import Audit
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import FINAL, State
from oncekey.core.steps import Step
from oncekey.core.swaps import End, Swap
from oncekey.errors import StoreError
from oncekey.stores.sql.key_rows import EFFECTS, STATES, json_text, stored_response

Row = tuple[Any, ...]
_Work = TypeVar("_Work", bound=Reservation | End | Swap)


def in_order(batch: Sequence[_Work]) -> list[_Work]:
    """A batch in the order of (scope, key), which is the order of the table's B-tree."""
    return sorted(batch, key=lambda work: (work.scope, work.key))


def record(row: Row, response: StoredResponse | None, now: float) -> Record:
    try:
        effects, state = EFFECTS[row[5]], STATES[row[6]]
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
        row[18],  # fingerprint_recipe
        row[19],  # quarantine_seconds
    )


def response(row: Row) -> StoredResponse | None:
    status, headers, version, body = row[20:24]
    if status is None:
        return None
    return stored_response(status, headers, body, version)


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
        wanted.fingerprint_recipe,
        wanted.quarantine_seconds,
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
    """?8 to ?22 of swap.sql: what the row becomes, and ?22 the effects that it must still have."""
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
        None if answer is None else headers(answer),
        None if answer is None else answer.schema_version,
        None if answer is None else answer.body,
        None if change.effects is None else change.effects.value,
        change.reconcile_tries,
        None if change.from_effects is None else change.from_effects.value,
    )


def writing_step(change: Swap, written: Step, now: float) -> Row:
    """The parameters of step.sql."""
    return (
        change.scope,
        change.key,
        written.name,
        written.kind.value,
        written.state.value,
        written.repeatable,
        json_text(written.result),
        written.downstream_key,
        written.provider_id,
        now,
    )


def auditing(change: Swap, audit: Audit, now: float) -> Row:
    """The parameters of note.sql, for a key that is moved."""
    before, after = change.from_state.value, None if change.to_state is None else change.to_state.value
    return (now, audit.who, change.event.value, change.scope, change.key, None, before, after, audit.why)


def headers(answer: StoredResponse) -> str:
    try:
        return orjson.dumps(answer.headers).decode()
    except TypeError as error:
        raise StoreError("a response header is not valid text, and cannot be stored") from error


def keys_as_json(keys: Sequence[tuple[str, str]]) -> str:
    """The parameter of read_many.sql and moved_many.sql."""
    try:
        return orjson.dumps(keys).decode()
    except TypeError as error:
        raise StoreError("a scope or key is not valid text, and cannot be stored") from error


def moved(change: Swap, lease_until: float, recovery_point: str | None, now: float) -> Record:
    """The record of a row that was just moved, with the lease and the recovery point of the row."""
    assert change.seen is not None  # noqa: S101 - the caller passes only swaps that have it
    made = change.moved(change.seen, now)
    if (made.lease_until, made.recovery_point) != (lease_until, recovery_point):
        made = replace(made, lease_until=lease_until, recovery_point=recovery_point)
    return made


def restarting(wanted: Reservation, now: float) -> Row:
    """?8 to ?17 of restart.sql."""
    return (
        wanted.operation,
        wanted.fingerprint,
        wanted.fingerprint_version,
        wanted.effects.value,
        wanted.owner,
        now + wanted.lease_seconds,
        wanted.retention_seconds,
        now + wanted.retention_seconds,
        wanted.fingerprint_recipe,
        wanted.quarantine_seconds,
    )
