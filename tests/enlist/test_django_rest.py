"""Views of Django REST framework that authenticate in the database that keeps the keys, too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import django
import pytest
from django.db import transaction

from oncekey import current
from oncekey.core.states import State
from tests.enlist.django_site import Site, make_site
from tests.enlist.shop import Shop

from rest_framework.authentication import BaseAuthentication  # isort: skip - Django is configured first
from rest_framework.response import Response  # isort: skip
from rest_framework.views import APIView  # isort: skip

pytestmark = [pytest.mark.frameworks, pytest.mark.parametrize("shop", ["sqlite", "postgresql"], indirect=True)]

Handler = Callable[[Site, Any], Any]
READS = "SELECT count(*) FROM payments"
WRITES = "INSERT INTO payments (key, cents) VALUES ('token', 1)"


@pytest.fixture(params=["wsgi", "asgi"])
def make(shop: Shop, request: pytest.FixtureRequest, atomic_requests: bool) -> Iterator[Callable[..., Site]]:
    """Makes an API: ``make(handler, asks)``. Its authentication sends the statement ``asks``."""
    made: list[Site] = []

    def make(handler: Handler, asks: str = READS, *, block: bool = False, **options: Any) -> Site:
        class ByRow(BaseAuthentication):
            def authenticate(self, request: Any) -> Any:
                made[0].ask(asks)
                return object(), None

        class Pay(APIView):
            authentication_classes = (ByRow,)

            def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> Any:
                with transaction.atomic(using=made[0].alias) if block else nullcontext():
                    return super().dispatch(request, *args, **kwargs)

            def post(self, request: Any) -> Any:
                return handler(made[0], request)

        asgi = request.param == "asgi"
        options |= {"atomic_requests": atomic_requests, "wrap": lambda _: Pay.as_view()}
        made.append(make_site(shop, lambda site, request: None, asgi=asgi, **options))
        return made[0]

    yield make
    for site in made:
        site.close()


def pay(site: Site, request: Any) -> Response:
    site.pay()
    return Response({"paid": current().key}, status=201)


def pay_enlisted(site: Site, request: Any) -> Response:
    current().enlist()
    return pay(site, request)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize(("handler", "effects"), [(pay, "external"), (pay_enlisted, "transactional")])
def test_view_that_authenticates_in_the_database_runs_once(
    make: Callable[..., Site], shop: Shop, handler: Handler, effects: str, block: bool
) -> None:
    """On SQLite, the block that has read is begun again after the key is reserved. A replay ends its block, too."""
    site = make(handler, effects=effects, block=block)
    first, second, other = site.post(), site.post(), site.post("k-2")
    assert [first.status_code, second.status_code, other.status_code] == [201, 201, 201]
    assert second.headers["idempotency-replayed"] == "true"
    assert (shop.payments(), shop.payments("k-2"), shop.state()) == (1, 1, State.COMPLETED)


@pytest.mark.skipif(django.VERSION < (5, 1), reason="transaction_mode came with Django 5.1")
def test_view_runs_once_with_transaction_mode_immediate(make: Callable[..., Site], shop: Shop) -> None:
    if shop.kind != "sqlite":
        pytest.skip("an option of SQLite")
    modes: list[bool] = []

    def handler(site: Site, request: Any) -> Response:
        modes.append(site.connection.connection.in_transaction)
        return pay(site, request)

    site = make(handler, effects="external", transaction_mode="IMMEDIATE")
    assert [site.post().status_code for _ in range(2)] == [201, 201]
    assert (shop.payments(), modes) == (1, [site.atomic_requests])


def test_exception_undoes_what_the_view_wrote_after_its_block_began_again(
    make: Callable[..., Site], shop: Shop
) -> None:
    def handler(site: Site, request: Any) -> Response:
        site.pay()
        raise RuntimeError("the view broke")

    site = make(handler, effects="repeatable", block=True)
    assert [site.post().status_code for _ in range(2)] == [500, 500]
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


def test_authentication_that_writes_in_the_block_is_refused_on_sqlite(
    make: Callable[..., Site], shop: Shop, atomic_requests: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds the file, so the key cannot be reserved. Outside of a block it is committed, and holds nothing."""
    site = make(pay_enlisted, WRITES)
    with caplog.at_level(logging.ERROR, "oncekey"):
        status = site.post().status_code
    if shop.kind == "sqlite" and atomic_requests:
        assert (status, shop.payments(), shop.payments("token")) == (500, 0, 0)
        assert "Set ATOMIC_REQUESTS to False and use transaction.atomic() in the views" in caplog.text
    else:
        assert (status, shop.payments(), shop.payments("token")) == (201, 1, 1)


def test_committed_write_before_enlist_makes_the_key_unknown(make: Callable[..., Site], shop: Shop) -> None:
    if shop.kind != "sqlite":
        pytest.skip("only SQLite tells what was written before")

    def handler(site: Site, request: Any) -> Response:
        site.pay()
        current().enlist()
        raise RuntimeError("the view broke")

    site = make(handler)
    assert [site.post().status_code for _ in range(2)] == ([500, 500] if site.atomic_requests else [409, 409])
    assert shop.payments() == (0 if site.atomic_requests else 1)
