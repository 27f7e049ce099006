"""A PostgreSQL database with our tables in it, for many tests: emptying one takes a tenth of making one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from oncekey.stores.postgres import PostgresStore
from oncekey.testing.servers import PostgresServer

_EMPTY = """
DO $$
DECLARE
    name text;
BEGIN
    PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid();
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'oncekey_schema' LOOP
        IF name LIKE 'idempotency_%' THEN
            EXECUTE format('DELETE FROM %I', name);
        ELSE
            EXECUTE format('DROP TABLE %I CASCADE', name);
        END IF;
    END LOOP;
END $$
"""


def ready(server: PostgresServer, name: str) -> str:
    """A new database with our tables."""
    url = server.database(name)
    store = PostgresStore(url)
    store.migrate()
    store.close()
    return url


_kept: dict[str, psycopg.Connection] = {}
_NAME = "kept by the tests"
"""Of the connection that this process keeps to a database it empties: a new one for each look at a table would cost
more than the look, several thousand times."""


def empty(url: str) -> None:
    """Our tables without a row, no other tables, and no connection but our own."""
    try:
        _keep(url).execute(_EMPTY)
    except psycopg.OperationalError:  # the server was restarted meanwhile
        del _kept[url]
        _keep(url).execute(_EMPTY)


def is_ready(url: str) -> bool:
    """Whether it is one that is emptied between tests, and has our tables."""
    return url in _kept


@contextmanager
def beside(url: str) -> Iterator[psycopg.Connection]:
    """A connection from outside of what is tested, each statement in a transaction of its own."""
    if is_ready(url):
        yield _kept[url]
    else:
        with psycopg.connect(url, autocommit=True) as own:
            yield own


def connected(server: PostgresServer, url: str) -> int:
    """How many others are connected to it, without workers of the server such as autovacuum."""
    mine = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{url.rpartition('/')[2]}'"
    mine += " AND backend_type = 'client backend'"
    return int(server.execute(f"{mine} AND application_name <> '{_NAME}'")[0][0] or 0)


def let_go() -> None:
    """Before the server stops."""
    for connection in _kept.values():
        connection.close()
    _kept.clear()


def _keep(url: str) -> psycopg.Connection:
    if url not in _kept:
        _kept[url] = psycopg.connect(url, autocommit=True, application_name=_NAME)
    return _kept[url]
