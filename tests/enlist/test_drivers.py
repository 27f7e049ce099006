"""Every driver that can be enlisted: one commit, roll-back on whatever is raised, and the handler does not end it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy, Refused, current
from oncekey.core.states import State
from tests.enlist.handlers import INSERT, every_driver, every_sync_driver, handler
from tests.enlist.shop import Asyncpg, Payer, paid


@every_driver
async def test_write_response_and_key_share_one_commit(payer: Payer) -> None:
    """Business write, response and key are there together, and a retry replays."""
    api = payer.shop.api(handler(payer))
    first = await api.post()
    assert first.status_code == 201, first.text
    assert payer.shop.payments() == 1
    assert payer.shop.state() is State.COMPLETED
    again = await api.post()
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["idempotency-expires"] == first.headers["idempotency-expires"]
    assert payer.shop.payments() == 1
    assert len(payer.opened) == 1


@every_sync_driver
async def test_a_sync_handler_in_a_thread(payer: Payer) -> None:
    def pay(request: Request) -> Response:
        op = current()
        thing = payer.open_now()
        op.blocking.enlist(thing)
        payer.pay(thing, op.key)
        return paid(op.key)

    api = payer.shop.api(pay)
    answers = await asyncio.gather(*(api.post(f"k-{number}") for number in range(5)))
    assert [answer.status_code for answer in answers] == [201] * 5
    assert [payer.shop.payments(f"k-{number}") for number in range(5)] == [1] * 5
    assert payer.shop.state("k-4") is State.COMPLETED


@every_sync_driver
async def test_the_loop_is_not_blocked_by_a_threads_connection(payer: Payer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of the thread pool is ended in a thread too."""
    threads: list[int] = []

    def pay(request: Request) -> Response:
        thing = payer.open_now()
        current().blocking.enlist(thing)
        link = current().enlisted.link  # type: ignore[union-attr]
        end = link.end

        def end_and_tell(*args: Any) -> Any:
            threads.append(threading.get_ident())
            return end(*args)

        vars(link)["end"] = end_and_tell
        return paid("k-1")

    api = payer.shop.api(pay)
    assert (await api.post()).status_code == 201
    assert threads
    assert threading.get_ident() not in threads


@every_driver
async def test_many_enlisted_requests_at_once_complete(payer: Payer) -> None:
    """In one event loop: a request that waits for another's lock does not block the loop."""
    api = payer.shop.api(handler(payer))
    answers = await asyncio.gather(*(api.post(f"k-{number}") for number in range(8)))
    assert [answer.status_code for answer in answers] == [201] * 8
    assert [payer.shop.payments(f"k-{number}") for number in range(8)] == [1] * 8


@every_driver
async def test_exception_rolls_the_transaction_back(payer: Payer) -> None:
    def fail(thing: Any) -> Response:
        raise RuntimeError("no")

    api = payer.shop.api(handler(payer, fail))
    assert (await api.post()).status_code == 500
    assert payer.shop.payments() == 0
    assert payer.shop.state() is State.FAILED_RETRYABLE


@every_driver
async def test_a_raised_4xx_rolls_back_and_is_stored(payer: Payer) -> None:
    def refuse(thing: Any) -> Response:
        raise HTTPException(402, "no money")

    api = payer.shop.api(handler(payer, refuse))
    assert (await api.post()).status_code == 402
    assert payer.shop.payments() == 0
    assert payer.shop.state() is State.FAILED
    assert (await api.post()).status_code == 402
    assert len(payer.opened) == 1


@every_driver
async def test_refused_too_late_rolls_back_and_is_stored(payer: Payer) -> None:
    """``Refused`` after the operation began is a 4xx like any other that is raised."""

    def refuse(thing: Any) -> Response:
        raise Refused("not this one")

    api = payer.shop.api(handler(payer, refuse))
    assert (await api.post()).status_code == 422
    assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED, 0)


@every_driver
async def test_a_returned_4xx_commits(payer: Payer) -> None:
    """The app wrote something, and says that the request was no good: both stand."""
    api = payer.shop.api(handler(payer, lambda thing: JSONResponse({"declined": True}, 402)))
    assert (await api.post()).status_code == 402
    assert payer.shop.payments() == 1
    assert payer.shop.state() is State.FAILED


@every_driver
async def test_a_returned_5xx_rolls_back(payer: Payer) -> None:
    policy = Policy(effects="transactional", on_server_error="replay")
    api = payer.shop.api(handler(payer, lambda thing: JSONResponse({}, 502)), policy)
    assert (await api.post()).status_code == 502
    assert payer.shop.payments() == 0
    assert payer.shop.state() is State.FAILED


@every_driver
async def test_a_commit_by_the_handler_is_refused_or_noticed(payer: Payer, caplog: pytest.LogCaptureFixture) -> None:
    """Business row and key agree: rolled back and retryable, or there and unknown. Never there and retryable."""

    async def commit(thing: Any) -> Response:
        await payer.commit(thing)
        return paid("k-1")

    api = payer.shop.api(handler(payer, commit))
    answer = await api.post()
    if isinstance(payer, Asyncpg):  # it sends COMMIT as any other statement
        assert (answer.status_code, payer.shop.state(), payer.shop.payments()) == (409, State.UNKNOWN, 1)
        assert "oncekey ends it" in caplog.text
    else:
        assert (answer.status_code, payer.shop.state(), payer.shop.payments()) == (500, State.FAILED_RETRYABLE, 0)


@every_driver
async def test_commit_sent_as_sql_is_refused_or_noticed(payer: Payer) -> None:
    """Sent as a statement: refused where the driver tells us of statements, noticed everywhere."""

    async def commit(thing: Any) -> Response:
        is_sqlalchemy = hasattr(payer, "engine")
        done = thing.execute(sa.text("COMMIT") if is_sqlalchemy else "COMMIT")
        if isinstance(done, Awaitable):
            await done
        return paid("k-1")

    api = payer.shop.api(handler(payer, commit))
    assert (await api.post()).status_code in (409, 500)
    if isinstance(payer, Asyncpg):
        assert (payer.shop.state(), payer.shop.payments()) == (State.UNKNOWN, 1)
    else:
        assert (payer.shop.state(), payer.shop.payments()) == (State.FAILED_RETRYABLE, 0)


@every_driver
async def test_savepoints_of_the_handler_are_allowed(payer: Payer) -> None:
    async def nested(thing: Any) -> Response:
        is_sqlalchemy = hasattr(payer, "engine")
        for sql in ("SAVEPOINT a", INSERT, "ROLLBACK TO SAVEPOINT a", "SAVEPOINT b", INSERT, "RELEASE SAVEPOINT b"):
            done = thing.execute(sa.text(sql) if is_sqlalchemy else sql)
            if isinstance(done, Awaitable):
                await done
        return paid("k-1")

    api = payer.shop.api(handler(payer, nested))
    assert (await api.post()).status_code == 201
    assert (payer.shop.state(), payer.shop.payments()) == (State.COMPLETED, 2)


@pytest.mark.parametrize("verb", ["commit", "rollback"])
@every_driver
async def test_a_refusal_that_is_swallowed(payer: Payer, verb: str) -> None:
    """The handler takes it for nothing, goes on writing, and returns 201: nothing of it is committed."""

    async def end(thing: Any) -> Response:
        with suppress(Exception):
            done = getattr(thing, verb)() if hasattr(thing, verb) else thing.execute(verb)
            if isinstance(done, Awaitable):
                await done
        with suppress(Exception):
            again = payer.pay(thing, "k-1")
            if payer.is_async:
                await again
        return paid("k-1")

    api = payer.shop.api(handler(payer, end))
    status = (await api.post()).status_code
    if isinstance(payer, Asyncpg):
        # Without a transaction it commits each statement by itself, and nothing was refused.
        assert (status, payer.shop.state()) == (409, State.UNKNOWN)
    else:
        assert (status, payer.shop.state(), payer.shop.payments()) == (503, State.FAILED_RETRYABLE, 0)


@every_driver
async def test_connection_closed_in_the_handler_completes_nothing(payer: Payer) -> None:
    """The session is closed, or its connection goes back to the pool: nothing completes in another transaction."""

    async def close(thing: Any) -> Response:
        await payer.close()
        payer.opened.clear()
        return paid("k-1")

    api = payer.shop.api(handler(payer, close))
    answer = await api.post()
    assert answer.status_code == 503, answer.text
    assert payer.shop.payments() == 0
    assert payer.shop.state() is State.FAILED_RETRYABLE


@every_driver
async def test_rolled_back_in_the_handler(payer: Payer) -> None:
    async def undo(thing: Any) -> Response:
        done = thing.rollback() if hasattr(thing, "rollback") else thing.execute("ROLLBACK")
        if asyncio.iscoroutine(done):
            await done
        return paid("k-1")

    api = payer.shop.api(handler(payer, undo))
    answer = await api.post()
    assert payer.shop.payments() == 0
    if isinstance(payer, Asyncpg):  # what the handler wrote after it, we would not know
        assert (answer.status_code, payer.shop.state()) == (409, State.UNKNOWN)
    else:
        assert answer.status_code in (500, 503)
        assert payer.shop.state() is State.FAILED_RETRYABLE


@every_driver
async def test_second_enlist_is_refused(payer: Payer) -> None:
    seen: list[str] = []

    async def twice(thing: Any) -> Response:
        with pytest.raises(Exception, match="one request, one transaction") as caught:
            await current().enlist(thing)
        seen.append(str(caught.value))
        return paid("k-1")

    api = payer.shop.api(handler(payer, twice))
    assert (await api.post()).status_code == 201
    assert seen
    assert payer.shop.payments() == 1
