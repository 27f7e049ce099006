"""``enlist()`` in Django on MySQL and MariaDB: what only they do, with mysqlclient and with PyMySQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction
from django.http import HttpResponse
from django.test import override_settings

from oncekey import current
from oncekey.core.states import State
from oncekey.errors import EnlistError
from oncekey.stores.mysql.address import parse
from oncekey.web.django import conf
from tests.enlist.django_site import Site, add_database, mysql_shops
from tests.enlist.django_views import VIEWS, pay_in_block
from tests.enlist.shop import Shop
from tests.stores.mysql import connect

pytestmark = mysql_shops


@pytest.mark.parametrize(
    "sql", ["CREATE TABLE other (id int)", "TRUNCATE payments", "START TRANSACTION", "SET autocommit = 1"]
)
def test_statement_that_commits_by_itself_is_refused(make: Callable[..., Site], shop: Shop, sql: str) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        site.pay()
        site.ask(sql)
        return HttpResponse(status=201)

    assert make(view).post().status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


@pytest.mark.parametrize("verb", ["commit", "rollback", "autocommit"])
def test_end_beneath_django_is_refused(make: Callable[..., Site], shop: Shop, verb: str) -> None:
    """On the driver's own connection, which Django does not see. The view swallows the refusal, and goes on."""
    said: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        site.pay()
        raw = site.connection.connection
        for call in (lambda: getattr(raw, verb)(*([True] if verb == "autocommit" else [])), site.pay, raw.commit):
            try:
                call()
            except Exception as error:
                said.append(str(error))
        return HttpResponse(status=201)

    assert make(view).post().status_code == 503
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    leave_it = "Leave COMMIT, ROLLBACK, connection.close(), del connections[…] and, on MySQL, DDL out"
    assert ("commits the open transaction without saying so" if verb == "autocommit" else leave_it) in said[0]
    assert "`with transaction.atomic():`" in said[1]


def test_commit_in_a_procedure_makes_the_key_unknown(make: Callable[..., Site], shop: Shop) -> None:
    """No guard sees it. The savepoint is gone, and the key's row tells that the transaction was committed."""
    shop.ask("DROP PROCEDURE IF EXISTS ends_it")
    shop.ask("CREATE PROCEDURE ends_it () COMMIT")

    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        site.pay()
        site.ask("CALL ends_it()")
        return HttpResponse(status=201)

    site = make(view)
    assert [site.post().status_code for _ in range(2)] == [409, 409]
    assert (shop.payments(), shop.state()) == (1, State.UNKNOWN)


def test_commit_in_a_procedure_after_a_rollback_to_a_savepoint_makes_the_key_unknown(
    make: Callable[..., Site], shop: Shop
) -> None:
    """The rollback undid the number in the key's row. Locked again, the row has the same number, so it still tells."""
    shop.ask("DROP PROCEDURE IF EXISTS ends_it")
    shop.ask("CREATE PROCEDURE ends_it () COMMIT")

    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias):
            try:
                with transaction.atomic(using=site.alias):
                    current().enlist()
                    site.pay("first")
                    raise ValueError
            except ValueError:
                site.pay("second")
            site.ask("CALL ends_it()")
        return HttpResponse(status=201)

    site = make(view)
    assert [site.post().status_code for _ in range(2)] == [409, 409]
    assert (shop.payments("first"), shop.payments("second"), shop.state()) == (0, 1, State.UNKNOWN)


# ---------------------------------------------------------------- deadlocks and time-outs


@contextmanager
def rival(shop: Shop) -> Iterator[Any]:
    """Another transaction that has changed many rows, among them `b`: in a deadlock the server rolls back the other."""
    shop.ask("CREATE TABLE IF NOT EXISTS stock (name varchar(9) PRIMARY KEY, n int) ENGINE=InnoDB")
    shop.ask("REPLACE INTO stock VALUES ('a', 0), ('b', 0)")
    other = connect(shop.url)
    try:
        for number in range(30):
            other.cursor().execute("REPLACE INTO stock VALUES (%s, 1)", [f"x{number}"])
        other.cursor().execute("UPDATE stock SET n = 1 WHERE name = 'b'")
        yield other
    finally:
        with suppress(Exception):
            other.rollback()
        other.close()


def deadlock(site: Site, shop: Shop, other: Any) -> None:
    """In the view: the server rolls back its whole transaction."""
    site.ask("UPDATE stock SET n = 2 WHERE name = 'a'")
    blocked = threading.Thread(target=other.cursor().execute, args=["UPDATE stock SET n = 1 WHERE name = 'a'"])
    blocked.start()
    waiting = "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    while not shop.ask(waiting)[0][0]:  # the server refreshes this table only if it was not read for 0.1 s
        assert blocked.is_alive()
        threading.Event().wait(0.15)
    try:
        site.ask("UPDATE stock SET n = 2 WHERE name = 'b'")
    finally:
        blocked.join(10)
        other.rollback()


@pytest.mark.parametrize("in_block", [True, False])
def test_view_that_swallows_a_deadlock_completes_nothing(make: Callable[..., Site], shop: Shop, in_block: bool) -> None:
    """What it writes after the deadlock is in another transaction, without the payment before it."""

    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias) if in_block else nullcontext():
            current().enlist()
            site.pay("before")
            if current().attempt == 1:
                with pytest.raises(OperationalError, match="1213"):
                    deadlock(site, shop, other)
            site.pay("after")
        return HttpResponse(status=201)

    with rival(shop) as other:
        site = make(view)
        assert site.post().status_code == (500 if in_block else 503)
        assert (shop.payments("before"), shop.payments("after")) == (0, 0)
        assert shop.state() is State.FAILED_RETRYABLE
        assert site.post().status_code == 201
    assert (shop.payments("before"), shop.payments("after"), shop.state()) == (1, 1, State.COMPLETED)


def test_view_that_raises_after_a_deadlock_may_run_again(make: Callable[..., Site], shop: Shop) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias):
            current().enlist()
            site.pay()
            if current().attempt == 1:
                deadlock(site, shop, other)
        return HttpResponse(status=201)

    with rival(shop) as other:
        site = make(view)
        assert site.post().status_code == 500
        assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
        assert site.post().status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


@pytest.mark.parametrize("in_block", [True, False])
def test_lock_time_out_undoes_its_own_statement(make: Callable[..., Site], shop: Shop, in_block: bool) -> None:
    """The transaction goes on, and its payment is committed with the response."""

    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        site.ask("SET SESSION innodb_lock_wait_timeout = 1")
        block = transaction.atomic(using=site.alias) if in_block else nullcontext()
        with pytest.raises(OperationalError, match="1205"), block:
            site.ask("UPDATE stock SET n = 2 WHERE name = 'b'")
        return HttpResponse(status=201)

    with rival(shop):
        assert make(view).post().status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


# ---------------------------------------------------------------- connections


@pytest.mark.parametrize("view", VIEWS)
def test_repeatable_read_sees_the_row_of_the_key(make: Callable[..., Site], shop: Shop, view: Any) -> None:
    """The snapshot is older than the last renewal of the lease."""

    def reading(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias):
            assert site.ask("SELECT count(*) FROM idempotency_keys") == 1
            shop.ask("UPDATE idempotency_keys SET lease_until = lease_until + INTERVAL 1 SECOND")
            response: HttpResponse = view(site, request)
        return response

    site = make(reading, isolation_level="repeatable read")
    assert [site.post().status_code for _ in range(2)] == [201, 201]
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


def test_connection_that_the_server_killed_completes_nothing(make: Callable[..., Site], shop: Shop) -> None:
    """PyMySQL connects again when Django asks whether its connection is usable."""

    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        if current().attempt == 1:
            shop.ask(f"KILL {site.ask('SELECT connection_id()')}")
            for call in (site.connection.is_usable, site.pay):
                with suppress(Exception):
                    call()
        return HttpResponse(status=201)

    site = make(view)
    assert site.post().status_code == 503
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    assert site.post().status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


def test_connection_that_the_library_replaced_makes_the_key_unknown(make: Callable[..., Site], shop: Any) -> None:
    """mysqlclient connects again by itself after ping(True), and the new session commits each statement."""
    if shop.driver != "mysqlclient":
        pytest.skip("PyMySQL does not")

    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        raw = site.connection.connection
        with pytest.deprecated_call():
            raw.ping(True)
        shop.ask(f"KILL {raw.thread_id()}")
        with pytest.raises(OperationalError, match="2006"):
            site.pay()
        site.pay()
        return HttpResponse(status=201)

    site = make(view)
    assert [site.post().status_code for _ in range(2)] == [409, 409]
    assert (shop.payments(), shop.state()) == (1, State.UNKNOWN)


def test_guards_end_with_the_request(make: Callable[..., Site], shop: Shop) -> None:
    """The next view of this thread uses the connection as before."""
    seen: list[Any] = []

    def view(site: Site, request: Any) -> HttpResponse:
        if current().key == "k-1":
            return pay_in_block(site, request)
        site.ask("SELECT 1")  # under ASGI this is another thread, with a connection of its own
        raw = site.connection.connection
        seen.append([name for name in ("query", "commit", "_execute_command", "autocommit") if name in vars(raw)])
        seen.append([name for name in vars(site.connection) if name.startswith("savepoint_commit")])
        return HttpResponse(status=201)

    site = make(view, effects="external")
    connections.settings[site.alias]["CONN_MAX_AGE"] = None  # else Django closes it after the request
    assert [site.post(key).status_code for key in ("k-1", "k-2")] == [201, 201]
    assert seen == [[], []]


# ---------------------------------------------------------------- settings


@pytest.fixture
def alias(shop: Any) -> Iterator[str]:
    alias = add_database(shop.url, shop.driver, atomic_requests=False)
    yield alias
    connections[alias].close()
    del connections.settings[alias]


def test_alias_gives_the_url_of_its_database(alias: str) -> None:
    connections.settings[alias] |= {"NAME": "a/b", "USER": "ann@x", "PASSWORD": "p:/@%", "HOST": "::1", "PORT": "33"}
    connections.settings[alias]["OPTIONS"] = {"ssl": {"ca": "/etc/ca.pem"}, "charset": "latin1"}
    found = parse(conf.store_url(alias))
    assert (found.hosts, found.user, found.password, found.database) == ((("::1", 33),), "ann@x", "p:/@%", "a/b")
    assert found.options == (("ssl_ca", "/etc/ca.pem"),)


def test_alias_with_a_socket_and_verified_tls(alias: str) -> None:
    connections.settings[alias] |= {"HOST": "/run/my.sock", "PORT": ""}
    connections.settings[alias]["OPTIONS"] = {"ssl_mode": "VERIFY_CA"}
    options = dict(parse(conf.store_url(alias)).options)
    assert options == {"unix_socket": "/run/my.sock", "ssl_verify_cert": True, "ssl_verify_identity": False}


def test_alias_with_a_file_of_settings_is_refused(alias: str) -> None:
    connections.settings[alias]["OPTIONS"] = {"read_default_file": "/etc/my.cnf"}
    with override_settings(ONCEKEY={"STORE": alias, "SCOPE": "SINGLE_TENANT"}), pytest.raises(conf.Wrong) as raised:
        conf.make()
    assert raised.value.number == 4
    assert "mysql:// URL" in raised.value.hint


def test_database_of_another_kind_names_what_can_be_enlisted(alias: str) -> None:
    from oncekey.engine.transactions.adapters.django import DjangoLink

    with pytest.raises(EnlistError, match="PostgreSQL, MySQL, MariaDB and SQLite"):
        DjangoLink(alias, "oracle")
