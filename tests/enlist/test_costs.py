"""What a transactional request costs on the app's connection, counted: statements and round trips, driver by driver.

Beside each: the same by hand, as two transactions (the key is reserved in one; the business row and the response are
committed in the other) and in one commit. oncekey reserves the key on its own connection, in a statement that requests
share, so it is not counted here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response

from oncekey import current
from oncekey.testing.servers import PostgresServer
from tests.enlist.shop import Shop, paid
from tests.enlist.wire_counter import WireCounter

PAY = "INSERT INTO payments (key, cents) VALUES ('k', 5)"
BY_HAND = "CREATE TABLE IF NOT EXISTS by_hand (key text PRIMARY KEY, response text)"
KEY = "INSERT INTO by_hand (key) VALUES ('{}') ON CONFLICT DO NOTHING"
DONE = "UPDATE by_hand SET response = 'paid' WHERE key = '{}'"

Use = Callable[[Any], Awaitable[None]]


class Driver:
    """One connection of the app, kept from request to request."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection: Any = None

    async def open(self) -> None:
        raise NotImplementedError

    async def run(self, sql: str) -> None:
        await self.connection.execute(sql)

    async def begin(self) -> None:
        """Most drivers begin a transaction by themselves."""

    async def commit(self) -> None:
        await self.connection.commit()

    async def enlist(self) -> None:
        await current().enlist(self.connection)

    async def between(self) -> None:
        """What an app does between two requests."""

    async def close(self) -> None:
        await self.connection.close()


class Asyncpg(Driver):
    async def open(self) -> None:
        self.connection = await asyncpg.connect(self.url)

    async def begin(self) -> None:
        self._transaction = self.connection.transaction()
        await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()


class PsycopgAsync(Driver):
    async def open(self) -> None:
        self.connection = await psycopg.AsyncConnection.connect(self.url)


class Psycopg(Driver):
    async def open(self) -> None:
        self.connection = psycopg.connect(self.url)

    async def run(self, sql: str) -> None:
        self.connection.execute(sql)

    async def commit(self) -> None:
        self.connection.commit()

    async def close(self) -> None:
        self.connection.close()


class SqlAlchemyAsyncpg(Driver):
    async def open(self) -> None:
        url = self.url.replace("postgresql://", "postgresql+asyncpg://")
        self._engine = create_async_engine(url, pool_size=1, max_overflow=0)
        self.connection = AsyncSession(self._engine)

    async def run(self, sql: str) -> None:
        await self.connection.execute(text(sql))

    async def between(self) -> None:
        await self.connection.close()

    async def close(self) -> None:
        await self.connection.close()
        await self._engine.dispose()


class SqlAlchemyPsycopg(Driver):
    async def open(self) -> None:
        self._engine = create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
        self.connection = Session(self._engine)

    async def run(self, sql: str) -> None:
        self.connection.execute(text(sql))

    async def commit(self) -> None:
        self.connection.commit()

    async def between(self) -> None:
        self.connection.close()

    async def close(self) -> None:
        self.connection.close()
        self._engine.dispose()


# Each: (statements, round trips) of oncekey, of two transactions by hand, and of one commit by hand.
COSTS: dict[type[Driver], tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    Asyncpg: ((5, 4), (5, 5), (5, 5)),
    PsycopgAsync: ((5, 4), (7, 7), (5, 5)),
    Psycopg: ((5, 4), (7, 7), (5, 5)),
    SqlAlchemyAsyncpg: ((5, 5), (7, 7), (5, 5)),
    SqlAlchemyPsycopg: ((5, 5), (7, 7), (5, 5)),
}


@pytest.fixture
def counter(postgres_server: PostgresServer) -> Iterator[WireCounter]:
    with WireCounter(postgres_server.port) as counter:
        yield counter


@pytest.fixture(params=COSTS)
async def driver(request: pytest.FixtureRequest, postgres_shop: Shop, counter: WireCounter) -> AsyncIterator[Driver]:
    _, _, after = postgres_shop.url.rpartition("@")
    database = after.partition("/")[2].partition("?")[0]
    driver: Driver = request.param(f"postgresql://postgres@127.0.0.1:{counter.port}/{database}")
    await driver.open()
    yield driver
    await driver.close()
    for api in postgres_shop.apis:
        await api.close()


async def steady(use: Callable[[int], Awaitable[None]], counter: WireCounter) -> tuple[int, int]:
    """What the tenth time costs: by then drivers have prepared what they prepare."""
    for number in range(10):
        counter.count()
        await use(number)
    return counter.count()


async def test_enlisted_request_costs_these_statements_and_round_trips(
    driver: Driver, postgres_shop: Shop, counter: WireCounter
) -> None:
    async def pay(request: Request) -> Response:
        await driver.enlist()
        await driver.run(PAY)
        return paid("k")

    api = postgres_shop.api(pay)

    async def ask(number: int) -> None:
        assert (await api.post(f"k-{number}")).status_code == 201
        await driver.between()

    assert await steady(ask, counter) == COSTS[type(driver)][0]
    assert postgres_shop.payments("k") == 10


async def test_same_by_hand_costs_these_statements_and_round_trips(
    driver: Driver, postgres_shop: Shop, counter: WireCounter
) -> None:
    postgres_shop.ask(BY_HAND)

    async def two(number: int) -> None:
        await driver.run(KEY.format(f"two-{number}"))
        if not isinstance(driver, Asyncpg):
            await driver.commit()
        await one(number, reserved=True)

    async def one(number: int, *, reserved: bool = False) -> None:
        await driver.begin()
        if not reserved:
            await driver.run(KEY.format(f"one-{number}"))
        await driver.run(PAY)
        await driver.run(DONE.format(number))
        await driver.commit()
        await driver.between()

    assert (await steady(two, counter), await steady(one, counter)) == COSTS[type(driver)][1:]


async def test_sqlite_request_costs_these_statements(sqlite_shop: Shop) -> None:
    """SQLite has no round trips. The driver says which statements ran."""
    seen: list[str] = []
    connection = sqlite3.connect(sqlite_shop.path, check_same_thread=False)

    async def pay(request: Request) -> Response:
        current().enlist(connection)
        connection.execute(PAY)
        return paid("k")

    api = sqlite_shop.api(pay)
    assert (await api.post("k-1")).status_code == 201
    connection.set_trace_callback(seen.append)
    assert (await api.post("k-2")).status_code == 201
    assert [statement.split()[0] for statement in seen] == [
        *("PRAGMA", "PRAGMA", "BEGIN", "UPDATE", "SELECT"),
        *("INSERT", "UPDATE", "SELECT", "COMMIT"),
    ]
    connection.close()
    await api.close()
