"""PostgreSQL finds keys by the primary key, whatever the table looks like: reserve and swap never read it whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
import pytest

from oncekey.core.record import Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event
from oncekey.core.swaps import swap
from oncekey.stores.postgres import PostgresStore, rows, statements
from oncekey.stores.postgres.arrays import Bool, Bytea, Column, Float8, Int4, Text
from oncekey.stores.postgres.connection import DeadlineConnection, connect

PRIMARY = "idempotency_keys_pkey"


def wanted(number: int) -> Reservation:
    return Reservation("ten", f"k-{number}", "POST /payments", b"f" * 32, 1, Effects.EXTERNAL, f"o-{number}", 60, 3600)


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    store.migrate()
    yield store
    store.close()


@pytest.fixture
def lane(store: PostgresStore, postgres_url: str) -> Iterator[DeadlineConnection]:
    """A connection with the settings of a lane's."""
    connection = connect(postgres_url, timeout=10.0, lock_timeout=0.5)
    yield connection
    connection.close()


def fill(url: str, count: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state,"
            " attempt, owner, lease_until, created_at, retention_seconds, expires_at)"
            " SELECT 'ten', 'k-' || n, 'POST /payments', repeat('f', 32)::bytea, 1, 'external', 'in_progress', 1,"
            " 'o-' || n, now() + interval '1 minute', now(), 3600, now() + interval '1 hour'"
            " FROM generate_series(1, %s) AS n",
            [count],
        )
        connection.execute("ANALYZE idempotency_keys")


def nodes(plan: Any) -> Iterator[dict[str, Any]]:
    """Every node of a plan."""
    yield plan
    for below in plan.get("Plans", []):
        yield from nodes(below)


TYPES = {Text: "text[]", Bytea: "bytea[]", Int4: "integer[]", Float8: "float8[]", Bool: "boolean[]"}


def explain(connection: DeadlineConnection, statement: str, parameters: Mapping[str, Column]) -> list[dict[str, Any]]:
    """The nodes of the plan that a lane uses: of the prepared statement, whatever the length of the arrays.

    Not ``EXPLAIN`` with the parameters: that plans for these very arrays, as a lane never does.
    """
    numbers = {name: number for number, name in enumerate(parameters, start=1)}
    text = re.sub(r"%\((\w+)\)s", lambda found: f"${numbers[found[1]]}", statement)
    types = ", ".join(TYPES[type(column)] for column in parameters.values())
    nulls = ", ".join("NULL" for _ in parameters)
    connection.execute(f"PREPARE looked_at ({types}) AS {text}".encode())
    row = connection.execute(f"EXPLAIN (FORMAT JSON, VERBOSE) EXECUTE looked_at ({nulls})".encode()).fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    return list(nodes(plan[0]["Plan"]))


def assert_by_primary_key(found: list[dict[str, Any]]) -> None:
    scans = [node for node in found if node.get("Relation Name") == "idempotency_keys" and "Scan" in node["Node Type"]]
    assert scans, "the plan does not read the table"
    for node in scans:
        if node["Node Type"] == "Tid Scan":  # the row that the look-up has found and locked, by its place
            assert "ctid = " in node["TID Cond"], node
            continue
        assert node["Node Type"] in ("Index Scan", "Index Only Scan"), node
        assert node["Index Name"] == PRIMARY, node
        condition = node.get("Index Cond", "")  # without one it is the whole index that is read
        assert "scope = " in condition, node
        assert "key = " in condition, node
    assert not [node for node in found if node["Node Type"] in ("Hash Join", "Merge Join")]


@pytest.mark.parametrize("rows_there", [0, 3, 10_000], ids=["empty", "few-rows", "10000-rows"])
def test_reserve_uses_the_primary_key(
    store: PostgresStore, lane: DeadlineConnection, postgres_url: str, rows_there: int
) -> None:
    """``EXPLAIN`` of reserve: an index scan by (scope, key) for the anti-join, the insert's check and the read."""
    if rows_there:
        fill(postgres_url, rows_there)
    assert_by_primary_key(explain(lane, statements.RESERVE, rows.reservation_columns([wanted(1)])))
    lane.execute("DEALLOCATE looked_at")
    found = explain(lane, statements.RESERVE_POLITELY, rows.reservation_columns([wanted(1)]))
    assert_by_primary_key(found)
    insert = next(node for node in found if node["Node Type"] == "ModifyTable")
    assert insert["Conflict Resolution"] == "NOTHING"
    assert insert["Conflict Arbiter Indexes"] == [PRIMARY]


@pytest.mark.parametrize("rows_there", [0, 3, 10_000], ids=["empty", "few-rows", "10000-rows"])
def test_swap_uses_the_primary_key(
    store: PostgresStore, lane: DeadlineConnection, postgres_url: str, rows_there: int
) -> None:
    """``EXPLAIN`` of swap: locked and updated by (scope, key), in the order of the key."""
    if rows_there:
        fill(postgres_url, rows_there)
    record = store.reserve([wanted(10_001)])[0].record
    assert record is not None
    change = swap(record, Event.COMPLETE, Actor.OWNER, response=StoredResponse(201, (), b"{}"))
    for statement, columns in (
        (statements.END, rows.end_columns([change])),
        (statements.SWAP, rows.swap_columns([change])),
    ):
        found = explain(lane, statement, columns)
        assert_by_primary_key(found)
        assert any(node.get("Index Name") == PRIMARY for node in found)
        assert any(node["Node Type"] == "LockRows" for node in found)
        lane.execute("DEALLOCATE looked_at")


def test_the_primary_key_is_scope_then_key(store: PostgresStore, postgres_url: str) -> None:
    """(tenant, key) is the unique constraint, in that order, compared as bytes."""
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute("SELECT pg_get_indexdef(%s::regclass)", [PRIMARY]).fetchone()
        assert row is not None
        assert row[0].endswith("USING btree (scope, key)")
        assert "UNIQUE" in row[0]
        collations = connection.execute(
            "SELECT attname, collname FROM pg_attribute JOIN pg_collation ON pg_collation.oid = attcollation"
            " WHERE attrelid = 'idempotency_keys'::regclass AND attname IN ('scope', 'key') ORDER BY attname"
        ).fetchall()
    assert collations == [("key", "C"), ("scope", "C")]
