"""A lane's session on PostgreSQL: its settings are in force, whatever the defaults and encodings of the database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from oncekey.errors import StoreError
from oncekey.stores.postgres import PostgresStore, connection
from oncekey.stores.postgres.connection import DeadlineConnection
from oncekey.testing.servers import PostgresServer
from tests import databases
from tests.engine.doubles import eventually, reservation
from tests.stores.postgres import opened, put, show

_numbers = count(1)


def _alter(server: PostgresServer, url: str, setting: str) -> None:
    server.execute(f'ALTER DATABASE "{url.rpartition("/")[2]}" SET {setting}')


# ---------------------------------------------------------------- settings


def test_a_lanes_settings_are_in_force(ready_url: str) -> None:
    """Each setting as the session shows it; statement and lock timeouts are the store's own."""
    wanted = {
        "default_transaction_isolation": "read committed",
        "transaction_isolation": "read committed",
        "default_transaction_read_only": "off",
        "statement_timeout": "3s",
        "lock_timeout": "250ms",
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "enable_sort": "off",
        "enable_incremental_sort": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "jit": "off",
        "client_connection_check_interval": "1s",
        "synchronous_commit": "on",
        "client_encoding": "UTF8",
    }
    with opened(ready_url, timeout=3.0, lock_timeout=0.25) as store:
        assert {name: show(store, name) for name in wanted} == wanted
        parameters = store._connection(checked=False).info.get_parameters()
        assert {name: parameters[name] for name in ("connect_timeout", "keepalives_idle", "keepalives_count")} == {
            "connect_timeout": "3",
            "keepalives_idle": "5",
            "keepalives_count": "3",
        }


def test_a_commit_is_never_left_unsynchronised(postgres_server: PostgresServer, postgres_url: str) -> None:
    """``synchronous_commit = off`` would lose reservations in a crash; every other choice is the operator's."""
    shown = {}
    for default in ("off", "on", "local", "remote_write", "remote_apply"):
        _alter(postgres_server, postgres_url, f"synchronous_commit = {default}")
        with opened(postgres_url) as store:
            shown[default] = show(store, "synchronous_commit")
    assert shown == {
        "off": "on",
        "on": "on",
        "local": "local",
        "remote_write": "remote_write",
        "remote_apply": "remote_apply",
    }


def test_the_databases_isolation_does_not_matter(postgres_server: PostgresServer, postgres_url: str) -> None:
    """With SERIALIZABLE as the default, four threads that race for the same keys meet no serialization failure."""
    _alter(postgres_server, postgres_url, "default_transaction_isolation = 'serializable'")
    with opened(postgres_url) as store:
        store.migrate()
        assert show(store, "transaction_isolation") == "read committed"
        keys = [f"key-{number}" for number in range(30)]

        def race(number: int) -> list[str]:
            mine = []
            for at in range(0, 30, 5):
                wanted = [reservation(key) for key in keys[at : at + 5]]
                found = store.reserve(wanted)
                mine += [w.key for w, f in zip(wanted, found, strict=True) if f.record and f.record.owner == w.owner]
            store.disconnect()
            return mine

        with ThreadPoolExecutor(4) as pool:
            won = [key for mine in pool.map(race, range(4)) for key in mine]
        assert sorted(won) == sorted(keys)


def test_a_database_whose_default_is_read_only_works(postgres_server: PostgresServer, postgres_url: str) -> None:
    """A default for other people's sessions is not a standby."""
    _alter(postgres_server, postgres_url, "default_transaction_read_only = on")
    with opened(postgres_url) as store:
        store.migrate()
        put(store, "a")


def test_settings_that_fail_leave_no_connection_behind(
    postgres_server: PostgresServer, ready_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that could not be set up is closed: no backend stays."""
    monkeypatch.setattr(connection, "_SETTINGS", "SELECT 1 / 0")
    with opened(ready_url) as store, pytest.raises(StoreError, match="DivisionByZero"):
        store.check()
    eventually(lambda: databases.connected(postgres_server, ready_url) == 0)


def test_a_server_that_cannot_notice_lost_clients_will_do(ready_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before PostgreSQL 14, and on some platforms, there is no such setting: the store works without."""
    real = DeadlineConnection.execute

    def execute(self: DeadlineConnection, query: Any, *arguments: Any, **options: Any) -> Any:
        if query.startswith("SET client_connection_check_interval"):
            query = "SET no_such_setting_at_all = 1"
        return real(self, query, *arguments, **options)

    monkeypatch.setattr(DeadlineConnection, "execute", execute)
    with opened(ready_url) as store:
        store.migrate()
        put(store, "a")
        assert show(store, "client_connection_check_interval") == "0"


def test_a_connection_without_a_deadline_waits_as_psycopg_does(ready_url: str) -> None:
    """Until a verb sets its deadline there is none: connecting has its own limit."""
    with DeadlineConnection.connect(ready_url, autocommit=True) as own:
        assert own.deadline == 0.0
        assert own.execute("SELECT 1").fetchone() == (1,)


# ---------------------------------------------------------------- encodings


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "UTF8"])
def test_the_databases_encoding_does_not_matter(postgres_server: PostgresServer, encoding: str) -> None:
    """What a database of that encoding can hold is found again, as the same text."""
    name = f"encoded_{next(_numbers)}"
    postgres_server.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0")
    try:
        with opened(postgres_server.url_of(name)) as store:
            store.migrate()
            wanted = reservation(scope="café")
            (found,) = store.reserve([wanted])
            assert found.record is not None
            assert (found.record.scope, found.record.owner) == ("café", wanted.owner)
    finally:
        postgres_server.drop_database(name)


def test_the_clients_encoding_does_not_matter(store: PostgresStore, ready_url: str) -> None:
    """A client encoding in the URL or in PGCLIENTENCODING does not change how a tenant's name is stored."""
    with opened(f"{ready_url}?client_encoding=latin1") as other:
        wanted = reservation(scope="café")
        (found,) = other.reserve([wanted])
        assert found.record is not None
        assert found.record.owner == wanted.owner
        (seen,) = store.read([("café", "key-1")])
        assert seen is not None
