"""Turns batches into parameters and rows into records. Pure, so that ``store.py`` and ``in_loop.py`` share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import State
from oncekey.core.swaps import End, Swap
from oncekey.errors import StoreError
from oncekey.stores.postgres.arrays import Bool, Bytea, Column, Float8, Int4, Text
from oncekey.stores.sql.key_rows import EFFECTS, STATES, json_text, stored_response

Parameters = dict[str, Column]


def reservation_columns(batch: Sequence[Reservation]) -> Parameters:
    return {
        "scope": Text([wanted.scope for wanted in batch]),
        "key": Text([wanted.key for wanted in batch]),
        "operation": Text([wanted.operation for wanted in batch]),
        "fingerprint": Bytea([wanted.fingerprint for wanted in batch]),
        "fingerprint_version": Int4([wanted.fingerprint_version for wanted in batch]),
        "effects": Text([wanted.effects for wanted in batch]),
        "owner": Text([wanted.owner for wanted in batch]),
        "lease_seconds": Float8([wanted.lease_seconds for wanted in batch]),
        "retention_seconds": Float8([wanted.retention_seconds for wanted in batch]),
        "fingerprint_recipe": Text([wanted.fingerprint_recipe for wanted in batch]),
        "quarantine_seconds": Float8([wanted.quarantine_seconds for wanted in batch]),
    }


def end_columns(batch: Sequence[End | Swap]) -> Parameters:
    responses = [change.response for change in batch]
    return {
        "scope": Text([change.scope for change in batch]),
        "key": Text([change.key for change in batch]),
        "owner": Text([change.owner for change in batch]),
        "to_state": Text([change.to_state for change in batch]),
        "status": Int4([response and response.status for response in responses]),
        "headers": Text([response and headers_to_json(response.headers) for response in responses]),
        "body": Bytea([response and response.body for response in responses]),
        "schema_version": Int4([response and response.schema_version for response in responses]),
        "last_error": Text([change.last_error for change in batch]),
    }


def compare_columns(batch: Sequence[Swap]) -> Parameters:
    return {
        "scope": Text([change.scope for change in batch]),
        "key": Text([change.key for change in batch]),
        "from_state": Text([change.from_state for change in batch]),
        "owner": Text([change.owner for change in batch]),
        "lease_over_by": Float8([change.lease_over_by for change in batch]),
        "past_expiry": Bool([change.past_expiry for change in batch]),
    }


def swap_columns(batch: Sequence[Swap]) -> Parameters:
    responses = [change.response for change in batch]
    return compare_columns(batch) | {
        "to_state": Text([change.to_state for change in batch]),
        "new_owner": Text([change.new_owner for change in batch]),
        "attempt": Int4([change.attempt for change in batch]),
        "lease_seconds": Float8([change.lease_seconds for change in batch]),
        "status": Int4([response and response.status for response in responses]),
        "headers": Text([response and headers_to_json(response.headers) for response in responses]),
        "body": Bytea([response and response.body for response in responses]),
        "schema_version": Int4([response and response.schema_version for response in responses]),
        "last_error": Text([change.last_error for change in batch]),
        "recovery_point": Text([change.recovery_point or None for change in batch]),
        "reconcile_in": Float8([change.reconcile_in for change in batch]),
        "effects": Text([change.effects for change in batch]),
        "from_effects": Text([change.from_effects for change in batch]),
    }


def beside_columns(batch: Sequence[Swap]) -> Parameters:
    """For swaps that write something beside their row."""
    steps = [change.step for change in batch]
    return (
        swap_columns(batch)
        | audit_columns(batch)
        | {
            "reconcile_tries": Int4([change.reconcile_tries for change in batch]),
            "step_name": Text([step and step.name for step in steps]),
            "step_kind": Text([step and step.kind for step in steps]),
            "step_state": Text([step and step.state for step in steps]),
            "step_repeatable": Bool([step and step.repeatable for step in steps]),
            "step_result": Text([step and json_text(step.result) for step in steps]),
            "step_downstream_key": Text([step and step.downstream_key for step in steps]),
            "step_provider_id": Text([step and step.provider_id for step in steps]),
        }
    )


def audit_columns(batch: Sequence[Swap]) -> Parameters:
    return {
        "event": Text([change.event for change in batch]),
        "who": Text([change.audit and change.audit.who for change in batch]),
        "why": Text([change.audit and change.audit.why for change in batch]),
    }


def removal_columns(batch: Sequence[Swap]) -> Parameters:
    return compare_columns(batch) | audit_columns(batch)


def restart_columns(batch: Sequence[Swap]) -> Parameters:
    """For swaps that start over: what they compare, and the reservation that takes the row."""
    taken = reservation_columns([change.restart for change in batch if change.restart is not None])
    return taken | {"new_owner": taken["owner"]} | compare_columns(batch) | audit_columns(batch)


def headers_to_json(headers: tuple[tuple[str, str], ...]) -> str:
    return orjson.dumps(headers).decode()


def record(row: Sequence[Any], response: StoredResponse | None = None) -> Record:
    """A row of columns.sql as a Record. It reads by position, which is faster, since it runs for every request.

    ``response`` is what the caller has just written, if the statement does not return it.
    """
    (
        scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
        recovery_point, status, headers, body, schema_version, last_error, reconcile_at, reconcile_tries, created_at,
        finished_at, retention_seconds, expires_at, now, fingerprint_recipe, quarantine_seconds,
    ) = row  # fmt: skip
    if status is not None:
        response = stored_response(status, headers, body, schema_version)
    try:
        effects, state = EFFECTS[effects], STATES[state]
    except KeyError as error:
        raise StoreError(f"a row says {error}, which this version of oncekey does not know") from error
    return Record(
        scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
        recovery_point, response, last_error, reconcile_at, reconcile_tries, created_at, finished_at, retention_seconds,
        expires_at, now, fingerprint_recipe, quarantine_seconds,
    )  # fmt: skip


def reserved(
    asked: Mapping[tuple[str, str], Reservation], answer: Iterable[Sequence[Any]]
) -> dict[tuple[str, str], Record]:
    """The records that a reservation of ``asked`` found or inserted. A rival is about to insert the missing ones."""
    found: dict[tuple[str, str], Record] = {}
    now: float | None = None
    for row in answer:
        at = (row[0], row[1])
        if row[2] is not None:
            found[at] = record(row)
        elif row[0] is not None:
            found[at] = _inserted(asked[at], row[22])
        else:  # the statement inserted every row that it did not find
            now = row[22]
    if now is not None and len(found) < len(asked):
        for at, wanted in asked.items():
            if at not in found:
                found[at] = _inserted(wanted, now)
    return found


def _inserted(wanted: Reservation, now: float) -> Record:
    return Record(
        wanted.scope, wanted.key, wanted.operation, wanted.fingerprint, wanted.fingerprint_version, wanted.effects,
        State.IN_PROGRESS, 1, wanted.owner, later(now, wanted.lease_seconds), None, None, None, None, 0, now, None,
        wanted.retention_seconds, later(now, wanted.retention_seconds), now, wanted.fingerprint_recipe,
        wanted.quarantine_seconds,
    )  # fmt: skip


def found(batch: Sequence[Reservation], answer: Sequence[Sequence[Any]]) -> list[float | Record | None]:
    """The answers to a batch of RESERVE: the time if the key was inserted, otherwise the row that was there. None: the
    statement says nothing about the key, so a lane asks."""
    if len(answer) == 1 and answer[0][0] is None:  # all were inserted
        return [answer[0][22]] * len(batch)
    there: dict[tuple[str, str], Record] = {}
    now: float | None = None
    for row in answer:
        if row[0] is None:
            now = row[22]
        else:
            there[row[0], row[1]] = record(row)
    return [there.get((wanted.scope, wanted.key), now) for wanted in batch]


def times_ended(answer: Sequence[Sequence[Any]], count: int) -> list[float | None]:
    """When each row of a batch was moved, by the answer of ``end``; None: it was not."""
    ((now, numbers),) = answer
    if numbers is None:
        return [now] * count
    times: list[float | None] = [None] * count
    for number in numbers:
        times[number - 1] = now
    return times


def ended(change: Swap, now: float) -> Record:
    """The record of a row that its owner has just ended (``Swap.ends``)."""
    seen = change.seen
    assert seen is not None  # noqa: S101 - a swap that ends has it
    assert change.to_state is not None  # noqa: S101 - and a state
    expires_at = max(seen.expires_at, later(now, seen.retention_seconds))
    return Record(
        seen.scope, seen.key, seen.operation, seen.fingerprint, seen.fingerprint_version, seen.effects,
        change.to_state, seen.attempt, seen.owner, seen.lease_until, seen.recovery_point, change.response,
        change.last_error, None, seen.reconcile_tries, seen.created_at, now, seen.retention_seconds, expires_at, now,
        seen.fingerprint_recipe, seen.quarantine_seconds,
    )  # fmt: skip


def later(now: float, seconds: float) -> float:
    """``now + seconds`` exactly as the database computes it, in whole microseconds."""
    return (round(now * 1e6) + round(seconds * 1e6)) / 1e6
