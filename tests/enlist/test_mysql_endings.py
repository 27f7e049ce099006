"""A handler that ends its own transaction on MySQL, in every way and with every driver."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.responses import JSONResponse, Response

from oncekey.core.states import State
from oncekey.errors import EnlistError
from tests.enlist import test_own_endings
from tests.enlist.handlers import handler
from tests.enlist.mysql_shop import MYSQL, MysqlShop
from tests.enlist.own_endings import WAYS, driver_of, execute_on
from tests.enlist.shop import Payer, paid
from tests.enlist.test_django_mysql import rival
from tests.enlist.test_mysql import FAST, every_driver, payer, send
from tests.enlist.test_mysql_deadlocks import deadlock
from tests.stores.mysql import connect

__all__ = ["payer"]

INSERT = "INSERT INTO payments (`key`, cents) VALUES ('k-1', 5)"
SA = [name for name in MYSQL if name.startswith("sa-")]
every_sqlalchemy = pytest.mark.parametrize(
    "payer", [pytest.param(name, marks=() if name in FAST else pytest.mark.stores) for name in SA], indirect=True
)


@pytest.mark.parametrize(
    ("payer", "name"),
    [
        pytest.param(at, name, id=f"{at}-{name}", marks=() if at in FAST and way.beneath else pytest.mark.stores)
        for at in MYSQL
        for name, way in WAYS.items()
        if not way.beneath or at in SA
    ],
    indirect=["payer"],
)
async def test_handler_that_ends_its_transaction_never_commits_twice(payer: Payer, name: str) -> None:
    await test_own_endings.test_handler_that_ends_its_transaction_never_commits_twice(payer, name)


async def call(function: Any, *args: Any) -> None:
    done = function(*args)
    if isinstance(done, Awaitable):
        await done


# ---------------------------------------------------------------- the connection beneath SQLAlchemy


@every_sqlalchemy
@pytest.mark.parametrize("verb", ["commit", "rollback"])
async def test_end_on_the_drivers_connection_is_refused_and_says_so(
    payer: Payer, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []

    async def end(thing: Any) -> Response:
        raw = await driver_of(thing)
        for step in (getattr(raw, verb), lambda: execute_on(raw, INSERT), raw.commit):
            try:
                await call(step)
            except EnlistError as error:
                said.append(str(error))
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert [(await api.post()).status_code for _ in range(2)] == [503, 503]
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)
    assert said[0].startswith(f"{verb.upper()} on the driver's connection of the SQLAlchemy ")
    assert "Take the commit() or rollback() out of the handler" in said[0]
    assert "the handler tried to end its enlisted transaction and caught the error" in caplog.text


@every_sqlalchemy
async def test_connection_in_autocommit_mode_beneath_sqlalchemy_is_refused(payer: Payer) -> None:
    async def end(thing: Any) -> Response:
        raw = await driver_of(thing)
        with pytest.raises(EnlistError, match="commits the open transaction without saying so"):
            await call(raw.autocommit, True)
        await execute_on(raw, INSERT)
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert (await api.post()).status_code == 503
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)


@pytest.mark.parametrize("payer", ["sa-connection"], indirect=True)
@pytest.mark.parametrize("sql", [INSERT, "CALL pays()"])
async def test_statement_on_the_driver_after_the_rollback_is_refused_or_the_key_is_unknown(
    payer: Payer, sql: str
) -> None:
    """The SQLAlchemy connection has rolled back and keeps its driver connection, which is in no transaction now."""
    payer.shop.ask(f"CREATE PROCEDURE pays () {INSERT}")

    async def end(thing: Any) -> Response:
        thing.rollback()
        raw = thing.connection.driver_connection
        try:
            await execute_on(raw, sql)
            raw.commit()  # becomes a rollback
        except EnlistError:
            assert sql == INSERT
        thing.execute(sa.text("SELECT 1"))  # SQLAlchemy begins a transaction, which would commit what is open
        return JSONResponse({}, 409)

    api = payer.shop.api(handler(payer, end))
    assert (await api.post()).status_code == 409
    assert (payer.shop.state(), payer.shop.payments()) == (
        State.FAILED if sql == INSERT else State.UNKNOWN,
        0,
    )


@every_sqlalchemy
@pytest.mark.parametrize("reset", ["rollback", "commit", None])
@pytest.mark.parametrize("ending", ["returned", "rolled back", "raised", "refused"])
async def test_next_user_of_a_pooled_connection_is_not_guarded(payer: Payer, ending: str, reset: Any) -> None:
    """One connection in the pool: enlisted by one request, and then used by code that knows nothing of oncekey."""
    old: Any = payer.engine  # type: ignore[attr-defined]
    make: Any = create_async_engine if payer.is_async else sa.create_engine
    payer.engine = make(old.url, pool_size=1, max_overflow=0, pool_reset_on_return=reset)  # type: ignore[attr-defined]
    await call(old.dispose)

    async def end(thing: Any) -> Response:
        if ending == "rolled back":
            await call(thing.rollback)
            await send(payer, thing, "SELECT 1")
        if ending == "refused":
            await call((await driver_of(thing)).commit)
        if ending == "raised":
            raise ValueError
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    await api.post()
    await payer.close_opened()
    before = payer.shop.payments()
    thing = await payer.open()
    for _ in range(2):
        await send(payer, thing, INSERT)
        await call(thing.commit)
    raw = await driver_of(thing)
    await execute_on(raw, INSERT)
    await call(raw.commit)
    await payer.close_opened()
    assert payer.shop.payments() == before + 3


class Traced:
    """A connection as a tracing library wraps it."""

    def __init__(self, connection: Any) -> None:
        self.__wrapped__ = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


@pytest.mark.parametrize("payer", ["sa-session"], indirect=True)
async def test_connection_behind_a_proxy_is_watched(payer: Payer) -> None:
    old: Any = payer.engine  # type: ignore[attr-defined]
    payer.engine = sa.create_engine(old.url, creator=lambda: Traced(connect(payer.shop.url)))  # type: ignore[attr-defined]
    old.dispose()

    async def end(thing: Any) -> Response:
        raw = await driver_of(thing)
        assert isinstance(raw, Traced)
        for step in (raw.rollback, lambda: execute_on(raw, INSERT), raw.commit):
            with suppress(EnlistError):
                await call(step)
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert [(await api.post()).status_code for _ in range(2)] == [503, 503]
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)


# ---------------------------------------------------------------- lost connections


async def kill(payer: Payer, thing: Any) -> Any:
    raw = await driver_of(thing)
    payer.shop.ask(f"KILL {raw.thread_id()}")
    return raw


@every_driver
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
            await kill(payer, thing)
            if goes_on:
                with pytest.raises(Exception, match=r"2013|2006|gone away|Lost connection"):
                    await send(payer, thing, INSERT)
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert (await api.post()).status_code == 503
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)
    said = [record.getMessage() for record in caplog.records if record.name == "oncekey"]
    assert any("the connection to the database was lost before the response was stored" in each for each in said)
    assert not any("savepoint" in each or "commit()" in each for each in said)
    await payer.close_opened()
    assert (await api.post()).status_code == 201
    assert (payer.shop.state(), payer.shop.payments()) == (State.COMPLETED, 1)


@every_driver
@pytest.mark.filterwarnings("ignore:The 'reconnect' argument is deprecated")
@pytest.mark.parametrize("raises", [False, True])
async def test_lost_connection_is_not_opened_again(payer: Payer, raises: bool) -> None:
    """What is written on a new connection would be committed without the key."""
    if "mysqlclient" in type(payer).__name__.lower():
        pytest.skip("its library connects again by itself: see test_django_mysql.py")
    said: list[str] = []

    async def end(thing: Any) -> Response:
        raw = await kill(payer, thing)
        for step in (lambda: raw.ping(reconnect=True), lambda: execute_on(raw, INSERT), raw.commit):
            try:
                await call(step)
            except Exception as error:
                said.append(str(error))
        if raises:
            raise RuntimeError("after all of it")
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    for _ in range(3):
        assert (await api.post()).status_code == (500 if raises else 503)
        await payer.close_opened()
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)
    assert "has lost its connection to the database" in said[0]
    assert "the key can be retried" in said[0]


@pytest.mark.parametrize("payer", ["mysqlclient", "sa-mysqlclient"], indirect=True)
async def test_connection_that_the_library_opened_again_makes_the_key_unknown(payer: Payer) -> None:
    """mysqlclient connects again by itself after ping(True), and the new session commits each statement."""

    async def end(thing: Any) -> Response:
        raw = await driver_of(thing)
        with pytest.deprecated_call():
            raw.ping(True)
        await kill(payer, thing)
        with pytest.raises(Exception, match="2006"):
            await execute_on(raw, INSERT)
        await execute_on(raw, INSERT)
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert [(await api.post()).status_code for _ in range(2)] == [409, 409]
    assert (payer.shop.state(), payer.shop.payments()) == (State.UNKNOWN, 1)


# ---------------------------------------------------------------- ends that no guard sees


@every_driver
@pytest.mark.parametrize("then", ["returns", "rolls back", "raises"])
async def test_procedure_that_rolls_back_writes_and_commits_makes_the_key_unknown(payer: Payer, then: str) -> None:
    payer.shop.ask(f"CREATE PROCEDURE logs () BEGIN ROLLBACK; {INSERT}; COMMIT; END")

    async def end(thing: Any) -> Response:
        await send(payer, thing, "CALL logs()")
        if then == "rolls back":
            try:
                await call(thing.rollback)
            except EnlistError:
                return paid("k-1")
        if then == "raises":
            raise RuntimeError("after it")
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    for _ in range(2):
        assert (await api.post()).status_code in (409, 500)
        await payer.close_opened()
    assert (payer.shop.state(), payer.shop.payments()) == (State.UNKNOWN, 1)


async def test_write_after_a_deadlock_in_autocommit_mode_makes_the_key_unknown(mysql_url: str) -> None:
    """The server has rolled back what begin() began. After it, this connection commits each statement."""
    shop = MysqlShop(mysql_url)
    payer = MYSQL["pymysql"](shop)
    payer.make = lambda: began(connect(mysql_url, autocommit=True))  # type: ignore[method-assign]

    def began(connection: Any) -> Any:
        connection.begin()
        return connection

    async def end(thing: Any) -> Response:
        with pytest.raises(Exception, match="1213"):
            await deadlock(payer, thing, other)
        await execute_on(thing, INSERT)
        return paid("k-1")

    with rival(shop) as other:
        api = shop.api(handler(payer, end))
        assert [(await api.post()).status_code for _ in range(2)] == [409, 409]
    assert (shop.state(), shop.payments()) == (State.UNKNOWN, 1)
    await payer.close()
    await api.close()
