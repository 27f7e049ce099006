"""A batch goes to PostgreSQL as one array for each column: the same values, in one prepared statement."""

from __future__ import annotations

import math
from typing import Any

import pytest

from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.stores.postgres import PostgresStore, arrays
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
