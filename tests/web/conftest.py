"""What the HTTP tests share: a place for keys of each kind, and protected apps in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.errors import ConfigurationError
from oncekey.testing.http.base import MakeStack
from oncekey.testing.http.stack import Stack
from tests.web.apps import Api, World
from tests.web.frameworks import STACKS, framework_of
from tests.web.wsgi_server import MakeServer, Server

READY = {
    "postgres": "ready_url",
    "redis": "ready_redis_url",
    "mysql": "ready_mysql",
    "dynamodb": "ready_dynamodb_url",
}
NO_TRANSACTIONS = frozenset(READY) - {"postgres", "mysql"}
DEEP = [pytest.param(name, marks=pytest.mark.stores) for name in READY if name != "postgres"]


@pytest.fixture(params=["memory", "sqlite", "postgres", *DEEP])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place for keys, of every kind in turn."""
    if request.param == "memory":
        return "memory://"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    url: str = request.getfixturevalue(READY[request.param])
    return url


@pytest.fixture
def once() -> Iterator[OnceKey]:
    """Keys in memory, as the default policy has them. Modules with more to ask of the store override it."""
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made


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
        try:
            made.append(Api(world, framework, *args, **options))
        except ConfigurationError as error:
            if "none to share" not in str(error):
                raise
            pytest.skip("this store has no transactions, so it refuses effects='transactional'")
        return made[-1]

    yield make
    for api in made:
        await api.close()


DEEP_STACKS = ("django-sync", "django-drf", "django-drf-asgi")
"""Most of their code is that of another one of STACKS, too."""


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.frameworks if name in DEEP_STACKS else ()) for name in STACKS]
)
def name(request: pytest.FixtureRequest) -> str:
    """Each of STACKS in turn. A test that wants some of them only is parametrized with their names."""
    framework: str = request.param
    return framework


@pytest.fixture
def make_stack() -> Iterator[MakeStack]:
    """Makes protected apps of STACKS; the arguments are those of Stack. All of them are closed at the end."""
    made: list[Stack] = []

    def make(name: str, **options: Any) -> Stack:
        made.append(Stack(framework_of(name), **options))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    """Makes protected WSGI apps; the arguments are those of Server. All of them are closed at the end."""
    made: list[Server] = []

    def make(*args: Any, **options: Any) -> Server:
        made.append(Server(*args, **options))
        return made[-1]

    yield make
    for server in made:
        server.once.close()


@pytest.fixture
def make_shop() -> Iterator[Callable[..., Any]]:
    """Makes protected Flask apps; the arguments are those of Shop. All of them are closed at the end."""
    from tests.web.flask_shop import Shop

    made: list[Shop] = []

    def make(*args: Any, **options: Any) -> Shop:
        made.append(Shop(*args, **options))
        return made[-1]

    yield make
    for shop in made:
        shop.once.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starlette on every store, FastAPI on SQLite. No line of ours knows of both a framework and a store, so the
    other pairs are left to `make faults`."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("framework") == "fastapi" and params.get("store_url") in ("memory", *READY):
            item.add_marker(pytest.mark.faults)
        if params.get("store_url") in NO_TRANSACTIONS and "transactional" in item.name:
            item.add_marker(pytest.mark.skip("a store without transactions refuses transactional routes at the start"))
