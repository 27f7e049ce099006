"""The driver's own connection beneath what a handler has enlisted: ends of the transaction there, and its loss.

``test_own_endings.py`` has every way to end it, and ``test_mysql_endings.py`` the drivers of MySQL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import sqlalchemy as sa
from django.http import HttpResponse
from starlette.responses import JSONResponse, Response

from oncekey import current
from oncekey.core.states import State
from oncekey.engine.transactions.adapters import sqlalchemy_beneath
from oncekey.errors import EnlistError
from tests.enlist.django_site import Site, every_shop
from tests.enlist.handlers import INSERT, handler
from tests.enlist.own_endings import Way, check, driver_of, execute_on, handler_of
from tests.enlist.shop import POSTGRES, Payer, Shop, SqlAlchemyAsyncpg, SqlAlchemyConnection, paid

PG_SA = [("postgresql", name) for name in POSTGRES if name.startswith("sa-")]
every_postgres = pytest.mark.parametrize(
    "payer", [("postgresql", name) for name in POSTGRES], ids="-".join, indirect=True
)
every_sqlalchemy = pytest.mark.parametrize("payer", PG_SA, ids="-".join, indirect=True)


async def call(function: Callable[..., Any], *args: Any) -> Any:
    done = function(*args)
    return await done if isinstance(done, Awaitable) else done


async def send(payer: Payer, thing: Any, sql: str) -> None:
    await call(thing.execute, sa.text(sql) if hasattr(payer, "engine") else sql)


async def end_driver(raw: Any, verb: str) -> None:
    await (call(getattr(raw, verb)) if hasattr(raw, verb) else raw.execute(verb))


# ---------------------------------------------------------------- ends


@every_sqlalchemy
@pytest.mark.parametrize("verb", ["commit", "rollback"])
async def test_end_on_the_drivers_connection_is_refused_and_says_so(
    payer: Payer, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []

    async def end(thing: Any) -> Response:
        raw = await driver_of(thing)
        with pytest.raises(EnlistError) as caught:
            await end_driver(raw, verb)
        said.append(str(caught.value))
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert [(await api.post()).status_code for _ in range(2)] == [503, 503]
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)
    assert said[0].startswith(f"{verb.upper()} on the driver's connection of the SQLAlchemy ")
    assert "Take the commit() or rollback() out of the handler" in said[0]
    assert "the handler tried to end its enlisted transaction and caught the error" in caplog.text


@every_sqlalchemy
async def test_savepoints_on_the_drivers_connection_are_allowed(payer: Payer) -> None:
    async def nested(thing: Any) -> Response:
        raw = await driver_of(thing)
        for sql in ("SAVEPOINT a", INSERT, "ROLLBACK TO SAVEPOINT a", "SAVEPOINT b", INSERT, "RELEASE SAVEPOINT b"):
            await execute_on(raw, sql)
        return paid("k-1")

    api = payer.shop.api(handler(payer, nested))
    assert (await api.post()).status_code == 201
    assert (payer.shop.state(), payer.shop.payments()) == (State.COMPLETED, 2)


class AsyncpgConnection(SqlAlchemyAsyncpg):
    async def make(self) -> Any:
        return await self.engine.connect()


CTE = f"WITH made AS ({INSERT} RETURNING 1) SELECT count(*) FROM made"


async def _prepares(raw: Any) -> None:
    await (await raw.prepare(CTE)).fetch()


async def _copies(raw: Any) -> None:
    await raw.copy_records_to_table("payments", records=[("k-1", 5)], columns=["key", "cents"])


@pytest.mark.parametrize("writes", [_prepares, _copies, lambda raw: raw.fetch(CTE)], ids=["prepare", "copy", "fetch"])
async def test_write_of_asyncpg_after_the_rollback_makes_the_key_unknown(
    postgres_shop: Shop, writes: Callable[[Any], Awaitable[Any]]
) -> None:
    """The connection has rolled back, and SQLAlchemy has not begun again. asyncpg commits each statement, and no verb
    shows that it writes."""
    payer = AsyncpgConnection(postgres_shop)

    async def end(thing: Any) -> Response:
        await thing.rollback()
        await writes(await driver_of(thing))
        return JSONResponse({}, 409)

    api = postgres_shop.api(handler(payer, end))
    for _ in range(2):
        assert (await api.post()).status_code == 409
        await payer.close_opened()
    assert (postgres_shop.state(), postgres_shop.payments()) == (State.UNKNOWN, 1)
    await payer.close()
    await api.close()


async def test_psycopg_in_autocommit_mode_after_the_rollback_makes_the_key_unknown(postgres_shop: Shop) -> None:
    payer = SqlAlchemyConnection(postgres_shop)

    async def end(thing: Any) -> Response:
        thing.rollback()
        raw = thing.connection.driver_connection
        raw.autocommit = True
        raw.execute(CTE)
        return paid("k-1")

    api = postgres_shop.api(handler(payer, end))
    assert (await api.post()).status_code == 409
    assert (postgres_shop.state(), postgres_shop.payments()) == (State.UNKNOWN, 1)
    await payer.close()
    await api.close()


@pytest.mark.parametrize("kind", [SqlAlchemyConnection, AsyncpgConnection])
async def test_connection_that_was_lost_and_opened_again_by_sqlalchemy_is_watched(
    postgres_shop: Shop, kind: type[Payer]
) -> None:
    """After a rollback, SQLAlchemy takes another driver connection."""
    payer = kind(postgres_shop)

    async def end(thing: Any) -> Response:
        await terminate(payer, thing)
        with pytest.raises(sa.exc.DBAPIError):
            await send(payer, thing, INSERT)
        await call(thing.rollback)
        await send(payer, thing, "SELECT 1")
        raw = await driver_of(thing)
        for refused in (lambda: end_driver(raw, "rollback"), lambda: execute_on(raw, INSERT)):
            with pytest.raises(EnlistError):
                await refused()
        return paid("k-1")

    api = postgres_shop.api(handler(payer, end))
    assert (await api.post()).status_code == 503
    assert (postgres_shop.state(), postgres_shop.payments()) == (State.FAILED_RETRYABLE, 0)
    await payer.close()
    await api.close()


# ---------------------------------------------------------------- drivers that cannot be watched


@pytest.mark.parametrize("then", [(), ("rollback",), ("read",), ("read", "rollback")], ids=" ".join)
@pytest.mark.parametrize("kind", [POSTGRES[name] for _, name in PG_SA], ids=lambda kind: kind.__name__)
async def test_end_that_cannot_be_seen_makes_the_key_unknown(
    postgres_shop: Shop, kind: type[Payer], then: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with psycopg2, pg8000 and others: only the mark tells that another transaction is open, or none."""
    monkeypatch.setattr(sqlalchemy_beneath, "_watch", lambda *_: None)
    payer, wrong = kind(postgres_shop), []
    way = Way(("raw.rollback", "raw.write", "raw.commit", *then), beneath=True, recognised=False)
    for ending in ("returns 201", "raises"):
        key = ending.replace(" ", "-")
        api = postgres_shop.api(handler_of(payer, way, ending, swallows=True))
        told = []
        for _ in range(3):
            told.append((await api.post(key)).status_code)
            await payer.close_opened()
        wrong += check(postgres_shop, payer, way, key, told)
        assert postgres_shop.state(key) is State.UNKNOWN
        await api.close()
    assert not wrong
    await payer.close()


async def test_statement_after_an_end_that_cannot_be_seen_is_refused(
    postgres_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlalchemy_beneath, "_watch", lambda *_: None)
    payer = SqlAlchemyConnection(postgres_shop)

    async def end(thing: Any) -> Response:
        thing.connection.commit()
        with pytest.raises(EnlistError, match="was ended, and not by SQLAlchemy"):
            thing.execute(sa.text(INSERT))
        return paid("k-1")

    api = postgres_shop.api(handler(payer, end))
    assert (await api.post()).status_code == 409
    assert (postgres_shop.state(), postgres_shop.payments()) == (State.UNKNOWN, 1)
    await payer.close()
    await api.close()


# ---------------------------------------------------------------- lost connections


async def terminate(payer: Payer, thing: Any) -> None:
    raw = await driver_of(thing)
    number = raw.info.backend_pid if hasattr(raw, "info") else raw.get_server_pid()
    payer.shop.ask(f"SELECT pg_terminate_backend({number}, 5000)")


@every_postgres
@pytest.mark.parametrize("goes_on", [False, True])
async def test_lost_connection_can_be_retried_and_is_called_that(
    payer: Payer, goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The server ends the connection. The handler does not notice, or swallows what its next statement raises."""
    attempts = 0

    async def end(thing: Any) -> Response:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await terminate(payer, thing)
            if goes_on:
                with pytest.raises(Exception, match=r"terminat|closed"):
                    await send(payer, thing, INSERT)
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert (await api.post()).status_code == 503
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)
    said = [record.getMessage() for record in caplog.records if record.name == "oncekey"]
    if not any("oncekey reads the key's row" in each for each in said):  # that message had the COMMIT in it
        assert any("the connection to the database was lost before the response was stored" in each for each in said)
    assert not any("savepoint" in each or "commit()" in each for each in said)
    await payer.close_opened()
    assert (await api.post()).status_code == 201
    assert (payer.shop.state(), payer.shop.payments()) == (State.COMPLETED, 1)


# ---------------------------------------------------------------- Django


@every_shop
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("in_sql", [False, True])
def test_end_on_the_connection_beneath_django_commits_nothing(
    make: Callable[..., Site], shop: Shop, in_sql: bool, raises: bool
) -> None:
    """The view swallows each refusal, and goes on."""

    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        site.pay()
        raw = site.connection.connection
        key = "`key`" if shop.kind == "mysql" else "key"
        write = f"INSERT INTO payments ({key}, cents) VALUES ('k-1', 5)"
        steps = ["ROLLBACK", "BEGIN", write, "COMMIT"] if in_sql else ["rollback", write, "commit"]
        for step in steps:
            try:
                getattr(raw, step)() if step in ("rollback", "commit") else raw.cursor().execute(step)
            except Exception:
                continue
        if raises:
            raise RuntimeError("after all of it")
        return HttpResponse(status=201)

    site = make(view)
    assert [site.post().status_code for _ in range(3)] == [500 if raises else 503] * 3
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


@every_shop
def test_connection_of_django_that_was_lost_is_called_that(
    make: Callable[..., Site], shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    if shop.kind == "sqlite":
        pytest.skip("its file cannot be lost")

    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        site.pay()
        if current().attempt == 1:
            if shop.kind == "mysql":
                shop.ask(f"KILL {site.ask('SELECT connection_id()')}")
            else:
                shop.ask(f"SELECT pg_terminate_backend({site.ask('SELECT pg_backend_pid()')}, 5000)")
        return HttpResponse(status=201)

    site = make(view)
    assert site.post().status_code == 503
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    assert "the connection to the database was lost before the response was stored" in caplog.text
    assert site.post().status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


@pytest.mark.parametrize("kind", [SqlAlchemyConnection, AsyncpgConnection])
@pytest.mark.parametrize("reads", [False, True])
async def test_rollback_of_a_connection_with_its_own_isolation_level_can_be_retried(
    postgres_shop: Shop, kind: type[Payer], reads: bool
) -> None:
    """SQLAlchemy sets the level on the driver's connection, and resets it when the connection goes back."""
    payer = kind(postgres_shop)

    async def pay(request: Any) -> Response:
        thing = await payer.open()
        await call(lambda: thing.execution_options(isolation_level="REPEATABLE READ"))
        await current().enlist(thing)
        await call(payer.pay, thing, "k-1")
        await call(thing.rollback)
        if reads:
            await send(payer, thing, "SELECT 1")
        await call(thing.close)
        return paid("k-1")

    api = postgres_shop.api(pay)
    assert (await api.post()).status_code == 503
    assert (postgres_shop.state(), postgres_shop.payments()) == (State.FAILED_RETRYABLE, 0)
    await payer.close()
    await api.close()
