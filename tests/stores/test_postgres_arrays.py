"""A batch goes to PostgreSQL as one array for each column: the same values, in one prepared statement."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import binary, builds, just, lists, none, sampled_from, text, tuples

from oncekey.core.record import Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event
from oncekey.core.swaps import swap
from oncekey.stores.postgres import PostgresStore, arrays, packing, rows
from tests.engine.doubles import reservation
from tests.stores.postgres import complete, put

_VALUES: dict[type[arrays.Column], tuple[str, list[Any]]] = {
    arrays.Text: ("text", ["", "a", "é 日本 \U0001f511", "'\"\\{},NULL", "NULL", None, " ", "x" * 70_000, "\n\t\x1f"]),
    arrays.Bytea: ("bytea", [b"", b"\x00", bytes(range(256)), None, b"\\x00", b"x" * 70_000]),
    arrays.Float8: ("float8", [0.0, -0.0, 1.5, -1e308, 5e-324, math.inf, -math.inf, None, math.pi, 2.0**53]),
    arrays.Int4: ("int4", [0, 1, -1, 2**31 - 1, -(2**31), None]),
    arrays.Bool: ("bool", [True, False, None]),
}


@pytest.mark.parametrize("kind", list(_VALUES), ids=lambda kind: kind.__name__)
def test_columns_equal_the_arrays_of_psycopg(store: PostgresStore, kind: type[arrays.Column]) -> None:
    """Element by element the server sees the same array, of the type of the column, as from psycopg's own list."""
    name, values = _VALUES[kind]
    own = store._connection()
    query = f"SELECT %s, %s::{name}[], %s = %s::{name}[]"
    for some in (values, values[:1], [None, None], []):
        cursor = own.execute(query, [kind(some), some, kind(some), some], binary=True)
        mine, theirs, same = cursor.fetchall()[0]
        assert same is True
        assert mine == theirs == some
        assert [str(value) for value in mine] == [str(value) for value in theirs]
        assert [column.type_code for column in cursor.description or ()][:2] == [kind.array_oid] * 2


def test_nan_is_sent_and_read(store: PostgresStore) -> None:
    """NaN is equal to nothing in Python, so it is compared by the server."""
    column = arrays.Float8([math.nan])
    assert store._connection().execute("SELECT %s = ARRAY['NaN'::float8]", [column]).fetchone() == (True,)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_a_number_that_does_not_fit_is_refused(value: int) -> None:
    """Never truncated."""
    with pytest.raises(Exception, match="format requires"):
        arrays.Int4([value]).encode()


def test_a_statement_is_prepared_once_whatever_it_carries(store: PostgresStore) -> None:
    """Columns full of None or of values, batches of one or many: one prepared statement each."""
    for size in (1, 2, 7):
        records = put(store, *(f"key-{size}-{number}" for number in range(size)))
        store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=9) for record in records])
        store.swap([complete(record) for record in records])
        store.read([(record.scope, record.key) for record in records])
    prepared = store._connection().execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
    assert prepared is not None
    assert prepared[0] <= 5


_TEXTS = text(max_size=8).filter(lambda value: "\0" not in value)
_SAME_OR_NOT = sampled_from(["a", "b"])


@given(
    batch=lists(
        builds(
            Reservation,
            scope=_SAME_OR_NOT | _TEXTS,
            key=_TEXTS,
            operation=_SAME_OR_NOT,
            fingerprint=binary(min_size=32, max_size=32),
            fingerprint_version=just(2),
            effects=sampled_from(Effects),
            owner=_TEXTS,
            lease_seconds=sampled_from([30.0, 1.5]),
            retention_seconds=just(86_400.0),
            fingerprint_recipe=none() | _SAME_OR_NOT,
            quarantine_seconds=none() | just(7.0),
            parts=none(),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_packed_reservations_equal_their_columns(batch: list[Reservation]) -> None:
    """Byte for byte, whether the rows of a batch agree or not."""
    assert packing.reservations(batch) == [column.encode() for column in rows.reservation_columns(batch).values()]


@given(
    responses=lists(
        none()
        | builds(
            StoredResponse,
            sampled_from([200, 201, 404]),
            lists(tuples(_TEXTS, _TEXTS), max_size=2).map(tuple),
            none() | binary(max_size=9),
            sampled_from([1, 2]),
        ),
        min_size=1,
        max_size=4,
    ),
    why=none() | _TEXTS,
)
def test_packed_ends_equal_their_columns(responses: list[StoredResponse | None], why: str | None) -> None:
    """Byte for byte; also of tombstones, and of an end without a response."""
    ends = [
        swap(reservation(f"k-{number}").record(1.0), Event.FAIL, Actor.OWNER, response=response, last_error=why)
        for number, response in enumerate(responses)
    ]
    assert packing.ends(ends) == [column.encode() for column in rows.end_columns(ends).values()]


def test_packed_text_with_a_nul_is_left_to_the_database() -> None:
    """It refuses the value; no other row of the batch gets a part of it."""
    batch = [reservation("a\0b"), reservation("c")]
    assert packing.reservations(batch) == [column.encode() for column in rows.reservation_columns(batch).values()]
