"""What stands beside the keys in the SQL stores: plans, upgrades with rows inside, jobs that webhooks ask for.

A plan is looked at as a lane uses it: of the prepared statement, in an empty, a small and a large table.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncekey.core.audit import Audit
from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.errors import StoreError
from oncekey.stores.api import Duty
from oncekey.stores.postgres import PostgresStore, rows, statements
from oncekey.stores.postgres import lookups as postgres_lookups
from oncekey.stores.postgres.arrays import Bool, Bytea, Column, Float8, Int4, Text
from oncekey.stores.postgres.connection import DeadlineConnection, connect
from oncekey.stores.sql import queries
from oncekey.stores.sqlite import SqliteStore, schema
from oncekey.stores.sqlite import lookups as sqlite_lookups
from oncekey.stores.sqlite import store as sqlite_store
from tests.engine.doubles import RESPONSE, record_of, reservation

STEP = Step("charge", StepKind.EFFECT, StepState.DONE, repeatable=True, result=b"{}", downstream_key="dk")

_OWN = {
    State.IN_PROGRESS: "keys_leases",
    State.PENDING: "keys_abandoned",
    State.UNKNOWN: "keys_unknowns",
    State.EXPIRED: "keys_tombstones",
}
"""The states that have an index of their own."""


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(postgres_url)) as store:
        store.migrate()
        yield store


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(tmp_path / "keys.db")) as store:
        store.migrate()
        yield store


# ---------------------------------------------------------------- plans on PostgreSQL

_TYPES = {Text: "text[]", Bytea: "bytea[]", Int4: "integer[]", Float8: "float8[]", Bool: "boolean[]"}

FILL = """
INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner,
    lease_until, recovery_point, reconcile_at, created_at, retention_seconds, expires_at)
SELECT 'ten', 'k-' || n, 'POST /payments', repeat('f', 32)::bytea, 1, 'external',
    CASE WHEN n % 500 = 0 THEN ('{{in_progress,pending,unknown,failed_retryable,expired}}'::text[])[1 + n / 500 % 5]
        ELSE 'completed' END,
    1, 'o-' || n, now() + interval '1 minute', CASE WHEN n % 500 = 0 THEN 'started' END, now(), now(), 3600,
    now() + (n - 5000) * interval '1 minute'
FROM generate_series(1, {count}) AS n;
INSERT INTO idempotency_steps (scope, key, name, kind, state, repeatable, downstream_key, provider_id)
SELECT 'ten', 'k-' || n, 'charge', 'effect', 'done', true, 'dk-' || n, 'ch-' || n FROM generate_series(1, {count}) AS n;
INSERT INTO idempotency_outbox
    (id, scope, key, key_owner, operation, task, payload, downstream_key, provider_id, run_at)
SELECT 'job-' || n, 'ten', 'k-' || n, 'o', 'POST /', 'send', '{{}}', 'dk-' || n, 'ch-' || n, now()
FROM generate_series(1, {count}) AS n;
INSERT INTO idempotency_audit (who, event, scope, key, before, why)
SELECT 'ana', 'forget', 'ten', 'k-' || n, 'completed', 'why' FROM generate_series(1, {count}) AS n;
ANALYZE
"""


def _seen(key: str, state: State) -> Record:
    return replace(record_of(reservation(key)), state=state)


def _moves() -> dict[str, Swap]:
    done = _seen("k-1", State.COMPLETED)
    again = swap(done, Event.RESERVE, Actor.REQUEST, reservation=reservation("k-1"))
    return {
        "beside": swap(_seen("k-1", State.IN_PROGRESS), Event.ADVANCE, Actor.OWNER, step=STEP, audit=Audit("a", "b")),
        "remove": swap(done, Event.FORGET, Actor.OPERATOR),
        "restart": again,
    }


def _plans(store: PostgresStore) -> dict[str, tuple[str, Mapping[str, Any], set[str]]]:
    """Each statement, its parameters, and the indexes that it may use."""
    moves = _moves()
    by_key = {"keys_pkey", "steps_pkey"}
    limit = {"limit": 5}
    asked = {"scope": "ten", "operation": None, "older_than": None, "limit": 5, "after_scope": "", "after_key": ""}
    two = {"scope": Text(["ten"]), "key": Text(["k-1"])}
    found: dict[str, tuple[str, Mapping[str, Any], set[str]]] = {
        "swap_beside": (store._swap_beside, rows.beside_columns([moves["beside"]]), by_key),
        "remove": (store._remove, rows.removal_columns([moves["remove"]]), by_key),
        "restart": (store._restart, rows.restart_columns([moves["restart"]]), by_key),
        "purge": (
            store._purge,
            limit | {"expired_state_only": False},
            {"keys_expired", "keys_tombstones", "steps_pkey"},
        ),
        "steps": (postgres_lookups._STEPS, two, {"steps_pkey"}),
        "audit": (postgres_lookups._AUDIT, {"scope": "ten", "key": "k-1", "limit": 5}, {"audit_key"}),
        "find": (
            postgres_lookups._FIND,
            {"downstream_key": "dk-1", "provider_id": "ch-1", "limit": 5},
            {"steps_downstream", "steps_provider", "outbox_downstream", "outbox_provider"},
        ),
        "counts": (postgres_lookups._COUNTS, limit, {*_OWN.values(), "keys_lapsed", "keys_expired"}),
        "waiting": (postgres_lookups._WAITING, limit, {"keys_leases", "keys_unknowns", "keys_lapsed"}),
        "listing": (postgres_lookups.listing_statement(None, None), asked, {"keys_pkey"}),
        "listing of a scope": (postgres_lookups.listing_statement(None, "ten"), asked, {"keys_pkey"}),
    }
    for state in State:
        # Without an index of its own: in the order of the keys, or, of few, the final ones and then sorted.
        index = {_OWN[state]} if state in _OWN else {"keys_pkey", "keys_expired"}
        found[f"listing {state}"] = (postgres_lookups.listing_statement(state, None), asked, index)
    for duty in Duty:
        found[f"due {duty}"] = (store._due[duty], limit, {f"keys_{duty}"})
    turns = {"state": "unknown", "after": "", "scope": Text(["ten"]), "limit": 5}
    found["fair scopes"] = (store._fair_scopes, turns, {"keys_turns"})
    found["fair keys"] = (store._fair_keys, turns, {"keys_turns"})
    old = {"keep_seconds": 1.0, "limit": 5}
    found["purge of the audit"] = (store._purge_audit, old, {"audit_at", "audit_pkey", "keys_pkey"})
    return found


def _nodes(plan: Any) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", []):
        yield from _nodes(below)


def _explain(lane: DeadlineConnection, statement: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    numbers = {name: number for number, name in enumerate(parameters, start=1)}
    used = set(re.findall(r"%\((\w+)\)s", statement))
    assert used <= set(numbers)
    text = re.sub(r"%\((\w+)\)s", lambda found: f"${numbers[found[1]]}", statement)
    # A parameter that this form of the statement does not use has no type to be found out.
    types = [
        _TYPES[type(value)] if isinstance(value, Column) else "unknown" if name in used else "text"
        for name, value in parameters.items()
    ]
    lane.execute(f"PREPARE looked_at ({', '.join(types)}) AS {text}".encode())
    nulls = ", ".join("NULL" for _ in parameters)
    row = lane.execute(f"EXPLAIN (FORMAT JSON) EXECUTE looked_at ({nulls})".encode()).fetchone()
    lane.execute("DEALLOCATE looked_at")
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    return list(_nodes(plan[0]["Plan"]))


@pytest.mark.parametrize("count", [0, 3, 10_000], ids=["empty", "few-rows", "10000-rows"])
def test_every_statement_of_postgres_uses_its_index(postgres: PostgresStore, postgres_url: str, count: int) -> None:
    """No table and no index over all keys is ever read whole, whatever the statistics say."""
    if count:
        with psycopg.connect(postgres_url, autocommit=True) as own:
            own.execute(FILL.format(count=count).encode())
    with closing(connect(postgres_url, timeout=10.0, lock_timeout=0.5)) as lane:
        for name, (statement, parameters, allowed) in _plans(postgres).items():
            used = set()
            for node in _explain(lane, statement, parameters):
                assert node["Node Type"] not in ("Seq Scan", "Hash Join", "Merge Join"), (name, node)
                if index := node.get("Index Name", "").removeprefix("idempotency_"):
                    used.add(index)
                    assert not index.endswith("_pkey") or "Index Cond" in node, (name, node)
            one_of = name.startswith("listing")
            assert used, name
            assert used <= allowed if one_of else used == allowed, (name, used)


def test_a_move_without_anything_beside_it_takes_the_narrow_statement(
    postgres: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a request waits for knows nothing of steps, audit and tries; one odd swap does not widen the others'."""
    record, other = (postgres.reserve([reservation(key)])[0].record for key in ("a", "b"))
    assert record is not None
    assert other is not None
    ran: list[str] = []
    real = postgres._execute

    def execute(statement: Any, parameters: Any) -> Any:
        ran.append(statement)
        return real(statement, parameters)

    monkeypatch.setattr(postgres, "_execute", execute)
    step = swap(other, Event.ADVANCE, Actor.OWNER, step=STEP, recovery_point="started")
    assert None not in postgres.swap([step, swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])
    assert ran == [statements.END, postgres._swap_beside]
    for word in ("steps", "audit", "reconcile_tries", "step_name", "who"):
        assert word not in re.sub("--.*", "", statements.END)


def test_every_part_of_a_statement_is_put_in(postgres: PostgresStore) -> None:
    """No mark is left in what is sent."""
    texts = [getattr(postgres, name) for name in ("_swap_beside", "_remove", "_restart", "_purge", "_read")]
    texts += [statements.RESERVE, statements.RESERVE_POLITELY, statements.END, statements.SWAP]
    texts += [postgres_lookups.listing_statement(None, None), statements.SLIM]
    for text in texts:
        assert not re.search(r"\{\w+\}", text), text


# ---------------------------------------------------------------- plans on SQLite


def _sqlite_plans() -> dict[str, tuple[str, int, set[str]]]:
    """Each statement, how many parameters it takes, and what its plan must name."""
    steps, keys = "sqlite_autoindex_idempotency_steps_1", "sqlite_autoindex_idempotency_keys_1"
    found = {
        "forget": (sqlite_store._FORGET_STEPS, 2, {steps}),
        "doomed keys": (sqlite_store._DOOMED_KEYS, 2, {"idempotency_keys_expired"}),
        "doomed tombstones": (sqlite_store._DOOMED_TOMBSTONES, 2, {"idempotency_keys_tombstones"}),
        "steps": (sqlite_lookups._STEPS, 2, {steps}),
        "audit": (sqlite_lookups._AUDIT, 3, {"idempotency_audit_key"}),
        "find": (
            sqlite_lookups._FIND,
            3,
            {
                "idempotency_steps_downstream",
                "idempotency_steps_provider",
                "idempotency_outbox_downstream",
                "idempotency_outbox_provider",
            },
        ),
        "listing": (sqlite_lookups.listing_statement(None, None), 6, {keys}),
        "fair scopes": (sqlite_store._FAIR_SCOPES, 3, {"idempotency_keys_turns"}),
        "fair keys": (sqlite_store._FAIR_KEYS, 4, {"idempotency_keys_turns"}),
        "purge of the audit": (sqlite_store._PURGE_AUDIT, 2, {"idempotency_audit_at", keys}),
        "listing of a scope": (sqlite_lookups.listing_statement(None, "ten"), 6, {keys}),
    }
    for state in State:
        index = f"idempotency_{_OWN[state]}" if state in _OWN else keys
        found[f"listing {state}"] = (sqlite_lookups.listing_statement(state, None), 6, {index})
    return found


@pytest.mark.parametrize("name", list(_sqlite_plans()))
def test_every_statement_of_sqlite_uses_its_index(sqlite: SqliteStore, name: str) -> None:
    """A partial index is taken only where its condition is repeated word for word; nothing else is read whole."""
    statement, places, indexes = _sqlite_plans()[name]
    with closing(sqlite3.connect(sqlite.path)) as own:
        plan = "\n".join(row[3] for row in own.execute(f"EXPLAIN QUERY PLAN {statement}", (1,) * places))
    used = set(re.findall(r"INDEX (\w+)", plan))
    assert used == indexes, plan
    for line in plan.splitlines():
        whole = line.startswith("SCAN idempotency")
        assert not whole or (name.startswith("listing") and "INDEX idempotency_keys_" in line), plan


# ---------------------------------------------------------------- upgrades

OLD_ROW = (
    "INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt,"
    " owner, lease_until, recovery_point, created_at, retention_seconds, expires_at)"
    " VALUES ('tenant', '{key}', 'POST /', {bytes}, 1, 'phased', '{state}', 1,"
    " 'owner', {now}, {point}, {now}, 60, {now})"
)
_OLD = [("done", "completed", "NULL"), ("half", "failed_retryable", "'charged'"), ("running", "in_progress", "NULL")]


def _old_rows(now: str, some_bytes: str) -> list[str]:
    return [OLD_ROW.format(key=key, state=state, point=point, now=now, bytes=some_bytes) for key, state, point in _OLD]


def _works_after_the_upgrade(store: PostgresStore | SqliteStore) -> None:
    """The old rows are what they were; what the new tables are for works on them."""
    found = store.read([("tenant", key) for key, _, _ in _OLD])
    assert [row and row.state for row in found] == [state for _, state, _ in _OLD]
    assert [row.key for row in store.due(Duty.LAPSED, 10)] == ["half"]
    running = found[2]
    assert running is not None
    change = swap(running, Event.ADVANCE, Actor.OWNER, step=STEP, recovery_point="started", audit=Audit("ana", "why"))
    assert store.swap([change]) != [None]
    assert store.steps([StepsOf("tenant", "running"), StepsOf("tenant", "half")]) == [[STEP], []]
    assert [line.who for line in store.audit("tenant", "running", 10)] == ["ana"]
    assert store.purge(10) == 1
    assert store.migrate() == []


def test_a_postgres_of_the_first_schema_is_upgraded_with_its_rows(postgres_url: str) -> None:
    """0001 with keys inside, then `oncekey migrate`: the new tables are there, and no row is lost."""
    first, *later = queries.migrations(statements.PACKAGE)
    with psycopg.connect(postgres_url, autocommit=True) as own:
        own.execute(first.sql.encode())
        own.execute(
            "CREATE TABLE oncekey_schema "
            "(number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
        own.execute("INSERT INTO oncekey_schema (number, name) VALUES (%s, %s)", [first.number, first.name])
        for statement in _old_rows("now()", "''"):
            own.execute(statement.encode())
    with closing(PostgresStore(postgres_url)) as store:
        assert store.migrate() == [f"{one.number:04d}_{one.name}" for one in later]
        _works_after_the_upgrade(store)


def test_a_sqlite_file_of_the_first_schema_is_upgraded_with_its_rows(tmp_path: Path) -> None:
    """0001 with keys inside: opening it is enough, and no row is lost."""
    first, *later = queries.migrations(schema.PACKAGE)
    with closing(sqlite3.connect(tmp_path / "keys.db")) as own, own:
        own.executescript(first.sql)
        own.execute("INSERT INTO oncekey_schema VALUES (?, ?, 0)", (first.number, first.name))
        for statement in _old_rows("1.0", "x''"):
            own.execute(statement)
    with closing(SqliteStore(tmp_path / "keys.db")) as store:
        assert store.migrate() == [f"{one.number:04d}_{one.name}" for one in later]
        _works_after_the_upgrade(store)


# ---------------------------------------------------------------- jobs, and values that cannot be kept

JOB = (
    "INSERT INTO idempotency_outbox (id, scope, key, key_owner, operation, task, payload, downstream_key, run_at,"
    " created_at, provider_id)"
    " VALUES ('job', 'tenant-2', 'of-a-job', 'o', 'POST /', 'send', '[]', 'dk', {now}, {now}, 'ch')"
)


def _finds_jobs_too(store: PostgresStore | SqliteStore) -> None:
    record = store.reserve([reservation("of-a-step")])[0].record
    assert record is not None
    step = replace(STEP, provider_id="ch")
    assert store.swap([swap(record, Event.ADVANCE, Actor.OWNER, step=step, recovery_point="started")]) != [None]
    both = [("tenant-1", "of-a-step"), ("tenant-2", "of-a-job")]
    assert store.find(downstream_key="dk") == store.find(provider_id="ch") == both
    assert store.find(downstream_key="dk", provider_id="ch_absent") == both


def test_a_webhook_finds_the_key_of_a_job_on_postgres(postgres: PostgresStore, postgres_url: str) -> None:
    """What a worker's task sent, or recorded, leads to the key as well."""
    with psycopg.connect(postgres_url, autocommit=True) as own:
        own.execute(JOB.format(now="now()").encode())
    _finds_jobs_too(postgres)


def test_a_webhook_finds_the_key_of_a_job_on_sqlite(sqlite: SqliteStore) -> None:
    """The same there."""
    with closing(sqlite3.connect(sqlite.path)) as own, own:
        own.execute(JOB.format(now="0.0"))
    _finds_jobs_too(sqlite)


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_a_result_that_is_no_text_is_refused_and_moves_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    """It is an error of that row, not of the store: the lane tries the others alone (hazard 25)."""
    store: PostgresStore | SqliteStore = request.getfixturevalue(kind)
    record = store.reserve([reservation("a")])[0].record
    assert record is not None
    bad = replace(STEP, result=b"\xff")
    with pytest.raises(StoreError, match="result of a step is not valid text"):
        store.swap([swap(record, Event.ADVANCE, Actor.OWNER, step=bad, recovery_point="started")])
    after = store.read([(record.scope, record.key)])[0]
    assert after is not None
    assert after.recovery_point is None
    assert store.steps([StepsOf(record.scope, record.key)]) == [[]]


def test_a_step_that_this_version_does_not_know_is_an_error_of_ours(sqlite: SqliteStore) -> None:
    """Written by a newer oncekey: never taken for a step that is not done."""
    with closing(sqlite3.connect(sqlite.path)) as own, own:
        own.execute(
            "INSERT INTO idempotency_steps (scope, key, name, kind, state, repeatable, created_at)"
            " VALUES ('tenant-1', 'a', 'charge', 'effect', 'halfway', 0, 0)"
        )
    with pytest.raises(StoreError, match=r"'halfway'.*does not know"):
        sqlite.steps([StepsOf("tenant-1", "a")])
