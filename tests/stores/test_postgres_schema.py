"""Our tables on PostgreSQL: what the migrations make, and what is said of tables that are missing, older or newer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count

import psycopg
import pytest

from oncekey.core.states import Actor, Event
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.core.swaps import swap
from oncekey.errors import SchemaError, StoreError
from oncekey.stores.api import Duty
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sql import queries
from tests.engine.doubles import PATIENCE, eventually
from tests.stores.postgres import VERBS, opened, put

MIGRATIONS = [f"{one.number:04d}_{one.name}" for one in queries.migrations("oncekey.stores.postgres")]
_numbers = count(1)


# ---------------------------------------------------------------- the tables


@pytest.fixture
def fresh(url: str) -> Iterator[PostgresStore]:
    """For tests that change its tables."""
    with opened(url) as store:
        store.migrate()
        yield store


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("DROP TABLE oncekey_schema", "has no oncekey tables yet: run `oncekey migrate`"),
        ("DROP TABLE idempotency_keys", "without its idempotency_keys: restore that from a backup"),
        ("DROP TABLE idempotency_steps, idempotency_audit", "without its idempotency_audit, idempotency_steps"),
        ("DELETE FROM oncekey_schema", "has no oncekey tables yet"),
        ("DELETE FROM oncekey_schema WHERE number != 1", "has oncekey schema 0001 and this version needs 000"),
        ("UPDATE oncekey_schema SET number = 9999 WHERE number = 1", "has oncekey schema 9999, newer than the"),
    ],
)
def test_wrong_tables_are_refused_with_the_command_to_run(
    fresh: PostgresStore, url: str, change: str, sentence: str
) -> None:
    """Missing, older, newer: every verb of a fresh connection says so before it touches a row."""
    with psycopg.connect(url, autocommit=True) as own:
        own.execute(change)
    with opened(url) as other:
        for verb in ("reserve", "read", "check"):
            with pytest.raises(SchemaError) as caught:
                VERBS[verb](other)
            assert sentence in str(caught.value)
            assert str(caught.value).startswith("PostgreSQL database shared at 127.0.0.1:")


def test_tables_that_change_under_a_connection_are_noticed(fresh: PostgresStore, url: str) -> None:
    """Dropped or altered after the check: a SchemaError with what to run, not a driver's message."""
    put(fresh, "a")
    with psycopg.connect(url, autocommit=True) as own:
        own.execute("ALTER TABLE idempotency_keys DROP COLUMN reconcile_tries")
        with pytest.raises(SchemaError, match="has an older oncekey schema: run `oncekey migrate`"):
            fresh.due(Duty.UNKNOWNS, 1)
        own.execute("DROP TABLE idempotency_keys")
        with pytest.raises(SchemaError, match=r"has not all tables of oncekey\. If they were there before.*backup"):
            fresh.due(Duty.LEASES, 1)


def test_the_advice_for_a_table_that_is_gone_is_followed(fresh: PostgresStore, url: str) -> None:
    """``oncekey migrate`` fails with the same message. When the other tables are dropped too, it makes all of them."""
    with psycopg.connect(url, autocommit=True) as own:
        own.execute("DROP TABLE idempotency_keys")
        with opened(url) as other, pytest.raises(SchemaError, match="drop oncekey_schema and every idempotency_ table"):
            other.migrate()
        own.execute("DROP TABLE oncekey_schema, idempotency_steps, idempotency_outbox, idempotency_audit")
    with opened(url) as other:
        assert len(other.migrate()) == len(MIGRATIONS)
        put(other, "a")


def test_the_rights_that_the_docs_name_are_enough(fresh: PostgresStore, url: str) -> None:
    """And without them the message says where to read about them. The moves of a request, a step, a job and upkeep."""
    with psycopg.connect(url, autocommit=True) as own:
        own.execute("DROP ROLE IF EXISTS clerk")
        own.execute("CREATE ROLE clerk LOGIN")
        clerk = url.replace("postgres@", "clerk@")
        own.execute("GRANT SELECT ON oncekey_schema TO clerk")
        with opened(clerk) as store, pytest.raises(StoreError, match=r"docs/stores\.md"):
            put(store, "a")
        own.execute(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys, idempotency_steps, idempotency_outbox, "
            "idempotency_audit TO clerk"
        )
        try:
            with opened(clerk) as store:
                (record,) = put(store, "a")
                step = Step("charge", StepKind.EFFECT, StepState.DONE, repeatable=False)
                advance = swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="charge", step=step)
                assert store.swap([advance])[0] is not None
                assert store.swap([swap(record, Event.DOUBT, Actor.OWNER)])[0] is not None
                assert store.claim("w", ["t"], 1, 1.0) == []
                assert store.purge(10) == 0
        finally:
            own.execute("DROP OWNED BY clerk")
            own.execute("DROP ROLE clerk")


# ---------------------------------------------------------------- migrating


def test_a_migration_that_fails_leaves_nothing(url: str) -> None:
    """The app has a table of that name: an error in our words, and not a half-made schema."""
    with psycopg.connect(url, autocommit=True) as own:
        own.execute("CREATE TABLE idempotency_keys (id integer)")
        with opened(url) as store:
            with pytest.raises(StoreError, match="DuplicateTable"):
                store.migrate()
            assert own.execute("SELECT to_regclass('oncekey_schema')").fetchone() == (None,)
            own.execute("DROP TABLE idempotency_keys")
            assert store.migrate() == MIGRATIONS


def test_a_migration_waits_for_another_one(url: str) -> None:
    """Another process migrates, for longer than a lane would wait for a row: this one goes on when that one is done."""
    with (
        opened(url) as store,
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(url) as other,
        psycopg.connect(url, autocommit=True) as watcher,
    ):
        other.execute("SELECT pg_advisory_xact_lock(%s)", [0x6F6E63656B6579])

        def migrate() -> list[str]:
            try:
                return store.migrate()
            finally:
                store.disconnect()

        migrating: Future[list[str]] = pool.submit(migrate)
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        eventually(lambda: watcher.execute(waiting).fetchone() == (1,) or migrating.done())
        wait([migrating], timeout=0.8)
        other.commit()
        assert migrating.result(PATIENCE) == MIGRATIONS


def test_migration_that_waits_for_a_slow_handler_refuses_no_request(
    fresh: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ALTER TABLE waits for an open transaction, and everybody behind it: so it gives up soon, and tries again."""
    known = queries.migrations("oncekey.stores.postgres")
    later = queries.Migration(known[-1].number + 1, "more", "ALTER TABLE idempotency_keys ADD COLUMN more text")
    put(fresh, "a")
    with ThreadPoolExecutor(1) as pool, psycopg.connect(url) as handler, psycopg.connect(url, autocommit=True) as own:
        handler.execute("SELECT 1 FROM idempotency_keys FOR UPDATE")
        with monkeypatch.context() as patch, opened(url) as newer:
            patch.setattr(queries, "migrations", lambda package: [*known, later])

            def migrate() -> list[str]:
                try:
                    return newer.migrate()
                finally:
                    newer.disconnect()

            migrating = pool.submit(migrate)
            waiting = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted"
            for number in range(2):  # it tries again and again, and requests pass all the time
                eventually(lambda: own.execute(waiting).fetchone() == (1,) or migrating.done())
                put(fresh, f"b-{number}")
                assert not migrating.done()
                eventually(lambda: own.execute(waiting).fetchone() == (0,))
            handler.rollback()
            assert migrating.result(PATIENCE) == [str(later)]
