"""Views of Django that enlist, and then change the connection, the thread or the database."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.http import HttpResponse

from oncekey import current
from oncekey.core.states import State
from oncekey.errors import EnlistError
from tests.enlist.django_site import Site, every_shop, make_site
from tests.enlist.django_views import pay_in_block
from tests.enlist.shop import Shop
from tests.web.django_middleware import pool

pytestmark = every_shop


class Out(Exception):
    pass


# ---------------------------------------------------------------- another connection


@pytest.mark.parametrize("status", [201, 409])
def test_connection_taken_out_makes_the_key_unknown(
    make: Callable[..., Site], shop: Shop, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The view gets another connection, on which no guard is. The enlisted transaction is rolled back."""

    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        del connections[site.alias]
        if shop.kind != "sqlite":  # one writer: the enlisted transaction
            site.pay("later")
        return HttpResponse(status=status)

    site = make(view)
    with caplog.at_level(logging.ERROR, "oncekey"):
        assert [site.post().status_code for _ in range(2)] == [409, 409]
    assert "the key is unknown" in caplog.text
    assert "del connections" in caplog.text
    assert (shop.payments(), shop.payments("later")) == (0, int(shop.kind != "sqlite"))
    assert shop.state() is State.UNKNOWN


def test_connection_taken_out_is_closed(make: Callable[..., Site], shop: Shop) -> None:
    taken: list[Any] = []

    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        taken.append(site.connection.connection)
        del connections[site.alias]
        return HttpResponse(status=201)

    make(view).post()
    with pytest.raises(Exception, match=r"closed|\((0|2006), ''\)"):
        taken[0].cursor().execute("SELECT 1")


# ---------------------------------------------------------------- another thread


def in_pool(function: Callable[[], Any], own: ThreadPoolExecutor) -> Any:
    return own.submit(contextvars.copy_context().run, function).result()


def test_enlist_in_another_thread_is_refused(make: Callable[..., Site], shop: Shop) -> None:
    """Its connection stays as it was, so a later request in that thread can use it."""
    said: list[str] = []
    own = ThreadPoolExecutor(1)

    def view(site: Site, request: Any) -> HttpResponse:
        def work() -> None:
            with transaction.atomic(using=site.alias):
                with pytest.raises(EnlistError) as raised:
                    current().enlist()
                site.pay("in the thread")
            said.append(str(raised.value))

        in_pool(work, own)
        return pay_in_block(site, request)

    site = make(view)
    assert [site.post(key).status_code for key in ("k-1", "k-2")] == [201, 201]
    own.submit(connections.close_all).result()
    own.shutdown()
    assert "thread_sensitive=True" in said[0]
    assert (shop.payments(), shop.payments("in the thread"), shop.state()) == (1, 2, State.COMPLETED)


@pytest.mark.parametrize("asgi", [False, True])
@pytest.mark.parametrize("sensitive", [True, False])
def test_async_view_enlists_in_the_thread_of_the_request_only(shop: Shop, asgi: bool, sensitive: bool) -> None:
    said: list[str] = []

    async def view(site: Site, request: Any) -> HttpResponse:
        def work() -> None:
            try:
                with transaction.atomic(using=site.alias):
                    current().enlist()
                    site.pay()
            except EnlistError as error:
                said.append(str(error))
                connections[site.alias].close()

        await sync_to_async(work, thread_sensitive=sensitive)()
        return HttpResponse(status=409 if said else 201)

    site = make_site(shop, view, asgi=asgi, asynchronous=True)
    assert site.post().status_code == (201 if sensitive else 409)
    site.close()
    assert (shop.payments(), len(said)) == ((1, 0) if sensitive else (0, 1))


def test_await_of_enlist_under_wsgi_says_where_to_enlist(shop: Shop) -> None:
    said: list[str] = []

    async def view(site: Site, request: Any) -> HttpResponse:
        with pytest.raises(EnlistError) as raised:
            await current().enlist()
        said.append(str(raised.value))
        return HttpResponse(status=201)

    site = make_site(shop, view, asgi=False, asynchronous=True)
    site.post()
    site.close()
    assert "under WSGI, enlist in the function that you give to sync_to_async" in said[0]
    assert "session" not in said[0]


@pytest.mark.parametrize("status", [201, 402])
def test_enlisted_view_that_middleware_calls_keeps_its_rows(make: Callable[..., Site], shop: Shop, status: int) -> None:
    """A returned 402 is the view's answer, so it commits. Django puts no block of ATOMIC_REQUESTS around this call."""

    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        return HttpResponse(status=status)

    site = make(view, inside=["tests.web.django_middleware.CallsView"])
    assert [site.post().status_code for _ in range(2)] == [status, status]
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED if status == 201 else State.FAILED)


@pytest.mark.parametrize("context", ["InThread", "InThreadWithContext"])
def test_view_in_a_thread_of_middleware_cannot_enlist(
    make: Callable[..., Site], shop: Shop, context: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told why, nothing is written, and the thread can serve the next request."""
    site = make(pay_in_block, inside=[f"tests.web.django_middleware.{context}"])
    with caplog.at_level(logging.ERROR, "oncekey"):
        assert [site.post().status_code for _ in range(3)] == [500, 500, 500]
    assert "enlist in the thread of the request" in caplog.text
    assert "failed transaction" not in caplog.text
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    for _ in range(4):
        pool.submit(connections.close_all).result()


# ---------------------------------------------------------------- another database, and blocks that raise


def test_block_of_another_database_is_refused(make: Callable[..., Site], shop: Shop) -> None:
    """The view writes there, and the key would be committed elsewhere."""
    said: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using="default"), pytest.raises(EnlistError) as raised:
            current().enlist()
        said.append(str(raised.value))
        return HttpResponse(status=201)

    make(view).post()
    assert "keep the keys where the view writes" in said[0]


def insert(site: Site) -> None:
    """As Django's ORM inserts. On MariaDB and SQLite it returns the row, and PyMySQL then does not see that a
    transaction has begun."""
    returning = " RETURNING cents" if site.connection.features.can_return_columns_from_insert else ""
    site.ask(f"INSERT INTO payments (key, cents) VALUES ('{current().key}', 5){returning}")


@pytest.mark.parametrize("first", ["write", "read"])
def test_caught_exception_undoes_the_whole_block(make: Callable[..., Site], shop: Shop, first: str) -> None:
    """Also what the view wrote in it before it enlisted. Django allows no statement after it."""
    said: list[Exception] = []

    def view(site: Site, request: Any) -> HttpResponse:
        try:
            with transaction.atomic(using=site.alias):
                insert(site) if first == "write" else site.ask("SELECT count(*) FROM payments")
                current().enlist()
                site.pay()
                raise Out
        except Out:
            try:
                site.pay("later")
            except transaction.TransactionManagementError as error:
                said.append(error)
            return HttpResponse(status=409)

    if shop.kind == "sqlite" and first == "write":
        pytest.skip("SQLite refuses it (test_write_before_enlist)")
    site = make(view)
    assert [site.post().status_code for _ in range(2)] == [409, 409]
    mysql_or_wrote = first == "write" or shop.kind == "mysql"
    goes_on = site.atomic_requests or not mysql_or_wrote
    assert (shop.payments(), shop.payments("later"), len(said)) == ((0, 1, 0) if goes_on else (0, 0, 1))
    assert shop.state() is State.FAILED
