"""A protected function cannot enlist the transaction of its caller, whose writes are the caller's to commit."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from oncekey import SINGLE_TENANT, OnceKey, current
from oncekey.core.states import State
from oncekey.errors import EnlistError


@pytest.fixture
def once(postgres_url: str) -> Iterator[OnceKey]:
    made = OnceKey(postgres_url, scope=SINGLE_TENANT, migrate=True)
    yield made
    made.close()


@pytest.fixture
def connection(postgres_url: str) -> Iterator[psycopg.Connection[tuple[str]]]:
    with psycopg.connect(postgres_url) as opened:
        opened.execute("CREATE TABLE IF NOT EXISTS written (what text)")
        opened.execute("TRUNCATE written")
        opened.commit()
        yield opened


def written(postgres_url: str) -> list[str]:
    with psycopg.connect(postgres_url) as opened:
        return [what for (what,) in opened.execute("SELECT what FROM written ORDER BY what").fetchall()]


def test_function_is_refused_the_transaction_that_its_caller_enlisted(
    once: OnceKey, connection: psycopg.Connection[tuple[str]], postgres_url: str
) -> None:
    """The caller goes on, and its own transaction commits all that the caller wrote, once."""
    refused: list[str] = []

    @once.function("stock", key="order", effects="transactional")
    def stock(order: str) -> None:
        current().enlist(connection)

    @once.function("order", key="order", effects="transactional")
    def order(order: str) -> str:
        current().enlist(connection)
        connection.execute("INSERT INTO written VALUES ('before')")
        try:
            stock(order)
        except EnlistError as error:
            refused.append(str(error))
        connection.execute("INSERT INTO written VALUES ('after')")
        return "done"

    assert [order("o-1"), order("o-1")] == ["done", "done"]
    assert len(refused) == 1
    assert "a transaction of its caller" in refused[0]
    assert written(postgres_url) == ["after", "before"]
    (record,) = once.store.read([(once.key_scope("single-tenant", "order"), "o-1")])
    assert record is not None
    assert record.state is State.COMPLETED


def test_function_takes_a_connection_of_its_own_inside_of_a_transaction(
    once: OnceKey, connection: psycopg.Connection[tuple[str]], postgres_url: str
) -> None:
    own = psycopg.connect(postgres_url)

    @once.function("stock", key="order", effects="transactional")
    def stock(order: str) -> str:
        current().enlist(own)
        own.execute("INSERT INTO written VALUES ('stock')")
        return "taken"

    @once.function("order", key="order", effects="transactional")
    def order(order: str) -> str:
        current().enlist(connection)
        connection.execute("INSERT INTO written VALUES ('order')")
        return str(stock(order))

    assert order("o-1") == "taken"
    own.close()
    assert written(postgres_url) == ["order", "stock"]


def test_function_in_a_block_of_the_apps_own_connection_cannot_enlist_it(
    once: OnceKey, connection: psycopg.Connection[tuple[str]]
) -> None:
    """As in Django, where ``enlist()`` takes the connection of the view, and ATOMIC_REQUESTS is a block around it."""
    once.engine.own_connection = lambda: connection
    once.engine.in_own_block = lambda function: True

    @once.function("stock", key="order", effects="transactional")
    def stock(order: str) -> None:
        current().enlist()

    with pytest.raises(EnlistError, match="a transaction of its caller"):
        stock("o-1")
