"""Turns batches into derived tables and rows into records. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import FINAL
from oncekey.core.swaps import Swap
from oncekey.errors import StoreError
from oncekey.stores.mysql.packets import Text, micros, table
from oncekey.stores.sql.key_rows import EFFECTS, STATES, json_text, stored_response

Rows = Sequence[tuple[Any, ...]]


def placed(batch: Sequence[Reservation | Swap], numbers: Sequence[int] | None = None) -> Text:
    return at([(work.scope, work.key) for work in batch], numbers)


def at(keys: Sequence[tuple[str, str]], numbers: Sequence[int] | None = None) -> Text:
    return table({"scope": [scope for scope, _ in keys], "key": [key for _, key in keys]}, numbers)


def restarting(batch: Sequence[Swap]) -> Text:
    return table(reservation_columns([change.restart for change in batch if change.restart is not None]) | _was(batch))


def reservation_columns(batch: Sequence[Reservation]) -> dict[str, list[Any]]:
    return {
        "scope": [wanted.scope for wanted in batch],
        "key": [wanted.key for wanted in batch],
        "operation": [wanted.operation for wanted in batch],
        "fingerprint": [wanted.fingerprint for wanted in batch],
        "fingerprint_version": [wanted.fingerprint_version for wanted in batch],
        "effects": [wanted.effects.value for wanted in batch],
        "owner": [wanted.owner for wanted in batch],
        "lease": [micros(wanted.lease_seconds) for wanted in batch],
        "retention": [micros(wanted.retention_seconds) for wanted in batch],
        "retention_seconds": [float(wanted.retention_seconds) for wanted in batch],
        "fingerprint_recipe": [wanted.fingerprint_recipe for wanted in batch],
        "quarantine_seconds": [_float(wanted.quarantine_seconds) for wanted in batch],
    }


def compared(batch: Sequence[Swap]) -> Text:
    """What each row must still be."""
    return table(
        {
            "scope": [change.scope for change in batch],
            "key": [change.key for change in batch],
            "from_state": [change.from_state.value for change in batch],
            "owner": [change.owner for change in batch],
            "lease_over_by": [micros(change.lease_over_by) for change in batch],
            "past_expiry": [change.past_expiry for change in batch],
            "from_effects": [_value(change.from_effects) for change in batch],
            "moves": [change.to_state is not None for change in batch],
        }
    )


def _was(batch: Sequence[Swap]) -> dict[str, list[Any]]:
    """What a move compares once more, when it writes."""
    return {
        "was_state": [change.from_state.value for change in batch],
        "was_owner": [change.owner for change in batch],
    }


def _moved(batch: Sequence[Swap]) -> dict[str, list[Any]]:
    """What the row is after the move, for the statements that come after it."""
    owners = [change.restart.owner if change.restart else change.new_owner or change.owner for change in batch]
    return {"moved_to": [_value(change.to_state) for change in batch], "moved_owner": owners}


def moving(batch: Sequence[Swap]) -> Text:
    return table(
        _ending(batch)
        | {
            "new_owner": [change.new_owner or None for change in batch],
            "attempt": [change.attempt or None for change in batch],
            "lease_seconds": [micros(change.lease_seconds) for change in batch],
            "recovery_point": [change.recovery_point or None for change in batch],
            "reconcile_in": [micros(change.reconcile_in) for change in batch],
            "reconcile_tries": [change.reconcile_tries for change in batch],
            "effects": [_value(change.effects) for change in batch],
            "settles": [change.settles for change in batch],
        }
    )


def _ending(batch: Sequence[Swap]) -> dict[str, list[Any]]:
    responses = [change.response for change in batch]
    columns: dict[str, list[Any]] = {
        "scope": [change.scope for change in batch],
        "key": [change.key for change in batch],
        "to_state": [_value(change.to_state) for change in batch],
        "status": [response and response.status for response in responses],
        "headers": [response and headers(response) for response in responses],
        "body": [response and response.body for response in responses],
        "schema_version": [response and response.schema_version for response in responses],
        "last_error": [change.last_error for change in batch],
    }
    return columns | _was(batch)


def steps(batch: Sequence[Swap]) -> Text | None:
    """The steps that these swaps write; None: there are none."""
    pairs = [(number, change, change.step) for number, change in enumerate(batch, 1) if change.step is not None]
    if not pairs:
        return None
    written = [step for _, _, step in pairs]
    return table(
        {
            "scope": [change.scope for _, change, _ in pairs],
            "key": [change.key for _, change, _ in pairs],
            "name": [step.name for step in written],
            "kind": [step.kind.value for step in written],
            "state": [step.state.value for step in written],
            "repeatable": [step.repeatable for step in written],
            "result": [json_text(step.result) for step in written],
            "downstream_key": [step.downstream_key for step in written],
            "provider_id": [step.provider_id for step in written],
            **_moved([change for _, change, _ in pairs]),
        },
        [number for number, _, _ in pairs],
    )


def forgetting(batch: Sequence[Swap]) -> Text | None:
    """The keys whose steps are deleted."""
    return _some(batch, lambda change: change.forgets_steps, _forgotten)


def _forgotten(batch: Sequence[Swap], numbers: Sequence[int]) -> Text:
    keys = {"scope": [change.scope for change in batch], "key": [change.key for change in batch]}
    return table(keys | _moved(batch), numbers)


def audits(batch: Sequence[Swap]) -> Text | None:
    return _some(batch, lambda change: change.audit is not None, _audits)


def _some(
    batch: Sequence[Swap], which: Callable[[Swap], bool], made: Callable[[Sequence[Swap], Sequence[int]], Text]
) -> Text | None:
    chosen = [(number, change) for number, change in enumerate(batch, 1) if which(change)]
    return made([change for _, change in chosen], [number for number, _ in chosen]) if chosen else None


def _audits(batch: Sequence[Swap], numbers: Sequence[int]) -> Text:
    return table(
        {
            "scope": [change.scope for change in batch],
            "key": [change.key for change in batch],
            "who": [change.audit and change.audit.who for change in batch],
            "why": [change.audit and change.audit.why for change in batch],
            "event": [change.event.value for change in batch],
            "from_state": [change.from_state.value for change in batch],
            "to_state": [_value(change.to_state) for change in batch],
            **_moved(batch),
        },
        numbers,
    )


def headers(response: StoredResponse) -> str:
    try:
        return orjson.dumps(response.headers).decode()
    except TypeError as error:
        raise StoreError("a response header is not valid text, and cannot be stored") from error


def record(row: Sequence[Any], response: StoredResponse | None = None) -> Record:
    """A row of ``columns`` as a Record. ``response`` is what the caller has just written, if it is not in the row."""
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
        scope.decode(), key.decode(), operation, fingerprint, fingerprint_version, effects, state, attempt,
        owner.decode(), lease_until / 1e6, recovery_point, response, last_error, seconds(reconcile_at),
        reconcile_tries, created_at / 1e6, seconds(finished_at), retention_seconds, expires_at / 1e6, now / 1e6,
        fingerprint_recipe, quarantine_seconds,
    )  # fmt: skip


def ended(change: Swap, now: int) -> Record:
    """The record of a row that its owner has just ended (``Swap.ends``). Its expiry is what ``end_rows`` has set."""
    seen = change.seen
    assert seen is not None  # noqa: S101 - a swap that ends has it
    assert change.to_state in FINAL  # noqa: S101 - and a state
    expires_at = max(seen.expires_at, (now + round(seen.retention_seconds * 1e6)) / 1e6)
    return Record(
        seen.scope, seen.key, seen.operation, seen.fingerprint, seen.fingerprint_version, seen.effects,
        change.to_state, seen.attempt, seen.owner, seen.lease_until, seen.recovery_point, change.response,
        change.last_error, None, seen.reconcile_tries, seen.created_at, now / 1e6, seen.retention_seconds,
        expires_at, now / 1e6, seen.fingerprint_recipe, seen.quarantine_seconds,
    )  # fmt: skip


def seconds(micros: int | None) -> float | None:
    return None if micros is None else micros / 1e6


def text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _value(word: Any) -> str | None:
    return None if word is None else word.value


def _float(number: float | None) -> float | None:
    return None if number is None else float(number)
