"""How an enlisted request ends: how many commits it takes, late failures, and what the app commits itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psycopg
import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.web import fastapi as web
from oncekey.web.asgi import IdempotencyMiddleware
from tests.enlist.handlers import handler
from tests.enlist.shop import (
    TRANSACTIONAL,
    Asyncpg,
    Payer,
    Psycopg,
    PsycopgAsync,
    Shop,
    SqlAlchemy,
    SqlAlchemyAsync,
    paid,
)
from tests.web.apps import until


async def test_enlisted_request_takes_two_commits(postgres_shop: Shop) -> None:
    """The reservation in the lane, and the handler's own with the completion in it."""
    payer = PsycopgAsync(postgres_shop)
    api = postgres_shop.api(handler(payer))
    assert (await api.post("warm")).status_code == 201

    taken = []
    for number in range(5):
        before = xids(postgres_shop)
        assert (await api.post(f"counted-{number}")).status_code == 201
        taken.append(xids(postgres_shop) - before)
    assert min(taken) == 2, "more only where autovacuum takes a number meanwhile"
    await payer.close()
    await api.close()


def xids(shop: Shop) -> int:
    """The number of the next transaction that writes: each commit with a write in it takes one."""
    return int(shop.ask("SELECT txid_snapshot_xmax(txid_current_snapshot())")[0][0])


# ---------------------------------------------------------------- late failures


async def test_a_deferred_constraint_fails_at_commit(postgres_shop: Shop) -> None:
    postgres_shop.ask("CREATE TABLE IF NOT EXISTS customers (name text PRIMARY KEY)")
    postgres_shop.ask(
        "CREATE TABLE IF NOT EXISTS orders (name text REFERENCES customers (name) DEFERRABLE INITIALLY DEFERRED)"
    )
    payer = SqlAlchemy(postgres_shop)

    def order(thing: Any) -> Response:
        thing.execute(sa.text("INSERT INTO orders VALUES ('nobody')"))
        return paid("k-1")

    api = postgres_shop.api(handler(payer, order))
    answer = await api.post()
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:oncekey:problem:not-executed")
    assert (postgres_shop.payments(), postgres_shop.state()) == (0, State.FAILED_RETRYABLE)
    await payer.close()
    await api.close()


async def test_a_flush_that_fails_at_the_end(shop: Shop) -> None:
    """The session still had something to write, and the database does not take it."""
    metadata = sa.MetaData()
    table = sa.Table("things", metadata, sa.Column("id", sa.Integer, primary_key=True))
    engine = sa.create_engine(SqlAlchemy(shop).url())
    metadata.create_all(engine)

    class Thing:
        id: int

    registry = sa.orm.registry()
    registry.map_imperatively(Thing, table)

    def handle(thing: Any) -> Response:
        thing.execute(sa.text("INSERT INTO things VALUES (1)"))
        late = Thing()
        late.id = 1
        thing.add(late)
        return paid("k-1")

    payer = SqlAlchemy(shop)
    api = shop.api(handler(payer, handle))
    assert (await api.post()).status_code == 503
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    await payer.close()
    registry.dispose()
    metadata.drop_all(engine)
    engine.dispose()


async def test_with_effects_elsewhere_a_lost_commit_is_unknown(shop: Shop) -> None:
    """The transaction did not happen, but what the handler did outside of it may have: no second run."""
    payer = SqlAlchemy(shop)

    def close(thing: Any) -> Response:
        thing.close()
        return paid("k-1")

    api = shop.api(handler(payer, close), Policy(effects="external"))
    assert (await api.post()).status_code == 409
    assert (shop.payments(), shop.state()) == (0, State.UNKNOWN)
    await payer.close()


@pytest.mark.parametrize(("status", "payments", "state"), [(201, 1, State.COMPLETED), (404, 0, State.FAILED)])
async def test_error_status_of_a_bare_asgi_app_counts_as_raised(
    shop: Shop, status: int, payments: int, state: State
) -> None:
    """A bare ASGI app: a 4xx may have been an exception, and counts as one."""
    payer = SqlAlchemy(shop)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        session = await payer.open()
        await current().enlist(session)
        payer.pay(session, "k-1")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    once = OnceKey(shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)
    transport = httpx.ASGITransport(IdempotencyMiddleware(app, once))
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        assert (await http.post("/payments", headers={"Idempotency-Key": "k-1"})).status_code == status
    assert (shop.payments(), shop.state()) == (payments, state)
    await payer.close()
    await once.aclose()


async def test_a_tombstone_commits_with_the_writes(shop: Shop) -> None:
    """A response that is streamed: the key completes in the same commit, and only the body is not kept."""
    payer = SqlAlchemy(shop)

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * 2048
        yield b"y" * 2048

    policy = Policy(effects="transactional", max_response_bytes=1024)
    api = shop.api(handler(payer, lambda thing: StreamingResponse(chunks())), policy)
    assert len((await api.post()).content) == 4096
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    record = shop.record()
    assert record is not None
    assert record.response is not None
    assert record.response.body is None
    await payer.close()


async def test_cancellation_during_the_commit_waits_for_its_end(shop: Shop) -> None:
    """A time limit of the app around its own sending does not cut the commit in two, and waits for its end."""
    payer = SqlAlchemyAsync(shop)
    over: list[bool] = []

    class Hasty:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def send_in_no_time(message: Any) -> None:
                if message["type"] == "http.response.start":
                    return await send(message)
                sending = asyncio.ensure_future(send(message))
                await asyncio.sleep(0)  # it has begun
                sending.cancel()
                await asyncio.wait([sending])
                over.append(operation.enlisted is None)
                return None

            operation = current()
            await self.app(scope, receive, send_in_no_time)

    api = shop.api(handler(payer))
    api.app.user_middleware.append(Middleware(Hasty))  # further in than ours
    request = asyncio.ensure_future(api.post())
    await until(lambda: over, "cancelled")
    assert over == [True]
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    request.cancel()
    await asyncio.wait([request])
    await payer.close()


# ---------------------------------------------------------------- commit="caller"


def caller_app(shop: Shop, engine: Any, *, commits: bool) -> tuple[FastAPI, OnceKey]:
    app = FastAPI()
    once = OnceKey(shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)
    web.protect(app, once)

    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            yield session
            if commits:
                await session.commit()

    @app.post("/payments", status_code=201)
    async def pay(session: AsyncSession = Depends(session)) -> Any:  # noqa: B008
        await current().enlist(session, commit="caller")
        await session.execute(sa.text("INSERT INTO payments (key, cents) VALUES ('k-1', 5)"))
        return {"paid": True}

    return app, once


@pytest.mark.parametrize("commits", [True, False])
async def test_response_waits_for_the_commit_of_the_app(shop: Shop, commits: bool) -> None:
    """The response waits until the app's own dependency has committed; if it does not, nothing was done."""
    url = SqlAlchemy(shop).url().replace("sqlite:", "sqlite+aiosqlite:")
    engine = create_async_engine(url, poolclass=NullPool)
    app, once = caller_app(shop, engine, commits=commits)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        answer = await http.post("/payments", headers={"Idempotency-Key": "k-1"})
        if commits:
            assert answer.status_code == 201
            assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
            again = await http.post("/payments", headers={"Idempotency-Key": "k-1"})
            assert again.content == answer.content
        else:
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:oncekey:problem:not-executed")
            assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    await once.aclose()
    await engine.dispose()


async def test_the_app_commits_too_early(shop: Shop) -> None:
    """With commit='caller' too, the key must be completed in that transaction."""
    payer = SqlAlchemy(shop)

    async def commit(thing: Any) -> Response:
        thing.commit()
        return paid("k-1")

    api = shop.api(handler(payer, commit, commit="caller"))
    assert (await api.post()).status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    await payer.close()


@pytest.mark.parametrize("kind", [Psycopg, PsycopgAsync])
async def test_early_commit_of_a_callers_psycopg_connection_is_refused(postgres_shop: Shop, kind: type[Payer]) -> None:
    payer = kind(postgres_shop)

    async def commit(thing: Any) -> Response:
        await payer.commit(thing)
        return paid("k-1")

    api = postgres_shop.api(handler(payer, commit, commit="caller"))
    assert (await api.post()).status_code == 500
    assert (postgres_shop.payments(), postgres_shop.state()) == (0, State.FAILED_RETRYABLE)
    await payer.close()
    await api.close()


@pytest.mark.parametrize("kind", [Psycopg, PsycopgAsync])
async def test_callers_block_that_commits_in_the_handler_is_noticed(postgres_shop: Shop, kind: type[Payer]) -> None:
    """psycopg ends its blocks by itself, and nothing can refuse that: the server knows what happened."""
    payer = kind(postgres_shop)

    async def pay(request: Request) -> Response:
        thing = await payer.open()
        if isinstance(thing, psycopg.Connection):
            with thing.transaction():
                await current().enlist(thing, commit="caller")
                payer.pay(thing, "k-1")
        else:
            async with thing.transaction():
                await current().enlist(thing, commit="caller")
                await payer.pay(thing, "k-1")
        return paid("k-1")

    api = postgres_shop.api(pay)
    answer = await api.post()
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:oncekey:problem:outcome-unknown")
    assert (postgres_shop.payments(), postgres_shop.state()) == (1, State.UNKNOWN)
    await payer.close()
    await api.close()


async def test_committed_by_hand_and_then_raised(postgres_shop: Shop) -> None:
    """Raising does not undo what the handler has committed: the key must not be free for another run."""
    payer = Asyncpg(postgres_shop)

    async def commit(thing: Any) -> Response:
        await thing.execute("COMMIT")
        raise RuntimeError("no")

    api = postgres_shop.api(handler(payer, commit))
    assert (await api.post()).status_code in (409, 500)
    assert (postgres_shop.payments(), postgres_shop.state()) == (1, State.UNKNOWN)
    await payer.close()
    await api.close()
