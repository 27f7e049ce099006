"""``current()`` inside a protected function: enlist, phases, effects, enqueue, defer, and a resume by upkeep."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiosqlite
import psycopg
import pytest

from oncekey import InProgress, NotExecuted, OnceKey, OutcomeUnknown, current
from oncekey.errors import EnlistError, StepError
from oncekey.outbox import Worker
from oncekey.upkeep import Upkeep
from tests.enlist.shop import Shop


@pytest.fixture
def shop(url: str) -> Shop:
    made = Shop(url)
    made.ask("DELETE FROM payments")
    return made


@contextmanager
def connected(shop: Shop) -> Iterator[Any]:
    """A connection of the caller: it is open when the function has returned."""
    opened: Any = sqlite3.connect(shop.path) if shop.kind == "sqlite" else psycopg.connect(shop.url)
    try:
        yield opened
    finally:
        opened.close()


def pay(connection: Any, order: str) -> None:
    connection.execute(f"INSERT INTO payments VALUES ('{order}', 5)")


def test_enlisted_writes_commit_with_the_key(once: OnceKey, shop: Shop) -> None:
    @once.function("charge", key="order", effects="transactional", ignore=["connection"])
    def charge(connection: Any, order: str) -> str:
        current().blocking.enlist(connection)
        pay(connection, order)
        return "paid"

    for _ in range(2):
        with connected(shop) as connection:
            assert charge(connection, "a") == "paid"
    assert shop.payments("a") == 1


async def test_async_enlisted_writes_commit_with_the_key(once: OnceKey, shop: Shop) -> None:
    @once.function("charge", key="order", effects="transactional", ignore=["connection"])
    async def charge(connection: Any, order: str) -> str:
        await current().enlist(connection)
        await connection.execute(f"INSERT INTO payments VALUES ('{order}', 5)")
        return "paid"

    for _ in range(2):
        opened: Any = (
            await aiosqlite.connect(shop.path)
            if shop.kind == "sqlite"
            else await psycopg.AsyncConnection.connect(shop.url)
        )
        try:
            assert await charge(opened, "a") == "paid"
        finally:
            await opened.close()
    assert shop.payments("a") == 1


def test_exception_rolls_the_enlisted_writes_back(once: OnceKey, shop: Shop) -> None:
    @once.function("charge", key="order", effects="transactional", ignore=["connection"])
    def charge(connection: Any, order: str) -> int:
        current().blocking.enlist(connection)
        pay(connection, order)
        if current().attempt == 1:
            raise TimeoutError
        return current().attempt

    with connected(shop) as connection, pytest.raises(TimeoutError):
        charge(connection, "a")
    assert shop.payments("a") == 0
    with connected(shop) as connection:
        assert charge(connection, "a") == 2
    assert shop.payments("a") == 1


def test_connection_that_the_function_closes_is_told_and_nothing_is_stored(once: OnceKey, shop: Shop) -> None:
    @once.function("charge", key="order", effects="transactional")
    def charge(order: str) -> str:
        with connected(shop) as connection:
            current().blocking.enlist(connection)
            pay(connection, order)
        return "paid"

    for _ in range(2):
        with pytest.raises(NotExecuted, match="let its caller open and close it"):
            charge("a")
    assert shop.payments("a") == 0


def test_transaction_that_the_function_leaves_to_its_caller_is_refused(once: OnceKey, shop: Shop) -> None:
    """A function is over when it returns, so no caller can commit for it."""

    @once.function("charge", key="order", effects="transactional", ignore=["connection"])
    def charge(connection: Any, order: str) -> None:
        current().blocking.enlist(connection, commit="caller")

    with connected(shop) as connection, pytest.raises(EnlistError, match="leave commit='caller' out"):
        charge(connection, "a")


def test_result_that_is_not_json_commits_the_enlisted_writes(once: OnceKey, shop: Shop) -> None:
    @once.function("charge", key="order", effects="transactional", ignore=["connection"])
    def charge(connection: Any, order: str) -> object:
        current().blocking.enlist(connection)
        pay(connection, order)
        return object()

    for _ in range(2):
        with connected(shop) as connection, pytest.raises(Exception, match=r"not kept"):
            charge(connection, "a")
    assert shop.payments("a") == 1


def test_steps_of_an_earlier_call_are_not_repeated(once: OnceKey, shop: Shop) -> None:
    called: list[str] = []

    def call() -> int:
        called.append("charge")
        return len(called)

    @once.function("ride", key="order", effects="phased", ignore=["connection"])
    def ride(connection: Any, order: str) -> list[Any]:
        op = current().blocking
        op.phase("booked", pay, connection, order, on=connection)
        charge = op.effect("charged", call, repeatable=True)
        if current().attempt == 1:
            raise TimeoutError
        return [current().attempt, charge]

    with connected(shop) as connection, pytest.raises(TimeoutError):
        ride(connection, "a")
    with connected(shop) as connection:
        assert ride(connection, "a") == [2, 1]
    assert called == ["charge"]
    assert shop.payments("a") == 1


async def test_effect_that_may_not_be_repeated_leaves_the_key_unknown(once: OnceKey) -> None:
    async def call() -> None:
        raise TimeoutError

    @once.function("ride", key="order", effects="phased")
    async def ride(order: str) -> None:
        await current().effect("charged", call, repeatable=False)

    with pytest.raises(TimeoutError):
        await ride("a")
    with pytest.raises(OutcomeUnknown):
        await ride("a")


async def test_effect_that_is_not_awaited_is_an_error(once: OnceKey) -> None:
    @once.function("ride", key="order", effects="phased")
    async def ride(order: str) -> str:
        current().effect("charged", list, repeatable=True)  # type: ignore[unused-coroutine]
        return "done"

    with pytest.raises(StepError, match="not awaited"):
        await ride("a")


def test_job_is_enqueued_with_the_functions_writes(once: OnceKey, shop: Shop) -> None:
    @once.function("charge", key="order", effects="transactional", ignore=["connection"])
    def charge(connection: Any, order: str) -> str:
        op = current().blocking
        op.enlist(connection)
        pay(connection, order)
        op.enqueue("receipt", {"order": order})
        return "paid"

    for _ in range(2):
        with connected(shop) as connection:
            charge(connection, "a")
    assert shop.ask("SELECT count(*) FROM idempotency_outbox") == [(1,)]


def test_deferred_call_gets_its_result_from_the_job(once: OnceKey, shop: Shop) -> None:
    worker = Worker(shop.url)

    @worker.task("settle")
    def settle(context: Any, payload: Any) -> Any:
        return 201, {"id": 7}

    @once.function("charge", key="order", effects="transactional", ignore=["connection"])
    def charge(connection: Any, order: str) -> Any:
        op = current().blocking
        op.enlist(connection)
        op.defer("settle", {"order": order})
        return "accepted"

    with connected(shop) as connection:
        assert charge(connection, "a") == "accepted"
    with connected(shop) as connection, pytest.raises(InProgress, match="a job in the outbox"):
        charge(connection, "a")
    worker.run(until="drained")
    with connected(shop) as connection:
        assert charge(connection, "a") == {"id": 7}


def test_upkeep_goes_on_with_a_half_done_call_from_its_kept_arguments(once: OnceKey, shop: Shop) -> None:
    def effects(op: Any, order: str) -> None:
        op.blocking.effect("charged", list, repeatable=True)
        if op.attempt == 1:
            raise TimeoutError

    @once.function("ride", key="order", effects="phased", keep_request=True)
    def ride(order: str, seats: int) -> Any:
        effects(current(), order)
        return "never"

    @once.resume("ride")
    def go_on(op: Any) -> Any:
        arguments = op.request.json()
        effects(op, arguments["order"])
        return 200, {"by": "upkeep", **arguments}

    with pytest.raises(TimeoutError):
        ride("a", 2)
    past = "0" if shop.kind == "sqlite" else "now() - interval '1 hour'"
    shop.ask(f"UPDATE idempotency_keys SET reconcile_at = {past}")
    Upkeep(once).run_once()
    assert ride("a", 2) == {"by": "upkeep", "order": "a", "seats": 2}
