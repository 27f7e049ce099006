"""Every driver of MySQL that can be enlisted: the same checks as for the other databases, and MySQL's own traps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.responses import Response

from oncekey import current
from oncekey.core.states import State
from oncekey.engine.transactions.adapters.mysql import commits_by_itself
from oncekey.errors import EnlistError, LeaseLost
from oncekey.testing.servers import MysqlServer
from tests.enlist import test_drivers
from tests.enlist.handlers import handler
from tests.enlist.mysql_shop import MYSQL, MysqlShop, quoted
from tests.enlist.shop import Payer, paid
from tests.stores.mysql import connect

CHECKS: list[Callable[[Payer], Awaitable[None]]] = [
    test_drivers.test_write_response_and_key_share_one_commit,
    test_drivers.test_many_enlisted_requests_at_once_complete,
    test_drivers.test_exception_rolls_the_transaction_back,
    test_drivers.test_a_raised_4xx_rolls_back_and_is_stored,
    test_drivers.test_a_returned_4xx_commits,
    test_drivers.test_a_returned_5xx_rolls_back,
    test_drivers.test_connection_closed_in_the_handler_completes_nothing,
    test_drivers.test_rolled_back_in_the_handler,
    test_drivers.test_second_enlist_is_refused,
]
FAST = {"pymysql", "sa-asyncmy"}
"""The drivers that `make test` tries; `make stores` tries all."""
DRIVERS = [pytest.param(name, marks=() if name in FAST else pytest.mark.stores) for name in MYSQL]


@pytest.fixture
async def payer(request: pytest.FixtureRequest, mysql_url: str, mysql_server: MysqlServer) -> AsyncIterator[Payer]:
    if request.param == "sa-mariadb" and mysql_server.kind != "MariaDB":
        pytest.skip("SQLAlchemy's dialect mariadb refuses MySQL")
    if "mysqlclient" in request.param:
        pytest.importorskip(
            "MySQLdb", reason="no mysqlclient for this Python: run `make mysqlclient`", exc_type=ImportError
        )
    payer = MYSQL[request.param](MysqlShop(mysql_url))
    yield payer
    await payer.close()
    for api in payer.shop.apis:
        await api.close()


every_driver = pytest.mark.parametrize("payer", DRIVERS, indirect=True)


@every_driver
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
async def test_enlisted_transaction_is(payer: Payer, check: Callable[[Payer], Awaitable[None]]) -> None:
    await check(payer)


async def send(payer: Payer, thing: Any, sql: str) -> None:
    if hasattr(payer, "engine"):
        done = thing.execute(sa.text(quoted(sql)))
        if isinstance(done, Awaitable):
            await done
    elif payer.is_async:
        async with thing.cursor() as cursor:
            await cursor.execute(quoted(sql))
    else:
        thing.cursor().execute(quoted(sql))


@every_driver
@pytest.mark.parametrize(
    "sql", ["COMMIT", "ROLLBACK", "CREATE TABLE other (id int)", "BEGIN", "SET autocommit = 1", "TRUNCATE payments"]
)
async def test_statement_that_ends_the_transaction_is_refused(payer: Payer, sql: str) -> None:
    """Also DDL and BEGIN, which commit without saying so: then the refusal speaks of no commit() in the handler."""
    said: list[str] = []

    async def end(thing: Any) -> Response:
        try:
            await send(payer, thing, sql)
        except EnlistError as error:
            said.append(str(error))
            raise
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert (await api.post()).status_code in (500, 503)
    assert ("Take the commit() or rollback() out" in said[0]) is (sql in ("COMMIT", "ROLLBACK"))
    assert ("commits the open transaction without saying so" in said[0]) is (sql not in ("COMMIT", "ROLLBACK"))
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)


@every_driver
@pytest.mark.parametrize("verb", ["commit", "rollback"])
async def test_handler_that_swallows_the_refusal_commits_nothing(payer: Payer, verb: str) -> None:
    """It goes on, writes again, commits, and returns 201."""

    async def end(thing: Any) -> Response:
        for attempt in (getattr(thing, verb), lambda: payer.pay(thing, "k-1"), thing.commit):
            try:
                done = attempt()
                if isinstance(done, Awaitable):
                    await done
            except Exception:
                continue
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert (await api.post()).status_code == 503
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)


@every_driver
async def test_handler_reads_on_after_its_rollback(payer: Payer) -> None:
    async def undo(thing: Any) -> Response:
        try:
            done = thing.rollback()
            if isinstance(done, Awaitable):
                await done
        except EnlistError:
            pass
        await send(payer, thing, "SELECT count(*) FROM payments")
        with pytest.raises(Exception, match=r"READ ONLY|was refused"):
            await send(payer, thing, "INSERT INTO payments (key, cents) VALUES ('k-1', 5)")
        return paid("k-1")

    api = payer.shop.api(handler(payer, undo))
    assert (await api.post()).status_code == 503
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)


@every_driver
async def test_savepoints_of_the_handler_are_allowed(payer: Payer) -> None:
    insert = "INSERT INTO payments (key, cents) VALUES ('k-1', 5)"

    async def nested(thing: Any) -> Response:
        for sql in ("SAVEPOINT a", insert, "ROLLBACK TO SAVEPOINT a", "SAVEPOINT b", insert, "RELEASE SAVEPOINT b"):
            await send(payer, thing, sql)
        return paid("k-1")

    api = payer.shop.api(handler(payer, nested))
    assert (await api.post()).status_code == 201
    assert (payer.shop.state(), payer.shop.payments()) == (State.COMPLETED, 2)


@every_driver
async def test_commit_that_no_guard_sees_makes_the_key_unknown(payer: Payer) -> None:
    """A stored procedure commits: the savepoint is gone, and the key's row tells that it was committed."""
    payer.shop.ask("CREATE PROCEDURE ends_it () COMMIT")

    async def end(thing: Any) -> Response:
        await send(payer, thing, "CALL ends_it()")
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    assert (await api.post()).status_code == 409
    assert (payer.shop.state(), payer.shop.payments()) == (State.UNKNOWN, 1)


@every_driver
@pytest.mark.parametrize("way", ["raises", "rolls back", "commits"])
async def test_rollback_that_leaves_rows_in_a_table_without_transactions_makes_the_key_unknown(
    payer: Payer, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """MyISAM keeps what was written. The server says so in a warning of the ROLLBACK (1196)."""
    if "MariaDB" not in payer.shop.ask("SELECT version()")[0][0]:
        pytest.skip("MySQL refuses a write to MyISAM in a transaction (1785), unless enforce_gtid_consistency is off")
    payer.shop.ask("CREATE TABLE notes (id int) ENGINE = MyISAM")

    async def end(thing: Any) -> Response:
        await send(payer, thing, "INSERT INTO notes VALUES (1)")
        if way == "raises":
            raise RuntimeError("the card was declined")
        with suppress(EnlistError):
            done = thing.rollback() if way == "rolls back" else thing.commit()
            if isinstance(done, Awaitable):
                await done
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    for _ in range(2):
        assert (await api.post()).status_code in (409, 500)
    assert (payer.shop.state(), payer.shop.payments()) == (State.UNKNOWN, 0)
    assert payer.shop.ask("SELECT count(*) FROM notes") == [(1,)]
    assert "did not undo what the handler wrote to a table without transactions: the key is unknown" in caplog.text


@every_driver
async def test_enlist_of_an_owner_that_lost_its_key_leaves_no_lock(payer: Payer) -> None:
    """At REPEATABLE READ, MySQL's default, a statement also locks the rows that it did not match."""
    locked: list[Any] = []

    async def pay(request: Any) -> Response:
        thing = await payer.open()
        payer.shop.ask("UPDATE idempotency_keys SET owner = 'another'")
        with pytest.raises(LeaseLost):
            await current().enlist(thing)
        locked.extend(payer.shop.ask("SELECT owner FROM idempotency_keys FOR UPDATE NOWAIT"))
        return paid("k-1")

    api = payer.shop.api(pay)
    await api.post()
    assert locked == [(b"another",)]


async def test_connection_in_autocommit_mode_is_refused(mysql_url: str) -> None:
    shop = MysqlShop(mysql_url)
    said: list[str] = []

    async def pay(request: Any) -> Response:
        own = connect(mysql_url, autocommit=True)
        try:
            with pytest.raises(EnlistError) as caught:
                await current().enlist(own)
            said.append(str(caught.value))
            own.begin()
            await current().enlist(own)
            own.cursor().execute("INSERT INTO payments (`key`, cents) VALUES ('k-1', 5)")
            return paid("k-1")
        finally:
            opened.append(own)

    opened: list[Any] = []
    api = shop.api(pay)
    assert (await api.post()).status_code == 201
    assert "autocommit" in said[0]
    assert (shop.state(), shop.payments()) == (State.COMPLETED, 1)
    opened[0].close()
    await api.close()


async def test_connection_to_another_database_is_refused(mysql_url: str, mysql_server: Any) -> None:
    shop = MysqlShop(mysql_url)
    other = mysql_server.database("elsewhere")

    async def pay(request: Any) -> Response:
        own = connect(other)
        try:
            await current().enlist(own)
        finally:
            own.close()
        return paid("k-1")

    api = shop.api(pay)
    assert (await api.post()).status_code == 500
    assert shop.state() is State.FAILED_RETRYABLE
    await api.close()


async def test_body_of_any_bytes_is_stored_through_a_connection_of_another_character_set(mysql_url: str) -> None:
    shop = MysqlShop(mysql_url)
    opened: list[Any] = []
    body = bytes(range(256)) * 3

    async def pay(request: Any) -> Response:
        own = connect(mysql_url, charset="latin1")
        opened.append(own)
        await current().enlist(own)
        own.cursor().execute("INSERT INTO payments (`key`, cents) VALUES ('k-1', 5)")
        return Response(body, 201, media_type="application/octet-stream")

    api = shop.api(pay)
    assert (await api.post()).content == body
    again = await api.post()
    assert (again.content, again.headers["idempotency-replayed"]) == (body, "true")
    opened[0].close()
    await api.close()


@pytest.mark.parametrize(
    ("sql", "verb"),
    [
        ("create table t (id int)", "CREATE"),
        ("/* why */ ALTER TABLE t ADD c int", "ALTER"),
        ("-- why\nstart  transaction", "START TRANSACTION"),
        ("SET @@session.autocommit = 1", "SET @@SESSION.AUTOCOMMIT"),
        ("LOCK TABLES t WRITE", "LOCK TABLES"),
        ("CREATE TEMPORARY TABLE t (id int)", None),
        ("DROP  TEMPORARY TABLE t", None),
        ("INSERT INTO t VALUES ('begin')", None),
        ("SELECT 1", None),
        ("SET NAMES utf8mb4", None),
        ("SAVEPOINT a", None),
    ],
)
def test_statement_that_commits_by_itself_is_known(sql: str, verb: str | None) -> None:
    assert commits_by_itself(sql) == verb
