"""A PostgreSQL database with our tables in it, for many tests: emptying one takes a tenth of making one."""

from __future__ import annotations

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


def empty(url: str) -> None:
    """Our tables without a row, no other tables, and nobody connected."""
    with psycopg.connect(url, autocommit=True) as own:
        own.execute(_EMPTY)
