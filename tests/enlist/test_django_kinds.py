"""``enlist()`` in views of Django REST framework, and in async views."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction
from django.http import HttpResponse

from oncekey import current
from oncekey.core.states import State
from tests.enlist.django_site import Site, every_shop, make_site
from tests.enlist.django_views import VIEWS, pay_in_block
from tests.enlist.shop import Shop

from rest_framework.decorators import api_view  # isort: skip - Django is configured by django_site
from rest_framework.exceptions import APIException  # isort: skip


pytestmark = every_shop


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
