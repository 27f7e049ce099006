"""Rows, as Redis has them and as Python does. Pure.

Times are whole microseconds: Lua's numbers hold them exactly, and they sort. A field that a row does not have is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from oncekey.core.audit import AuditLine
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import State
from oncekey.core.steps import Step
from oncekey.core.swaps import Swap
from oncekey.errors import StoreError
from oncekey.stores.sql import key_rows
from oncekey.stores.sql.key_rows import EFFECTS, STATES, json_text, stored_response

NONE = b""


def micros(seconds: float) -> int:
    return round(seconds * 1e6)


def text(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise StoreError("text that is not valid Unicode cannot be stored") from error


# -- writing -------------------------------------------------------------------------------------------------------


def fixed(wanted: Reservation) -> bytes:
    """What never changes while the row lives."""
    fingerprint = (wanted.fingerprint.hex(), wanted.fingerprint_version)
    return _json((*fingerprint, wanted.fingerprint_recipe, wanted.quarantine_seconds))


def reservation_values(wanted: Reservation) -> tuple[bytes, ...]:
    """As ``reserve.lua`` takes them."""
    return (
        text(wanted.owner),
        text(wanted.operation),
        wanted.effects.encode(),
        fixed(wanted),
        b"%d" % micros(wanted.lease_seconds),
        b"%d" % micros(wanted.retention_seconds),
    )


def end_values(change: Swap) -> tuple[bytes, ...]:
    """As ``end.lua`` takes them."""
    head, body = _response(change.response)
    failure = NONE if change.last_error is None else b"=" + text(change.last_error)
    return (text(change.owner), (change.to_state or "").encode(), head, body, failure)


def swap_values(change: Swap) -> tuple[bytes, bytes]:
    """The arguments of ``swap.lua``: the swap as JSON, without fields that are None, and the body."""
    head, body = _response(change.response)
    fields: dict[str, Any] = {
        "from_state": change.from_state,
        "owner": change.owner,
        "lease_over_by": None if change.lease_over_by is None else micros(change.lease_over_by),
        "past_expiry": change.past_expiry or None,
        "from_effects": change.from_effects,
        "to_state": change.to_state,
        "new_owner": change.new_owner,
        "attempt": change.attempt,
        "lease_seconds": None if change.lease_seconds is None else micros(change.lease_seconds),
        "head": head.decode() or None,
        "error": change.last_error,
        "point": change.recovery_point or None,
        "reconcile_in": None if change.reconcile_in is None else micros(change.reconcile_in),
        "effects": change.effects,
        "tries": change.reconcile_tries,
        "forgets_steps": change.forgets_steps or None,
    }
    if (again := change.restart) is not None:
        fields["restart"] = {
            "operation": again.operation,
            "fixed": fixed(again).decode(),
            "effects": again.effects,
            "owner": again.owner,
            "lease": micros(again.lease_seconds),
            "retention": micros(again.retention_seconds),
        }
    if (step := change.step) is not None:
        fields["step"] = _without_none(
            name=step.name,
            kind=step.kind,
            state=step.state,
            repeatable=int(step.repeatable),
            result=json_text(step.result),
            down=step.downstream_key,
            provider=step.provider_id,
        )
    if change.audit is not None:
        words = (change.audit.who, change.event, change.from_state, change.to_state, change.audit.why)
        fields["audit"] = _json(words).decode()
    return _json(_without_none(**fields)), body


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _response(response: StoredResponse | None) -> tuple[bytes, bytes]:
    """The head says whether there is a body: an empty one is not none."""
    if response is None:
        return NONE, NONE
    head = (response.status, response.headers, response.schema_version, response.body is not None)
    return _json(head), response.body or NONE


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise StoreError("a row has a value that cannot be stored") from error


# -- reading -------------------------------------------------------------------------------------------------------


def record(scope: str, key: str, answer: Any, now: float, response: StoredResponse | None = None) -> Record:
    """A row: its fields as JSON, or a list of these, the response's head and its body. Without the last two,
    ``response`` is what the caller has just written."""
    try:
        if type(answer) is list:
            answer, head, body = answer
            response = None if head is None else _stored(head, body)
        (
            operation, constant, effects, state, attempt, owner, lease, point, error, ask, tries, born, done, retention,
            expires,
        ) = orjson.loads(answer)  # fmt: skip
        fingerprint, version, recipe, quarantine = orjson.loads(constant)
        return Record(
            scope, key, operation, bytes.fromhex(fingerprint), version, EFFECTS[effects], STATES[state], int(attempt),
            owner, int(lease) / 1e6, point or None, response, None if error is False else error,
            int(ask) / 1e6 if ask else None, int(tries), int(born) / 1e6, int(done) / 1e6 if done else None,
            int(retention) / 1e6, int(expires) / 1e6, now, recipe, quarantine,
        )  # fmt: skip
    except KeyError as unknown:
        raise StoreError(f"a row says {unknown}, which this version of oncekey does not know") from unknown
    except (ValueError, TypeError, AttributeError) as damage:
        raise StoreError("the fields of a row are damaged") from damage


def _stored(head: bytes, body: bytes | None) -> StoredResponse:
    status, headers, version, has_body = orjson.loads(head)
    return stored_response(status, headers, body if has_body else None, version, read=list)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def inserted(wanted: Reservation, now: int) -> Record:
    """The row that ``reserve.lua`` inserted at ``now``, in microseconds."""
    lease, expires = now + micros(wanted.lease_seconds), now + micros(wanted.retention_seconds)
    return Record(
        wanted.scope, wanted.key, wanted.operation, wanted.fingerprint, wanted.fingerprint_version, wanted.effects,
        State.IN_PROGRESS, 1, wanted.owner, lease / 1e6, None, None, None, None, 0, now / 1e6, None,
        wanted.retention_seconds, expires / 1e6, now / 1e6, wanted.fingerprint_recipe, wanted.quarantine_seconds,
    )  # fmt: skip


def ended(change: Swap, expires: bytes, now: float) -> Record:
    """The record of a row that its owner has just ended (``Swap.ends``)."""
    seen = change.seen
    assert seen is not None  # noqa: S101 - a swap that ends has it
    assert change.to_state is not None  # noqa: S101
    return Record(
        seen.scope, seen.key, seen.operation, seen.fingerprint, seen.fingerprint_version, seen.effects,
        change.to_state, seen.attempt, seen.owner, seen.lease_until, seen.recovery_point, change.response,
        change.last_error, None, seen.reconcile_tries, seen.created_at, now, seen.retention_seconds,
        int(expires) / 1e6, now, seen.fingerprint_recipe, seen.quarantine_seconds,
    )  # fmt: skip


def step(fields: Sequence[Any]) -> Step:
    name, kind, state, repeatable, result, down, provider = (_text(field) for field in fields)
    return key_rows.step((name, kind, state, repeatable == "1", result, down, provider))


def audit_line(line: bytes, scope: str, key: str) -> AuditLine:
    """A line, as ``swap.lua`` writes it: a number of 16 digits, the time, the words as JSON, and the name."""
    at, _, rest = line[16:].partition(b" ")
    who, event, before, after, why = orjson.loads(rest.partition(b"\n")[0])
    return AuditLine(int(at) / 1e6, who, event, scope, key, None, before, after, why)
