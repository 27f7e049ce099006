"""After the enlisted transaction a session or connection can read, and not write, until the request is over."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.errors import EnlistError
from oncekey.web import fastapi as web
from tests.enlist.handlers import INSERT, every_driver, handler
from tests.enlist.shop import TRANSACTIONAL, Asyncpg, Payer, Psycopg, PsycopgAsync, Shop, SqlAlchemy, paid

COUNT = "SELECT count(*) FROM payments"
SA_DRIVERS = [
    (kind, name)
    for kind in ("sqlite", "postgresql")
    for name in ("sa-session", "sa-connection", "sa-async-session", "sa-async-connection")
] + [("postgresql", "sa-asyncpg")]
every_sqlalchemy = pytest.mark.parametrize("payer", SA_DRIVERS, ids="-".join, indirect=True)


async def execute(payer: Payer, thing: Any, sql: str) -> Any:
    done = thing.execute(sa.text(sql) if hasattr(payer, "engine") else sql)
    return await done if inspect.isawaitable(done) else done


async def end(thing: Any, verb: str) -> None:
    done = getattr(thing, verb)()
    if inspect.isawaitable(done):
        await done


@every_sqlalchemy
async def test_rolled_back_session_reads_and_refuses_to_write(payer: Payer) -> None:
    seen: list[Any] = []

    async def go_on(thing: Any) -> Response:
        await end(thing, "rollback")
        seen.append((await execute(payer, thing, COUNT)).scalar())
        await end(thing, "commit")  # of a transaction that has only read
        for sql in (INSERT, "UPDATE payments SET cents = 6", "DELETE FROM payments"):
            with pytest.raises(EnlistError, match=r"Put what may fail into a savepoint \(`with .*begin_nested\(\):`\)"):
                await execute(payer, thing, sql)
        return paid("k-1")

    api = payer.shop.api(handler(payer, go_on))
    assert (await api.post()).status_code == 503
    assert seen == [0]
    assert (payer.shop.payments(), payer.shop.state()) == (0, State.FAILED_RETRYABLE)


@pytest.mark.parametrize("payer", [at for at in SA_DRIVERS if at[0] == "postgresql"], ids="-".join, indirect=True)
async def test_write_that_no_verb_shows_is_refused_by_the_server(payer: Payer) -> None:
    """A CTE that writes: the later transaction is read-only, and cannot be made READ WRITE again."""
    errors: list[str] = []

    async def go_on(thing: Any) -> Response:
        await end(thing, "rollback")
        for sql in (
            "SET TRANSACTION READ WRITE",
            f"WITH made AS ({INSERT} RETURNING 1) SELECT count(*) FROM made",
        ):
            with pytest.raises(sa.exc.DBAPIError) as caught:
                await execute(payer, thing, sql)
            errors.append(str(caught.value))
            await end(thing, "rollback")
        return paid("k-1")

    api = payer.shop.api(handler(payer, go_on))
    assert (await api.post()).status_code == 503
    assert "must be set before any query" in errors[0]
    assert "read-only transaction" in errors[1]
    assert (payer.shop.payments(), payer.shop.state()) == (0, State.FAILED_RETRYABLE)


@pytest.mark.parametrize("kind", [Psycopg, PsycopgAsync])
async def test_psycopg_after_a_refused_rollback_reads_and_does_not_write(
    postgres_shop: Shop, kind: type[Payer]
) -> None:
    payer = kind(postgres_shop)
    seen: list[Any] = []

    async def go_on(thing: Any) -> Response:
        with pytest.raises(EnlistError, match="oncekey ends it"):
            await end(thing, "rollback")
        cursor = await execute(payer, thing, COUNT)
        row = cursor.fetchone()
        seen.append((await row if inspect.isawaitable(row) else row)[0])
        with pytest.raises(EnlistError, match=r"with connection.transaction\(\):"):
            await execute(payer, thing, INSERT)
        return paid("k-1")

    api = postgres_shop.api(handler(payer, go_on))
    assert (await api.post()).status_code == 503
    assert seen == [0]
    assert (postgres_shop.payments(), postgres_shop.state()) == (0, State.FAILED_RETRYABLE)
    await payer.close()
    await api.close()


@every_driver
async def test_failed_statement_that_is_raised_can_be_retried(payer: Payer) -> None:
    """The most ordinary error there is: a constraint. Its transaction does not answer any more; the server does."""

    async def clash(thing: Any) -> Response:
        await execute(payer, thing, "INSERT INTO payments (key, cents) VALUES (NULL, NULL)")
        return paid("k-1")

    api = payer.shop.api(handler(payer, clash))
    assert (await api.post()).status_code == 500
    assert (payer.shop.payments(), payer.shop.state()) == (0, State.FAILED_RETRYABLE)


# ---------------------------------------------------------------- the guards end with the request


@pytest.mark.parametrize("ending", ["returned", "rolled back", "raised"])
@every_sqlalchemy
async def test_next_user_of_a_pooled_connection_is_not_guarded(payer: Payer, ending: str) -> None:
    """One connection in the pool: enlisted by one request, and then used by code that knows nothing of oncekey."""
    url = payer.engine.url  # type: ignore[attr-defined]
    engine: Any = (create_async_engine if payer.is_async else sa.create_engine)(url, pool_size=1, max_overflow=0)
    await _dispose(payer.engine)  # type: ignore[attr-defined]
    payer.engine = engine  # type: ignore[attr-defined]

    async def go(thing: Any) -> Response:
        if ending == "rolled back":
            await end(thing, "rollback")
        if ending == "raised":
            raise ValueError
        return paid("k-1")

    api = payer.shop.api(handler(payer, go))
    await api.post()
    await payer.close_opened()
    before = payer.shop.payments()
    thing = await payer.open()
    await execute(payer, thing, INSERT)
    await end(thing, "commit")
    await execute(payer, thing, INSERT)
    await end(thing, "commit")
    await payer.close_opened()
    assert payer.shop.payments() == before + 2


async def _dispose(engine: Any) -> None:
    done = engine.dispose()
    if inspect.isawaitable(done):
        await done


async def test_background_task_writes_with_the_session_after_the_response(shop: Shop) -> None:
    payer = SqlAlchemy(shop)

    def go(thing: Any) -> Response:
        def later() -> None:
            thing.execute(sa.text("INSERT INTO payments (key, cents) VALUES ('later', 5)"))
            thing.commit()

        return JSONResponse({}, 201, background=BackgroundTask(later))

    api = shop.api(handler(payer, go))
    assert (await api.post()).status_code == 201
    await api.once.aclose()
    assert (shop.payments(), shop.payments("later")) == (1, 1)
    await payer.close()


async def test_connection_given_back_to_its_pool_in_the_handler_is_free(shop: Shop) -> None:
    """The session is closed, so its connection is the pool's: another session of the handler may write with it."""
    engine = sa.create_engine(SqlAlchemy(shop).url(), pool_size=1, max_overflow=0)

    async def pay(request: Request) -> Response:
        with Session(engine) as session:
            await current().enlist(session)
        with Session(engine) as another:
            another.execute(sa.text("INSERT INTO payments (key, cents) VALUES ('another', 5)"))
            another.commit()
        return paid("k-1")

    api = shop.api(pay)
    assert (await api.post()).status_code == 503
    assert (shop.payments("another"), shop.state()) == (1, State.FAILED_RETRYABLE)
    engine.dispose()


# ---------------------------------------------------------------- commit="caller"


@pytest.mark.parametrize("rolls_back", [False, True])
async def test_caller_that_reads_after_its_end_changes_nothing(shop: Shop, rolls_back: bool) -> None:
    """A unit of work that refreshes after its commit, or goes on writing after its rollback."""
    url = SqlAlchemy(shop).url().replace("sqlite:", "sqlite+aiosqlite:")
    engine = create_async_engine(url, poolclass=NullPool)
    app = FastAPI()
    once = OnceKey(shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)
    web.protect(app, once)
    seen: list[Any] = []

    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            yield session
            await (session.rollback() if rolls_back else session.commit())
            seen.append((await session.execute(sa.text(COUNT))).scalar())
            if rolls_back:
                with pytest.raises(EnlistError):
                    await session.execute(sa.text(INSERT))
            else:  # it is committed: what comes now is the app's own
                await session.execute(sa.text("INSERT INTO payments (key, cents) VALUES ('log', 5)"))
                await session.commit()

    @app.post("/payments", status_code=201)
    async def pay(session: AsyncSession = Depends(session)) -> Any:  # noqa: B008
        await current().enlist(session, commit="caller")
        await session.execute(sa.text(INSERT))
        return {}

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        status = (await http.post("/payments", headers={"Idempotency-Key": "k-1"})).status_code
    if rolls_back:
        assert (status, shop.payments(), shop.state(), seen) == (503, 0, State.FAILED_RETRYABLE, [0])
    else:
        assert (status, shop.payments(), shop.state(), seen) == (201, 1, State.COMPLETED, [1])
        assert shop.payments("log") == 1
    await once.aclose()
    await engine.dispose()


# ---------------------------------------------------------------- phases


@every_driver
async def test_phase_that_rolls_back_and_writes_again_commits_nothing_or_is_unknown(payer: Payer) -> None:
    async def pay(request: Request) -> Response:
        thing = await payer.open()

        async def work() -> None:
            await execute(payer, thing, INSERT)
            try:
                await end(thing, "rollback") if hasattr(thing, "rollback") else await thing.execute("ROLLBACK")
            except Exception:
                assert not isinstance(payer, Asyncpg)
            await execute(payer, thing, INSERT)
            await end(thing, "commit") if hasattr(thing, "commit") else None

        await current().phase("pay", work, on=thing)
        return paid("k-1")

    api = payer.shop.api(pay, Policy(effects="phased"))
    for _ in range(3):
        assert (await api.post()).status_code in (409, 500, 503)
        await payer.close_opened()
    if isinstance(payer, Asyncpg):
        assert (payer.shop.payments(), payer.shop.state()) == (1, State.UNKNOWN)
    else:
        assert (payer.shop.payments(), payer.shop.state()) == (0, State.FAILED_RETRYABLE)


@every_driver
async def test_phase_after_one_that_rolled_back_works_on_the_same_connection(payer: Payer) -> None:
    async def pay(request: Request) -> Response:
        thing = await payer.open()

        async def undo() -> None:
            await execute(payer, thing, INSERT)
            await end(thing, "rollback") if hasattr(thing, "rollback") else await thing.execute("ROLLBACK")

        async def work() -> None:
            await execute(payer, thing, INSERT)

        with suppress(Exception):
            await current().phase("undo", undo, on=thing)
        await current().phase("work", work, on=thing)
        return paid("k-1")

    api = payer.shop.api(pay, Policy(effects="phased"))
    status = (await api.post()).status_code
    if isinstance(payer, Asyncpg):  # what it wrote after its rollback, we would not know
        assert (status, payer.shop.payments(), payer.shop.state()) == (409, 0, State.UNKNOWN)
    else:
        assert (status, payer.shop.payments(), payer.shop.state()) == (201, 1, State.COMPLETED)


# ---------------------------------------------------------------- what it costs


async def test_enlisting_takes_two_statements_of_the_apps_connection(shop: Shop) -> None:
    """One at the start and one at the end (SQLite: two each): the guards send none."""
    payer = SqlAlchemy(shop)
    statements: list[str] = []

    @sa.event.listens_for(payer.engine, "before_cursor_execute")
    def count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    api = shop.api(handler(payer))
    assert (await api.post()).status_code == 201
    assert len(statements) == 1 + (2 if shop.kind == "postgresql" else 4)
    await payer.close()
