"""Lanes: which callers share a batch, which answer each gets, and what is done before the first."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

import pytest

from oncekey.core.record import Found, Record, StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.engine.batching.batch import MAX_BATCH, MAX_BATCH_BYTES
from oncekey.engine.batching.ticket import AsyncTicket, QuietTicket
from oncekey.errors import SchemaError, StoreUnavailable
from tests.engine.doubles import PATIENCE, RESPONSE, FakeStore, SharingStore, reservation
from tests.engine.lanes import Open, ask, owner_found, submit

# ---------------------------------------------------------------- batching


def test_callers_that_come_during_a_commit_are_the_next_batch(open_lanes: Open) -> None:
    """Callers that come while one batch is in the store wait, and share the next batch."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    first = submit(router, reservation("a"))
    gate.wait()
    others = submit(router, *(reservation(key) for key in "bcd"))
    gate.open()
    for ticket in first + others:
        ticket.wait(PATIENCE)
    assert store.keys("reserve") == [["a"], ["b", "c", "d"]]


def test_coroutines_of_one_turn_share_a_batch_and_get_their_own_answers(open_lanes: Open) -> None:
    """20 coroutines that ask in the same turn of the loop cost few statements, and each gets its own row."""
    store = FakeStore()
    router = open_lanes(store)
    wanted = [reservation(f"key-{number}") for number in range(20)]

    async def main() -> list[Found]:
        loop = asyncio.get_running_loop()
        tickets = [AsyncTicket(item, loop, loop.time() + PATIENCE) for item in wanted]
        for ticket in tickets:
            router.submit(ticket)
        return list(await asyncio.gather(*(ticket.future for ticket in tickets)))

    found = asyncio.run(main())
    assert [owner_found(answer) for answer in found] == [item.owner for item in wanted]
    assert sum(len(batch) for batch in store.asked("reserve")) == 20


def test_each_caller_gets_the_answer_to_its_own_question(open_lanes: Open) -> None:
    """Reservations, reads and swaps of different keys in one queue: each caller gets its own answer."""
    store = FakeStore()
    there = [store.put(reservation(key)) for key in ("w", "x", "y")]
    router, gate = open_lanes(store), store.hold("reserve")
    blocker = submit(router, reservation("first"))
    gate.wait()
    mine, theirs = reservation("new"), reservation("w")
    tickets = submit(
        router,
        ("tenant-1", "absent"),
        mine,
        swap(there[1], Event.COMPLETE, Actor.OWNER, response=RESPONSE),
        theirs,
        ("tenant-1", "y"),
        swap(replace(there[2], owner="stranger"), Event.COMPLETE, Actor.OWNER, response=RESPONSE),
    )
    gate.open()
    absent, new, completed, taken, read, refused = (ticket.wait(PATIENCE) for ticket in tickets)
    assert absent is None
    assert owner_found(new) == mine.owner
    assert (completed.key, completed.state) == ("x", State.COMPLETED)
    assert owner_found(taken) == there[0].owner != theirs.owner
    assert read.owner == there[2].owner
    assert refused is None
    blocker[0].wait(PATIENCE)


def test_two_callers_for_one_key_have_one_winner(open_lanes: Open) -> None:
    """The same new key twice in a batch: the store is asked once, both see the first one's token, so one owns it."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    blocker = submit(router, reservation("other"))
    gate.wait()
    one, two = reservation("hot"), reservation("hot")
    tickets = submit(router, one, reservation("cold"), two)
    gate.open()
    found = [ticket.wait(PATIENCE) for ticket in tickets]
    assert store.keys("reserve") == [["other"], ["hot", "cold"]]
    assert owner_found(found[0]) == owner_found(found[2]) == one.owner
    blocker[0].wait(PATIENCE)


def test_error_goes_to_all_callers_of_the_key(open_lanes: Open) -> None:
    """Callers that shared a row of the batch share its failure too: none is left with an empty answer."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    blocker = submit(router, reservation("other"))
    gate.wait()
    store.break_("reserve", lambda: StoreUnavailable("down"))
    tickets = submit(router, reservation("hot"), reservation("hot"))
    gate.open()
    for ticket in blocker + tickets:
        with pytest.raises(StoreUnavailable, match="down"):
            ticket.wait(PATIENCE)


def test_two_moves_of_one_key_are_two_rounds(open_lanes: Open) -> None:
    """A batch names a key once, so a renewal and a completion go one after the other, in the order of asking."""
    store = FakeStore()
    one, two = store.put(reservation("a")), store.put(reservation("b"))
    router, gate = open_lanes(store), store.hold("swap")
    blocker = submit(router, swap(two, Event.RENEW, Actor.OWNER, lease_seconds=5))
    gate.wait()
    tickets = submit(
        router,
        swap(one, Event.RENEW, Actor.OWNER, lease_seconds=5),
        swap(one, Event.COMPLETE, Actor.OWNER, response=RESPONSE),
        swap(two, Event.COMPLETE, Actor.OWNER, response=RESPONSE),
        swap(one, Event.RELEASE, Actor.OWNER),
    )
    gate.open()
    moved = [ticket.wait(PATIENCE) for ticket in tickets]
    assert store.keys("swap") == [["b"], ["a", "b"], ["a"], ["a"]]
    assert [row and row.state for row in moved] == [State.IN_PROGRESS, State.COMPLETED, State.COMPLETED, None]
    blocker[0].wait(PATIENCE)


def test_no_batch_is_larger_than_its_limit(open_lanes: Open) -> None:
    """700 callers that waited during one commit are answered in batches of at most MAX_BATCH, and none is forgotten."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("reserve")
    blocker = submit(router, reservation("first"))
    gate.wait()
    wanted = [reservation(f"key-{number}") for number in range(700)]
    tickets = submit(router, *wanted)
    gate.open()
    assert [owner_found(ticket.wait(PATIENCE)) for ticket in tickets] == [item.owner for item in wanted]
    sizes = [len(batch) for batch in store.asked("reserve")]
    assert max(sizes) == MAX_BATCH
    assert sizes == [1, 256, 256, 188]
    blocker[0].wait(PATIENCE)


def test_the_coroutines_of_one_turn_are_split_too(open_lanes: Open) -> None:
    """600 coroutines in one turn of the loop: no statement carries more than MAX_BATCH rows."""
    store = FakeStore()
    router = open_lanes(store)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tickets = [AsyncTicket(reservation(f"key-{number}"), loop, loop.time() + PATIENCE) for number in range(600)]
        for ticket in tickets:
            router.submit(ticket)
        await asyncio.gather(*(ticket.future for ticket in tickets))

    asyncio.run(main())
    sizes = [len(batch) for batch in store.asked("reserve")]
    assert sum(sizes) == 600
    assert max(sizes) <= MAX_BATCH


def test_large_bodies_are_not_sent_as_one_message(open_lanes: Open) -> None:
    """A batch ends with the body that takes it past MAX_BATCH_BYTES; bodies that were not kept weigh nothing."""
    store = FakeStore()
    large = StoredResponse(200, (), b"x" * (MAX_BATCH_BYTES // 2))
    tombstone = StoredResponse(200, (), None)
    rows = [store.put(reservation(key)) for key in "abcdefg"]
    router, gate = open_lanes(store), store.hold("swap")
    blocker = submit(router, swap(rows[0], Event.RENEW, Actor.OWNER, lease_seconds=5))
    gate.wait()
    responses = [large, tombstone, large, large, large, tombstone]
    tickets = submit(
        router,
        *(
            swap(row, Event.COMPLETE, Actor.OWNER, response=response)
            for row, response in zip(rows[1:], responses, strict=True)
        ),
    )
    gate.open()
    assert [ticket.wait(PATIENCE).state for ticket in tickets] == [State.COMPLETED] * 6
    assert store.keys("swap") == [["a"], ["b", "c", "d"], ["e", "f"], ["g"]]
    blocker[0].wait(PATIENCE)


def test_two_writers_reserve_and_swap_side_by_side(open_lanes: Open) -> None:
    """Where the store takes two writers, a reservation that hangs does not hold up a completion."""
    store = FakeStore(writers=2)
    row = store.put(reservation("done"))
    router, gate = open_lanes(store), store.hold("reserve")
    hung = submit(router, reservation("a"))
    gate.wait()
    moved = ask(router, swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    assert isinstance(moved, Record)
    assert moved.state is State.COMPLETED
    gate.open()
    hung[0].wait(PATIENCE)


@pytest.mark.parametrize("trouble", [None, "before", "after"])
def test_reservations_and_completions_share_a_commit(open_lanes: Open, trouble: str | None) -> None:
    """Where the store can; and where that fails, whether it had happened or not, each verb is asked by itself."""
    store = SharingStore()
    if trouble:
        store.break_("both", lambda: StoreUnavailable("cut"), applied=trouble == "after")
    router = open_lanes(store)
    found = ask(router, reservation("a"))
    assert isinstance(found, Found)
    assert found.record is not None
    gate = store.hold("read")
    held = submit(router, ("tenant-1", "a"))
    gate.wait()
    end = swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
    wanted = reservation("b")
    begun, ended = submit(router, wanted, end)
    gate.open()
    held[0].wait(PATIENCE)
    assert owner_found(begun.wait(PATIENCE)) == wanted.owner
    moved = ended.wait(PATIENCE)
    assert store.keys("both") == [["a", "b"]]
    assert len(store.asked("reserve")) == (2 if trouble else 1)
    assert len(store.asked("swap")) == (1 if trouble else 0)
    row = store.row("a")
    assert row is not None
    assert row.state is State.COMPLETED
    assert (moved is None) == (trouble == "after"), "moved before: its owner reads the row, and finds its own response"


def test_one_writer_is_one_thread(open_lanes: Open) -> None:
    """Where the store takes one writer, reserve, swap and read run in one thread, not the caller's."""
    store = FakeStore()
    router = open_lanes(store)
    found = ask(router, reservation("a"))
    assert isinstance(found, Found)
    assert found.record is not None
    ask(router, swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    ask(router, ("tenant-1", "a"))
    assert store.threads == {"oncekey-lane"}
    assert sum(thread.name == "oncekey-lane" and thread.is_alive() for thread in threading.enumerate()) >= 1


# ---------------------------------------------------------------- preparing


@pytest.mark.parametrize("writers", [1, 2])
def test_preparing_happens_once_before_the_first_batch(open_lanes: Open, writers: int) -> None:
    """Migrations run in the first lane that gets there, before anything is asked, and never again."""
    store = FakeStore(writers=writers)
    row = store.put(reservation("there"))
    order: list[str] = []
    router = open_lanes(store, prepare=lambda: order.append(f"prepared before {len(store.batches)} batches"))
    tickets = submit(router, reservation("a"), swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    for ticket in tickets:
        ticket.wait(PATIENCE)
    ask(router, reservation("b"))
    assert len(order) == 1
    if writers == 1:
        assert order == ["prepared before 0 batches"]


def test_the_other_lane_waits_for_the_preparation(open_lanes: Open) -> None:
    """A second lane asks the store nothing while the first still migrates."""
    store = FakeStore(writers=2)
    row = store.put(reservation("there"))
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def prepare() -> None:
        calls.append(1)
        begun.set()
        assert go_on.wait(PATIENCE)
        assert store.batches == []

    router = open_lanes(store, prepare=prepare)
    tickets = submit(router, reservation("a"))
    assert begun.wait(PATIENCE)
    tickets += submit(router, swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    go_on.set()
    for ticket in tickets:
        ticket.wait(PATIENCE)
    assert calls == [1]


def test_preparing_that_failed_is_tried_again(open_lanes: Open) -> None:
    """If a migration fails, its caller gets the error, and no batch is sent. It runs again for the next caller."""
    store = FakeStore()
    outcomes: list[Exception | None] = [SchemaError("newer"), StoreUnavailable("a"), StoreUnavailable("b"), None]

    def prepare() -> None:
        if error := outcomes.pop(0):
            raise error

    router = open_lanes(store, prepare=prepare)
    with pytest.raises(SchemaError):
        ask(router, ("tenant-1", "a"))
    with pytest.raises(StoreUnavailable, match=r"^a$"):
        ask(router, ("tenant-1", "a"))
    assert store.batches == []
    assert ask(router, ("tenant-1", "a")) is None
    assert outcomes == []


# ---------------------------------------------------------------- quiet tickets


def test_a_quiet_ticket_tells_its_function(open_lanes: Open) -> None:
    """Work without a waiting caller hands its result, or its error, to a function; without one it is simply done."""
    store = FakeStore()
    row = store.put(reservation("a"))
    router = open_lanes(store)
    told: list[tuple[object, object]] = []
    router.submit(QuietTicket(("tenant-1", "a"), lambda done: told.append((done.result.owner, done.error))))
    router.submit(QuietTicket(swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE)))
    assert router.close(PATIENCE)
    assert told == [(row.owner, None)]
    done = store.row("a")
    assert done is not None
    assert done.state is State.COMPLETED


def test_function_of_a_quiet_ticket_that_raises_is_logged(open_lanes: Open, caplog: pytest.LogCaptureFixture) -> None:
    """What a quiet ticket's function raises is logged, and the next caller of the same batch is answered."""
    store = FakeStore()
    router, gate = open_lanes(store), store.hold("read")

    def broken(done: object) -> None:
        raise RuntimeError("in the function")

    blocker = submit(router, ("tenant-1", "x"))
    gate.wait()
    router.submit(QuietTicket(("tenant-1", "a"), broken))
    (after,) = submit(router, ("tenant-1", "b"))
    with caplog.at_level(logging.ERROR, "oncekey"):
        gate.open()
        assert after.wait(PATIENCE) is None
    assert "could not be delivered to its caller" in caplog.text
    blocker[0].wait(PATIENCE)
