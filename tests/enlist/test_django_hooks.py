"""Django's ``on_commit`` hooks of a view that enlists."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.http import HttpResponse

from oncekey import current
from oncekey.core.states import State
from tests.enlist.django_site import Site, every_shop
from tests.enlist.shop import Shop

pytestmark = every_shop


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
