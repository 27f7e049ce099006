"""A deadlock of MySQL in a handler: the server has rolled back the whole transaction, and the retry runs.

The driver only raises an error (1213). Statements after it are in another transaction.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.responses import Response

from oncekey.core.states import State
from oncekey.errors import EnlistError
from tests.enlist.handlers import INSERT, handler
from tests.enlist.shop import Payer, Shop, paid
from tests.enlist.test_django_mysql import rival
from tests.enlist.test_mysql import every_driver, payer, send

__all__ = ["payer"]

_WAITING = "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"


async def deadlock(payer: Payer, thing: Any, other: Any) -> None:
    """The server rolls back the transaction of ``thing``, because ``other`` has changed more rows."""
    await send(payer, thing, "UPDATE stock SET n = 2 WHERE name = 'a'")
    blocked = threading.Thread(target=other.cursor().execute, args=["UPDATE stock SET n = 1 WHERE name = 'a'"])
    blocked.start()
    while not payer.shop.ask(_WAITING)[0][0]:  # the server refreshes this table only if it was not read for 0.1 s
        assert blocked.is_alive()
        await asyncio.sleep(0.15)
    try:
        await send(payer, thing, "UPDATE stock SET n = 2 WHERE name = 'b'")
    finally:
        blocked.join(10)
        other.rollback()


def shop_with_deadlock(payer: Payer, other: Any, then: Callable[[Any], Awaitable[None]] | None) -> Any:
    """An app whose first attempt meets a deadlock, and then goes on with ``then``; None: it raises."""
    attempts = 0

    async def end(thing: Any) -> Response:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            if then is None:
                await deadlock(payer, thing, other)
            else:
                with pytest.raises(Exception, match="1213"):
                    await deadlock(payer, thing, other)
                await then(thing)
        return paid("k-1")

    return payer.shop.api(handler(payer, end))


def stored(shop: Shop) -> tuple[State | None, int]:
    return shop.state(), shop.payments()


@every_driver
async def test_handler_that_raises_after_a_deadlock_may_run_again(payer: Payer) -> None:
    with rival(payer.shop) as other:
        api = shop_with_deadlock(payer, other, None)
        assert (await api.post()).status_code == 500
        assert stored(payer.shop) == (State.FAILED_RETRYABLE, 0)
        assert (await api.post()).status_code == 201
    assert stored(payer.shop) == (State.COMPLETED, 1)


@every_driver
@pytest.mark.parametrize("writes", [True, False])
async def test_handler_that_swallows_a_deadlock_completes_nothing(payer: Payer, writes: bool) -> None:
    """What it writes after the deadlock is in another transaction, without the payment before it."""

    async def then(thing: Any) -> None:
        if writes:
            await send(payer, thing, INSERT)

    with rival(payer.shop) as other:
        api = shop_with_deadlock(payer, other, then)
        assert (await api.post()).status_code == 503
        assert stored(payer.shop) == (State.FAILED_RETRYABLE, 0)
        assert (await api.post()).status_code == 201
    assert stored(payer.shop) == (State.COMPLETED, 1)


@pytest.mark.parametrize("payer", ["sa-session"], indirect=True)
async def test_commit_beneath_sqlalchemy_after_a_deadlock_is_refused(payer: Payer) -> None:
    """It would commit what the handler wrote after the deadlock, without the key."""

    async def then(thing: Any) -> None:
        await send(payer, thing, INSERT)
        with pytest.raises(EnlistError, match="COMMIT on the driver's connection"):
            thing.connection().connection.commit()

    with rival(payer.shop) as other:
        api = shop_with_deadlock(payer, other, then)
        assert (await api.post()).status_code == 503
        assert stored(payer.shop) == (State.FAILED_RETRYABLE, 0)
        assert (await api.post()).status_code == 201
    assert stored(payer.shop) == (State.COMPLETED, 1)


async def leave_a_note(payer: Payer, then: Callable[[Any], Awaitable[None]] | None) -> None:
    """A handler writes to a table without transactions, and meets a deadlock."""
    shop = payer.shop
    if "MariaDB" not in shop.ask("SELECT version()")[0][0]:
        pytest.skip("MySQL refuses a write to MyISAM in a transaction (1785), unless enforce_gtid_consistency is off")
    shop.ask("CREATE TABLE notes (id int) ENGINE = MyISAM")

    async def end(thing: Any) -> Response:
        await send(payer, thing, "INSERT INTO notes VALUES (1)")
        try:
            await deadlock(payer, thing, other)
        except Exception:
            if then is None:
                raise
            await then(thing)
        return paid("k-1")

    with rival(shop) as other:
        other.cursor().execute("INSERT INTO notes VALUES (2)")  # otherwise the server would spare ours
        api = shop.api(handler(payer, end))
        assert (await api.post()).status_code in (409, 500)


@every_driver
async def test_deadlock_that_leaves_rows_in_a_table_without_transactions_makes_the_key_unknown(
    payer: Payer, caplog: pytest.LogCaptureFixture
) -> None:
    """The server says so in a warning of the statement that failed (1196)."""
    await leave_a_note(payer, None)
    assert stored(payer.shop) == (State.UNKNOWN, 0)
    assert "did not undo what the handler wrote to a table without transactions: the key is unknown" in caplog.text


@pytest.mark.parametrize("payer", ["sa-session", "sa-asyncmy"], indirect=True)
async def test_handler_that_goes_on_after_such_a_deadlock_leaves_the_key_unknown(payer: Payer) -> None:
    """Its next statement clears the warning, so oncekey reads it before."""
    await leave_a_note(payer, lambda thing: send(payer, thing, INSERT))
    assert stored(payer.shop) == (State.UNKNOWN, 0)
