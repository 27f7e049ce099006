"""The walk over kept values: pages follow an index, nothing waits for the app, and memory does not grow with rows."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.record import Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event
from oncekey.core.swaps import swap
from oncekey.encryption.rotation import Rotation
from oncekey.stores.dynamodb import DynamoStore
from oncekey.stores.dynamodb.settings import settings_of
from oncekey.stores.kept_api import Kept, KeptKey, Rewrite
from oncekey.stores.mysql import MysqlStore
from oncekey.stores.mysql import kept as mysql_kept
from oncekey.stores.mysql.packets import filled
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.postgres import kept as postgres_kept
from oncekey.stores.sql.kept import PLACES
from oncekey.stores.sqlite import SqliteStore
from oncekey.stores.sqlite import kept as sqlite_kept
from tests import databases
from tests.encryption.rings import ring
from tests.stores import mysql

PRIMARY = {"keys": "keys", "steps": "steps", "audit": "audit", "jobs": "outbox"}


def completed(store: Any, *keys: str, body: bytes = b"plain") -> None:
    wanted = [
        Reservation("tenant", key, "POST /", b"f" * 32, 2, Effects.EXTERNAL, f"owner of {key}", 60.0, 3600.0)
        for key in keys
    ]
    rows = [found.record for found in store.reserve(wanted)]
    moves = [swap(row, Event.COMPLETE, Actor.OWNER, response=StoredResponse(200, (), body)) for row in rows]
    assert None not in store.swap(moves)


def walk(store: Any) -> Iterator[Kept]:
    after = ""
    while True:
        page = store.kept(after, 10)
        yield from page.rows
        if not (after := page.next):
            return


def rewrites(store: Any) -> list[Rewrite]:
    return [Rewrite(row, replace(row, body=b"new")) for row in walk(store) if isinstance(row, KeptKey)]


# plans


@pytest.mark.parametrize("table", PLACES)
def test_page_of_sqlite_follows_the_primary_key(table: str, tmp_path: Path) -> None:
    """A search in the index, and no sort: a page costs the same for any number of rows."""
    with closing(SqliteStore(tmp_path / "keys.db")) as store:
        store.migrate()
        with store.connections.use() as connection:
            statement = sqlite_kept._KEPT[table]
            found = connection.execute(f"EXPLAIN QUERY PLAN {statement}", ("",) * (PLACES[table] + 1))
            (plan,) = [row[3] for row in found]
    name = f"idempotency_{PRIMARY[table]}"
    place = "INTEGER PRIMARY KEY (rowid>?)" if table == "audit" else f"INDEX sqlite_autoindex_{name}_1 ("
    assert plan.startswith(f"SEARCH {name} USING {place}"), plan


@pytest.mark.parametrize("table", PLACES)
def test_page_of_postgres_follows_the_primary_key(table: str, ready_url: str) -> None:
    with closing(PostgresStore(ready_url)) as store:
        completed(store, "key-1")
        asked = {f"after_{nth}": part for nth, part in enumerate((0,) if table == "audit" else ("",) * PLACES[table])}
        found = store._execute(f"EXPLAIN {postgres_kept._KEPT[table]}", {**asked, "limit": 10}).fetchall()
    plan = "\n".join(row[0] for row in found)
    assert f"Index Scan using idempotency_{PRIMARY[table]}_pkey" in plan, plan
    assert "Index Cond" in plan, plan
    assert "Sort" not in plan, plan


@pytest.mark.stores
@pytest.mark.parametrize("table", PLACES)
def test_page_of_mysql_follows_the_primary_key(table: str, ready_mysql: str) -> None:
    """As ranges: a comparison of pairs would read from the first row on."""
    with closing(MysqlStore(ready_mysql)) as store:
        completed(store, *(f"key-{number:03d}" for number in range(200)))
        after = (0,) if table == "audit" else ("tenant", "key-150", "")[: PLACES[table]]
        values = {f"after_{letter}": part for letter, part in zip("abc", after, strict=False)}
        (plan,) = mysql.run(ready_mysql, "EXPLAIN " + filled(mysql_kept._KEPT[table], {**values, "limit": 10}))
    said = str(plan)
    assert ("idempotency_outbox_id" if table == "jobs" else "PRIMARY") in said, said
    assert "filesort" not in said, said
    if table == "keys":
        assert "range" in said, said


# the app at the same time


def test_row_that_an_open_transaction_holds_is_not_waited_for(ready_url: str) -> None:
    """PostgreSQL: it is left to a later try, and the others of the batch are written."""
    with closing(PostgresStore(ready_url, timeout=30.0, lock_timeout=30.0)) as store:
        completed(store, "held", "free")
        batch = rewrites(store)
        with databases.beside(ready_url) as app, app.transaction():
            app.execute("SELECT FROM idempotency_keys WHERE key = 'held' FOR NO KEY UPDATE")
            began = time.monotonic()
            answers = {work.old.place[2]: done for work, done in zip(batch, store.rewrite(batch), strict=True)}
            assert answers == {"held": False, "free": True}
            assert time.monotonic() - began < 10, "the store would wait for 30 s"
        assert store.rewrite(batch) == [work.old.place[2] == "held" for work in batch]


@pytest.mark.stores
def test_row_that_an_open_transaction_of_mysql_holds_is_not_waited_for(ready_mysql: str) -> None:
    with closing(MysqlStore(ready_mysql)) as store, closing(mysql.connect(ready_mysql)) as app:
        completed(store, "held", "free")
        batch = rewrites(store)
        app.begin()
        app.cursor().execute("SELECT 1 FROM idempotency_keys WHERE scope = 'tenant' AND `key` = 'held' FOR UPDATE")
        answers = {work.old.place[2]: done for work, done in zip(batch, store.rewrite(batch), strict=True)}
        assert answers == {"held": False, "free": True}
        app.rollback()
        assert store.rewrite(batch) == [work.old.place[2] == "held" for work in batch]


class Racing(DynamoStore):
    """The app writes after the row was compared, and before it is written."""

    def app(self) -> None:
        raise NotImplementedError

    def _put_parts(self, *given: Any) -> str | None:
        app, self.app = self.app, lambda: None  # type: ignore[method-assign]
        app()
        return super()._put_parts(*given)


@pytest.mark.stores
def test_write_of_the_app_after_the_comparison_is_not_overwritten(ready_dynamodb_url: str) -> None:
    """DynamoDB compares in the write itself."""
    with closing(Racing(settings_of(ready_dynamodb_url))) as store:
        for key in ("body", "gone"):
            store.app = lambda: None  # type: ignore[method-assign]
            completed(store, key)
        other = DynamoStore(settings_of(ready_dynamodb_url))
        works = {work.old.place[2]: work for work in rewrites(store)}
        old = works["body"].old
        assert isinstance(old, KeptKey)
        store.app = lambda: assert_written(other, Rewrite(old, replace(old, body=b"the app's")))  # type: ignore[method-assign]
        assert store.rewrite([works["body"]]) == [False]
        (row,) = store.read([("tenant", "body")])
        assert row is not None
        assert row.response is not None
        assert row.response.body == b"the app's"
        (gone,) = store.read([("tenant", "gone")])
        assert gone is not None
        store.app = lambda: assert_forgotten(other, gone)  # type: ignore[method-assign]
        assert store.rewrite([works["gone"]]) == [False]
        assert store.read([("tenant", "gone")]) == [None]
        other.close()


def assert_written(store: DynamoStore, work: Rewrite) -> None:
    assert store.rewrite([work]) == [True]


def assert_forgotten(store: DynamoStore, row: Any) -> None:
    assert store.swap([swap(row, Event.FORGET, Actor.OPERATOR)]) != [None]


# memory


def test_memory_of_a_walk_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """40 MB of responses are read and written again in pages of a few hundred kilobytes."""
    with closing(SqliteStore(tmp_path / "keys.db")) as store:
        store.migrate()
        completed(store, "first", body=b"x" * 20_000)
        with store._writing() as connection:
            connection.execute(
                "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 1999) "
                "INSERT INTO idempotency_keys SELECT k.scope, printf('key-%05d', n.n), k.operation, k.fingerprint, "
                "k.fingerprint_version, k.effects, k.state, k.attempt, k.owner, k.lease_until, k.recovery_point, "
                "k.last_error, k.reconcile_at, k.reconcile_tries, k.created_at, k.finished_at, k.retention_seconds, "
                "k.expires_at, k.response_status, k.response_headers, k.response_schema_version, k.response_body, "
                "k.fingerprint_recipe, k.quarantine_seconds FROM idempotency_keys AS k, n"
            )
        tracemalloc.start()
        report = Rotation(store, ring(1), trust_key=True, page=20).run()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (report.rows, report.rewritten.total()) == (2000, 2000)
    assert most < 4_000_000
