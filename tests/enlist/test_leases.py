"""An enlisted request and its lease: lost before enlist, not to be taken after it, at every level of isolation."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response

from oncekey import Policy, current
from oncekey.core.states import State
from tests.enlist.handlers import every_driver, handler
from tests.enlist.shop import (
    Api,
    Asyncpg,
    Payer,
    Psycopg,
    PsycopgAsync,
    Shop,
    SqlAlchemy,
    SqlAlchemyAsync,
    paid,
)
from tests.web.apps import Gate, soon, until

SHORT = Policy(effects="transactional", lease=timedelta(seconds=1.2))


@every_driver
async def test_a_lost_lease_writes_nothing_and_answers_as_the_record_says(payer: Payer) -> None:
    """I3: between reservation and enlist the key went to another attempt."""
    gate = Gate()
    went_on: list[Any] = []

    async def pay(request: Request) -> Response:
        await gate.wait()
        return await handler(payer, went_on.append)(request)

    api = payer.shop.api(pay)
    first = asyncio.create_task(api.post())
    await soon(gate.entered.wait())
    payer.shop.ask("UPDATE idempotency_keys SET owner = 'another', attempt = 2")
    gate.go.set()
    answer = await first
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:oncekey:problem:in-flight")
    assert not went_on, "the handler is stopped by enlist()"
    assert payer.shop.payments() == 0
    record = payer.shop.record()
    assert record is not None
    assert (record.owner, record.state) == ("another", State.IN_PROGRESS)


@every_driver
async def test_key_of_an_enlisted_transaction_is_not_taken_over(payer: Payer) -> None:
    """The row's lock is the lease: a retry after the end of the lease is told to wait, and the first completes."""
    gate = Gate()

    async def hold(thing: Any) -> Response:
        await gate.wait()
        return paid("k-1")

    api = payer.shop.api(handler(payer, hold))
    other = Api(payer.shop.url, handler(payer), Policy(effects="transactional", begin_timeout=timedelta(seconds=0.3)))
    payer.shop.apis.append(other)
    first = asyncio.create_task(api.post())
    await soon(gate.entered.wait())
    if payer.shop.kind == "postgresql":  # on SQLite no other process can even write that the lease is over
        with psycopg.connect(payer.shop.url, autocommit=True) as connection:
            connection.execute("SET lock_timeout = 100")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                connection.execute("UPDATE idempotency_keys SET lease_until = now() - interval '1 hour'")
    assert (await other.post()).status_code in (409, 503)
    gate.go.set()
    assert (await first).status_code == 201
    assert payer.shop.payments() == 1


async def test_an_enlisted_handler_outlives_its_lease(postgres_shop: Shop) -> None:
    """No renewal passes its lock, and none is needed."""
    payer = PsycopgAsync(postgres_shop)
    gate = Gate()

    async def hold(thing: Any) -> Response:
        await gate.wait()
        return paid("k-1")

    api = postgres_shop.api(handler(payer, hold), Policy(effects="transactional", lease=timedelta(seconds=0.6)))
    first = asyncio.create_task(api.post())
    await soon(gate.entered.wait())

    def lease_is_over() -> bool:
        record = postgres_shop.record()
        return record is not None and record.lease_over

    await until(lease_is_over, "the end of the lease")
    api.once.engine.keeper.look()
    assert (await api.post()).status_code == 409
    gate.go.set()
    assert (await first).status_code == 201
    assert (postgres_shop.payments(), postgres_shop.state()) == (1, State.COMPLETED)
    await payer.close()
    await api.close()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg-async", "asyncpg", "session", "async-session"])
async def test_every_isolation_level_completes(postgres_shop: Shop, level: Any, driver: str) -> None:
    """The snapshot is taken at enlist; neither a renewal nor the completion gets in its way."""

    class AtLevel(SqlAlchemy):
        def make(self) -> Any:
            return Session(self.engine.execution_options(isolation_level=level))

    class AsyncAtLevel(SqlAlchemyAsync):
        def make(self) -> Any:
            return AsyncSession(self.engine.execution_options(isolation_level=level))

    class PsycopgAtLevel(Psycopg):
        def make(self) -> Any:
            connection = super().make()
            connection.isolation_level = getattr(psycopg.IsolationLevel, level.replace(" ", "_"))
            return connection

    class AsyncPsycopgAtLevel(PsycopgAsync):
        async def make(self) -> Any:
            connection = await super().make()
            await connection.set_isolation_level(getattr(psycopg.IsolationLevel, level.replace(" ", "_")))
            return connection

    class AsyncpgAtLevel(Asyncpg):
        async def make(self) -> Any:
            connection = await super().make()
            await connection.execute(f"SET default_transaction_isolation = '{level}'")
            return connection

    kinds = {
        "psycopg": PsycopgAtLevel,
        "psycopg-async": AsyncPsycopgAtLevel,
        "asyncpg": AsyncpgAtLevel,
        "session": AtLevel,
        "async-session": AsyncAtLevel,
    }
    payer = kinds[driver](postgres_shop)

    def look(thing: Any) -> Response:
        engine = current().engine
        assert engine is not None
        current().renew_at = 0.0
        engine.keeper.look()
        return paid("k-1")

    api = postgres_shop.api(handler(payer, look), SHORT)

    assert (await api.post()).status_code == 201
    assert (postgres_shop.payments(), postgres_shop.state()) == (1, State.COMPLETED)
    await payer.close()
    await api.close()
