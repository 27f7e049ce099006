"""``enlist()`` in Django: the view's own ``transaction.atomic()``, and ``ATOMIC_REQUESTS`` on and off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, transaction
from django.http import Http404, HttpResponse, JsonResponse
from django.template.response import TemplateResponse

from oncekey import current
from oncekey.core.states import State
from oncekey.errors import EnlistError
from tests.enlist.django_site import Site, make_site
from tests.enlist.shop import Shop

from rest_framework.decorators import api_view  # isort: skip - Django is configured by django_site
from rest_framework.exceptions import APIException  # isort: skip

ENDS = ("wsgi", pytest.param("asgi", marks=pytest.mark.frameworks))


@pytest.fixture(params=["atomic-requests", "own-blocks"])
def atomic_requests(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "atomic-requests")


@pytest.fixture(params=ENDS)
def make(shop: Shop, request: pytest.FixtureRequest, atomic_requests: bool) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(view: Callable[[Site, Any], Any], **options: Any) -> Site:
        made.append(make_site(shop, view, asgi=request.param == "asgi", atomic_requests=atomic_requests, **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


def pay_in_block(site: Site, request: Any) -> HttpResponse:
    """As most views are written; with ATOMIC_REQUESTS the block is a savepoint."""
    with transaction.atomic(using=site.alias):
        current().enlist()
        site.pay()
    return JsonResponse({"paid": current().key}, status=201)


def pay_plainly(site: Site, request: Any) -> HttpResponse:
    """Without a block: it opens one, or takes that of ATOMIC_REQUESTS."""
    current().enlist()
    site.pay()
    return JsonResponse({"paid": current().key}, status=201)


VIEWS = [pay_in_block, pay_plainly]


@pytest.mark.parametrize("view", VIEWS)
def test_enlisted_view_pays_once_and_replays(make: Callable[..., Site], shop: Shop, view: Any) -> None:
    site = make(view)
    first = site.post()
    assert first.status_code == 201, first.text
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    again = site.post()
    assert (again.status_code, again.content, again.headers["idempotency-replayed"]) == (201, first.content, "true")
    assert shop.payments() == 1
    assert site.post("k-2").status_code == 201
    assert shop.payments("k-2") == 1


def test_no_row_is_visible_before_the_response_is_stored(make: Callable[..., Site], shop: Shop) -> None:
    """The block of the view has ended, and nothing is committed yet: a crash here undoes all."""
    seen: list[int] = []

    def view(site: Site, request: Any) -> HttpResponse:
        response = pay_in_block(site, request)
        seen.append(shop.payments())
        return response

    assert make(view).post().status_code == 201
    assert (seen, shop.payments()) == ([0], 1)


@pytest.mark.parametrize("view", VIEWS)
def test_raised_exception_rolls_back_and_the_retry_pays(make: Callable[..., Site], shop: Shop, view: Any) -> None:
    def failing(site: Site, request: Any) -> HttpResponse:
        response: HttpResponse = view(site, request)
        if current().attempt == 1:
            raise RuntimeError("the view broke")
        return response

    site = make(failing)
    assert site.post().status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    assert site.post().status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


@pytest.mark.parametrize(("status", "state", "rows"), [(500, State.FAILED_RETRYABLE, 0), (402, State.FAILED, 1)])
def test_returned_status_decides_the_commit(
    make: Callable[..., Site], shop: Shop, status: int, state: State, rows: int
) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        return HttpResponse(status=status)

    assert make(view).post().status_code == status
    assert (shop.payments(), shop.state()) == (rows, state)


def test_raised_404_rolls_back_and_is_stored(make: Callable[..., Site], shop: Shop) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        raise Http404

    site = make(view)
    assert site.post().status_code == 404
    assert (shop.payments(), shop.state()) == (0, State.FAILED)


def test_block_that_raised_and_was_caught_leaves_nothing(make: Callable[..., Site], shop: Shop) -> None:
    """The view catches the error of its block, reads on, and answers: as without oncekey."""

    def view(site: Site, request: Any) -> HttpResponse:
        try:
            with transaction.atomic(using=site.alias):
                current().enlist()
                site.pay()
                raise IntegrityError("already there")
        except IntegrityError:
            return JsonResponse({"there": site.ask("SELECT count(*) FROM payments")}, status=409)

    site = make(view)
    first = site.post()
    assert (first.status_code, first.json()) == (409, {"there": 0})
    assert (shop.payments(), shop.state()) == (0, State.FAILED)
    assert site.post().content == first.content


def test_block_that_raised_and_was_caught_may_end_well(make: Callable[..., Site], shop: Shop) -> None:
    """The view writes something else after it, and that is committed with its response."""

    def view(site: Site, request: Any) -> HttpResponse:
        try:
            with transaction.atomic(using=site.alias):
                current().enlist()
                site.pay("first")
                raise IntegrityError("already there")
        except IntegrityError:
            site.pay("second")
        return HttpResponse(status=201)

    assert make(view).post().status_code == 201
    assert (shop.payments("first"), shop.payments("second"), shop.state()) == (0, 1, State.COMPLETED)


def test_savepoint_inside_of_the_block_undoes_its_own_part(make: Callable[..., Site], shop: Shop) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias):
            current().enlist()
            site.pay()
            try:
                with transaction.atomic(using=site.alias):
                    site.pay("other")
                    raise IntegrityError("no")
            except IntegrityError:
                pass
        return HttpResponse(status=201)

    assert make(view).post().status_code == 201
    assert (shop.payments(), shop.payments("other")) == (1, 0)


def test_writes_after_the_block_are_in_the_same_commit(make: Callable[..., Site], shop: Shop) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        response = pay_in_block(site, request)
        with transaction.atomic(using=site.alias):
            site.pay("later")
        if current().attempt == 1:
            raise RuntimeError("the view broke")
        return response

    site = make(view)
    assert site.post().status_code == 500
    assert (shop.payments(), shop.payments("later")) == (0, 0)
    assert site.post().status_code == 201
    assert (shop.payments(), shop.payments("later")) == (1, 1)


def test_on_commit_hooks_run_once_after_the_commit(make: Callable[..., Site], shop: Shop) -> None:
    ran: list[tuple[str, int]] = []

    def hook(name: str) -> Callable[[], None]:
        return lambda: ran.append((name, shop.payments()))

    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias):
            transaction.on_commit(hook("before enlist"), using=site.alias)
            current().enlist()
            transaction.on_commit(hook("after enlist"), using=site.alias)
            site.pay()
            try:
                with transaction.atomic(using=site.alias):
                    transaction.on_commit(hook("rolled back"), using=site.alias)
                    raise IntegrityError("no")
            except IntegrityError:
                pass
        assert ran == []
        if current().attempt == 1:
            raise RuntimeError("the view broke")
        return HttpResponse(status=201)

    site = make(view)
    assert site.post().status_code == 500
    assert ran == []
    assert site.post().status_code == 201
    assert ran == [("before enlist", 1), ("after enlist", 1)]
    site.post()
    assert len(ran) == 2


def test_hooks_of_a_block_that_raised_do_not_run(make: Callable[..., Site], shop: Shop) -> None:
    ran: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        try:
            with transaction.atomic(using=site.alias):
                transaction.on_commit(lambda: ran.append("before"), using=site.alias)
                current().enlist()
                transaction.on_commit(lambda: ran.append("after"), using=site.alias)
                raise IntegrityError("no")
        except IntegrityError:
            return HttpResponse(status=409)

    assert make(view).post().status_code == 409
    assert (ran, shop.state()) == ([], State.FAILED)


def test_hook_that_raises_does_not_undo_the_response(
    make: Callable[..., Site], shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("mail server")

    def view(site: Site, request: Any) -> HttpResponse:
        current().enlist()
        site.pay()
        transaction.on_commit(fail, using=site.alias)
        return HttpResponse(b"paid", status=201)

    site = make(view)
    with caplog.at_level(logging.ERROR, "oncekey"):
        assert site.post().status_code == 201
    assert any("on_commit hook failed" in line for line in caplog.messages)
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    assert site.post().content == b"paid"


def test_template_that_fails_after_the_view_rolls_back(make: Callable[..., Site], shop: Shop) -> None:
    """Django renders after the view has returned and its block has ended."""

    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        return TemplateResponse(request, "no-such-template.html", status=201)

    assert make(view).post().status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


def test_next_request_of_the_thread_is_in_no_transaction(make: Callable[..., Site], shop: Shop) -> None:
    """However a view ends, Django's connection is as it was: the next view commits by itself."""
    how = {"m": ""}

    def view(site: Site, request: Any) -> HttpResponse:
        in_block = site.connection.in_atomic_block
        if how["m"] == "look":
            site.pay(current().key)
            return JsonResponse({"in_block": in_block, "blocks": len(site.connection.atomic_blocks)}, status=201)
        pay_in_block(site, request)
        if how["m"] == "raise":
            raise RuntimeError("the view broke")
        return HttpResponse(status=int(how["m"]))

    site = make(view, effects="external")
    for number, m in enumerate(("201", "raise", "402", "500")):
        how["m"] = m
        site.post(f"k-{m}")
        how["m"] = "look"
        looked = site.post(f"look-{number}")
        assert looked.json() == {"in_block": site.atomic_requests, "blocks": int(site.atomic_requests)}
        assert shop.payments(f"look-{number}") == 1


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


def test_block_of_another_database_is_refused(make: Callable[..., Site], shop: Shop) -> None:
    """The view writes there, and the key would be committed elsewhere."""
    said: list[str] = []

    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using="default"), pytest.raises(EnlistError) as raised:
            current().enlist()
        said.append(str(raised.value))
        return HttpResponse(status=201)

    site = make(view)
    if site.atomic_requests:
        pytest.skip("Django's own block is on the database of the keys, too")
    site.post()
    assert "keep the keys where the view writes" in said[0]


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


# ---------------------------------------------------------------- Django REST framework


class Declined(APIException):
    status_code = 402


@pytest.mark.parametrize("view", VIEWS)
def test_rest_view_pays_once(make: Callable[..., Site], shop: Shop, view: Any) -> None:
    site = make(view, wrap=api_view(["POST"]))
    first = site.post()
    assert first.status_code == 201, first.text
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    assert site.post().content == first.content
    assert shop.payments() == 1


@pytest.mark.parametrize("view", VIEWS)
def test_rest_exception_rolls_back_and_is_stored(make: Callable[..., Site], shop: Shop, view: Any) -> None:
    """REST framework answers it inside of the view, and the view's block ends without an exception."""

    def declining(site: Site, request: Any) -> HttpResponse:
        view(site, request)
        raise Declined

    site = make(declining, wrap=api_view(["POST"]))
    first = site.post()
    assert first.status_code == 402
    assert (shop.payments(), shop.state()) == (0, State.FAILED)
    assert site.post().content == first.content


def test_rest_view_that_raises_anything_else_may_run_again(make: Callable[..., Site], shop: Shop) -> None:
    def failing(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        raise RuntimeError("the view broke")

    assert make(failing, wrap=api_view(["POST"])).post().status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


# ---------------------------------------------------------------- async views


@pytest.fixture
def make_async(shop: Shop) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(view: Callable[[Site, Any], Any], **options: Any) -> Site:
        made.append(make_site(shop, view, asgi=True, asynchronous=True, **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


async def pay_awaiting(site: Site, request: Any) -> HttpResponse:
    await current().enlist()
    await sync_to_async(site.pay)()
    return HttpResponse(b"paid", status=201)


async def pay_in_thread(site: Site, request: Any) -> HttpResponse:
    def work() -> None:
        with transaction.atomic(using=site.alias):
            current().blocking.enlist()
            site.pay()

    await sync_to_async(work)()
    return HttpResponse(b"paid", status=201)


@pytest.mark.parametrize("view", [pay_awaiting, pay_in_thread])
def test_async_view_enlists(make_async: Callable[..., Site], shop: Shop, view: Any) -> None:
    site = make_async(view)
    assert site.post().status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    assert site.post().content == b"paid"
    assert shop.payments() == 1


@pytest.mark.parametrize("view", [pay_awaiting, pay_in_thread])
def test_async_view_that_raises_rolls_back(make_async: Callable[..., Site], shop: Shop, view: Any) -> None:
    async def failing(site: Site, request: Any) -> HttpResponse:
        await view(site, request)
        raise RuntimeError("the view broke")

    assert make_async(failing).post().status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


def test_hooks_of_an_async_view_run_once(make_async: Callable[..., Site], shop: Shop) -> None:
    ran: list[int] = []

    async def view(site: Site, request: Any) -> HttpResponse:
        response = await pay_awaiting(site, request)
        await sync_to_async(transaction.on_commit)(lambda: ran.append(shop.payments()), using=site.alias)
        return response

    site = make_async(view)
    assert [site.post().status_code for _ in range(2)] == [201, 201]
    assert ran == [1]


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
    site.post()
    site.close()
    assert "op.enlist(session)" in said[0]
