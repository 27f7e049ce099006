"""The app goes on while we store its response, and closes the session under us.

``BaseHTTPMiddleware`` of starlette before 1.7 does that when it stands between us and the app: its ``send`` returns
before ours has. Whatever comes of it: rows and a completed key, or no rows, a key that can be retried, and an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from oncekey import SINGLE_TENANT, OnceKey, current
from oncekey.core.states import State
from oncekey.web import fastapi as web
from tests.enlist.shop import TRANSACTIONAL, Shop

KEYS = [f"k-{number}" for number in range(6)]
INSERT = sa.text("INSERT INTO payments (key, cents) VALUES (:key, 5)")


class GoesAhead:
    """Lets the app go on while its messages are still being sent, as that middleware does."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def run() -> None:
            try:
                await self.app(scope, receive, messages.put)
            finally:
                await messages.put(None)

        running = asyncio.ensure_future(run())
        while (message := await messages.get()) is not None:
            await send(message)
        return await running


def make_app(shop: Shop, driver: str, commit: Any, engines: list[Any]) -> tuple[FastAPI, OnceKey]:
    app = FastAPI()
    app.add_middleware(GoesAhead)
    once = OnceKey(shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)
    web.protect(app, once)
    if driver == "sync":
        engine: Any = sa.create_engine(shop.url.replace("postgresql:", "postgresql+psycopg:"))
        app.post("/payments", status_code=201)(_sync(engine, commit))
    else:
        url = shop.url.replace("postgresql:", f"postgresql+{driver}:").replace("sqlite:", "sqlite+aiosqlite:")
        engine = create_async_engine(url, poolclass=NullPool)
        app.post("/payments", status_code=201)(_async(engine, commit))
    engines.append(engine)
    return app, once


def _sync(engine: Any, commit: Any) -> Any:
    def session() -> Iterator[Session]:
        with Session(engine) as session:
            yield session
            if commit == "caller":
                session.commit()

    def pay(session: Session = Depends(session)) -> Any:  # noqa: B008
        current().blocking.enlist(session, commit=commit)
        session.execute(INSERT, {"key": current().key})
        return {}

    return pay


def _async(engine: Any, commit: Any) -> Any:
    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            yield session
            if commit == "caller":
                await session.commit()

    async def pay(session: AsyncSession = Depends(session)) -> Any:  # noqa: B008
        await current().enlist(session, commit=commit)
        await session.execute(INSERT, {"key": current().key})
        return {}

    return pay


# SQLAlchemy refuses to close a session while it commits: the app then leaves its connection to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("commit", ["engine", "caller"])
@pytest.mark.parametrize(
    ("kind", "driver"),
    [("sqlite", "sync"), ("sqlite", "aiosqlite"), ("postgresql", "sync"), ("postgresql", "psycopg"),
     ("postgresql", "asyncpg")],
)  # fmt: skip
async def test_session_closed_while_its_response_is_stored_commits_all_or_nothing(
    request: pytest.FixtureRequest, kind: str, driver: str, commit: str
) -> None:
    shop: Shop = request.getfixturevalue("sqlite_shop" if kind == "sqlite" else "postgres_shop")
    engines: list[Any] = []
    app, once = make_app(shop, driver, commit, engines)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        answers = {key: (await http.post("/payments", headers={"Idempotency-Key": key})).status_code for key in KEYS}
    await asyncio.sleep(0)
    for key, status in answers.items():
        seen = (status, shop.state(key), shop.payments(key))
        assert seen in [(201, State.COMPLETED, 1), (503, State.FAILED_RETRYABLE, 0), (500, State.FAILED_RETRYABLE, 0)]
    await once.aclose()
    for engine in engines:
        done = engine.dispose()
        if driver != "sync":
            await done
