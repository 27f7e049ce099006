"""A shop whose one table is in the database that keeps the keys, and a ``Payer`` for each driver that can be enlisted.

A payer opens what a handler enlists, writes a payment with it, and closes it after the response. Nothing here asserts.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import httpx
import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.stores.registry import open_store
from oncekey.web.asgi import IdempotencyMiddleware
from tests import databases

TRANSACTIONAL = Policy(effects="transactional")
CREATE = "CREATE TABLE IF NOT EXISTS payments (key text NOT NULL, cents integer NOT NULL)"


class Shop:
    """The database, as a test sees it from outside of every request."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kind = "sqlite" if url.startswith("sqlite") else "postgresql"
        self.path = url.removeprefix("sqlite:///")
        if not databases.is_ready(url):
            store = open_store(url)
            store.migrate()
            store.close()
        self.ask(CREATE)
        self.apis: list[Api] = []

    def ask(self, sql: str) -> list[Any]:
        if self.kind == "sqlite":
            with sqlite3.connect(self.path) as connection:
                rows = connection.execute(sql).fetchall()
            connection.close()
            return rows
        with databases.beside(self.url) as server:
            cursor = server.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def payments(self, key: str = "k-1") -> int:
        return int(self.ask(f"SELECT count(*) FROM payments WHERE key = '{key}'")[0][0])

    def record(self, key: str = "k-1") -> Record | None:
        store = open_store(self.url)
        try:
            return store.read([("single-tenant", key)])[0]
        finally:
            store.close()

    def state(self, key: str = "k-1") -> State | None:
        record = self.record(key)
        return None if record is None else record.state

    def api(self, handler: Callable[..., Any], policy: Policy = TRANSACTIONAL, **options: Any) -> Api:
        api = Api(self.url, handler, policy, **options)
        self.apis.append(api)
        return api


class Api:
    """A protected Starlette app around one handler, ``handler(request)``."""

    def __init__(self, url: str, handler: Callable[..., Any], policy: Policy, **options: Any) -> None:
        self.once = OnceKey(url, scope=SINGLE_TENANT, policy=policy, **options)
        app = Starlette(routes=[Route("/payments", handler, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, once=self.once)
        self.app = app
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://shop")

    async def post(self, key: str = "k-1", cents: int = 5, **headers: str) -> httpx.Response:
        return await self.http.post("/payments", headers={"Idempotency-Key": key, **headers}, json={"cents": cents})

    async def close(self) -> None:
        await self.http.aclose()
        await self.once.aclose()


def paid(key: str) -> Response:
    return JSONResponse({"paid": key}, 201)


# ---------------------------------------------------------------- payers


class Payer:
    """What a handler enlists with one driver. ``is_async``: enlist and pay are awaited."""

    is_async = True

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.opened: list[Any] = []

    async def open(self) -> Any:
        thing = self.make()
        if inspect.isawaitable(thing):
            thing = await thing
        self.opened.append(thing)
        return thing

    def open_now(self) -> Any:
        thing = self.make()
        self.opened.append(thing)
        return thing

    def make(self) -> Any:
        raise NotImplementedError

    def pay(self, thing: Any, key: str) -> Any:
        """One business write, and the reading of it in the same transaction."""
        raise NotImplementedError

    async def commit(self, thing: Any) -> None:
        done = thing.commit()
        if inspect.isawaitable(done):
            await done

    async def close(self) -> None:
        await self.close_opened()
        await self.dispose()

    async def close_opened(self) -> None:
        """As an app does after each request."""
        while self.opened:
            done = self.opened.pop().close()
            if inspect.isawaitable(done):
                await done

    async def dispose(self) -> None:
        return None


def _insert(key: str) -> str:
    return f"INSERT INTO payments (key, cents) VALUES ('{key}', 5)"


class Sqlite3(Payer):
    is_async = False

    def make(self) -> Any:
        return sqlite3.connect(self.shop.path, check_same_thread=False)

    def pay(self, thing: Any, key: str) -> Any:
        thing.execute(_insert(key))


class Sqlite3Autocommit(Sqlite3):
    """isolation_level None: Python begins nothing, and oncekey does."""

    def make(self) -> Any:
        return sqlite3.connect(self.shop.path, check_same_thread=False, isolation_level=None)


class Aiosqlite(Payer):
    def make(self) -> Any:
        return aiosqlite.connect(self.shop.path)

    async def pay(self, thing: Any, key: str) -> None:
        await thing.execute(_insert(key))


class Psycopg(Payer):
    is_async = False

    def make(self) -> Any:
        return psycopg.connect(self.shop.url)

    def pay(self, thing: Any, key: str) -> Any:
        thing.execute(_insert(key))


class PsycopgAsync(Payer):
    def make(self) -> Any:
        return psycopg.AsyncConnection.connect(self.shop.url)

    async def pay(self, thing: Any, key: str) -> None:
        await thing.execute(_insert(key))


class Asyncpg(Payer):
    def make(self) -> Any:
        return asyncpg.connect(self.shop.url)

    async def pay(self, thing: Any, key: str) -> None:
        await thing.execute(_insert(key))

    async def commit(self, thing: Any) -> None:
        await thing.execute("COMMIT")


class AsyncpgPool(Asyncpg):
    pool: Any = None

    async def make(self) -> Any:
        self.pool = self.pool or asyncpg.create_pool(self.shop.url, min_size=0, max_size=10)
        await self.pool
        return await self.pool.acquire()

    async def close_opened(self) -> None:
        while self.opened:
            await self.pool.release(self.opened.pop())

    async def dispose(self) -> None:
        if self.pool is not None:
            with suppress(TimeoutError):  # asyncpg 0.29 waits for ever for a connection that was lost
                await asyncio.wait_for(self.pool.close(), 10.0)
            self.pool = None


class SqlAlchemy(Payer):
    """A Session."""

    is_async = False

    def __init__(self, shop: Shop) -> None:
        super().__init__(shop)
        self.engine = sa.create_engine(self.url())

    def url(self) -> str:
        return self.shop.url.replace("postgresql:", "postgresql+psycopg:")

    def make(self) -> Any:
        return Session(self.engine)

    def pay(self, thing: Any, key: str) -> Any:
        thing.execute(sa.text(_insert(key)))

    async def dispose(self) -> None:
        self.engine.dispose()


class Scoped(SqlAlchemy):
    def make(self) -> Any:
        return scoped_session(sessionmaker(self.engine))


class SqlAlchemyConnection(SqlAlchemy):
    def make(self) -> Any:
        return self.engine.connect()


class SqlAlchemyAsync(Payer):
    """An AsyncSession, on aiosqlite or psycopg."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(shop)
        self.engine = create_async_engine(self.url(), poolclass=NullPool)

    def url(self) -> str:
        return self.shop.url.replace("postgresql:", "postgresql+psycopg:").replace("sqlite:", "sqlite+aiosqlite:")

    def make(self) -> Any:
        return AsyncSession(self.engine)

    async def pay(self, thing: AsyncSession | AsyncConnection, key: str) -> None:
        await thing.execute(sa.text(_insert(key)))

    async def dispose(self) -> None:
        await self.engine.dispose()


class SqlAlchemyAsyncpg(SqlAlchemyAsync):
    def url(self) -> str:
        return self.shop.url.replace("postgresql:", "postgresql+asyncpg:")


class SqlAlchemyAsyncConnection(SqlAlchemyAsync):
    async def make(self) -> Any:
        return await self.engine.connect()


SQLITE = {
    "sqlite3": Sqlite3,
    "sqlite3-autocommit": Sqlite3Autocommit,
    "aiosqlite": Aiosqlite,
    "sa-session": SqlAlchemy,
    "sa-scoped": Scoped,
    "sa-connection": SqlAlchemyConnection,
    "sa-async-session": SqlAlchemyAsync,
    "sa-async-connection": SqlAlchemyAsyncConnection,
}
POSTGRES = {
    "psycopg": Psycopg,
    "psycopg-async": PsycopgAsync,
    "asyncpg": Asyncpg,
    "asyncpg-pool": AsyncpgPool,
    "sa-session": SqlAlchemy,
    "sa-scoped": Scoped,
    "sa-connection": SqlAlchemyConnection,
    "sa-async-session": SqlAlchemyAsync,
    "sa-asyncpg": SqlAlchemyAsyncpg,
    "sa-async-connection": SqlAlchemyAsyncConnection,
}
ALL = [("sqlite", name) for name in SQLITE] + [("postgresql", name) for name in POSTGRES]
SYNC = [(kind, name) for kind, name in ALL if not (SQLITE if kind == "sqlite" else POSTGRES)[name].is_async]


async def key_of(request: Request) -> str:
    return request.headers["idempotency-key"]


@asynccontextmanager
async def closing(shop: Shop, payer: Payer) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await payer.close()
        for api in shop.apis:
            await api.close()


def sqlite_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'shop.db'}"


Handler = Callable[[Request], Awaitable[Response]]
