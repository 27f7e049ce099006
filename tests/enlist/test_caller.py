"""``commit="caller"`` where the app does not get to its commit: the block is its own, and only its own end ends it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import httpx
import psycopg
import pytest
from fastapi import Depends, FastAPI
from flask import Flask, g
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from oncekey import SINGLE_TENANT, OnceKey, current
from oncekey.core.states import State
from oncekey.web import fastapi as web
from oncekey.web import flask as flask_web
from tests.enlist.shop import TRANSACTIONAL, Shop


async def _asyncpg(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            yield connection
    finally:
        await connection.close()


async def _psycopg(url: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url) as connection, connection.transaction():
        yield connection


async def _psycopg_sync(url: str) -> AsyncIterator[Any]:
    with psycopg.connect(url) as connection, connection.transaction():
        yield connection


@pytest.mark.parametrize("ending", [500, 429, "raised"])
@pytest.mark.parametrize("block", [_asyncpg, _psycopg, _psycopg_sync])
async def test_block_of_the_app_does_not_commit_a_retryable_attempt(
    postgres_shop: Shop, block: Any, ending: int | str
) -> None:
    """I1: it returned an error, and left its block as after a success. Committed, the retry would be a second payment;
    and no statement after the answer is a commit of its own."""
    runs: list[int] = []
    late: list[str] = []
    app = FastAPI()
    once = OnceKey(postgres_shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)
    web.protect(app, once)

    async def transaction() -> AsyncIterator[Any]:
        async for connection in block(postgres_shop.url):
            yield connection
            if len(runs) == 1 and ending != "raised":
                try:
                    made = connection.execute("INSERT INTO payments (key, cents) VALUES ('k-1', 7)")
                    await made if not isinstance(connection, psycopg.Connection) else None
                except Exception as error:
                    late.append(type(error).__name__)

    in_transaction = Depends(transaction)

    @app.post("/payments")
    async def pay(connection: Any = in_transaction) -> Response:
        runs.append(1)
        await current().enlist(connection, commit="caller")
        made = connection.execute("INSERT INTO payments (key, cents) VALUES ('k-1', 5)")
        if not isinstance(connection, psycopg.Connection):
            await made
        if len(runs) == 1 and ending == "raised":
            raise ValueError
        return JSONResponse({}, 201 if len(runs) > 1 else int(ending))

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        told = [(await http.post("/payments", headers={"Idempotency-Key": "k-1"})).status_code for _ in range(3)]
    await once.aclose()
    assert told == [500 if ending == "raised" else ending, 201, 201]
    assert (postgres_shop.payments(), postgres_shop.state()) == (1, State.COMPLETED)
    if ending != "raised":
        assert [name.lower().removesuffix("error") for name in late] == ["infailedsqltransaction"]


@pytest.mark.parametrize("block", [_asyncpg, _psycopg, _psycopg_sync])
async def test_response_in_place_of_a_handler_is_decided_by_how_its_block_ended(
    postgres_shop: Shop, block: Any
) -> None:
    """I4: middleware responds while the handler runs in a block that only the app can end. The first storing leaves the
    block to the app; the second one reads how it ended, and the client gets an answer. Before, it got none, and the key
    stayed in progress."""
    running, responded = asyncio.Event(), asyncio.Event()
    app = FastAPI()
    once = OnceKey(postgres_shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)
    web.protect(app, once)

    class Impatient:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def drop(message: Any) -> None:
                pass

            handler = asyncio.ensure_future(self.app(scope, receive, drop))
            await running.wait()
            await JSONResponse({}, 504)(scope, receive, send)
            responded.set()
            await handler

    app.user_middleware.append(Middleware(Impatient))
    opened: list[Any] = []

    async def transaction() -> AsyncIterator[Any]:
        async for connection in block(postgres_shop.url):
            opened.append(connection)
            yield connection

    in_transaction = Depends(transaction)

    @app.post("/payments")
    async def pay(connection: Any = in_transaction) -> Response:
        await current().enlist(connection, commit="caller")
        running.set()
        await responded.wait()
        return JSONResponse({}, 201)

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        told = await http.post("/payments", headers={"Idempotency-Key": "k-1"})
    await once.aclose()
    for connection in opened:  # psycopg does not close it if its commit is refused
        closed = connection.close()
        if closed is not None:
            await closed
    assert (told.status_code, postgres_shop.state()) == (409, State.UNKNOWN)  # the block may have committed


def test_commit_that_fails_at_flask_teardown_leaves_the_key_retryable(sqlite_shop: Shop) -> None:
    """I4: a constraint that is looked at when it commits. The key may be retried, and others may write."""
    sqlite_shop.ask("CREATE TABLE shops (id integer PRIMARY KEY)")
    sqlite_shop.ask("CREATE TABLE orders (shop integer REFERENCES shops (id) DEFERRABLE INITIALLY DEFERRED)")
    app = Flask("shop")
    once = OnceKey(sqlite_shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)

    @app.post("/orders")
    def order() -> Any:
        g.connection = sqlite3.connect(sqlite_shop.path, check_same_thread=False)
        g.connection.execute("PRAGMA foreign_keys = ON")
        current().blocking.enlist(g.connection, commit="caller")
        g.connection.execute("INSERT INTO orders VALUES (7)")
        return {}, 201

    @app.post("/others")
    def other() -> Any:
        return {}, 201

    @app.teardown_appcontext
    def end(error: BaseException | None) -> None:
        connection = g.pop("connection", None)
        if connection is not None:
            try:
                connection.execute("COMMIT")
            finally:
                connection.close()

    flask_web.protect(app, once)
    client = app.test_client()
    for _ in range(2):
        with pytest.raises(sqlite3.IntegrityError):
            client.post("/orders", headers={"Idempotency-Key": "k-1"})
        assert sqlite_shop.state() is State.FAILED_RETRYABLE
    assert client.post("/others", headers={"Idempotency-Key": "k-2"}).status_code == 201
    assert once.engine.keeper._live == {}
    once.close()
