"""Rows, as Redis has them and as Python does. Pure.

``lua/lib/fields.lua`` says what a row has. Times are whole microseconds: Lua's numbers hold them exactly, and they
sort.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """What never changes while the row lives: a JSON array without its brackets."""
    of_request = (wanted.fingerprint.hex(), wanted.operation, wanted.fingerprint_version)
    return json((*of_request, wanted.fingerprint_recipe, wanted.quarantine_seconds))[1:-1]


def swap_values(change: Swap) -> tuple[bytes, bytes]:
    """The arguments of ``swap.lua``: the swap as JSON, without fields that are None, and the body."""
    head, body = response(change.response)
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
        fields["audit"] = json(words).decode()
    return json(_without_none(**fields)), body


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def response(given: StoredResponse | None) -> tuple[bytes, bytes]:
    """The head says whether there is a body: an empty one is not none."""
    if given is None:
        return NONE, NONE
    body = given.body
    return json((given.status, given.headers, given.schema_version, body is not None)), body or NONE


def json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise StoreError("a row has a value that cannot be stored") from error


# -- reading -------------------------------------------------------------------------------------------------------


def values(text: bytes) -> Any:
    """The values of a row, or of several, as scripts answer them."""
    try:
        return orjson.loads(text)
    except ValueError as damage:
        raise _damaged() from damage


def record(scope: str, key: str, answer: Any, now: float, written: StoredResponse | None = None) -> Record:
    """A row as text, or a list of the text and the body. ``written``: the response that the caller has just written,
    which is not in the text."""
    if type(answer) is list:
        text, body = answer
        return record_of(scope, key, values(text), now, iter((body,)))
    return record_of(scope, key, values(answer), now, iter(()), written)


def record_of(
    scope: str, key: str, row: Any, now: float, bodies: Iterator[bytes], written: StoredResponse | None = None
) -> Record:
    """A row from its values. The next of ``bodies`` is its own if it has a response."""
    try:
        (
            fingerprint, operation, version, recipe, quarantine, state, owner, effects, attempt, tries, lease, born,
            point, error, ask, done, retention, expires, head,
        ) = row  # fmt: skip
        if head is not None:
            status, headers, schema_version, has_body = head
            body = next(bodies)
            written = stored_response(status, headers, body if has_body else None, schema_version, read=list)
        return Record(
            scope, key, operation, bytes.fromhex(fingerprint), version, EFFECTS[effects], STATES[state], attempt, owner,
            lease / 1e6, point, written, error, None if ask is None else ask / 1e6, tries, born / 1e6,
            None if done is None else done / 1e6, retention / 1e6, expires / 1e6, now, recipe, quarantine,
        )  # fmt: skip
    except KeyError as unknown:
        raise StoreError(f"a row says {unknown}, which this version of oncekey does not know") from unknown
    except (ValueError, TypeError, StopIteration) as damage:
        raise _damaged() from damage


def _damaged() -> StoreError:
    return StoreError("the fields of a row are damaged")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def later(now: float, seconds: float) -> float:
    """``now + seconds`` exactly as the scripts compute it, in whole microseconds."""
    return (micros(now) + micros(seconds)) / 1e6


def inserted(wanted: Reservation, now: float) -> Record:
    """The row that ``reserve.lua`` inserted at ``now``."""
    return Record(
        wanted.scope, wanted.key, wanted.operation, wanted.fingerprint, wanted.fingerprint_version, wanted.effects,
        State.IN_PROGRESS, 1, wanted.owner, later(now, wanted.lease_seconds), None, None, None, None, 0, now, None,
        wanted.retention_seconds, later(now, wanted.retention_seconds), now, wanted.fingerprint_recipe,
        wanted.quarantine_seconds,
    )  # fmt: skip


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


def step(fields: Sequence[Any]) -> Step:
    name, kind, state, repeatable, result, down, provider = (_text(field) for field in fields)
    return key_rows.step((name, kind, state, repeatable == "1", result, down, provider))


def audit_line(line: bytes, scope: str, key: str) -> AuditLine:
    """A line, as ``swap.lua`` writes it: a number of 16 digits, the time, the words as JSON, and the name."""
    at, _, rest = line[16:].partition(b" ")
    who, event, before, after, why = orjson.loads(rest.partition(b"\n")[0])
    return AuditLine(int(at) / 1e6, who, event, scope, key, None, before, after, why)


def with_reason(line: bytes, why: str) -> bytes:
    """The same line of the audit with another reason."""
    at, _, rest = line[16:].partition(b" ")
    words, _, name = rest.partition(b"\n")
    return line[:16] + at + b" " + json([*orjson.loads(words)[:4], why]) + b"\n" + name
