"""A batch of reservations, or of ends, as the parameters of its prepared statement: what every request costs.

``rows.py`` gives the same values as columns, which psycopg takes too; a test compares the two. Here a batch costs a few
steps for each row and not a few for each row and column: most columns say the same in all rows of a batch (the route's
name, lease and retention; the status), so their arrays are made once and remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import orjson

from oncekey.core.record import Reservation
from oncekey.core.swaps import End, Swap
from oncekey.stores.postgres import rows
from oncekey.stores.postgres.arrays import Bytea, Column, Float8, Int4, Text, joined

_TERMS: tuple[type[Column], ...] = (Text, Int4, Text, Float8, Float8, Text, Float8)
_ENDING: tuple[type[Column], ...] = (Text, Text, Int4, Int4)


def reservations(batch: Sequence[Reservation]) -> list[bytes]:
    """The values of ``rows.reservation_columns``, in its order."""
    length, one = len(batch), batch[0]
    if not (
        [each.operation for each in batch].count(one.operation)
        == [each.fingerprint_version for each in batch].count(one.fingerprint_version)
        == [each.effects for each in batch].count(one.effects)
        == [each.lease_seconds for each in batch].count(one.lease_seconds)
        == [each.retention_seconds for each in batch].count(one.retention_seconds)
        == [each.fingerprint_recipe for each in batch].count(one.fingerprint_recipe)
        == [each.quarantine_seconds for each in batch].count(one.quarantine_seconds)
        == length
    ):
        return [column.encode() for column in rows.reservation_columns(batch).values()]
    terms = (
        one.operation, one.fingerprint_version, one.effects, one.lease_seconds, one.retention_seconds,
        one.fingerprint_recipe, one.quarantine_seconds,
    )  # fmt: skip
    operation, version, effects, *rest = _of_all(_TERMS, terms, length)
    digests = Bytea.header(length) + joined([each.fingerprint for each in batch])
    scopes, keys = _scopes([each.scope for each in batch]), _texts([each.key for each in batch])
    return [scopes, keys, operation, digests, version, effects, _texts([each.owner for each in batch]), *rest]


def ends(batch: Sequence[End | Swap]) -> list[bytes]:
    """The values of ``rows.end_columns``, in its order."""
    length, one = len(batch), batch[0]
    responses = [each.response for each in batch]
    first = one.response
    if (
        first is None
        or [each.to_state for each in batch].count(one.to_state) < length
        or [each.last_error for each in batch].count(one.last_error) < length
        or [each and each.status for each in responses].count(first.status) < length
        or [each and each.schema_version for each in responses].count(first.schema_version) < length
        or None in (bodies := [None if each is None else each.body for each in responses])
    ):
        return [column.encode() for column in rows.end_columns(batch).values()]
    kinds = (one.to_state, one.last_error, first.status, first.schema_version)
    to_state, last_error, status, version = _of_all(_ENDING, kinds, length)
    headers = Text.header(length) + joined([orjson.dumps(each.headers) for each in responses if each is not None])
    scopes, keys = _scopes([each.scope for each in batch]), _texts([each.key for each in batch])
    content = Bytea.header(length) + joined([body for body in bodies if body is not None])
    owners = _texts([each.owner for each in batch])
    return [scopes, keys, owners, to_state, status, headers, content, version, last_error]


def _scopes(values: list[str]) -> bytes:
    """The same tenant in all rows is nearly as common as the same route."""
    length = len(values)
    return _of_all((Text,), (values[0],), length)[0] if values.count(values[0]) == length else _texts(values)


def _texts(values: list[str]) -> bytes:
    """An array of texts. All are encoded in one step."""
    length = len(values)
    encoded = "\0".join(values).encode().split(b"\0")
    if len(encoded) != length:  # one has a NUL, which the database refuses
        return Text(values).encode()
    return Text.header(length) + joined(encoded)


@lru_cache(maxsize=256)
def _of_all(kinds: tuple[type[Column], ...], values: tuple[Any, ...], length: int) -> tuple[bytes, ...]:
    """Arrays that have one of ``values`` each, in every place."""
    return tuple(kind([value] * length).encode() for kind, value in zip(kinds, values, strict=True))
