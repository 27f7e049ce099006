"""PostgreSQL for the test_postgres modules of this folder. Tests of another store make a ``store`` of their own."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from oncekey.stores.postgres import PostgresStore
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import HOST, PostgresServer


@pytest.fixture(scope="session")
def _shared_url(postgres_server: PostgresServer) -> Iterator[str]:
    yield postgres_server.database("shared")
    postgres_server.drop_database("shared")


@pytest.fixture
def url(_shared_url: str) -> str:
    """A database without our tables: the same for many tests, since making one takes longer than most of them."""
    empty(_shared_url)
    return _shared_url


def empty(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as own:
        own.execute(
            "DROP TABLE IF EXISTS idempotency_keys, idempotency_steps, idempotency_outbox, idempotency_audit, "
            "oncekey_schema"
        )


@pytest.fixture
def store(ready_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(ready_url)
    store.migrate()
    yield store
    store.close()


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy(HOST, postgres_server.port) as proxy:
        yield proxy
