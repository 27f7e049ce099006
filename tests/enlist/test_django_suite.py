"""What every driver must do with an enlisted transaction, for Django's views: leases, jobs, constraints, isolation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction
from django.http import HttpResponse

from oncekey import current
from oncekey.core.states import State
from oncekey.stores.api import Outbox
from oncekey.stores.registry import open_store
from tests.enlist.django_site import Site, make_site
from tests.enlist.django_views import pay_in_block
from tests.enlist.shop import Shop


def test_lease_lost_before_enlist_writes_nothing(make: Callable[..., Site], shop: Shop) -> None:
    """Between the reservation and ``enlist()`` the key went to another attempt."""
    went_on: list[int] = []

    def view(site: Site, request: Any) -> HttpResponse:
        shop.ask("UPDATE idempotency_keys SET owner = 'another', attempt = 2")
        answer = pay_in_block(site, request)
        went_on.append(1)
        return answer

    answer = make(view).post()
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:oncekey:problem:in-flight")
    assert (went_on, shop.payments()) == ([], 0)
    record = shop.record()
    assert record is not None
    assert (record.owner, record.state) == ("another", State.IN_PROGRESS)


@pytest.mark.parametrize("commits", [True, False])
def test_job_is_committed_with_the_rows_or_not_at_all(make: Callable[..., Site], shop: Shop, commits: bool) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        answer = pay_in_block(site, request)
        current().blocking.enqueue("send_receipt", {"order": 7})
        if not commits:
            raise KeyError("after the job")
        return answer

    assert make(view).post().status_code == (201 if commits else 500)
    store = open_store(shop.url)
    try:
        assert isinstance(store, Outbox)
        jobs = store.jobs_of("single-tenant", "k-1", 10)
    finally:
        store.close()
    assert [job.task for job in jobs] == (["send_receipt"] if commits else [])
    assert shop.payments() == commits


def test_response_that_is_too_large_is_a_tombstone_with_its_rows(make: Callable[..., Site], shop: Shop) -> None:
    def view(site: Site, request: Any) -> HttpResponse:
        pay_in_block(site, request)
        return HttpResponse(b"x" * 1_100_000, status=201)

    site = make(view)
    first = site.post()
    assert (first.status_code, len(first.content)) == (201, 1_100_000)
    again = site.post()
    assert (again.status_code, len(again.content) < 1_000) == (201, True)
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_view_enlists_at_every_level_of_isolation(postgres_shop: Shop, level: str, atomic_requests: bool) -> None:
    options = {"isolation_level": psycopg.IsolationLevel[level], "atomic_requests": atomic_requests}
    site = make_site(postgres_shop, pay_in_block, asgi=False, **options)
    try:
        assert [site.post().status_code for _ in range(2)] == [201, 201]
    finally:
        site.close()
    assert (postgres_shop.payments(), postgres_shop.state()) == (1, State.COMPLETED)


def test_many_enlisted_at_once_pay_once_each(make: Callable[..., Site], shop: Shop) -> None:
    site = make(pay_in_block)
    keys = [f"k-{number}" for number in range(6)]

    def post(key: str) -> int:
        try:
            return site.post(key).status_code
        finally:
            connections[site.alias].close()

    with ThreadPoolExecutor(6) as pool:
        assert {*pool.map(post, keys * 2)} <= {201, 409}  # 409: the first one with this key still runs
    assert [post(key) for key in keys] == [201] * 6
    assert [shop.payments(key) for key in keys] == [1] * 6


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_transaction_that_holds_the_file_too_long_is_undone(make: Callable[..., Site], shop: Shop) -> None:
    """SQLite has one writer, so oncekey ends a transaction before it has held the file for a lease."""

    def view(site: Site, request: Any) -> HttpResponse:
        operation = current()
        answer = pay_in_block(site, request)
        enlisted = operation.enlisted
        assert enlisted is not None
        until = time.monotonic() + 20.0
        while operation.attempt == 1 and not enlisted.held_too_long and time.monotonic() < until:
            time.sleep(0.02)
        return answer

    site = make(view, lease=timedelta(seconds=1.2))
    assert site.post().status_code == 503
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    assert site.post().status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


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
