"""A desk for phased requests, on each SQL store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from oncekey.stores.urls import open_store
from oncekey.testing.servers import PostgresServer
from tests.engine.desk import Desk
from tests.enlist.shop import Shop, sqlite_url


@pytest.fixture(scope="session")
def desk_database(postgres_server: PostgresServer) -> str:
    """One database for all tests of a worker: emptying it is quicker than making another."""
    url = postgres_server.database("desk")
    store = open_store(url)
    store.migrate()
    store.disconnect()
    Shop(url)
    return url


@pytest.fixture
async def postgres_desk(desk_database: str) -> AsyncIterator[Desk]:
    with psycopg.connect(desk_database, autocommit=True) as connection:
        connection.execute("TRUNCATE idempotency_keys, idempotency_steps, idempotency_outbox, payments")
    desk = Desk(Shop(desk_database))
    yield desk
    await desk.close()


@pytest.fixture
async def sqlite_desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(Shop(sqlite_url(tmp_path)))
    yield desk
    await desk.close()


@pytest.fixture(params=["sqlite_desk", "postgres_desk"])
def desk(request: pytest.FixtureRequest) -> Desk:
    desk: Desk = request.getfixturevalue(request.param)
    return desk
