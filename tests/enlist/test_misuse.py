"""What cannot be enlisted is refused with a sentence that says what to do, before any business write.

The wrong moment in a transaction is in test_misused_transactions.py.
"""

from __future__ import annotations

import asyncio
import sqlite3
from copy import copy
from pathlib import Path
from typing import Any

import aiosqlite
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from starlette.requests import Request
from starlette.responses import Response

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.engine.operation import Operation
from oncekey.errors import EnlistError, NoOperation
from oncekey.testing.servers import PostgresServer
from oncekey.web.wsgi import IdempotencyMiddleware
from tests.enlist.refusals import INSERT, create_engine, refused
from tests.enlist.shop import (
    TRANSACTIONAL,
    Api,
    Asyncpg,
    Payer,
    Psycopg,
    PsycopgAsync,
    Shop,
    SqlAlchemy,
    SqlAlchemyAsync,
    SqlAlchemyAsyncpg,
    paid,
)

pytestmark = pytest.mark.usefixtures("dispose_of_engines")


async def test_enlist_of_another_type_is_refused(shop: Shop) -> None:
    async with refused(shop, lambda op: op.enlist(object()), "a object cannot be enlisted: give a SQLAlchemy Session"):
        pass


async def test_a_commit_that_does_not_exist(shop: Shop) -> None:
    async with refused(shop, lambda op: op.enlist(object(), commit="later"), "'engine' or 'caller'"):  # type: ignore[arg-type]
        pass


async def test_enlist_with_keys_in_memory_is_refused(sqlite_shop: Shop) -> None:
    errors: list[str] = []

    async def pay(request: Request) -> Response:
        connection = sqlite3.connect(sqlite_shop.path)
        with pytest.raises(EnlistError) as caught:
            current().enlist(connection)
        errors.append(str(caught.value))
        connection.close()
        return paid("k-1")

    api = Api("memory://", pay, TRANSACTIONAL)
    assert (await api.post()).status_code == 201
    assert "keep them in the app's own database" in errors[0]
    await api.close()


# ---------------------------------------------------------------- another database


async def test_enlist_of_another_kind_of_database_is_refused(postgres_shop: Shop, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "other.db", check_same_thread=False)
    async with refused(
        postgres_shop, lambda op: op.enlist(connection), "on sqlite and the keys are kept in postgresql"
    ):
        connection.close()
    await postgres_shop.apis[0].close()


@pytest.mark.parametrize("driver", ["sqlite3", "sqlalchemy", "aiosqlite", "memory"])
async def test_enlist_of_another_file_is_refused(sqlite_shop: Shop, tmp_path: Path, driver: str) -> None:
    other = tmp_path / "other.db"

    async def attempt(op: Operation) -> None:
        if driver == "aiosqlite":
            async with aiosqlite.connect(other) as connection:
                await op.enlist(connection)
        elif driver == "sqlalchemy":
            engine = create_engine(f"sqlite:///{other}")
            try:
                with Session(engine) as session:
                    await op.enlist(session)
            finally:
                engine.dispose()
        else:
            plain = sqlite3.connect(other if driver == "sqlite3" else ":memory:")
            try:
                await op.enlist(plain)
            finally:
                plain.close()

    async with refused(sqlite_shop, attempt, "not open on the file that keeps the keys"):
        await sqlite_shop.apis[0].close()


@pytest.mark.parametrize("whose", ["the app's", "the store's"])
async def test_the_same_file_by_another_name(sqlite_shop: Shop, tmp_path: Path, whose: str) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(sqlite_shop.path)

    async def pay(request: Request) -> Response:
        connection = sqlite3.connect(link if whose == "the app's" else sqlite_shop.path)
        connections.append(connection)
        await current().enlist(connection)
        connection.execute(INSERT)
        return paid("k-1")

    connections: list[sqlite3.Connection] = []
    api = Api(sqlite_shop.url if whose == "the app's" else f"sqlite:///{link}", pay, TRANSACTIONAL)
    assert (await api.post()).status_code == 201
    assert sqlite_shop.payments() == 1
    connections[0].close()
    await api.close()


async def test_enlist_of_another_postgres_database_is_refused(
    postgres_shop: Shop, postgres_server: PostgresServer
) -> None:
    """It has our tables too, but not this key."""
    url = postgres_server.database("elsewhere")
    Shop(url)

    async def attempt(op: Operation) -> None:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await op.enlist(connection)

    async with refused(postgres_shop, attempt, "another database or schema"):
        await postgres_shop.apis[0].close()
    postgres_server.drop_database("elsewhere")


@pytest.mark.parametrize("kind", [Psycopg, PsycopgAsync, Asyncpg, SqlAlchemy, SqlAlchemyAsync, SqlAlchemyAsyncpg])
async def test_a_postgres_database_without_our_tables(
    postgres_shop: Shop, postgres_server: PostgresServer, kind: type[Payer]
) -> None:
    payer = kind(postgres_shop)
    payer.shop = copy(postgres_shop)
    payer.shop.url = postgres_server.database("bare")
    payer.__init__(payer.shop)  # type: ignore[misc]

    async def attempt(op: Operation) -> None:
        await op.enlist(await payer.open())

    async with refused(postgres_shop, attempt, "sees no oncekey tables"):
        await postgres_shop.apis[0].close()
    await payer.close()
    postgres_server.drop_database("bare")


# ---------------------------------------------------------------- another thread, another loop


async def test_a_sqlite_connection_of_a_thread_pool(sqlite_shop: Shop) -> None:
    """The request ends in another thread, and this connection may not go there."""
    errors: list[str] = []

    def pay(request: Request) -> Response:
        connection = sqlite3.connect(sqlite_shop.path)
        try:
            current().blocking.enlist(connection)
        except EnlistError as error:
            errors.append(str(error))
            raise
        finally:
            connection.close()
        return paid("k-1")

    api = sqlite_shop.api(pay)
    assert (await api.post()).status_code == 500
    assert "check_same_thread=False" in errors[0]
    assert sqlite_shop.state() is State.FAILED_RETRYABLE
    assert (await api.post()).status_code == 500, "the gate was given back"
    await api.close()


async def test_async_connections_of_sync_code(sqlite_shop: Shop) -> None:
    errors: list[str] = []

    def pay(request: Request) -> Response:
        for enlist in (current().enlist, current().blocking.enlist):
            with pytest.raises(EnlistError) as caught:
                enlist(session)
            errors.append(str(caught.value))
        return paid("k-1")

    engine = create_async_engine(sqlite_shop.url.replace("sqlite:", "sqlite+aiosqlite:"))
    session = AsyncSession(engine)
    api = sqlite_shop.api(pay)
    assert (await api.post()).status_code == 201
    assert all("in an async handler" in error for error in errors)
    await api.close()


async def test_enlist_of_an_async_connection_under_wsgi_is_refused(sqlite_shop: Shop) -> None:
    """The loop in which they live is not there any more when the request ends."""
    errors: list[str] = []

    def app(environ: Any, start_response: Any) -> Any:
        async def enlist() -> None:
            await current().enlist(session)

        try:
            asyncio.run(enlist())
        except EnlistError as error:
            errors.append(str(error))
            raise
        start_response("201 Created", [])
        return [b"{}"]

    engine = create_async_engine(sqlite_shop.url.replace("sqlite:", "sqlite+aiosqlite:"))
    session = AsyncSession(engine)
    once = OnceKey(sqlite_shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)
    await asyncio.to_thread(call_wsgi, IdempotencyMiddleware(app, once))
    assert "under WSGI use a synchronous session" in errors[0]
    once.close()


def call_wsgi(app: Any, key: str = "k-1") -> tuple[str, bytes]:
    import io

    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/payments", "wsgi.input": io.BytesIO(), "CONTENT_LENGTH": "0"}
    answer: list[str] = []
    try:
        body = b"".join(app(environ | {"HTTP_IDEMPOTENCY_KEY": key}, lambda status, headers: answer.append(status)))
    except EnlistError:
        return "500", b""
    return answer[0], body


# ---------------------------------------------------------------- at the wrong moment


@pytest.mark.parametrize("effects", ["transactional", "external"])
async def test_enlist_that_is_not_awaited_makes_the_key_unknown(
    shop: Shop, caplog: pytest.LogCaptureFixture, effects: Any
) -> None:
    """What the handler committed by itself is there, and oncekey does not know of it: never a second run."""
    engine = create_async_engine(SqlAlchemy(shop).url().replace("sqlite:", "sqlite+aiosqlite:"), poolclass=NullPool)

    async def pay(request: Request) -> Response:
        async with AsyncSession(engine) as session:
            current().enlist(session)
            await session.execute(sa.text(INSERT))
            await session.commit()
        return paid("k-1")

    api = shop.api(pay, Policy(effects=effects))
    answer = await api.post()
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:oncekey:problem:outcome-unknown")
    assert shop.state() is State.UNKNOWN
    assert "was not awaited" in caplog.text
    await engine.dispose()


@pytest.mark.parametrize("status", [429, 500])
async def test_enlist_that_was_not_awaited_is_noticed_behind_an_error_too(shop: Shop, status: int) -> None:
    """What the handler wrote was committed on its own: retried, it would be written again."""
    engine = create_async_engine(SqlAlchemy(shop).url().replace("sqlite:", "sqlite+aiosqlite:"), poolclass=NullPool)

    async def pay(request: Request) -> Response:
        async with AsyncSession(engine) as session:
            current().enlist(session)
            await session.execute(sa.text(INSERT))
            await session.commit()
        return Response(status_code=status)

    api = shop.api(pay, Policy(effects="transactional"))
    assert [(await api.post()).status_code for _ in range(3)] == [409, 409, 409]
    assert (shop.payments(), shop.state()) == (1, State.UNKNOWN)
    await engine.dispose()


async def test_enlist_outside_of_a_request_raises(shop: Shop) -> None:
    record = None

    async def pay(request: Request) -> Response:
        nonlocal record
        record = current().record
        return paid("k-1")

    await shop.api(pay).post()
    assert record is not None
    with pytest.raises(NoOperation):
        Operation(record, TRANSACTIONAL, "single-tenant").enlist(object())


async def test_refused_after_enlisting_does_not_free_the_key(shop: Shop) -> None:
    """refuse() comes before any other verb."""
    engine = create_engine(SqlAlchemy(shop).url())

    async def pay(request: Request) -> Response:
        with Session(engine) as session:
            await current().enlist(session)
            current().refuse()
        return paid("k-1")

    api = shop.api(pay)
    assert (await api.post()).status_code == 500
    assert shop.state() is State.FAILED_RETRYABLE
    engine.dispose()
