"""One shop per test, on each kind of database, and a till for each driver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from oncekey.stores.urls import open_store
from oncekey.testing.servers import PostgresServer
from tests.enlist.shop import POSTGRES, SQLITE, Shop, Till, sqlite_url


@pytest.fixture(scope="session")
def shop_database(postgres_server: PostgresServer) -> str:
    """One database for all tests of a worker: emptying it is quicker than making another."""
    url = postgres_server.database("shop")
    store = open_store(url)
    store.migrate()
    store.disconnect()
    return url


@pytest.fixture
def postgres_shop(shop_database: str) -> Shop:
    shop = Shop(shop_database)
    with psycopg.connect(shop_database, autocommit=True) as connection:
        connection.execute("TRUNCATE idempotency_keys, payments")
    return shop


@pytest.fixture
def sqlite_shop(tmp_path: Path) -> Shop:
    return Shop(sqlite_url(tmp_path))


def make_shop(kind: str, request: pytest.FixtureRequest) -> Shop:
    shop: Shop = request.getfixturevalue("sqlite_shop" if kind == "sqlite" else "postgres_shop")
    return shop


@pytest.fixture(params=["sqlite", "postgresql"])
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    shop = make_shop(request.param, request)
    yield shop
    for api in shop.apis:
        await api.close()


@pytest.fixture
async def till(request: pytest.FixtureRequest) -> AsyncIterator[Till]:
    """Parametrized by (kind, name); its shop is ``till.shop``."""
    kind, name = request.param
    shop = make_shop(kind, request)
    till = (SQLITE if kind == "sqlite" else POSTGRES)[name](shop)
    yield till
    await till.close()
    for api in shop.apis:
        await api.close()
