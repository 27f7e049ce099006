"""What people write by hand instead of a library: a table of keys, and two statements around the handler.

Three ways, each as a careful developer would write it with a pool of connections: asyncpg with a connection for each of
the two statements, asyncpg with one connection that is held while the handler runs, and SQLAlchemy's async session. A
handler that inserts a row does so in the transaction that completes the key, so its two transactions protect as much as
ours: a crash after the commit is replayed, and a crash before it left nothing behind. None of them has leases, so a key
whose process died stays reserved for ever; none tells an unknown outcome from a request that is under way.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from benchmarks.apps import Executions

ASYNCPG, ASYNCPG_HELD, SQLALCHEMY = GUARDS = ("asyncpg-by-hand", "asyncpg-by-hand-held", "sqlalchemy-by-hand")
POOL_SIZE = 32
"""As many as the handler that inserts has."""
TABLE = """CREATE TABLE IF NOT EXISTS keys_by_hand (
    key text PRIMARY KEY, fingerprint bytea NOT NULL, status integer, headers text, body bytea,
    created_at timestamptz NOT NULL DEFAULT now(), completed_at timestamptz)"""
RESERVE = "INSERT INTO keys_by_hand (key, fingerprint) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING RETURNING key"
FIND = "SELECT fingerprint, status, headers, body FROM keys_by_hand WHERE key = $1"
COMPLETE = "UPDATE keys_by_hand SET status = $2, headers = $3, body = $4, completed_at = now() WHERE key = $1"

Answer = Callable[[Any], Awaitable[JSONResponse]]
"""The handler, with the connection or session for the row that it inserts."""
Way = Callable[[str, bytes, Answer], Awaitable[Response]]
"""One way to protect the handler: by the key and the fingerprint of the request."""


def app(guard: str, url: str, executions: Executions, *, inserts: bool) -> Starlette:
    from benchmarks.apps import created, payment

    ways = {ASYNCPG: _asyncpg, ASYNCPG_HELD: _asyncpg_held, SQLALCHEMY: _sqlalchemy}
    insert = _insert_by_session if guard == SQLALCHEMY else _insert
    opening = asyncio.Lock()
    opened: list[Way] = []

    async def pay(request: Request) -> Response:
        if not opened:
            async with opening:
                if not opened:
                    opened.append(await ways[guard](url, inserts))
        key = request.headers.get("idempotency-key")
        if key is None:
            return JSONResponse({"error": "a key is needed"}, status_code=400)
        body = await request.body()
        asked = json.loads(body)

        async def answer(connection: Any) -> JSONResponse:
            if inserts:
                await insert(connection, asked)
            return created(payment(executions.next(), asked))

        return await opened[0](key, hashlib.sha256(body).digest(), answer)

    return Starlette(
        routes=[Route("/payments", pay, methods=["POST"]), Route("/executions", executions.show, methods=["GET"])]
    )


def _replay(found: Any, fingerprint: bytes) -> Response:
    if found is None or found[1] is None:
        return JSONResponse({"error": "the first request is under way"}, status_code=409)
    if found[0] != fingerprint:
        return JSONResponse({"error": "the key was used with another request"}, status_code=422)
    headers = {**json.loads(found[2]), "Idempotency-Replayed": "true"}
    return Response(found[3], status_code=found[1], headers=headers)


def _kept(response: Response) -> tuple[int, str, bytes]:
    """Status, headers and body as they are stored; the length is made anew."""
    headers = {name.decode(): value.decode() for name, value in response.raw_headers if name != b"content-length"}
    return response.status_code, json.dumps(headers), bytes(response.body)


# ---------------------------------------------------------------- asyncpg


async def _pool(url: str) -> Any:
    import asyncpg

    return await asyncpg.create_pool(url, min_size=POOL_SIZE, max_size=POOL_SIZE)


async def _insert(connection: Any, asked: dict[str, Any]) -> None:
    from benchmarks.apps import BUSINESS_INSERT

    await connection.execute(BUSINESS_INSERT, asked["amount"], asked["currency"])


async def _run_and_complete(connection: Any, key: str, answer: Answer, inserts: bool) -> Response:
    if not inserts:
        response = await answer(None)
        await connection.execute(COMPLETE, key, *_kept(response))
        return response
    async with connection.transaction():
        response = await answer(connection)
        await connection.execute(COMPLETE, key, *_kept(response))
    return response


async def _asyncpg(url: str, inserts: bool) -> Way:
    """A connection for the reservation, and later one for the completion: none is held while the handler works."""
    pool = await _pool(url)

    async def protect(key: str, fingerprint: bytes, answer: Answer) -> Response:
        async with pool.acquire() as connection:
            if await connection.fetchval(RESERVE, key, fingerprint) is None:
                return _replay(await connection.fetchrow(FIND, key), fingerprint)
        if inserts:
            async with pool.acquire() as connection:
                return await _run_and_complete(connection, key, answer, inserts)
        response = await answer(None)
        async with pool.acquire() as connection:
            await connection.execute(COMPLETE, key, *_kept(response))
        return response

    return protect


async def _asyncpg_held(url: str, inserts: bool) -> Way:
    """One connection for the whole request: less work, and as many requests at a time as there are connections."""
    pool = await _pool(url)

    async def protect(key: str, fingerprint: bytes, answer: Answer) -> Response:
        async with pool.acquire() as connection:
            if await connection.fetchval(RESERVE, key, fingerprint) is None:
                return _replay(await connection.fetchrow(FIND, key), fingerprint)
            return await _run_and_complete(connection, key, answer, inserts)

    return protect


# ---------------------------------------------------------------- SQLAlchemy


async def _insert_by_session(session: Any, asked: dict[str, Any]) -> None:
    from sqlalchemy import text

    statement = text("INSERT INTO payments (amount, currency) VALUES (:amount, :currency)")
    await session.execute(statement, {"amount": asked["amount"], "currency": asked["currency"]})


async def _sqlalchemy(url: str, inserts: bool) -> Way:
    """Its Core in two sessions, one before and one after the handler, on asyncpg."""
    import sqlalchemy as sa
    from sqlalchemy.dialects.postgresql import insert
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

    engine = create_async_engine(
        sa.make_url(url).set(drivername="postgresql+asyncpg"), pool_size=POOL_SIZE, max_overflow=0
    )
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    keys = sa.table(
        "keys_by_hand", *map(sa.column, ("key", "fingerprint", "status", "headers", "body", "completed_at"))
    )
    columns = keys.c

    @asynccontextmanager
    async def transaction() -> AsyncIterator[Any]:
        async with sessions() as session, session.begin():
            yield session

    async def complete(session: Any, key: str, response: Response) -> None:
        status, headers, body = _kept(response)
        changed = {"status": status, "headers": headers, "body": body, "completed_at": sa.func.now()}
        await session.execute(sa.update(keys).where(columns.key == key).values(changed))

    async def protect(key: str, fingerprint: bytes, answer: Answer) -> Response:
        row = {"key": key, "fingerprint": fingerprint}
        reserve = insert(keys).values(row).on_conflict_do_nothing(index_elements=["key"]).returning(columns.key)
        async with transaction() as session:
            if (await session.execute(reserve)).scalar() is None:
                find = sa.select(columns.fingerprint, columns.status, columns.headers, columns.body)
                return _replay((await session.execute(find.where(columns.key == key))).first(), fingerprint)
        if inserts:
            async with transaction() as session:
                response = await answer(session)
                await complete(session, key, response)
            return response
        response = await answer(None)
        async with transaction() as session:
            await complete(session, key, response)
        return response

    return protect
