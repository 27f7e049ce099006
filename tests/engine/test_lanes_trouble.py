"""Lanes in trouble: what one bad row, one lost answer, a store that is down or a full queue does to the others."""

from __future__ import annotations

import asyncio

import pytest

from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.engine.batching import thread_lane as lane_module
from oncekey.engine.batching.ticket import AsyncTicket
from oncekey.errors import SchemaError, StoreError, StoreOverloaded, StoreUnavailable
from tests.engine.doubles import PATIENCE, RESPONSE, FakeStore, reservation
from tests.engine.lanes import Open, ask, owner_found, submit

# ---------------------------------------------------------------- one bad row


def test_a_bad_row_fails_alone(open_lanes: Open) -> None:
    """A batch that the store refuses as a whole is asked again row by row, and only the bad row fails (hazard 25)."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    blocker = submit(router, reservation("first"))
    gate.wait()
    store.break_("reserve", lambda: StoreError("refused"), about=lambda batch: any(w.key == "bad" for w in batch))
    wanted = [reservation(key) for key in ("a", "bad", "b")]
    good, bad, fine = submit(router, *wanted)
    gate.open()
    assert owner_found(good.wait(PATIENCE)) == wanted[0].owner
    assert owner_found(fine.wait(PATIENCE)) == wanted[2].owner
    with pytest.raises(StoreError, match="refused"):
        bad.wait(PATIENCE)
    assert store.keys("reserve") == [["first"], ["a", "bad", "b"], ["a"], ["bad"], ["b"]]
    blocker[0].wait(PATIENCE)


def test_a_bad_row_is_rescued_from_swaps_and_reads_too(open_lanes: Open) -> None:
    """Row by row holds for every verb."""
    store = FakeStore()
    rows = [store.put(reservation(key)) for key in ("a", "bad", "b")]
    router, gate = open_lanes(store), store.hold("swap")
    blocker = submit(router, swap(rows[0], Event.RENEW, Actor.OWNER, lease_seconds=5))
    gate.wait()
    store.break_("swap", lambda: StoreError("no"), about=lambda batch: any(w.key == "bad" for w in batch))
    store.break_("read", lambda: StoreError("no"), about=lambda batch: ("tenant-1", "bad") in batch)
    moves = submit(router, *(swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE) for row in rows))
    reads = submit(router, *(("tenant-1", key) for key in ("a", "bad", "b")))
    gate.open()
    for tickets in (moves, reads):
        assert [tickets[at].wait(PATIENCE).key for at in (0, 2)] == ["a", "b"]
        with pytest.raises(StoreError):
            tickets[1].wait(PATIENCE)
    blocker[0].wait(PATIENCE)


def test_a_drivers_error_is_not_quoted(open_lanes: Open) -> None:
    """What a driver says may hold a key or a body: the caller learns the verb and the class, no more (hazard 28)."""
    store = FakeStore()
    errors: list[tuple[str, Exception]] = []
    router = open_lanes(store, on_error=lambda verb, error, _: errors.append((verb, error)))
    store.break_("reserve", lambda: KeyError("sk_live_123"))
    with pytest.raises(StoreError) as caught:
        ask(router, reservation("a"))
    assert str(caught.value) == "the store failed in 'reserve' with KeyError"
    assert not isinstance(caught.value, StoreUnavailable)
    assert errors == [("reserve", caught.value)]


def test_a_bad_row_does_not_keep_others_from_being_given_back(
    open_lanes: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that the store refuses in every statement must not keep other reservations from being undone."""
    monkeypatch.setattr(lane_module, "_RETRY_SECONDS", 0.01)
    store = FakeStore()
    bad = lambda batch: any(w.key == "bad" for w in batch)  # noqa: E731
    store.break_("reserve", lambda: StoreError("refused"), about=bad)
    store.break_("swap", lambda: StoreError("refused"), about=bad)
    router = open_lanes(store)
    with pytest.raises(StoreError):
        ask(router, reservation("bad"))
    gate = store.hold("reserve")
    (late,) = submit(router, reservation("late"))
    gate.wait()
    with pytest.raises(StoreUnavailable):
        late.wait(0.001)
    gate.open()
    ask(router, ("tenant-1", "late"))
    ask(router, ("tenant-1", "late"))
    assert router.close(PATIENCE)
    assert store.row("late") is None


def test_a_store_that_answers_too_little_fails_its_callers_and_no_others(open_lanes: Open) -> None:
    """Fewer answers than questions is an error of that batch; the lane lives on for the next (I7: a lying store)."""
    store = FakeStore()
    router = open_lanes(store)
    store.inner.reserve = lambda batch: []  # type: ignore[method-assign]
    (lied_to,) = submit(router, reservation("a"))
    with pytest.raises(StoreError, match="the store failed in"):
        lied_to.wait(3.0)
    del store.inner.reserve
    (after,) = submit(router, reservation("b"))
    assert after.wait(3.0).record is not None


# ---------------------------------------------------------------- lost answers and a store that is down


def test_a_lost_answer_is_asked_for_again_with_the_same_tokens(open_lanes: Open) -> None:
    """The insert happened and its answer was cut: asked again, the lane finds its own token, no conflict (hazard 8)."""
    store = FakeStore()
    store.break_("reserve", lambda: StoreUnavailable("cut"), times=1, applied=True)
    errors: list[str] = []
    router = open_lanes(store, on_error=lambda verb, error, _: errors.append(verb))
    wanted = reservation("a")
    assert owner_found(ask(router, wanted)) == wanted.owner
    assert store.asked("reserve") == [[wanted], [wanted]]
    assert errors == []
    assert store.asked("swap") == []


def test_ticket_with_a_result_keeps_it(open_lanes: Open) -> None:
    """A lane took over too late and asks twice: the second question fails, and a reservation in use is not undone."""
    store = FakeStore()
    router = open_lanes(store)
    wanted = reservation("a")
    (ticket,) = submit(router, wanted)
    assert owner_found(ticket.wait(PATIENCE)) == wanted.owner
    store.break_("reserve", lambda: StoreError("down"))
    router._lane_for(ticket).enqueue([ticket])
    assert router.close(PATIENCE)
    assert len(store.asked("reserve")) == 2
    assert store.row("a") is not None
    assert ticket.error is None


def test_a_store_that_stays_down_fails_everybody_once(open_lanes: Open) -> None:
    """Two tries for the batch as a whole, not one per row; every caller gets the first error."""
    store = FakeStore()
    gate = store.hold("reserve")
    errors: list[tuple[str, str, int]] = []
    router = open_lanes(store, on_error=lambda verb, error, requests: errors.append((verb, str(error), requests)))
    blocker = submit(router, reservation("first"))
    gate.wait()
    causes = iter(StoreUnavailable(f"down {number}") for number in range(99))
    tickets = submit(router, *(reservation(key) for key in "abc"))
    store.break_("reserve", lambda: next(causes), about=lambda batch: len(batch) == 3)
    store.break_("swap", lambda: StoreUnavailable("down too"))
    gate.open()
    for ticket in tickets:
        with pytest.raises(StoreUnavailable, match=r"^down 0$"):
            ticket.wait(PATIENCE)
    assert store.keys("reserve") == [["first"], ["a", "b", "c"], ["a", "b", "c"]]
    blocker[0].wait(PATIENCE)
    assert errors == [("reserve", "down 0", 3)], "the lane cannot undo them either, which is no second failure"


def test_the_next_batch_after_an_outage_works(open_lanes: Open) -> None:
    """A lane has no memory of a store that was down."""
    store = FakeStore()
    router = open_lanes(store)
    store.break_("reserve", lambda: StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        ask(router, reservation("a"))
    store.heal()
    wanted = reservation("b")
    assert owner_found(ask(router, wanted)) == wanted.owner


def test_schema_error_goes_to_the_whole_batch_at_once(open_lanes: Open) -> None:
    """SchemaError is no matter of one row: one statement, and everybody learns what to run."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    blocker = submit(router, reservation("first"))
    gate.wait()
    store.break_("reserve", lambda: SchemaError("run `oncekey migrate`"), about=lambda batch: len(batch) == 2)
    tickets = submit(router, reservation("a"), reservation("b"))
    gate.open()
    for ticket in tickets:
        with pytest.raises(SchemaError, match="oncekey migrate"):
            ticket.wait(PATIENCE)
    assert store.keys("reserve") == [["first"], ["a", "b"]]
    blocker[0].wait(PATIENCE)


# ---------------------------------------------------------------- a full queue


def test_a_full_queue_refuses_at_once(open_lanes: Open) -> None:
    """With three waiting already the fourth is refused without waiting, and works again when there is room."""
    store = FakeStore()
    router, gate = open_lanes(store, max_queued=3), store.hold("reserve")
    first = submit(router, reservation("first"))
    gate.wait()
    waiting = submit(router, *(reservation(key) for key in "abc"))
    with pytest.raises(StoreOverloaded, match="3 requests are waiting"):
        submit(router, reservation("d"))
    gate.open()
    for ticket in first + waiting:
        ticket.wait(PATIENCE)
    ask(router, reservation("d"))
    assert "d" not in store.keys("reserve")[1]


def test_a_full_queue_refuses_coroutines_too(open_lanes: Open) -> None:
    """The bound holds for callers that come in one turn of the event loop, before the lane has heard of any."""
    store = FakeStore()
    router, gate = open_lanes(store, max_queued=3), store.hold("reserve")

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        ends = []
        for number in range(10):
            ticket = AsyncTicket(reservation(f"key-{number}"), loop, loop.time() + PATIENCE)
            try:
                router.submit(ticket)
            except StoreOverloaded:
                ends.append("refused")
            else:
                ends.append("taken")
        gate.open()
        return ends

    ends = asyncio.run(main())
    assert ends.count("taken") <= 4
    assert ends[-1] == "refused"
