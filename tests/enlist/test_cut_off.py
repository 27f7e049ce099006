"""The end of an enlisted request is itself cut off: the loop ends, and takes every task along.

What the handler has committed by then is there. Only what is proven not to have happened may run again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool
from starlette.requests import Request
from starlette.responses import Response

from oncekey import current
from oncekey.core.states import State
from tests.enlist.handlers import INSERT, every_driver, handler
from tests.enlist.shop import Api, Asyncpg, Payer, PsycopgAsync, Shop, SqlAlchemy, paid
from tests.web.apps import until


async def cut_off(api: Api) -> None:
    """Send a request, and cancel the task that ends it as soon as there is one."""
    request, tasks = asyncio.ensure_future(api.post()), api.once.engine.tasks
    handlers = set(tasks)
    async with asyncio.timeout(10):
        while len(tasks) < 2:  # the handler's own, and then the other
            handlers = set(tasks)
            await asyncio.sleep(0)
    (ending,) = tasks - handlers
    ending.cancel()
    answer = await request
    assert answer.status_code == 500


async def settled(shop: Shop) -> State | None:
    await until(lambda: shop.state() is not State.IN_PROGRESS, "the keeper has found out")
    return shop.state()


async def test_enlist_not_awaited_and_cut_off_makes_the_key_unknown(shop: Shop) -> None:
    """Nothing was enlisted, and what the handler committed is there: unknown, and never a second run."""
    engine = create_async_engine(SqlAlchemy(shop).url().replace("sqlite:", "sqlite+aiosqlite:"), poolclass=NullPool)

    async def pay(request: Request) -> Response:
        async with AsyncSession(engine) as session:
            current().enlist(session)
            await session.execute(sa.text(INSERT))
            await session.commit()
        return paid("k-1")

    api = shop.api(pay)
    await cut_off(api)
    assert await settled(shop) is State.UNKNOWN
    assert (await api.post()).status_code == 409
    assert shop.payments() == 1
    await engine.dispose()


async def test_commit_by_hand_and_cut_off_makes_the_key_unknown(postgres_shop: Shop) -> None:
    """The key's row is as it was, and says nothing of what the handler committed: the server does."""
    payer = Asyncpg(postgres_shop)

    async def commit(thing: Any) -> Response:
        await thing.execute("COMMIT")
        return paid("k-1")

    api = postgres_shop.api(handler(payer, commit))
    await cut_off(api)
    await payer.close()
    assert await settled(postgres_shop) is State.UNKNOWN
    assert (await api.post()).status_code == 409
    assert postgres_shop.payments() == 1
    await api.close()


async def test_while_it_was_being_opened(postgres_shop: Shop) -> None:
    """The handler gave up on enlisting, and answered all the same: nothing is done, and the key is not stuck."""
    payer = PsycopgAsync(postgres_shop)

    async def pay(request: Request) -> Response:
        thing = await payer.open()
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await current().enlist(thing)
        return paid("k-1")

    api = postgres_shop.api(pay)
    await cut_off(api)
    await payer.close()
    assert await settled(postgres_shop) is State.FAILED_RETRYABLE
    await api.close()


@every_driver
async def test_cut_at_any_point_never_pays_twice(payer: Payer) -> None:
    """Whatever the cut left behind: a retry never pays a second time, and where nothing was paid, it may."""
    shop, api = payer.shop, payer.shop.api(handler(payer))
    await cut_off(api)
    await payer.close()  # as the app closes its connection
    state = await settled(shop)
    before = shop.payments()
    assert (state is State.COMPLETED) == (before == 1)
    answer = await api.post()
    assert answer.status_code == (409 if state is State.UNKNOWN else 201)
    assert shop.payments() == (0 if state is State.UNKNOWN else 1)
