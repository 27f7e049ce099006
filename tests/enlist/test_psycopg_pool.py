"""A psycopg connection of a pool that the handler gives back too early: the pool's next user is left alone."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import Response

from oncekey import current
from oncekey.core.states import State
from oncekey.errors import EnlistError
from tests.enlist.handlers import INSERT
from tests.enlist.shop import Shop, paid

psycopg_pool = pytest.importorskip("psycopg_pool")

ANOTHER = "INSERT INTO payments (key, cents) VALUES ('another', 5)"


async def test_next_user_of_the_connection_is_neither_guarded_nor_rolled_back(postgres_shop: Shop) -> None:
    with psycopg_pool.ConnectionPool(postgres_shop.url, min_size=1, max_size=1, open=True) as pool:
        connections, given, refused = [], [], []

        async def pay(request: Request) -> Response:
            try:
                with pool.connection() as connection:
                    given.append(connection)
                    await current().enlist(connection)
                    connection.execute(INSERT)
            except EnlistError as error:
                refused.append(error)
            connections.append(pool.getconn())  # as another request does
            assert connections == given
            connections[0].execute(ANOTHER)
            return paid("k-1")

        api = postgres_shop.api(pay)
        assert (await api.post()).status_code == 503
        assert len(refused) == 1
        connections[0].commit()
        pool.putconn(connections[0])
        assert (postgres_shop.payments(), postgres_shop.payments("another")) == (0, 1)
        assert postgres_shop.state() is State.FAILED_RETRYABLE
        await api.close()
