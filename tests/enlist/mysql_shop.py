"""A shop in MySQL (MariaDB here), and a ``Payer`` for each of its drivers. ``key`` is a reserved word there."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import aiomysql
import asyncmy
import pymysql
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from tests.enlist.shop import Payer, Scoped, Shop, SqlAlchemy, SqlAlchemyAsync, SqlAlchemyConnection
from tests.stores.mysql import run


def quoted(sql: str) -> str:
    return re.sub(r"\bkey\b(?=[ ,])", "`key`", sql)


class MysqlShop(Shop):
    driver = ""
    """Of Django."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.kind = "mysql"

    def ask(self, sql: str) -> list[Any]:
        return run(self.url, quoted(sql))


def _insert(key: str) -> str:
    return f"INSERT INTO payments (`key`, cents) VALUES ('{key}', 5)"


class Pymysql(Payer):
    is_async = False

    def make(self) -> Any:
        parts = urlsplit(self.shop.url)
        place: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
        return pymysql.connect(**place, database=parts.path[1:], ssl_disabled=True)

    def pay(self, thing: Any, key: str) -> Any:
        thing.cursor().execute(_insert(key))

    async def close_opened(self) -> None:
        while self.opened:
            thing = self.opened.pop()
            if thing.open:
                thing.close()


class Mysqlclient(Pymysql):
    """mysqlclient is written in C and needs a library of MySQL or MariaDB, so it is not in requirements/dev.txt."""

    def make(self) -> Any:
        parts = urlsplit(self.shop.url)
        place: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
        return import_module("MySQLdb").connect(**place, database=parts.path[1:])


class Aiomysql(Payer):
    driver: Any = aiomysql

    async def make(self) -> Any:
        parts = urlsplit(self.shop.url)
        place: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
        return await self.driver.connect(**place, db=parts.path[1:])

    async def pay(self, thing: Any, key: str) -> None:
        async with thing.cursor() as cursor:
            await cursor.execute(_insert(key))

    async def close_opened(self) -> None:
        while self.opened:
            with suppress(OSError, AttributeError):  # asyncmy 0.2.7, of a connection that is lost or closed already
                await self.opened.pop().ensure_closed()


class Asyncmy(Aiomysql):
    driver = asyncmy


class _Sa(SqlAlchemy):
    def url(self) -> str:
        return self.shop.url.replace("mysql:", "mysql+pymysql:")

    def pay(self, thing: Any, key: str) -> Any:
        thing.execute(sa.text(_insert(key)))


class SaSession(_Sa):
    def make(self) -> Any:
        return Session(self.engine)


class SaMariadb(SaSession):
    """SQLAlchemy calls it another dialect."""

    def url(self) -> str:
        return self.shop.url.replace("mysql:", "mariadb+pymysql:")


class SaMysqlclient(SaSession):
    def url(self) -> str:
        return self.shop.url.replace("mysql:", "mysql+mysqldb:")


class SaScoped(_Sa, Scoped): ...


class SaConnection(_Sa, SqlAlchemyConnection): ...


class SaAsyncmy(SqlAlchemyAsync):
    name = "asyncmy"

    def __init__(self, shop: Shop) -> None:
        Payer.__init__(self, shop)
        self.engine = create_async_engine(shop.url.replace("mysql:", f"mysql+{self.name}:"), poolclass=NullPool)

    def make(self) -> Any:
        return AsyncSession(self.engine)

    async def pay(self, thing: Any, key: str) -> None:
        await thing.execute(sa.text(_insert(key)))


class SaAiomysql(SaAsyncmy):
    name = "aiomysql"


MYSQL: dict[str, type[Payer]] = {
    "pymysql": Pymysql,
    "mysqlclient": Mysqlclient,
    "aiomysql": Aiomysql,
    "asyncmy": Asyncmy,
    "sa-session": SaSession,
    "sa-mariadb": SaMariadb,
    "sa-mysqlclient": SaMysqlclient,
    "sa-scoped": SaScoped,
    "sa-connection": SaConnection,
    "sa-asyncmy": SaAsyncmy,
    "sa-aiomysql": SaAiomysql,
}
