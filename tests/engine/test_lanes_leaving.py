"""Callers that leave: what was reserved for them is given back, and what they finished is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.engine.batching import thread_lane as lane_module
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.ticket import AsyncTicket, SyncTicket, Work
from oncekey.errors import StoreError, StoreUnavailable
from tests.engine.doubles import PATIENCE, RESPONSE, FakeStore, eventually, reservation, waiting

Open = Callable[..., Router]


@pytest.fixture
def open_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes Lanes that are closed when the test is over, and that look every 10 ms whether they can give back."""
    monkeypatch.setattr(lane_module, "_RETRY_SECONDS", 0.01)
    opened: list[Router] = []

    def make(store: FakeStore, **options: object) -> Router:
        opened.append(Router(store, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for router in opened:
        router.close(0.2)


def submit(router: Router, work: Work) -> SyncTicket:
    ticket = SyncTicket(work)
    router.submit(ticket)
    return ticket


def leave(ticket: SyncTicket) -> None:
    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        ticket.wait(0.001)


def retryable(store: FakeStore, key: str = "key-1") -> Record:
    moved = store.inner.swap([swap(store.put(reservation(key)), Event.RELEASE, Actor.OWNER)])[0]
    assert moved is not None
    return moved


# ---------------------------------------------------------------- a reservation that arrives late


def test_a_thread_that_gave_up_leaves_no_reservation(open_lanes: Open) -> None:
    """The thread's time is over while the insert is on its way: the row is deleted when it arrives."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    ticket = submit(router, reservation())
    gate.wait()
    leave(ticket)
    assert store.row() is None
    gate.open()
    eventually(lambda: store.asked("swap"))
    assert router.close(PATIENCE)
    assert store.row() is None


def test_a_coroutine_that_gave_up_leaves_no_reservation(open_lanes: Open) -> None:
    """The same for a coroutine whose timeout passed: it gets StoreUnavailable, and the late row is deleted."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")

    async def main() -> None:
        ticket = AsyncTicket(reservation(), (loop := asyncio.get_running_loop()), loop.time() + PATIENCE)
        router.submit(ticket)
        await asyncio.to_thread(gate.wait)
        ticket.give_up()  # as its timer does, at the moment that matters
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            await ticket.future
        gate.open()
        await asyncio.to_thread(eventually, lambda: store.asked("swap"))

    asyncio.run(main())
    assert router.close(PATIENCE)
    assert store.row() is None


def test_a_cancelled_coroutine_leaves_no_reservation(open_lanes: Open) -> None:
    """A task that is cancelled while the store works ends at once, and its row is deleted when it arrives."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")

    async def main() -> None:
        ticket = AsyncTicket(reservation(), (loop := asyncio.get_running_loop()), loop.time() + PATIENCE)
        router.submit(ticket)
        task = asyncio.create_task(waiting(ticket))
        await asyncio.to_thread(gate.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await asyncio.to_thread(eventually, lambda: store.asked("swap"))

    asyncio.run(main())
    assert router.close(PATIENCE)
    assert store.row() is None


def test_a_loop_that_is_closed_leaves_no_reservation(open_lanes: Open) -> None:
    """Everybody in a closed loop has left: what arrives for them is given back."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    loop = asyncio.new_event_loop()

    async def ask() -> None:
        for key in ("a", "b"):
            router.submit(AsyncTicket(reservation(key), loop, loop.time() + PATIENCE))
        await asyncio.to_thread(gate.wait)

    loop.run_until_complete(ask())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gate.open()
    eventually(lambda: store.asked("swap"))
    assert router.close(PATIENCE)
    assert store.row("a") is None
    assert store.row("b") is None


def test_a_caller_that_left_while_the_lanes_close_leaves_no_reservation(open_lanes: Open) -> None:
    """A request is cancelled at shutdown and the loop's own thread closes the lanes: nothing stays reserved."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")

    async def main() -> None:
        ticket = AsyncTicket(reservation(), (loop := asyncio.get_running_loop()), loop.time() + PATIENCE)
        router.submit(ticket)
        task = asyncio.create_task(waiting(ticket))
        await asyncio.to_thread(gate.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        assert router.close(PATIENCE)

    asyncio.run(main())
    assert store.row() is None


def test_a_row_that_was_only_found_is_not_touched(open_lanes: Open) -> None:
    """A late answer that shows another owner's row took nothing, so nothing is given back."""
    store = FakeStore()
    theirs = store.put(reservation())
    router, gate = open_lanes(store), store.hold("reserve")
    ticket = submit(router, reservation())
    gate.wait()
    leave(ticket)
    gate.open()
    assert router.close(PATIENCE)
    assert store.asked("swap") == []
    row = store.row()
    assert row is not None
    assert row == replace(theirs, now=row.now)


def test_undo_of_a_reservation_keeps_a_row_of_another_owner(open_lanes: Open) -> None:
    """The undo compares the owner: a key that has a new owner by then stays as it is (I3)."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    ticket = submit(router, reservation(owner="late"))
    gate.wait()
    leave(ticket)
    undone = store.hold("swap")
    gate.open()
    undone.wait()
    late = store.row()
    assert late is not None
    change = swap(late, Event.DISCARD, Actor.OWNER)
    assert store.inner.swap([change]) != [None]
    rival = store.put(reservation(owner="rival"))
    undone.open()
    assert router.close(PATIENCE)
    row = store.row()
    assert row is not None
    assert row.owner == rival.owner


# ---------------------------------------------------------------- claims and completions


def test_a_claim_that_arrives_late_is_released(open_lanes: Open) -> None:
    """A retry's claim whose caller left goes back to failed_retryable: the key has a history, and no owner."""
    store = FakeStore()
    row = retryable(store)
    router, gate = open_lanes(store), store.hold("swap")
    ticket = submit(router, swap(row, Event.RETRY, Actor.REQUEST, reservation=reservation()))
    gate.wait()
    leave(ticket)
    gate.open()
    eventually(lambda: len(store.asked("swap")) == 2)
    assert router.close(PATIENCE)
    after = store.row()
    assert after is not None
    assert (after.state, after.attempt) == (State.FAILED_RETRYABLE, 2)
    assert after.last_error == "the caller gave up before the handler began"


def test_a_claim_that_was_refused_late_is_nothing(open_lanes: Open) -> None:
    """A claim that the store refused took nothing, so nothing is given back."""
    store = FakeStore()
    row = retryable(store)
    router, gate = open_lanes(store), store.hold("swap")
    ticket = submit(router, swap(replace(row, owner="x"), Event.RETRY, Actor.REQUEST, reservation=reservation()))
    gate.wait()
    leave(ticket)
    gate.open()
    assert router.close(PATIENCE)
    assert len(store.asked("swap")) == 1


def test_a_completion_that_arrives_late_is_kept(open_lanes: Open) -> None:
    """What a handler has done is never undone because its caller stopped waiting."""
    store = FakeStore()
    row = store.put(reservation())
    router, gate = open_lanes(store), store.hold("swap")
    ticket = submit(router, swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    gate.wait()
    leave(ticket)
    gate.open()
    assert router.close(PATIENCE)
    after = store.row()
    assert after is not None
    assert after.response == RESPONSE
    assert len(store.asked("swap")) == 1


def test_a_read_that_arrives_late_is_nothing(open_lanes: Open) -> None:
    """Reading takes nothing."""
    store = FakeStore()
    store.put(reservation())
    router, gate = open_lanes(store), store.hold("read")
    ticket = submit(router, ("tenant-1", "key-1"))
    gate.wait()
    leave(ticket)
    gate.open()
    assert router.close(PATIENCE)
    assert store.asked("swap") == []


# ---------------------------------------------------------------- callers that left before their batch


def test_a_reservation_whose_caller_left_is_not_asked_for(open_lanes: Open) -> None:
    """Its caller has left: the store does not hear of it."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    first = submit(router, reservation("first"))
    gate.wait()
    gone, stays = submit(router, reservation("gone")), submit(router, reservation("stays"))
    leave(gone)
    gate.open()
    first.wait(PATIENCE)
    stays.wait(PATIENCE)
    assert store.keys("reserve") == [["first"], ["stays"]]


def test_a_move_whose_caller_left_is_made_all_the_same(open_lanes: Open) -> None:
    """The outcome of a handler matters also after its caller left: a completion is never skipped."""
    store = FakeStore()
    rows = [store.put(reservation(key)) for key in "ab"]
    router, gate = open_lanes(store), store.hold("swap")
    first = submit(router, swap(rows[0], Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    gate.wait()
    gone = submit(router, swap(rows[1], Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    leave(gone)
    gate.open()
    first.wait(PATIENCE)
    assert router.close(PATIENCE)
    assert store.keys("swap") == [["a"], ["b"]]
    after = store.row("b")
    assert after is not None
    assert after.state is State.COMPLETED


def test_a_queue_of_which_everybody_left_asks_nothing(open_lanes: Open) -> None:
    """An empty batch is no statement."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    first = submit(router, reservation("first"))
    gate.wait()
    leave(submit(router, reservation("gone")))
    gate.open()
    first.wait(PATIENCE)
    assert router.close(PATIENCE)
    assert store.keys("reserve") == [["first"]]


# ---------------------------------------------------------------- what is to be undone while the store is down


def down(store: FakeStore) -> None:
    """What is asked happens, no answer comes back, and nothing can be undone."""
    store.break_("reserve", lambda: StoreUnavailable("cut"), applied=True)
    store.break_("swap", lambda: StoreUnavailable("down"))


def test_owed_undo_is_made_when_the_store_is_back(open_lanes: Open) -> None:
    """The insert happened and both answers were lost: the idle lane tries until it can delete the row. The failed
    request is reported, and the tries are not."""
    store = FakeStore()
    errors: list[tuple[str, int]] = []
    router = open_lanes(store, on_error=lambda verb, _, requests: errors.append((verb, requests)))
    down(store)
    with pytest.raises(StoreUnavailable):
        submit(router, reservation()).wait(PATIENCE)
    assert store.row() is not None
    eventually(lambda: len(store.asked("swap")) >= 3)
    assert errors == [("reserve", 1)]
    store.heal()
    eventually(lambda: store.row() is None)


def test_undo_that_fails_first_is_reported_once_per_outage_and_fails_no_request(open_lanes: Open) -> None:
    store = FakeStore()
    errors: list[tuple[str, int]] = []
    router = open_lanes(store, on_error=lambda verb, _, requests: errors.append((verb, requests)))
    for outage in (1, 2):
        gate = store.hold("reserve")
        late = submit(router, reservation())
        gate.wait()
        with pytest.raises(StoreUnavailable):
            late.wait(0.001)
        store.break_("swap", lambda: StoreUnavailable("down"))
        gate.open()
        eventually(lambda: len(store.asked("swap")) >= 3)
        assert errors == [("undo", 0)] * outage
        store.heal()
        eventually(lambda: store.row() is None)
        store.batches.clear()


def test_owed_undo_is_made_once(open_lanes: Open) -> None:
    """Once the row is gone, the debt is forgotten: the lane asks no more."""
    store = FakeStore()
    router = open_lanes(store)
    down(store)
    with pytest.raises(StoreUnavailable):
        submit(router, reservation()).wait(PATIENCE)
    store.heal()
    eventually(lambda: store.row() is None)
    asked = len(store.asked("swap"))
    for _ in range(3):
        submit(router, ("tenant-1", "key-1")).wait(PATIENCE)
    assert len(store.asked("swap")) == asked


def test_owed_undo_survives_an_outage_in_the_middle(open_lanes: Open) -> None:
    """A bad row had them paid one by one, and the store went down after the first of them."""
    store = FakeStore()
    router = open_lanes(store)
    store.break_("reserve", lambda: StoreUnavailable("cut"), applied=True)
    store.break_("swap", lambda: StoreUnavailable("down"), about=lambda batch: len(batch) == 1)
    store.break_("swap", lambda: StoreError("one is bad"), about=lambda batch: len(batch) > 1)
    for key in ("a", "b"):
        with pytest.raises(StoreUnavailable):
            submit(router, reservation(key)).wait(PATIENCE)
    eventually(lambda: any(len(batch) > 1 for batch in store.asked("swap")))
    store.heal()
    eventually(lambda: store.row("a") is None)
    eventually(lambda: store.row("b") is None)


def test_two_debts_on_one_key_are_both_paid(open_lanes: Open) -> None:
    """A batch names a key once, so the second undo of a key waits for the next round, and comes."""
    store = FakeStore()
    router = open_lanes(store)
    down(store)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            submit(router, reservation()).wait(PATIENCE)
    assert store.row() is not None
    store.heal()
    eventually(lambda: store.row() is None)


def test_closing_pays_every_debt_that_can_be_paid(open_lanes: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end every reservation is undone, also if one round is not enough (two undos of one key)."""
    monkeypatch.setattr(lane_module, "_RETRY_SECONDS", PATIENCE)
    store = FakeStore()
    router = open_lanes(store)
    down(store)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            submit(router, reservation()).wait(PATIENCE)
    assert store.row() is not None
    store.heal()
    assert router.close(PATIENCE)
    assert store.row() is None


def test_closing_does_not_wait_for_a_store_that_is_down(open_lanes: Open) -> None:
    """What cannot be given back at the end is left to its lease: the thread ends."""
    store = FakeStore()
    router = open_lanes(store)
    down(store)
    with pytest.raises(StoreUnavailable):
        submit(router, reservation()).wait(PATIENCE)
    assert router.close(PATIENCE)
    assert store.row() is not None


def test_owed_undos_are_bounded(open_lanes: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is down for long, what is remembered does not grow for ever."""
    monkeypatch.setattr(lane_module, "MAX_BATCH", 1)
    store = FakeStore()
    router = open_lanes(store)
    down(store)
    for number in range(42):
        with pytest.raises(StoreUnavailable):
            submit(router, reservation(f"key-{number}")).wait(PATIENCE)
    store.heal()
    eventually(lambda: sum(store.row(f"key-{number}") is not None for number in range(42)) <= 2)
    for _ in range(3):
        submit(router, ("tenant-1", "x")).wait(PATIENCE)
    assert sum(store.row(f"key-{number}") is not None for number in range(42)) == 2


def test_a_completion_that_failed_owes_nothing(open_lanes: Open) -> None:
    """A completion or a read that could not be made has taken nothing."""
    store = FakeStore()
    row = store.put(reservation())
    router = open_lanes(store)
    store.break_("swap", lambda: StoreError("refused"), times=1)
    store.break_("read", lambda: StoreError("refused"), times=1)
    with pytest.raises(StoreError):
        submit(router, swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE)).wait(PATIENCE)
    with pytest.raises(StoreError):
        submit(router, ("tenant-1", "key-1")).wait(PATIENCE)
    assert router.close(PATIENCE)
    assert len(store.asked("swap")) == 1
