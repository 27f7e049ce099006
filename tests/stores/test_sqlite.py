"""The SQLite store: the public suite, and what is true of SQLite alone."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from oncekey.core.record import Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import StepsOf
from oncekey.core.swaps import swap
from oncekey.errors import ConfigurationError, SchemaError, StoreError, StoreUnavailable
from oncekey.stores.api import Duty
from oncekey.stores.sql import queries
from oncekey.stores.sqlite import SqliteStore, schema
from oncekey.stores.sqlite import store as store_module
from oncekey.testing.store_suite import Clock, StoreSuite

RESPONSE = StoredResponse(200, (("content-type", "text/plain"),), b"done")


class TestSqliteStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "keys.db"

    def make_store(self) -> SqliteStore:
        return SqliteStore(self.path, clock=self.clock)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(path)) as store:
        yield store


def wanted(key: str = "key-1", **changes: object) -> Reservation:
    base = Reservation("tenant", key, "POST /", b"f" * 32, 1, Effects.EXTERNAL, f"owner of {key}", 60.0, 3600.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def completed(store: SqliteStore, key: str = "key-1", **changes: object) -> None:
    record = store.reserve([wanted(key, **changes)])[0].record
    assert record
    assert store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])[0]


def traced(store: SqliteStore) -> list[str]:
    """The statements that the calling thread's connection runs from now on."""
    statements: list[str] = []
    with store.connections.use() as connection:
        connection.set_trace_callback(statements.append)
    return statements


def pragma(store: SqliteStore, name: str) -> object:
    with store.connections.use() as connection:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]


# settings


def test_the_settings_that_the_promises_hang_on_are_set(store: SqliteStore) -> None:
    """WAL, an fsync per commit, foreign keys, and a bounded wait, on the connection that is really used."""
    names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    assert [pragma(store, name) for name in names] == ["wal", 2, 1, 5000]


@pytest.mark.parametrize("name", [":memory:", "", ".", "file:keys.db?mode=memory"])
def test_a_path_that_is_no_file_is_refused(name: str) -> None:
    """A database that every connection has for itself would be a store that forgets: use memory://."""
    with pytest.raises(ConfigurationError, match="memory://"):
        SqliteStore(name)


def test_a_time_limit_must_be_positive(path: Path) -> None:
    """Zero would mean to give up before asking."""
    with pytest.raises(ConfigurationError, match="timeout=0"):
        SqliteStore(path, timeout=0)


def test_a_change_of_folder_does_not_change_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the folder in which the store was made."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with closing(SqliteStore("keys.db")) as store:
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.migrate()
    assert (tmp_path / "keys.db").exists()


# transactions


def test_a_batch_is_one_immediate_transaction(store: SqliteStore) -> None:
    """One BEGIN IMMEDIATE and one COMMIT for many rows: one fsync, and no upgrade from a read (hazard 23)."""
    store.migrate()
    statements = traced(store)
    found = store.reserve([wanted(f"key-{number}") for number in range(50)])
    records = [answer.record for answer in found if answer.record]
    store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=60.0) for record in records])
    words = [statement.split()[0:2] for statement in statements]
    assert [word for word in words if word[0] in ("BEGIN", "COMMIT")] == [["BEGIN", "IMMEDIATE"], ["COMMIT"]] * 2
    writes = [index for index, text in enumerate(statements) if "INSERT INTO" in text or "UPDATE " in text]
    assert len(writes) == 100
    assert min(writes) > words.index(["BEGIN", "IMMEDIATE"])


def test_replay_does_not_wait_for_a_locked_file(store: SqliteStore, path: Path) -> None:
    """While another process holds the file, finding, reading and listing go on; only a new key must wait."""
    completed(store)
    store.timeout = 0.05
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with store.connections.use() as connection:
            connection.execute("PRAGMA busy_timeout = 50")
        found = store.reserve([wanted(owner="another-owner")])[0].record
        assert found
        assert (found.state, found.response) == (State.COMPLETED, RESPONSE)
        assert store.read([("tenant", "key-1")]) != [None]
        assert store.due(Duty.EXPIRED, 10) == []
        assert store.steps([StepsOf("tenant", "key-1")]) == [[]]
        assert store.audit("tenant", "key-1", 1) == []
        assert [row.key for row in store.listing(State.COMPLETED)] == ["key-1"]
        assert (store.find(provider_id="x"), store.counts().counts[State.COMPLETED]) == ([], 1)
        with pytest.raises(StoreUnavailable):
            store.reserve([wanted("new")])


@pytest.mark.parametrize("lock", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_locked_file_is_unavailable_within_the_limit(path: Path, lock: str) -> None:
    """Another process that keeps the write lock costs the time limit and a clear sentence, no more."""
    with (
        closing(SqliteStore(path, timeout=0.2)) as store,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        record = store.reserve([wanted()])[0].record
        assert record
        other.execute(lock)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"locked by another writer for over 0\.2 s"):
            store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=60.0)])
        assert 0.15 < time.monotonic() - began < 4, "the default is 5 s"
        other.execute("ROLLBACK")
        assert store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=60.0)]) != [None]


def test_a_file_locked_before_the_first_use_is_unavailable_within_the_limit(path: Path) -> None:
    """Also opening is bounded: the switch to WAL does not heed SQLite's own time-out."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE business (id)")
        other.execute("BEGIN EXCLUSIVE")
        with closing(SqliteStore(path, timeout=0.1)) as store:
            with pytest.raises(StoreUnavailable, match="locked by another writer"):
                store.check()
            other.execute("ROLLBACK")
            store.check()


def test_a_held_gate_is_unavailable_within_the_limit(path: Path) -> None:
    """A transaction of this process that never ends costs the time limit; reading goes on."""
    with closing(SqliteStore(path, timeout=0.05)) as store:
        completed(store)
        assert store.gate.acquire(0, lane=False)
        with pytest.raises(StoreUnavailable, match="another transaction of this process"):
            store.purge(1)
        assert store.read([("tenant", "key-1")]) != [None]
        store.gate.release()
        assert store.purge(1) == 0


def test_the_wait_at_the_gate_is_taken_off_the_wait_for_the_lock(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both waits share one limit; afterwards SQLite's own time-out is as before."""
    store.migrate()
    monkeypatch.setattr(store_module, "_PATIENCE_STEP", -1.0)
    statements = traced(store)
    store.purge(1)
    patience = [int(text.split()[-1]) for text in statements if text.startswith("PRAGMA busy_timeout")]
    assert patience[0] < 5000 == patience[1]
    assert pragma(store, "busy_timeout") == 5000


def test_batch_with_a_bad_row_writes_nothing_and_holds_no_lock(store: SqliteStore) -> None:
    """All or nothing, with an error that is not sqlite3's; row by row the good ones then pass (hazard 25)."""
    with pytest.raises(StoreError, match="not valid text"):
        store.reserve([wanted("good"), wanted("lone \ud800")])
    with pytest.raises(StoreError, match="not valid text"):
        store.reserve([wanted("good"), wanted("huge", operation="\ud800")])
    assert store.read([("tenant", "good")]) == [None]
    completed(store, "good")
    record = store.reserve([wanted("other")])[0].record
    assert record
    bad = replace(RESPONSE, headers=(("x", "\ud800"),))
    with pytest.raises(StoreError, match="header"):
        store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=bad)])
    assert store.purge(1) == 0


# tables


@pytest.mark.parametrize("duty", list(Duty))
def test_every_duty_has_an_index_that_is_used(store: SqliteStore, duty: Duty) -> None:
    """Upkeep searches its partial index, and never scans the table."""
    store.migrate()
    with store.connections.use() as connection:
        plan = str(connection.execute("EXPLAIN QUERY PLAN " + store_module._DUE[duty], (0.0, 1)).fetchall())
    assert f"USING INDEX idempotency_keys_{duty.value} " in plan
    assert "SCAN" not in plan


def test_the_tables_come_by_themselves_and_leave_others_alone(path: Path) -> None:
    """The first verb on the app's own database makes our tables; the app's rows stay."""
    with closing(sqlite3.connect(path)) as app:
        app.executescript("CREATE TABLE business (id); INSERT INTO business VALUES (1)")
        with closing(SqliteStore(path)) as store:
            completed(store)
        assert app.execute("SELECT id FROM business").fetchall() == [(1,)]


def test_an_older_schema_is_upgraded_by_itself(store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version finds the file of the old one: it migrates on first use, once, and keeps the rows."""
    completed(store)
    known = queries.migrations(schema.PACKAGE)
    script = "-- a comment; with a semicolon\nCREATE TABLE more (\n  id TEXT\n);\nINSERT INTO more VALUES (';');\n"
    later = queries.Migration(known[-1].number + 1, "more", script)
    monkeypatch.setattr(queries, "migrations", lambda package: [*known, later])
    with closing(SqliteStore(path)) as newer:
        newer.check()
        assert newer.migrate() == [f"{later.number:04d}_more"]  # what opening it has run
        assert newer.migrate() == []
        assert newer.read([("tenant", "key-1")]) != [None]
    with store.connections.use() as connection:
        assert connection.execute("SELECT id FROM more").fetchall() == [(";",)]


@pytest.mark.parametrize(
    "script", ["CREATE TABLE more (id);\nCREATE TABLE more (id);\n", "CREATE TABLE more (id);\nSELECT"]
)
def test_a_migration_that_fails_leaves_nothing(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """All of a migration, or none of it: the old version can go on."""
    completed(store)
    known = queries.migrations(schema.PACKAGE)
    broken = queries.Migration(known[-1].number + 1, "more", script)
    with monkeypatch.context() as patch, closing(SqliteStore(path)) as newer:
        patch.setattr(queries, "migrations", lambda package: [*known, broken])
        with pytest.raises((StoreUnavailable, SchemaError)):
            newer.migrate()
    with closing(SqliteStore(path)) as old:
        old.check()
        with old.connections.use() as connection:
            assert connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'more'").fetchall() == []


def test_a_newer_schema_is_left_alone(path: Path) -> None:
    """An old version that meets a newer file says what to upgrade, at every verb, and touches nothing."""
    with closing(SqliteStore(path)) as store:
        store.migrate()
    with closing(sqlite3.connect(path)) as newer, newer:
        newer.execute("INSERT INTO oncekey_schema VALUES (9999, 'from_the_future', 0)")
    with closing(SqliteStore(path)) as store:
        for verb in (store.check, store.migrate, lambda: store.reserve([wanted()])):
            with pytest.raises(SchemaError, match=r"9999, newer than .* upgrade the oncekey package"):
                verb()


def test_a_table_that_is_gone_is_named(path: Path) -> None:
    """Not made anew without a word: an empty one would turn every key into a first request."""
    with closing(SqliteStore(path)) as store:
        store.migrate()
    with closing(sqlite3.connect(path)) as own, own:
        own.execute("DROP TABLE idempotency_keys")
    with closing(SqliteStore(path)) as store:
        for verb in (store.check, store.migrate, lambda: store.reserve([wanted()])):
            with pytest.raises(SchemaError, match="without its idempotency_keys: restore that from a backup"):
                verb()


def test_a_newer_schema_that_arrives_while_running_is_seen_by_the_check(store: SqliteStore, path: Path) -> None:
    """``check`` looks at the file, not at what it remembers."""
    store.check()
    with closing(sqlite3.connect(path)) as newer, newer:
        newer.execute("INSERT INTO oncekey_schema VALUES (9999, 'from_the_future', 0)")
    for verb in (store.check, store.migrate):
        with pytest.raises(SchemaError, match="upgrade"):
            verb()


def test_a_purge_clears_the_references_of_business_tables(path: Path) -> None:
    """ON DELETE SET NULL works through our connection too, as the docs say."""
    clock = Clock()
    with closing(SqliteStore(path, clock=clock)) as store, closing(sqlite3.connect(path)) as app:
        completed(store)
        app.executescript(
            "CREATE TABLE payment (scope, key, FOREIGN KEY (scope, key)"
            " REFERENCES idempotency_keys (scope, key) ON DELETE SET NULL);"
            "INSERT INTO payment VALUES ('tenant', 'key-1')"
        )
        clock.advance(10_000)
        assert store.purge(10) == 1
        assert app.execute("SELECT scope, key FROM payment").fetchall() == [(None, None)]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("state = 'levitating'", "'levitating', which this version of oncekey does not know"),
        ("effects = 'none'", "'none', which this version"),
        ("response_headers = '{'", "headers of a row are damaged"),
        ("response_headers = NULL", "headers of a row are damaged"),
    ],
)
def test_a_row_that_cannot_be_read_is_an_error_of_ours(
    store: SqliteStore, path: Path, damage: str, sentence: str
) -> None:
    """It is no first request, and no traceback from the inside; other rows are read as before."""
    completed(store)
    completed(store, "key-2")
    with closing(sqlite3.connect(path)) as other, other:
        other.execute(f"UPDATE idempotency_keys SET {damage} WHERE key = 'key-1'")
    with pytest.raises(StoreError, match=sentence):
        store.reserve([wanted()])
    assert store.read([("tenant", "key-2")]) != [None]


def test_a_response_that_another_version_laid_out_is_not_even_read(store: SqliteStore, path: Path) -> None:
    """Whatever a newer oncekey put into the columns, the row is a tombstone here, and no error."""
    completed(store)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE idempotency_keys SET response_schema_version = 99, response_headers = 'zstd'")
    found = store.reserve([wanted()])[0].record
    assert found
    assert found.response == StoredResponse(200, (), None, 99)


# threads


def test_an_opening_that_hangs_is_unavailable_within_the_limit(path: Path) -> None:
    """A thread that waits for another one's opening waits no longer than the limit."""
    with closing(SqliteStore(path, timeout=0.05)) as store, store.connections._opening:
        with pytest.raises(StoreUnavailable, match=r"could not be opened within 0\.05 s"):
            store.check()
        store.connections._opening.release()
        store.check()
        store.connections._opening.acquire()


def test_the_connection_of_a_thread_that_ended_is_closed(store: SqliteStore) -> None:
    """Threads come and go; when the next one opens, the connections of the dead are closed."""
    for _ in range(5):
        thread = threading.Thread(target=store.check)
        thread.start()
        thread.join()
    store.check()
    assert len(store.connections._handles) == 1


def test_a_closed_store_opens_again(store: SqliteStore) -> None:
    """close() ends the connections of all threads; a verb that comes later opens its own."""
    completed(store)
    opened, go_on = threading.Event(), threading.Event()
    seen: list[object] = []

    def work() -> None:
        store.check()
        opened.set()
        go_on.wait(10)
        seen.extend(store.read([("tenant", "key-1")]))

    thread = threading.Thread(target=work)
    thread.start()
    opened.wait(10)
    store.close()
    assert not store.connections._handles
    go_on.set()
    thread.join()
    assert seen != [None]
    assert store.read([("tenant", "key-1")]) != [None]


def test_reservation_neither_inserted_nor_found_is_an_error(tmp_path: Path) -> None:
    """SQLite's JSON ends a text at a NUL, so such a scope is not found again: an error, and never "yours" twice."""
    store = SqliteStore(tmp_path / "keys.db")
    wanted = Reservation("x\0y", "key", "POST /", b"f", 1, Effects.EXTERNAL, "owner-1", 60.0, 3600.0)
    store.reserve([wanted])
    with pytest.raises(StoreError, match="neither inserted nor found"):
        store.reserve([replace(wanted, owner="owner-2")])
    store.close()
