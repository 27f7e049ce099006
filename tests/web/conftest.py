"""What the HTTP tests share: a place for keys of each kind, and protected apps in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncekey.stores.urls import open_store
from oncekey.testing.servers import PostgresServer
from tests.web.apps import Api, World


@pytest.fixture(scope="session")
def web_database(postgres_server: PostgresServer) -> str:
    """One database with our tables for all tests of a worker: emptying it is quicker than making another."""
    url = postgres_server.database("web")
    store = open_store(url)
    store.migrate()
    store.disconnect()
    return url


@pytest.fixture
def empty_database(web_database: str) -> str:
    """That database, without a row."""
    with psycopg.connect(web_database, autocommit=True) as connection:
        connection.execute("TRUNCATE idempotency_keys")
    return web_database


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place for keys, of every kind in turn."""
    if request.param == "memory":
        return "memory://"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    url: str = request.getfixturevalue("empty_database")
    return url


@pytest.fixture(params=["starlette", "fastapi"])
def framework(request: pytest.FixtureRequest) -> str:
    """Each framework in turn. A module for which it makes no difference overrides this fixture."""
    name: str = request.param
    return name


@pytest.fixture
def world(store_url: str) -> World:
    return World(store_url)


@pytest.fixture
async def make_api(world: World, framework: str) -> AsyncIterator[Callable[..., Api]]:
    """Makes protected apps; the arguments are those of Api. All of them are closed at the end."""
    made: list[Api] = []

    def make(*args: Any, **options: Any) -> Api:
        made.append(Api(world, framework, *args, **options))
        return made[-1]

    yield make
    for api in made:
        await api.close()
