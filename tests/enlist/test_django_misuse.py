"""Views of Django that enlist in a way that cannot have one commit: what they are told, and what is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import IntegrityError, transaction
from django.http import HttpResponse
from django.test import override_settings

from oncekey import current
from oncekey.core.states import State
from oncekey.errors import EnlistError
from oncekey.web.django import conf
from tests.enlist.django_site import Site, every_shop, make_site
from tests.enlist.django_views import pay_in_block
from tests.enlist.shop import Shop
from tests.web.django_apps import make_handler

pytestmark = every_shop


@pytest.mark.parametrize("sql", ["COMMIT", "ROLLBACK"])
def test_commit_in_sql_is_refused_and_nothing_is_written(
    make: Callable[..., Site], shop: Shop, sql: str, caplog: pytest.LogCaptureFixture
) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        site.pay()
        site.ask(sql)
        return HttpResponse(status=201)

    with caplog.at_level(logging.CRITICAL, "django.request"):
        assert make(view).post().status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


@pytest.mark.parametrize("in_block", [True, False])
def test_error_that_the_view_swallows_stores_no_success(make: Callable[..., Site], shop: Shop, in_block: bool) -> None:
    """The transaction failed, so a 201 would be a success without its rows."""

    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias) if in_block else nullcontext():
            current().enlist()
            site.pay()
            try:
                with transaction.atomic(using=site.alias, savepoint=False):
                    raise IntegrityError("no")
            except IntegrityError:
                pass
        return HttpResponse(status=201)

    assert make(view).post().status_code == 503
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


def test_closed_connection_stores_no_success(make: Callable[..., Site], shop: Shop) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        site.connection.close()
        return HttpResponse(status=201)

    assert make(view).post().status_code == 503
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


def test_reopened_connection_makes_the_key_unknown(make: Callable[..., Site], shop: Shop) -> None:
    """What the view writes on a new connection is committed, and no guard sees it."""

    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        site.pay()
        site.connection.close()
        site.connection.connect()
        site.pay("later")
        return HttpResponse(status=201)

    site = make(view)
    assert [site.post().status_code for _ in range(2)] == [409, 409]
    assert (shop.payments(), shop.payments("later"), shop.state()) == (0, 1, State.UNKNOWN)


def test_commit_by_the_caller_is_refused(make: Callable[..., Site], shop: Shop) -> None:
    said: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        try:
            current().enlist(commit="caller")
        except EnlistError as error:
            said.append(str(error))
        return HttpResponse(status=201)

    make(view).post()
    assert "leave commit= out" in said[0]


def test_transaction_of_a_test_case_is_refused(make: Callable[..., Site], shop: Shop) -> None:
    """It is never committed, so the key would stay in progress."""
    said: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias):
            site.connection.atomic_blocks[0]._from_testcase = True
            with pytest.raises(EnlistError) as raised:
                current().enlist()
        said.append(str(raised.value))
        return HttpResponse(status=201)

    make(view).post()
    assert "TransactionTestCase" in said[0]


def test_durable_block_after_enlist_is_refused_by_django(make: Callable[..., Site], shop: Shop) -> None:
    """It could not commit when it ends: oncekey's block is around it."""

    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        with transaction.atomic(using=site.alias, durable=True):
            site.pay()
        return HttpResponse(status=201)

    assert make(view).post().status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


def test_write_before_enlist(make: Callable[..., Site], shop: Shop) -> None:
    """SQLite has one writer, so it is refused there; it cannot be seen whether Django has committed it (below). On
    PostgreSQL it is part of the transaction, and is undone with the view's block."""

    def view(site: Site, request: Any) -> HttpResponse:
        try:
            with transaction.atomic(using=site.alias):
                site.pay()
                current().enlist()
                raise IntegrityError("no")
        except IntegrityError:
            return HttpResponse(status=409)

    site = make(view)
    assert site.post().status_code == (500 if shop.kind == "sqlite" and site.atomic_requests else 409)
    state = State.FAILED_RETRYABLE if site.atomic_requests else State.UNKNOWN
    assert (shop.payments(), shop.state()) == (0, state if shop.kind == "sqlite" else State.FAILED)


@pytest.mark.parametrize("in_block", [True, False])
def test_committed_write_before_enlist_is_not_repeated(
    make: Callable[..., Site], shop: Shop, atomic_requests: bool, in_block: bool
) -> None:
    """Without ATOMIC_REQUESTS Django has committed it: the key is unknown, and no retry writes it again."""
    if atomic_requests or not shop.url.startswith("sqlite"):
        pytest.skip("Django rolls it back; on PostgreSQL it cannot be seen")

    def view(site: Site, request: Any) -> HttpResponse:
        site.pay()
        with transaction.atomic(using=site.alias) if in_block else nullcontext():
            current().enlist()
            site.pay()
        return HttpResponse(status=500)

    site = make(view)
    assert [site.post().status_code for _ in range(3)] == [409, 409, 409]
    assert (shop.payments(), shop.state()) == (1, State.UNKNOWN)


@pytest.mark.parametrize("in_block", [True, False])
def test_committed_write_of_a_non_atomic_view_is_not_repeated(
    make: Callable[..., Site], shop: Shop, in_block: bool
) -> None:
    """``@transaction.non_atomic_requests``: the setting says one thing, and this view is another."""
    if shop.kind != "sqlite":
        pytest.skip("only SQLite tells what was written before")

    def view(site: Site, request: Any) -> HttpResponse:
        site.pay()
        with transaction.atomic(using=site.alias) if in_block else nullcontext():
            current().enlist()
            site.pay()
        return HttpResponse(status=500)

    site = make(view, non_atomic=True)
    assert [site.post().status_code for _ in range(3)] == [409, 409, 409]
    assert (shop.payments(), shop.state()) == (1, State.UNKNOWN)


@pytest.mark.parametrize("in_thread", [True, False])
def test_committed_write_of_an_async_view_is_not_repeated(
    make: Callable[..., Site], shop: Shop, in_thread: bool
) -> None:
    """Its connection is in the thread of the request, and its writes are counted there."""
    if shop.kind != "sqlite":
        pytest.skip("only SQLite tells what was written before")

    def pay(site: Site) -> None:
        with transaction.atomic(using=site.alias):
            current().enlist()
            site.pay()

    async def view(site: Site, request: Any) -> HttpResponse:
        await sync_to_async(site.pay)()
        if in_thread or site.is_wsgi:
            await sync_to_async(pay)(site)
        else:
            await current().enlist()
        raise RuntimeError("the view broke")

    site = make(view, asynchronous=True, non_atomic=True)
    assert [site.post().status_code for _ in range(3)] == [409, 409, 409]
    assert (shop.payments(), shop.state()) == (1, State.UNKNOWN)


def test_async_view_enlists_after_middleware_wrote(make: Callable[..., Site], shop: Shop) -> None:
    """What middleware wrote before the view is not the view's: it is written again with each request."""

    async def view(site: Site, request: Any) -> HttpResponse:
        return await sync_to_async(pay_in_block)(site, request)

    site = make(view, asynchronous=True, non_atomic=True, inside=[f"{__name__}.writes_before"])
    _before[:] = [site]
    assert site.post().status_code == 201
    assert (shop.payments(), shop.payments("before"), shop.state()) == (1, 1, State.COMPLETED)


_before: list[Site] = []


def writes_before(get_response: Any) -> Any:
    """Middleware, in the thread of the request."""

    def middleware(request: Any) -> Any:
        _before[0].pay("before")
        return get_response(request)

    return middleware


def test_caught_exception_of_a_block_in_a_non_atomic_view_undoes_that_block(
    make: Callable[..., Site], shop: Shop
) -> None:
    """The block is the view's own, so the view may go on after it, also with ATOMIC_REQUESTS in the settings."""

    def view(site: Site, request: Any) -> HttpResponse:
        try:
            with transaction.atomic(using=site.alias):
                current().enlist()
                site.pay("undone")
                raise IntegrityError("no")
        except IntegrityError:
            site.pay()
        return HttpResponse(status=201)

    assert make(view, non_atomic=True).post().status_code == 201
    assert (shop.payments(), shop.payments("undone"), shop.state()) == (1, 0, State.COMPLETED)


def test_read_before_enlist_is_allowed(make: Callable[..., Site], shop: Shop) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias):
            site.ask("SELECT count(*) FROM payments")
            shop.ask("INSERT INTO payments VALUES ('between', 1)")
            current().enlist()
            site.pay()
        return HttpResponse(status=201)

    assert make(view).post().status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


def test_enlist_without_an_argument_names_what_it_needs(shop: Shop) -> None:
    """Outside of Django there is no connection to guess."""
    said: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        with pytest.raises(EnlistError) as raised:
            current().blocking.enlist()
        said.append(str(raised.value))
        return HttpResponse(status=201)

    site = make_site(shop, view, asgi=False)
    site.once.engine.own_connection = None
    del site.once.engine.how_to_enlist  # the words of Django
    site.post()
    site.close()
    assert "op.enlist(session)" in said[0]


def test_error_of_a_view_reaches_the_log_in_the_words_of_django(
    make: Callable[..., Site], shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """Django's own log prints nothing without DEBUG."""

    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        current().enlist()
        return HttpResponse(status=201)

    with caplog.at_level(logging.ERROR, "oncekey"):
        assert make(view).post().status_code == 500
    lines = [record.message for record in caplog.records if record.name == "oncekey"]
    assert "POST /payments: the view raised an error of oncekey: this operation has enlisted" in "".join(lines)
    assert "session" not in "".join(lines)


def test_enlist_with_a_store_that_is_no_alias_says_what_to_set(shop: Shop) -> None:
    """Django cannot know which of its databases keeps the keys."""
    said: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        with pytest.raises(EnlistError) as raised:
            current().blocking.enlist()
        said.append(str(raised.value))
        return HttpResponse(status=201)

    site = make_site(shop, view, asgi=False)
    with override_settings(ONCEKEY={"STORE": shop.url, "SCOPE": "SINGLE_TENANT"}):
        site.once.close()
        site.once = conf.make()
    site.app = make_handler(site.urls, site.once, asgi=False, upkeep=False)
    site.post()
    site.close()
    assert "use an alias of DATABASES as ONCEKEY['STORE']" in said[0]


def test_transactional_view_that_does_not_enlist_is_told_how(
    make: Callable[..., Site], shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert make(lambda site, request: HttpResponse(status=201)).post().status_code == 201
    (line,) = [line for line in caplog.messages if "enlisted no transaction" in line]
    assert "Use current().enlist() in the transaction.atomic() of the view" in line
    assert "session" not in line


def test_job_without_a_transaction_says_how_to_enlist(make: Callable[..., Site], shop: Shop) -> None:
    said: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        with pytest.raises(EnlistError) as raised:
            current().blocking.enqueue("send_receipt", {})
        said.append(str(raised.value))
        return HttpResponse(status=201)

    make(view).post()
    assert "call current().enlist() in the transaction.atomic() of the view first" in said[0]


def test_function_in_the_block_of_a_view_cannot_enlist_it(make: Callable[..., Site], shop: Shop) -> None:
    """The block is the view's: ended by the function, it would commit or undo what the view wrote."""
    refused: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        @site.once.function("stock", key="order", effects="transactional")
        def stock(order: str) -> None:
            current().enlist()

        with transaction.atomic(using=site.alias):
            try:
                stock("o-1")
            except EnlistError as error:
                refused.append(str(error))
            current().enlist()
            site.pay()
        return HttpResponse(status=201)

    site = make(view)
    assert [site.post().status_code, site.post().status_code] == [201, 201]
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    assert len(refused) == 1
    assert "a transaction of its caller" in refused[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_function_in_a_block_on_sqlite_is_refused_before_it_runs(
    make: Callable[..., Site], shop: Shop, asynchronous: bool
) -> None:
    """What it writes would hold the file, its result would be stored later, and its rows may be rolled back by then."""
    if shop.kind != "sqlite":
        pytest.skip("only SQLite has one writer")
    ran: list[str] = []
    refused: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        lazy = conf.LazyOnce()
        lazy._made = site.once

        @lazy.function("ship", key="order", effects="repeatable")
        def ship(order: str) -> None:
            ran.append(order)

        @lazy.function("send", key="order", effects="repeatable")
        async def send(order: str) -> None:
            ran.append(order)

        with transaction.atomic(using=site.alias), pytest.raises(EnlistError) as raised:
            async_to_sync(send)("o-1") if asynchronous else ship("o-1")
        refused.append(str(raised.value))
        if not site.atomic_requests:
            ship("o-2")
        return HttpResponse(status=201)

    site = make(view)
    assert site.post().status_code == 201
    assert ran == ([] if site.atomic_requests else ["o-2"])
    name = "send" if asynchronous else "ship"
    assert f"{name} was called in a transaction of its caller (transaction.atomic() or ATOMIC_REQUESTS)" in refused[0]
    assert "call it outside of the block" in refused[0]


def test_function_in_a_test_case_on_sqlite_is_told_what_to_use(make: Callable[..., Site], shop: Shop) -> None:
    if shop.kind != "sqlite":
        pytest.skip("only SQLite has one writer")

    def view(site: Site, request: Any) -> HttpResponse:
        ship = site.once.function("ship", key="order")(lambda order: None)
        with transaction.atomic(using=site.alias):
            site.connection.atomic_blocks[0]._from_testcase = True
            with pytest.raises(EnlistError, match="use TransactionTestCase"):
                ship("o-1")
        return HttpResponse(status=201)

    assert make(view).post().status_code == 201


def test_transactional_function_that_does_not_enlist_is_told_how(
    make: Callable[..., Site], shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The words are about the function: the block of a view cannot be enlisted in it."""

    def view(site: Site, request: Any) -> HttpResponse:
        site.once.function("ship", key="order", effects="transactional")(lambda order: None)("o-1")
        return HttpResponse(status=201)

    with caplog.at_level(logging.WARNING, "oncekey"):
        assert make(view, effects="repeatable", non_atomic=True).post().status_code == 201
    (line,) = [line for line in caplog.messages if "enlisted no transaction" in line]
    assert "Use current().enlist() in the transaction.atomic() of the function" in line
