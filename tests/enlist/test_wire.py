"""An enlisted request whose connection is cut, before its commit or after: the key tells what happened."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from starlette.responses import Response

from oncekey import Policy, current
from oncekey.core.states import State
from oncekey.engine.transactions.adapters.base import Saw
from oncekey.engine.transactions.stages import Happened
from oncekey.stores.api import TransactionStatements
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import PostgresServer
from tests.enlist.handlers import handler
from tests.enlist.shop import (
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
from tests.web.apps import until


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        yield proxy


async def close_broken(payer: Payer) -> None:
    for thing in payer.opened:
        try:
            done = thing.close()
            if asyncio.iscoroutine(done):
                await done
        except Exception:
            continue
    payer.opened.clear()
    await payer.dispose()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [Psycopg, PsycopgAsync, Asyncpg, SqlAlchemy, SqlAlchemyAsync, SqlAlchemyAsyncpg])
async def test_commit_cut_on_the_wire(postgres_shop: Shop, proxy: TcpProxy, when: Any, kind: type[Payer]) -> None:
    """Hazard 9: the same error whether it happened or not; the key tells, and a retry finds the truth."""
    far = Shop(proxy.rewrite(postgres_shop.url))
    payer = kind(far)
    api = postgres_shop.api(handler(payer))
    cut = proxy.cut_on("to_server", b"COMMIT", when=when)
    answer = await api.post()
    assert cut.wait(5)
    if when == "after":
        assert answer.status_code == 201
        assert (postgres_shop.payments(), postgres_shop.state()) == (1, State.COMPLETED)
    else:
        assert answer.status_code == 503
        assert postgres_shop.payments() == 0
        assert postgres_shop.state() is State.FAILED_RETRYABLE
    again = await api.post()
    assert again.status_code == 201
    assert postgres_shop.payments() == 1
    await close_broken(payer)
    await api.close()


@pytest.mark.parametrize("kind", [Psycopg, PsycopgAsync, Asyncpg, SqlAlchemy, SqlAlchemyAsync, SqlAlchemyAsyncpg])
async def test_the_connection_dies_in_the_handler(postgres_shop: Shop, proxy: TcpProxy, kind: type[Payer]) -> None:
    payer = kind(Shop(proxy.rewrite(postgres_shop.url)))

    def cut(thing: Any) -> Response:
        proxy.cut()
        return paid("k-1")

    api = postgres_shop.api(handler(payer, cut))
    assert (await api.post()).status_code == 503
    await until(lambda: postgres_shop.state() is State.FAILED_RETRYABLE, "released")
    assert postgres_shop.payments() == 0
    await close_broken(payer)
    await api.close()


async def test_undecided_is_503_and_the_keeper_finds_the_truth(postgres_shop: Shop, proxy: TcpProxy) -> None:
    """COMMIT never arrives, nor do the lane's questions: nothing is claimed until the server answers."""
    far = Shop(proxy.rewrite(postgres_shop.url))
    payer = Psycopg(postgres_shop)

    completions: list[int] = []

    def break_commit(thing: Any) -> Response:
        link = current().enlisted.link  # type: ignore[union-attr]

        def fail(statements: TransactionStatements, parameters: dict[str, Any], saw: Saw) -> None:
            completions.append(threading.get_ident())
            assert link.complete(statements.complete, parameters)
            saw(Happened.COMMIT_SENT)
            proxy.refuse()
            raise ConnectionError

        vars(link).update(end=fail)
        return paid("k-1")

    policy = Policy(effects="transactional", begin_timeout=timedelta(seconds=0.5), lease=timedelta(seconds=1.2))
    api = Api(far.url, handler(payer, break_commit), policy)
    answer = await api.post()
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:oncekey:problem:not-stored")
    assert postgres_shop.state() is State.IN_PROGRESS
    proxy.pass_through()
    await until(lambda: postgres_shop.state() is State.FAILED_RETRYABLE, "released by the keeper")
    assert postgres_shop.payments() == 0
    assert len(completions) == 1, "the app's connection is not the keeper's to use"
    await payer.close()
    await api.close()


async def test_with_effects_elsewhere_a_failed_commit_is_unknown(postgres_shop: Shop, proxy: TcpProxy) -> None:
    payer = Psycopg(Shop(proxy.rewrite(postgres_shop.url)))
    api = postgres_shop.api(handler(payer), Policy(effects="external"))
    proxy.cut_on("to_server", b"COMMIT", when="before")
    assert (await api.post()).status_code == 409
    assert (postgres_shop.payments(), postgres_shop.state()) == (0, State.UNKNOWN)
    await close_broken(payer)
    await api.close()
