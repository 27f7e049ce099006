"""A batch of reservations, or of ends, as the parameters of its prepared statement: what every request costs.

``rows.py`` gives the same values as columns, which psycopg takes too; a test compares the two. Here a batch costs a few
steps for each row and not a few for each row and column: most columns say the same in all rows of a batch (the route's
name, lease and retention; the status), so their arrays are made once and remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import orjson

from oncekey.core.record import Reservation
from oncekey.core.swaps import End, Swap
from oncekey.stores.postgres import rows
from oncekey.stores.postgres.arrays import Bytea, Column, Float8, Int4, Text, joined

_scope, _key, _owner, _digest = map(attrgetter, ("scope", "key", "owner", "fingerprint"))
_response, _headers, _body = map(attrgetter, ("response", "headers", "body"))
_terms = attrgetter(
    "operation", "fingerprint_version", "effects", "lease_seconds", "retention_seconds", "fingerprint_recipe",
    "quarantine_seconds",
)  # fmt: skip
_TERMS: tuple[type[Column], ...] = (Text, Int4, Text, Float8, Float8, Text, Float8)
_ending = attrgetter("to_state", "last_error", "response.status", "response.schema_version")


def reservations(batch: Sequence[Reservation]) -> list[bytes]:
    """The values of ``rows.reservation_columns``, in its order."""
    length = len(batch)
    terms = set(map(_terms, batch))
    if len(terms) != 1:
        return [column.encode() for column in rows.reservation_columns(batch).values()]
    operation, version, effects, *rest = _of_all(_TERMS, terms.pop(), length)
    digests = Bytea.header(length) + joined(list(map(_digest, batch)))
    return [
        _scopes(list(map(_scope, batch))), _texts(list(map(_key, batch))), operation, digests, version, effects,
        _texts(list(map(_owner, batch))), *rest,
    ]  # fmt: skip


def ends(batch: Sequence[End | Swap]) -> list[bytes]:
    """The values of ``rows.end_columns``, in its order."""
    length = len(batch)
    responses: list[Any] = list(map(_response, batch))
    try:
        bodies = list(map(_body, responses))
        kinds = set(map(_ending, batch))
    except AttributeError:  # one has no response
        bodies, kinds = [None], set()
    if len(kinds) != 1 or None in bodies:
        return [column.encode() for column in rows.end_columns(batch).values()]
    to_state, last_error, status, version = _of_all((Text, Text, Int4, Int4), kinds.pop(), length)
    headers = Text.header(length) + joined(list(map(orjson.dumps, map(_headers, responses))))
    return [
        _scopes(list(map(_scope, batch))), _texts(list(map(_key, batch))), _texts(list(map(_owner, batch))), to_state,
        status, headers, Bytea.header(length) + joined(bodies), version, last_error,
    ]  # fmt: skip


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
