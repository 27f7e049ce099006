"""``enlist()`` in Django: the view's own ``transaction.atomic()``, and ``ATOMIC_REQUESTS`` on and off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.http import Http404, HttpResponse, JsonResponse
from django.template.response import TemplateResponse

from oncekey import current
from oncekey.core.states import State
from tests.enlist.django_site import Site, every_shop
from tests.enlist.django_views import VIEWS, pay_in_block
from tests.enlist.shop import Shop

pytestmark = every_shop
create_savepoint: Any = getattr(transaction, "savepoint_create", None) or transaction.savepoint
"""Django 6.1 has given it another name."""


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


def test_durable_block_enlists(make: Callable[..., Site], shop: Shop) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias, durable=not site.atomic_requests):
            current().enlist()
            site.pay()
        return HttpResponse(status=201)

    site = make(view)
    assert [site.post().status_code for _ in range(2)] == [201, 201]
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


def test_savepoints_that_the_view_sets_itself_are_allowed(make: Callable[..., Site], shop: Shop) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias):
            current().enlist()
            first = create_savepoint(using=site.alias)
            site.pay()
            second = create_savepoint(using=site.alias)
            site.pay("undone")
            transaction.savepoint_rollback(second, using=site.alias)
            transaction.savepoint_commit(first, using=site.alias)
        return HttpResponse(status=201)

    assert make(view).post().status_code == 201
    assert (shop.payments(), shop.payments("undone"), shop.state()) == (1, 0, State.COMPLETED)


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
