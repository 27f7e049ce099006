"""Tickets: how an outcome reaches a coroutine, a thread or a function, and how it is noticed that they have left."""

from __future__ import annotations

import asyncio
import threading

import pytest

from oncekey.engine.batching.ticket import AsyncTicket, QuietTicket, SyncTicket, Ticket
from oncekey.errors import StoreError, StoreUnavailable
from tests.engine.doubles import PATIENCE, waiting

WORK = ("tenant-1", "key-1")


def test_a_thread_gets_its_result() -> None:
    """What is delivered from another thread is what ``wait`` returns, and the delivery says that it was taken."""
    ticket = SyncTicket(WORK)
    taken: list[bool] = []

    def deliver() -> None:
        ticket.result = "answer"
        taken.append(ticket.deliver())

    thread = threading.Thread(target=deliver)
    thread.start()
    assert ticket.wait(PATIENCE) == "answer"
    thread.join(PATIENCE)
    assert taken == [True]
    assert not ticket.left()


def test_a_thread_gets_its_error() -> None:
    """An error is raised where the caller waits."""
    ticket = SyncTicket(WORK)
    ticket.error = StoreError("refused")
    assert ticket.deliver()
    with pytest.raises(StoreError, match="refused"):
        ticket.wait(0)


def test_a_thread_that_gave_up_takes_nothing_more() -> None:
    """After the timeout the caller has left: a late delivery says so, and a second wait does not get it."""
    ticket = SyncTicket(WORK)
    assert not ticket.left()
    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        ticket.wait(0.001)
    assert ticket.left()
    ticket.result = "late"
    assert ticket.deliver() is False


def test_thread_takes_a_result_delivered_before_it_left() -> None:
    """Delivered before the caller's lock says that it left: taken, even where the time is over."""
    ticket = SyncTicket(WORK)
    ticket.result = "in time"
    assert ticket.deliver() is True
    assert ticket.wait(0) == "in time"


def test_giving_up_and_delivering_never_both_happen() -> None:
    """Many races between a timeout and a delivery: the caller has the answer exactly when it counts as taken."""
    for _ in range(300):
        ticket = SyncTicket(WORK)
        ticket.result = "answer"
        begin = threading.Barrier(2)
        taken: list[bool] = []

        def deliver(ticket: SyncTicket = ticket, begin: threading.Barrier = begin, taken: list[bool] = taken) -> None:
            begin.wait(PATIENCE)
            taken.append(ticket.deliver())

        thread = threading.Thread(target=deliver)
        thread.start()
        begin.wait(PATIENCE)
        try:
            got = ticket.wait(0) == "answer"
        except StoreUnavailable:
            got = False
        thread.join(PATIENCE)
        assert taken == [got]


def test_a_coroutine_gets_its_result_or_its_error() -> None:
    """The outcome that the loop's thread delivers is what ``wait`` returns or raises, and its timer is stopped."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        good, bad = AsyncTicket(WORK, loop, loop.time() + PATIENCE), AsyncTicket(WORK, loop, loop.time() + PATIENCE)
        good.arm()
        bad.arm()
        good.result = "answer"
        bad.error = StoreError("refused")
        assert not good.left()
        assert good.deliver()
        assert bad.deliver()
        assert await good.future == "answer"
        with pytest.raises(StoreError, match="refused"):
            await bad.future
        await asyncio.sleep(0)
        assert good._timer
        assert good._timer.cancelled()
        assert bad._timer
        assert bad._timer.cancelled()

    asyncio.run(main())


def test_a_coroutine_that_gave_up_or_was_cancelled_takes_nothing_more() -> None:
    """After the timeout, and after a cancellation, a late delivery says that it was not taken."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        late = AsyncTicket(WORK, loop, loop.time() + 0.001)
        late.arm()
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            await late.future
        gone = AsyncTicket(WORK, loop, loop.time() + PATIENCE)
        task = asyncio.create_task(waiting(gone))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for ticket in (late, gone):
            assert ticket.left()
            ticket.result = "late"
            assert ticket.deliver() is False

    asyncio.run(main())


def test_a_timer_that_fires_after_the_delivery_changes_nothing() -> None:
    """The answer came first, and the caller has not looked yet: it still gets the answer."""

    async def main() -> None:
        ticket = AsyncTicket(WORK, (loop := asyncio.get_running_loop()), loop.time() + 0.0)
        ticket.arm()
        ticket.result = "answer"
        assert ticket.deliver()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await ticket.future == "answer"

    asyncio.run(main())


def test_quiet_ticket_never_leaves_and_calls_its_function() -> None:
    """It has never left, takes every outcome, and tells its function if it has one."""
    told: list[Ticket] = []
    with_function, without = QuietTicket(WORK, told.append), QuietTicket(WORK)
    assert not with_function.left()
    assert with_function.deliver()
    assert without.deliver()
    assert told == [with_function]
