"""The cache in front of MySQL (MariaDB here): as in front of PostgreSQL (``test_cache.py``), and its identity."""

from __future__ import annotations

import asyncio

import pytest
import redis

from oncekey.stores.mysql import MysqlStore
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import MysqlServer
from tests.stores.mysql import TABLES, run
from tests.web.test_cache import Make, forget, make, replayed

__all__ = ["make"]

pytestmark = pytest.mark.stores


@pytest.fixture
def url(mysql_url: str) -> str:
    return mysql_url


def identity(url: str) -> str:
    store = MysqlStore(url)
    try:
        return store.identity()
    finally:
        store.close()


async def test_replay_needs_no_statement_of_mysql(make: Make, mysql_server: MysqlServer, mysql_url: str) -> None:
    with TcpProxy("127.0.0.1", mysql_server.port) as away:
        shop = make(store=away.rewrite(mysql_url))
        first = await shop.pay()
        shop.cache.flush()
        away.refuse()  # from here on a statement would be a 503
        for _ in range(3):
            again = await shop.pay()
            assert (again.status_code, again.content, replayed(again)) == (201, first.content, True)
        assert (await shop.pay("k-2")).status_code == 503
    assert shop.charges == 1


async def test_replays_run_no_statement_on_the_server(make: Make, mysql_url: str) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    assert replayed(await shop.pay())
    count = "SHOW GLOBAL STATUS LIKE 'Com_select'"
    before = run(mysql_url, count)
    for _ in range(20):
        assert replayed(await shop.pay())
    assert run(mysql_url, count) == before
    run(mysql_url, "SELECT 1")
    assert run(mysql_url, count) != before


async def test_cache_that_lost_everything_is_no_reason_to_run_again_on_mysql(make: Make, redis_url: str) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    with redis.Redis.from_url(redis_url) as server:
        server.flushall()
    assert replayed(await shop.pay())
    assert shop.charges == 1


async def test_forgotten_key_of_mysql_runs_as_new_at_once(make: Make, mysql_url: str, redis_url: str) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    await asyncio.to_thread(forget, mysql_url, f"{redis_url}?timeout=5")
    again = await shop.pay()
    assert (again.json(), replayed(again)) == ({"charge": 2}, False)


async def test_two_mysql_databases_that_share_a_cache_and_a_secret_share_no_answers(
    make: Make, mysql_server: MysqlServer
) -> None:
    shop, staging = make(), make(store=mysql_server.database("staging_of_the_cache"))
    assert (await shop.pay()).status_code == 201
    shop.cache.flush()
    answer = await staging.pay()
    assert (answer.status_code, replayed(answer), staging.charges) == (201, False, 1)


async def test_database_that_was_made_again_shares_no_answers_with_the_old_one(
    make: Make, mysql_server: MysqlServer
) -> None:
    url = mysql_server.database("made_again")
    shop = make(store=url)
    await shop.pay()
    shop.cache.flush()
    await shop.once.aclose()
    old = identity(url)
    mysql_server.drop_database("made_again")
    again = make(store=mysql_server.database("made_again"))
    answer = await again.pay()
    assert (replayed(answer), again.charges) == (False, 1)
    assert identity(url) != old


_PLAIN_COLUMNS = """SELECT column_name FROM information_schema.columns
WHERE table_schema = DATABASE() AND table_name = %(table)s AND coalesce(generation_expression, '') = ''"""


def test_copy_of_a_mysql_database_has_another_identity(mysql_server: MysqlServer, mysql_url: str) -> None:
    """Made from the tables and rows of the first, as a dump is."""
    store = MysqlStore(mysql_url)
    store.migrate()
    store.close()
    copy, name = mysql_server.database("copy_of_keys"), mysql_url.rpartition("/")[2]
    for table in ("oncekey_schema", *TABLES):
        run(copy, f"CREATE TABLE {table} LIKE {name}.{table}")
        found = run(copy, _PLAIN_COLUMNS, table=table)
        columns = ", ".join(f"`{column}`" for (column,) in found)
        run(copy, f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {name}.{table}")
    assert identity(copy) != identity(mysql_url)
    assert identity(mysql_url) == identity(mysql_url)
