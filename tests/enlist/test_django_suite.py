"""What every driver must do with an enlisted transaction, for Django's views: leases, jobs, constraints, isolation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpResponse

from oncekey import current
from oncekey.core.states import State
from tests.enlist.django_site import Site, make_site
from tests.enlist.django_views import pay_in_block
from tests.enlist.shop import Shop


def test_deferred_constraint_undoes_all_and_the_log_has_its_error(
    make: Callable[..., Site], shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The database looks at it at COMMIT, after the view. Django rolls back then, which no guard may refuse."""
    shop.ask("CREATE TABLE IF NOT EXISTS customers (name text PRIMARY KEY)")
    shop.ask("DELETE FROM customers")
    shop.ask("CREATE TABLE IF NOT EXISTS orders (name text REFERENCES customers (name) DEFERRABLE INITIALLY DEFERRED)")

    def view(site: Site, request: Any) -> HttpResponse:
        answer = pay_in_block(site, request)
        site.ask("INSERT INTO orders (name) VALUES ('ann')")
        return answer

    site = make(view)
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert site.post().status_code == 503
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    (told,) = [record.getMessage() for record in caplog.records if "commit of an enlisted" in record.getMessage()]
    assert "failed with IntegrityError" in told
    assert "was refused" not in caplog.text
    shop.ask("INSERT INTO customers (name) VALUES ('ann')")
    assert site.post().status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


@pytest.mark.parametrize("asgi", [False, pytest.param(True, marks=pytest.mark.frameworks)])
@pytest.mark.parametrize("effects", ["external", "transactional"])
def test_async_view_that_django_refuses_leaves_its_key_unused(
    sqlite_shop: Shop, asgi: bool, effects: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under ATOMIC_REQUESTS Django raises before it calls an async view, so nothing happened."""

    async def view(site: Site, request: Any) -> HttpResponse:
        raise AssertionError("the view ran")

    site = make_site(sqlite_shop, view, asgi=asgi, asynchronous=True, atomic_requests=True, effects=effects)
    try:
        assert [site.post(key).status_code for key in ("k-1", "k-1", "k-2")] == [500] * 3
        assert sqlite_shop.state() is None
    finally:
        site.close()
    (told,) = [record for record in caplog.records if record.name == "oncekey"]
    assert told.getMessage().startswith("POST /payments: Django did not call the view, because it is async")
    assert "@transaction.non_atomic_requests" in told.getMessage()
    assert "You cannot use ATOMIC_REQUESTS with async views" in (told.exc_text or "")


def test_refused_enlist_is_not_told_to_enlist(
    make: Callable[..., Site], shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        with transaction.atomic(using=site.alias):
            transaction.set_rollback(True, using=site.alias)
            current().enlist()
        return HttpResponse(status=201)

    assert make(view).post().status_code == 500
    assert "in a failed transaction: enlist at the beginning" in caplog.text
    assert "without having enlisted" not in caplog.text
    assert shop.state() is State.FAILED_RETRYABLE
