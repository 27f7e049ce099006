"""The last statement and COMMIT in one message: what it may contain, when it is used, and what happens if it fails."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.errors import DivisionByZero
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import current
from oncekey.core.states import State
from oncekey.engine.transactions.adapters.one_message import MAX_BODY_BYTES, literal, session_statement
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sqlite import SqliteStore
from tests.enlist.shop import Shop, paid

PAY = "INSERT INTO payments (key, cents) VALUES ('k-1', 5)"
LAST = PostgresStore.transaction_statements.complete_or_fail
FILL = """
INSERT INTO idempotency_keys (
    scope, key, fingerprint, operation, state, owner, effects, lease_until, retention_seconds, expires_at,
    fingerprint_version, attempt, created_at
) SELECT
    's', '{state}' || n, '\\x00', 'op', '{state}', n::text, 'transactional', now() + interval '1 h', 86400,
    now() + interval '1 d', 1, 1, now()
FROM generate_series(1, 5000) AS n
"""
NASTY = [
    "",
    "plain",
    "it's",
    "''; DROP TABLE payments; --",
    "\\",
    "\\'; SELECT 1 --",
    "\\x41\\n\\u0041",
    "$1 $tag$ %s :name",
    "é 🔑 \u2028",
    "'\\''\\\\'",
]


@pytest.fixture
async def shop(postgres_shop: Shop) -> AsyncIterator[Shop]:
    yield postgres_shop
    for api in postgres_shop.apis:
        await api.close()


@pytest.mark.parametrize("conforming", ["on", "off"])
def test_literal_is_read_as_the_value_that_it_was_made_from(shop: Shop, conforming: str) -> None:
    """Whatever the app's ``standard_conforming_strings`` is. A NUL would cut the message short, and is refused."""
    with psycopg.connect(shop.url) as connection:
        connection.execute(f"SET standard_conforming_strings = {conforming}")
        for given in NASTY:
            cursor = connection.execute(f"SELECT {literal(given)}::text".replace("%", "%%"), ())
            assert cursor.fetchone() == (given,)
        every_byte = bytes(range(256))
        for value in (every_byte, b"", None, True, False, 7, 1.5, 1789564123.123456):
            kind = "bytea" if isinstance(value, bytes) else "text" if value is None else type(value).__name__
            shown = {"float": "double precision", "bool": "boolean"}.get(kind, kind)
            assert connection.execute(f"SELECT ({literal(value)})::{shown}").fetchone() == (value,)
    with pytest.raises(ValueError, match="NUL"):
        literal("a\0b")


def test_statement_that_finds_no_row_fails_so_that_commit_does_not_run(shop: Shop) -> None:
    """Nothing of the transaction is committed: the business write neither."""
    last = session_statement(LAST)
    nothing = dict.fromkeys(last.names) | {"final": True, "to_state": "completed", "expires_at": 1.0}
    with psycopg.connect(shop.url, autocommit=True) as connection:
        connection.execute(last.prepare)
        with pytest.raises(DivisionByZero):
            connection.execute(f"BEGIN; {PAY}; {last.message(nothing)}")
        connection.execute("ROLLBACK")
    assert shop.payments() == 0


def names_in(connection: Any) -> Any:
    return connection.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'oncekey%'").fetchall()


async def test_statement_is_prepared_again_after_discard_all(shop: Shop) -> None:
    """The first statement of each transaction asks for it. A pool may run DISCARD ALL between two requests."""
    connection = psycopg.connect(shop.url, autocommit=True)
    connection.autocommit = False

    async def pay(request: Request) -> Response:
        current().enlist(connection)
        connection.execute(PAY)
        return paid("k-1")

    api = shop.api(pay)
    for number in range(3):
        assert (await api.post(f"k-{number}")).status_code == 201
        connection.autocommit = True
        assert names_in(connection) == [(session_statement(LAST).name,)]
        connection.execute("DISCARD ALL")
        connection.autocommit = False
    assert shop.payments() == 3
    connection.close()


async def test_app_that_prepares_nothing_gets_no_prepared_statement_psycopg(shop: Shop) -> None:
    connection = psycopg.connect(shop.url, prepare_threshold=None)

    async def pay(request: Request) -> Response:
        current().enlist(connection)
        connection.execute(PAY)
        return paid("k-1")

    assert (await shop.api(pay).post()).status_code == 201
    assert names_in(connection) == []
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    connection.close()


@pytest.mark.parametrize("cached", [0, 100])
async def test_app_that_prepares_nothing_gets_no_prepared_statement_asyncpg(shop: Shop, cached: int) -> None:
    connection = await asyncpg.connect(shop.url, statement_cache_size=cached)

    async def pay(request: Request) -> Response:
        await current().enlist(connection)
        await connection.execute(PAY)
        return paid("k-1")

    assert (await shop.api(pay).post()).status_code == 201
    found = await connection.fetchval("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'oncekey%'")
    assert found == (1 if cached else 0)
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    await connection.close()


@pytest.mark.parametrize("size", [MAX_BODY_BYTES - 100, MAX_BODY_BYTES + 100])
async def test_body_of_any_size_is_stored_and_replayed(shop: Shop, size: int) -> None:
    connection = await asyncpg.connect(shop.url)
    body = b"\x00'\\" * (size // 3)

    async def pay(request: Request) -> Response:
        await current().enlist(connection)
        await connection.execute(PAY)
        return Response(body, 201)

    api = shop.api(pay)
    first, again = await api.post(), await api.post()
    assert (first.content, again.content) == (body, body)
    assert again.headers["idempotency-expires"] == first.headers["idempotency-expires"]
    assert shop.payments() == 1
    await connection.close()


async def test_connection_is_free_for_another_transaction_after_the_message(shop: Shop) -> None:
    """asyncpg did not send that COMMIT itself, and must not take the next transaction for a savepoint."""
    pool = await asyncpg.create_pool(shop.url, min_size=1, max_size=1)

    async def pay_once_more(connection: Any) -> None:
        async with connection.transaction():
            await connection.execute(PAY)
        await pool.release(connection)

    async def pay(request: Request) -> Response:
        connection = await pool.acquire()
        await current().enlist(connection)
        await connection.execute(PAY)
        return JSONResponse({}, 201, background=BackgroundTask(pay_once_more, connection))

    api = shop.api(pay)
    for number in (1, 2):
        assert (await api.post(f"k-{number}")).status_code == 201
        assert shop.payments() == 2 * number
    await pool.close()


async def test_key_is_kept_for_its_whole_retention(shop: Shop) -> None:
    """Never shorter than the policy says, and at most two seconds longer."""
    connection = await asyncpg.connect(shop.url)

    async def pay(request: Request) -> Response:
        await current().enlist(connection)
        return paid("k-1")

    assert (await shop.api(pay).post()).status_code == 201
    record = shop.record()
    assert record is not None
    assert record.finished_at is not None
    kept = record.expires_at - record.finished_at
    assert record.retention_seconds <= kept <= record.retention_seconds + 2.1
    await connection.close()


@pytest.mark.parametrize("analyzed", [True, False])
def test_every_statement_of_an_enlisted_transaction_uses_the_primary_key(shop: Shop, analyzed: bool) -> None:
    """On a connection without our settings: with many keys in progress, and with statistics from before them."""
    shop.ask("DELETE FROM idempotency_keys")
    shop.ask(FILL.format(state="completed"))
    shop.ask("ANALYZE idempotency_keys")
    shop.ask(FILL.format(state="in_progress"))
    if analyzed:
        shop.ask("ANALYZE idempotency_keys")
    statements = PostgresStore.transaction_statements
    values = {
        "scope": "s",
        "key": "in_progress17",
        "owner": "17",
        "to_state": "completed",
        "status": 201,
        "final": True,
    }
    others = {"final": True, "lease_seconds": 1.0, "name": "p", "expires_at": 1.0, "statement": "s"}
    for sql in (statements.enlist[-1], statements.complete[-1], statements.advance[-1], statements.complete_or_fail):
        last = session_statement(sql)
        asked = dict.fromkeys(last.names) | {
            name: value for name, value in (values | others).items() if name in last.names
        }
        with psycopg.connect(shop.url) as connection:
            connection.execute(last.prepare)
            for mode in ("force_custom_plan", "force_generic_plan"):
                connection.execute(f"SET plan_cache_mode = {mode}")
                execute = last.message(asked).removesuffix("; COMMIT")
                plan = "\n".join(row[0] for row in connection.execute(f"EXPLAIN {execute}").fetchall())
                assert "idempotency_keys_pkey" in plan, plan
                assert "idempotency_keys_leases" not in plan, plan


def test_every_statement_of_an_enlisted_sqlite_transaction_uses_the_primary_key(sqlite_shop: Shop) -> None:
    statements = SqliteStore.transaction_statements
    with sqlite3.connect(sqlite_shop.path) as connection:
        for analyzed in (False, True):
            for sql in (*statements.enlist, *statements.complete, *statements.advance[1:]):
                names = dict.fromkeys(session_statement(sql).names, "1")
                plan = "\n".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", names))
                assert "sqlite_autoindex_idempotency_keys_1" in plan or "PRIMARY KEY" in plan, (analyzed, plan)
            connection.execute("ANALYZE")
    connection.close()
