"""A dump of the database after a full run has none of the planted secrets, and the app still reads them all."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncekey.core.jobs import JobState
from oncekey.core.steps import StepsOf
from oncekey.encryption import Keyring
from oncekey.stores.api import Outbox, Store
from tests.encryption import dumps
from tests.encryption.full_run import SCOPE, FullRun, planted
from tests.encryption.rings import ring
from tests.stores import mysql

Database = tuple[str, Callable[[], Any] | None, Callable[[], bytes]]
"""The URL, a connection of the app's own, and a dump."""


def sqlite_at(path: Path, options: str = "") -> Database:
    connect = partial(sqlite3.connect, path, timeout=5.0, check_same_thread=False)
    return f"sqlite:///{path}{options}", connect, partial(dumps.of_sqlite, path)


@pytest.fixture(
    params=[
        "sqlite",
        "sqlite?writer=process",
        "postgres",
        pytest.param("mysql", marks=pytest.mark.stores),
        pytest.param("redis", marks=pytest.mark.stores),
        pytest.param("dynamodb", marks=pytest.mark.stores),
    ]
)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    name: str = request.param
    match name.partition("?")[0]:
        case "sqlite":
            return sqlite_at(tmp_path / "keys.db", name.removeprefix("sqlite"))
        case "postgres":
            url = request.getfixturevalue("ready_url")
            return url, partial(psycopg.connect, url), partial(dumps.of_postgres, url)
        case "mysql":
            url = request.getfixturevalue("ready_mysql")
            return url, partial(mysql.connect, url), partial(dumps.of_mysql, url)
        case "redis":
            url = request.getfixturevalue("ready_redis_url")
            return url, None, partial(dumps.of_redis, url)
        case _:
            url = request.getfixturevalue("ready_dynamodb_url")
            return url, None, partial(dumps.of_dynamodb, url)


async def ran(database: Database, keyring: Keyring | None) -> FullRun:
    url, connect, _ = database
    run = FullRun(url, keyring, connect)
    await run.all()
    return run


async def test_dump_has_no_planted_secret_and_the_app_reads_them_all(database: Database) -> None:
    run = await ran(database, ring(2, 1))
    dump = database[2]()
    assert run.found_in(dump) == set()
    assert b"flat-1" in dump  # it is a dump of these rows
    assert run.found_in(readable_contents(run.store).encode()) == set(run.words)
    assert planted("resolvers-words") in run.read("asked-2").last_error
    if database[1] is not None:
        assert planted("error-of-job") in run.read("deferred-3").last_error
    await run.close()


async def test_dump_without_encryption_has_every_planted_secret(database: Database) -> None:
    """Otherwise the dump, or the run, would miss a column."""
    run = await ran(database, None)
    assert run.found_in(database[2]()) == set(run.words)
    await run.close()


def readable_contents(store: Store) -> str:
    """What an operator with the keyring sees of all rows."""
    found: list[object] = []
    for record in store.listing(limit=1000):
        found += store.read([(record.scope, record.key)])
        found += store.steps([StepsOf(record.scope, record.key)])
    for key in ("unknown-1", "flat-3", "asked-1", "asked-2", "enlisted-1", "enlisted-2", "enlisted-3"):
        found += store.audit(SCOPE, key, 100)
    if isinstance(store, Outbox):
        for state in JobState:
            found += store.jobs(state, 100)
    return repr(found)


async def test_rows_from_before_encryption_are_still_read_and_replayed(tmp_path: Path) -> None:
    database = sqlite_at(tmp_path / "keys.db")
    before = await ran(database, None)
    first = await before.post("flat", "flat-1")
    await before.close()
    url, connect, _ = database
    after = FullRun(url, ring(1), connect)
    again = await after.post("flat", "flat-1")
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["x-secret"] == planted("flat-header")
    assert after.found_in(readable_contents(after.store).encode()) == set(after.words)
    await after.close()
